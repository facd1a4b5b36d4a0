"""The training runs of an experiment: `train.py` and `sft.py` as users start them, kept, reused.

    arguments ──► runs/experiments/<digest of the arguments>/ ──► Run(rows, summary, ...)

Runs take turns on `jobs` processes of one thread each, which two cores finish sooner than one
process of two threads. A run that is there already is read, not repeated: experiments share runs
(the sweep of ranks is also a sweep of learning rates), and a gallery that was broken off goes on
where it was. Delete the directory to start over, as after a change of the code.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = ROOT / "runs" / "experiments"


@dataclass
class Run:
    """What a run left: `rows` of metrics.jsonl; `summary`, {} if it stopped with an error, whose
    last line is `error` then (a learning rate may be too high to survive)."""

    output: Path
    rows: list[dict]
    summary: dict
    error: str = ""

    @property
    def held_out(self) -> float:
        """Mean greedy reward on the held-out questions at the end; a run that stopped earns 0."""
        return self.summary.get("eval_after", 0.0)


def directory_of(arguments: tuple[str, ...]) -> Path:
    digest = hashlib.sha256("\0".join(arguments).encode()).hexdigest()
    return RUNS / f"{Path(arguments[0]).stem}-{digest[:12]}"


def read_run(output: Path) -> Run:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    summary, error = output / "summary.json", output / "error"
    if summary.is_file():
        return Run(output, rows, json.loads(summary.read_text()))
    return Run(output, rows, {}, error.read_text())


def finished(output: Path) -> bool:
    return (output / "summary.json").is_file() or (output / "error").is_file()


def start(arguments: tuple[str, ...], output: Path) -> subprocess.Popen:
    shutil.rmtree(output, ignore_errors=True)  # what a broken attempt left
    output.mkdir(parents=True)
    command = [sys.executable, str(ROOT / arguments[0]), *arguments[1:], "--output", str(output)]
    with open(output / "run.log", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def finish(process: subprocess.Popen, output: Path) -> None:
    """Of a run that stopped by itself: a non-finite gradient is a result, anything else a fault."""
    if process.returncode == 0:
        return
    last = (output / "run.log").read_text().strip().splitlines()[-1]
    if "finite" not in last:
        raise RuntimeError(f"{output / 'run.log'}: {last}")
    (output / "error").write_text(last)


def run_all(commands: list[tuple[str, ...]], jobs: int = 2) -> list[Run]:
    """`commands` are (program, flag, value, ...); returns their runs in this order. Raises
    RuntimeError with the log's name if one fails for another reason than a non-finite value."""
    outputs = [directory_of(command) for command in commands]
    waiting = [
        (command, output)
        for command, output in dict(zip(commands, outputs, strict=True)).items()
        if not finished(output)
    ]
    total, under_way, begun = len(waiting), {}, time.monotonic()
    done = 0
    try:
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                command, output = waiting.pop(0)
                under_way[start(command, output)] = command, output
            time.sleep(0.1)
            for process in [process for process in under_way if process.poll() is not None]:
                command, output = under_way.pop(process)
                finish(process, output)
                done += 1
                left = (time.monotonic() - begun) / done * (total - done)
                print(f"{done}/{total}  {' '.join(command)}  ETA {left / 60:.0f} min", flush=True)
    finally:
        for process in under_way:
            process.terminate()
            process.wait()
    return [read_run(output) for output in outputs]
