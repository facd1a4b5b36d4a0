"""The training runs of an experiment: `train.py` and `sft.py` as users start them, kept, reused.

    arguments ──► runs/experiments/<digest of the arguments>/ ──► Run(rows, summary, error, ...)
                    run.log      what it printed
                    run/         its --output
                    ended.json   written last: command, error, seconds; without it, not finished

Runs take turns on `jobs` processes of one thread each, which two cores finish sooner than one
process of two threads. A run that is there already is read, not repeated: experiments share runs
(the sweep of ranks is also a sweep of learning rates), and a gallery that was broken off goes on
where it was. Delete the directory to start over, as after a change of the code; EXPERIMENT_RUNS in
the environment names another one.
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RUNS = Path(os.environ.get("EXPERIMENT_RUNS", ROOT / "runs" / "experiments")).absolute()
# How train.py and sft.py end when a number blows up; any other error is a fault.
NON_FINITE = re.compile(r"not finite|NaN|infinity")


@dataclass
class Run:
    """What a run left: `rows` of metrics.jsonl; `summary`, {} if it stopped with an error, whose
    last line is `error` then (a learning rate may be too high to survive); seconds of wall and of
    processor time, from start to exit."""

    output: Path
    rows: list[dict]
    summary: dict
    error: str = ""
    seconds: float = 0.0
    cpu_seconds: float = 0.0

    @property
    def held_out(self) -> float:
        """Mean greedy reward on the held-out questions at the end; a run that stopped earns 0."""
        return self.summary["eval_after"] if self.summary else 0.0


def directory_of(arguments: tuple[str, ...]) -> Path:
    digest = hashlib.sha256("\0".join(arguments).encode()).hexdigest()
    return RUNS / f"{Path(arguments[0]).stem}-{digest[:12]}"


def finished(directory: Path) -> bool:
    # Not summary.json: a run that was interrupted or failed writes one too.
    return (directory / "ended.json").is_file()


def read_run(directory: Path) -> Run:
    output, ended = directory / "run", json.loads((directory / "ended.json").read_text())
    metrics, summary = output / "metrics.jsonl", {}
    lines = metrics.read_text().splitlines() if metrics.is_file() else []
    if not ended["error"]:
        summary = json.loads((output / "summary.json").read_text())
    times = ended["seconds"], ended["cpu_seconds"]
    return Run(output, [json.loads(line) for line in lines], summary, ended["error"], *times)


def start(arguments: tuple[str, ...], directory: Path) -> subprocess.Popen:
    shutil.rmtree(directory, ignore_errors=True)  # what a broken attempt left
    directory.mkdir(parents=True)
    output = str(directory / "run")
    command = [sys.executable, str(ROOT / arguments[0]), *arguments[1:], "--output", output]
    with open(directory / "run.log", "w") as log:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)


def poll(process: subprocess.Popen) -> float | None:
    """Seconds of processor time of a process that has ended, its children's included; else None."""
    number, status, usage = os.wait4(process.pid, os.WNOHANG)
    if not number:
        return None
    process.returncode = os.waitstatus_to_exitcode(status)
    return usage.ru_utime + usage.ru_stime


def finish(process: subprocess.Popen, directory: Path, **facts) -> None:
    """Of a run that ended by itself: a non-finite number is a result, any other error a fault."""
    log, error = directory / "run.log", ""
    if process.returncode:
        error = (log.read_text().strip().splitlines() or ["it printed nothing"])[-1]
        if not NON_FINITE.search(error):
            raise RuntimeError(f"{log}: ended with {process.returncode}: {error}")
    beside = directory / ".ended.json"
    beside.write_text(json.dumps(facts | {"error": error}, indent=1) + "\n")
    beside.rename(directory / "ended.json")


def run_all(commands: list[tuple[str, ...]], jobs: int = 2, fresh: bool = False) -> list[Run]:
    """`commands` are (program, flag, value, ...); returns their runs in this order. `fresh`: none
    is read, all are repeated, as for seconds, which are those of the code that ran. Raises
    RuntimeError with the log's name if one fails for another reason than a non-finite value, and
    ends those under way; ValueError for no jobs."""
    if jobs < 1:
        raise ValueError(f"{jobs} jobs would never finish a run")
    commands = [tuple(map(str, command)) for command in commands]
    waiting = [
        command
        for command in dict.fromkeys(commands)
        if fresh or not finished(directory_of(command))
    ]
    total, done, begun = len(waiting), 0, time.monotonic()
    under_way: dict[tuple[str, ...], tuple[subprocess.Popen, float]] = {}
    try:
        while waiting or under_way:
            while waiting and len(under_way) < jobs:
                command = waiting.pop(0)
                under_way[command] = start(command, directory_of(command)), time.monotonic()
            time.sleep(0.1)
            for command, (process, started) in list(under_way.items()):
                cpu_seconds = poll(process)
                if cpu_seconds is None:
                    continue
                del under_way[command]
                seconds = time.monotonic() - started
                facts = {"command": command, "seconds": seconds, "cpu_seconds": cpu_seconds}
                finish(process, directory_of(command), **facts)
                done += 1
                left = (time.monotonic() - begun) / done * (total - done)
                print(f"{done}/{total}  {' '.join(command)}  ETA {left / 60:.0f} min", flush=True)
    finally:
        for process, _ in under_way.values():
            process.terminate()
            process.wait()
    return [read_run(directory_of(command)) for command in commands]
