"""Many adapters in one batch, against one adapter and against one adapter after another.

    python benchmarks/adapters.py            both models, benchmarks/adapters.json; under 4 minutes

64 decode rows, each with tokens in its cache, have 1, 4, 16 or 64 adapters (rank 8, all seven
projections), row i the adapter i mod n:

    together     one pass over all rows, as the engine decodes (segments.py)
    swapping     n passes, each over the 64 / n rows of one adapter

The bounds say how much faster this machine lets `together` be, were adapters free: n passes of 64/n
rows of the base alone over one of 64 rows, and the same of its matrix products alone. Small
products waste a CPU less than a GPU, so the bounds may lie below what one would wish.

Models: the tiny checkpoint, and Qwen3-0.6B's shapes with random weights, 2 of its 28 layers and no
vocabulary head (it would be a quarter of the 28 layers' work, and adapters would cost less beside
it). fp32, one thread; CPU time of this process, so that other programs matter little; the
variants take turns, medians of the rounds, ratios paired within a round.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from lora import TARGETS, LoRAConfig, adapter_disabled, add_adapter, use_adapters  # noqa: E402
from model import KVCache, Qwen3, Qwen3Config  # noqa: E402
from segments import Batch, Stack, use_rows  # noqa: E402

ROWS, COUNTS, RANK = 64, (1, 4, 16, 64), 8
LAYERS, SECONDS = 2, 80  # of the larger model; measuring time of each
SWAP_AIM = {16: 2.5, 64: 5.0}
NAMES = [f"a{i}" for i in range(max(COUNTS))]
CPU = torch.device("cpu")


def tiny() -> tuple[Qwen3, int]:
    return Qwen3.from_pretrained(ROOT / "assets" / "tiny-qwen3"), 200


def qwen3_06b() -> tuple[Qwen3, int]:
    facts = json.loads((ROOT / "configs" / "models" / "Qwen3-0.6B.json").read_text())
    facts |= {"num_hidden_layers": LAYERS, "vocab_size": 128, "layer_types": None}
    return Qwen3(Qwen3Config.from_dict(facts)), 200


def add_random_adapters(model: nn.Module, names: list[str] = NAMES) -> None:
    config = LoRAConfig(rank=RANK)
    projections = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in TARGETS
    }
    for name in names:
        tensors = {}
        for place, layer in projections.items():
            tensors[f"{place}.lora_A.weight"] = torch.randn(RANK, layer.in_features) * 0.01
            tensors[f"{place}.lora_B.weight"] = torch.randn(layer.out_features, RANK) * 0.01
        add_adapter(model, name, config, tensors)


def cpu_seconds(work: Callable) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def take_turns(variants: dict[str, Callable], seconds: float) -> dict[str, list[float]]:
    """CPU seconds of each variant, round by round, after one round to warm up."""
    for work in variants.values():
        work()
    rounds, deadline = {name: [] for name in variants}, time.monotonic() + seconds
    while time.monotonic() < deadline or len(rounds[next(iter(variants))]) < 5:
        for name, work in variants.items():
            rounds[name].append(cpu_seconds(work))
    return rounds


@torch.inference_mode()
def measure(name: str, model: Qwen3, length: int) -> dict:
    """Prints the model's table; returns its numbers."""
    model.requires_grad_(False)
    products = [  # the matrices that every pass multiplies by
        module.weight
        for place, module in model.named_modules()
        if isinstance(module, nn.Linear) and place.rpartition(".")[2] in TARGETS
    ]
    add_random_adapters(model)
    cache = KVCache(model.config, ROWS, length + 1, torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    ids = torch.randint(model.config.vocab_size, (ROWS, 1))
    starts = torch.full((ROWS,), length)

    def decode(rows: slice) -> None:
        model.extend(ids[rows], cache, rows, starts[rows])

    def parts(n: int) -> list[slice]:
        return [slice(i * ROWS // n, (i + 1) * ROWS // n) for i in range(n)]

    def together(n: int) -> None:
        stack = stacks[n]
        stack.hold(NAMES[:n])
        with use_rows(model, stack, [NAMES[row % n] for row in range(ROWS)]):
            decode(slice(0, ROWS))

    def swapping(n: int) -> None:
        for adapter, rows in zip(NAMES, parts(n), strict=False):
            with use_adapters(model, [(adapter, None)]):
                decode(rows)

    def base(n: int) -> None:
        with adapter_disabled(model):
            for rows in parts(n):
                decode(rows)

    inputs = {size: torch.randn(ROWS, size) for size in {w.shape[1] for w in products}}

    def multiply(n: int) -> None:
        for rows in parts(n):
            for weight in products:
                F.linear(inputs[weight.shape[1]][rows], weight)

    stacks = {n: Stack(model, torch.float32, CPU) for n in COUNTS}
    kinds = {"together": together, "swapping": swapping, "base": base, "products": multiply}
    variants = {
        f"{kind} {n}": lambda work=work, n=n: work(n)
        for n in COUNTS
        for kind, work in kinds.items()
    }
    # A percent is asked of the first, factors of the second: so the first has many short rounds.
    mixed = take_turns({f"{n}": lambda n=n: together(n) for n in COUNTS}, SECONDS / 4)
    rounds = take_turns(variants, SECONDS * 3 / 4)

    def ratio(above: str, below: str, rounds=rounds) -> float:
        return statistics.median(a / b for a, b in zip(rounds[above], rounds[below], strict=True))

    result = {
        "rounds": [len(mixed["1"]), len(rounds["base 1"])],
        "enter_slot_ms": 1e3
        * min(cpu_seconds(lambda: stacks[64].write(0, "a0")) for _ in range(9)),
        "base_ms": 1e3 * statistics.median(rounds["base 1"]),
        "adapters": {
            n: {
                "together_ms": 1e3 * statistics.median(mixed[f"{n}"]),
                "over_one": ratio(f"{n}", "1", mixed),
                "swapping_ms": 1e3 * statistics.median(rounds[f"swapping {n}"]),
                "faster": ratio(f"swapping {n}", f"together {n}"),
                "bound_passes": ratio(f"base {n}", "base 1"),
                "bound_products": ratio(f"products {n}", "products 1"),
            }
            for n in COUNTS
        },
    }
    print(f"\n{name}: {ROWS} rows; base alone {result['base_ms']:.1f} ms; ", end="")
    print(f"an adapter enters the stack in {result['enter_slot_ms']:.1f} ms")
    print("adapters  together ms  over one  swapping ms  faster   aim  bound: passes  products")
    for n, row in result["adapters"].items():
        aim = f"{SWAP_AIM[n]:.1f}" if n in SWAP_AIM else ""
        print(
            f"{n:8}{row['together_ms']:13.1f}{row['over_one'] - 1:+10.0%}"
            f"{row['swapping_ms']:13.1f}{row['faster']:8.1f}{aim:>6}"
            f"{row['bound_passes']:15.1f}{row['bound_products']:10.1f}"
        )
    return result


class OneProjection(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.q_proj = nn.Linear(size, size, bias=False)


@torch.inference_mode()
def one_projection(size: int) -> dict:
    """Ways to apply the adapters of 64 rows to one projection; prints and returns microseconds."""
    model, x = OneProjection(size).requires_grad_(False), torch.randn(ROWS, 1, size)
    add_random_adapters(model)
    layer, times = model.q_proj, {}
    base = statistics.median(take_turns({"base": lambda: layer.base(x)}, 1.0)["base"])
    print(f"\none projection, {size} x {size}, {ROWS} rows; base product {base * 1e6:.0f} us")
    print("adapters  us: segment by segment  grouped_mm, rows sorted  padded bmm, any order")
    for n in COUNTS[1:]:
        stack, y = Stack(model, torch.float32, CPU), layer.base(x)
        stack.hold(NAMES[:n])
        segments = [(NAMES[i], slice(i * ROWS // n, (i + 1) * ROWS // n)) for i in range(n)]
        ends = torch.arange(1, n + 1, dtype=torch.int32) * (ROWS // n)
        batch = Batch(stack, [NAMES[row % n] for row in range(ROWS)])

        def by_segment(segments=segments, y=y) -> None:
            for name, rows in segments:
                y[rows] += layer.update(name, x[rows])

        def grouped(matrices=stack.matrices[layer], ends=ends, y=y) -> None:
            A, B = matrices
            y[:, 0] += F.grouped_mm(F.grouped_mm(x[:, 0], A.mT, offs=ends), B, offs=ends)

        def padded(batch=batch, y=y) -> None:
            batch.add_updates(layer, x, y)

        variants = {"segments": by_segment, "grouped_mm": grouped, "padded": padded}
        rounds = take_turns(variants, 2.0)
        times[n] = {kind: 1e6 * statistics.median(rounds[kind]) for kind in variants}
        segments_us, grouped_us, padded_us = times[n].values()
        print(f"{n:8}{segments_us:24.0f}{grouped_us:25.0f}{padded_us:23.0f}")
    return {"base": 1e6 * base, **times}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    results = {
        "command": "python benchmarks/adapters.py",
        "torch": torch.__version__,
        "tiny": measure("assets/tiny-qwen3, head included", *tiny()),
        "qwen3_06b": measure(f"Qwen3-0.6B's shapes, {LAYERS} layers, no head", *qwen3_06b()),
        "one_projection": {size: one_projection(size) for size in (128, 1024)},
    }
    target = Path(__file__).with_suffix(".json")
    target.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten to {target.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
