"""The RL run: GRPO on an agent's episodes, training a LoRA adapter and shipping nothing else.

    python train.py --rank 8                         the default: a tiny wiki-search agent, minutes
    python train.py --full --lr 1.5e-4               every weight instead, for comparison (full.py)
    python train.py --config my.toml --steps 50      any field below, from a file and as a flag
    python train.py --init-adapter runs/x/adapter    go on from an adapter, such as one of sft.py
    python train.py --output runs/x --resume         go on where a run stopped, bit for bit
    python train.py --config my.toml --eval-only     the held-out reward, with its interval
    python train.py --config my.toml --plan          what a run will need (tools/plan.py)
    python train.py --config my.toml --rehearse      two steps in miniature (tools/rehearse.py)
    torchrun --nproc-per-node 2 train.py --rank 8    several processes (distributed.py)
    python train.py --max-staleness 1                sample and train at once (pipeline.py)

One step, numbered as in the README's figure:

      ┌──► 1 sample ──► 2 score ──► 3 advantages ──► 4 loss ──► 5 step ──► 6 publish ──┐
      │    engine: P groups of G     reward minus    trainer /   Adam on    adapter     │
      │    episodes, version k       group mean      sampler     A and B    directory   │
      └──────────────────────── version k + 1, read back by the engine ◄────────────────┘

This file knows all others and holds no mathematics: losses are in grpo.py, the policy in model.py
and lora.py, sampling in rollout.py, the adapter's directory in broadcast.py. With --max-staleness
the loop is the same, and stage 1 has mostly been done while the step before was computed.

Left out on purpose: several optimizer steps on one batch (the batch would be off-policy for all but
the first), a learning-rate decay (a run can be made longer without changing its past).

Axes: P prompts (groups), G samples per group, S sequences, T tokens.
"""

import asyncio
import copy
import errno
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from broadcast import list_published, load_adapter, publish, read_adapter, retire, save_adapter
from chat import Tokenizer, load_tokenizer
from config import ASSETS, VLLM_RANKS, Config, check_config, parse_config
from distributed import (
    Ranks,
    check_ranks,
    follow,
    follows,
    leading,
    recruit,
    shard_base,
    traffic,
    world_size,
)
from environments import load_environment
from environments.judge import Judge
from environments.wiki_search import SCORES
from full import check_finite, trainable
from grpo import group_advantages, kl_estimates, kl_loss, mismatch_metrics, policy_loss
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, use_adapters
from model import Qwen3
from pipeline import Pipeline
from quant import quantize_base
from rollout import Request, TorchEngine, Trajectory, VLLMEngine, derive_seed, run_groups
from run import (
    PANELS,
    Run,
    append_row,
    cut_back,
    finish,
    finish_evaluation,
    interval,
    load_checkpoint,
    open_run,
    run_name,
    sample_row,
    save_checkpoint,
    shows_group,
    step_line,
)

SHIPPED_DATA = {
    "wiki_search": {
        "questions": ASSETS / "tiny-wiki" / "questions.jsonl",
        "eval_questions": ASSETS / "tiny-wiki" / "eval_questions.jsonl",
        "corpus": ASSETS / "tiny-wiki" / "corpus.jsonl",
        "eval_corpus": ASSETS / "tiny-wiki" / "eval_corpus.jsonl",
    },
    "math_qa": {"questions": ASSETS / "math_qa.jsonl"},
}
REFERENCE = "reference"  # the frozen copy of --init-adapter, by its name among the adapters
# Largest difference of a logprob between trainer and sampler that rounding explains, see
# experiments/mismatch.md.
MISMATCH_BOUND = {"float32": 1e-3, "bfloat16": 0.5}
# Not 1, to find out a server that ignores it; high, since the logprob of a token that is nearly
# certain does not move: at 0.7 a step of the default job moves the probe by 3e-6, at 2 by 4e-3.
PROBE_TEMPERATURE, PROBE_TOKENS = 2.0, 8


# --- the stages -----------------------------------------------------------------------------------


