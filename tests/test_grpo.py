"""Properties of grpo.py: what must hold of every advantage, loss and KL estimate.

Expectations are exact: a next-token distribution has few outcomes, so they are enumerated.
Everything is in float64, where finite differences and enumerated sums have digits to spare.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st

from grpo import (
    LOSSES,
    group_advantages,
    k3,
    kl_estimates,
    kl_loss,
    mismatch_metrics,
    policy_loss,
    reward_bits,
)

V = 4  # vocabulary
KINDS = list(LOSSES)
# Settings with which no bound is ever at work: what is left is plain importance sampling.
UNCLIPPED = {
    "grpo": {"clip_low": 1e9, "clip_high": 1e9},
    "tis": {"cap": math.inf},
    "cispo": {"clip_low": 1e9, "clip_high": 1e9},
    "icepop": {"band_low": 0.0, "band_high": math.inf},
    "gspo": {"clip_low": 1e9, "clip_high": 1e9},
    "prime": {"mask_low": 1.0, "mask_high": 1.0, "kl_tau": 0.0},
}
SEEDS = st.integers(0, 2**32 - 1)


def close(actual, expected, atol=1e-10, rtol=1e-9):
    torch.testing.assert_close(actual, expected, atol=atol, rtol=rtol)


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def normal(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def token_logprobs(logits, tokens):
    return logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]  # (S, T)


@st.composite
def batches(draw):
    """A small off-policy batch: pi, mu and reference differ, about a third of the mask is off."""
    S, T, seed = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(SEEDS)
    generator = torch.Generator().manual_seed(seed)
    logits = normal((S, T, V), seed)
    tokens = torch.randint(V, (S, T), generator=generator)
    return SimpleNamespace(
        logits=logits,
        tokens=tokens,
        logprobs=token_logprobs(logits, tokens),
        sampler=token_logprobs(logits + 0.7 * normal((S, T, V), seed + 1), tokens),
        reference=token_logprobs(logits + 0.7 * normal((S, T, V), seed + 2), tokens),
        advantages=normal((S,), seed + 3),
        mask=torch.rand((S, T), generator=generator) < 0.7,
        denominator=S * T + draw(st.integers(0, 9)),  # skipped groups count too
    )


def loss_and_gradient(kind, batch, **changes):
    """Loss, gradient with respect to logprobs, metrics; kind "kl" is the KL loss, without any."""
    b = SimpleNamespace(**{**vars(batch), **changes})
    logprobs = b.logprobs.clone().requires_grad_()
    if kind == "kl":
        loss = kl_loss(logprobs, b.sampler, b.reference, b.mask, b.denominator)
        metrics = {}
    else:
        loss, metrics = policy_loss(kind, logprobs, b.sampler, b.advantages, b.mask, b.denominator)
    loss.backward()
    return loss.detach(), logprobs.grad, metrics


def expected_gradient(logits, weights, loss_of_token):
    """Gradient w.r.t. the logits (V,) of sum_v weights[v] loss_of_token(logpi[v], v)."""
    logits = logits.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    total = sum(weights[v] * loss_of_token(logprobs[v].view(1, 1), v) for v in range(V))
    return torch.autograd.grad(total, logits)[0]


def exact_gradient(logits, objective):
    logits = logits.clone().requires_grad_()
    return torch.autograd.grad(objective(logits.log_softmax(-1)), logits)[0]


def distribution_pair(seed):
    """Logits of pi, and the logprobs of another distribution (V,)."""
    return normal((V,), seed), normal((V,), seed + 1).log_softmax(-1)


ON = torch.ones(1, 1)  # the mask of a single token


# ------------------------------------------------------------------------------- advantages

rewards = st.integers(1, 4).flatmap(
    lambda G: st.lists(
        st.lists(st.floats(-10, 10), min_size=G, max_size=G), min_size=1, max_size=4
    ).map(float64)
)


@given(rewards)
def test_advantages_are_rewards_about_the_mean_of_their_group(rewards_P_G):
    advantages_P_G = group_advantages(rewards_P_G)
    close(advantages_P_G.sum(1), torch.zeros(len(rewards_P_G), dtype=torch.float64))
    # Only the zero point moves: what one sample has over another, it keeps.
    close(advantages_P_G - advantages_P_G[:, :1], rewards_P_G - rewards_P_G[:, :1])


@given(rewards)
def test_scaled_advantages_sum_to_zero_and_have_standard_deviation_one(rewards_P_G):
    std_P = rewards_P_G.std(1, correction=0)
    assume(((std_P == 0) | (std_P > 1e-2)).all())
    advantages_P_G = group_advantages(rewards_P_G, scale="std")
    close(advantages_P_G.sum(1), torch.zeros_like(std_P))
    close(advantages_P_G.std(1, correction=0), (std_P > 0).double(), atol=1e-3)


@given(rewards, st.sampled_from(["none", "std"]), st.randoms(use_true_random=False))
def test_advantages_permute_with_groups_and_within_them(rewards_P_G, scale, random):
    P, G = rewards_P_G.shape
    groups = random.sample(range(P), P)
    samples = random.sample(range(G), G)
    advantages_P_G = group_advantages(rewards_P_G, scale)
    # A group's advantages depend on nothing but the group.
    assert torch.equal(group_advantages(rewards_P_G[groups], scale), advantages_P_G[groups])
    permuted = group_advantages(rewards_P_G[:, samples], scale)
    close(permuted, advantages_P_G[:, samples], atol=1e-6)


@given(
    st.floats(-1e6, 1e6, width=32),
    st.integers(1, 7),
    st.sampled_from(["none", "std"]),
    st.sampled_from([torch.float32, torch.float64]),
)
@example(0.1, 3, "std", torch.float64)  # the mean of three times 0.1 isn't 0.1
@example(0.7, 1, "std", torch.float32)
def test_equal_rewards_and_single_samples_have_advantage_zero(reward, G, scale, dtype):
    advantages_P_G = group_advantages(torch.full((2, G), reward, dtype=dtype), scale)
    assert torch.equal(advantages_P_G, torch.zeros(2, G, dtype=dtype))


def test_integer_rewards_are_taken():
    assert group_advantages(torch.tensor([[0, 1]])).tolist() == [[-0.5, 0.5]]


def test_bad_rewards_are_refused():
    for value in (math.nan, math.inf, -math.inf):
        with pytest.raises(ValueError, match=r"not finite at \[prompt, sample\] = \[\[1, 0\]\]"):
            group_advantages(torch.tensor([[0.0, 1.0], [value, 1.0]]))
    with pytest.raises(ValueError, match=r"\(3,\), expected \(P, G\)"):
        group_advantages(torch.zeros(3))
    with pytest.raises(ValueError, match="'batch'"):
        group_advantages(torch.zeros(1, 2), scale="batch")


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5))
def test_reward_bits_are_the_mean_entropy_of_the_groups(solved_P):
    """Of groups of eight, with so many solved: 1 bit for one that is half solved, 0 for equal ones,
    and each group counts alike."""
    rewards_P_G = torch.tensor([[1.0] * k + [0.0] * (8 - k) for k in solved_P])
    shares = [share for k in solved_P for share in (k / 8, 1 - k / 8) if share]
    expected = -sum(share * math.log2(share) for share in shares) / len(solved_P)
    assert math.isclose(reward_bits(rewards_P_G), expected, abs_tol=1e-6)
    other_rewards = 3 * rewards_P_G - 1  # what the two rewards are does not matter
    assert math.isclose(reward_bits(other_rewards), expected, abs_tol=1e-6)


# --------------------------------------------------------------------- gradients of the losses


@pytest.mark.parametrize("kind", KINDS)
@given(batches())
def test_on_policy_gradient_is_minus_advantage_grad_logprob(kind, batch):
    """By finite differences with respect to the logits; for gspo, of its sequence form."""
    advantages, mask, N = batch.advantages[:, None], batch.mask, batch.denominator

    def objective(logits):  # (nudges, S, T, V) -> (nudges,)
        logprobs = token_logprobs(logits, batch.tokens.expand(logits.shape[:-1]))
        if kind != "gspo":
            return (-advantages * logprobs * mask).sum((1, 2)) / N
        # |o| s A for each sequence, s the geometric mean of its ratios.
        length = mask.sum(1)
        log_ratio = ((logprobs - batch.logprobs) * mask).sum(2) / length.clamp(min=1)
        return -(length * torch.exp(log_ratio) * batch.advantages).sum(1) / N

    step = 1e-5
    nudges = step * torch.eye(batch.logits.numel(), dtype=torch.float64).view(
        -1, *batch.logits.shape
    )
    rise = objective(batch.logits + nudges) - objective(batch.logits - nudges)
    numeric = (rise / (2 * step)).view_as(batch.logits)

    logits = batch.logits.clone().requires_grad_()
    loss, metrics = policy_loss(
        kind, token_logprobs(logits, batch.tokens), batch.logprobs, batch.advantages, mask, N
    )
    close(torch.autograd.grad(loss, logits)[0], numeric, atol=1e-8)
    # One update a batch: r is 1, so no bound is at work.
    assert metrics["clipped_low"] == metrics["clipped_high"] == 0


@pytest.mark.parametrize("kind", KINDS)
@given(batches())
def test_gradient_survives_a_ratio_of_a_tensor_with_itself(kind, batch):
    """mlx-lm-lora#55: with the policy's own logprobs as the sampler's, r - r was differentiated."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, _ = policy_loss(kind, logprobs, logprobs, batch.advantages, batch.mask, 8)
    loss.backward()
    close(logprobs.grad, -batch.advantages[:, None] * batch.mask / 8)


