"""Runs that share a server: experiments/fleet.py, smaller."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "experiments" / "fleet.py"


@pytest.mark.slow
def test_the_death_of_one_run_does_not_disturb_the_other(tmp_path):
    command = [sys.executable, SCRIPT, "--steps", "4", "--runs", tmp_path / "runs"]
    subprocess.run([*command, "--results", tmp_path], check=True, timeout=900)
    result = json.loads((tmp_path / "fleet.json").read_text())
    rewards = result["rewards"]
    assert len(rewards["a"]) == len(rewards["alone"]) == 4 and 2 <= len(rewards["b"]) < 4
    # A draw may lie within rounding of a boundary, and then later steps are others.
    assert result["equal_steps"] >= 1
    before, after = zip(*result["held_out"].values(), strict=True)
    assert before[0] == before[1] and abs(after[0] - after[1]) < 0.1
    assert max(result["mismatch_max"].values()) < 1e-3  # each sampled with its own adapter
    assert result["server_alive_at_the_end"]
    names = result["when_b_died"]["served"]
    assert len(names) >= 2 and len({name.rsplit("-", 2)[0] for name in names}) == 2
    (left,) = result["left_on_the_server"]  # b's last: nobody lived to unload it
    assert left in names
    assert (tmp_path / "fleet.png").stat().st_size > 1000
