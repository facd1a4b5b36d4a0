"""Capacity: how many bits an adapter holds, and how few reinforcement learning asks it to hold.

    python -m experiments capacity

A fact is a person and WORDS words drawn for them at random, so that nothing but memory helps:

    Ada Adler ──► LarchSlateHollyMuraEmberVioletRobinVoltaCopperVoltaEagleLinden...

`sft.py` learns a list of facts, and what it has stored is the list's entropy less what the model
still has to be told, its loss on that list. Lists of one size meet adapters of several ranks (how
much more does twice the rank store?), and one adapter and full fine-tuning meet a list in batches
of two sizes.
"""

import json
import math
import os
import random
from itertools import product
from statistics import fmean

from matplotlib.figure import Figure

from assets import wiki
from experiments import rank
from experiments.runs import ROOT, RUNS, Run, run_all
from experiments.seeds import interval, told
from experiments.sweep import (
    FURTHER,
    SEEDS,
    Claims,
    claims_table,
    judge,
    lowest,
    of,
    rows_of,
    sweep,
    together,
    values,
)

MINUTES = 22
WORDS = 16
CHOICES = sorted({head for heads, _ in wiki.NAMES.values() for head in heads})  # a token each
BITS = WORDS * math.log2(len(CHOICES))  # of a fact
TOKENS = WORDS + 1  # that carry loss: the words and the end of the turn

FACTS, BATCH = 256, 32
RANKS, RATE, EPOCHS = (1, 2, 4), 3e-3, 160  # on all facts
BATCHES, BATCH_FACTS, BATCH_EPOCHS = (8, 32), 64, 16  # facts a step, of so many
BATCH_RATES = {"rank 8": (3e-3, 1e-2), "full": (1e-3, 3e-3)}
GROWTH = 1.5  # in bits, by twice the rank
choose = lowest("loss")
# Of a run that a non-finite number has stopped, nats a token: no better than guessing any token.
VOCABULARY = json.loads((ROOT / "assets" / "tiny-qwen3" / "config.json").read_text())["vocab_size"]
STOPPED = round(math.log(VOCABULARY), 5)


def write_facts(number: int, seed: int) -> str:
    """A file of facts for sft.py, by its path from the project's root; the same for a seed."""
    rng = random.Random(f"facts {seed}")
    heads, tails = wiki.NAMES["person"]
    people = rng.sample([f"{head} {tail}" for head, tail in product(heads, tails)], number)
    file = RUNS / f"facts-{number}-seed{seed}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": p, "completion": "".join(rng.choices(CHOICES, k=WORDS))} for p in people]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return os.path.relpath(file, ROOT)


