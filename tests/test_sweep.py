"""What experiments conclude: intervals over seeds, verdicts, best rates, bits stored."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat import load_tokenizer
from config import ASSETS
from experiments import capacity, learning_rate, seeds, sweep
from sft import read_demonstrations

NUMBERS = st.floats(-10, 10).map(lambda x: round(x, 3))


# --- verdicts -------------------------------------------------------------------------------------


def test_the_interval_of_three_seeds_is_students():
    mean, half = seeds.interval([1.0, 2.0, 3.0])
    assert mean == 2 and math.isclose(half, 4.303 / math.sqrt(3), rel_tol=1e-3)
    assert seeds.told([1.0, 2.0, 3.0], "+.1f") == "+2.0 ± 2.5"
    assert seeds.told([0.5]) == "0.500 (one seed)"


@given(st.lists(NUMBERS, min_size=1, max_size=6), NUMBERS)
def test_a_claim_and_its_opposite_have_opposite_verdicts(values, bound):
    opposite = {"agrees": "disagrees", "disagrees": "agrees", "undecided": "undecided"}
    above, below = sweep.judge(values, low=bound), sweep.judge(values, high=bound)
    if len(set(values)) > 1 or values[0] != bound:
        assert below == opposite[above]
    if len(values) == 1:
        assert above == "undecided"  # one seed decides nothing


def test_several_claims_agree_if_all_do_and_disagree_if_one_does():
    agree, disagree, open_ = ((word, "1") for word in ("agrees", "disagrees", "undecided"))
    assert sweep.together({"a": agree, "b": agree})[0] == "agrees"
    assert sweep.together({"a": agree, "b": open_})[0] == "undecided"
    assert sweep.together({"a": agree, "b": open_, "c": disagree})[0] == "disagrees"


# --- best rates -----------------------------------------------------------------------------------


@pytest.mark.parametrize("further", [0, 1, 2])
@pytest.mark.parametrize("peak, away", [(1e-3, 1), (3e-4, 1), (1e-4, 2), (1e-2, 3), (0.1, 5)])
def test_a_sweep_goes_on_until_its_best_rate_is_no_edge(monkeypatch, peak, away, further):
    """From two rates, for every seed, as often as it may; each run knows its own arguments."""
    monkeypatch.setattr(sweep, "run_all", lambda commands, jobs: commands)
    rows = sweep.sweep(
        {"a": (3e-4, 1e-3)},
        lambda method, rate, seed: (method, rate, seed),
        lambda run: {"score": -abs(math.log(run[1] / peak)), "run": run},
        sweep.highest("score"),
        (0, 1),
        1,
        further,
    )
    tried, best = sweep.rates(rows), sweep.highest("score")(rows)
    assert len(tried) == 2 + min(away, further) and len(rows) == 2 * len(tried)
    assert all(row["run"] == (row["method"], row["rate"], row["seed"]) for row in rows)
    inside = best not in (tried[0], tried[-1])
    assert ("edge" in sweep.told_rate(rows, best)) == (not inside)
    if inside:
        assert best == peak


@given(st.floats(-3.2, -2.8), st.floats(0.1, 3))
def test_the_optimum_is_the_vertex_of_a_parabola(vertex, curvature):
    rows = [
        {"rate": rate, "held_out": 0.9 - curvature * (math.log10(rate) - vertex) ** 2}
        for rate in (3e-4, 1e-3, 3e-3)
    ]
    assert math.isclose(learning_rate.optimum(rows), vertex, abs_tol=1e-3)
    assert learning_rate.optimum(rows[:2]) in (math.log10(3e-4), -3)  # an edge is all it knows


# --- bits -----------------------------------------------------------------------------------------


def test_a_fact_is_a_token_a_word_and_its_bits_are_what_it_need_not_be_told(tmp_path, monkeypatch):
    tokenizer = load_tokenizer(ASSETS / "tiny-qwen3")
    monkeypatch.setattr(capacity, "RUNS", tmp_path)
    file = capacity.ROOT / capacity.write_facts(20, seed=3)
    facts = read_demonstrations(file, tokenizer, 64)
    assert {sum(fact.loss_mask) for fact in facts} == {capacity.TOKENS}
    assert len({tuple(fact.token_ids) for fact in facts}) == 20
    # Told every word, and not the end of the turn, which is always there.
    uniform = capacity.WORDS * math.log(len(capacity.CHOICES)) / capacity.TOKENS
    assert capacity.stored(uniform, 20) == pytest.approx(0, abs=1e-6)
    assert capacity.stored(0.0, 20) == 20 * capacity.BITS
    assert capacity.stored(uniform / 2, 20) == pytest.approx(10 * capacity.BITS)
