"""Supervised fine-tuning: the same adapter, the same run directory, demonstrations for rewards.

    python sft.py --rank 8                               demonstrations of the miniature wiki
    python sft.py --model Qwen/Qwen3-0.6B --data my.jsonl --max-length 4096
    python train.py --init-adapter runs/.../adapter      and on by reinforcement learning
    torchrun --nproc-per-node 2 sft.py --rank 8          several processes (distributed.py)

A line of data is a conversation: {"messages": [...]} in OpenAI's chat format, calls of tools
included, with "tools" (JSON schemas) where the assistant has any; or {"prompt": ..., "completion":
...}, each a text or a list of messages. It becomes the token stream that an agent would have left,
had it said the assistant's part (rollout.py's drawing):

    tokens  system .. user .. assistant │ <call> .. <end> │ <tool_response> .. assistant │ 42 <end>
    loss      0    0   0   0      0     │   1    1    1   │        0         0      0    │  1   1

so a demonstration is a trajectory that nobody sampled. The loss of a step is -log pi, averaged over
the assistant's tokens of its batch: what `reinforce` (grpo.py) would be, were every advantage 1.
Of a "prompt" nothing carries loss, an assistant's message in it neither.

Left out on purpose: packing (conversations of similar length share a pass instead, which wastes
little and lets none see another), truncation (a conversation that is too long is an error), weights
of single messages, a learning-rate decay.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import jinja2
import torch
from tqdm import tqdm

from chat import Tokenizer, load_tokenizer
from config import ASSETS, RunConfig, check_config
from distributed import Ranks, check_ranks, recruit
from environments import ENVIRONMENTS, Source, Task, read_lines
from rollout import Completion, TorchEngine, Trajectory
from run import RESULTS, Run, append_row, finish, sample_row, save_checkpoint
from start import check_model, check_prompts, load_environments, load_policy, start_run
from train import Trainer, run_command, tasks_of_step
from update import EMPTY, Batch, micro_batches, step_together

DEMONSTRATIONS = ASSETS / "tiny-wiki" / "demonstrations.jsonl"
EVAL_DEMONSTRATIONS = ASSETS / "tiny-wiki" / "eval_demonstrations.jsonl"
COLUMNS = ("messages", "prompt", "completion", "tools")  # of a line; others are left alone
HELD_OUT = 10  # without --eval-data every tenth conversation validates
MAX_LISTED = 20  # bad lines that an error names
PANELS = {
    "loss": "loss, nats a token",
    "eval_loss": "validation loss",
    "entropy": "entropy",
    "grad_norm": "gradient norm",
}


@dataclass(frozen=True)
class SFTConfig(RunConfig):
    """Trains a LoRA adapter on demonstrations and writes it as a PEFT directory."""

    data: str = ""
    """Conversations (messages, tools; or prompt, completion): JSONL, parquet, or a Hub dataset; by
    default demonstrations of the miniature wiki."""
    eval_data: str = ""
    """Conversations to validate on; without them every tenth of --data is held out."""
    batch_size: int = 16
    """Conversations of a step; they are reshuffled every epoch."""
    max_length: int = 512
    """Tokens of a conversation, of which a longer one is an error, or of an episode."""
    eval_every: int = 6
    """Steps between validations; 0 for only before and after."""

    environment: Literal[("", *ENVIRONMENTS)] = ""
    """Whose held-out questions are answered before and after, greedily; by default wiki_search's
    with the default data, with --data none."""
    eval_questions: str = ""
    """Held-out questions of --environment; its own by default."""

    # What a supervised run is never told, as train.py's code that it shares finds it.
    engine, vllm_url, init_adapter, eval_samples, plan = "torch", (), "", 1, False
    questions, eval_corpus, score, judge_url = "", "", "exact", ""


# --- conversations to tokens ----------------------------------------------------------------------


def read_demonstrations(source: Source, tokenizer: Tokenizer, max_length: int) -> list[Trajectory]:
    """The conversations of a file, in order.

    Raises one ValueError that lists the lines which hold none, or one of more than `max_length`
    tokens, by number (up to MAX_LISTED): they are mended or removed before anything is trained.
    """
    demonstrations, problems = [], []
    for number, line in enumerate(read_lines(source), start=1):
        if not line:
            continue
        try:
            row = json.loads(line) if isinstance(line, str) else without_nulls(line)
            demonstration = to_trajectory(row, tokenizer)
            length = len(demonstration.token_ids)
            if length > max_length:
                raise ValueError(f"{length} tokens; --max-length is {max_length}")
            demonstrations.append(demonstration)
        except (ValueError, TypeError, RecursionError, jinja2.TemplateError) as error:
            template = isinstance(error, jinja2.TemplateError)
            problems.append(f"line {number}: {'the chat template: ' if template else ''}{error}")
    if problems:
        total = len(problems) + len(demonstrations)
        more = len(problems) - MAX_LISTED
        listed = problems[:MAX_LISTED] + ([f"and {more} more"] if more > 0 else [])
        heading = f"{source}: {len(problems)} of {total} lines cannot be learned from"
        raise ValueError("\n  ".join([heading, *listed]))
    if not demonstrations:
        raise ValueError(f"{source} is empty: expected lines of messages, or prompt and completion")
    return demonstrations


def without_nulls(value: Any) -> Any:
    """A row of parquet without the keys of other rows: a column of objects has every key that any
    of them has, null where one lacks it, down to the arguments of a call and a tool's schema."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def to_trajectory(row: Any, tokenizer: Tokenizer) -> Trajectory:
    """A conversation as the token stream of an episode whose turns are given instead of sampled.

    Loss (mask 1) is on what the model would have had to say: an assistant's text, its calls and
    its end-of-turn token. Raises ValueError for what is no conversation.
    """
    messages, tools, context = conversation(row)
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    asked = next((m["content"] for m in messages if m["role"] == "user"), "")
    episode = Trajectory(Task("", asked, messages[-1]["content"]), None, 0, messages)
    episode.add_forced(tokenizer.encode(tokenizer.render(messages[: turns[0]], tools)))
    for turn, next_turn in zip(turns, [*turns[1:], None], strict=True):
        spoken = tokenizer.spoken_ids(messages[turn])
        said = {key: value for key, value in messages[turn].items() if key != "reasoning_content"}
        if messages[turn].get("reasoning_content") and spoken == tokenizer.spoken_ids(said):
            raise ValueError(
                "this model's chat template writes no reasoning_content, so it would not be "
                "learned; remove it, or put it into the content"
            )
        if turn < context:
            episode.add_forced(spoken)
        else:
            episode.add_sampled(Completion(spoken, [0.0] * len(spoken), "stop"))
        if next_turn:
            episode.add_forced(tokenizer.forced_ids(messages[turn + 1 : next_turn]))
    episode.finish_reason = "answered"
    return episode


