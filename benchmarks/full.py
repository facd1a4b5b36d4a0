"""Memory of one training step, weights included: LoRA against full fine-tuning.

    .venv/bin/python benchmarks/full.py        (8 GB of memory); keeps full.json

The 4-layer slice of Qwen3-0.6B of memory.py, with random weights, on its 8 x 256 tokens, loss on
the last half of each, then a step of Adam; each way in a process of its own, on one thread. What
counts is the peak of the resident set minus what it was before the model was made: weights,
gradients, moments, activations, and for full fine-tuning the frozen copy that is its reference,
whose forward pass is timed apart. Beside it stand the bytes of Adam's moments.
"""

import argparse
import copy
import json
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.memory import (  # noqa: E402
    COUNTED,
    PROJECTIONS,
    RANK,
    SEQUENCES,
    SHAPES,
    TOKENS,
    peak_bytes,
    resident_bytes,
)

WAYS = ("lora", "full, no reference", "full")


def measure(name: str) -> dict:
    import torch

    from lora import LoRAConfig, adapter_disabled, inject_lora, trainable
    from model import Qwen3, Qwen3Config

    torch.set_num_threads(1)
    warm = torch.zeros(1, requires_grad=True)
    warm.sum().backward()
    torch.optim.Adam([warm]).step()  # what a first step imports is no memory of a model
    before = resident_bytes()
    model = Qwen3(Qwen3Config(**SHAPES))
    if name == "lora":
        inject_lora(model, LoRAConfig(rank=RANK, target_modules=PROJECTIONS))
    reference = copy.deepcopy(model).requires_grad_(False) if name == "full" else model
    optimizer = torch.optim.Adam(trainable(model).values(), lr=1e-4)
    mask = torch.zeros(SEQUENCES, TOKENS - 1, dtype=torch.bool)
    mask[:, -COUNTED:] = True
    ids = torch.randint(SHAPES["vocab_size"], (SEQUENCES, TOKENS))

    start = time.perf_counter()
    with torch.no_grad(), adapter_disabled(model):
        if name != "full, no reference":
            reference.token_logprobs(ids, mask)
    middle = time.perf_counter()
    logprobs, _ = model.token_logprobs(ids, mask)
    (-logprobs.sum() / mask.sum()).backward()
    optimizer.step()
    end = time.perf_counter()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim()]
    return {
        "peak": peak_bytes() - before,
        "optimizer": sum(tensor.nbytes for tensor in moments),
        "seconds": end - middle,
        "reference_seconds": middle - start,
        "trained": sum(parameter.numel() for parameter in trainable(model).values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a child process
    if way := parser.parse_args().way:
        return print(json.dumps(measure(way)))
    results = {
        "benchmark": "full",
        "threads": 1,
        "versions": {"torch": version("torch")},
        "shapes": SHAPES,
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        "tokens_with_loss": COUNTED,
        "rank": RANK,
    }
    for name in WAYS:
        command = [sys.executable, __file__, "--way", name]
        result = json.loads(subprocess.run(command, check=True, stdout=-1).stdout)
        print(
            f"{name}: {result['trained']:,} parameters trained, {result['peak'] / 1e9:.2f} GB, "
            f"{result['optimizer'] / 1e6:,.1f} MB of it moments, "
            f"step {result['seconds']:.1f} s, reference {result['reference_seconds']:.1f} s",
            flush=True,
        )
        results[name] = result
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
