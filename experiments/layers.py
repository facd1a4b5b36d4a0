"""Which layers: attention alone, MLPs alone, or all, at equal numbers of trained parameters.

    python -m experiments layers

Two tasks: random facts (capacity.py), which ask an adapter for all that it can learn, and the
default job's RL, as short as in rank.py. Each once for the dense base, and once for a mixture of
experts made of it, where the MLPs are four experts a layer.

Bits are compared by the logarithm of their ratio, seed by seed: twice and half are equally far from
equal, and its interval is that of a factor. Rewards are compared by their difference.
"""

import math
import os
import shutil
from itertools import product
from statistics import fmean

from matplotlib.figure import Figure

from assets.make_tiny_moe import upcycle
from experiments import capacity, rank
from experiments.runs import ROOT, RUNS, run_all
from experiments.seeds import NOTE, interval, times, told
from experiments.sweep import SEEDS, Claims, claims_table, judge, of, together, values

MINUTES = 9
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MIXTURE = RUNS / "tiny-qwen3-moe"
MOE = os.path.relpath(MIXTURE, ROOT)
# (model, where) -> flags; an adapter of the dense base has 17,900 to 19,500 parameters, one of the
# mixture 24,600 to 28,200: whole ranks come no closer.
PLACES = {
    ("dense", "attention"): ("--rank", "5", "--target-modules", *ATTENTION),
    ("dense", "MLPs"): ("--rank", "3", "--target-modules", *MLP),
    ("dense", "all"): ("--rank", "2"),
    ("mixture", "attention"): ("--model", MOE, "--rank", "7", "--target-modules", *ATTENTION),
    ("mixture", "experts"): ("--model", MOE, "--rank", "1", "--target-modules", "experts"),
    ("mixture", "all"): ("--model", MOE, "--rank", "1"),
}
MLP_OF = {"dense": "MLPs", "mixture": "experts"}
COLOURS = {"attention": "#d95f0e", "MLPs": "#3182bd", "experts": "#3182bd", "all": "#636363"}
RATE = 3e-3
ADDS = math.log10(1.25)  # more bits than the MLPs store alone, that attention may add to them


def measure(quick: bool, jobs: int) -> dict:
    make_mixture()
    cells = list(product(PLACES, SEEDS[:1] if quick else SEEDS))
    return {"runs": memorised(cells, quick, jobs), "rl": reinforced(cells, quick, jobs)}


Cells = list[tuple[tuple[str, str], int]]  # ((model, where), seed)


def memorised(cells: Cells, quick: bool, jobs: int) -> list[dict]:
    epochs = 2 if quick else capacity.BATCH_EPOCHS
    lists = (capacity.BATCH_FACTS, epochs, capacity.BATCHES[0])
    commands = [capacity.memorise(PLACES[place], RATE, seed, *lists) for place, seed in cells]
    return [
        {"model": model, "where": where, "seed": seed, **capacity.outcome(run)}
        for ((model, where), seed), run in zip(cells, run_all(commands, jobs), strict=True)
    ]


def reinforced(cells: Cells, quick: bool, jobs: int) -> list[dict]:
    commands = [rank.train_flags(PLACES[place], RATE, seed, quick) for place, seed in cells]
    return [
        {"model": model, "where": where, "seed": seed, **rank.outcome(run)}
        for ((model, where), seed), run in zip(cells, run_all(commands, jobs), strict=True)
    ]


def make_mixture() -> None:
    """Always anew, in a second, and always the same: never what somebody else has left there."""
    shutil.rmtree(MIXTURE, ignore_errors=True)
    upcycle(ROOT / "assets" / "tiny-qwen3", MIXTURE, 4, 2, seed=0)


def bits(rows: list[dict]) -> list[float]:
    return capacity.bits_of(rows, capacity.BATCH_FACTS)


def log_ratios(rows: list[dict], where: str, other: str) -> list[float]:
    """log10 of how many times the bits of another choice one stores, by seed; a bit at least."""
    ours, theirs = (bits(of(rows, where=place)) for place in (where, other))
    return [math.log10(max(a, 1.0) / max(b, 1.0)) for a, b in zip(ours, theirs, strict=True)]