def conversation(row: Any) -> tuple[list[dict], list[dict], int]:
    """Messages, tools, and how many of the messages are context, of which none carries loss."""
    if not isinstance(row, dict):
        raise ValueError(f"expected an object, not {type(row).__name__}")
    used = {key: row[key] for key in COLUMNS if row.get(key) is not None}
    json.dumps(used, ensure_ascii=False).encode()  # half a surrogate pair has no tokens
    if "messages" in used:  # some datasets repeat the first of them as "prompt"
        context, said = [], checked_messages(used["messages"], "assistant")
    elif {"prompt", "completion"} <= used.keys():
        context = checked_messages(used["prompt"], "user")
        said = checked_messages(used["completion"], "assistant")
    else:
        raise ValueError(f"expected messages, or prompt and completion; it has {', '.join(row)}")
    messages, tools = [*context, *said], used.get("tools", [])
    if messages[0]["role"] == "assistant":
        raise ValueError("nothing stands before the assistant's first message")
    if said[-1]["role"] != "assistant":
        raise ValueError(f"the last message must be the assistant's, not the {said[-1]['role']}'s")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("function"), dict) for tool in tools
    ):
        raise ValueError('tools must be a list of {"type": "function", "function": {...}}')
    return messages, tools, len(context)


def checked_messages(value: Any, role: str) -> list[dict]:
    """A list of messages, or a text as one message of `role`; ready for the chat template."""
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ValueError(f"expected a list of messages, not {value!r:.60}")
    return [checked_message(message) for message in value]


def checked_message(message: Any) -> dict:
    """A copy with text for content and with calls whose arguments are objects, as templates expect;
    OpenAI writes them as a text of JSON."""
    if not isinstance(message, dict):
        raise ValueError(f"a message must be an object, not {message!r:.60}")
    message = {key: value for key, value in message.items() if value is not None}
    role, content, calls = (message.get(key) for key in ("role", "content", "tool_calls"))
    if role not in ("system", "user", "assistant", "tool"):
        raise ValueError(f"role must be system, user, assistant or tool, not {role!r:.60}")
    if calls and role != "assistant":
        raise ValueError(f"only the assistant calls tools, not the {role}")
    if not isinstance(content, str) and not (calls and content is None):
        raise ValueError(f"the {role}'s content must be text, not {content!r:.60}")
    if role == "assistant" and not (content or calls):
        raise ValueError("the assistant says nothing")
    message["content"] = content or ""
    if calls:
        if not isinstance(calls, list):
            raise ValueError(f"tool_calls must be a list, not {calls!r:.60}")
        message["tool_calls"] = [checked_call(call) for call in calls]
    return message


