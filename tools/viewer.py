"""What the agent does: a page of its episodes, and a conversation with it.

    python tools/viewer.py runs/x                    writes runs/x/trajectories.html, to be opened
    python tools/viewer.py --chat runs/x/adapter     ask it: the adapter and the base, side by side

    samples.jsonl ──► episodes, token by token ──┐
    metrics.jsonl ──► the reward's curve ────────┼──► trajectories.html, one file: no network,
    config.toml   ──► tokenizer, facts ──────────┘    no framework, readable without JavaScript

An episode is shown as the trainer saw it: sampled tokens are coloured by logprob or by importance
ratio (trainer / sampler), forced ones are grey and carry no loss. Text is never encoded again: a
token's text is decoded from its id. Version v is the adapter after v steps: step 1 is sampled by
version 0.

Left out on purpose: a server, live updates (run the command again), attention maps.
"""

import argparse
import asyncio
import dataclasses
import html
import json
import math
import shutil
import sys
import textwrap
import tomllib
from collections.abc import Iterator, Sequence
from itertools import groupby, repeat, zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from chat import Tokenizer, load_tokenizer, parse_tool_calls  # noqa: E402
from checkpoint import read_json  # noqa: E402
from config import Config  # noqa: E402
from environments import Task  # noqa: E402
from model import Qwen3  # noqa: E402
from quant import quantize_base  # noqa: E402
from rollout import TorchEngine, Trajectory, run_episode  # noqa: E402
from train import load_environments, outcome_of  # noqa: E402

# --- what a run left ------------------------------------------------------------------------------

# What a row must have; rows of older runs lack outcome, version and log_ratios.
COLUMNS = {
    **{"step": int, "question": str, "answer": str, "reward": (int, float)},
    **{"advantage": (int, float), "finish_reason": str, "messages": list},
    **{"token_ids": list, "loss_mask": list, "logprobs": list},
}


def read_rows(file: Path, columns: dict) -> list[dict]:
    """The rows of a JSONL file, each with `columns` (name -> type). A last line without its end is
    left out: a run is writing it, or was killed while it did.

    Raises ValueError that names file and line.
    """
    if not file.is_file():
        raise ValueError(f"{file}: no such file; is its directory that of a run?")
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True), start=1):
        if not line.endswith(b"\n"):
            break
        try:
            row = json.loads(line)
            for name, kind in columns.items():
                if not isinstance(row[name], kind) or row[name] != row[name]:  # NaN is not itself
                    raise ValueError(f"{name} is {row[name]!r:.40}")
            if "token_ids" in columns:
                check_row(row)
        except (ValueError, KeyError, TypeError, ArithmeticError, RecursionError) as error:
            reason = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"{file}, line {number}: damaged ({reason})") from None
        rows.append(row)
    if not rows:
        raise ValueError(f"{file}: empty; the run has not finished its first step")
    return rows


def check_row(row: dict) -> None:
    """ValueError for what the renderer takes for granted: an entry a token, each of its kind."""
    tokens = len(row["token_ids"])
    for name in ("loss_mask", "logprobs", "log_ratios"):
        entries = row.get(name) or []
        if len(entries) != tokens and (entries or name != "log_ratios"):
            raise ValueError(f"{name} has {len(entries)} entries for {tokens} tokens")
    numbers = (row["reward"], row["advantage"], *row["logprobs"], *(row.get("log_ratios") or []))
    if not all(math.isfinite(x) and x < 700 for x in numbers):  # whose exp would overflow
        raise ValueError("reward, advantage, logprobs or log_ratios hold what is no such number")
    if not all(type(x) is int and 0 <= x < 2**31 for x in row["token_ids"]):
        raise ValueError("token_ids hold what is no id")
    if not set(row["loss_mask"]) <= {0, 1}:
        raise ValueError("loss_mask holds something else than 0 and 1")
    for message in row["messages"]:
        if not (isinstance(message["role"], str) and isinstance(message["content"], str)):
            raise ValueError("a message's role or content is no text")


