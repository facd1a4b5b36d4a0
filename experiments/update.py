"""What RL changes in the weights, beside SFT and LoRA: how many in bfloat16, and at what rank.

    python -m experiments update

    base, rounded to bfloat16 ──► train.py --full ──► W     W - W0 in bfloat16: which are 0? rank?
    as published ones are     ──► sft.py --full   ──► W     W - W0 in fp32: the same questions
                              ──► train.py, LoRA  ──► B A   dealt to other weights of its matrix

A weight that moves by less than half the distance to its neighbour in bfloat16 (an ulp: 2^-8 to
2^-7 of it) is where it was when the result is saved in bfloat16. So `changed` there compares two
lengths, how far training moved a weight and how large that weight is. Dealing a matrix's updates
anew to its weights (a random permutation) keeps both and forgets which weight had which update: if
as many change as before, no weights were chosen, they were only small enough to show.
"""

import math
import os
import shutil
from statistics import fmean

import safetensors.torch
import torch
from matplotlib import pyplot
from torch import Tensor

from broadcast import read_adapter
from checkpoint import read_checkpoint
from config import ASSETS
from experiments.runs import ROOT, RUNS, Run, run_all
from experiments.seeds import NOTE, above, decide, every, interval, told, within

MINUTES = 4
TOLERANCE = 1e-5  # below which a weight counts as unchanged (Mukherjee et al.)
SEEDS = (0, 1, 2)
LEARNING_RATES = ("1.5e-4", "1.5e-5")
LORA_LEARNING_RATE = "1.5e-3"
PROGRAMS = {"RL": "train.py", "SFT": "sft.py"}
PER_MATRIX = {"changed_bf16": "changed, bf16", "rank_bf16": "rank, bf16", "rank": "rank"}
KINDS = (  # in the order of a forward pass, which a table has them in
    *("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj"),
    *("gate_proj", "up_proj", "down_proj", "norms"),
)
BASE = RUNS / "base-in-bfloat16"


# --- the runs -------------------------------------------------------------------------------------


def make_base() -> None:
    """The tiny checkpoint with every weight rounded to bfloat16, kept as fp32 for training."""
    if (BASE / "model.safetensors").is_file():
        return
    shutil.copytree(ASSETS / "tiny-qwen3", BASE, dirs_exist_ok=True)
    tensors = read_checkpoint(ASSETS / "tiny-qwen3")
    rounded = {name: tensor.bfloat16().float() for name, tensor in tensors.items()}
    safetensors.torch.save_file(rounded, BASE / "model.safetensors", metadata={"format": "pt"})


def command(method: str, mode: str, rate: str, seed: int, quick: bool) -> tuple[str, ...]:
    """Of RL or SFT, of all weights or LoRA: the same learning rate, steps and warm-up."""
    size = ["--steps", "2" if quick else "10", "--eval-size", "8" if quick else "64"]
    if method == "RL":
        few = quick or mode == "LoRA"  # whose rank is known: what it looks like is shown
        size += ["--groups", "2" if few else "4", "--group-size", "4" if few else "6"]
    trained = ("--full",) if mode == "full" else ("--rank", "8")
    model = ("--model", os.path.relpath(BASE, ROOT))
    return (PROGRAMS[method], *model, *trained, "--lr", rate, "--seed", str(seed), *size)


def measure(quick: bool, jobs: int) -> dict:
    """Every run's update, and how many weights a given movement would change."""
    make_base()
    seeds, rates = (SEEDS[:1], LEARNING_RATES[:1]) if quick else (SEEDS, LEARNING_RATES)
    cases = [(m, "full", rate, seed) for rate in rates for seed in seeds for m in PROGRAMS]
    cases += [("RL", "LoRA", LORA_LEARNING_RATE, seed) for seed in seeds]
    runs = run_all([command(*case, quick) for case in cases], jobs)
    base = read_checkpoint(BASE)
    return {
        "experiment": "update",
        "weights": sum(tensor.numel() for tensor in base.values()),
        "rows": [
            {"method": method, "mode": mode, "lr": float(rate), "seed": seed}
            | {"held_out": run.held_out, **update_of(base, run, mode)}
            for (method, mode, rate, seed), run in zip(cases, runs, strict=True)
        ],
        "if_all_moved": if_all_moved(base),
    }


# --- what a run changed ---------------------------------------------------------------------------