def checked_call(call: Any) -> dict:
    """A copy whose arguments are an object; ValueError for what is no call."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(f'a tool call must be {{"function": {{"name": ...}}}}, not {call!r:.60}')
    arguments = function.get("arguments", {})
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(arguments, dict):
        raise ValueError(f"arguments of {function['name']} must be an object, not {arguments!r}")
    return call | {"function": function | {"arguments": arguments}}


# --- the loss -------------------------------------------------------------------------------------


def pass_over(
    model, batches: list[Batch], label: str = "", ranks: Ranks | None = None, learn: bool = True
) -> dict:
    """-log pi, averaged over all tokens that carry loss; gradients are left on the adapter, each
    rank's own there, if it is to learn. How the tokens are split into batches changes nothing."""
    ranks = ranks or Ranks(model, None)
    denominator = sum(int(batch.mask.sum()) for batch in batches)
    sent = [batch.sent() for batch in batches]
    scores = ranks.map(pass_over_share, sent, denominator, label, learn, empty=EMPTY)
    loss, entropy = (sum(parts) for parts in zip(*scores, strict=True))
    return {"loss": loss, "entropy": entropy / denominator, "tokens_trained": denominator}


def pass_over_share(
    ranks: Ranks, share: list[Batch], denominator: int, label: str, learn: bool
) -> list[tuple[float, float]]:
    """A rank's part: for each of its micro-batches the loss and the sum of the entropy. Without
    gradient and dropout, unless it is to learn."""
    model, scores = ranks.model, []
    model.train(learn)
    with torch.set_grad_enabled(learn):
        for batch in tqdm(share, label, leave=False, disable=True if ranks.number else None):
            batch = batch.to(ranks.device)
            logprobs, entropy = model.token_logprobs(batch.ids, batch.mask)  # zero off the mask
            loss = -logprobs.sum() / denominator
            if learn:
                loss.backward()
            scores.append((loss.item(), entropy.sum().item()))
    model.train()
    return scores


def in_batches(demonstrations: list[Trajectory], config: SFTConfig) -> list[Batch]:
    """Micro-batches on the CPU. Their advantages are those of update.py, and of no use here."""
    pairs = [(demonstration, 1.0) for demonstration in demonstrations]
    return micro_batches(pairs, config.micro_tokens, "cpu")


def validation_loss(
    model, demonstrations: list[Trajectory], config: SFTConfig, ranks: Ranks | None = None
) -> float:
    """The loss on held-out conversations, without dropout."""
    batches = in_batches(demonstrations, config)
    return pass_over(model, batches, "validating", ranks, learn=False)["loss"]


@torch.no_grad()
def validation_samples(model, demonstrations: list[Trajectory], run: Run, device) -> list[dict]:
    """Rows for samples.jsonl: what was demonstrated, and how probable the model now finds it."""
    model.eval()
    rows = []
    for demonstration in demonstrations:
        (batch,) = micro_batches([(demonstration, 1.0)], sys.maxsize, device)
        logprobs, _ = model.token_logprobs(batch.ids, batch.mask)
        demonstration.logprobs = [0.0, *logprobs[0].tolist()]
        rows.append(sample_row(run, demonstration, 1.0, "demonstration") | {"reward": None})
    model.train()
    return rows


# --- the run --------------------------------------------------------------------------------------


def load_data(config: SFTConfig, tokenizer: Tokenizer) -> tuple[list[Trajectory], list[Trajectory]]:
    """Conversations to train on, and conversations to validate on."""
    data = read_demonstrations(config.data or DEMONSTRATIONS, tokenizer, config.max_length)
    held_out = config.eval_data or ("" if config.data else EVAL_DEMONSTRATIONS)
    if held_out:
        return data, read_demonstrations(held_out, tokenizer, config.max_length)
    if len(data) < 2:
        raise ValueError(f"{config.data}: too few lines to hold any out; name --eval-data")
    kept = [demonstration for number, demonstration in enumerate(data) if number % HELD_OUT]
    return kept, data[::HELD_OUT]


