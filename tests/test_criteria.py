"""What the experiments compute beside training: intervals, bfloat16 rounding, enumerated bias."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import seeds

from experiments import corrections, update
from experiments.seeds import above, decide, interval, told

rewards = st.lists(st.floats(0, 1), min_size=3, max_size=3)


@given(rewards, st.floats(-1, 2))
def test_a_mean_is_above_a_bound_only_if_its_whole_interval_is(values, bound):
    middle, half = interval(values)
    state = above(values, bound)
    assert (state is True) <= (middle - half >= bound - 1e-9)
    assert (state is False) <= (middle + half <= bound + 1e-9)
    assert (state is None) <= (middle - half <= bound <= middle + half)


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