def tasks_of_step(tasks: list, step: int, groups: int, seed: int) -> list:
    """The step's questions: every epoch is a new permutation, the place in it follows from step."""
    places = [divmod(place, len(tasks)) for place in range(step * groups, (step + 1) * groups)]
    orders = {
        epoch: random.Random(derive_seed(seed, epoch)).sample(tasks, len(tasks))
        for epoch in {epoch for epoch, _ in places}
    }
    return [orders[epoch][index] for epoch, index in places]


@dataclass
class Batch:
    """Trajectories side by side, padded on the right. Position t speaks of token t + 1."""

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
    """(trajectory, advantage) pairs by length, in batches of at most `tokens` padded tokens."""
    pairs = sorted(pairs, key=lambda pair: len(pair[0].token_ids), reverse=True)
    batches = []
    while pairs:
        length = len(pairs[0][0].token_ids)
        chosen, pairs = pairs[: max(1, tokens // length)], pairs[max(1, tokens // length) :]
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
        # Without a KL loss one micro-batch, of middling length, serves as the metric.
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
    """Stage 5: clips the gradient, which must be finite, steps, clears; returns its norm."""
    parameters = {n: p for n, p in trainable(model).items() if p.grad is not None}
    for name, parameter in parameters.items():
        if not torch.isfinite(parameter.grad).all():
            raise RuntimeError(
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
    largest = (logprobs - batch.sampler_logprobs)[batch.mask].abs().max().item()
    if largest > MISMATCH_BOUND[config.dtype]:
        raise RuntimeError(f"trainer and sampler differ by {largest} a logprob: two policies")
    return f"self-check: the {start}; trainer and sampler differ by at most {largest:.0e} a logprob"


def eval_draws(config) -> tuple[int, float]:
    """Samples of a held-out question and their temperature: one is greedy, several must differ."""
    samples = getattr(config, "eval_samples", 1)  # sft.py's configuration has none
    return samples, config.temperature if samples > 1 else 0.0


def outcome_of(environment, episode: Trajectory) -> str:
    """What became of an episode, in words."""
    if episode.finish_reason != "answered":
        return f"no answer: {episode.finish_reason}"
    return environment.outcome(episode.task, episode.messages, episode.reward)


# --- the loop -------------------------------------------------------------------------------------


def largest_gap(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


@dataclass
class Trainer:
    """What a run holds, and the three things it does with its engine."""

    config: Config
    environment: Any
    held_out: Any  # the environment of the held-out questions
    tokenizer: Tokenizer
    model: Qwen3
    lora: LoRAConfig | None  # None: full fine-tuning, there is no adapter
    optimizer: torch.optim.Optimizer
    engine: TorchEngine | VLLMEngine | None  # None: a server, not yet started
    run: Run
    frozen: Qwen3 | None = None  # the reference of full fine-tuning
    pipeline: Pipeline = field(default_factory=Pipeline)
    adapter: str | None = None  # the newest version, by the engine's name for it
    alive: dict[int, tuple[str, Path]] = field(default_factory=dict)  # version -> name, directory
    probed: list[tuple] = field(default_factory=list)  # what each server sampled, and our logprobs

    def __post_init__(self):
        self.ranks = Ranks(self.model, self.optimizer, self.frozen)
        self.ranks.lead(self.config.seed + self.run.step)

    def publish(self) -> None:
        """Ships version run.step: writes its directory, loads it, retires those before that no
        batch under way names. The first one also retires what attempts that died have left.

        Without an adapter the engine samples the trained weights themselves, and nothing is
        shipped; keys and values that the weights before computed are forgotten.
        """
        if self.lora is None:
            check_finite(self.model)
            self.engine.drop_cache()
            return
        run = self.run
        if not self.alive:
            for attempt in (run.directory / "broadcasts").glob("attempt_*"):
                for path in list_published(attempt):
                    retire(path)
        broadcasts = run.directory / "broadcasts" / f"attempt_{run.attempt}"
        path = publish(self.model, self.lora, broadcasts, run.step, self.config.model)
        self.adapter = f"{run.run_id}-{run.attempt}-{run.step}"
        self.engine.add_adapter(self.adapter, path)
        self.alive[run.step] = self.adapter, path
        for version in self.alive.keys() - self.pipeline.versions - {run.step}:
            name, path = self.alive.pop(version)
            self.engine.remove_adapter(name)
            retire(path)

    async def probe(self) -> None:
        """Asks every server for one short completion by the new version, and scores it.

        RuntimeError unless sampler and trainer agree, and if a server still answers as the version
        before although the trainer's logprobs have moved.
        """
        prompt = self.tokenizer.prompt_ids(self.held_out, self.held_out.eval[0])
        bound, before, self.probed = MISMATCH_BOUND[self.config.dtype], self.probed, []
        for server in range(self.engine.servers):
            request = Request(prompt, PROBE_TOKENS, PROBE_TEMPERATURE, self.adapter, seed=server)
            answer = await self.pipeline.run(self.engine.generate(request))
            ours = self.logprobs(prompt, answer.token_ids, PROBE_TEMPERATURE)
            problem, stale = None, False
            if before and before[server][0].token_ids == answer.token_ids:
                # Not bit for bit: what a server has in its cache moves the last bits.
                moved = largest_gap(ours, before[server][1])
                theirs = largest_gap(answer.logprobs, before[server][0].logprobs)
                stale = moved > bound / 10 and theirs < moved / 10
            if stale:
                problem = "it still serves the version before"
            elif largest_gap(ours, answer.logprobs) > bound:
                problem = "it serves another model or dtype, or another adapter under this name"
                plain = self.logprobs(prompt, answer.token_ids, 1.0)
                if largest_gap(plain, answer.logprobs) <= bound:
                    problem = "it ignores the temperature; --logprobs-mode processed_logprobs"
            if problem:
                raise RuntimeError(
                    f"{self.engine.name_of(server)} does not sample what was published as version "
                    f"{self.run.step} (logprobs {answer.logprobs}, the trainer's {ours}): {problem}"
                )
            self.probed.append((answer, ours))
        self.engine.drop_cache(self.adapter)

    @torch.no_grad()
    def logprobs(self, prompt: list[int], token_ids: list[int], temperature: float) -> list[float]:
        """The trainer's, of tokens that follow a prompt; without dropout, as they were sampled."""
        ids = torch.tensor([prompt + token_ids], device=self.config.device)
        mask = torch.arange(1, ids.shape[1], device=ids.device)[None] >= len(prompt)
        self.model.eval()
        logprobs = self.model.token_logprobs(ids, mask, temperature)[0][mask].tolist()
        self.model.train()
        return logprobs

    async def play(
        self, environment, tasks, group_size, temperature, label, *, step, adapter, version
    ) -> list[list[Trajectory]]:
        """(P, G) episodes, all by the version named; their seeds follow from `step`."""
        with tqdm(total=len(tasks) * group_size, desc=label, leave=False, disable=None) as bar:
            groups = await run_groups(
                self.engine,
                self.tokenizer,
                environment,
                tasks,
                group_size,
                seed=self.config.seed,
                step=step,
                progress=lambda done, total: bar.update(),
                adapter=adapter,
                version=version,
                temperature=temperature,
                max_turns=self.config.max_turns,
                max_new_tokens=self.config.max_new_tokens,
            )
        self.engine.drop_cache(adapter)  # a step depends, to the last bit, on itself alone
        return groups

    def play_batch(self, batch: int) -> Coroutine:
        """Sampled episodes for step batch + 1, by what is the newest version at this moment."""
        config, run = self.config, self.run
        tasks = tasks_of_step(self.environment.train, batch, config.groups, config.seed)
        run.start_episodes(config.groups * config.group_size)
        what = (self.environment, tasks, config.group_size, config.temperature)
        label = f"step {batch + 1} sampling"
        return self.play(*what, label, step=batch, adapter=self.adapter, version=run.step)

    async def evaluate(self) -> tuple[dict, list[Trajectory]]:
        """Mean reward of the newest version on the held-out questions with its interval, and what
        became of the episodes. Batches under way go on meanwhile."""
        tasks = self.held_out.eval[: self.config.eval_size]
        what = (self.held_out, tasks, *eval_draws(self.config), "evaluating")
        version = {"adapter": self.adapter, "version": self.run.step}
        groups = await self.pipeline.run(self.play(*what, step=self.run.step, **version))
        episodes = [episode for group in groups for episode in group]
        outcomes = Counter(outcome_of(self.held_out, episode) for episode in episodes)
        result = {
            "reward": sum(episode.reward for episode in episodes) / len(episodes),
            "interval": interval([[episode.reward for episode in group] for group in groups]),
            "outcomes": dict(outcomes.most_common()),
        }
        return result, episodes


def load_environments(config) -> tuple[Any, Any]:
    """Where to train and where to evaluate; the same, unless held-out questions have a corpus."""
    files = dict(SHIPPED_DATA[config.environment])
    for name in ("questions", "eval_questions", "corpus", "eval_corpus"):
        if getattr(config, name, ""):
            files[name] = getattr(config, name)
            if name != "eval_corpus":  # what is held out of other data is not in the shipped files
                files.pop("eval_corpus", None)
            if name == "questions":
                files.pop("eval_questions", None)
    eval_corpus = files.pop("eval_corpus", None)
    if config.environment == "wiki_search":
        files["results"] = config.search_results
        files["score"] = SCORES[getattr(config, "score", "exact")]
        if getattr(config, "judge_url", ""):
            files["judge"] = Judge(config.judge_url, config.judge_model)
    environment = load_environment(config.environment, **files)
    if not environment.eval:
        raise ValueError(f"{config.questions}: too few to hold any out; name --eval-questions")
    if not eval_corpus:
        return environment, environment
    return environment, load_environment(config.environment, **files | {"corpus": eval_corpus})


def check_prompts(tokenizer: Tokenizer, environment, tasks: list, max_length: int) -> None:
    for task in tasks:
        length = len(tokenizer.prompt_ids(environment, task))
        if length >= max_length:
            raise ValueError(
                f"question {task.id}: its prompt of {length} tokens does not fit an episode of "
                f"{max_length}; raise --max-length"
            )


def set_up(config: Config) -> Trainer:
    """Everything that can be wrong is found here, before the run's directory is made."""
    check_config(config)
    check_ranks(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    environment, held_out = load_environments(config)
    if config.judge_url:
        environment.judge.check()
    tokenizer = load_tokenizer(config.model)
    check_prompts(tokenizer, environment, environment.train, config.max_length)
    check_prompts(tokenizer, held_out, held_out.eval[: config.eval_size], config.max_length)
    model, lora, optimizer, size, frozen = recruit(load_replica, config)
    engine = None  # a server of the run's own starts when there is a directory for its log
    if config.engine == "torch" and not config.max_staleness:
        engine = TorchEngine(model, config.slots, config.max_length)
    elif config.vllm_url:
        engine = vllm_client(config, model, config.vllm_url)
    heading = (
        f"{config.environment}: {len(environment.train)} questions to train on, "
        f"{len(held_out.eval[: config.eval_size])} held out"
    )
    run = start_run(config, run_name(config), model, lora, optimizer, size, heading)
    parts = (config, environment, held_out, tokenizer, model, lora, optimizer, engine, run)
    return Trainer(*parts, frozen, Pipeline(config.max_staleness))


def load_replica(config: Config) -> tuple:
    """What every rank holds: load_policy's, started from --init-adapter, and the frozen reference
    of full fine-tuning."""
    model, lora, optimizer, size = load_policy(config)
    started_from = Path(config.output) / "reference"  # a resumed run has its own copy
    if config.init_adapter:
        resumed = config.resume and started_from.is_dir()
        start_from(model, lora, started_from if resumed else Path(config.init_adapter))
    frozen = copy.deepcopy(model).requires_grad_(False) if config.full else None
    return model, lora, optimizer, size, frozen


def load_policy(config) -> tuple[Qwen3, LoRAConfig | None, torch.optim.Optimizer, int]:
    """The frozen base with a fresh adapter in it (--full: neither), the optimizer of what is
    trained, the base's size."""
    device = "cpu" if config.shard_base else config.device  # whole on the host at first
    model = Qwen3.from_pretrained(config.model, getattr(torch, config.dtype), device)
    base_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.model.gradient_checkpointing = config.gradient_checkpointing
    if config.shard_base:
        shard_base(model, config.device)
    if config.quantize == "nf4":
        quantize_base(model)
    torch.manual_seed(config.seed)
    lora = None
    if not config.full:
        lora = LoRAConfig(config.rank, config.alpha, config.dropout, tuple(config.target_modules))
        inject_lora(model, lora)
    # After the injection, from the adapter's parameters: an optimizer made earlier holds others.
    parameters = trainable(model)
    optimizer = torch.optim.Adam(parameters.values(), lr=config.lr, betas=(0.9, 0.95))
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained != {id(p) for p in model.parameters() if p.requires_grad}:
        raise RuntimeError("the optimizer's parameters are not those that require gradients")
    return model, lora, optimizer, base_parameters


def start_from(model, lora: LoRAConfig, directory: Path) -> None:
    """Loads an adapter into the trainable one, and a frozen copy of it beside: the reference.

    Raises ValueError, in the command line's words, unless rank, alpha and targets are the run's.
    """
    found, tensors = read_adapter(directory)
    targets = {name.split(".")[-3] for name in lora_parameters(model)}
    for flag, ours, its in (
        ("--rank", lora.rank, found.rank),
        ("--alpha", lora.alpha, found.alpha),
        ("--target-modules", " ".join(sorted(targets)), " ".join(sorted(found.target_modules))),
    ):
        if ours != its:
            raise ValueError(f"{directory}: an adapter with {flag} {its}, not {ours}; set {flag}")
    load_adapter(model, directory)
    add_adapter(model, REFERENCE, found, tensors)


def start_run(
    config, name: str, model, lora: LoRAConfig | None, optimizer, base_parameters, heading: str
) -> Run:
    """The run's directory and what its last checkpoint holds; prints the heading and the sizes."""
    run = open_run(config, name)
    try:
        return fill_run(config, run, model, lora, optimizer, base_parameters, heading)
    except BaseException:
        run.release()
        raise


def fill_run(
    config, run: Run, model, lora: LoRAConfig | None, optimizer, base_parameters, heading: str
) -> Run:
    """The rest of start_run, with the directory in hand."""
    reference = run.directory / "reference"
    if getattr(config, "init_adapter", "") and not reference.is_dir():
        save_adapter(model, lora, reference, config.model)  # nothing is lost if the original goes
    run = load_checkpoint(run, model, optimizer)
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_back(run.directory / name, run.step)
    adapter = lora_parameters(model)
    run.base_parameters = base_parameters
    run.adapter_parameters = sum(p.numel() for p in adapter.values())
    trained = "all trained"
    if not config.full:
        trained = (
            f"frozen{', projections in 4 bits' if config.quantize == 'nf4' else ''}; "
            f"{run.adapter_parameters:,} ({run.adapter_parameters / base_parameters:.1%}) in "
            f"{len(adapter) // 2} adapters of rank {config.rank}"
        )
    sent = ""
    if world_size() > 1:
        trained_parameters = sum(p.numel() for p in trainable(model).values())
        sent = f"\n{traffic(trained_parameters, base_parameters, config.shard_base)}"
    print(
        f"{heading}\n"
        f"{config.model}: {base_parameters:,} parameters, {trained}\n"
        f"{run.directory}{f', resumed after step {run.step}' if run.step else ''}"
        f"{f'; {run.episodes_dropped} episodes were dropped' if run.episodes_dropped else ''}"
        f"{sent}",
        flush=True,
    )
    return run


def vllm_client(config: Config, model, urls, last_words=VLLMEngine.NO_LOG) -> VLLMEngine:
    slots = config.slots * (config.max_staleness + 1)  # of all batches under way
    settings = (config.max_length, slots, config.vllm_timeout)
    return VLLMEngine(model, urls, *settings, last_words)


async def start_server(trainer: Trainer, stack: AsyncExitStack) -> None:
    """A client for the run, of its servers or of one that starts now; both end with `stack`."""
    from tools.vllm_server import TorchServer, VLLMServer  # the launcher stands beside the core

    config, run = trainer.config, trainer.run
    if trainer.engine is None:
        settings = {"dtype": config.dtype, "device": config.device}
        settings |= {"slots": config.slots * (config.max_staleness + 1)}
        settings |= {"max_length": config.max_length, "threads": config.sampler_threads}
        if config.engine == "vllm":
            rank = next(rank for rank in VLLM_RANKS if rank >= config.rank)
            settings |= {"max_lora_rank": rank, "versions": config.max_staleness + 2}
            server = VLLMServer(config.model, run.directory / "vllm.log", **settings)
        else:
            server = TorchServer(config.model, run.directory / "serve.log", **settings)
        await stack.enter_async_context(server)
        trainer.engine = vllm_client(config, trainer.model, [server.url], server.last_words)
    await stack.enter_async_context(trainer.pipeline)
    stack.push_async_callback(lambda: trainer.pipeline.run(trainer.engine.close()))
    trainer.engine.forget(f"{run.run_id}-")  # of an attempt that died; its directories go after it


async def train(config: Config) -> None:
    """One run, from its first check to the last line that it prints; or its plan, or a rehearsal
    of it, or what it would only evaluate."""
    async with AsyncExitStack() as stack:
        if config.plan:
            from tools.plan import plan  # beside the core, as the launcher is

            check_config(config)
            print(plan(config))
            return
        if config.rehearse:
            from tools.rehearse import rehearsal

            config = stack.enter_context(rehearsal(config))
        await (evaluate_within if config.eval_only else train_within)(config, stack)


async def evaluate_within(config: Config, stack: AsyncExitStack) -> None:
    """--eval-only: the held-out reward of the base or of --init-adapter, and nothing trained."""
    started = time.monotonic()
    trainer = set_up(config)
    run = trainer.run
    stack.callback(run.release)
    try:
        if not isinstance(trainer.engine, TorchEngine):
            await start_server(trainer, stack)
        trainer.publish()
        await trainer.probe()
        result, episodes = await trainer.evaluate()
        print(self_check(trainer.model, episodes[:16], config, trainer.frozen))
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise RuntimeError(f"{run.directory}: {error}") from error
    for episode in episodes:
        sample = sample_row(run, episode, 0.0, outcome_of(trainer.held_out, episode))
        append_row(run.directory / "samples.jsonl", sample)
    finish_evaluation(run, result, config, len(episodes), time.monotonic() - started)


async def train_within(config: Config, stack: AsyncExitStack) -> None:
    """The loop; what it starts ends with `stack`."""
    started = time.monotonic()
    trainer = set_up(config)
    run, model, environment = trainer.run, trainer.model, trainer.environment
    stack.callback(run.release)
    whole, step = True, run.step  # whole: parameters, run.step and rows are of one moment
    try:
        if not isinstance(trainer.engine, TorchEngine):
            await start_server(trainer, stack)
        trainer.publish()
        await trainer.probe()
        if not run.eval_before:
            run.eval_before, episodes = await trainer.evaluate()
            print(self_check(model, episodes[:16], config, trainer.frozen))
            print(f"held out before training: {run.eval_before['reward']:.3f}", flush=True)
        while run.step < config.steps:
            step, eval_reward = run.step + 1, None
            if config.eval_every and run.step and run.step % config.eval_every == 0:
                eval_reward = (await trainer.evaluate())[0]["reward"]
            clock = [time.monotonic()]
            # 1 sample; what may be sampled for the steps after this one starts too
            groups, sample_seconds = await trainer.pipeline.take(
                run.step, config.steps, trainer.play_batch
            )
            clock.append(time.monotonic())
            staleness = max(run.step - episode.version for group in groups for episode in group)
            if not 0 <= staleness <= config.max_staleness:
                raise RuntimeError(f"sampled {staleness} versions ago: beyond --max-staleness")
            # 2 score: the environment did, at the end of each episode
            rewards_P_G = torch.tensor([[episode.reward for episode in group] for group in groups])
            # 3 advantages
            advantages_P_G = group_advantages(rewards_P_G, config.advantage_scale)
            equal_P = (advantages_P_G == 0).all(dim=1)
            # 4 loss; groups of equal reward have no policy gradient, and are not computed
            pairs = [
                (episode, advantage)
                for group, advantages_G, equal in zip(groups, advantages_P_G, equal_P, strict=True)
                if config.kl > 0 or not equal
                for episode, advantage in zip(group, advantages_G.tolist(), strict=True)
            ]
            episodes = [episode for group in groups for episode in group]
            sampled = sum(sum(episode.loss_mask) for episode in episodes)
            batches = micro_batches(pairs, config.micro_tokens, "cpu")
            arguments = (model, batches, sampled, config, trainer.frozen, trainer.ranks)
            metrics = loss_and_backward(*arguments)
            # 5 step
            metrics["grad_norm"] = trainer.ranks.everywhere(step_together, run.step, config)
            clock.append(time.monotonic())
            # 6 publish
            whole, run.step, run.episodes = False, step, run.episodes + len(episodes)
            trainer.publish()

            row = {
                "step": step,
                "version": episodes[0].version,  # of which both rewards speak
                "reward": rewards_P_G.mean().item(),
                "eval_reward": eval_reward,
                **metrics,
                "turns": sum(episode.turns for episode in episodes) / len(episodes),
                "tokens_sampled": sampled,
                "groups_skipped": int(equal_P.sum()),
                "truncated": sum(e.finish_reason != "answered" for e in episodes) / len(episodes),
                "staleness_max": staleness,
                "seconds": time.monotonic() - clock[0],
                "seconds_waiting": clock[1] - clock[0],
                "sample_tokens_per_second": sampled / sample_seconds,
                "train_tokens_per_second": sum(len(pair[0].token_ids) for pair in pairs)
                / (clock[2] - clock[1]),
            }
            run.seconds += row["seconds"]
            append_row(run.directory / "metrics.jsonl", row)
            # Two episodes to read, at times their whole group; a step that trained on none, too.
            read = pairs or [(episode, 0.0) for episode in groups[0]]
            for episode, advantage in read[: config.group_size if shows_group(step) else 2]:
                sample = sample_row(run, episode, advantage, outcome_of(environment, episode))
                append_row(run.directory / "samples.jsonl", sample)
            whole = True
            print(step_line(row, run, config), flush=True)
            if not staleness and row["mismatch_max"] > MISMATCH_BOUND[config.dtype]:
                print(
                    f"trainer and sampler differ by {row['mismatch_max']:.2g} a logprob, more than "
                    f"{MISMATCH_BOUND[config.dtype]} from rounding: see experiments/mismatch.md",
                    file=sys.stderr,
                )
            await trainer.probe()
            if run.step % config.save_every == 0:
                save_checkpoint(run, model, trainer.lora, trainer.optimizer)
        run.eval_after, _ = await trainer.evaluate()
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise RuntimeError(f"{run.directory}, step {step}: {error}") from error
    finally:
        # However the loop ended, what a user would want to keep is kept. Ctrl-C cancels it at an
        # await, so before stage 2; what fails in stage 6 leaves the last checkpoint as it is.
        await trainer.pipeline.drop()
        if whole:
            seconds = time.monotonic() - started
            finish(run, model, trainer.lora, trainer.optimizer, config, seconds, PANELS)


def main(arguments: list[str]) -> None:
    run_command("train.py", train, Config, arguments)


def run_command(program: str, job: Callable, kind: type, arguments: list[str]) -> None:
    """Runs `await job(config)`, config of the dataclass `kind`: what a user can mend is one line,
    and Ctrl-C or SIGTERM cancels the job at an await, so that it can save what there is. Of
    torchrun's processes rank 0 does all this, and the others what it tells them."""

    async def until_signal(config) -> None:
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await job(config)

    try:
        if follows():
            program = f"{program}, rank {os.environ['RANK']}"
            return follow()
        with leading():
            asyncio.run(until_signal(parse_config(arguments, kind)))
    except (ValueError, RuntimeError, ArithmeticError, ImportError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; make room, then go on with --output and --resume" if full else ""
        raise SystemExit(f"{program}: {error}{hint}") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None


if __name__ == "__main__":
    main(sys.argv[1:])