def claims(result: dict) -> Claims:
    judged = {}
    for model, mlp in MLP_OF.items():
        rows = of(result["runs"], model=model)
        more, added = log_ratios(rows, mlp, "attention"), log_ratios(rows, "all", mlp)
        judged[f"{model}: {mlp} store more facts than attention"] = (
            judge(more, low=0.0),
            f"{times(more)} times",
        )
        judged[f"{model}: attention adds less than a quarter to what {mlp} store"] = (
            judge(added, high=ADDS),
            f"all store {times(added)} times as much",
        )
        rows = of(result["rl"], model=model)
        ours, theirs = (values(of(rows, where=place), "held_out") for place in (mlp, "attention"))
        more = [a - b for a, b in zip(ours, theirs, strict=True)]
        judged[f"{model}: {mlp} end above attention in RL"] = (
            judge(more, low=0.0),
            f"by {told(more, '+.3f')}",
        )
    return judged


def verdict(result: dict) -> tuple[str, str]:
    return together(claims(result))


def table(result: dict) -> str:
    lines = [
        "| model | adapted | parameters | facts stored | bits a parameter | RL: held out |",
        "|---|---|---|---|---|---|",
    ]
    for model, where in dict.fromkeys((row["model"], row["where"]) for row in result["runs"]):
        rows = of(result["runs"], model=model, where=where)
        kept, parameters = bits(rows), capacity.parameters_of(rows)
        earned = values(of(result["rl"], model=model, where=where), "held_out")
        total = capacity.BATCH_FACTS * capacity.BITS / 1000
        lines.append(
            f"| {model} | {where} | {parameters:,} | {told([b / 1000 for b in kept], '.2f')} of "
            f"{total:.1f} kbit | {told([b / parameters for b in kept])} | {told(earned)} |"
        )
    before = max(values(result["rl"], "before"))
    return (
        claims_table(claims(result))
        + "\n".join(lines)
        + f"\n\n{NOTE} Facts are each seed's own. RL: greedy reward on held-out questions, "
        f"{before:.3f} before training."
    )


def draw(result: dict) -> Figure:
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    *facts, earned = figure.subplots(1, 3)
    draw_rewards(earned, result["rl"])
    for axis, model in zip(facts, MLP_OF, strict=True):
        rows = of(result["runs"], model=model)
        total = capacity.BATCH_FACTS * capacity.BITS / 1000
        for where in dict.fromkeys(values(rows, "where")):
            mine, colour = of(rows, where=where), COLOURS[where]
            seeds = [
                [capacity.stored(loss, capacity.BATCH_FACTS) / 1000 for loss in losses]
                for losses in capacity.curves(mine)
            ]
            means = [fmean(at_epoch) for at_epoch in zip(*seeds, strict=True)]
            epochs = range(1, len(means) + 1)
            label = f"{where}: {capacity.parameters_of(mine):,} parameters"
            axis.plot(epochs, means, color=colour, lw=2, label=label)
            low, high = (list(map(edge, zip(*seeds, strict=True))) for edge in (min, max))
            axis.fill_between(epochs, low, high, color=colour, alpha=0.15, lw=0)
        axis.axhline(total, color="gray", ls="--", lw=1, label="all facts")
        axis.set(xlabel="epoch", ylabel="kbit of facts stored", ylim=(0, 1.08 * total))
        axis.set_title(f"{model}: mean of seeds, from lowest to highest")
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.02, 0.91))
        axis.grid(alpha=0.3)
    return figure


def draw_rewards(axis, rows: list[dict]) -> None:
    """Held-out reward after RL by what was adapted: each seed, their mean and its interval."""
    places = list(dict.fromkeys((row["model"], row["where"]) for row in rows))
    for place, (model, where) in enumerate(places):
        earned = values(of(rows, model=model, where=where), "held_out")
        mean, half = interval(earned)
        axis.errorbar(place, mean, half if len(earned) > 1 else 0, fmt="o", capsize=4)
        axis.lines[-1].set_color(COLOURS[where])
        axis.plot([place] * len(earned), earned, "_", color=COLOURS[where], ms=12)
    axis.axhline(max(values(rows, "before")), color="gray", ls="--", lw=1, label="before training")
    names = [f"{model}:\n{where}" for model, where in places]
    axis.set(xticks=range(len(places)), ylabel="held-out reward", title="RL: seeds, and their 95%")
    axis.set_xticklabels(names, fontsize=8)
    axis.legend(fontsize=8, loc="lower right")
    axis.grid(alpha=0.3)
