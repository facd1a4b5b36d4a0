"""Memory that a loss-and-backward step takes beyond the loaded model: this project against PEFT.

    .venv-peers/bin/python benchmarks/memory.py        (see .ci/run: transformers and peft beside)

Both do the same work, each in a process of its own: a 4-layer slice of Qwen3-0.6B with random
weights (vocabulary 151,936, tied), rank 8 on all seven projections, 8 x 256 tokens, the policy loss
on the last half of each. Growth is the peak of the resident set minus what it was before the step.
The peer computes its logits for the positions that carry loss alone, as its users would.
"""

import json
import resource
import subprocess
import sys
import time
from pathlib import Path

SHAPES = {
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
}
SEQUENCES, TOKENS, COUNTED, RANK = 8, 256, 128, 8
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def ours():
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import torch

    from lora import LoRAConfig, inject_lora
    from model import Qwen3, Qwen3Config

    model = Qwen3(Qwen3Config(**SHAPES))
    inject_lora(model, LoRAConfig(rank=RANK, target_modules=PROJECTIONS))
    mask = torch.zeros(SEQUENCES, TOKENS - 1, dtype=torch.bool)
    mask[:, -COUNTED:] = True

    def step(ids):
        logprobs, _ = model.token_logprobs(ids, mask)
        (-logprobs.sum() / mask.sum()).backward()

    return step


def peft():
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=list(PROJECTIONS))
    model = get_peft_model(Qwen3ForCausalLM(Qwen3Config(**SHAPES)), config)

    def step(ids):
        # One position more than is counted: the logits before a token are those that predict it.
        logits = model(input_ids=ids, logits_to_keep=COUNTED + 1).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(2, ids[:, -COUNTED:, None])
        (-logprobs.sum() / logprobs.numel()).backward()

    return step


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(name: str) -> dict:
    step = {"ours": ours, "peft": peft}[name]()
    import torch

    ids = torch.randint(SHAPES["vocab_size"], (SEQUENCES, TOKENS))
    before, start = resident_bytes(), time.perf_counter()
    step(ids)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"growth": peak - before, "seconds": time.perf_counter() - start}


def main() -> dict:
    results = {}
    for name in ("ours", "peft"):
        command = [sys.executable, __file__, name]
        results[name] = json.loads(subprocess.run(command, check=True, stdout=-1).stdout)
        growth, seconds = results[name]["growth"], results[name]["seconds"]
        print(f"{name}: {growth / 1e9:.2f} GB over the loaded model, {seconds:.1f} s")
    ratio = results["ours"]["growth"] / results["peft"]["growth"]
    print(json.dumps({"benchmark": "memory", "ratio": round(ratio, 3), **results}))
    return results


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
    else:
        Path(__file__).with_suffix(".json").write_text(json.dumps(main(), indent=1) + "\n")
