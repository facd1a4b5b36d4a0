"""Which layers: attention alone, MLPs alone, or all, at equal numbers of trained parameters.

    python -m experiments layers

The task is random facts (capacity.py), which ask an adapter for all that it can learn. Once for the
dense base, and once for a mixture of experts made of it, where the MLPs are four experts a layer.
"""

from itertools import product
from statistics import fmean

from matplotlib.figure import Figure

from assets.make_tiny_moe import upcycle
from experiments import capacity
from experiments.runs import ROOT, run_all
from experiments.seeds import told
from experiments.sweep import SEEDS, Claims, claims_table, judge, of, together, values

MINUTES = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
MOE = "runs/tiny-qwen3-moe"
# (model, where) -> flags; an adapter of the dense base has 18,000 to 19,500 parameters, one of the
# mixture 24,600 or 25,100: whole ranks come no closer.
PLACES = {
    ("dense", "attention"): ("--rank", "5", "--target-modules", *ATTENTION),
    ("dense", "MLPs"): ("--rank", "3", "--target-modules", *MLP),
    ("dense", "all"): ("--rank", "2"),
    ("mixture", "attention"): ("--model", MOE, "--rank", "7", "--target-modules", *ATTENTION),
    ("mixture", "experts"): ("--model", MOE, "--rank", "1", "--target-modules", "experts"),
}
MLP_OF = {"dense": "MLPs", "mixture": "experts"}
COLOURS = {"attention": "#d95f0e", "MLPs": "#3182bd", "experts": "#3182bd", "all": "#636363"}
RATE = 3e-3


def measure(quick: bool, jobs: int) -> dict:
    make_mixture()
    cells = list(product(PLACES, SEEDS[:1] if quick else SEEDS))
    epochs = 2 if quick else capacity.BATCH_EPOCHS
    lists = (capacity.BATCH_FACTS, epochs, capacity.BATCHES[0])
    commands = [capacity.memorise(PLACES[place], RATE, seed, *lists) for place, seed in cells]
    runs = [
        {"model": model, "where": where, "seed": seed, **capacity.outcome(run)}
        for ((model, where), seed), run in zip(cells, run_all(commands, jobs), strict=True)
    ]
    return {"runs": runs}


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
    return judged


def verdict(result: dict) -> tuple[str, str]:
    return together(claims(result))


def table(result: dict) -> str:
    lines = [
        "| model | adapted | parameters | facts stored | bits a parameter |",
        "|---|---|---|---|---|",
    ]
    for model, where in dict.fromkeys((row["model"], row["where"]) for row in result["runs"]):
        rows = of(result["runs"], model=model, where=where)
        kept, parameters = bits(rows), rows[0]["parameters"]
        total = capacity.BATCH_FACTS * capacity.BITS / 1000
        lines.append(
            f"| {model} | {where} | {parameters:,} | {told([b / 1000 for b in kept], '.2f')} of "
            f"{total:.1f} kbit | {told([b / parameters for b in kept])} |"
        )
    return (
        claims_table(claims(result))
        + "\n".join(lines)
        + "\n\nIntervals: 95% over seeds (Student's t)."
    )


def draw(result: dict) -> Figure:
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axis, model in zip(figure.subplots(1, 2), MLP_OF, strict=True):
        rows = of(result["runs"], model=model)
        total = capacity.BATCH_FACTS * capacity.BITS / 1000
        for where in dict.fromkeys(values(rows, "where")):
            mine, colour = of(rows, where=where), COLOURS[where]
            seeds = [
                [capacity.stored(loss, capacity.BATCH_FACTS) / 1000 for loss in row["epochs"]]
                for row in mine
            ]
            epochs = range(1, len(seeds[0]) + 1)
            means = [fmean(at_epoch) for at_epoch in zip(*seeds, strict=True)]
            label = f"{where}: {mine[0]['parameters']:,} parameters"
            axis.plot(epochs, means, color=colour, lw=2, label=label)
            low, high = (list(map(edge, zip(*seeds, strict=True))) for edge in (min, max))
            axis.fill_between(epochs, low, high, color=colour, alpha=0.15, lw=0)
        axis.axhline(total, color="gray", ls="--", lw=1, label="all facts")
        axis.set(xlabel="epoch", ylabel="kbit of facts stored", ylim=(0, 1.08 * total))
        axis.set_title(f"{model}: mean of seeds, from lowest to highest")
        axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(0.02, 0.91))
        axis.grid(alpha=0.3)
    return figure