def off_policy_gradient(kind, logprob, sampler_logprob, advantage):
    """d loss / d logprob of one token, and the side on which a bound was at work: -1, 0, 1."""
    log_ratio = logprob - sampler_logprob
    ratio = math.exp(log_ratio)
    if kind == "reinforce":
        return -advantage, 0
    if kind in ("grpo", "gspo"):  # gspo: of a sequence of one token
        low, high = (0.2, 0.28) if kind == "grpo" else (3e-4, 4e-4)
        if advantage > 0 and ratio > 1 + high:
            return 0.0, 1
        if advantage < 0 and ratio < 1 - low:
            return 0.0, -1
        return -ratio * advantage, 0
    if kind == "tis":
        return -min(ratio, 2.0) * advantage, int(ratio > 2)
    if kind == "cispo":
        return -min(ratio, 5.0) * advantage, int(ratio > 5)
    if kind == "icepop":
        side = int(ratio > 5) - int(ratio < 0.5)
        return 0.0 if side else -ratio * advantage, side
    if kind == "prime":
        moved = math.exp(logprob) - math.exp(sampler_logprob)
        side = 0
        if moved > 0.2 and advantage > 0:
            side = 1
        if moved < -0.2 and advantage < 0:
            side = -1
        return (0.0 if side else -ratio * advantage) + 1e-3 * 2 * log_ratio, side
    raise AssertionError(f"no expectation for {kind}")


