"""Two processes on one checkpoint: is the frozen base in memory once or twice?

    .venv/bin/python benchmarks/sharing.py [CHECKPOINT]      the tiny base; or any directory

Each process loads it, puts an adapter in and computes one forward pass, which touches every weight.
Then /proc/PID/smaps of one of them, for the mappings of the weight files, alone and beside the
other: Rss is what it has in memory, Pss divides each page by the processes that have it, and
private-dirty is what it has copied. The page cache holds the pages, so two of them halve Pss.
"""

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIELDS = ("Rss", "Pss", "Shared_Clean", "Private_Dirty")


def hold(model: str) -> None:
    """Loads and computes, says so, and waits for its input to close."""
    sys.path.insert(0, str(ROOT))
    import torch

    from lora import LoRAConfig, inject_lora
    from model import Qwen3

    policy = Qwen3.from_pretrained(model)
    inject_lora(policy, LoRAConfig())
    ids = torch.arange(policy.config.vocab_size)[None]  # the whole embedding, a piece at a time
    with torch.no_grad():
        for piece in ids.split(256, dim=1):
            policy(piece)
    print("loaded", flush=True)
    sys.stdin.read()


def start(model: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--hold", model]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    if process.stdout.readline() != "loaded\n":
        raise SystemExit(f"{model} could not be loaded")
    return process


def mapped(process: int, directory: Path) -> dict[str, float]:
    """MB of the weight files in a process, by the kernel's fields."""
    total, inside = dict.fromkeys(FIELDS, 0.0), False
    for line in Path(f"/proc/{process}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(".safetensors") and str(directory) in line
        elif inside and (name := line.partition(":")[0]) in FIELDS:
            total[name] += int(line.split()[1]) / 1024
    return {name: round(value, 2) for name, value in total.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    tiny = ROOT / "assets" / "tiny-qwen3"
    parser.add_argument("checkpoint", nargs="?", type=Path, default=tiny, help="a directory")
    parser.add_argument("--hold", action="store_true", help=argparse.SUPPRESS)  # a child process
    options = parser.parse_args()
    model = options.checkpoint.resolve()
    if options.hold:
        return hold(str(model))
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2**20
    with start(str(model)) as one:
        alone = mapped(one.pid, model)
        with start(str(model)) as other:
            beside = mapped(one.pid, model)
            other.stdin.close()
        one.stdin.close()
    print(f"{model}: {size:.2f} MB of weights, as one process has them, in MB")
    for name, values in {"alone": alone, "beside another": beside}.items():
        print(f"  {name:15} " + "  ".join(f"{field} {values[field]:.2f}" for field in FIELDS))
    print(json.dumps({"benchmark": "sharing", "file": size, "alone": alone, "beside": beside}))


if __name__ == "__main__":
    main()
