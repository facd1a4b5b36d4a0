"""One optimizer step: trajectories to micro-batches to gradients, on one process or several.

    trajectories, advantages ──► micro_batches ──► loss_and_backward ──► optimizer_step
                                 what begins       policy loss, KL,      clipped, finite or
                                 alike together    metrics (grpo.py)     not at all

How a step's trajectories are split changes neither loss nor gradient: every token weighs the same,
one over the number of sampled tokens of the whole step. Stages 4 and 5 of train.py's loop, and how
it finds out whether the sampler computes the same policy: before the first step (self_check), at
every version (Probe).

Axes: S sequences, T tokens.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from config import Config, eval_draws
from distributed import Ranks
from grpo import kl_estimates, kl_loss, mismatch_metrics, policy_loss
from lora import trainable, use_adapters
from model import Qwen3
from packing import common
from rollout import Completion, Trajectory

REFERENCE = "reference"  # the frozen copy of --init-adapter, by its name among the adapters
# Largest difference of a logprob between trainer and sampler that rounding explains, see
# experiments/mismatch.md.
MISMATCH_BOUND = {"float32": 1e-3, "bfloat16": 0.5}
# What a step's mismatch may reach before it is an alarm. In bfloat16 the largest of many tokens has
# a heavy tail; a sampler that serves the base has a KL of 3e-2, rounding one of 1e-4.
MISMATCH_ALARM = {"float32": ("mismatch_max", 1e-3), "bfloat16": ("mismatch_kl", 2e-3)}
# How far the trainer's logprobs of a probe must have moved before rounding cannot hide whether the
# server's have: ten times the largest gap in fp32, three times that of 72 probes in bf16, 0.03.
PROBE_MOVED = {"float32": 1e-4, "bfloat16": 0.1}
# And what ends a run before its first step: above what routers that choose otherwise in the sampler
# bring about, in bfloat16 a KL of 1.5e-3 for Qwen3-30B-A3B (arXiv 2510.11370).
MISMATCH_END = MISMATCH_ALARM | {"bfloat16": ("mismatch_kl", 1e-2)}


@dataclass
class Batch:
    """Trajectories side by side, padded on the right. Position t speaks of token t + 1.

    Padding is for their tensors' shape alone: the model computes none of it (packing.py).
    """

    ids: Tensor  # (S, T)
    mask: Tensor  # (S, T-1) whether token t + 1 was sampled
    sampler_logprobs: Tensor  # (S, T-1)
    advantages: Tensor  # (S,)
    trajectories: list[Trajectory]  # S of them

    def sent(self) -> "Batch":
        """What another rank needs of it."""
        return replace(self, trajectories=[])

    def to(self, device) -> "Batch":
        tensors = (self.ids, self.mask, self.sampler_logprobs, self.advantages)
        return Batch(*(tensor.to(device) for tensor in tensors), self.trajectories)


# For a rank without a micro-batch: of no token, but a pass through the model.
EMPTY = Batch(
    torch.zeros(1, 2, dtype=torch.long),
    torch.zeros(1, 1, dtype=torch.bool),
    torch.zeros(1, 1),
    torch.zeros(1),
    [],
)


def micro_batches(pairs: list[tuple[Trajectory, float]], tokens: int, device) -> list[Batch]:
    """(trajectory, advantage) pairs in batches of one, or of at most `tokens` that are computed.

    Sorted by their tokens, so that a group stands together with what its samples have in common;
    that is computed once a batch, and counts once.
    """
    parts, before, room = [], [], 0
    for pair in sorted(pairs, key=lambda pair: pair[0].token_ids):
        token_ids = pair[0].token_ids
        new = len(token_ids) - common(before, token_ids)
        if new > room:
            parts.append([])
            new, room = len(token_ids), tokens
        parts[-1].append(pair)
        before, room = token_ids, room - new
    batches = []
    for chosen in parts:
        length = max(len(trajectory.token_ids) for trajectory, _ in chosen)
        ids = torch.zeros(len(chosen), length, dtype=torch.long)
        mask = torch.zeros(len(chosen), length, dtype=torch.bool)
        sampler_logprobs = torch.zeros(len(chosen), length)
        for row, (trajectory, _) in enumerate(chosen):
            n = len(trajectory.token_ids)
            ids[row, :n] = torch.tensor(trajectory.token_ids)
            mask[row, :n] = torch.tensor(trajectory.loss_mask, dtype=torch.bool)
            sampler_logprobs[row, :n] = torch.tensor(trajectory.logprobs)
        advantages = torch.tensor([advantage for _, advantage in chosen], dtype=torch.float32)
        tensors = (ids, mask[:, 1:], sampler_logprobs[:, 1:], advantages)
        trajectories = [trajectory for trajectory, _ in chosen]
        batches.append(Batch(*(tensor.to(device) for tensor in tensors), trajectories))
    return batches


@contextmanager
def reference_policy(model: Qwen3, frozen: Qwen3 | None = None) -> Iterator[Qwen3]:
    """Inside, what it yields computes as the reference: the frozen copy of full fine-tuning; else
    the model with the adapter off, or as the adapter that the run started from had it."""
    if frozen is not None:
        yield frozen
        return
    started_from_one = REFERENCE in model.lora_selection.names
    with use_adapters(model, [(REFERENCE, None)] if started_from_one else []):
        yield model


def loss_and_backward(
    model,
    batches: list[Batch],
    denominator: int,
    config: Config,
    frozen: Qwen3 | None = None,
    ranks: Ranks | None = None,
) -> dict:
    """Stage 4 over all micro-batches: gradients are left on what is trained, each rank's own there,
    the trainer's logprobs on the trajectories; returns metrics."""
    ranks = ranks or Ranks(model, None, frozen)
    sent = [batch.sent() for batch in batches]
    scores = ranks.map(train_on, sent, denominator, config, empty=EMPTY)
    if batches and config.kl == 0:
        # Without a KL loss one micro-batch, the middle one, serves as the metric.
        middle = len(batches) // 2
        (reference,) = ranks.map(refer, sent[middle : middle + 1], config, empty=EMPTY)
        scores[middle]["reference"] = reference
    seen = {"trainer": [], "sampler": [], "policy": [], "reference": [], "entropy": []}
    for batch, score in zip(batches, scores, strict=True):
        mask, logprobs = batch.mask.cpu(), score["logprobs"]
        for trajectory, row in zip(batch.trajectories, logprobs.tolist(), strict=True):
            trajectory.trainer_logprobs = [0.0, *row][: len(trajectory.token_ids)]
        seen["trainer"].append(logprobs[mask])
        seen["sampler"].append(batch.sampler_logprobs.cpu()[mask])
        seen["entropy"].append(score["entropy"][mask])
        if score["reference"] is not None:
            seen["policy"].append(logprobs[mask])
            seen["reference"].append(score["reference"][mask])
    tokens = {name: torch.cat(parts) if parts else torch.zeros(0) for name, parts in seen.items()}
    everywhere = torch.ones_like(tokens["trainer"])
    metrics = {
        "loss": sum((score["loss"] for score in scores), 0.0),
        "tokens_trained": len(tokens["trainer"]),
    }
    metrics["entropy"] = tokens["entropy"].mean().item() if batches else 0.0
    clipped = sum(score["clipped"] for score in scores)
    metrics["clipped"] = clipped / max(len(tokens["trainer"]), 1)
    metrics |= mismatch_metrics(tokens["trainer"], tokens["sampler"], everywhere)
    measured = torch.ones_like(tokens["policy"])
    metrics["reference_kl"] = kl_estimates(tokens["policy"], tokens["reference"], measured)["k3"]
    gap = mismatch_metrics(tokens["policy"], tokens["reference"], measured)["mismatch_max"]
    metrics["reference_max"] = gap
    return metrics


def train_on(ranks: Ranks, share: list[Batch], denominator: int, config: Config) -> list[dict]:
    """A rank's part of stage 4: gradients of its micro-batches are left on its model. Returns for
    each the loss, the clipped tokens, and (S, T-1) on the CPU: logprobs, entropy, reference."""
    scores = []
    for batch in share:
        batch = batch.to(config.device)
        logprobs, entropy = ranks.model.token_logprobs(batch.ids, batch.mask, config.temperature)
        loss, counts = policy_loss(
            config.loss, logprobs, batch.sampler_logprobs, batch.advantages, batch.mask, denominator
        )
        reference = None
        if config.kl > 0:
            reference = reference_logprobs(ranks, batch, config)
            arguments = (logprobs, batch.sampler_logprobs, reference, batch.mask, denominator)
            loss = loss + config.kl * kl_loss(*arguments)
            reference = reference.cpu()
        loss.backward()
        score = {"loss": loss.item(), "clipped": counts["clipped_low"] + counts["clipped_high"]}
        score |= {"logprobs": logprobs.detach().cpu(), "entropy": entropy.cpu()}
        scores.append(score | {"reference": reference})
    return scores


@torch.no_grad()
def reference_logprobs(ranks: Ranks, batch: Batch, config: Config) -> Tensor:
    with reference_policy(ranks.model, ranks.frozen) as policy:
        return policy.token_logprobs(batch.ids, batch.mask, config.temperature)[0]


def refer(ranks: Ranks, share: list[Batch], config: Config) -> list[Tensor]:
    return [reference_logprobs(ranks, batch.to(config.device), config).cpu() for batch in share]


def step_together(ranks: Ranks, step: int, config: Config) -> float:
    """Stage 5 on every rank: the same step by the same sum of all gradients."""
    ranks.reduce_gradients()
    return optimizer_step(ranks.model, ranks.optimizer, step, config)


def optimizer_step(model, optimizer, step: int, config: Config) -> float:
    """Stage 5: clips the gradient, steps, clears; returns its norm. FloatingPointError, and nothing
    has moved, for a gradient that is not finite."""
    parameters = {n: p for n, p in trainable(model).items() if p.grad is not None}
    for name, parameter in parameters.items():
        if not torch.isfinite(parameter.grad).all():
            raise FloatingPointError(
                f"the gradient of {name} is not finite; version {step} is kept; try a lower --lr"
            )
    norm = torch.nn.utils.clip_grad_norm_(parameters.values(), config.max_grad_norm).item()
    for group in optimizer.param_groups:
        group["lr"] = config.lr * min(1.0, (step + 1) / (config.warmup + 1))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm


def self_check(
    model, trajectories: list[Trajectory], config: Config, frozen: Qwen3 | None = None
) -> str:
    """Before the first step: the policy is its reference, and trainer and sampler agree."""
    batch = micro_batches([(t, 0.0) for t in trajectories], sys.maxsize, config.device)[0]
    scored = (batch.ids, batch.mask, eval_draws(config)[1] or 1.0)
    model.eval()  # no dropout, as in the reference and in the sampler
    with torch.no_grad():
        logprobs, _ = model.token_logprobs(*scored)
        with reference_policy(model, frozen) as policy:
            reference, _ = policy.token_logprobs(*scored)
    model.train()
    start = "new adapter changes no bit"
    if config.full or config.init_adapter:
        start = f"{'model' if config.full else 'adapter'} is its frozen copy"
    if not torch.equal(logprobs, reference):
        raise RuntimeError(f"self-check, the {start}: not so, policy and reference differ")
    found = mismatch_metrics(logprobs, batch.sampler_logprobs, batch.mask)
    metric, bound = MISMATCH_END[config.dtype]
    largest = found["mismatch_max"]
    if found[metric] > bound:
        raise RuntimeError(
            f"trainer and sampler differ by up to {largest:.2g} a logprob, {metric} is "
            f"{found[metric]:.2g}: two policies"
        )
    return f"self-check: the {start}; trainer and sampler differ by at most {largest:.0e} a logprob"


@dataclass
class Probe:
    """A server's short completion by a version, and the trainer's logprobs of its tokens.

    It finds a server of another model, dtype or temperature at once, if a logprob differs by more
    than MISMATCH_BOUND; and one that stays behind, with the base or an old version, once the
    trainer's own have moved by PROBE_MOVED. In fp32 at the default learning rate that takes a step;
    in bf16, or where a step moves little, many, so a probe is kept until it can be compared with.
    """

    version: int
    answer: Completion
    ours: list[float]
    dtype: str
    mixture: bool

    def gap(self, ours: list[float], theirs: list[float]) -> float:
        """The largest difference; the median for a mixture: where a router chooses otherwise
        (experts.py), single tokens are far apart."""
        gaps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
        return median(gaps) if self.mixture else max(gaps)

    def differs_from(self, logprobs: list[float]) -> bool:
        return self.gap(logprobs, self.answer.logprobs) > MISMATCH_BOUND[self.dtype]

    def has_followed(self, before: "Probe") -> bool | None:
        """Whether the server moved along with the trainer since; None: it cannot be told yet."""
        if self.answer.token_ids != before.answer.token_ids:
            return True  # draws are the seed's, so whoever stays behind samples equal tokens
        moved = self.gap(self.ours, before.ours)
        if moved <= PROBE_MOVED[self.dtype]:
            return None
        # Not by 0: what else a server computes at the time moves the last bits.
        return self.gap(self.answer.logprobs, before.answer.logprobs) > moved / 4
