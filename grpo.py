"""GRPO in pure functions of tensors: advantages, policy losses, KL to the reference, mismatch.

A group of G episodes answers the same prompt, and an episode's advantage A is its reward minus
the mean reward of its group. Every token that the model sampled carries its episode's advantage.
With pi the policy in training, mu the sampler (the policy that drew the tokens),
r = exp(logpi - logmu) and sg = stop-gradient, the loss of one token is

    reinforce   -A logpi
    grpo        -min(r A, clip(r, 1 - low, 1 + high) A)
    tis         -min(sg r, cap) A logpi
    cispo       -clip(sg r, 1 - low, 1 + high) A logpi
    icepop      -(sg r if low <= sg r <= high else 0) A logpi
    gspo        grpo with the geometric mean of r over the sequence in place of r
    prime       -keep A r + 1e-3 (log r)^2

and the loss of a step is their sum over the sampled tokens, divided by how many the step has.
On-policy, where r = 1, all seven have the same gradient: -A grad logpi. The value of the loss
carries no information (for grpo it is about zero on-policy): watch the reward instead.

Left out on purpose: a value function (the group's mean stands in for it), division by the
group's standard deviation (off by default), several optimizer steps on one batch (r corrects
for staleness, and for a sampler that rounds differently, by one mechanism).

Axes: P prompts, G samples per group, S sequences (one trajectory a row), T tokens.
The losses take a micro-batch and add up over the micro-batches of a step, and so do their metrics.
`kl_estimates` and `mismatch_metrics` are means: call them once, with all tokens of the step.
"""

import torch
from torch import Tensor

# ------------------------------------------------------------------------------- advantages


def group_advantages(rewards_P_G: Tensor, scale: str = "none") -> Tensor:
    """Reward minus the mean reward of its group, (P, G); zero where a group's rewards are equal.

    scale="none" is Dr. GRPO (arXiv 2503.20783, section 3.2): dividing by the standard deviation,
    as GRPO did (arXiv 2402.03300, section 4.1.2), gives the questions that are nearly always or
    nearly never answered a larger weight than the others. scale="std" divides by it all the same.

    Raises ValueError on another scale, another shape than (P, G), or a reward that isn't finite.
    """
    if scale not in ("none", "std"):
        raise ValueError(f'scale is {scale!r}, expected "none" or "std"')
    if rewards_P_G.ndim != 2:
        raise ValueError(f"rewards have shape {tuple(rewards_P_G.shape)}, expected (P, G)")
    not_finite = (~torch.isfinite(rewards_P_G)).nonzero().tolist()
    if not_finite:
        raise ValueError(f"rewards not finite at [prompt, sample] = {not_finite}")
    if not rewards_P_G.is_floating_point():
        rewards_P_G = rewards_P_G.float()

    advantages_P_G = rewards_P_G - rewards_P_G.mean(dim=1, keepdim=True)
    if scale == "std":
        # The population's standard deviation: defined for G = 1, where the sample's is NaN.
        std_P_1 = rewards_P_G.std(dim=1, keepdim=True, correction=0)
        advantages_P_G = advantages_P_G / (std_P_1 + 1e-6)
    # The mean of equal rewards may differ from them in the last bit; such a group teaches nothing.
    equal_P_1 = (rewards_P_G == rewards_P_G[:, :1]).all(dim=1, keepdim=True)
    return advantages_P_G.masked_fill(equal_P_1, 0.0)


def reward_bits(rewards_P_G: Tensor) -> float:
    """Entropy of the rewards within a group, in bits a sample, averaged over the groups: all that
    the rewards of a step can tell about which samples are good. At most 1 where a reward is 0 or 1,
    0 for a group of equal rewards. From G samples it comes out low by about 1 / (2 G ln 2).
    """
    bits = []
    for rewards_G in rewards_P_G:
        counts = rewards_G.unique(return_counts=True)[1]
        shares = counts / counts.sum()
        bits.append(-(shares * shares.log2()).sum())
    return torch.stack(bits).mean().item() + 0.0  # not -0.0


# ---------------------------------------------------------------------------- policy losses
# Each takes logprobs (with gradient), sampler_logprobs, advantages and mask, all (S, T), and its
# own settings, with the published values as defaults. Each returns the loss of every token and,
# as two boolean tensors, where its lower and its upper bound were at work.


def reinforce(logprobs, sampler_logprobs, advantages, mask):
    """Williams 1992: the plain policy gradient, which takes the sampler to be the policy."""
    never = torch.zeros_like(mask)
    return -advantages * logprobs, never, never


def grpo(logprobs, sampler_logprobs, advantages, mask, clip_low=0.2, clip_high=0.28):
    """PPO's clip (arXiv 1707.06347, Eq. 7) with DAPO's two bounds (arXiv 2503.14476, Eq. 10)."""
    ratio = torch.exp(logprobs - sampler_logprobs)
    return pessimistic_clip(ratio, advantages, clip_low, clip_high)


def pessimistic_clip(ratio, advantages, clip_low, clip_high):
    """The minimum, for both signs of A: it stops a token that has moved far enough the right way,
    and lets one that has moved the wrong way come back."""
    clipped = torch.clamp(ratio, 1 - clip_low, 1 + clip_high)
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    too_low = (ratio < 1 - clip_low) & (advantages < 0)
    too_high = (ratio > 1 + clip_high) & (advantages > 0)
    return loss, too_low, too_high


def tis(logprobs, sampler_logprobs, advantages, mask, cap=2.0):
    """Truncated importance sampling (Yao et al. 2025, fengyao.notion.site/off-policy-rl)."""
    ratio = torch.exp(logprobs - sampler_logprobs).detach()
    loss = -torch.clamp(ratio, max=cap) * advantages * logprobs
    return loss, torch.zeros_like(mask), ratio > cap


def cispo(logprobs, sampler_logprobs, advantages, mask, clip_low=1.0, clip_high=4.0):
    """MiniMax-M1 (arXiv 2506.13585, Eq. 4-5): the weight is clipped, no token loses its gradient.

    clip_low = 1 is no lower bound, as in the paper, which keeps its upper bound to itself;
    1 + clip_high = 5 is ScaleRL's (arXiv 2510.13786).
    """
    ratio = torch.exp(logprobs - sampler_logprobs).detach()
    loss = -torch.clamp(ratio, 1 - clip_low, 1 + clip_high) * advantages * logprobs
    return loss, ratio < 1 - clip_low, ratio > 1 + clip_high


def icepop(logprobs, sampler_logprobs, advantages, mask, band_low=0.5, band_high=5.0):
    """IcePop (Ring-1T, arXiv 2510.18855): a token on which the two disagree is left out."""
    ratio = torch.exp(logprobs - sampler_logprobs).detach()
    too_low, too_high = ratio < band_low, ratio > band_high
    weight = torch.where(too_low | too_high, 0.0, ratio)
    return -weight * advantages * logprobs, too_low, too_high


def gspo(logprobs, sampler_logprobs, advantages, mask, clip_low=3e-4, clip_high=4e-4):
    """GSPO (arXiv 2507.18071, Eq. 5 and 7): the ratio belongs to the sequence, as the reward does.

    Written as GSPO-token (Eq. 13-14): a token's ratio has the value of the sequence's and the
    gradient of the token's own logprob, so that advantages per token work too. As in every loss
    here a sequence weighs as many times as it has tokens; Eq. 5 weighs all sequences the same.
    """
    length = mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean_log_ratio = (logprobs - sampler_logprobs).sum(dim=1, keepdim=True) / length  # (S, 1)
    ratio = torch.exp(mean_log_ratio.detach() + logprobs - logprobs.detach())  # (S, T)
    return pessimistic_clip(ratio, advantages, clip_low, clip_high)


