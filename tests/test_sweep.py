"""What experiments conclude: intervals over seeds, verdicts, best rates, bits stored."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chat import load_tokenizer
from config import ASSETS
from experiments import capacity, layers, learning_rate, rank, runs, seeds, sweep
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


def rows_around(vertex: float, curvature: float, key: str) -> list[dict]:
    """With a cost of which log10 is a parabola."""
    costs = {
        rate: 10 ** (-2 + curvature * (math.log10(rate) - vertex) ** 2)
        for rate in (3e-4, 1e-3, 3e-3)
    }
    return [
        {"rate": rate, "seed": 0, key: cost if key == "loss" else 1 - cost}
        for rate, cost in costs.items()
    ]


@given(st.floats(-3.2, -2.8), st.floats(0.1, 3), st.sampled_from(("held_out", "loss")))
def test_the_optimum_is_the_vertex_of_a_parabola(vertex, curvature, key):
    rows = rows_around(vertex, curvature, key)
    assert math.isclose(learning_rate.optimum(rows), vertex, abs_tol=1e-3)
    assert learning_rate.optimum(rows[:2]) is None  # the best may be beyond an edge
    assert learning_rate.optimum(rows[:1]) is None


def test_a_collapsed_neighbour_hardly_moves_an_optimum():
    """It does where the cost is the reward itself: by a factor of 1.6 here."""
    rewards = {1e-3: 0.90, 3e-3: 0.98, 1e-2: 0.90}
    rows = [{"rate": rate, "held_out": reward} for rate, reward in rewards.items()]
    collapsed = [*rows[:2], {"rate": 1e-2, "held_out": 0.0}]
    moved = learning_rate.optimum(rows) - learning_rate.optimum(collapsed)
    assert 0 < moved < math.log10(1.35)


def test_missed_rewards_have_a_floor():
    assert learning_rate.cost({"held_out": 1.0}) == math.log10(0.5 / 132)


def swept(tops: dict[str, float]) -> list[dict]:
    """Three seeds at three rates, the best one given; edges are 3e-4 and 3e-3."""
    return [
        row | {"method": method, "seed": seed}
        for method, top in tops.items()
        for seed in range(3)
        for row in rows_around(math.log10(top), 1.0, "held_out")
    ]


def test_an_optimum_at_an_edge_decides_nothing():
    """Though it is the same one in all seeds: an interval of no width."""
    logs = learning_rate.shift(swept({"rank 8": 1e-3, "rank 32": 3e-3}), "rank 32", "rank 8")
    word, number = learning_rate.judge_shift(logs, learning_rate.WITHIN_TWO)
    assert logs == [None] * 3 and word == "undecided" and "(an edge)" in number
    logs = learning_rate.shift(swept({"rank 8": 1e-3, "rank 32": 1e-3}), "rank 32", "rank 8")
    assert learning_rate.judge_shift(logs, learning_rate.WITHIN_TWO)[0] == "agrees"


def test_ranks_are_compared_from_the_rank_that_the_paper_has():
    rl = swept({"rank 1": 6e-4, "rank 8": 1e-3, "rank 32": 1e-3, "full": 1e-3})
    early = [{"losses": [5.0 - 0.1 * i for i in range(12)]}] * 3
    sft = [
        {"method": method, "loss": row["held_out"], "losses": early[0]["losses"]}
        | {"rate": {3e-4: 1e-3, 1e-3: 3e-3, 3e-3: 1e-2}[row["rate"]], "seed": row["seed"]}
        for method in ("rank 8", "full")
        for row in of_one_method(rl)
    ]
    judged = learning_rate.claims({"rl": rl, "sft": sft, "scaled": early, "constant": early})
    (word,) = (word for claim, (word, _) in judged.items() if "from rank 8 to rank 32" in claim)
    assert word == "agrees"


def of_one_method(rows: list[dict]) -> list[dict]:
    return sweep.of(rows, method=rows[0]["method"])


# --- which runs -----------------------------------------------------------------------------------


@pytest.fixture
def pretended(monkeypatch):
    """Runs that earn what `rewards` says by (method, rate, seed); that, and what was run."""
    rewards, started = {}, []

    def run_all(commands, jobs):
        started.extend(commands)
        return commands

    def outcome(command):
        flags = dict(zip(command[1::2], command[2::2], strict=False))
        method = "full" if "--full" in command else f"rank {flags['--rank']}"
        if method == "full":
            flags = dict(zip(command[2::2], command[3::2], strict=False))
        reward = rewards.get((method, float(flags["--lr"]), int(flags["--seed"])), 0.5)
        return {"held_out": reward, "before": 0.3, "reward_bits": [0.5]}

    monkeypatch.setattr(sweep, "run_all", run_all)
    monkeypatch.setattr(rank, "outcome", outcome)
    return rewards, started


def test_a_rate_is_chosen_by_all_seeds(pretended):
    """The first seed alone would choose 1e-3, which the other two do not survive."""
    rewards, started = pretended
    for seed, at_low in enumerate((0.95, 0.1, 0.1)):
        rewards["rank 1", 1e-3, seed] = at_low
        rewards["rank 1", 3e-3, seed] = 0.9
    result = rank.measure(False, 1)
    best = rank.at_best(result["runs"], "rank 1")
    assert [(row["rate"], row["seed"]) for row in best] == [(3e-3, 0), (3e-3, 1), (3e-3, 2)]
    for method in sweep.methods(result["runs"]):
        rows = sweep.of(result["runs"], method=method)
        assert len(rows) == 3 * len(sweep.rates(rows))  # every rate has all seeds
    before = set(started)
    learning_rate.reinforced(False, 1), capacity.rewarded(False, 1)
    assert set(started) == before  # which they share


def test_a_stopped_run_does_not_say_what_the_base_earns():
    rows = [
        {"method": method, "rate": 1e-3, "seed": seed, "held_out": 0.5, "before": 0.4}
        for method in ("rank 1", "full")
        for seed in range(3)
    ]
    rows[0] |= {"held_out": 0.0, "before": 0.0}
    _, why = rank.verdict({"episodes_a_step": 64, "runs": rows})
    assert "they gained -0.07 and 0.10" in why


def test_a_run_that_was_stopped_stored_nothing(tmp_path):
    run = runs.Run(tmp_path, [], {}, "sft.py: the loss is not finite")
    rows = [capacity.outcome(run)]
    assert capacity.bits_of(rows, 64) == [0.0] and capacity.parameters_of(rows) == 1
    assert math.isnan(capacity.still_growing(rows, 64))
    found = learning_rate.outcome(run)
    assert found["loss"] == capacity.STOPPED and len(found["losses"]) == learning_rate.EARLY.stop


# --- which layers ---------------------------------------------------------------------------------


def layers_with(stored: dict[str, list[float]]) -> dict:
    """A result of three seeds, of which the share of all facts that each choice stored is given."""
    whole = capacity.BITS * math.log(2) / capacity.TOKENS  # the loss that stores nothing
    rows = [
        {"model": model, "where": where.replace("MLPs", mlp), "seed": seed}
        | {"loss": whole * (1 - share), "held_out": 0.5 + share / 10 + seed / 1000}
        for model, mlp in layers.MLP_OF.items()
        for where, shares in stored.items()
        for seed, share in enumerate(shares)
    ]
    return {"runs": rows, "rl": rows}


def test_layers_are_compared_by_factors():
    """A factor of 2, 3 and 4.5: its logarithms are even, and told as 3."""
    alone = {"attention": [0.2, 0.1, 0.1], "MLPs": [0.4, 0.3, 0.45]}
    judged = layers.claims(layers_with(alone | {"all": [0.4, 0.31, 0.45]}))
    assert len(judged) == 6
    assert judged["dense: MLPs store more facts than attention"] == (
        "agrees",
        "3.0 (1.1 to 8.2) times",
    )
    assert (
        judged["mixture: attention adds less than a quarter to what experts store"][0] == "agrees"
    )
    judged = layers.claims(layers_with(alone | {"all": [0.8, 0.61, 0.9]}))
    assert judged["dense: attention adds less than a quarter to what MLPs store"][0] == "disagrees"


def test_the_mixture_is_made_and_not_found(tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "MIXTURE", tmp_path / "mixture")
    (tmp_path / "mixture").mkdir()
    (tmp_path / "mixture" / "config.json").write_text("{}")  # somebody else's
    layers.make_mixture()
    assert len(list((tmp_path / "mixture").glob("*.safetensors"))) == 1
    assert Path(layers.ROOT / layers.MOE).resolve().parent == layers.RUNS.resolve()


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
