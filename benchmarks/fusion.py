"""Fused projections against separate ones, base and adapted, in the shapes of the embedded engine.

    python benchmarks/fusion.py        about two minutes; writes benchmarks/fusion.json

q, k and v read the same x, as do gate and up, so an engine may compute each set as one product. An
adapter breaks the one product up again, since every projection has its own A and B:

    separate     x ──► W_q ──► + B_q A_q x        three LoRALinear, each with its own shrink
                 x ──► W_k ──► + B_k A_k x
                 x ──► W_v ──► + B_v A_v x

    fused        x ──► [W_q; W_k; W_v] ──► split ──► + B_q h_q, + B_k h_k, + B_v h_v
                 x ──► [A_q; A_k; A_v] ──► h, split          one shrink, three expands

A training pass is forward and backward, to x and to A and B, with the fused adapter held as one A.
Both ways compute the same numbers (checked). One thread, its CPU time rather than wall time (what
else runs on the machine then hardly counts); runs of the two alternate, medians are reported, with
the quartiles of the ratio over rounds. The last column sets what fusing saves against one decoder
layer's pass over the same rows, without the reading of a cache: an upper bound of the gain.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from lora import TRAINABLE, LoRAConfig, inject_lora, lora_layers  # noqa: E402
from model import Layer, Qwen3Config, rotary_angles  # noqa: E402

ROOT = Path(__file__).resolve().parent.parent
MODELS = {
    "tiny-qwen3": ROOT / "assets" / "tiny-qwen3" / "config.json",
    "Qwen3-0.6B": ROOT / "configs" / "models" / "Qwen3-0.6B.json",
}
SETS = {"qkv": ("q_proj", "k_proj", "v_proj"), "gate/up": ("gate_proj", "up_proj")}
# (name, sequences, tokens of each, with a backward pass)
PASSES = (
    ("decode 1", 1, 1, False),
    ("decode 32", 32, 1, False),
    ("decode 128", 128, 1, False),
    ("prefill 8 x 64", 8, 64, False),
    ("training 8 x 128", 8, 128, True),
)
RANK, ROUNDS, BUDGET = 8, 15, 0.15  # BUDGET: seconds of one round, so many calls as fit


class FusedLinear(nn.Module):
    """Several LoRALinear as one base product and one shrink; forward gives a tuple of outputs."""

    def __init__(self, layers: list):
        super().__init__()
        self.weight = torch.cat([layer.base.weight for layer in layers])  # (sum of out, in)
        self.sizes = [layer.base.weight.shape[0] for layer in layers]
        self.scaling = layers[0].scaling[TRAINABLE]
        self.A = nn.Parameter(torch.cat([layer.lora_A[TRAINABLE].detach() for layer in layers]))
        self.B = nn.ParameterList(layer.lora_B[TRAINABLE].detach().clone() for layer in layers)

    def forward(self, x: Tensor, adapted: bool) -> tuple[Tensor, ...]:
        outputs = F.linear(x, self.weight).split(self.sizes, dim=-1)
        if not adapted:
            return outputs
        narrow = (F.linear(x, self.A) * self.scaling).split(RANK, dim=-1)
        return tuple(y + F.linear(h, B) for y, h, B in zip(outputs, narrow, self.B, strict=True))


def seconds_a_call(function: Callable[[], object], calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        function()
    return (time.process_time() - start) / calls


def alternate(first: Callable, second: Callable) -> tuple[float, float, list[float]]:
    """Median seconds of a call of each, and the quartiles of first / second over the rounds."""
    once = max(seconds_a_call(function, 3) for function in (first, second))  # also the warm-up
    calls = max(1, int(BUDGET / 2 / once))
    rounds = []
    for number in range(ROUNDS):
        order = (first, second) if number % 2 else (second, first)
        times = {function: seconds_a_call(function, calls) for function in order}
        rounds.append((times[first], times[second]))
    ratios = statistics.quantiles([a / b for a, b in rounds], n=4)
    return *(statistics.median(column) for column in zip(*rounds, strict=True)), ratios


def measure(name: str, file: Path) -> list[dict]:
    """All rows of one model: pass x set x (base, adapted)."""
    config = Qwen3Config.from_pretrained(file)
    torch.manual_seed(0)
    layer = Layer(config, 0)
    inject_lora(layer, LoRAConfig(RANK))
    for adapted in lora_layers(layer).values():
        nn.init.normal_(adapted.lora_B[TRAINABLE], std=0.02)
    fused = {
        which: FusedLinear([module for n, module in lora_layers(layer).items() if n.endswith(ends)])
        for which, ends in SETS.items()
    }
    rows = []
    for label, S, T, training in PASSES:
        x = torch.randn(S, T, config.hidden_size, requires_grad=training)
        cos, sin = rotary_angles(torch.arange(T), config, torch.float32)
        torch.set_grad_enabled(training)

        def finish(outputs, x=x, training=training):
            if training:
                torch.autograd.backward([y.sum() for y in outputs])
                x.grad = None
            return outputs

        for has_adapter in (False, True):
            layer.lora_selection.segments = [(TRAINABLE, None)] if has_adapter else []

            def whole(x=x, cos=cos, sin=sin, finish=finish):
                finish([layer(x, cos, sin, None)])

            whole()
            layer_seconds = statistics.median(seconds_a_call(whole, 1) for _ in range(ROUNDS))
            for which, ends in SETS.items():
                separate = [m for n, m in lora_layers(layer).items() if n.endswith(ends)]

                def apart(separate=separate, x=x, finish=finish):
                    return finish([projection(x) for projection in separate])

                def together(one=fused[which], x=x, finish=finish, has_adapter=has_adapter):
                    return finish(one(x, has_adapter))

                for a, b in zip(apart(), together(), strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
                apart_seconds, together_seconds, ratios = alternate(apart, together)
                row = {
                    "model": name,
                    "pass": label,
                    "layers": which,
                    "adapter": has_adapter,
                    "separate_us": apart_seconds * 1e6,
                    "fused_us": together_seconds * 1e6,
                    "speedup": ratios[1],
                    "speedup_quartiles": [ratios[0], ratios[2]],
                    "share_of_layer": (apart_seconds - together_seconds) / layer_seconds,
                }
                rows.append(row)
                print(
                    f"{name:<11} {label:<17} {which:<8} {'adapted' if has_adapter else 'base':<8}"
                    f"{row['separate_us']:>10,.0f}{row['fused_us']:>10,.0f}"
                    f"{row['speedup']:>9.2f}  [{ratios[0]:.2f}, {ratios[2]:.2f}]"
                    f"{row['share_of_layer']:>8.1%}",
                    flush=True,
                )
        torch.set_grad_enabled(True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    torch.set_num_threads(1)
    setting = {
        "benchmark": "fusion",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "dtype": "float32",
        "rank": RANK,
        "load_before": os.getloadavg()[0],
    }
    print(json.dumps(setting))
    print(
        f"{'model':<11} {'pass':<17} {'layers':<8} {'':<8}{'separate':>10}{'fused':>10}"
        f"{'speedup':>9}  [quartiles]   of a layer      (microseconds)"
    )
    rows = [row for name, file in MODELS.items() for row in measure(name, file)]
    result = setting | {"rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
