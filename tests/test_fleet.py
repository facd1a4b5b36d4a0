"""Runs that share a server: that experiments/fleet.py would notice if one disturbed the other.

The fleet itself, smaller, is run by tests/test_experiments.py.
"""

import copy

import pytest

from experiments import fleet, page


def test_the_committed_fleet_meets_its_criterion():
    assert fleet.verdict(page.committed("fleet"))[0] == "agrees"


def of_b(result: dict, *steps: int) -> list[str]:
    """Names of b's adapters of these steps."""
    return [f"{result['run_id_of_b']}-1-{step}" for step in steps]


@pytest.mark.parametrize("steps", [(3,), (2, 3)])
def test_b_may_die_while_it_exchanges_its_adapters(steps):
    """The next one is loaded before the last one is unloaded, so that two may be left."""
    result = copy.deepcopy(page.committed("fleet"))
    result["left_on_the_server"] = of_b(result, *steps)
    assert fleet.verdict(result)[0] == "agrees"


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


def one_of_a_is_left_with_bs(result: dict) -> None:
    result["left_on_the_server"] = [*of_b(result, 3), "of-a-1-6"]


def one_of_a_is_left_alone(result: dict) -> None:
    result["left_on_the_server"] = ["of-a-1-6"]


def bs_was_unloaded(result: dict) -> None:
    result["left_on_the_server"] = []


def b_unloads_nothing(result: dict) -> None:
    result["left_on_the_server"] = of_b(result, 1, 2, 3)


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
        one_of_a_is_left_with_bs,
        one_of_a_is_left_alone,
        bs_was_unloaded,
        b_unloads_nothing,
        one_name_for_both,
        another_end,
    ],
)
def test_a_disturbed_fleet_disagrees(harm):
    result = copy.deepcopy(page.committed("fleet"))
    harm(result)
    assert fleet.verdict(result)[0] == "disagrees"
