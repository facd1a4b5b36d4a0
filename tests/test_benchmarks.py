"""The benchmarks beside transformers and PEFT run, and do the same work as they do.

    .venv-peers/bin/python -m pytest -m "peers and slow" tests/test_benchmarks.py

Both scripts check before they time anything that tokens, losses and gradients agree. Result files
of the repository are left alone.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
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
