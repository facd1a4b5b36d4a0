"""Every method at its own best learning rate, and what seeds say of a difference.

    start (rates of each method) ──► runs of all seeds ──► best rate at the edge of what was tried?
                 ▲                                                        │ yes
                 └─────────────────── one rate further ◄──────────────────┘

What is compared is then a mean over seeds with its 95% interval (Student's t, which for three seeds
is 2.5 times their standard deviation), and a claim "x lies between low and high" has one of three
verdicts: the whole interval does, no part of it does, or neither can be said (seeds.within).
"""

import math
from collections.abc import Callable
from statistics import fmean

from experiments.runs import Run, run_all
from experiments.seeds import WORDS, within

SEEDS = (0, 1, 2)
GRID = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
FURTHER = 1  # times that a sweep may grow


def sweep(
    start: dict[str, tuple[float, ...]],
    command: Callable[[str, float, int], tuple[str, ...]],
    row: Callable[[Run], dict],
    better: Callable[[list[dict]], float],
    seeds: tuple[int, ...],
    jobs: int,
    further: int = FURTHER,
) -> list[dict]:
    """Rows {"method", "rate", "seed", **row(run)} of each method at its rates of `start`, and,
    `further` times at most, at one more of GRID while the best is the lowest or highest tried.

    command: (method, rate, seed) -> a run's arguments. better: the rate of the best rows.
    """
    tried = dict(start)
    for attempt in range(further + 1):
        cells = [(m, rate, seed) for seed in seeds for m, rates in tried.items() for rate in rates]
        rows = rows_of(cells, command, row, jobs)
        for method in tried if attempt < further else ():
            place = GRID.index(better(of(rows, method=method)))
            tried[method] = tuple(sorted({*tried[method], *GRID[max(0, place - 1) : place + 2]}))
        if sum(map(len, tried.values())) * len(seeds) == len(cells):
            break
    return rows


def rows_of(cells: list[tuple[str, float, int]], command, row, jobs: int) -> list[dict]:
    """The rows of these (method, rate, seed)."""
    runs = run_all([command(*cell) for cell in cells], jobs)
    return [
        {"method": method, "rate": rate, "seed": seed, **row(run)}
        for (method, rate, seed), run in zip(cells, runs, strict=True)
    ]


def of(rows: list[dict], **wanted) -> list[dict]:
    """The rows that have these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def values(rows: list[dict], key: str) -> list[float]:
    return [row[key] for row in rows]


def methods(rows: list[dict]) -> list[str]:
    return list(dict.fromkeys(row["method"] for row in rows))


def rates(rows: list[dict]) -> list[float]:
    return sorted({row["rate"] for row in rows})


def told_rate(rows: list[dict], rate: float) -> str:
    """A best rate for a table, with a mark where no rate beyond it was tried."""
    tried = rates(rows)
    return f"{rate:g}{' (an edge)' if rate in (tried[0], tried[-1]) else ''}"


def mean_at(rows: list[dict], key: str) -> dict[float, float]:
    """rate -> mean over seeds."""
    return {rate: fmean(values(of(rows, rate=rate), key)) for rate in rates(rows)}


def highest(key: str) -> Callable[[list[dict]], float]:
    """The rate of the highest mean over seeds."""
    return lambda rows: max(means := mean_at(rows, key), key=means.get)


def lowest(key: str) -> Callable[[list[dict]], float]:
    return lambda rows: min(means := mean_at(rows, key), key=means.get)


# --- what seeds say -------------------------------------------------------------------------------


def judge(values: list[float], low: float = -math.inf, high: float = math.inf) -> str:
    """Whether the mean lies between low and high, by its interval."""
    return WORDS[within(values, low, high)]


Claims = dict[str, tuple[str, str]]  # claim -> (verdict, the number that it follows from)


def together(claims: Claims) -> tuple[str, str]:
    """The verdict on several claims: agrees if all do, disagrees if one does."""
    words = [word for word, _ in claims.values()]
    others = [f"{word}: {claim}" for claim, (word, _) in claims.items() if word != "agrees"]
    word = next((word for word in ("disagrees", "undecided") if word in words), "agrees")
    why = f"{words.count('agrees')} of {len(words)} claims agree"
    return word, f"{'; '.join([why, *others])}."


def claims_table(claims: Claims) -> str:
    lines = ["| claim | measured | verdict |", "|---|---|---|"]
    lines += [f"| {claim} | {number} | {word} |" for claim, (word, number) in claims.items()]
    return "\n".join(lines) + "\n\n"