@pytest.mark.parametrize("kind", KINDS)
@given(st.floats(-4, -0.01), st.floats(-4, -0.01), st.floats(-3, 3), st.integers(1, 9))
@example(-0.1, -4.0, 1.0, 1)  # too far up, and down, with either sign of the advantage
@example(-0.1, -4.0, -1.0, 1)
@example(-4.0, -0.1, 1.0, 1)
@example(-4.0, -0.1, -1.0, 1)
def test_off_policy_gradient_and_clip_counts(kind, logprob, sampler_logprob, advantage, N):
    row = [float64([[x]]) for x in (logprob, sampler_logprob)]
    row[0].requires_grad_()
    loss, metrics = policy_loss(kind, *row, float64([advantage]), ON, N)
    loss.backward()
    gradient, side = off_policy_gradient(kind, logprob, sampler_logprob, advantage)
    close(row[0].grad.item(), gradient / N)
    assert (metrics["clipped_low"], metrics["clipped_high"]) == (side == -1, side == 1)


def test_cispo_clips_on_both_sides():
    logprobs = torch.tensor([[-1.0, -1.0, -1.0]], requires_grad=True)
    sampler_logprobs = logprobs.detach() - torch.tensor([[0.1, 1.0, 10.0]]).log()
    loss, metrics = policy_loss(
        "cispo", logprobs, sampler_logprobs, torch.ones(1), logprobs > -2, 1,
        clip_low=0.2, clip_high=0.3,
    )  # fmt: skip
    loss.backward()
    close(logprobs.grad, torch.tensor([[-0.8, -1.0, -1.3]]), atol=1e-6, rtol=0)
    assert metrics["clipped_low"] == metrics["clipped_high"] == 1


