"""The RL run: GRPO on an agent's episodes, training a LoRA adapter and shipping nothing else.

    python train.py --rank 8                         the default: a tiny wiki-search agent, minutes
    python train.py --config my.toml --steps 50      any field below, from a file and as a flag
    python train.py --output runs/x --resume         go on where a run stopped, bit for bit

One step, numbered as in the README's figure:

      ┌──► 1 sample ──► 2 score ──► 3 advantages ──► 4 loss ──► 5 step ──► 6 publish ──┐
      │    engine: P groups of G     reward minus    trainer /   Adam on    adapter     │
      │    episodes, version k       group mean      sampler     A and B    directory   │
      └──────────────────────── version k + 1, read back by the engine ◄────────────────┘

This file knows all others and holds no mathematics: losses are in grpo.py, the policy in model.py
and lora.py, sampling in rollout.py, the adapter's directory in broadcast.py.

Left out on purpose: several optimizer steps on one batch (the batch would be off-policy for all but
the first), a learning-rate decay (a run can be made longer without changing its past).

Axes: P prompts (groups), G samples per group, S sequences, T tokens.
"""

import asyncio
import errno
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from broadcast import list_published, publish, retire
from chat import Tokenizer, load_tokenizer
from config import ASSETS, Config, check_config, parse_config
from environments import load_environment
from grpo import group_advantages, kl_estimates, kl_loss, mismatch_metrics, policy_loss
from lora import LoRAConfig, adapter_disabled, inject_lora, lora_parameters
from model import Qwen3
from rollout import TorchEngine, Trajectory, derive_seed, run_groups
from run import (
    Run,
    append_row,
    cut_back,
    finish,
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


def loss_and_backward(model, batches: list[Batch], denominator: int, config: Config) -> dict:
    """Stage 4 over all micro-batches: gradients are left on the adapter, the trainer's logprobs on
    the trajectories; returns metrics."""
    seen = {"trainer": [], "sampler": [], "policy": [], "reference": [], "entropy": []}
    loss_sum = clipped = 0.0
    for number, batch in enumerate(batches):
        logprobs, entropy = model.token_logprobs(batch.ids, batch.mask, config.temperature)
        loss, counts = policy_loss(
            config.loss, logprobs, batch.sampler_logprobs, batch.advantages, batch.mask, denominator
        )
        clipped += counts["clipped_low"] + counts["clipped_high"]
        # Without a KL loss one micro-batch, of middling length, serves as the metric.
        if config.kl > 0 or number == len(batches) // 2:
            with adapter_disabled(model), torch.no_grad():
                reference, _ = model.token_logprobs(batch.ids, batch.mask, config.temperature)
            seen["policy"].append(logprobs.detach()[batch.mask])
            seen["reference"].append(reference[batch.mask])
        if config.kl > 0:
            arguments = (logprobs, batch.sampler_logprobs, reference, batch.mask, denominator)
            loss = loss + config.kl * kl_loss(*arguments)
        loss.backward()
        loss_sum += loss.item()
        for trajectory, row in zip(batch.trajectories, logprobs.tolist(), strict=True):
            trajectory.trainer_logprobs = [0.0, *row][: len(trajectory.token_ids)]
        seen["trainer"].append(logprobs.detach()[batch.mask])
        seen["sampler"].append(batch.sampler_logprobs[batch.mask])
        seen["entropy"].append(entropy[batch.mask])
    tokens = {name: torch.cat(parts) if parts else torch.zeros(0) for name, parts in seen.items()}
    everywhere = torch.ones_like(tokens["trainer"])
    metrics = {"loss": loss_sum, "tokens_trained": len(tokens["trainer"])}
    metrics["entropy"] = tokens["entropy"].mean().item() if batches else 0.0
    metrics["clipped"] = clipped / max(len(tokens["trainer"]), 1)
    metrics |= mismatch_metrics(tokens["trainer"], tokens["sampler"], everywhere)
    measured = torch.ones_like(tokens["policy"])
    metrics["reference_kl"] = kl_estimates(tokens["policy"], tokens["reference"], measured)["k3"]
    return metrics


def optimizer_step(model, optimizer, step: int, config: Config) -> float:
    """Stage 5: clips the gradient, which must be finite, steps, clears; returns its norm."""
    parameters = {n: p for n, p in lora_parameters(model).items() if p.grad is not None}
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


def self_check(model, trajectories: list[Trajectory], config: Config) -> str:
    """Before the first step: the new adapter changes nothing, and trainer and sampler agree."""
    batch = micro_batches([(t, 0.0) for t in trajectories], sys.maxsize, config.device)[0]
    with torch.no_grad():
        logprobs, _ = model.token_logprobs(batch.ids, batch.mask)
        with adapter_disabled(model):
            base, _ = model.token_logprobs(batch.ids, batch.mask)
    if not torch.equal(logprobs, base):
        raise RuntimeError("the new adapter, whose B is zero, changes the model")
    largest = (logprobs - batch.sampler_logprobs)[batch.mask].abs().max().item()
    if largest > (1e-3 if config.dtype == "float32" else 0.5):
        raise RuntimeError(f"trainer and sampler differ by {largest} a logprob: two policies")
    return (
        "self-check: the new adapter changes no bit; trainer and sampler differ by at most "
        f"{largest:.0e} a logprob"
    )


def outcome_of(environment, episode: Trajectory) -> str:
    """What became of an episode, in words."""
    if episode.finish_reason != "answered":
        return f"no answer: {episode.finish_reason}"
    return environment.outcome(episode.task, episode.messages)


# --- the loop -------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """What a run holds, and the three things it does with its engine."""

    config: Config
    environment: Any
    held_out: Any  # the environment of the held-out questions
    tokenizer: Tokenizer
    model: Qwen3
    lora: LoRAConfig
    optimizer: torch.optim.Optimizer
    engine: TorchEngine
    run: Run
    adapter: str = ""  # the version that samples, by the name under which the engine has it
    published: Path | None = None  # and by its directory

    def publish(self) -> None:
        """Ships version run.step: writes its directory, loads it, retires the version before."""
        broadcasts = self.run.directory / "broadcasts" / f"attempt_{self.run.attempt}"
        path = publish(self.model, self.lora, broadcasts, self.run.step, self.config.model)
        name = f"{self.run.run_id}-{self.run.attempt}-{self.run.step}"
        self.engine.add_adapter(name, path)
        if self.published:
            self.engine.remove_adapter(self.adapter)
            retire(self.published)
        self.adapter, self.published = name, path

    async def play(
        self, environment, tasks, group_size, temperature, label
    ) -> list[list[Trajectory]]:
        """(P, G) episodes by the published version."""
        with tqdm(total=len(tasks) * group_size, desc=label, leave=False, disable=None) as bar:
            groups = await run_groups(
                self.engine,
                self.tokenizer,
                environment,
                tasks,
                group_size,
                seed=self.config.seed,
                step=self.run.step,
                progress=lambda done, total: bar.update(),
                adapter=self.adapter,
                version=self.run.step,
                temperature=temperature,
                max_turns=self.config.max_turns,
                max_new_tokens=self.config.max_new_tokens,
            )
        self.engine.drop_cache(self.adapter)  # a step depends, to the last bit, on itself alone
        return groups

    async def evaluate(self) -> tuple[dict, list[Trajectory]]:
        """Greedy mean reward on the held-out questions, and what became of the episodes."""
        tasks = self.held_out.eval[: self.config.eval_size]
        groups = await self.play(self.held_out, tasks, 1, 0.0, "evaluating")
        episodes = [group[0] for group in groups]
        outcomes = Counter(outcome_of(self.held_out, episode) for episode in episodes)
        reward = sum(episode.reward for episode in episodes) / len(episodes)
        return {"reward": reward, "outcomes": dict(outcomes.most_common())}, episodes


def load_environments(config: Config) -> tuple[Any, Any]:
    """Where to train and where to evaluate; the same, unless held-out questions have a corpus."""
    files = dict(SHIPPED_DATA[config.environment])
    for name in ("questions", "eval_questions", "corpus", "eval_corpus"):
        if getattr(config, name):
            files[name] = getattr(config, name)
            if name != "eval_corpus":  # what is held out of other data is not in the shipped files
                files.pop("eval_corpus", None)
            if name == "questions":
                files.pop("eval_questions", None)
    eval_corpus = files.pop("eval_corpus", None)
    if config.environment == "wiki_search":
        files["results"] = config.search_results
    environment = load_environment(config.environment, **files)
    if not environment.eval:
        raise ValueError(f"{config.questions}: too few to hold any out; name --eval-questions")
    if not eval_corpus:
        return environment, environment
    return environment, load_environment(config.environment, **files | {"corpus": eval_corpus})


def set_up(config: Config) -> Trainer:
    """Everything that can be wrong is found here, before the run's directory is made."""
    check_config(config)
    environment, held_out = load_environments(config)
    tokenizer = load_tokenizer(config.model)
    for surroundings, task in [
        *((environment, task) for task in environment.train),
        *((held_out, task) for task in held_out.eval[: config.eval_size]),
    ]:
        length = len(tokenizer.prompt_ids(surroundings, task))
        if length >= config.max_length:
            raise ValueError(
                f"question {task.id}: its prompt of {length} tokens does not fit an episode of "
                f"{config.max_length}; raise --max-length"
            )
    model = Qwen3.from_pretrained(config.model, getattr(torch, config.dtype), config.device)
    base_parameters = sum(parameter.numel() for parameter in model.parameters())

    torch.manual_seed(config.seed)
    lora = LoRAConfig(config.rank, config.alpha, config.dropout, tuple(config.target_modules))
    names = inject_lora(model, lora)
    # After the injection, from the adapter's parameters: an optimizer made earlier holds others.
    parameters = lora_parameters(model)
    optimizer = torch.optim.Adam(parameters.values(), lr=config.lr, betas=(0.9, 0.95))
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained != {id(p) for p in model.parameters() if p.requires_grad}:
        raise RuntimeError("the optimizer's parameters are not those that require gradients")
    engine = TorchEngine(model, config.slots, config.max_length)

    run = load_checkpoint(open_run(config, run_name(config)), model, optimizer)
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_back(run.directory / name, run.step)
    for attempt in (run.directory / "broadcasts").glob("attempt_*"):
        for path in list_published(attempt):
            retire(path)  # left by an attempt that died
    run.base_parameters = base_parameters
    run.adapter_parameters = sum(parameter.numel() for parameter in parameters.values())
    print(
        f"{config.environment}: {len(environment.train)} questions to train on, "
        f"{len(held_out.eval[: config.eval_size])} held out\n"
        f"{config.model}: {run.base_parameters:,} parameters, frozen; {run.adapter_parameters:,} "
        f"({run.adapter_parameters / run.base_parameters:.1%}) in {len(names)} adapters of rank "
        f"{config.rank}\n"
        f"{run.directory}{f', resumed after step {run.step}' if run.step else ''}",
        flush=True,
    )
    return Trainer(config, environment, held_out, tokenizer, model, lora, optimizer, engine, run)


async def train(config: Config) -> None:
    """One run, from its first check to the last line that it prints."""
    started = time.monotonic()
    trainer = set_up(config)
    run, model, environment = trainer.run, trainer.model, trainer.environment
    whole, step = True, run.step  # whole: parameters, run.step and rows are of one moment
    try:
        trainer.publish()
        if not run.eval_before:
            run.eval_before, episodes = await trainer.evaluate()
            print(self_check(model, episodes[:16], config))
            print(f"held out before training: {run.eval_before['reward']:.3f}", flush=True)
        while run.step < config.steps:
            step, eval_reward = run.step + 1, None
            if config.eval_every and run.step and run.step % config.eval_every == 0:
                eval_reward = (await trainer.evaluate())[0]["reward"]
            clock = [time.monotonic()]
            # 1 sample
            tasks = tasks_of_step(environment.train, run.step, config.groups, config.seed)
            label = f"step {step} sampling"
            groups = await trainer.play(
                environment, tasks, config.group_size, config.temperature, label
            )
            clock.append(time.monotonic())
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
            batches = micro_batches(pairs, config.micro_tokens, config.device)
            metrics = loss_and_backward(model, batches, sampled, config)
            # 5 step
            metrics["grad_norm"] = optimizer_step(model, trainer.optimizer, run.step, config)
            clock.append(time.monotonic())
            # 6 publish
            whole, run.step = False, step
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
                "staleness_max": max(step - 1 - episode.version for episode in episodes),
                "seconds": time.monotonic() - clock[0],
                "sample_tokens_per_second": sampled / (clock[1] - clock[0]),
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
            if run.step % config.save_every == 0:
                save_checkpoint(run, model, trainer.lora, trainer.optimizer)
        run.eval_after, _ = await trainer.evaluate()
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise RuntimeError(f"{run.directory}, step {step}: {error}") from error
    finally:
        # However the loop ended, what a user would want to keep is kept. Ctrl-C cancels it at an
        # await, so before stage 2; what fails in stage 6 leaves the last checkpoint as it is.
        if whole:
            seconds = time.monotonic() - started
            finish(run, model, trainer.lora, trainer.optimizer, config, seconds)


def main(arguments: list[str]) -> None:
    """What a user can mend is one line, and Ctrl-C or SIGTERM saves what there is."""

    async def until_signal(config: Config) -> None:
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await train(config)

    try:
        asyncio.run(until_signal(parse_config(arguments)))
    except (ValueError, RuntimeError, ArithmeticError, ImportError, OSError) as error:
        full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; make room, then go on with --output and --resume" if full else ""
        raise SystemExit(f"train.py: {error}{hint}") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None


if __name__ == "__main__":
    main(sys.argv[1:])