def trained_weights(base: dict[str, Tensor], run: Run, mode: str) -> dict[str, Tensor]:
    """What the run left, an adapter merged into the base: W0 + (alpha / r) B A, in float64."""
    if mode == "full":
        return read_checkpoint(run.output / "model")
    config, tensors = read_adapter(run.output / "adapter")
    merged = dict(base)
    for name in base:
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_A.weight" in tensors:
            A, B = (tensors[f"{layer}.lora_{matrix}.weight"].double() for matrix in "AB")
            merged[name] = base[name].double() + config.scaling * (B @ A)
    return merged


def update_of(base: dict[str, Tensor], run: Run, mode: str) -> dict:
    """Shares of all weights that changed, and ranks of the matrices' updates as shares of full.

    changed_bf16: as the authors' check_sparsity.py counts; changed_fp32: at all; dealt_bf16: the
    same updates on other weights of their matrix; adapted_*: of matrices with an adapter alone.
    rank_bf16: matrix_rank of the difference of both checkpoints in bfloat16, as in their
    update_rank.py; rank: of the update itself; rank_99: singular values with 99% of its square.
    Of these the means over matrices that changed; by_kind has PER_MATRIX of each kind of tensor.
    """
    after, generator = trained_weights(base, run, mode), torch.Generator().manual_seed(0)
    counts = {"changed_bf16": 0, "changed_fp32": 0, "dealt_bf16": 0}
    adapted = {"adapted_bf16": 0, "adapted_fp32": 0, "adapted": 0}
    moved, ranks, tensors = [], [], {}
    for name, before in base.items():
        delta = after[name].double() - before.double()
        moved.append(delta.abs().flatten())
        changed = int(changed_in_bf16(before, delta).sum())
        changed_fp32 = int(((before.double() + delta).float() != before).sum())
        dealt = delta.flatten()[torch.randperm(delta.numel(), generator=generator)]
        counts["changed_bf16"] += changed
        counts["changed_fp32"] += changed_fp32
        counts["dealt_bf16"] += int(changed_in_bf16(before, dealt.view_as(delta)).sum())
        tensors[name] = {"changed_bf16": changed / delta.numel()}
        if before.dim() < 2 or not delta.any():
            continue
        adapted["adapted_bf16"] += changed
        adapted["adapted_fp32"] += changed_fp32
        adapted["adapted"] += delta.numel()
        ranks.append(ranks_of(before, delta, exact=mode == "LoRA"))
        tensors[name] |= ranks[-1]
    total = sum(tensor.numel() for tensor in base.values())
    shares = {key: count / total for key, count in counts.items()}
    shares |= {key: adapted[key] / adapted["adapted"] for key in ("adapted_bf16", "adapted_fp32")}
    means = {key: fmean(found[key] for found in ranks) for key in ranks[0]}
    median = torch.cat(moved).median().item()
    return shares | means | {"moved": median, "by_kind": by_kind(tensors)}


def by_kind(tensors: dict[str, dict[str, float]]) -> dict[str, dict[str, dict[str, float]]]:
    """Mean, least and most over the layers, of each kind of tensor: q_proj, ..., and all norms.

    `tensors` has the numbers of each by its name. Those of PER_MATRIX are taken, as far as a kind
    has them: a norm has no rank, nor has a matrix that did not change.
    """
    kinds: dict[str, list[dict[str, float]]] = {}
    for name, numbers in tensors.items():
        kind = name.split(".")[-2]
        kinds.setdefault("norms" if kind.endswith("norm") else kind, []).append(numbers)
    found = {}
    for kind, layers in kinds.items():
        columns = {
            key: [numbers[key] for numbers in layers if key in numbers] for key in PER_MATRIX
        }
        found[kind] = {
            key: {"mean": fmean(column), "least": min(column), "most": max(column)}
            for key, column in columns.items()
            if column
        }
    return found


def changed_in_bf16(before: Tensor, delta: Tensor) -> Tensor:
    """Where the two checkpoints, each saved in bfloat16, differ by more than the tolerance."""
    difference = (before.double() + delta).bfloat16() - before.bfloat16()
    return ~torch.isclose(difference, torch.zeros_like(difference), atol=TOLERANCE)


def ranks_of(before: Tensor, delta: Tensor, exact: bool) -> dict[str, float]:
    """Ranks of a matrix's update as shares of the full one; exact: of one known in float64, where
    that of trained weights is their fp32 difference."""
    full = min(delta.shape)
    rounded = (before.double() + delta).bfloat16() - before.bfloat16()
    squares = torch.linalg.svdvals(delta) ** 2
    held = squares.cumsum(0) / squares.sum()
    rank = torch.linalg.matrix_rank(delta if exact else delta.float()).item()
    return {
        "rank_bf16": torch.linalg.matrix_rank(rounded.float()).item() / full,
        "rank": rank / full,
        "rank_mean": rank,
        "rank_99": (int((held < 0.99).sum()) + 1) / full,
    }