def read_settings(file: Path) -> dict:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}; is its directory that of a run?") from None
    except ValueError as error:
        raise ValueError(f"{file}: not valid TOML ({error})") from None


# --- an episode as HTML ---------------------------------------------------------------------------

PROBABILITIES = (0.1, 0.5, 0.9, 0.99)  # bounds of the five colours of a logprob
RATIOS = (0.8, 0.95, 1.05, 1.25)  # and of an importance ratio


def token_texts(tokenizer: Tokenizer, ids: Sequence[int]) -> list[str]:
    """The text of each token; "" for one that only begins a character, which the next one ends."""
    texts, held = [], []
    for token in ids:
        held.append(token)
        text = tokenizer.decode(held)
        if text.endswith("\ufffd") and len(held) < 4:  # UTF-8 has at most four bytes a character
            texts.append("")
        else:
            texts.append(text)
            held = []
    if held:
        texts[-1] = tokenizer.decode(held)
    return [text.replace("\0", "\ufffd") for text in texts]  # as HTML has it


def level(value: float, bounds: tuple) -> int:
    return sum(value >= bound for bound in bounds)


def token_html(sampled: int, text: str, logprob: float, log_ratio: float | None) -> str:
    """<i> for a forced token, <b> for a sampled one: colour classes for both scales, exact values
    for the tooltip."""
    newline = " n" if "\n" in text and not text.strip() else ""
    if not sampled:
        return f"<i{' class=n' if newline else ''}>{html.escape(text)}</i>"
    colours = f"p{level(math.exp(logprob), PROBABILITIES)}"
    ratio = ""
    if log_ratio is not None:
        colours += f" r{level(math.exp(log_ratio), RATIOS)}"
        ratio = f' data-r="{math.exp(log_ratio):.4f}"'
    return f'<b class="{colours}{newline}" data-l="{logprob:.4f}"{ratio}>{html.escape(text)}</b>'


def describe_call(call: str) -> str:
    """search_pages(query="Norda") of a tool call as the model wrote it; the text if it is none."""
    try:
        parsed = json.loads(call)
        arguments = ", ".join(
            f"{name}={json.dumps(value, ensure_ascii=False)}"
            for name, value in parsed["arguments"].items()
        )
        return f"{parsed['name']}({arguments})"
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return " ".join(call.removeprefix("<tool_call>").split())


def describe_turn(content: str) -> str:
    """The calls of a turn, or what it said."""
    return "; ".join(map(describe_call, parse_tool_calls(content))) or content


def said_in_segments(messages: list[dict]) -> Iterator[tuple[str, str]]:
    """(kind, text) of the prompt, turn 1, its tools' results, turn 2, ...: what the forced and the
    sampled segments of a stream say, in their order."""
    for place, (is_turn, group) in enumerate(groupby(messages, lambda m: m["role"] == "assistant")):
        contents = [message["content"] for message in group]
        if is_turn:
            yield "call" if "<tool_call>" in contents[0] else "reply", describe_turn(contents[0])
        elif place == 0:
            yield "prompt", contents[-1]
        else:
            yield "result", " / ".join(contents)


