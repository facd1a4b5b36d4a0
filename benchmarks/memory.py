"""Memory that loss and backward take beyond the loaded model: this project against PEFT.

    .venv-peers/bin/python benchmarks/memory.py        about five minutes; see environments.sh

All do the same work, each in a process of its own, on one thread: a 4-layer slice of Qwen3-0.6B
with random weights (vocabulary 151,936, tied), fp32, rank 8 on all seven projections, 8 x 256
tokens. The loss is minus the mean logprob of the last 128 tokens of each; there is no optimizer.

    ours         model.token_logprobs, which computes the entropy too
    peft         as TRL does: logits_to_keep, then gather minus logsumexp, row by row
    peft, lean   the head called by hand on the positions with loss. The logits are the same but for
                 one position a row; what goes is the slice that drops it, whose gradient is a copy

Growth is the peak of the resident set minus what it was before the step. Three rounds, in
alternating order; medians.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from importlib.metadata import version
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
ROUNDS = 3
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


def selected_logprobs(logits, ids):
    """(.., V), (..) -> (..): TRL's selective_log_softmax in fp32, no log_softmax of all logits.

    Of logits (S, T, V) a row at a time, as there; of (M, V) 128 positions at a time.
    """
    import torch

    parts = logits.split(1 if logits.dim() == 3 else 128)
    normalisers = torch.cat([part.logsumexp(-1) for part in parts])
    return logits.gather(-1, ids[..., None]).squeeze(-1) - normalisers


def peft_model():
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = LoraConfig(r=RANK, lora_alpha=32, target_modules=list(PROJECTIONS))
    return get_peft_model(Qwen3ForCausalLM(Qwen3Config(**SHAPES)), config)


def peft():
    model = peft_model()

    def step(ids):
        # One position more than is counted: the logits before a token are those that predict it.
        keep = COUNTED + 1
        logits = model(input_ids=ids, logits_to_keep=keep, use_cache=False).logits[:, :-1]
        (-selected_logprobs(logits, ids[:, -COUNTED:]).mean()).backward()

    return step


def lean_peft():
    model = peft_model()
    base = model.get_base_model()

    def step(ids):
        hidden = base.model(input_ids=ids, use_cache=False).last_hidden_state
        logits = base.lm_head(hidden[:, -COUNTED - 1 : -1].flatten(0, 1))
        (-selected_logprobs(logits, ids[:, -COUNTED:].flatten()).mean()).backward()

    return step


WAYS = {"ours": ours, "peft": peft, "peft, lean": lean_peft}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """Of this program; ru_maxrss begins with that of the process which started it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def measure(name: str) -> dict:
    import torch

    torch.set_num_threads(1)
    step = WAYS[name]()
    ids = torch.randint(SHAPES["vocab_size"], (SEQUENCES, TOKENS))
    before, start = resident_bytes(), time.perf_counter()
    step(ids)
    return {"growth": peak_bytes() - before, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)  # of a child process
    if way := parser.parse_args().way:
        return print(json.dumps(measure(way)))
    runs = {name: [] for name in WAYS}
    for number in range(ROUNDS):
        for name in list(WAYS)[:: -1 if number % 2 else 1]:
            command = [sys.executable, __file__, "--way", name]
            runs[name].append(json.loads(subprocess.run(command, check=True, stdout=-1).stdout))
    results = {
        "benchmark": "memory",
        "threads": 1,
        "rounds": ROUNDS,
        "versions": {name: version(name) for name in ("torch", "transformers", "peft")},
        "shapes": SHAPES,
        "sequences": SEQUENCES,
        "tokens": TOKENS,
        "tokens_with_loss": COUNTED,
        "rank": RANK,
    }
    for name, its in runs.items():
        middle = {key: statistics.median(run[key] for run in its) for key in its[0]}
        results[name] = middle | {"growths": [run["growth"] for run in its]}
        print(f"{name}: {middle['growth'] / 1e9:.2f} GB over the loaded model")
    print(json.dumps(results))
    Path(__file__).with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