def if_all_moved(base: dict[str, Tensor]) -> list[tuple[float, float]]:
    """(distance, share that would change in bfloat16 if every weight moved by it, either way)."""
    generator, points = torch.Generator().manual_seed(0), []
    weights = torch.cat([tensor.flatten() for tensor in base.values()])
    signs = torch.randint(0, 2, weights.shape, generator=generator) * 2.0 - 1
    for exponent in range(-48, -15):
        distance = 10 ** (exponent / 8)
        share = changed_in_bf16(weights, signs * distance).float().mean().item()
        points.append((distance, share))
    return points


# --- what it shows --------------------------------------------------------------------------------


def values(result: dict, key: str, **wanted) -> list[float]:
    """A number of each seed, of the rows that have these values."""
    rows = [row for row in result["rows"] if all(row[k] == v for k, v in wanted.items())]
    return [row[key] for row in sorted(rows, key=lambda row: row["seed"])]


def rates_of(result: dict) -> list[float]:
    return sorted({row["lr"] for row in result["rows"] if row["mode"] == "full"})


def best_rate(result: dict) -> float:
    """Of full RL, by the mean held-out reward."""
    return max(
        rates_of(result),
        key=lambda rate: fmean(values(result, "held_out", method="RL", mode="full", lr=rate)),
    )


def criteria(result: dict) -> dict[str, bool | None]:
    """Those of the paper, 1 to 3."""
    rates, fewer, full, words, ranks = rates_of(result), [], [], [], []
    for rate in rates:
        rl, sft = (
            values(result, "changed_bf16", method=method, mode="full", lr=rate)
            for method in PROGRAMS
        )
        gaps = [theirs - ours for ours, theirs in zip(rl, sft, strict=True)]
        fewer.append(above(gaps, 0))
        words.append(f"{told(gaps)} at {rate:g}")
        shares = values(result, "rank_bf16", method="RL", mode="full", lr=rate)
        full.append(above(shares, 0.99))
        ranks.append(f"{told(shares)} at {rate:g}")
    found = {f"1 RL changes fewer than SFT (share less: {', '.join(words)})": every(fewer)}
    rate = best_rate(result)
    changed = values(result, "changed_bf16", method="RL", mode="full", lr=rate)
    words = f"2 RL's best learning rate, {rate:g}, changes 5 to 30%: {told(changed)}"
    found[words] = within(changed, 0.05, 0.30)
    found[f"3 RL's updates have 99% of full rank or more: {', '.join(ranks)}"] = every(full)
    return found


def explanation(result: dict) -> dict[str, bool]:
    """Those of the counter-explanation, 4 and 5."""
    full = [row for row in result["rows"] if row["mode"] == "full"]
    lora = [row for row in result["rows"] if row["mode"] == "LoRA"]
    least = min(row["changed_fp32"] for row in full)
    apart = max(abs(row["dealt_bf16"] - row["changed_bf16"]) for row in full)
    means = [
        fmean(values(result, "changed_bf16", method="RL", mode="full", lr=rate))
        for rate in rates_of(result)
    ]
    exact = {round(row["rank_mean"], 6) for row in lora}
    touched = min(row["adapted_fp32"] for row in lora)
    return {
        f"4a in fp32 99% or more change (least: {least:.2%})": least >= 0.99,
        f"4b dealt to other weights, as many change within 5 points (largest gap: {apart:.3f})": (
            apart <= 0.05
        ),
        "4c a larger learning rate changes more": means == sorted(means),
        f"5a LoRA's updates have rank {', '.join(f'{rank:g}' for rank in sorted(exact))}": (
            exact == {8}
        ),
        f"5b they change 99% of the adapted matrices' weights or more (least: {touched:.2%})": (
            touched >= 0.99
        ),
    }


def verdict(result: dict) -> tuple[str, str]:
    word, why = decide(criteria(result))
    return word, f"{why} Of the explanation: {decide(explanation(result))[1]}"