@pytest.mark.parametrize("kind", ["grpo", "gspo"])
@given(
    st.floats(-2, 2),
    st.floats(-3, 3).filter(lambda advantage: abs(advantage) > 1e-3),
    st.floats(0.05, 0.5),
    st.floats(0.05, 0.5),
)
def test_clip_is_pessimistic_for_both_signs(kind, log_ratio, advantage, clip_low, clip_high):
    logprobs = float64([[-1.0]]).requires_grad_()
    sampler_logprobs = logprobs.detach() - log_ratio
    ratio = math.exp(log_ratio)
    assume(min(abs(ratio - 1 + clip_low), abs(ratio - 1 - clip_high)) > 1e-6)
    loss, _ = policy_loss(
        kind, logprobs, sampler_logprobs, float64([advantage]), ON, 1,
        clip_low=clip_low, clip_high=clip_high,
    )  # fmt: skip
    loss.backward()

    objective = -loss.item()
    unclipped = ratio * advantage
    assert objective <= unclipped + 1e-12
    # Where it is truly less, the token has gone beyond its bound, and only the pessimistic side
    # has no gradient: A > 0 above, A < 0 below.
    pessimistic = ratio > 1 + clip_high if advantage > 0 else ratio < 1 - clip_low
    assert (objective < unclipped - 1e-12) == pessimistic
    assert (logprobs.grad.item() == 0) == pessimistic


@given(batches(), st.floats(1e-3, 0.5), st.floats(1e-3, 0.5))
def test_gspo_is_the_clip_of_the_sequence_ratio(batch, clip_low, clip_high):
    """Value and gradient of Eq. 5, a sequence counted as often as it has tokens."""
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, metrics = policy_loss(
        "gspo", logprobs, batch.sampler, batch.advantages, batch.mask, batch.denominator,
        clip_low=clip_low, clip_high=clip_high,
    )  # fmt: skip

    length = batch.mask.sum(1)
    log_ratio = torch.where(batch.mask, logprobs - batch.sampler, 0).sum(1) / length.clamp(min=1)
    ratio, A = torch.exp(log_ratio), batch.advantages
    objective = torch.minimum(ratio * A, ratio.clamp(1 - clip_low, 1 + clip_high) * A)
    expected = -(length * objective).sum() / batch.denominator
    close(loss, expected)
    close(torch.autograd.grad(loss, logprobs)[0], torch.autograd.grad(expected, logprobs)[0])
    assert metrics["clipped_high"] == length[(A > 0) & (ratio > 1 + clip_high)].sum()
    assert metrics["clipped_low"] == length[(A < 0) & (ratio < 1 - clip_low)].sum()


@given(batches(), SEEDS)
def test_gspo_gives_each_token_its_own_advantage(batch, seed):
    """Eq. 14: with advantages per token the gradient of a token is s times its own advantage."""
    advantages = normal(batch.mask.shape, seed)
    logprobs = batch.logprobs.clone().requires_grad_()
    loss, _ = policy_loss(
        "gspo", logprobs, batch.sampler, advantages, batch.mask, 8, **UNCLIPPED["gspo"]
    )
    loss.backward()
    log_ratios = torch.where(batch.mask, batch.logprobs - batch.sampler, math.nan)
    ratio = log_ratios.nanmean(1, keepdim=True).exp()
    close(logprobs.grad, torch.where(batch.mask, -ratio * advantages / 8, 0.0))


@pytest.mark.parametrize("kind", UNCLIPPED)
@given(SEEDS)
def test_unclipped_importance_sampling_is_unbiased(kind, seed):
    """With tokens drawn from mu the mean gradient is that of the expected advantage under pi."""
    logits, mu_logprobs = distribution_pair(seed)
    A = normal((V,), seed + 2)

    def loss_of_token(logprob, v):
        mu_logprob = mu_logprobs[v].view(1, 1)
        return policy_loss(kind, logprob, mu_logprob, A[v : v + 1], ON, 1, **UNCLIPPED[kind])[0]

    gradient = expected_gradient(logits, mu_logprobs.exp(), loss_of_token)
    close(gradient, exact_gradient(logits, lambda logprobs: -(logprobs.exp() * A).sum()))