def episode_html(row: dict, tokenizer: Tokenizer) -> str:
    """An <article>: what became of the episode, then its stream in segments that fold."""
    ratios = row.get("log_ratios") or [None] * len(row["token_ids"])
    tokens = zip(row["loss_mask"], row["token_ids"], row["logprobs"], ratios, strict=True)
    spoken = said_in_segments(row["messages"])
    segments = []
    for sampled, group in groupby(tokens, key=lambda token: token[0]):
        _, ids, *numbers = zip(*group, strict=True)
        tokens_html = map(token_html, repeat(sampled), token_texts(tokenizer, ids), *numbers)
        what, said = next(spoken, ("", ""))
        kind, more = ("sampled", " open") if sampled else ("forced", "")
        focusable = ' tabindex="0"' if sampled else ""  # for the arrow keys
        segments.append(
            f'<details class="{kind}"{more}><summary><span class="what">{what}</span> '
            f'<span class="said">{html.escape(" ".join(said.split())[:240])}</span> '
            f'<span class="count">{len(ids)} {kind}</span></summary>'
            f'<div class="stream"{focusable}>{"".join(tokens_html)}</div></details>'
        )
    reward, advantage = row["reward"], row["advantage"]
    facts = {
        "reward": f"{reward:g}",
        "advantage": f"{'▲' if advantage > 0 else '▼' if advantage < 0 else '■'} {advantage:+.3f}",
        "outcome": row.get("outcome"),
        "finish": row["finish_reason"],
        "version": row.get("version"),
        "tokens": f"{sum(row['loss_mask'])} sampled of {len(row['token_ids'])}",
    }
    if not row.get("log_ratios"):
        facts["ratio"] = "not recorded" if "log_ratios" not in row else "none: not trained on"
    listed = "".join(
        f'<div class="{name}"><dt>{name}</dt><dd>{html.escape(str(value))}</dd></div>'
        for name, value in facts.items()
        if value is not None
    )
    sign = "up" if advantage > 0 else "down" if advantage < 0 else "even"
    return (
        f'<article class="{sign}" data-reward="{reward:g}">'
        f"<h3>{html.escape(row['question'])}</h3>"
        f'<p class="answer">expected: {html.escape(row["answer"])}</p>'
        f"<dl>{listed}</dl>{''.join(segments)}</article>"
    )


# --- the page -------------------------------------------------------------------------------------


def curve_html(metrics: list[dict]) -> str:
    """The mean reward of every step as an SVG line; JavaScript moves its marker."""
    rewards = [row["reward"] for row in metrics]
    low, high = min(0.0, *rewards), max(1.0, *rewards)
    first, last = metrics[0]["step"], metrics[-1]["step"]
    places = [
        (
            100 * (row["step"] - first) / max(last - first, 1),
            40 - 40 * (row["reward"] - low) / (high - low),
        )
        for row in metrics
    ]
    line = " ".join(f"{x:.2f},{y:.2f}" for x, y in places)
    return (
        f'<figure class="curve" data-first="{first}" data-last="{last}"><figcaption>'
        f"mean reward of a step's episodes: {rewards[0]:.2f} at step {first}, "
        f"{rewards[-1]:.2f} at step {last}</figcaption>"
        f'<div class="plot"><span class="high">{high:g}</span><span class="low">{low:g}</span>'
        '<svg viewBox="0 0 100 40" preserveAspectRatio="none" aria-hidden="true">'
        '<path class="grid" d="M0 0H100M0 20H100M0 40H100"/>'
        f'<polyline points="{line}"/><line id="marker" y1="0" y2="40"/></svg></div>'
        f'<div class="axis"><span>step {first}</span><span>step {last}</span></div></figure>'
    )


def page(name: str, settings: dict, metrics: list[dict], rows: list[dict], tokenizer) -> str:
    """The whole page. Every text of a run passes html.escape on its way into it."""
    rewards = {row["step"]: row["reward"] for row in metrics}
    steps = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        steps.setdefault(row["step"], []).append(row)
    options, sections = [], []
    for step, episodes in steps.items():
        mean = f"reward {rewards[step]:.2f}" if step in rewards else "reward unknown"
        shown = f"{len(episodes)} episode{'s' if len(episodes) > 1 else ''}"
        options.append(f'<option value="{step}">{step} ({mean}, {shown})</option>')
        sections.append(
            f'<section id="step-{step}" data-step="{step}"><h2>Step {step}, mean {mean}</h2>'
            + "".join(episode_html(row, tokenizer) for row in episodes)
            + "</section>"
        )
    keys = ("environment", "model", "rank", "alpha", "loss", "temperature", "seed")
    facts = " · ".join(f"{key} {settings[key]}" for key in keys if key in settings)
    parts = {
        "title": html.escape(name),
        "facts": html.escape(facts),
        "curve": curve_html(metrics),
        "options": "".join(options),
        "sections": "\n".join(sections),
    }
    template = Path(__file__).with_suffix(".html").read_text(encoding="utf-8")
    before, *rest = template.split("{{")  # in one pass: no part is searched for another's name
    filled = [before]
    for piece in rest:
        key, _, text = piece.partition("}}")
        filled += [parts[key], text]
    return "".join(filled)