def set_up(config: SFTConfig) -> tuple[Trainer, list[Trajectory], list[Trajectory]]:
    """Everything that can be wrong is found here, before the run's directory is made."""
    check_config(config)
    check_ranks(config)
    if config.shard_base and (config.environment or not config.data):
        raise ValueError(
            "--shard-base leaves no rank the whole base that answers questions; name --data, no "
            "--environment"
        )
    if config.data and not config.environment and (config.eval_questions or config.corpus):
        raise ValueError("--eval-questions and --corpus mean nothing without --environment")
    check_model(config)
    tokenizer = load_tokenizer(config.model)
    data, validation = load_data(config, tokenizer)
    environment = held_out = engine = None
    if config.environment or not config.data:
        named = config.environment or "wiki_search"  # that of the default data
        environment, held_out = load_environments(replace(config, environment=named))
        check_prompts(tokenizer, held_out, held_out.eval[: config.eval_size], config.max_length)
    model, lora, optimizer, *_ = replica = recruit(load_policy, config)
    if config.max_length > model.config.max_position_embeddings:
        raise ValueError(
            f"--max-length {config.max_length} is more than the model's "
            f"max_position_embeddings, {model.config.max_position_embeddings}"
        )
    if environment:
        engine = TorchEngine(model, config.slots, config.max_length)
    heading = (
        f"{len(data)} conversations to train on ({config.steps * config.batch_size / len(data):.1f}"
        f" epochs), {len(validation)} to validate on"
    )
    run = start_run(config, "sft", replica, heading)
    parts = (config, environment, held_out, tokenizer, model, lora, optimizer, engine, run)
    trainer = Trainer(*parts)
    trainer.ranks.lead(config.seed + run.step)
    return trainer, data, validation


async def evaluate(trainer: Trainer, validation: list[Trajectory]) -> dict:
    """The validation loss, and the greedy reward on held-out questions where there are any."""
    loss = validation_loss(trainer.model, validation, trainer.config, trainer.ranks)
    result = {"loss": loss}
    if trainer.environment:
        trainer.publish()
        result |= (await trainer.evaluate())[0]
    return result


def step_line(row: dict, run: Run, config: SFTConfig) -> str:
    held_out = "" if row["eval_loss"] is None else f"validation {row['eval_loss']:.4f}  "
    return (
        f"step {row['step']:3}/{config.steps}  loss {row['loss']:.4f}  {held_out}"
        f"entropy {row['entropy']:.3f}  train {row['train_tokens_per_second']:,.0f} tok/s  "
        f"{row['seconds']:.1f} s  ETA {run.eta(config.steps):.0f} s"
    )


async def train(config: SFTConfig) -> None:
    """One run, from its first check to the last line that it prints."""
    started = time.monotonic()
    trainer, data, validation = set_up(config)
    run, model, optimizer, ranks = trainer.run, trainer.model, trainer.optimizer, trainer.ranks
    whole, step = True, run.step  # whole: parameters, run.step and rows are of one moment
    try:
        if not run.eval_before:
            run.eval_before = await evaluate(trainer, validation)
            results = {RESULTS[k]: v for k, v in run.eval_before.items() if k in RESULTS}
            before = ", ".join(f"{words} {value:.3f}" for words, value in results.items())
            print(f"before training: {before}", flush=True)
        while run.step < config.steps:
            await asyncio.sleep(1e-3)  # Ctrl-C and SIGTERM cancel here, between two steps
            step, clock = run.step + 1, time.monotonic()
            chosen = tasks_of_step(data, run.step, config.batch_size, config.seed)
            batches = in_batches(chosen, config)
            tokens = sum(len(demonstration.token_ids) for demonstration in chosen)
            metrics = pass_over(model, batches, f"step {step}", ranks)
            metrics["grad_norm"] = ranks.everywhere(step_together, run.step, config)
            whole, run.step, seconds = False, step, time.monotonic() - clock
            validates = config.eval_every and step % config.eval_every == 0
            eval_loss = None
            if validates:
                eval_loss = validation_loss(model, validation, config, ranks)
            row = {
                "step": step,
                "version": step,
                "epoch": step * config.batch_size / len(data),
                **metrics,
                "eval_loss": eval_loss,
                "seconds": time.monotonic() - clock,
                "train_tokens_per_second": tokens / seconds,
            }
            run.seconds += row["seconds"]
            append_row(run.directory / "metrics.jsonl", row)
            if validates:
                for sample in validation_samples(model, validation[:2], run, config.device):
                    append_row(run.directory / "samples.jsonl", sample)
            whole = True
            print(step_line(row, run, config), flush=True)
            if step % config.save_every == 0:
                save_checkpoint(run, model, trainer.lora, optimizer)
        run.eval_after = await evaluate(trainer, validation)
    except (ValueError, RuntimeError, ArithmeticError) as error:
        raise RuntimeError(f"{run.directory}, step {step}: {error}") from error
    finally:
        # Ctrl-C cancels the loop at an await, so between steps; what fails within a step leaves
        # the last checkpoint as it is.
        try:
            if whole:
                seconds = time.monotonic() - started
                finish(run, model, trainer.lora, optimizer, config, seconds, PANELS)
        finally:
            run.release()


def main(arguments: list[str]) -> None:
    run_command("sft.py", train, SFTConfig, arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
