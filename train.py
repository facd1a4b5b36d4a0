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
and lora.py, sampling in rollout.py, the adapter's directory in broadcast.py, stages 4 and 5 over a
batch in update.py, and what comes before the first step in start.py. With --max-staleness the loop
is the same, and stage 1 has mostly been done while the step before was computed.

Left out on purpose: several optimizer steps on one batch (the batch would be off-policy for all but
the first), a learning-rate decay (a run can be made longer without changing its past).

Axes: P prompts (groups), G samples per group, S sequences, T tokens.
"""

import asyncio
import errno
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from broadcast import clear, publish, retire
from chat import Tokenizer, load_tokenizer
from config import Config, check_config, eval_draws, parse_config, threads_of, vllm_rank
from distributed import LostRank, Ranks, check_ranks, follow, follows, leading, recruit
from full import check_finite
from grpo import group_advantages, reward_bits
from lora import LoRAConfig
from model import Qwen3
from pipeline import Pipeline
from rollout import Request, TorchEngine, Trajectory, VLLMEngine, derive_seed, run_groups
from run import (
    PANELS,
    Run,
    append_row,
    finish,
    finish_evaluation,
    sample_row,
    save_checkpoint,
    shows_group,
    step_line,
    wilson,
)
from start import check_model, check_prompts, load_environments, load_replica, start_run
from timing import profiling
from update import (
    MISMATCH_ALARM,
    Probe,
    loss_and_backward,
    micro_batches,
    self_check,
    step_together,
)

# Not 1, to find out a server that ignores it; high, since the logprob of a token that is nearly
# certain does not move: at 0.7 a step of the default job moves the probe by 3e-6, at 2 by 4e-3.
PROBE_TEMPERATURE, PROBE_TOKENS = 2.0, 8


def tasks_of_step(tasks: list, step: int, groups: int, seed: int) -> list:
    """The step's questions: every epoch is a new permutation, the place in it follows from step."""
    places = [divmod(place, len(tasks)) for place in range(step * groups, (step + 1) * groups)]
    orders = {
        epoch: random.Random(derive_seed(seed, epoch)).sample(tasks, len(tasks))
        for epoch in {epoch for epoch, _ in places}
    }
    return [orders[epoch][index] for epoch, index in places]


def outcome_of(environment, episode: Trajectory) -> str:
    """What became of an episode, in words."""
    if episode.finish_reason != "answered":
        return f"no answer: {episode.finish_reason}"
    return environment.outcome(episode.task, episode.messages, episode.reward)


# --- the loop -------------------------------------------------------------------------------------


@dataclass
class Trainer:
    """What a run holds, and what it does with its engine."""

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
    probes: dict[int, Probe] = field(default_factory=dict)  # server -> the one to compare with

    def __post_init__(self):
        self.ranks = Ranks(self.model, self.optimizer, self.frozen)

    def publish(self) -> None:
        """Ships version run.step: writes its directory, loads it, retires those before that no
        batch under way names. The first one also retires what attempts that died have left.

        Without an adapter the engine samples the trained weights themselves, and nothing is
        shipped; keys and values that the weights before computed are forgotten.
        """
        if self.lora is None:
            self.engine.drop_cache()
            return
        run = self.run
        if not self.alive:
            for attempt in (run.directory / "broadcasts").glob("attempt_*"):
                clear(attempt)
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

        RuntimeError for a server whose logprobs are other than the trainer's, and for one that
        stays behind: which of the two is found when, update.py: Probe says.
        """
        prompt = self.tokenizer.prompt_ids(self.held_out, self.held_out.eval[0])
        for server in range(self.engine.servers):
            request = Request(prompt, PROBE_TOKENS, PROBE_TEMPERATURE, self.adapter, seed=server)
            answer = await self.pipeline.on_sampler(self.engine.generate(request))
            ours = self.logprobs(prompt, answer.token_ids, PROBE_TEMPERATURE)
            mixture = bool(self.model.config.num_experts)
            probe = Probe(self.run.step, answer, ours, self.config.dtype, mixture)
            before = self.probes.setdefault(server, probe)
            followed, problem = probe.has_followed(before), None
            if followed is False:
                problem = f"it still serves version {before.version}, or one soon after it"
            elif probe.differs_from(ours):
                problem = "it serves another model or dtype, or another adapter under this name"
                if self.config.vllm_url:  # a server that the user starts
                    problem += (
                        "; start tools/vllm_server.py or tools/serve.py with "
                        f"{self.config.model} --dtype {self.config.dtype}"
                    )
                if not probe.differs_from(self.logprobs(prompt, answer.token_ids, 1.0)):
                    problem = "it ignores the temperature; --logprobs-mode processed_logprobs"
            if problem:
                raise RuntimeError(
                    f"{self.engine.name_of(server)} does not sample what was published as version "
                    f"{self.run.step} (logprobs {answer.logprobs}, the trainer's {ours}): {problem}"
                )
            if followed:
                self.probes[server] = probe
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
        groups = await self.pipeline.on_sampler(self.play(*what, step=self.run.step, **version))
        episodes = [episode for group in groups for episode in group]
        outcomes = Counter(outcome_of(self.held_out, episode) for episode in episodes)
        result = {
            "reward": sum(episode.reward for episode in episodes) / len(episodes),
            "interval": wilson([[episode.reward for episode in group] for group in groups]),
            "outcomes": dict(outcomes.most_common()),
        }
        return result, episodes


def set_up(config: Config) -> Trainer:
    """Everything that can be wrong is found here, before the run's directory is made."""
    check_config(config)
    check_ranks(config)
    check_model(config)
    environment, held_out = load_environments(config)
    if config.judge_url:
        environment.judge.check()
    tokenizer = load_tokenizer(config.model)
    check_prompts(tokenizer, environment, environment.train, config.max_length)
    check_prompts(tokenizer, held_out, held_out.eval[: config.eval_size], config.max_length)
    model, lora, optimizer, _, frozen = replica = recruit(load_replica, config)
    engine = None  # a server of the run's own starts when there is a directory for its log
    if config.engine == "torch" and not config.max_staleness:
        engine = TorchEngine(model, config.slots, config.max_length)
    elif config.vllm_url:
        engine = vllm_client(config, model, config.vllm_url)
    heading = (
        f"{config.environment}: {len(environment.train)} questions to train on, "
        f"{len(held_out.eval[: config.eval_size])} held out"
    )
    run = start_run(config, config.environment, replica, heading)
    parts = (config, environment, held_out, tokenizer, model, lora, optimizer, engine, run)
    trainer = Trainer(*parts, frozen, Pipeline(config.max_staleness))
    trainer.ranks.lead(config.seed + run.step)
    return trainer