def memorise(
    trained: tuple[str, ...], rate: float, seed: int, facts: int, epochs: int, batch: int
) -> tuple[str, ...]:
    """The command of a run that learns facts; it validates on the same: what has it kept?"""
    file, steps = write_facts(facts, seed), str(facts * epochs // batch)
    return (
        *("sft.py", *trained, "--lr", f"{rate:g}", "--seed", str(seed), "--data", file),
        *("--eval-data", file, "--eval-every", "0", "--batch-size", str(batch)),
        *("--steps", steps, "--save-every", steps),
    )


def stored(loss: float, facts: int) -> float:
    """Bits, from the loss in nats a token; 0 for a model that guesses worse than uniformly."""
    return max(0.0, facts * (BITS - loss * TOKENS / math.log(2)))


def loss_after(run: Run) -> float:
    return round(run.summary["loss_after"], 5) if run.summary else STOPPED


def outcome(run: Run) -> dict:
    """What the result file keeps: the loss on all facts after training, and by epochs during it.
    A run that was stopped has 0 parameters, which stands for not known, and no epochs."""
    if not run.summary:
        return {"loss": STOPPED, "parameters": 0, "epochs": []}
    losses = [row["loss"] for row in run.rows]
    each = round(1 / run.rows[0]["epoch"])  # steps an epoch
    return {
        "loss": loss_after(run),
        "parameters": run.summary["adapter_parameters"] or run.summary["base_parameters"],
        "epochs": [round(fmean(losses[i : i + each]), 4) for i in range(0, len(losses), each)],
    }


def fill(quick: bool, jobs: int) -> list[dict]:
    """Adapters of every rank, trained for long on the same facts."""
    ranks, seeds = (RANKS[:2], SEEDS[:1]) if quick else (RANKS, SEEDS)
    cells = [(r, seed) for seed in seeds for r in ranks]
    epochs = 4 if quick else EPOCHS
    commands = [memorise(("--rank", str(r)), RATE, seed, FACTS, epochs, BATCH) for r, seed in cells]
    return [
        {"rank": r, "seed": seed, **outcome(run)}
        for (r, seed), run in zip(cells, run_all(commands, jobs), strict=True)
    ]


def by_batch(quick: bool, jobs: int) -> list[dict]:
    """Rank 8 and full fine-tuning on batches of several sizes: every rate by the first seed, the
    best by all."""
    start = {
        f"{method}, batch {batch}": BATCH_RATES[method][: 1 if quick else None]
        for batch, method in product(BATCHES, BATCH_RATES)
    }

    def command(name: str, rate: float, seed: int) -> tuple[str, ...]:
        method, _, batch = name.partition(", batch ")
        return in_batches(method, rate, seed, int(batch), quick)

    rows = sweep(start, command, outcome, choose, SEEDS[:1], jobs, 0 if quick else FURTHER)
    cells = [
        (name, choose(of(rows, method=name)), seed)
        for seed in (SEEDS[:0] if quick else SEEDS[1:])
        for name in start
    ]
    return rows + rows_of(cells, command, outcome, jobs)


def in_batches(
    method: str, rate: float, seed: int, batch: int, quick: bool, *more: str
) -> tuple[str, ...]:
    """The command of a run of "rank 8" or "full" on few facts, the same number of epochs."""
    trained = ("--full",) if method == "full" else ("--rank", method.removeprefix("rank "))
    epochs = 2 if quick else BATCH_EPOCHS
    return memorise((*trained, *more), rate, seed, BATCH_FACTS, epochs, batch)


def rewarded(quick: bool, jobs: int) -> list[float]:
    """Bits that the rewards of RL runs at rank 1 carried, those of rank.py."""
    _, groups, group_size = rank.length(quick)
    rows = rank.at_best(rank.swept(quick, jobs), "rank 1")
    return [round(rank.bits(row, groups * group_size), 1) for row in rows]


def measure(quick: bool, jobs: int) -> dict:
    filled, batches = fill(quick, jobs), by_batch(quick, jobs)
    return {
        "facts": FACTS,
        "filled": filled,
        "by_batch": batches,
        "rl_episodes": math.prod(rank.length(quick)),
        "rl_bits": rewarded(quick, jobs),
    }


def bits_of(rows: list[dict], facts: int) -> list[float]:
    return [stored(row["loss"], facts) for row in rows]


def curves(rows: list[dict]) -> list[list[float]]:
    """Losses by epochs, of the runs that were not stopped."""
    return [row["epochs"] for row in rows if row["epochs"]]


def parameters_of(rows: list[dict]) -> int:
    """Of the same adapter in several runs; 1 if all were stopped."""
    return max(*values(rows, "parameters"), 1)


def still_growing(rows: list[dict], facts: int) -> float:
    """Share of what is stored that the last quarter of the training added, by its epochs' losses:
    near 0 for an adapter that is full."""
    kept = [[stored(loss, facts) for loss in losses] for losses in curves(rows)]
    shares = [1 - curve[3 * len(curve) // 4 - 1] / max(curve[-1], 1.0) for curve in kept]
    return fmean(shares) if shares else math.nan


def batch_gaps(result: dict) -> dict[int, list[float]]:
    """Batch size -> for each seed the loss of the adapter less that of full fine-tuning, nats a
    token, each at its best rate."""
    rows, gaps = result["by_batch"], {}
    for batch in sorted({int(row["method"].rpartition(" ")[2]) for row in rows}):
        adapter, full = (at_best(rows, f"{m}, batch {batch}") for m in ("rank 8", "full"))
        losses = zip(values(adapter, "loss"), values(full, "loss"), strict=True)
        gaps[batch] = [a - b for a, b in losses]
    return gaps


def at_best(rows: list[dict], method: str) -> list[dict]:
    rows = of(rows, method=method)
    return of(rows, rate=choose(of(rows, seed=SEEDS[0])))


def claims(result: dict) -> Claims:
    facts, filled = result["facts"], result["filled"]
    ranks = sorted({row["rank"] for row in filled})
    by_rank = {r: bits_of(of(filled, rank=r), facts) for r in ranks}
    doubled = [b / max(a, 1.0) for a, b in zip(by_rank[ranks[0]], by_rank[ranks[1]], strict=True)]
    asked = [a / max(b, 1.0) for a, b in zip(result["rl_bits"], by_rank[ranks[0]], strict=True)]
    gaps = batch_gaps(result)
    widening = [b - a for a, b in zip(gaps[min(gaps)], gaps[max(gaps)], strict=True)]
    return {
        f"rank {ranks[1]} stores over {GROWTH} times what rank {ranks[0]} does": (
            judge(doubled, low=GROWTH),
            told(doubled, ".2f"),
        ),
        "RL asks rank 1 for less than a quarter of what it stored": (
            judge(asked, high=0.25),
            told(asked, ".2f"),
        ),
        f"LoRA falls further behind at batch {max(gaps)} than at batch {min(gaps)}": (
            judge(widening, low=0.0),
            f"by {told(widening, '+.2f')} nats a token",
        ),
    }


def verdict(result: dict) -> tuple[str, str]:
    return together(claims(result))


def table(result: dict) -> str:
    facts = result["facts"]
    lines = [
        "| rank | parameters | stored, of "
        f"{facts * BITS / 1000:.1f} kbit | bits a parameter | added by the last quarter |",
        "|---|---|---|---|---|",
    ]
    for r in sorted({row["rank"] for row in result["filled"]}):
        rows = of(result["filled"], rank=r)
        kept, parameters = bits_of(rows, facts), parameters_of(rows)
        lines.append(
            f"| {r} | {parameters:,} | {told([bits / 1000 for bits in kept], '.2f')} kbit | "
            f"{told([bits / parameters for bits in kept])} | {still_growing(rows, facts):.1%} |"
        )
    carried = result["rl_bits"]
    lines += [
        f"| 1, by RL: {result['rl_episodes']:,} episodes | | at most "
        f"{told([bits / 1000 for bits in carried], '.2f')} kbit | | |",
        "",
        "| facts a step | trained | best rate | loss on the facts, nats a token | LoRA less full |",
        "|---|---|---|---|---|",
    ]
    gaps = batch_gaps(result)
    for batch, method in product(gaps, ("full", "rank 8")):
        rows = at_best(result["by_batch"], f"{method}, batch {batch}")
        gap = told(gaps[batch], "+.2f") if method != "full" else ""
        losses = told(values(rows, "loss"), ".2f")
        lines.append(f"| {batch} | {method} | {rows[0]['rate']:g} | {losses} | {gap} |")
    return (
        claims_table(claims(result))
        + "\n".join(lines)
        + "\n\nIntervals: 95% over seeds (Student's t), each with a list of facts of its own. Bits "
        "are lower bounds of what an adapter can hold. Every batch size has the same epochs."
    )


def draw(result: dict) -> Figure:
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    learning, densities, batches = figure.subplots(1, 3, width_ratios=(1.4, 1, 1))
    facts, colours = result["facts"], ("#08519c", "#4292c6", "#35978f", "#2ca25f")
    total = facts * BITS / 1000
    ranks = sorted({row["rank"] for row in result["filled"]})
    for r, colour in zip(ranks, colours, strict=False):
        rows = of(result["filled"], rank=r)
        means = [fmean(losses) for losses in zip(*curves(rows), strict=True)]
        kept = [stored(loss, facts) / 1000 for loss in means]
        learning.plot(range(1, len(kept) + 1), kept, color=colour, lw=2, label=f"rank {r}")
        mean, half = interval([b / parameters_of(rows) for b in bits_of(rows, facts)])
        densities.bar(f"{r}", mean, color=colour, yerr=min(half, mean), capsize=4)
    carried = fmean(result["rl_bits"])
    learning.axhline(total, color="gray", ls="--", lw=1, label="all facts")
    learning.axhline(carried / 1000, color="black", ls=":", lw=1.5, label="rewards of an RL run")
    learning.set(xlabel="epoch", ylabel="kbit stored", title="facts learned by each rank")
    learning.set(ylim=(0, 1.08 * total))
    learning.legend(fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 0.03), ncols=2)
    first = parameters_of(of(result["filled"], rank=ranks[0]))
    densities.bar("RL\n(rank 1)", carried / first, color="black")
    densities.set(xlabel="rank", title="bits a parameter, 95% over seeds")
    for method, colour in (("full", "#d95f0e"), ("rank 8", "#2ca25f")):
        sizes = list(batch_gaps(result))
        points = [
            interval(values(at_best(result["by_batch"], f"{method}, batch {batch}"), "loss"))
            for batch in sizes
        ]
        batches.errorbar(
            *(sizes, [mean for mean, _ in points], [min(half, mean) for mean, half in points]),
            **{"fmt": "o-", "color": colour, "label": method, "capsize": 4},
        )
    batches.set(xscale="log", xticks=sizes, xticklabels=sizes, xlabel="facts a step")
    batches.minorticks_off()
    batches.set(ylabel="loss on the facts, nats a token", title="after the same epochs")
    batches.legend(fontsize=8)
    for axis in (learning, densities, batches):
        axis.grid(alpha=0.3)
    return figure