# -------------------------------------------------------------- masks, padding, micro-batches


@pytest.mark.parametrize("kind", [*KINDS, "kl"])
@given(batches(), st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -7.0]))
def test_content_of_padding_changes_nothing(kind, batch, junk):
    batch.advantages = batch.advantages[:, None].repeat(1, batch.mask.shape[1])
    loss, gradient, metrics = loss_and_gradient(kind, batch)

    names = ("logprobs", "sampler", "reference", "advantages")
    filled = {name: torch.where(batch.mask, getattr(batch, name), junk) for name in names}
    junk_loss, junk_gradient, junk_metrics = loss_and_gradient(kind, batch, **filled)
    assert torch.equal(loss, junk_loss)
    assert torch.equal(gradient, junk_gradient)
    assert metrics == junk_metrics
    assert (junk_gradient[~batch.mask] == 0).all()
    for measure in (kl_estimates, mismatch_metrics):
        clean = measure(batch.logprobs, batch.sampler, batch.mask)
        assert clean == measure(filled["logprobs"], filled["sampler"], batch.mask)


@pytest.mark.parametrize("kind", [*KINDS, "kl"])
@given(batches(), st.integers(1, 3))
def test_amount_of_padding_changes_nothing(kind, batch, extra):
    loss, gradient, metrics = loss_and_gradient(kind, batch)
    padded = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, extra))
        for name in ("logprobs", "sampler", "reference", "mask")
    }
    padded_loss, padded_gradient, padded_metrics = loss_and_gradient(kind, batch, **padded)
    close(padded_loss, loss)
    close(padded_gradient[:, :-extra], gradient)
    close(padded_metrics, metrics)


@pytest.mark.parametrize("kind", [*KINDS, "kl"])
@given(batches(), st.randoms(use_true_random=False))
def test_micro_batch_split_and_order_change_nothing(kind, batch, random):
    S = len(batch.mask)
    loss, gradient, metrics = loss_and_gradient(kind, batch)
    order = random.sample(range(S), S)
    cut = random.randint(0, S - 1)
    names = ("logprobs", "sampler", "reference", "advantages", "mask")
    parts = []
    for rows in filter(None, (order[:cut], order[cut:])):
        changes = {name: getattr(batch, name)[rows] for name in names}
        part_loss, part_gradient, part_metrics = loss_and_gradient(kind, batch, **changes)
        close(part_gradient, gradient[rows])
        parts.append((part_loss, part_metrics))

    close(sum(part_loss for part_loss, _ in parts), loss)
    for name, value in metrics.items():
        close(sum(part_metrics[name] for _, part_metrics in parts), value)


@pytest.mark.parametrize("kind", KINDS)
@given(batches())
def test_an_advantage_per_sequence_is_one_for_each_of_its_tokens(kind, batch):
    per_token = batch.advantages[:, None].repeat(1, batch.mask.shape[1])
    per_sequence = loss_and_gradient(kind, batch)
    assert torch.equal(per_sequence[1], loss_and_gradient(kind, batch, advantages=per_token)[1])
    # A number mask is the same mask.
    assert torch.equal(per_sequence[1], loss_and_gradient(kind, batch, mask=batch.mask.int())[1])


@pytest.mark.parametrize("kind", [*KINDS, "kl"])
def test_an_empty_mask_gives_zero_loss_and_gradient(kind):
    row = torch.full((2, 3), -1.0)
    batch = SimpleNamespace(
        logprobs=row, sampler=row - 1, reference=row - 2, advantages=torch.ones(2),
        mask=torch.zeros(2, 3), denominator=5,
    )  # fmt: skip
    loss, gradient, metrics = loss_and_gradient(kind, batch)
    assert loss == 0 and (gradient == 0).all() and not any(metrics.values())


# ---------------------------------------------------------------------- KL to the reference


@given(SEEDS)
def test_expectation_of_k1_and_k3_is_the_kl(seed):
    logits, reference_logprobs = distribution_pair(seed)
    logprobs = logits.log_softmax(-1)
    kl = (logprobs.exp() * (logprobs - reference_logprobs)).sum().item()
    mean = {"k1": 0.0, "k2": 0.0, "k3": 0.0}
    for v in range(V):
        estimates = kl_estimates(logprobs[v].view(1, 1), reference_logprobs[v].view(1, 1), ON)
        assert estimates["k2"] >= 0 and estimates["k3"] >= 0
        for name in mean:
            mean[name] += logprobs[v].exp().item() * estimates[name]
    close(mean["k1"], kl)
    close(mean["k3"], kl)


