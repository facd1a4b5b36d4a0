"""Multi-turn episodes of an agent, token by token, on whatever samples.

An episode is a stream of tokens that only grows. What the model sampled carries a mask of 1 and its
log-probability; what the template and the tools put in between is forced and carries neither:

    tokens  system .. user .. assistant │ <call> .. <end> │ <tool_response> .. assistant │ 42 <end>
    mask      0    0   0   0      0     │   1    1    1   │        0         0      0    │  1   1
            rendered from the messages  │ sampled, turn 1 │  rendered against a dummy    │ turn 2

Nothing is decoded and encoded again: re-encoding gives other tokens now and then, and templates
rewrite earlier turns (Qwen3's drops their <think>), so the trainer would score another stream than
the one that was sampled. Text exists beside the stream, to be parsed and read.

An engine is whatever has `await generate(request)`, add_adapter, remove_adapter, adapters and
max_length; for the trainer also drop_cache, and for its probe servers and name_of. There are two:
TorchEngine (engine.py), embedded, and VLLMEngine (client.py), which asks servers.

Axes: P prompts (groups), G samples per group.
"""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from chat import Tokenizer, answer_call, parse_tool_calls
from client import VLLMEngine as VLLMEngine  # "as": whoever plays imports an engine from here
from engine import Completion, Request, derive_seed
from engine import TorchEngine as TorchEngine

# --- the agent loop ------------------------------------------------------------------------------

FinishReason = Literal[
    "answered",  # a turn without a tool call: the final answer
    "max_turns",  # the last turn allowed still called a tool
    "length",  # a turn reached max_new_tokens
    "context",  # no room for the rest of a turn, or for another one
    "wrong_stop",  # a turn ended, but not with the template's end of turn
]


@dataclass
class Trajectory:
    """One episode, as the trainer needs it and as a person reads it.

    token_ids, loss_mask, logprobs: an entry a token, 1 and its logprob where it was sampled (the
    stop token too), 0 and 0.0 where it was forced; trainer_logprobs: the same of the trainer, once
    it has trained on the episode. All sampled by one version of one adapter. Only an answered
    episode is scored; every other one has reward 0.
    """

    task: object
    adapter: str | None
    version: int
    messages: list[dict]
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: int = 0
    finish_reason: FinishReason | None = None
    reward: float = 0.0
    trainer_logprobs: list[float] = field(default_factory=list)

    def add_forced(self, token_ids: list[int]) -> None:
        self.token_ids += token_ids
        self.loss_mask += [0] * len(token_ids)
        self.logprobs += [0.0] * len(token_ids)

    def add_sampled(self, completion: Completion) -> None:
        self.token_ids += completion.token_ids
        self.loss_mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.turns += 1


async def run_episode(
    engine,
    tokenizer: Tokenizer,
    environment,
    task,
    *,
    adapter: str | None,
    version: int,
    temperature: float,
    seed: int,
    max_turns: int = 10,
    max_new_tokens: int = 512,
) -> Trajectory:
    """Plays one task: sample a turn (of at most max_new_tokens), answer its tool calls, repeat.

    environment: as environments/__init__.py describes it. One seed serves all turns, since a draw
    depends on its position in the stream as well.
    """
    messages = list(environment.prompt(task))
    episode = Trajectory(task, adapter, version, messages)
    episode.add_forced(tokenizer.prompt_ids(environment, task))
    while episode.finish_reason is None:
        completion = await engine.generate(
            Request(
                prompt_ids=list(episode.token_ids),
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                adapter=adapter,
                stop_token_ids=tokenizer.stop_token_ids,
                seed=seed,
            )
        )
        episode.add_sampled(completion)
        sampled, stopped = completion.token_ids, completion.finish_reason == "stop"
        text = tokenizer.decode(sampled[:-1] if stopped else sampled)
        thoughts, thinking, spoken = text.rpartition("</think>")
        messages.append({"role": "assistant", "content": spoken.lstrip() if thinking else spoken})
        if thinking:
            messages[-1]["reasoning_content"] = thoughts.rpartition("<think>")[2].strip()
        calls = parse_tool_calls(spoken)
        if not stopped:
            episode.finish_reason = "length" if len(sampled) == max_new_tokens else "context"
        elif sampled[-1] != tokenizer.end_of_turn_id:
            episode.finish_reason = "wrong_stop"
        elif not calls:
            episode.finish_reason = "answered"
            reward = environment.reward(task, messages)
            episode.reward = float(await reward if inspect.isawaitable(reward) else reward)
        elif episode.turns == max_turns:
            episode.finish_reason = "max_turns"
        else:
            results = [answer_call(environment.tools, call) for call in calls]
            messages += [{"role": "tool", "content": result} for result in results]
            forced = tokenizer.tool_response_ids(results)
            if len(episode.token_ids) + len(forced) < engine.max_length:
                episode.add_forced(forced)
            else:
                episode.finish_reason = "context"
    return episode


async def run_groups(
    engine,
    tokenizer: Tokenizer,
    environment,
    tasks: list,
    group_size: int,
    *,
    seed: int,
    step: int,
    concurrency: int | None = None,
    progress: Callable[[int, int], None] | None = None,
    **options,
) -> list[list[Trajectory]]:
    """Plays every task group_size times, `concurrency` episodes at once (None: all): (P, G).

    An episode's seed follows from (seed, step, its place p, g), so neither concurrency nor the
    order of completion changes what is drawn. progress(done, total) is called after each episode.
    options: the rest of run_episode's. If one episode fails, its error ends all of them.
    """
    total = len(tasks) * group_size
    room = asyncio.Semaphore(concurrency or max(total, 1))
    done = 0

    async def play(p: int, g: int) -> Trajectory:
        nonlocal done
        async with room:
            episode_seed = derive_seed(seed, step, p, g)
            episode = await run_episode(
                engine, tokenizer, environment, tasks[p], seed=episode_seed, **options
            )
        done += 1
        if progress:
            progress(done, total)
        return episode

    pairs = [(p, g) for p in range(len(tasks)) for g in range(group_size)]
    episodes = [asyncio.create_task(play(p, g)) for p, g in pairs]
    try:
        played = await asyncio.gather(*episodes)
    finally:
        for episode in episodes:
            episode.cancel()  # means nothing to those that are done
        await asyncio.gather(*episodes, return_exceptions=True)  # none goes on behind our back
    return [played[p * group_size : (p + 1) * group_size] for p in range(len(tasks))]