def prime(logprobs, sampler_logprobs, advantages, mask, mask_low=0.2, mask_high=0.2, kl_tau=1e-3):
    """prime-rl's default (src/prime_rl/trainer/rl/loss.py, default_loss_fn): DPPO and a tether.

    DPPO (arXiv 2602.04879, binary total variation) drops the policy gradient of a token whose
    probability, not its ratio, has moved too far the way its advantage points. The squared
    log-ratio to the sampler (Kimi K2.5, arXiv 2602.02276) holds every token, dropped or not.
    """
    log_ratio = logprobs - sampler_logprobs
    moved = (torch.exp(logprobs) - torch.exp(sampler_logprobs)).detach()
    too_low = (moved < -mask_low) & (advantages < 0)
    too_high = (moved > mask_high) & (advantages > 0)
    kept_advantages = torch.where(too_low | too_high, 0.0, advantages)
    loss = -kept_advantages * torch.exp(log_ratio) + kl_tau * log_ratio**2
    return loss, too_low, too_high


LOSSES = {loss.__name__: loss for loss in (reinforce, grpo, tis, cispo, icepop, gspo, prime)}


def policy_loss(
    kind: str,
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    denominator: float,
    **settings: float,
) -> tuple[Tensor, dict[str, float]]:
    """The policy loss of a micro-batch, ready for backward(), and its metrics.

    kind: a name in `LOSSES`; settings: the keywords of that function (clip_low, cap, ...).
    logprobs, sampler_logprobs: (S, T), in nats, of the sampled tokens; logprobs gets gradient.
    advantages: (S,), or (S, T) for one per token.
    mask: (S, T), nonzero where a token carries loss; elsewhere the tensors may hold anything.
    denominator: the number of sampled tokens of the whole step, those of skipped groups included.
        One constant for all micro-batches: how a batch is split changes nothing, and every token
        weighs the same (as in DAPO; dividing by a sequence's length favours short wins and long
        losses, Dr. GRPO section 3.1).

    Metrics add up over micro-batches: "clipped_low" and "clipped_high" are the selected tokens on
    which a bound was at work (tis, cispo: the weight was clipped; the others: the policy gradient
    was dropped).

    Raises ValueError on an unknown kind, on shapes that don't fit and on a denominator that isn't
    positive, TypeError on a setting that the loss doesn't have.
    """
    if kind not in LOSSES:
        raise ValueError(f"unknown loss {kind!r}; known: {', '.join(LOSSES)}")
    check_shapes(logprobs=logprobs, sampler_logprobs=sampler_logprobs, mask=mask)
    check_denominator(denominator)
    if logprobs.ndim != 2 or advantages.shape not in (logprobs.shape, logprobs.shape[:1]):
        raise ValueError(
            f"logprobs {tuple(logprobs.shape)} with advantages {tuple(advantages.shape)}, "
            "expected (S, T) with (S,) or (S, T)"
        )
    if advantages.ndim == 1:
        advantages = advantages[:, None].expand_as(logprobs)  # (S,) -> (S, T)
    mask = mask.bool()
    # Detached: with the caller's own logprobs passed twice, r is 1, but its gradient must not die.
    sampler_logprobs = sampler_logprobs.detach()
    # Cleaned before the arithmetic, since a mask applied after it makes NaN of 0 * NaN in backward.
    logprobs, sampler_logprobs, advantages = (
        torch.where(mask, values, 0.0) for values in (logprobs, sampler_logprobs, advantages)
    )

    loss_of = LOSSES[kind]
    loss, too_low, too_high = loss_of(logprobs, sampler_logprobs, advantages, mask, **settings)
    metrics = {
        "clipped_low": masked_sum(too_low, mask).item(),
        "clipped_high": masked_sum(too_high, mask).item(),
    }
    return masked_sum(loss, mask) / denominator, metrics


# ------------------------------------------------------------------------ KL to the reference


def kl_estimates(logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor) -> dict[str, float]:
    """Schulman's k1, k2, k3 of KL(pi || reference), in nats (joschu.net/blog/kl-approx.html).

    All of one shape, any; means over the mask, zeros if it is empty. For tokens drawn from pi the
    expectation of k1 and of k3 is the KL, that of k2 is to second order; k3 is never negative and
    varies less than k1 near the reference. Tokens of a stale sampler bias all three.
    Raises ValueError on unequal shapes.
    """
    log_ratio = selected_log_ratio(logprobs, reference_logprobs, mask)
    return {
        "k1": log_ratio.mean().item(),
        "k2": (0.5 * log_ratio**2).mean().item(),
        "k3": k3(log_ratio).mean().item(),
    }


