"""Does it pay to sample while the trainer steps? Two cores, the same work, three ways.

    python benchmarks/overlap.py              a quarter of an hour on two idle cores; overlap.json
    python benchmarks/overlap.py --seeds 0 --steps 6 --result /tmp/overlap.json     to see it work
    ... -- --rank 1                           what follows -- is for train.py

    embedded        --threads 2                       the sampler in the trainer, in turns
    served          --threads 1, server 1             in a process of its own, still in turns
    overlapped      --threads 1, --sampler-threads 1, --max-staleness 1

Every way trains the default job, with the same questions for a seed. The ways take turns, a seed
after the other, and each seed begins with another way, so that what else the machine does in the
meantime meets all. What is reported: the seconds between two steps (publishing and probing
included, evaluations not), from the third on, since the pipeline fills in the first two, as a mean:
overlapped steps are uneven, since a batch that waits for its last episodes is often followed by one
that is there already, and a median would hide that; and the held-out accuracy, before and after.

Of the seeds: medians of those means, ratios paired within a seed with their range, accuracy as mean
and range. --result is written after every run; a benchmark that is started again goes on where it
was, so remove the file to measure anew. benchmarks/readme.py tabulates what is kept.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.modes import step_ends  # noqa: E402
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
    load, ends = os.getloadavg()[0], step_ends(command)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((output / "summary.json").read_text())
    seconds = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    return {
        "seconds_a_step": statistics.mean(seconds[1:]),
        "seconds_waiting": statistics.mean(row["seconds_waiting"] for row in rows[2:]),
        "staleness_max": max(row["staleness_max"] for row in rows),
        "eval_before": summary["eval_before"],
        "eval_after": summary["eval_after"],
        "load_before": load,
    }


async def measure(way: str, output: Path, flags: list[str]) -> dict:
    if way != "served":
        return run(output, flags + WAYS[way])
    async with TorchServer(MODEL, output.with_suffix(".log"), threads=1) as server:
        return run(output, [*flags, *WAYS[way], "--vllm-url", server.url])


def summary(runs: list[dict]) -> dict[str, dict]:
    """What is told of each way; ratios are of its seconds to the overlapped run's of its seed."""
    overlapped = {r["seed"]: r["seconds_a_step"] for r in runs if r["way"] == "overlapped"}
    told = {}
    for way in WAYS:
        its = [run for run in runs if run["way"] == way]
        if not its:
            continue
        ratios = [
            run["seconds_a_step"] / overlapped[run["seed"]]
            for run in its
            if run["seed"] in overlapped
        ]
        after = [run["eval_after"] for run in its]
        told[way] = {
            "seeds": len(its),
            "seconds_a_step": statistics.median(run["seconds_a_step"] for run in its),
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_range": [min(ratios), max(ratios)] if ratios else None,
            "eval_before": statistics.mean(run["eval_before"] for run in its),
            "eval_after": statistics.mean(after),
            "eval_after_range": [min(after), max(after)],
        }
    return told


def show(told: dict[str, dict]) -> None:
    for way, its in told.items():
        line = f"{way:<11}{its['seconds_a_step']:6.2f} s a step, median of {its['seeds']}"
        if way != "overlapped" and its["ratio"]:
            low, high = its["ratio_range"]
            line += f"; {its['ratio']:.2f} ({low:.2f} to {high:.2f}) times overlapped"
        low, high = its["eval_after_range"]
        line += f"; held out {its['eval_before']:.3f} -> {its['eval_after']:.3f}"
        print(f"{line} ({low:.3f} to {high:.3f})")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways, file = list(WAYS), Path(__file__).with_suffix(".json")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="of the runs")
    parser.add_argument("--steps", type=int, default=24, help="of each run")
    parser.add_argument("--ways", nargs="+", default=ways, choices=ways, help="by default all")
    parser.add_argument(
        "--result", type=Path, default=file, help="a JSON file, from which an earlier start goes on"
    )
    parser.add_argument("more", nargs="*", metavar="-- FLAG", help="of train.py")
    options = parser.parse_args()
    if options.steps < 4:
        parser.error("--steps must be 4 or more, since the first two fill the pipeline")
    setting = {"benchmark": "overlap", "cores": os.cpu_count()}
    setting |= {"steps": options.steps, "flags": options.more}
    kept = setting | {"runs": []}
    if options.result.is_file():
        kept = json.loads(options.result.read_text())
        if any(kept.get(name) != value for name, value in setting.items()):
            parser.error(f"{options.result} has runs of another setting: remove it or name another")
    done = {(run["way"], run["seed"]) for run in kept["runs"]}
    with tempfile.TemporaryDirectory() as directory:
        for number, seed in enumerate(options.seeds):
            first = number % len(options.ways)
            for way in options.ways[first:] + options.ways[:first]:
                if (way, seed) in done:
                    continue
                flags = ["--steps", str(options.steps), "--seed", str(seed), *options.more]
                measured = asyncio.run(measure(way, Path(directory) / f"{way}-{seed}", flags))
                kept["runs"].append({"way": way, "seed": seed, **measured})
                kept["ways"] = summary(kept["runs"])
                options.result.write_text(json.dumps(kept, indent=1) + "\n")
                print(f"{way}, seed {seed}: {json.dumps(measured)}", flush=True)
    show(kept["ways"])


if __name__ == "__main__":
    main()
