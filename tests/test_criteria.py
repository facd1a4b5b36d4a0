"""What the experiments compute beside training: intervals, bfloat16 rounding, enumerated bias."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import seeds

from config import Config
from experiments import corrections, cost, many_adapters, mismatch, update
from experiments.seeds import T95, above, decide, interval, told, within
from experiments.sweep import judge
from tools.plan import DEVICES

rewards = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(rewards, st.floats(-1, 2))
def test_a_mean_is_above_a_bound_only_if_its_whole_interval_is(values, bound):
    middle, half = interval(values)
    state = above(values, bound)
    words = {True: "agrees", False: "disagrees", None: "undecided"}
    assert judge(values, low=bound) == words[state]
    assert (state is True) <= (middle - half >= bound - 1e-9)
    assert (state is False) <= (middle + half <= bound + 1e-9)
    assert (state is None) <= (middle - half <= bound <= middle + half)


@pytest.mark.parametrize("value", [0.0, 0.25])
def test_a_bound_that_an_interval_touches_decides_nothing(value):
    values = [value] * 3  # an interval of no width
    assert above(values, value) is None and judge(values, high=value) == "undecided"
    assert within(values, value, value + 1) is None
    assert within(values, value - 1, value + 1) is True and within(values, value + 1) is False


def test_there_is_a_quantile_for_as_many_seeds_as_anybody_runs():
    for number in range(2, 11):
        middle, half = interval([float(i % 2) for i in range(number)])
        assert 0 < half < math.inf
    assert list(T95.values()) == sorted(T95.values(), reverse=True)


def test_without_a_mismatch_there_is_nothing_to_rescue():
    """Criterion 2 of corrections.md is open, and then so are those that ask what was rescued."""
    rows = [
        {"sampler": "noise", "loss": loss, "seed": seed, "held_out": held_out, "mismatch_kl": 0.01}
        for loss, held_out in (("reinforce", 0.7), ("tis", 0.5), ("icepop", 0.9))
        for seed in range(3)
    ]
    exact = {"tokens": 1, "loss": "unclipped", "bias": 0.0}
    word, why = corrections.verdict({"rows": rows, "biases": [exact]})
    assert word == "undecided" and "Fails" not in why
    for row in rows:
        row["mismatch_kl"] = 0.1
    word, why = corrections.verdict({"rows": rows, "biases": [exact]})
    assert word == "disagrees" and "Fails: 3 tis" in why and "4 icepop" in why.split("Holds")[1]


@pytest.mark.parametrize(
    "shares, state", [([1.0, 1.0, 1.0], True), ([1.0, 0.985, 0.999], None), ([0.5] * 3, False)]
)
def test_the_rank_of_updates_is_decided_by_its_interval(shares, state):
    rows = [
        {"method": method, "mode": "full", "lr": rate, "seed": seed, "held_out": 0.5}
        | {"changed_bf16": changed, "rank_bf16": share}
        for rate in (1e-5, 1e-4)
        for method, changed in (("RL", 0.1), ("SFT", 0.5))
        for seed, share in enumerate(shares)
    ]
    found = update.criteria({"rows": rows})
    assert [its for words, its in found.items() if words.startswith("3")] == [state]


def test_how_much_longer_many_adapters_take_is_decided_by_its_interval():
    def rounds(*longer):
        return [
            {"seed": seed, "adapters": count, "same": 8}
            | {"batched": {"cpu_seconds": seconds, "tokens": 100}}
            | {"swapped": {"cpu_seconds": 100.0, "tokens": 100}}
            for seed, times in enumerate(longer)
            for count, seconds in ((1, 1.0), (16, 1.0), (64, times))
        ]

    memory = [{"one base": 1, "copies": 10}]
    for longer, word in (
        ((1.2, 1.2, 1.21), "agrees"),
        ((1.1, 1.3, 1.67), "undecided"),  # the worst seed alone decides nothing
        ((1.7, 1.7, 1.71), "disagrees"),
    ):
        result = {"episodes": 8, "rounds": rounds(*longer), "memory": memory}
        assert many_adapters.verdict(result)[0] == word


def mismatch_rows(**changed) -> list[dict]:
    """As mismatch.md's criteria want them, three seeds; changed: factors of single ones."""
    sizes = {"fp32": 1e-6, "bf16": 2e-3}
    rows = []
    for seed in range(3):
        for engine in mismatch.ENGINES:
            for ours, theirs, application, temperature in mismatch.pairs():
                row = mismatch.named_row(seed, engine, ours, theirs, application, temperature)
                dtype, merged = row["sampler"], application == "merged"
                mean = sizes[dtype] * (1 if temperature == 1 else 1.4)
                mean *= 1 if temperature == 1 else changed.get("colder", 1)
                kl = mean**2 * (4 if merged and dtype == "bf16" else 1)
                kl *= changed.get(f"merged_{dtype}", 1) if merged else 1
                row |= {"mismatch_mean": mean, "mismatch_kl": kl, "p99": 5 * mean}
                rows.append(row | {"mismatch_max": 9 * mean * changed.get(dtype, 1), "tokens": 9})
        for sampler in ("NF4", "1 step before"):
            row = mismatch.named_row(seed, "embedded", "float32", sampler)
            row |= {"mismatch_mean": 0.1, "p99": 1.0, "mismatch_max": 2.0, "tokens": 9}
            # The KL of another policy, and of another one in the last seed.
            times = changed.get(sampler, 1) * (changed.get("spread", 1) if seed == 2 else 1)
            rows.append(row | {"mismatch_kl": 1e-3 * times})
    return rows


