"""Which layers: attention alone, MLP alone, or all, at equal numbers of trained parameters.

    python -m experiments layers

Two tasks, since one may not tell them apart: RL in the miniature wiki, which asks an adapter for
little (rank.py), and random facts (capacity.py), which ask it for all that it can hold. Ranks are
chosen so that the adapters are of one size; once for the dense base, and once for a mixture of
experts made of it, where the MLPs are four experts a layer.
"""

from itertools import product
from statistics import fmean

from matplotlib.figure import Figure

from assets.make_tiny_moe import upcycle
from experiments import capacity, rank
from experiments.runs import ROOT, Run, run_all
from experiments.sweep import (
    SEEDS,
    Claims,
    claims_table,
    interval,
    judge,
    of,
    together,
    told,
    values,
)

MINUTES = 12
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MOE = "runs/tiny-qwen3-moe"
# (model, where) -> flags; an adapter of the dense base has 18,000 to 19,500 parameters, one of the
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


def measure(quick: bool, jobs: int) -> dict:
    cells = list(product(PLACES, SEEDS[:1] if quick else SEEDS))
    rows = [{"model": model, "where": where, "seed": seed} for (model, where), seed in cells]
    for row, learned in zip(rows, learn_facts(cells, quick, jobs), strict=True):
        row |= capacity.outcome(learned)
    for row, trained in zip(rows, reinforce(cells, quick, jobs), strict=True):
        row |= {key: rank.outcome(trained)[key] for key in ("held_out", "before", "reward")}
    return {"runs": rows}


def learn_facts(cells: list, quick: bool, jobs: int) -> list[Run]:
    make_mixture()
    epochs = 2 if quick else capacity.BATCH_EPOCHS
    lists = (capacity.BATCH_FACTS, epochs, capacity.BATCHES[0])
    commands = [capacity.memorise(PLACES[place], RATE, seed, *lists) for place, seed in cells]
    return run_all(commands, jobs)


def reinforce(cells: list, quick: bool, jobs: int) -> list[Run]:
    make_mixture()
    commands = [rank.train_flags(PLACES[place], RATE, seed, quick) for place, seed in cells]
    return run_all(commands, jobs)


def make_mixture() -> None:
    if not (ROOT / MOE).is_dir():
        upcycle(ROOT / "assets" / "tiny-qwen3", ROOT / MOE, 4, 2, seed=0)


def bits(rows: list[dict]) -> list[float]:
    return capacity.bits_of(rows, capacity.BATCH_FACTS)


def claims(result: dict) -> Claims:
    judged = {}
    for model, mlp in MLP_OF.items():
        rows = of(result["runs"], model=model)
        ours, theirs = of(rows, where=mlp), of(rows, where="attention")
        gains = [a / max(b, 1.0) for a, b in zip(bits(ours), bits(theirs), strict=True)]
        judged[f"{model}: {mlp} hold more facts than attention"] = (
            judge(gains, low=1.0),
            f"{told(gains, '.2f')} times",
        )
        ends = zip(values(ours, "held_out"), values(theirs, "held_out"), strict=True)
        gaps = [a - b for a, b in ends]
        judged[f"{model}: RL on {mlp} ends higher than on attention"] = (
            judge(gaps, low=0.0),
            f"by {told(gaps, '+.3f')}",
        )
    return judged


def verdict(result: dict) -> tuple[str, str]:
    return together(claims(result))


def table(result: dict) -> str:
    lines = [
        "| model | adapted | parameters | facts stored | bits a parameter | RL, held out |",
        "|---|---|---|---|---|---|",
    ]
    for model, where in dict.fromkeys((row["model"], row["where"]) for row in result["runs"]):
        rows = of(result["runs"], model=model, where=where)
        kept, parameters = bits(rows), rows[0]["parameters"]
        total = capacity.BATCH_FACTS * capacity.BITS / 1000
        lines.append(
            f"| {model} | {where} | {parameters:,} | {told([b / 1000 for b in kept], '.2f')} of "
            f"{total:.1f} kbit | {told([b / parameters for b in kept])} | "
            f"{told(values(rows, 'held_out'))} |"
        )
    before = result["runs"][0]["before"]
    return (
        claims_table(claims(result))
        + "\n".join(lines)
        + (f"\n\nIntervals: 95% over seeds (Student's t). Held out before RL: {before:.3f}.")
    )


def draw(result: dict) -> Figure:
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    for axes, model in zip(figure.subplots(2, 3), MLP_OF, strict=True):
        stored, rewards, ends = axes
        rows = of(result["runs"], model=model)
        for place, where in enumerate(dict.fromkeys(values(rows, "where"))):
            mine, colour = of(rows, where=where), COLOURS[where]
            label = f"{where}, {mine[0]['parameters']:,}"
            losses = [fmean(at_epoch) for at_epoch in zip(*values(mine, "epochs"), strict=True)]
            kept = [capacity.stored(loss, capacity.BATCH_FACTS) / 1000 for loss in losses]
            stored.plot(range(1, len(kept) + 1), kept, color=colour, lw=2, label=label)
            curves = [rank.smooth(curve) for curve in values(mine, "reward")]
            means = [fmean(at_step) for at_step in zip(*curves, strict=True)]
            rewards.plot(range(1, len(means) + 1), means, color=colour, lw=2, label=where)
            mean, half = interval(values(mine, "held_out"))
            ends.errorbar(place, mean, min(half, 1), fmt="o", color=colour, capsize=4)
        names = list(dict.fromkeys(values(rows, "where")))
        ends.set(xticks=range(len(names)), xticklabels=names, ylim=(0, 1.05), xlim=(-0.5, 2.5))
        ends.axhline(rows[0]["before"], color="gray", ls="--", lw=1)
        stored.axhline(capacity.BATCH_FACTS * capacity.BITS / 1000, color="gray", ls="--", lw=1)
        stored.set(ylabel=f"{model}\nkbit stored", ylim=(0, None))
        rewards.set(ylim=(0, 1.05))
        stored.legend(fontsize=8, title="adapted, parameters", title_fontsize=8)
        for axis in axes:
            axis.grid(alpha=0.3)
        if model == "dense":
            stored.set_title("random facts")
            rewards.set_title("RL: reward, mean of seeds")
            ends.set_title("RL: held out, 95% over seeds")
        else:
            stored.set_xlabel("epoch")
            rewards.set_xlabel("step")
    return figure
