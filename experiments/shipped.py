"""What a step of RL ships to its sampler: bytes and seconds, an adapter against all weights.

    python -m experiments shipped

         trainer ──► write, fsync, rename ──► a disk or a network ──► read, checked ──► sampler
                     │ adapter: r (in + out) numbers a matrix, fp32 │
                     │ all:     in * out of them, in the base's dtype │

Measured: files as the project writes and loads them (broadcast.py for adapters; full.py for all
weights, as --full saves them), of the tiny model and of Qwen3-0.6B's shapes with random weights.
Adapters of the larger ones stand beside a base of one number a tensor (stride 0): nothing computes
it. Computed, from configs/models/ alone: parameters and bytes of Qwen3's family, and the seconds
that those bytes take at the rate of this disk and of a network.
"""

import statistics
import tempfile
import time
from pathlib import Path

import safetensors
import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch import nn

from benchmarks.publish import bytes_of, pretend_step, shapes_alone
from broadcast import publish, read_adapter, retire
from experiments.runs import ROOT, RUNS
from experiments.seeds import decide
from full import load_weights, save_weights
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, remove_adapter
from model import Qwen3
from tools.plan import BYTES, human, model_shapes, parameters_of

MINUTES = 3
TINY = ROOT / "assets" / "tiny-qwen3"
FAMILY = ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B")
RANK = 8
VERSIONS, QUICK_VERSIONS = 7, 3
NETWORK = 1.25e9  # bytes a second, assumed: 10 Gbit/s
# The criterion, see the page.
SHARE, WITHIN, NAMES, FASTER = 240, 0.05, 16_384, 10


# --- measured -------------------------------------------------------------------------------------


def tensor_bytes(directory: Path) -> int:
    """Of all tensors in the directory's safetensors file, without names and JSON."""
    (file,) = directory.glob("*.safetensors")
    with safetensors.safe_open(file, "pt") as tensors:
        return sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118


def ship_adapter(model: Qwen3, rank: int, folder: Path, versions: int) -> dict:
    """Published and loaded `versions` times, the first not counted: what a training step does."""
    lora, seconds = LoRAConfig(rank), []
    inject_lora(model, lora)
    for version in range(versions + 1):
        pretend_step(model)
        begun = time.perf_counter()
        path = publish(model, lora, folder, version)
        written = time.perf_counter()
        add_adapter(model, f"v{version}", *read_adapter(path))
        seconds.append([written - begun, time.perf_counter() - written])
        remove_adapter(model, f"v{version}")
        sizes = {"bytes": bytes_of(path), "tensor_bytes": tensor_bytes(path)}
        retire(path)
    parameters = sum(p.numel() for p in lora_parameters(model).values())
    return {"what": f"adapter, rank {rank}", "parameters": parameters} | sizes | times(seconds[1:])


def ship_weights(model: Qwen3, folder: Path, versions: int) -> dict:
    """The same with all weights, in the model's dtype."""
    seconds = []
    for version in range(versions + 1):
        path = folder / f"all-{version}"
        begun = time.perf_counter()
        save_weights(model, folder / ".beside")
        (folder / ".beside").rename(path)
        written = time.perf_counter()
        load_weights(model, path)
        seconds.append([written - begun, time.perf_counter() - written])
        sizes = {"bytes": bytes_of(path), "tensor_bytes": tensor_bytes(path)}
        (path / "model.safetensors").unlink()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"what": "all weights", "parameters": parameters} | sizes | times(seconds[1:])


def times(seconds: list[list[float]]) -> dict:
    return {"write": [pair[0] for pair in seconds], "load": [pair[1] for pair in seconds]}


def random_model(name: str) -> Qwen3:
    """In bfloat16, as it would be shipped."""
    model = Qwen3(model_shapes(name)).requires_grad_(False).to(torch.bfloat16)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02)
    return model


def measure(quick: bool, jobs: int) -> dict:
    """`jobs` does not matter: one thing at a time, since time is what is measured."""
    versions = QUICK_VERSIONS if quick else VERSIONS
    torch.set_num_threads(1)
    RUNS.mkdir(parents=True, exist_ok=True)  # on the disk that runs are on, not in a RAM disk
    rows = []
    with tempfile.TemporaryDirectory(dir=RUNS) as scratch:

        def add(model: str, row: dict) -> None:
            rows.append({"model": model} | row)
            print(rows[-1], flush=True)

        for rank in (1, 8, 32):
            model = Qwen3.from_pretrained(TINY)
            folder = Path(scratch) / f"tiny-{rank}"
            add("tiny", ship_adapter(model, rank, folder, versions))
        model = Qwen3.from_pretrained(TINY)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # not the file's own pages
        add("tiny", ship_weights(model, Path(scratch), versions))
        for name, rank in (("0.6B", 8), ("0.6B", 32), ("4B", 8)):
            if quick and (name, rank) != ("0.6B", 8):
                continue
            model = shapes_alone(model_shapes(f"Qwen3-{name}"))
            folder = Path(scratch) / f"{name}-{rank}"
            add(name, ship_adapter(model, rank, folder, versions))
        if not quick:
            add("0.6B", ship_weights(random_model("Qwen3-0.6B"), Path(scratch), versions))
    return {"rows": rows, "family": [computed(name) for name in FAMILY]}


# --- computed -------------------------------------------------------------------------------------


def computed(name: str) -> dict:
    base, adapter = parameters_of(model_shapes(f"Qwen3-{name}"), LoRAConfig(RANK))
    return {
        "model": name,
        "parameters": base,
        "adapter": adapter,
        "adapter_bytes": adapter * BYTES["float32"],
        "bytes": base * BYTES["bfloat16"],
    }


def together(row: dict) -> list[float]:
    """Of each version: written and loaded."""
    return [w + load for w, load in zip(row["write"], row["load"], strict=True)]


