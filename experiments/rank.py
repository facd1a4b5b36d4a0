"""Rank in RL: does an adapter of rank 1 end where full fine-tuning does?

    python -m experiments rank

Ranks 1 to 32 and all weights, each at the best of several learning rates (sweep.py), by the mean of
three seeds; all else as in the default job but shorter. Beside the rewards the argument why rank 1
may suffice: a run can learn no more than its rewards tell, and a parameter can hold about two bits.
"""

from statistics import fmean

from matplotlib.figure import Figure

from experiments.runs import Run
from experiments.seeds import NOTE, interval, told
from experiments.sweep import (
    SEEDS,
    highest,
    judge,
    methods,
    of,
    sweep,
    told_rate,
    values,
)

MINUTES = 12
MARGIN = 0.05  # of held-out reward, that rank 1 may lack
LEARNED = 0.3  # that both must gain, or there is nothing to compare
HELD = 2.0  # bits a parameter, after Allen-Zhu and Li
QUESTIONS = 132  # held out
FURTHER = 2  # times that the sweep may grow
RATES = {
    "rank 1": (1e-3, 3e-3),
    "rank 2": (1e-3, 3e-3),
    "rank 8": (1e-3, 3e-3),
    "rank 32": (1e-3, 3e-3),
    "full": (1e-4, 3e-4),
}
COLOURS = {
    "rank 1": "#08519c",
    "rank 2": "#4292c6",
    "rank 8": "#2ca25f",
    "rank 32": "#8c6bb1",
    "full": "#d95f0e",
}
choose = highest("held_out")


def length(quick: bool) -> tuple[int, int, int]:
    """Steps, groups a step, episodes a group: a fifth of the default job's episodes."""
    return (3, 4, 4) if quick else (10, 8, 8)


def train(method: str, rate: float, seed: int, quick: bool) -> tuple[str, ...]:
    """The command of a run of "rank 8" or "full"."""
    trained = ("--full",) if method == "full" else ("--rank", method.removeprefix("rank "))
    return train_flags(trained, rate, seed, quick)


def train_flags(trained: tuple[str, ...], rate: float, seed: int, quick: bool) -> tuple[str, ...]:
    steps, groups, group_size = map(str, length(quick))
    return (
        *("train.py", *trained, "--lr", f"{rate:g}", "--seed", str(seed), "--steps", steps),
        *("--groups", groups, "--group-size", group_size),
        *("--eval-size", "24" if quick else str(QUESTIONS)),
    )


def outcome(run: Run) -> dict:
    """What the result file keeps of a run. One that too high a rate has stopped earns 0, and has
    0 parameters and 0 before, which stand for not known."""
    return {
        "held_out": round(run.held_out, 4),
        "before": round(run.summary.get("eval_before", 0.0), 4),
        "parameters": run.summary.get("adapter_parameters")
        or run.summary.get("base_parameters", 0),
        "reward": [round(row["reward"], 4) for row in run.rows],
        "reward_bits": [round(row["reward_bits"], 4) for row in run.rows],
    }


def swept(quick: bool, jobs: int) -> list[dict]:
    """The rows of all runs: every method at every rate with every seed. learning_rate.py and
    capacity.py read the same ones."""
    start = {method: RATES[method] for method in ("rank 1", "full")} if quick else RATES
    seeds, further = (SEEDS[:1], 0) if quick else (SEEDS, FURTHER)

    def command(method: str, rate: float, seed: int) -> tuple[str, ...]:
        return train(method, rate, seed, quick)

    return sweep(start, command, outcome, choose, seeds, jobs, further)


def measure(quick: bool, jobs: int) -> dict:
    _, groups, group_size = length(quick)
    return {"episodes_a_step": groups * group_size, "runs": swept(quick, jobs)}


def at_best(rows: list[dict], method: str) -> list[dict]:
    """All seeds of a method, at the rate with the best mean."""
    mine = of(rows, method=method)
    return of(mine, rate=choose(mine))


def before_training(rows: list[dict]) -> float:
    """Held-out reward of the base, the same for all runs; one that was stopped does not tell it."""
    return max(values(rows, "before"))


def bits(row: dict, episodes_a_step: int) -> float:
    """What the rewards of a run carried."""
    return sum(row["reward_bits"]) * episodes_a_step