def table(result: dict) -> str:
    """A line a method and learning rate, means over seeds."""
    lines = [
        "| run | lr | held out | median move | changed, bf16 | dealt anew | changed, fp32 | "
        "rank, bf16 | rank | 99% of the square |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    cases = dict.fromkeys((row["method"], row["mode"], row["lr"]) for row in result["rows"])
    for method, mode, rate in sorted(cases, key=lambda case: (case[1], case[2], case[0])):
        case = {"method": method, "mode": mode, "lr": rate}

        def percent(key, case=case):
            middle, half = interval(values(result, key, **case))
            return f"{middle:.1%}" + (f" ± {half:.1%}" if math.isfinite(half) else "")

        cells = [f"{method}, {mode}", f"{rate:g}", told(values(result, "held_out", **case))]
        cells.append(f"{fmean(values(result, 'moved', **case)):.1e}")
        cells += [percent(key) for key in ("changed_bf16", "dealt_bf16", "changed_fp32")]
        cells += [
            f"{fmean(values(result, key, **case)):.1%}" for key in ("rank_bf16", "rank", "rank_99")
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", NOTE, "", table_by_kind(result)])


def table_by_kind(result: dict) -> str:
    """A line a kind of matrix, at RL's best learning rate: RL beside SFT."""
    rate, columns = best_rate(result), [(key, method) for key in PER_MATRIX for method in PROGRAMS]
    heads = [f"{PER_MATRIX[key]}: {method}" for key, method in columns]
    lines = [
        f"By kind of matrix, full fine-tuning at {rate:g}: mean (least to most) over layers and "
        "seeds.",
        "",
        f"| matrices | {' | '.join(heads)} |",
        "|---" * (1 + len(columns)) + "|",
    ]
    found = {m: values(result, "by_kind", method=m, mode="full", lr=rate) for m in PROGRAMS}
    for kind in sorted(found["RL"][0], key=KINDS.index):
        cells = [kind]
        for key, method in columns:
            seeds = [its[kind][key] for its in found[method] if key in its[kind]]
            cells.append(spread(seeds) if seeds else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(seeds: list[dict[str, float]]) -> str:
    """E.g. 73.2% (65.9% to 82.5%), or 100.0% alone, of mean, least and most in each seed."""
    mean = fmean(numbers["mean"] for numbers in seeds)
    least = min(numbers["least"] for numbers in seeds)
    most = max(numbers["most"] for numbers in seeds)
    mean, least, most = (f"{share:.1%}" for share in (mean, least, most))
    return mean if least == most else f"{mean} ({least} to {most})"


def draw(result: dict) -> pyplot.Figure:
    """Left: share changed against how far weights moved. Right: three readings of the rank."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11.5, 4.8), layout="constrained")
    left, right = axes
    left.axhspan(0.05, 0.30, color="tab:olive", alpha=0.2, label="the paper's RL: 5 to 30%")
    left.plot(*zip(*result["if_all_moved"], strict=True), color="gray", label="if all moved so far")
    styles = {("RL", "full"): ("o", "tab:red"), ("SFT", "full"): ("s", "tab:blue")}
    for (method, mode), (marker, colour) in styles.items():
        case = {"method": method, "mode": mode}
        x, y = (values(result, key, **case) for key in ("moved", "changed_bf16"))
        left.plot(x, y, marker, color=colour, alpha=0.7, label=f"{method}, a run")
        dealt = values(result, "dealt_bf16", **case)
        label = "its updates dealt anew" if method == "SFT" else None
        left.plot(x, dealt, "+", color="black", ms=9, label=label)
    left.set(xscale="log", ylim=(-0.02, 1.02), ylabel="share of weights changed in bfloat16")
    left.set(xlabel="median movement of a weight in fp32; learning rates 1.5e-5 and 1.5e-4")
    left.legend(fontsize=8)
    readings = {
        "rank_bf16": "of bfloat16 checkpoints",
        "rank": "of the update itself",
        "rank_99": "99% of its square",
    }
    rate = best_rate(result)
    shown = [("RL", "full", rate), ("SFT", "full", rate), ("RL", "LoRA", float(LORA_LEARNING_RATE))]
    bars = {
        f"{method}, {mode},\nlr {lr:g}": {"method": method, "mode": mode, "lr": lr}
        for method, mode, lr in shown
    }
    for place, (key, label) in enumerate(readings.items()):
        heights = [fmean(values(result, key, **case)) for case in bars.values()]
        at = [number + (place - 1) * 0.27 for number in range(len(bars))]
        drawn = right.bar(at, heights, 0.25, label=label)
        right.bar_label(drawn, [f"{height:.0%}" for height in heights], fontsize=8)
    right.set_xticks(range(len(bars)), bars)
    right.set(ylabel="rank of an update, share of full, mean over matrices", ylim=(0, 1.3))
    right.legend(fontsize=8, loc="upper right")
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure
