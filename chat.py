"""Messages to tokens, and tool calls out of text: what surrounds an agent's sampled turns.

    render     messages and tools ──► the chat template's text ──► tokens: an episode's prompt
    turn       <tool_call>\n{"name": "search_pages", "arguments": {"query": "Norda"}}\n</tool_call>
    answer     the tool's result, or "error: ..." ──► the forced tokens before the next turn

The forced tokens are rendered against a fixed dummy conversation, never against what was sampled: a
template may rewrite earlier turns (Qwen3's drops their thoughts), and a sampled turn need not be
what its text would be encoded to.

Left out on purpose: other call formats than Qwen3's, and templates that need transformers.
"""

import json
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import jinja2.ext
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment

from checkpoint import checkpoint_directory
from environments import call_tool, tool_schema


class Tokenizer:
    """A tokenizer with its chat template and its stop tokens, see load_tokenizer.

    end_of_turn_id: what the template writes after an assistant's text; an episode goes on after it.
    stop_token_ids: that and every other token that ends generation.
    """

    DUMMY = "a turn that nobody sampled"

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        template: str,
        end_token_ids: list[int],
        special_tokens: dict[str, str],  # bos_token, eos_token, ...: templates may use them
    ):
        def tojson(value, ensure_ascii=False, **options) -> str:
            # As Hugging Face does: jinja's own filter would write < and > as \u003c and \u003e.
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        def raise_exception(message: str):
            raise jinja2.TemplateError(message)

        sandbox = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        sandbox.filters["tojson"] = tojson
        sandbox.globals["raise_exception"] = raise_exception
        sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self.tokenizer, self.special_tokens = tokenizer, special_tokens
        self.template = sandbox.from_string(template)
        self.end_of_turn_id = self.encode(self.after_dummy([], add_generation_prompt=False))[0]
        self.stop_token_ids = tuple(dict.fromkeys([self.end_of_turn_id, *end_token_ids]))

    def encode(self, text: str) -> list[int]:
        """Special tokens written in the text are recognised; none is added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(
        self, messages: list[dict], tools: list[dict] | None = None, add_generation_prompt=True
    ) -> str:
        return self.template.render(
            messages=messages,
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens,
        )

    def prompt_ids(self, environment, task) -> list[int]:
        """What an episode starts with: the environment's messages and tools."""
        schemas = [tool_schema(tool) for tool in environment.tools]
        return self.encode(self.render(environment.prompt(task), schemas, True))

    def after_dummy(self, messages: list[dict], add_generation_prompt: bool) -> str:
        """What the template writes after an assistant's text, whatever that text was."""
        dummy = [{"role": "user", "content": "?"}, {"role": "assistant", "content": self.DUMMY}]
        return self.render(dummy + messages, None, add_generation_prompt).split(self.DUMMY, 1)[1]

    def forced_ids(self, messages: list[dict]) -> list[int]:
        """The forced tokens between an end of turn and the next turn's first token."""
        return self.encode(self.after_dummy(messages, add_generation_prompt=True))[1:]

    def tool_response_ids(self, results: list[str]) -> list[int]:
        """forced_ids of the answers to a turn's calls."""
        return self.forced_ids([{"role": "tool", "content": result} for result in results])

    def spoken_ids(self, message: dict) -> list[int]:
        """What the model would have had to say to get this assistant's message written: all that
        the template puts after its generation prompt, up to and including the end of turn. (Where
        the message has no thought, Qwen3's hybrid template writes an empty one: that too.)

        ValueError if the template begins a turn otherwise than its generation prompt does, and for
        a text in which generation would have ended earlier.
        """
        question = [{"role": "user", "content": "?"}]
        before, after = self.render(question), self.after_dummy([], add_generation_prompt=False)
        written = self.render([*question, message], None, add_generation_prompt=False)
        if not (written.startswith(before) and written.endswith(after)):
            raise ValueError(
                f"the chat template writes this turn as {written!r:.200}, which does not go on "
                f"where its generation prompt ends: {before!r}"
            )
        ids = self.encode(written[len(before) : -len(after)])
        if ends := [token for token in ids if token in self.stop_token_ids]:
            raise ValueError(f"the assistant's text holds {self.decode(ends[:1])}, which ends it")
        return [*ids, self.end_of_turn_id]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Reads the tokenizer, chat template and stop tokens of a checkpoint directory or Hub id."""
    directory = checkpoint_directory(path)

    def read(name: str, parse: Callable, default=None):
        file = directory / name
        if not file.is_file():
            if default is None:
                raise ValueError(f"{file}: no such file")
            return default
        try:
            return parse(file.read_text(encoding="utf-8"))
        except Exception as error:  # tokenizers raises just that
            raise ValueError(f"{file}: unreadable ({error})") from error

    tokenizer = read("tokenizer.json", tokenizers.Tokenizer.from_str)
    config = read("tokenizer_config.json", json.loads)
    special = {key: config.get(key) for key in ("bos_token", "eos_token", "pad_token")}
    special = {key: t["content"] if isinstance(t, dict) else t for key, t in special.items() if t}
    template = read("chat_template.jinja", str, default=config.get("chat_template") or "")
    if not template:
        raise ValueError(
            f"{directory}: neither chat_template.jinja nor tokenizer_config.json has one"
        )
    ends = read("generation_config.json", json.loads, default={}).get("eos_token_id")
    if ends is None:
        ends = tokenizer.token_to_id(special.get("eos_token", ""))
    if ends is None:
        raise ValueError(
            f"{directory}: neither generation_config.json nor tokenizer_config.json "
            "names the token that ends a text"
        )
    return Tokenizer(tokenizer, template, ends if isinstance(ends, list) else [ends], special)


def parse_tool_calls(text: str) -> list[str]:
    """What stands between <tool_call> and </tool_call>, not parsed any further.

    A call that is not closed keeps its opening marker, so that it cannot pass for a good one.
    """
    pieces = [piece.partition("</tool_call>") for piece in text.split("<tool_call>")[1:]]
    return [body if closed else f"<tool_call>{body}" for body, closed, _ in pieces]


def answer_call(tools: list[Callable], call: str) -> str:
    """What the model reads after its call: the result, or what was wrong; never an exception for
    what the model wrote."""
    try:
        if call.startswith("<tool_call>"):
            raise ValueError("</tool_call> is missing")
        parsed = json.loads(call)
        json.dumps(parsed, ensure_ascii=False).encode()  # half a surrogate pair cannot be encoded
        if not isinstance(parsed, dict) or "name" not in parsed:
            raise ValueError('expected {"name": ..., "arguments": {...}}')
    except (ValueError, RecursionError) as error:
        return f"error: malformed tool call: {error}"
    return call_tool(tools, parsed["name"], parsed.get("arguments", {}))
