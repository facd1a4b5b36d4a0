"""Runs that share a server: that experiments/fleet.py would notice if one disturbed the other.

The fleet itself, smaller, is run by tests/test_experiments.py.
"""

import copy

import pytest

from experiments import fleet, page


def test_the_committed_fleet_meets_its_criterion():
    assert fleet.verdict(page.committed("fleet"))[0] == "agrees"


def other_rewards(result: dict) -> None:
    result["equal_steps"] = 0


def base_sampled(result: dict) -> None:
    result["mismatch_max"]["a"] = 0.5


def server_died(result: dict) -> None:
    result["server_alive_at_the_end"] = False


def b_survived(result: dict) -> None:
    result["rewards"]["b"] = result["rewards"]["a"]


def a_died_too(result: dict) -> None:
    result["rewards"]["a"].pop()


def a_was_unloaded_as_b(result: dict) -> None:
    result["left_on_the_server"] = list(result["when_b_died"]["served"])


def one_name_for_both(result: dict) -> None:
    result["when_b_died"]["served"] = result["left_on_the_server"]


def another_end(result: dict) -> None:
    result["held_out"]["a"][1] -= 0.2


@pytest.mark.parametrize(
    "harm",
    [
        other_rewards,
        base_sampled,
        server_died,
        b_survived,
        a_died_too,
        a_was_unloaded_as_b,
        one_name_for_both,
        another_end,
    ],
)
def test_a_disturbed_fleet_disagrees(harm):
    result = copy.deepcopy(page.committed("fleet"))
    harm(result)
    assert fleet.verdict(result)[0] == "disagrees"