def write_page(run: Path, model: str = "") -> Path:
    """Writes trajectories.html into a run's directory and returns its path.

    model: where the run's checkpoint is now, if not where config.toml says; only its tokenizer is
    read. Raises ValueError for a file that is missing or damaged, by its name.
    """
    settings = read_settings(run / "config.toml")
    metrics = read_rows(run / "metrics.jsonl", {"step": int, "reward": (int, float)})
    rows = read_rows(run / "samples.jsonl", COLUMNS)
    model = model or settings.get("model", Config.model)
    if not isinstance(model, str):
        raise ValueError(f"{run / 'config.toml'}: model must be text, not {model!r:.40}")
    tokenizer = tokenizer_of(model)
    file = run / "trajectories.html"
    text = page(run.resolve().name, settings, metrics, rows, tokenizer)
    file.write_text(text, encoding="utf-8", errors="replace")  # JSON can hold half a surrogate pair
    return file


def tokenizer_of(model: str) -> Tokenizer:
    try:
        return load_tokenizer(model)
    except ValueError as error:
        raise ValueError(f"{error}; say where the run's checkpoint is by --model") from None


# --- a conversation -------------------------------------------------------------------------------


def settings_above(adapter: Path) -> tuple[Config, str]:
    """The configuration of the run that an adapter is from, and a line that says whence.

    From the nearest config.toml above it (so a checkpoint's or a broadcast's adapter will do); an
    adapter alone names its base model, and gets the defaults for the rest.
    """
    facts = read_json_file(adapter / "adapter_config.json")
    known = {field.name for field in dataclasses.fields(Config)}
    for directory in adapter.resolve().parents[:4]:
        file = directory / "config.toml"
        if file.is_file():
            found = {key: value for key, value in read_settings(file).items() if key in known}
            found["environment"] = found.get("environment") or Config.environment  # sft.py: ""
            return Config(**found), f"settings: {file}"
    model = facts.get("base_model_name_or_path") or Config.model
    return Config(model=model), f"settings: the defaults, there is no config.toml above {adapter}"


def read_json_file(file: Path) -> dict:
    if not file.is_file():
        raise ValueError(f"{file}: no such file; name a run's adapter directory, runs/x/adapter")
    return read_json(file)


class Chat:
    """An adapter and its base in one engine: each question is an episode of both."""

    def __init__(self, adapter: Path, model: str = "", temperature: float = 0.0):
        self.config, self.source = settings_above(adapter)
        self.config = dataclasses.replace(self.config, model=model or self.config.model)
        self.temperature, self.asked = temperature, 0
        _, self.environment = load_environments(dataclasses.replace(self.config, judge_url=""))
        self.tokenizer = tokenizer_of(self.config.model)
        dtype = getattr(torch, self.config.dtype)
        base = Qwen3.from_pretrained(self.config.model, dtype, self.config.device)
        if self.config.quantize == "nf4":
            quantize_base(base)
        self.engine = TorchEngine(base, slots=4, max_length=self.config.max_length)
        self.engine.add_adapter("adapter", adapter)

    def task(self, text: str) -> Task:
        """A held-out question, by its number in the list of examples or word for word, or another
        one, whose answer nobody knows."""
        held_out = self.environment.eval
        if text.isdecimal() and 1 <= int(text) <= min(len(held_out), EXAMPLES):
            return held_out[int(text) - 1]
        same = (task for task in held_out if task.question == text)
        return next(same, Task("chat", text, ""))

    async def ask(self, task: Task) -> list[Trajectory]:
        """The episode of the adapter and that of the base (adapter None), sampled in one batch."""
        self.asked += 1
        return await asyncio.gather(
            *(
                run_episode(
                    self.engine,
                    self.tokenizer,
                    self.environment,
                    task,
                    adapter=adapter,
                    version=0,
                    temperature=self.temperature,
                    seed=self.asked,
                    max_turns=self.config.max_turns,
                    max_new_tokens=self.config.max_new_tokens,
                )
                for adapter in ("adapter", None)
            )
        )


