"""Learning rate: how much higher is LoRA's best one than full fine-tuning's, and does rank move it?

    python -m experiments learning_rate

    cost  │ ╲           best rate = vertex of the parabola over log rate through the
          │  ╲      ╱   lowest mean cost and its neighbours; at an edge of what was
          │   •╌v╌•     tried it is not known
          └────────────► log rate

Cost is log10 of the loss in SFT, in RL of the reward that is missed, at least half a question's.
The RL runs are rank.py's; the supervised ones learn random facts (capacity.py). Why the rank does
not matter with scaling alpha / r, and how much it would without, shows in the first steps: all r
components of an update start in the same direction.
"""

import math
from collections.abc import Callable
from statistics import fmean

import numpy as np
from matplotlib.figure import Figure

from experiments import capacity, rank
from experiments.runs import Run
from experiments.seeds import NOTE, times
from experiments.sweep import (
    FURTHER,
    SEEDS,
    Claims,
    claims_table,
    judge,
    lowest,
    mean_at,
    methods,
    of,
    rates,
    rows_of,
    sweep,
    together,
    told_rate,
    values,
)

MINUTES = 7  # beside rank.py's, which are shared
ABOUT_TEN = (0.5, 1.5)  # log10: a factor between 3.2 and 32
WITHIN_TWO = (-math.log10(2), math.log10(2))
LEAST_MISSED = 0.5 / rank.QUESTIONS  # half a question
EARLY = slice(1, 12)  # steps, after the first, at which nothing has been learned yet
EARLY_RATE, ALIKE = 3e-3, 0.1  # share of what was learned by which ranks may differ early on
RATES = {"rank 8": (3e-3, 1e-2), "full": (1e-3, 3e-3)}
choose = lowest("loss")


def learn(method: str, rate: float, seed: int, quick: bool, *more: str) -> tuple[str, ...]:
    """The command of a supervised run, one of capacity.py's in small batches."""
    return capacity.in_batches(method, rate, seed, capacity.BATCHES[0], quick, *more)


def outcome(run: Run) -> dict:
    """What the result file keeps: the loss on all facts after training, and of the first steps."""
    losses = [round(row["loss"], 4) for row in run.rows[: EARLY.stop]]
    losses += [capacity.STOPPED] * (EARLY.stop - len(losses))
    return {"loss": capacity.loss_after(run), "losses": losses}


def supervised(quick: bool, jobs: int) -> tuple[list[dict], list[dict], list[dict]]:
    """Runs of every rate; and rank 32 with scaling alpha / r, and with that of rank 8."""
    seeds = SEEDS[:1] if quick else SEEDS
    start = {m: (EARLY_RATE,) for m in RATES} if quick else RATES
    further = 0 if quick else FURTHER
    sft = sweep(start, lambda *cell: learn(*cell, quick), outcome, choose, seeds, jobs, further)
    cells = [("rank 32", EARLY_RATE, seed) for seed in seeds]
    scaled, constant = (
        rows_of(cells, lambda *cell, alpha=alpha: learn(*cell, quick, *alpha), outcome, jobs)
        for alpha in ((), ("--alpha", "128"))
    )
    return sft, scaled, constant


def reinforced(quick: bool, jobs: int) -> list[dict]:
    """What is wanted here of rank.py's runs."""
    keep = ("method", "rate", "seed", "held_out")
    return [{key: row[key] for key in keep} for row in rank.swept(quick, jobs)]


def measure(quick: bool, jobs: int) -> dict:
    sft, scaled, constant = supervised(quick, jobs)
    rl = reinforced(quick, jobs)
    return {"rl": rl, "sft": sft, "scaled": scaled, "constant": constant}


def cost(row: dict) -> float:
    """What a best rate makes lowest, log10: in RL of the reward that is missed, in SFT of the loss.
    A difference of rewards itself would let a collapsed neighbour decide where the vertex is."""
    if "held_out" in row:
        return math.log10(max(1 - row["held_out"], LEAST_MISSED))
    return math.log10(row["loss"])


def optimum(rows: list[dict]) -> float | None:
    """log10 of the best rate for one method: the vertex of the parabola through the lowest mean
    cost and its neighbours; None if an edge of what was tried is as good as any, since the best
    one may be beyond it."""
    points = {rate: fmean(map(cost, of(rows, rate=rate))) for rate in rates(rows)}
    x, y = [math.log10(rate) for rate in points], list(points.values())
    if min(y) in (y[0], y[-1]):
        return None
    i = y.index(min(y))
    curvature, slope, _ = np.polyfit(x[i - 1 : i + 2], y[i - 1 : i + 2], 2)
    return -slope / (2 * curvature)  # curved upwards: of the three the left one is higher


def optima(rows: list[dict], method: str) -> list[float | None]:
    """By seed."""
    mine = of(rows, method=method)
    return [optimum(of(mine, seed=seed)) for seed in sorted({row["seed"] for row in mine})]


def shift(rows: list[dict], method: str, other: str) -> list[float | None]:
    """log10 of the factor between the best rates of two methods, by seed; None where one of them
    is not known."""
    pairs = zip(optima(rows, method), optima(rows, other), strict=True)
    return [None if None in pair else pair[0] - pair[1] for pair in pairs]


def judge_shift(logs: list[float | None], bounds: tuple[float, float]) -> tuple[str, str]:
    """Verdict on a factor, and the factor in words: undecided unless all seeds tell it."""
    return "undecided" if None in logs else judge(logs, *bounds), told_known(logs, times)