def vllm_client(config: Config, model, urls, *last_words) -> VLLMEngine:
    slots = config.slots * (config.max_staleness + 1)  # of all batches under way
    return VLLMEngine(model, urls, config.max_length, slots, config.vllm_timeout, *last_words)


async def connect_sampler(trainer: Trainer, stack: AsyncExitStack) -> None:
    """A client of the run's servers, or of one that starts now. With `stack` end, in this order,
    the batches under way, the client, its thread and the server."""
    from tools.vllm_server import TorchServer, VLLMServer  # the launcher stands beside the core

    config, run = trainer.config, trainer.run
    if trainer.engine is None:
        settings = {"dtype": config.dtype, "device": config.device}
        settings |= {"slots": config.slots * (config.max_staleness + 1)}
        settings |= {"max_length": config.max_length, "threads": threads_of(config)[1]}
        if config.engine == "vllm":
            settings |= {"versions": config.max_staleness + 2}
            settings |= {"max_lora_rank": vllm_rank(config.rank)}
            server = VLLMServer(config.model, run.directory / "vllm.log", **settings)
        else:
            server = TorchServer(config.model, run.directory / "serve.log", **settings)
        await stack.enter_async_context(server)
        trainer.engine = vllm_client(config, trainer.model, [server.url], server.last_words)
    pipeline = await stack.enter_async_context(trainer.pipeline)
    stack.push_async_callback(lambda: pipeline.on_sampler(trainer.engine.close()))
    stack.push_async_callback(pipeline.drop)
    # What an attempt that died left: names before directories (publish clears them), since a server
    # that looks for a directory in vain dies.
    trainer.engine.forget(f"{run.run_id}-")


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

            check_config(config, here=False)  # the run itself; its miniature is checked later
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
            await connect_sampler(trainer, stack)
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
    run, model, ranks, environment = trainer.run, trainer.model, trainer.ranks, trainer.environment
    stack.callback(run.release)
    whole, step = True, run.step  # whole: parameters, run.step and rows are of one moment
    try:
        if not isinstance(trainer.engine, TorchEngine):
            await connect_sampler(trainer, stack)
        trainer.publish()
        await trainer.probe()
        if not run.eval_before:
            run.eval_before, episodes = await trainer.evaluate()
            print(self_check(model, episodes[:16], config, trainer.frozen))
            print(f"held out before training: {run.eval_before['reward']:.3f}", flush=True)
        step_done = stack.enter_context(profiling(trainer, config.profile))
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
            metrics = loss_and_backward(model, batches, sampled, config, trainer.frozen, ranks)
            # 5 step
            whole = False
            try:
                metrics["grad_norm"] = ranks.everywhere(step_together, run.step, config)
            except (FloatingPointError, LostRank):  # of the gradients: nothing has moved
                whole = True
                raise
            clock.append(time.monotonic())
            check_finite(model)
            run.step, run.episodes = step, run.episodes + len(episodes)
            row = {
                "step": step,
                "version": episodes[0].version,  # of which reward speaks; eval_reward: of step - 1
                "reward": rewards_P_G.mean().item(),
                "eval_reward": eval_reward,
                **metrics,
                "turns": sum(episode.turns for episode in episodes) / len(episodes),
                "tokens_sampled": sampled,
                "reward_bits": reward_bits(rewards_P_G),
                "groups_skipped": int(equal_P.sum()),
                "truncated": sum(e.finish_reason != "answered" for e in episodes) / len(episodes),
                "staleness_max": staleness,
                "seconds": time.monotonic() - clock[0],  # of stages 1 to 5
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
            whole = True  # so a server that is gone costs the run, and not the step
            print(step_line(row, run, config), flush=True)
            metric, bound = MISMATCH_ALARM[config.dtype]
            if not staleness and row[metric] > bound:
                print(
                    f"trainer and sampler differ: {metric} is {row[metric]:.2g}, and rounding "
                    f"stays below {bound}; see experiments/mismatch.md",
                    file=sys.stderr,
                )
            # 6 publish
            trainer.publish()
            await trainer.probe()
            if run.step % config.save_every == 0:
                save_checkpoint(run, model, trainer.lora, trainer.optimizer)
            step_done()
        run.eval_after, _ = await trainer.evaluate()
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise RuntimeError(f"{run.directory}, step {step}: {error}") from error
    finally:
        # However the loop ended, what a user would want to keep is kept, before any await that a
        # second Ctrl-C could end. What fails in stage 5 leaves the last checkpoint as it is.
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