@given(SEEDS)
def test_expectation_of_k2_is_the_kl_to_second_order(seed):
    distance = 1e-3
    logits = normal((V,), seed)
    logprobs = logits.log_softmax(-1)
    reference_logprobs = (logits + distance * normal((V,), seed + 1)).log_softmax(-1)
    probabilities = logprobs.exp()
    kl = (probabilities * (logprobs - reference_logprobs)).sum().item()
    k2 = sum(
        probabilities[v].item() * kl_estimates(logprobs[v], reference_logprobs[v], ON[0, 0])["k2"]
        for v in range(V)
    )
    assert abs(k2 - kl) <= 10 * distance * kl


@given(SEEDS, st.booleans())
def test_gradient_of_the_kl_loss_is_that_of_the_reverse_kl(seed, on_policy):
    logits, reference_logprobs = distribution_pair(seed)
    mu_logprobs = (logits if on_policy else normal((V,), seed + 2)).log_softmax(-1)

    def loss_of_token(logprob, v):
        mu_logprob, reference_logprob = mu_logprobs[v].view(1, 1), reference_logprobs[v].view(1, 1)
        return kl_loss(logprob, mu_logprob, reference_logprob, ON, 1)

    gradient = expected_gradient(logits, mu_logprobs.exp(), loss_of_token)
    kl = exact_gradient(
        logits, lambda logprobs: (logprobs.exp() * (logprobs - reference_logprobs)).sum()
    )
    close(gradient, kl)


@given(SEEDS)
def test_k3_as_a_loss_would_follow_the_other_kl(seed):
    """Why Decision 6 has k3 as a metric only: its gradient is that of KL(reference || pi)."""
    logits, reference_logprobs = distribution_pair(seed)
    probabilities = logits.softmax(-1)
    gradient = expected_gradient(
        logits, probabilities, lambda logprob, v: k3(logprob - reference_logprobs[v]).sum()
    )
    forward_kl = exact_gradient(
        logits, lambda logprobs: -(reference_logprobs.exp() * logprobs).sum()
    )
    close(gradient, forward_kl)


@given(batches())
def test_kl_loss_is_the_weighted_square_over_the_denominator(batch):
    loss, _, _ = loss_and_gradient("kl", batch)
    square = (batch.logprobs - batch.reference) ** 2
    weighted = torch.exp(batch.logprobs - batch.sampler) * square / 2
    close(loss, weighted[batch.mask].sum() / batch.denominator)
    estimates = kl_estimates(batch.logprobs, batch.reference, batch.mask)
    if batch.mask.any():
        close(estimates["k2"], square[batch.mask].mean().item() / 2)
    else:
        assert estimates == {"k1": 0.0, "k2": 0.0, "k3": 0.0}


@given(SEEDS)
def test_kl_loss_lets_nothing_but_logprobs_have_gradient(seed):
    logprobs, sampler_logprobs, reference_logprobs = (
        normal((2, 3), seed + i).requires_grad_() for i in range(3)
    )
    kl_loss(logprobs, sampler_logprobs, reference_logprobs, torch.ones(2, 3), 6).backward()
    assert logprobs.grad.abs().sum() > 0
    assert sampler_logprobs.grad is None and reference_logprobs.grad is None


# -------------------------------------------------------------- mismatch of trainer and sampler


@given(batches())
def test_no_mismatch_at_equality(batch):
    assert mismatch_metrics(batch.logprobs, batch.logprobs, batch.mask) == {
        "mismatch_kl": 0.0,
        "mismatch_kl_reverse": 0.0,
        "mismatch_max": 0.0,
        "mismatch_mean": 0.0,
        "effective_sample_size": 1.0,
    }


