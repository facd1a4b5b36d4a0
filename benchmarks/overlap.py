"""Does it pay to sample while the trainer steps? Two cores, the same work, three ways.

    .venv/bin/python benchmarks/overlap.py             (5 minutes on two idle cores)
    .venv/bin/python benchmarks/overlap.py --steps 6   fewer steps
    ... -- --rank 1                                    what follows -- is for train.py

    embedded        --threads 2                       the sampler in the trainer, in turns
    served          --threads 1, server 1             in a process of its own, still in turns
    overlapped      --threads 1, --sampler-threads 1, --max-staleness 1

Every way trains the default job, with the same questions and seeds. What is reported: the seconds
between two steps (publishing and probing included, evaluations not), from the third on, since the
pipeline fills in the first two, as mean and median: overlapped steps are uneven, since a batch that
waits for its last episodes is often followed by one that is there already; and the held-out
accuracy that was reached.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools.vllm_server import TorchServer  # noqa: E402

MODEL = str(ROOT / "assets" / "tiny-qwen3")
WAYS = {
    "embedded": ["--threads", "2"],
    "served": ["--threads", "1", "--engine", "vllm"],
    "overlapped": ["--threads", "1", "--sampler-threads", "1", "--max-staleness", "1"],
}


def run(output: Path, flags: list[str]) -> dict:
    """One run of train.py; the times at which its lines came out are its steps' ends."""
    command = [sys.executable, str(ROOT / "train.py"), "--output", str(output), *flags]
    ends = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("step "):
                ends.append(time.monotonic())
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return {
        "seconds_a_step": statistics.mean(seconds[1:]),
        "seconds_a_step_median": statistics.median(seconds[1:]),
        "seconds_waiting": statistics.median(row["seconds_waiting"] for row in rows[2:]),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "eval_after": summary["eval_after"],
        "last_rewards": statistics.mean(row["reward"] for row in rows[-4:]),
    }


async def measure(name: str, output: Path, flags: list[str]) -> dict:
    if name != "served":
        return run(output, flags + WAYS[name])
    async with TorchServer(MODEL, output.with_suffix(".log"), threads=1) as server:
        return run(output, [*flags, *WAYS[name], "--vllm-url", server.url])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    ways = list(WAYS)
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways, help="by default all")
    parser.add_argument("--result", help="a JSON file")
    parser.add_argument("more", nargs="*", metavar="-- FLAG", help="of train.py")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps must be 4 or more, since the first two fill the pipeline")
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        for name in options.ways:
            flags = ["--steps", str(options.steps), *options.more]
            results[name] = asyncio.run(measure(name, Path(directory) / name, flags))
            print(name, {key: round(value, 3) for key, value in results[name].items()}, flush=True)
    if "overlapped" in results:
        overlapped = results["overlapped"]["seconds_a_step"]
        for name in results.keys() - {"overlapped"}:
            ratio = results[name]["seconds_a_step"] / overlapped
            print(f"{name} takes {ratio:.2f} times as long a step as overlapped")
    text = json.dumps({"benchmark": "overlap", "steps": options.steps, **results})
    print(text)
    if options.result:
        Path(options.result).write_text(text + "\n")


if __name__ == "__main__":
    main()