def verdict(result: dict) -> tuple[str, str]:
    one, full = (at_best(result["runs"], method) for method in ("rank 1", "full"))
    gaps = [a - b for a, b in zip(values(one, "held_out"), values(full, "held_out"), strict=True)]
    before = before_training(result["runs"])
    gains = [fmean(values(rows, "held_out")) - before for rows in (one, full)]
    learned = min(gains) >= LEARNED
    return (
        judge(gaps, low=-MARGIN) if learned else "undecided",
        f"Rank 1 less full fine-tuning, held out: {told(gaps, '+.3f')} over {len(gaps)} seeds, "
        f"where -{MARGIN} was allowed; they gained {gains[0]:.2f} and {gains[1]:.2f}.",
    )


def table(result: dict) -> str:
    lines = [
        "| trained | parameters | best rate | held out | last quarter of training | "
        "bits its rewards carried | bits it could hold at 2 a parameter | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method in methods(result["runs"]):
        rows = at_best(result["runs"], method)
        last = [fmean(row["reward"][-len(row["reward"]) // 4 :]) for row in rows]
        carried = [bits(row, result["episodes_a_step"]) for row in rows]
        parameters = max(values(rows, "parameters"))
        rate = told_rate(of(result["runs"], method=method), rows[0]["rate"])
        lines.append(
            f"| {method} | {parameters:,} | {rate} | {told(values(rows, 'held_out'))} "
            f"| {told(last)} | {told(carried, ',.0f')} | {HELD * parameters:,.0f} | {len(rows)} |"
        )
    before = before_training(result["runs"])
    episodes = result["episodes_a_step"] * len(result["runs"][0]["reward"])
    return "\n".join(lines) + (
        f"\n\n{NOTE} Rates: by the mean of all seeds. Held out: greedy, {before:.3f} "
        f"before training. A run has {episodes:,} episodes, so at most {episodes:,} bits."
    )


def smooth(curve: list[float], width: int = 3) -> list[float]:
    """A running mean, of the steps around each that there are."""
    half = width // 2
    return [fmean(curve[max(0, i - half) : i + half + 1]) for i in range(len(curve))]


def draw(result: dict) -> Figure:
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    curves, ends, information = figure.subplots(1, 3, width_ratios=(1.5, 1, 1.1))
    names = methods(result["runs"])
    before = before_training(result["runs"])
    for place, method in enumerate(names):
        rows, colour = at_best(result["runs"], method), COLOURS[method]
        seeds = [smooth(row["reward"]) for row in rows]
        steps = range(1, len(seeds[0]) + 1)
        means = [fmean(at_step) for at_step in zip(*seeds, strict=True)]
        alone = len(rows) == 1
        label = f"{method}, lr {rows[0]['rate']:g}{', one seed' if alone else ''}"
        curves.plot(steps, means, "--" if alone else "-", color=colour, label=label, lw=2)
        low, high = (list(map(edge, zip(*seeds, strict=True))) for edge in (min, max))
        curves.fill_between(steps, low, high, color=colour, alpha=0.12, lw=0)
        mean, half = interval(values(rows, "held_out"))
        ends.errorbar(place, mean, 0 if alone else half, fmt="o", color=colour, capsize=4)
        ends.plot([place] * len(rows), values(rows, "held_out"), "_", color=colour, ms=10)
        capacity = HELD * max(values(rows, "parameters"))
        carried = fmean(bits(row, result["episodes_a_step"]) for row in rows)
        information.barh(place, capacity, color=colour, alpha=0.35)
        information.barh(place, carried, color=colour)
    curves.set(xlabel="step", ylabel="reward of the step's episodes", ylim=(0, 1.02))
    curves.set_title("reward: mean of seeds, from lowest to highest")
    curves.legend(loc="lower right", fontsize=8)
    ends.axhline(before, color="gray", ls="--", lw=1)
    ends.annotate("base", (0, before), (0, 4), textcoords="offset points", color="gray")
    ends.set(xticks=range(len(names)), xticklabels=names, ylim=(0.3, 1.02))
    ends.tick_params(axis="x", rotation=30)
    ends.set_title("held out: seeds, and their 95%")
    information.set(xscale="log", xlim=(10, None), yticks=range(len(names)), yticklabels=names)
    information.set(xlabel="bits", title="carried by rewards; 2 a parameter (light)")
    information.invert_yaxis()
    for axis in (curves, ends):
        axis.grid(alpha=0.3)
    return figure
