"""The benchmarks beside transformers and PEFT run, and do the same work as they do.

    .venv-peers/bin/python -m pytest -m "peers and slow" tests/test_benchmarks.py

Both scripts check before they time anything that tokens, losses and gradients agree. Result files
of the repository are left alone. Every script says what it measures and how it is called.
"""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
SCRIPTS = sorted(p.name for p in BENCHMARKS.glob("*.py") if "__main__" in p.read_text())
REQUIRED = {  # arguments without which argparse says nothing of an unknown flag
    "quant.py": ["memory"],
    "training.py": ["tiny"],
    "vllm_player.py": ["checkpoint", "adapter", "1"],
}
pytestmark = [pytest.mark.peers, pytest.mark.slow]


def run(name: str, *arguments: object) -> str:
    before = {file: file.read_bytes() for file in BENCHMARKS.glob("*.json")}
    command = [sys.executable, "-W", "ignore", BENCHMARKS / name, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert before == {file: file.read_bytes() for file in BENCHMARKS.glob("*.json")}
    return done.stdout


def test_sampling_seats_the_engine_and_generate():
    shape = ["--only", "rectangles", "--batches", 2, "--prompts", 8, "--new-tokens", 4]
    printed = run("sampling.py", "--quick", *shape)
    rows = [json.loads(line) for line in printed.splitlines() if line.startswith('{"model"')]
    assert [list(row["players"]) for row in rows] == [["engine", "generate + PEFT"]]
    for numbers in rows[0]["players"].values():
        assert 0 < numbers["prefill_gemm_share"] < 1 and numbers["tokens_per_second"] > 0


def test_training_compares_the_ways(tmp_path):
    output = tmp_path / "training.json"
    run("training.py", "tiny", "--works", "rectangles", "--repeats", 1, "--output", output)
    rows = json.loads(output.read_text())
    assert [row["way"] for row in rows] == ["ours", "peft", "full"]
    assert all(0 < row["mfu"] < 1.2 and row["ratio"] > 0 for row in rows)


def test_every_script_answers_help_and_refuses_an_unknown_flag():
    """It does so before it measures anything: nothing of it takes longer than its imports."""

    def asked(name: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, BENCHMARKS / name, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    def unlike(name: str) -> list[str]:
        told = asked(name, "--help")
        refused = asked(name, *REQUIRED.get(name, []), "--no-such-flag")
        found = [
            (told.returncode == 0, f"--help ends with {told.returncode}"),
            (f"benchmarks/{name}" in told.stdout, "--help does not name the command"),
            (refused.returncode == 2, f"an unknown flag ends with {refused.returncode}"),
            ("--no-such-flag" in refused.stderr, "an unknown flag is not named"),
        ]
        return [f"{name}: {what}" for holds, what in found if not holds]

    assert len(SCRIPTS) > 15
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        assert [what for found in pool.map(unlike, SCRIPTS) for what in found] == []