@pytest.mark.parametrize(
    "changed, word, failing",
    [
        ({}, "agrees", ""),
        ({"fp32": 20.0}, "disagrees", "1 embedded"),
        ({"bf16": 40.0}, "disagrees", "2 vLLM: bf16 below"),
        ({"merged_bf16": 0.4}, "disagrees", "3 embedded: merged bf16"),
        ({"merged_fp32": 4.0}, "disagrees", "3 vLLM: merged fp32"),
        ({"colder": 0.8}, "disagrees", "4 vLLM"),
        ({"NF4": 0.01}, "disagrees", "5 NF4"),
        ({"1 step before": 0.01}, "disagrees", "5 1 step before"),
        ({"NF4": 0.1, "spread": 9.0}, "undecided", ""),
    ],
)
def test_the_mismatch_is_decided_by_all_of_its_seeds(changed, word, failing):
    found, why = mismatch.verdict({"rows": mismatch_rows(**changed)})
    assert found == word, why
    assert failing in why.split("Holds")[0]


def test_seconds_are_of_runs_of_this_code(monkeypatch):
    def run_all(commands, jobs, fresh=False):
        assert fresh, "the runs of older code are read"
        return []

    monkeypatch.setattr(cost, "run_all", run_all)
    monkeypatch.setattr(cost, "SEEDS", ())
    monkeypatch.setattr(cost, "PLANNED", ())
    assert cost.measure(False, 1)["runs"] == []


def test_what_has_a_price_can_be_planned_for():
    assert set(cost.PRICES) - {"core"} <= set(DEVICES)
    assert set(get_args(get_type_hints(Config)["plan_device"])) == set(DEVICES)


def test_prices_are_of_known_devices():
    assert cost.read_prices(["l40s=1.2", "core=0.05"]) == {"l40s": 1.2, "core": 0.05}
    for words, why in (("tpu=1", "core, l40s"), ("l40s", "DOLLARS"), ("l40s=-1", "no price")):
        with pytest.raises(ValueError, match=why):
            cost.read_prices([words])


def test_an_interval_is_students():
    middle, half = interval([0.0, 1.0, 2.0])
    assert middle == 1 and math.isclose(half, 4.303 / math.sqrt(3), rel_tol=1e-3)
    assert interval([0.5])[1] == math.inf and above([0.5], 0) is None
    assert told([0.0, 1.0, 2.0], ".1f") == "1.0 ± 2.5" and told([0.5]) == "0.500 (one seed)"


def test_a_verdict_is_the_worst_of_its_criteria():
    assert decide({"a": True, "b": True}) == ("agrees", "Holds: a; b.")
    assert decide({"a": True, "b": None}) == ("undecided", "Open: b. Holds: a.")
    assert decide({"a": None, "b": False})[0] == "disagrees"


