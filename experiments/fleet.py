"""Two runs share one server, one of them is killed halfway, and the other notices nothing.

    python -m experiments fleet            experiments/fleet.json, .md and .png; 2 minutes

          run a, seed 0 ──┐    names a-1-0, a-1-1, ...    ┌─ one base, one cache, one batch:
                          ├──► tools/serve.py ────────────┤  rows of a and rows of b, each with
    SIGKILL ► run b, seed 1    names b-1-0, b-1-1, ...    └─ the adapter that its request names

First run a has the server for itself, then both share it until b has done half of its steps. What a
samples depends on its own adapter and seeds; its neighbours in a batch change logprobs by rounding
(1e-6), so its steps are the same ones unless a draw falls that close to a boundary.

A demonstration and no statistics: one pair of runs, one death.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import safetensors.torch
from matplotlib import pyplot
from matplotlib.figure import Figure

from experiments.runs import ROOT, RUNS

MINUTES = 2
MODEL = ROOT / "assets" / "tiny-qwen3"
STEPS, FLAGS = 6, "--groups 4 --group-size 6 --eval-size 32".split()
QUICK_STEPS, QUICK_FLAGS = 4, "--groups 3 --group-size 4 --eval-size 8".split()


def start(*command, **options) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, command)]
    return subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **options)


def start_run(output: Path, seed: int, flags: list[str], url: str) -> subprocess.Popen:
    output.mkdir(parents=True)
    flags = ["--model", MODEL, "--seed", seed, "--engine", "vllm", "--vllm-url", url, *flags]
    with open(output.with_suffix(".log"), "w") as log:
        streams = {"stdout": log, "stderr": subprocess.STDOUT}
        return start("train.py", *flags, "--output", output, **streams)


def rows_of(output: Path) -> list[dict]:
    """The finished steps of a run that may be writing another."""
    file = output / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def served(url: str) -> list[str]:
    """Names of the adapters that the server offers."""
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return [entry["id"] for entry in json.load(answer)["data"] if entry["parent"]]


def wait(run: subprocess.Popen, output: Path) -> None:
    if run.wait(timeout=600):
        raise RuntimeError(f"{output}: ended with {run.returncode}; see its .log beside it")


def play(output: Path, steps: int, flags: list[str], processes: list[subprocess.Popen]) -> dict:
    """The three runs, their directories under `output`; what is started is put on `processes`."""
    output.mkdir(parents=True)
    with open(output / "server.log", "w") as log:
        streams = {"stdout": subprocess.PIPE, "stderr": log}
        server = start("tools/serve.py", MODEL, "--max-adapters", 4, **streams)
    processes.append(server)
    url, flags = server.stdout.readline().split()[-1], ["--steps", steps, *flags]
    alone, a, b = (output / name for name in ("alone", "a", "b"))
    processes.append(start_run(alone, 0, flags, url))
    wait(processes[-1], alone)
    run_a, run_b = start_run(a, 0, flags, url), start_run(b, 1, flags, url)
    processes += [run_a, run_b]
    while len(rows_of(b)) < steps // 2:
        if run_b.poll() is not None:
            raise RuntimeError(f"{b}: ended with {run_b.returncode} before it was killed")
        time.sleep(0.02)
    run_b.send_signal(signal.SIGKILL)
    run_b.wait()
    # Not before: b may publish or retire a version until it is dead.
    at_death = {"served": served(url), "steps_of_a": len(rows_of(a))}
    wait(run_a, a)
    left, alive = served(url), server.poll() is None
    facts_of_b = json.loads((b / "run.json").read_text())
    rows = {name: rows_of(output / name) for name in ("alone", "a", "b")}
    summaries = {
        name: json.loads((output / name / "summary.json").read_text()) for name in ("alone", "a")
    }
    adapters = [
        safetensors.torch.load_file(directory / "adapter" / "adapter_model.safetensors")
        for directory in (alone, a)
    ]
    same = [
        (one["reward"], one["tokens_sampled"]) == (other["reward"], other["tokens_sampled"])
        for one, other in zip(rows["alone"], rows["a"], strict=True)
    ]
    return {
        "steps": steps,
        "rewards": {name: [row["reward"] for row in these] for name, these in rows.items()},
        "mismatch_max": {name: max(r["mismatch_max"] for r in rows[name]) for name in rows},
        "seconds": {name: summary["seconds"] for name, summary in summaries.items()},
        "held_out": {
            name: [summary["eval_before"], summary["eval_after"]]
            for name, summary in summaries.items()
        },
        "equal_steps": (same + [False]).index(False),  # the first so many
        "adapter_difference": max(
            (tensor - adapters[1][name]).abs().max().item() for name, tensor in adapters[0].items()
        ),
        "when_b_died": at_death,
        "server_alive_at_the_end": alive,
        "left_on_the_server": left,
        "run_id_of_b": facts_of_b["run_id"],
    }


def measure(quick: bool, jobs: int) -> dict:
    """Three runs, of which `jobs` does not change that two are alive at once."""
    output = RUNS / ("fleet-quick" if quick else "fleet")
    shutil.rmtree(output, ignore_errors=True)
    processes: list[subprocess.Popen] = []
    try:
        sizes = (QUICK_STEPS, QUICK_FLAGS) if quick else (STEPS, FLAGS)
        return play(output, *sizes, processes)
    finally:
        for process in processes:
            process.terminate()
            process.wait()


def criteria(result: dict) -> dict[str, bool]:
    """What must hold, in words, and whether it does."""
    rewards, steps, served = result["rewards"], result["steps"], result["when_b_died"]["served"]
    (before, after), (again, shared) = result["held_out"]["alone"], result["held_out"]["a"]
    runs = {name.rsplit("-", 2)[0] for name in served}
    left = result["left_on_the_server"]
    return {
        "a takes all of its steps": len(rewards["a"]) == len(rewards["alone"]) == steps,
        "b dies halfway": steps // 2 <= len(rewards["b"]) < steps,
        # A draw may lie within rounding of a boundary, and then later steps are others.
        "a's first step is the one that it has alone": result["equal_steps"] >= 1,
        "a ends where it ends alone": before == again and abs(after - shared) < 0.1,
        "each samples with its own adapter": max(result["mismatch_max"].values()) < 1e-3,
        "both runs had adapters on the server when b died": len(runs) == 2,
        "the server lives": result["server_alive_at_the_end"],
        # Two, if it died between loading one and unloading the one before.
        "b's last adapter or two are left, and nothing else": (
            1 <= len(left) <= 2 and all(name.startswith(result["run_id_of_b"]) for name in left)
        ),
    }


def verdict(result: dict) -> tuple[str, str]:
    failed = [words for words, holds in criteria(result).items() if not holds]
    if failed:
        return "disagrees", f"Not so: {'; '.join(failed)}."
    why = (
        f"Of a's {result['steps']} steps the first {result['equal_steps']} have the same reward "
        f"and number of tokens as alone, the adapters differ by at most "
        f"{result['adapter_difference']:.0e}, and when b died the server offered "
        f"{len(result['when_b_died']['served'])} adapters."
    )
    return "agrees", why


def table(result: dict) -> str:
    """A line a run."""
    lines = [
        "| run | steps | mean reward | held out before -> after | largest mismatch | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for name, words in (("alone", "a, alone"), ("a", "a, shared"), ("b", "b, shared, killed")):
        rewards = result["rewards"][name]
        cells = [words, f"{len(rewards)} of {result['steps']}"]
        cells += [f"{sum(rewards) / len(rewards):.3f}"]
        held_out = result["held_out"].get(name)
        cells += ["{:.3f} -> {:.3f}".format(*held_out) if held_out else ""]
        cells += [f"{result['mismatch_max'][name]:.0e}"]
        cells += [f"{result['seconds'][name]:.0f}" if name in result["seconds"] else ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result: dict) -> Figure:
    figure, axis = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    styles = {"alone": ("o", "a, alone"), "a": ("-", "a, shared"), "b": ("--", "b, shared")}
    for name, (style, label) in styles.items():
        rewards = result["rewards"][name]
        axis.plot(range(1, len(rewards) + 1), rewards, style, label=label)
    axis.plot(len(rewards), rewards[-1], "x", color="black", label="b is killed")
    axis.set_xlabel("step")
    axis.set_ylabel("reward")
    axis.legend()
    axis.grid(alpha=0.3)
    return figure