EXAMPLES = 5  # held-out questions that a conversation begins with


def transcript(title: str, episode: Trajectory, outcome: str) -> list[str]:
    """An episode's lines for a terminal: calls, what the tools answered, the reply."""
    lines = [title]
    for message in episode.messages:
        content = message["content"]
        if message["role"] == "assistant":
            calls = parse_tool_calls(content)
            lines += [f"-> {describe_call(call)}" for call in calls] or [f"=  {content}"]
        elif message["role"] == "tool":
            lines.append(f"   {content}")
    sampled = sum(episode.loss_mask)
    lines.append(f"({outcome}; {episode.turns} turns, {sampled} tokens)")
    return [printable(line) for line in lines]


def printable(text: str) -> str:
    """On one line, and without what would let a model or a page move the terminal's cursor."""
    return "".join(c if c.isprintable() else "?" for c in text.replace("\n", " "))


def side_by_side(left: list[str], right: list[str], width: int) -> str:
    """Two columns, or one below the other where the terminal has fewer than 80 columns."""

    def wrapped(lines: list[str], columns: int) -> list[str]:
        return [
            part
            for line in lines
            for part in textwrap.wrap(line, columns, subsequent_indent="   ") or [""]
        ]

    if width < 80:
        return "\n".join([*wrapped(left, width), "", *wrapped(right, width)])
    column = (width - 3) // 2
    pairs = zip_longest(wrapped(left, column), wrapped(right, column), fillvalue="")
    return "\n".join(f"{a:{column}} │ {b}".rstrip() for a, b in pairs)


def converse(adapter: Path, model: str, temperature: float) -> None:
    """Reads questions, a line each, until the input ends."""
    chat = Chat(adapter, model, temperature)
    how = "greedy" if temperature == 0 else f"temperature {temperature:g}"
    print(f"{chat.source}\nbase: {chat.config.model}, {chat.config.environment}, {how}")
    print("\nAsk a question, or type the number of one that was held out; Ctrl-D ends it.")
    for number, task in enumerate(chat.environment.eval[:EXAMPLES], start=1):
        print(f"  {number}  {task.question}")
    while True:
        print("\n> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            print()
            return
        text = line.strip()
        if not text:
            continue
        task = chat.task(text)
        try:
            episodes = asyncio.run(chat.ask(task))
        except ValueError as error:  # a question too long for the context
            print(f"cannot be asked: {error}")
            continue
        if task.answer:
            print(f"{task.question}\nexpected: {task.answer}")
        columns = [
            transcript(
                title,
                episode,
                outcome_of(chat.environment, episode) if task.answer else episode.finish_reason,
            )
            for title, episode in zip(("[adapter]", "[base]"), episodes, strict=True)
        ]
        print(side_by_side(*columns, shutil.get_terminal_size().columns))


def main(arguments: list[str]) -> None:
    """The command line; what a user can mend is one line."""
    parser = argparse.ArgumentParser(
        "viewer.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", nargs="?", type=Path, help="directory of a run: writes its page")
    parser.add_argument("--chat", type=Path, metavar="ADAPTER", help="directory of an adapter")
    parser.add_argument("--model", default="", help="where the base is, if not where the run says")
    parser.add_argument("--temperature", type=float, default=0.0, help="of --chat; 0 is greedy")
    options = parser.parse_args(arguments)
    if (options.run is None) == (options.chat is None):
        parser.error("name one of the two: a run's directory, or an adapter by --chat")
    try:
        if options.chat:
            converse(options.chat, options.model, options.temperature)
        else:
            print(f"{write_page(options.run, options.model)}: open it in a browser")
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        raise SystemExit(f"viewer.py: {error}") from None
    except KeyboardInterrupt:
        print()
        raise SystemExit(130) from None


if __name__ == "__main__":
    main(sys.argv[1:])