@given(st.floats(2**-6, 1.0), seeds)
def test_a_weight_changes_in_bf16_if_it_moves_by_more_than_half_an_ulp(size, seed):
    weight = (size * torch.randn(64, generator=torch.Generator().manual_seed(seed))).bfloat16()
    weight = weight[weight.abs() > 2**-9].float()  # where an ulp is more than the tolerance
    ulp = 2.0 ** (weight.abs().log2().floor() - 7)
    away = weight.sign() * ulp  # downwards an ulp may be half as long, below a power of two
    assert not update.changed_in_bf16(weight, 0.49 * away).any()
    assert update.changed_in_bf16(weight, 0.51 * away).all()


def test_saved_in_bf16_an_update_of_rank_2_seems_to_have_full_rank():
    torch.manual_seed(0)
    before = torch.randn(24, 40).bfloat16().float()
    delta = 1e-2 * torch.randn(24, 2).double() @ torch.randn(2, 40).double()
    found = update.ranks_of(before, delta, exact=True)
    assert found["rank_mean"] == 2 and found["rank_99"] <= 2 / 24 and found["rank_bf16"] == 1


def test_an_update_is_told_matrix_by_matrix(monkeypatch):
    """Nothing of one kind hides in another's mean, nor one layer in its kind's."""
    names = {
        f"model.layers.{layer}.{kind}.weight": shape
        for layer in range(2)
        for kind, shape in (
            ("self_attn.q_proj", (4, 6)),
            ("mlp.up_proj", (4, 6)),
            ("input_layernorm", (6,)),
        )
    }
    base = {name: torch.ones(shape) for name, shape in names.items()}
    after = {name: before.clone() for name, before in base.items()}
    after["model.layers.0.self_attn.q_proj.weight"][0, :3] = 2  # 3 of 24 weights, rank 1
    after["model.layers.1.self_attn.q_proj.weight"][:2, :2] += torch.eye(2)  # 2 of 24, rank 2
    after["model.layers.1.input_layernorm.weight"][0] = 2
    monkeypatch.setattr(update, "trained_weights", lambda base, run, mode: after)
    kinds = update.update_of(base, None, "full")["by_kind"]
    rank = {"mean": 3 / 8, "least": 1 / 4, "most": 2 / 4}
    changed = {"mean": 5 / 48, "least": 2 / 24, "most": 3 / 24}
    assert kinds["q_proj"] == {
        "changed_bf16": pytest.approx(changed),
        "rank_bf16": rank,
        "rank": rank,
    }
    assert kinds["up_proj"] == {"changed_bf16": {"mean": 0, "least": 0, "most": 0}}
    assert kinds["norms"] == {"changed_bf16": {"mean": 1 / 12, "least": 0, "most": 1 / 6}}

    rows = [
        {"method": method, "mode": "full", "lr": rate, "seed": seed, "held_out": rate}
        | {
            "by_kind": kinds
            if method == "RL" and rate
            else {"q_proj": {}, "up_proj": {}, "norms": {}}
        }
        for method in update.PROGRAMS
        for rate in (0, 0.5)
        for seed in range(2)
    ]
    lines = update.table_by_kind({"rows": rows}).splitlines()
    told = {line.split(" | ")[0]: line for line in lines if line.startswith("|")}
    assert told["| q_proj"].startswith(
        "| q_proj | 10.4% (8.3% to 12.5%) |  | 37.5% (25.0% to 50.0%)"
    )
    assert told["| up_proj"] == "| up_proj | 0.0% |  |  |  |  |  |"


@given(seeds, st.sampled_from((0.03, 0.3)))
def test_importance_sampling_has_no_bias_but_of_one_token_or_by_whole_sequences(seed, kl):
    assert corrections.bias("unclipped", 5, 1, kl, seed) < 1e-9
    assert corrections.bias("sequence", 3, 2, kl, seed) < 1e-9
    assert corrections.bias("unclipped", 3, 2, kl, seed) > 1e-6
    assert corrections.bias("reinforce", 5, 1, kl, seed) > 1e-3


@given(seeds)
def test_the_sampler_has_the_kl_that_was_asked_for(seed):
    policy, sampler = corrections.policies(4, 2, 0.1, torch.Generator().manual_seed(seed))
    mu, pi = (torch.log_softmax(logits, -1) for logits in (sampler, policy))
    assert math.isclose((mu.exp() * (mu - pi)).sum(-1).mean(), 0.1, rel_tol=1e-6)
    logprobs = corrections.sequence_logprobs(sampler, 4, 2)
    assert math.isclose(logprobs.sum(1).exp().sum(), 1, rel_tol=1e-9)
