"""Memory and time of every mode of training, on the same task: one short run of each, one table.

    python benchmarks/modes.py            about three minutes on two quiet cores; writes modes.json

The runs are those of a user, `python train.py ...` and `python sft.py ...` in processes of their
own (the tiny checkpoint, few and small steps). Seconds are those from the end of one step to that
of the next, publishing included, as a mean from the third step on, since a pipeline fills in the
first two. Peak memory is of the whole process; at this size it is mostly torch itself:
benchmarks/full.py and benchmarks/quant.py have larger shapes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHORT = ["--steps", "8", "--eval-size", "16"]
GROUPS = ["--groups", "8", "--group-size", "8"]
MODES = {
    "LoRA, rank 8": ["train.py", "--rank", "8", *GROUPS],
    "LoRA, rank 1": ["train.py", "--rank", "1", *GROUPS],
    "full fine-tuning": ["train.py", "--full", "--lr", "1.5e-4", *GROUPS],
    "4-bit base (NF4)": ["train.py", "--rank", "8", "--quantize", "nf4", *GROUPS],
    "mixture of experts": ["train.py", "--rank", "8", "--model", "{mixture}", *GROUPS],
    "one step stale": ["train.py", "--rank", "8", "--max-staleness", "1", *GROUPS],
    "two processes": [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "train.py",
        "--rank",
        "8",
        *GROUPS,
    ],
    "supervised, LoRA": ["sft.py", "--rank", "8"],
    "supervised, full": ["sft.py", "--full", "--lr", "1.5e-4"],
}


def step_ends(command: list[str], **options) -> list[float]:
    """Runs it, options as for Popen; the times at which the lines of its steps came out."""
    ends = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options) as process:
        for line in process.stdout:
            if line.startswith("step "):
                ends.append(time.monotonic())
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    return ends


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    rows = []
    print(f"{'mode':<20}{'trained':>12}{'s a step':>10}{'peak, GB':>10}   command")
    with tempfile.TemporaryDirectory() as scratch:
        mixture = Path(scratch) / "mixture"
        script = str(ROOT / "assets" / "make_tiny_moe.py")
        make = [sys.executable, script, "--output", str(mixture)]
        subprocess.run(make, check=True, capture_output=True)
        for number, (mode, flags) in enumerate(MODES.items()):
            output = Path(scratch) / str(number)
            flags = [flag.replace("{mixture}", str(mixture)) for flag in flags]
            command = [sys.executable, *flags, *SHORT, "--output", str(output)]
            ends = step_ends(command, cwd=ROOT)
            summary = json.loads((output / "summary.json").read_text())
            row = {
                "mode": mode,
                "trained": summary["adapter_parameters"] or summary["base_parameters"],
                "seconds_a_step": (ends[-1] - ends[1]) / (len(ends) - 2),
                "peak_memory_bytes": summary["peak_memory_bytes"],
                "command": " ".join(["python", *MODES[mode], *SHORT]),
            }
            rows.append(row)
            print(
                f"{mode:<20}{row['trained']:>12,}{row['seconds_a_step']:>10.2f}"
                f"{row['peak_memory_bytes'] / 1e9:>10.2f}   {row['command']}",
                flush=True,
            )
    setting = {"threads": os.environ.get("OMP_NUM_THREADS", "all"), "cores": os.cpu_count()}
    result = setting | {"load": os.getloadavg()[0], "rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
