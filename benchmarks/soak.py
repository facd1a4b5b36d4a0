"""Three hundred steps of a tiny job, overlapped: nothing may grow but the run's own records.

    .venv/bin/python benchmarks/soak.py --result benchmarks/soak.json --figure benchmarks/soak.png

Every tenth step: resident memory and open files of the trainer and of its server (/proc), versions
on disk and on the server. Flat: the mean of the last third is within 2% of the middle third's for
memory, and no more for what is counted. (The first third is warm-up: caches fill, the allocator
finds its size.)

One thing grows, and may, by one a step: the empty directories (.v000018.retired) that versions
leave behind, so that no path is used twice (broadcast.py: retire). They are a row of their own.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.faults import server_process  # noqa: E402
from client import call  # noqa: E402

JOB = """--groups 2 --group-size 4 --eval-size 8 --save-every 20 --max-staleness 1
    --threads 1 --sampler-threads 1""".split()
SLACK = {"memory": 1.02, "files": 1.0, "versions": 1.0}
RETIRED = "retired names on disk"


def measured(process: int, name: str) -> dict:
    proc = Path(f"/proc/{process}")
    resident = int(re.search(r"VmRSS:\s+(\d+)", (proc / "status").read_text())[1])
    return {
        f"memory of the {name}": resident / 1024,
        f"files of the {name}": len(list((proc / "fd").iterdir())),
    }


def soak(steps: int, every: int, output: Path) -> list[dict]:
    """Runs the job; a row of measurements every so many steps."""
    rows, url = [], ""
    command = [sys.executable, str(ROOT / "train.py"), "--output", str(output), *JOB]
    command += ["--steps", str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if found := re.search(r"is ready at (\S+)", line):
                url = found[1]
            found = re.match(r"step +(\d+)/", line)
            if found and int(found[1]) % every == 0:
                served = call(f"{url}/v1/models").json()["data"]
                row = {"step": int(found[1])}
                row |= measured(process.pid, "trainer")
                row |= measured(server_process(url), "server")
                row["versions on disk"] = len(list(output.glob("broadcasts/*/v*")))
                row["versions on the server"] = len(served) - 1
                row[RETIRED] = len(list(output.glob("broadcasts/*/.v*.retired")))
                rows.append(row)
    if process.returncode:
        raise SystemExit(f"train.py ended with exit code {process.returncode}")
    return rows


def growth(rows: list[dict], name: str) -> float:
    """The last third's mean over the middle third's; of counts, the largest instead."""
    third = len(rows) // 3
    middle, last = ([row[name] for row in part] for part in (rows[third:-third], rows[-third:]))
    mean = statistics.mean if name.startswith("memory") else max
    return mean(last) / mean(middle)


def draw(rows: list[dict], file: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), layout="constrained")
    for axis, kind in zip(axes, SLACK, strict=True):
        for name in (name for name in rows[0] if name.startswith(kind)):
            label = name.removeprefix(kind).strip()
            axis.plot([row["step"] for row in rows], [row[name] for row in rows], label=label)
        axis.set_title({"memory": "resident memory, MB", "files": "open files"}.get(kind, kind))
        axis.set_ylim(0)
        axis.set_xlabel("step")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300, help="of the run")
    parser.add_argument("--every", type=int, default=10, help="steps between two measurements")
    parser.add_argument("--result", help="a JSON file")
    parser.add_argument("--figure", help="a PNG file")
    options = parser.parse_args()
    if options.steps // options.every < 3:
        parser.error("--steps must be at least three times --every: thirds are compared")
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        rows = soak(options.steps, options.every, Path(directory) / "run")
    flat = [name for name in rows[0] if name not in ("step", RETIRED)]
    grown = {name: round(growth(rows, name), 4) for name in flat}
    for name, factor in grown.items():
        print(f"{name}: {rows[0][name]:.0f} at first, {rows[-1][name]:.0f} at last, x {factor}")
    print(f"{RETIRED}: {rows[0][RETIRED]} at first, {rows[-1][RETIRED]} at last (one a step)")
    print(f"{options.steps} steps in {time.monotonic() - started:.0f} s")
    if options.figure:
        draw(rows, options.figure)
    if options.result:
        content = {"benchmark": "soak", "steps": options.steps, "growth": grown, "rows": rows}
        Path(options.result).write_text(json.dumps(content) + "\n")
    if risen := [name for name, x in grown.items() if x > SLACK[name.split()[0]]]:
        raise SystemExit(f"not flat: {', '.join(risen)}")
    if any(row[RETIRED] > row["step"] + 1 for row in rows):  # the next may end while we count
        raise SystemExit(f"{RETIRED}: more than one a step")


if __name__ == "__main__":
    main()
