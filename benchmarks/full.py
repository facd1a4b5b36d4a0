"""Memory of one training step, weights included: LoRA against full fine-tuning.

    .venv/bin/python benchmarks/full.py        (6 GB of memory)

The 4-layer slice of Qwen3-0.6B of memory.py, with random weights, on 2 x 256 tokens, loss on the
last half of each, then a step of Adam; each way in a process of its own. What counts is the peak of
the resident set minus what it was before the model was made: weights, gradients, moments,
activations, and for full fine-tuning the frozen copy that is its reference, whose forward pass is
timed apart. So few tokens that it is the parameters that are measured.
"""

import copy
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

from memory import COUNTED, PROJECTIONS, RANK, SHAPES, TOKENS, resident_bytes

SEQUENCES = 2


def measure(name: str) -> dict:
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch

    from lora import LoRAConfig, adapter_disabled, inject_lora, trainable
    from model import Qwen3, Qwen3Config

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
    return {
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "seconds": time.perf_counter() - middle,
        "reference_seconds": middle - start,
        "trained": sum(parameter.numel() for parameter in trainable(model).values()),
    }


def main() -> None:
    for name in ("lora", "full, no reference", "full"):
        command = [sys.executable, __file__, name]
        result = json.loads(subprocess.run(command, check=True, stdout=-1).stdout)
        print(
            f"{name}: {result['trained']:,} parameters trained, {result['peak'] / 1e9:.2f} GB, "
            f"step {result['seconds']:.1f} s, reference {result['reference_seconds']:.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        main()