def told_known(logs: list[float | None], form: Callable[[list[float]], str]) -> str:
    """What is known in these words, or in how many seeds it is not."""
    edges = logs.count(None)
    if not edges:
        return form(logs)
    return f"not known (an edge) in {edges} of {len(logs)} seed{'s' * (len(logs) > 1)}"


def apart(rows: list[dict], like: list[dict]) -> list[float]:
    """By seed: how far the losses of the first steps are from those of `like`, as a share of what
    these have lost since the first step."""
    shares = []
    for row, other in zip(rows, like, strict=True):
        ours, theirs = row["losses"][EARLY], other["losses"][EARLY]
        gaps = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True))
        shares.append(gaps / abs(sum(other["losses"][0] - loss for loss in theirs)))
    return shares


def early(result: dict) -> tuple[list[float], list[float]]:
    """Rank 32 from rank 8 in the first steps: with scaling alpha / r, and with a constant one."""
    like = of(result["sft"], method="rank 8", rate=EARLY_RATE)
    return apart(result["scaled"], like), apart(result["constant"], like)


def adapter_of(rows: list[dict]) -> str:
    return next(method for method in ("rank 8", "rank 1") if method in methods(rows))


def claims(result: dict) -> Claims:
    judged = {}
    for name, rows in (("RL", result["rl"]), ("SFT", result["sft"])):
        judged[f"in {name} LoRA's best rate is about ten times full fine-tuning's"] = judge_shift(
            shift(rows, adapter_of(rows), "full"), ABOUT_TEN
        )
    low = adapter_of(result["rl"])
    high = [method for method in methods(result["rl"]) if method != "full"][-1]
    judged[f"from {low} to {high} it moves by less than 2 (RL)"] = judge_shift(
        shift(result["rl"], high, low), WITHIN_TWO
    )
    scaled, constant = early(result)
    judged["early on rank 32 learns as rank 8 does (SFT)"] = (
        judge(scaled, high=ALIKE),
        f"{fmean(scaled):.1%} apart, {fmean(constant):.0%} with a constant scaling",
    )
    return judged


def verdict(result: dict) -> tuple[str, str]:
    return together(claims(result))


def table(result: dict) -> str:
    lines = [
        "| trained | RL: best rate tried | RL: optimum | SFT: best rate tried | SFT: optimum |",
        "|---|---|---|---|---|",
    ]
    for method in dict.fromkeys([*methods(result["rl"]), *methods(result["sft"])]):
        cells = []
        for rows, best in ((result["rl"], rank.choose), (result["sft"], choose)):
            mine = of(rows, method=method)
            if not mine:
                cells += ["", ""]
                continue
            cells += [told_rate(mine, best(mine)), told_known(optima(rows, method), scientific)]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    scaled, constant = early(result)
    return (
        claims_table(claims(result))
        + "\n".join(lines)
        + (
            f"\n\n{NOTE} Facts are each seed's own. Optima: geometric mean over seeds. "
            f"Steps 2 to 12 at rate {EARLY_RATE:g}: rank 32 is {fmean(scaled):.1%} of what was "
            f"learned away from rank 8; with alpha / r kept at 4, {fmean(constant):.0%}."
        )
    )


def scientific(logs: list[float]) -> str:
    return times(logs, ".1e")


def draw(result: dict) -> Figure:
    figure = Figure(figsize=(12, 4.2), layout="constrained")
    rl, sft, steps = figure.subplots(1, 3)
    for axis, rows, key in ((rl, result["rl"], "held_out"), (sft, result["sft"], "loss")):
        for method in methods(rows):
            mine = of(rows, method=method)
            means = mean_at(mine, key)
            axis.plot(*zip(*means.items(), strict=True), "o-", ms=4, lw=2, label=method)
            axis.lines[-1].set_color(rank.COLOURS[method])
            points = [(row["rate"], row[key]) for row in mine]
            axis.plot(*zip(*points, strict=True), ".", ms=4, color=rank.COLOURS[method], alpha=0.5)
        axis.set(xscale="log", xlabel="learning rate")
    rl.set(ylim=(0, 1.02), ylabel="held-out reward", title="RL: mean of seeds, and each seed")
    sft.set(yscale="log", ylabel="loss on the facts, nats a token")
    sft.set_title("SFT: mean of seeds, and each seed")
    rl.legend(fontsize=8, loc="lower left")
    like = of(result["sft"], method="rank 8", rate=EARLY_RATE)
    curves = [
        ("rank 8", rank.COLOURS["rank 8"], "-", like),
        ("rank 32, alpha / r", rank.COLOURS["rank 32"], "-", result["scaled"]),
        ("rank 32, scaled as rank 8", rank.COLOURS["rank 32"], "--", result["constant"]),
    ]
    for label, colour, style, rows in curves:
        means = [fmean(at_step) for at_step in zip(*values(rows, "losses"), strict=True)]
        shown = range(1, len(means) + 1)
        steps.plot(shown, means, style, color=colour, lw=2, label=label)
    steps.set(xlabel="step", ylabel="training loss, nats a token")
    steps.set(title=f"SFT at rate {EARLY_RATE:g}, by scaling")
    steps.legend(fontsize=8)
    for axis in (rl, sft, steps):
        axis.grid(alpha=0.3)
    return figure