def measured(result: dict, model: str, what: str) -> dict | None:
    for row in result["rows"]:
        if (row["model"], row["what"]) == (model, what):
            return row
    return None


def criteria(result: dict) -> dict[str, bool]:
    """What must hold, and whether it does."""
    family = {row["model"]: row for row in result["family"]}["4B"]
    share = family["parameters"] / family["adapter"]
    in_bytes = family["bytes"] / family["adapter_bytes"]
    names = max(row["bytes"] - row["tensor_bytes"] for row in result["rows"])
    small, whole = (
        statistics.median(together(measured(result, "0.6B", what)))
        for what in (f"adapter, rank {RANK}", "all weights")
    )
    return {
        f"Qwen3-4B's adapter is 1/{share:.0f} of the parameters, asked 1/{SHARE} ± {WITHIN:.0%}, "
        f"and 1/{in_bytes:.0f} of the bytes": (abs(share / SHARE - 1) <= WITHIN),
        f"a file is up to {names:,} bytes larger than its tensors, allowed {NAMES:,}": (
            names <= NAMES
        ),
        f"on 0.6B's shapes it is shipped {whole / small:.0f} times as fast, asked {FASTER}": (
            whole / small >= FASTER
        ),
    }


def verdict(result: dict) -> tuple[str, str]:
    whole = measured(result, "0.6B", "all weights")
    if whole is None or len(together(whole)) < 3:
        return "undecided", "All weights of the 0.6B were not shipped."
    return decide(criteria(result))


def spread(values: list[float]) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def disk_rate(result: dict) -> float | None:
    """Bytes a second of the largest thing that was shipped here."""
    whole = measured(result, "0.6B", "all weights")
    return whole and whole["bytes"] / statistics.median(together(whole))


def table(result: dict) -> str:
    """Measured: a line a thing; computed: a line a model."""
    versions = len(result["rows"][0]["write"])
    lines = [
        f"Measured, {versions} versions each, median (lowest to highest):",
        "",
        "| model | ships | parameters | bytes | write, fsync, rename, s | load, s | together, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [row["model"], row["what"], f"{row['parameters']:,}", human(row["bytes"])]
        cells += [spread(row["write"]), spread(row["load"]), spread(together(row))]
        lines.append(f"| {' | '.join(cells)} |")
    rate = disk_rate(result)
    lines += [
        "",
        f"Computed, rank {RANK} on all projections (and experts): fp32 adapter, bfloat16 weights; "
        f"seconds through 10 Gbit/s{f' and at the {human(rate)}/s measured here' if rate else ''}:",
        "",
        "| Qwen3 | parameters | adapter | of the parameters | adapter | all weights | of the bytes "
        "| adapter, s | all weights, s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["family"]:
        sizes = row["adapter_bytes"], row["bytes"]
        cells = [row["model"], *(f"{row[name] / 1e6:,.1f}M" for name in ("parameters", "adapter"))]
        cells += [f"1/{row['parameters'] / row['adapter']:.0f}", *map(human, sizes)]
        cells += [f"1/{sizes[1] / sizes[0]:.0f}"]
        for size in sizes:
            disk = f" / {size / rate:.2f}" if rate else ""
            cells += [f"{size / NETWORK:.2f}{disk}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result: dict) -> Figure:
    """Left: seconds against bytes, measured; right: bytes of the family, computed."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    colours = {"adapter": "tab:blue", "all weights": "tab:orange"}
    for row in result["rows"]:
        kind = row["what"].partition(",")[0]
        values = together(row)
        middle = statistics.median(values)
        bars = [[middle - min(values)], [max(values) - middle]]
        marker = "o" if kind == "adapter" else "s"
        left.errorbar(row["bytes"], middle, bars, fmt=marker, color=colours[kind], capsize=3)
        rank = row["what"].rpartition(" ")[2]
        words = f"{row['model']} r{rank}" if kind == "adapter" else f"{row['model']}, all"
        above = row["model"] == "4B" or kind == "adapter" and row["model"] == "tiny"
        place = {"xytext": (-4, 10) if above else (6, -10), "ha": "right" if above else "left"}
        left.annotate(
            words, (row["bytes"], middle), textcoords="offset points", fontsize=8, **place
        )
    if rate := disk_rate(result):
        sizes = [1e4, 3e9]
        line = [size / rate for size in sizes]
        left.plot(sizes, line, ":", color="grey", label=f"in proportion to bytes, {human(rate)}/s")
        left.legend(loc="upper left")
    left.set(
        xscale="log", yscale="log", xlabel="bytes shipped", ylabel="seconds, written and loaded"
    )
    left.set_title("measured: median, lowest to highest")
    left.set_xlim(1e4, 1e10)
    left.grid(alpha=0.3)
    places = range(len(result["family"]))
    for shift, key, kind in ((-0.2, "adapter_bytes", "adapter"), (0.2, "bytes", "all weights")):
        sizes = [row[key] / 1e6 for row in result["family"]]
        label = {"adapter": f"adapter, rank {RANK}, fp32", "all weights": "all weights, bf16"}[kind]
        right.bar([p + shift for p in places], sizes, 0.4, color=colours[kind], label=label)
    for place, row in zip(places, result["family"], strict=True):
        words = f"1/{row['bytes'] / row['adapter_bytes']:.0f}"
        right.annotate(words, (place - 0.2, row["adapter_bytes"] / 1e6), ha="center", va="bottom")
    right.set_xticks(places, [row["model"] for row in result["family"]])
    right.set_yscale("log")
    right.set_ylim(top=4e5)
    right.set_ylabel("MB a step")
    right.set_title("computed: Qwen3's family, share of the bytes")
    right.legend(loc="upper left")
    return figure