@given(SEEDS)
def test_expectation_of_the_mismatch_is_the_kl_each_way(seed):
    logits, mu_logprobs = distribution_pair(seed)
    logprobs, mu = logits.log_softmax(-1), mu_logprobs.exp()
    forward = reverse = 0.0
    for v in range(V):
        metrics = mismatch_metrics(logprobs[v].view(1, 1), mu_logprobs[v].view(1, 1), ON)
        forward += mu[v].item() * metrics["mismatch_kl"]
        reverse += mu[v].item() * metrics["mismatch_kl_reverse"]
        assert metrics["mismatch_kl"] >= 0 and metrics["mismatch_kl_reverse"] >= 0
    close(forward, (mu * (mu_logprobs - logprobs)).sum().item())
    close(reverse, (logprobs.exp() * (logprobs - mu_logprobs)).sum().item())


@given(batches())
def test_size_of_the_mismatch(batch):
    assume(batch.mask.any())
    metrics = mismatch_metrics(batch.logprobs, batch.sampler, batch.mask)
    difference = (batch.logprobs - batch.sampler)[batch.mask]
    ratio, n = difference.exp(), len(difference)
    close(metrics["mismatch_kl"], (ratio - 1 - difference).mean().item())
    close(metrics["mismatch_max"], difference.abs().max().item())
    close(metrics["mismatch_mean"], difference.abs().mean().item())
    close(metrics["effective_sample_size"], (ratio.sum() ** 2 / (n * (ratio**2).sum())).item())
    assert 1 / n - 1e-12 <= metrics["effective_sample_size"] <= 1 + 1e-12


def test_effective_sample_size_of_one_token_that_outweighs_n():
    trainer_logprobs = torch.tensor([[40.0, 0.0, 0.0, 0.0]])
    metrics = mismatch_metrics(trainer_logprobs, torch.zeros(1, 4), torch.ones(1, 4))
    close(metrics["effective_sample_size"], 0.25)


@given(st.floats(1e-7, 1e-3), SEEDS)
def test_a_small_mismatch_keeps_its_digits_in_float32(size, seed):
    """exp(x) - 1 - x in float32 has no digit left at x = 1e-4, which is what engines differ by."""
    trainer_logprobs = (size * normal((2, 3), seed)).float()
    sampler_logprobs = torch.zeros(2, 3)
    half_square = (trainer_logprobs.double() ** 2 / 2).mean().item()
    mismatch = mismatch_metrics(trainer_logprobs, sampler_logprobs, torch.ones(2, 3))
    estimates = kl_estimates(trainer_logprobs, sampler_logprobs, torch.ones(2, 3))
    for estimate in (mismatch["mismatch_kl"], mismatch["mismatch_kl_reverse"], estimates["k3"]):
        close(estimate, half_square, atol=0, rtol=1e-2)


# ------------------------------------------------------------------------------- bad input


def test_bad_input_is_refused_by_name():
    row, A = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(ValueError, match="'ppo'; known: reinforce, grpo, tis, cispo, icepop, gspo"):
        policy_loss("ppo", row, row, A, row, 1)
    with pytest.raises(ValueError, match=r"sampler_logprobs \(2, 2\)"):
        policy_loss("grpo", row, row[:, 1:], A, row, 1)
    with pytest.raises(ValueError, match=r"mask \(2, 2\)"):
        policy_loss("grpo", row, row, A, row[:, 1:], 1)
    with pytest.raises(ValueError, match=r"\(2, 3\) with advantages \(3,\)"):
        policy_loss("grpo", row, row, torch.zeros(3), row, 1)
    with pytest.raises(ValueError, match=r"logprobs \(2,\)"):
        policy_loss("grpo", A, A, A, A, 1)
    with pytest.raises(TypeError, match="cap"):
        policy_loss("grpo", row, row, A, row, 1, cap=2.0)
    for denominator in (0, -1, math.nan):
        with pytest.raises(ValueError, match="denominator"):
            policy_loss("grpo", row, row, A, row, denominator)
        with pytest.raises(ValueError, match="denominator"):
            kl_loss(row, row, row, row, denominator)
    with pytest.raises(ValueError, match=r"reference \(2, 2\)"):
        kl_loss(row, row, row[:, 1:], row, 1)
    with pytest.raises(ValueError, match=r"other_logprobs \(2, 2\)"):
        kl_estimates(row, row[:, 1:], row)
    with pytest.raises(ValueError, match="shapes differ"):
        mismatch_metrics(row, row, row[:1])