def kl_loss(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    denominator: float,
) -> Tensor:
    """sg(r) (logpi - logref)^2 / 2: as a value not the KL, but with the KL's gradient.

    Shapes, mask, denominator and errors as in `policy_loss`; only logprobs gets gradient.
    The gradient, r (logpi - logref) grad logpi with tokens from mu, is on average that of
    KL(pi || reference) of each next-token distribution. The others aren't losses: the gradient of
    k1 is grad logpi, of mean zero, hence noise alone; that of k3 is (1 - ref / pi) grad logpi, on
    average the gradient of the other divergence, KL(reference || pi).
    (Tang and Munos, arXiv 2506.09477; Liu et al., arXiv 2510.01555.)
    """
    check_shapes(
        logprobs=logprobs, sampler=sampler_logprobs, reference=reference_logprobs, mask=mask
    )
    check_denominator(denominator)
    mask = mask.bool()
    logprobs, sampler_logprobs, reference_logprobs = (
        torch.where(mask, values, 0.0)
        for values in (logprobs, sampler_logprobs.detach(), reference_logprobs.detach())
    )
    weight = torch.exp(logprobs - sampler_logprobs).detach()
    loss = weight * 0.5 * (logprobs - reference_logprobs) ** 2
    return masked_sum(loss, mask) / denominator


# -------------------------------------------------------------- mismatch of trainer and sampler


def mismatch_metrics(
    trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor
) -> dict[str, float]:
    """How far the trainer's policy pi is from the sampler's mu, which drew the tokens.

    mismatch_kl: mean of r - 1 - log r, the k3 of KL(mu || pi), as in prime-rl
    mismatch_kl_reverse: mean of r log r - (r - 1), the k3 of KL(pi || mu) weighted by r
    mismatch_max, mismatch_mean: of |logpi - logmu|
    effective_sample_size: (sum r)^2 / (n sum r^2), 1 if all tokens count, 1/n if one does
    All of one shape, any. An empty mask is no mismatch. Raises ValueError on unequal shapes.
    """
    log_ratio = selected_log_ratio(trainer_logprobs, sampler_logprobs, mask)
    ratio = torch.exp(log_ratio)
    return {
        "mismatch_kl": k3(-log_ratio).mean().item(),
        "mismatch_kl_reverse": (ratio * log_ratio - torch.expm1(log_ratio)).mean().item(),
        "mismatch_max": log_ratio.abs().max().item(),
        "mismatch_mean": log_ratio.abs().mean().item(),
        "effective_sample_size": (ratio.mean() ** 2 / (ratio**2).mean()).item(),
    }


# ---------------------------------------------------------------------------------- helpers


def k3(log_ratio: Tensor) -> Tensor:
    """exp(-x) - 1 + x, which for x = log p - log q of tokens drawn from p estimates KL(p || q).

    By expm1: where p and q nearly agree, exp(-x) - 1 would cancel to nothing but rounding.
    """
    return torch.expm1(-log_ratio) + log_ratio


def selected_log_ratio(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """logprobs - other_logprobs of the selected tokens, detached; one zero if there are none.

    In float64, since a KL is a small difference of large terms; on the CPU, where that exists.
    """
    check_shapes(logprobs=logprobs, other_logprobs=other_logprobs, mask=mask)
    mask = mask.bool()
    if not mask.any():
        return torch.zeros(1, dtype=torch.float64)
    return logprobs.detach()[mask].cpu().double() - other_logprobs.detach()[mask].cpu().double()


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of the values where the mask is on."""
    return torch.where(mask.bool(), values, 0).sum()


def check_shapes(**tensors: Tensor) -> None:
    """ValueError with each tensor's name and shape, unless the shapes are equal."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise ValueError(f"shapes differ: {listed}")


def check_denominator(denominator: float) -> None:
    if not denominator > 0:
        raise ValueError(f"denominator is {denominator}, expected the step's token count, above 0")
