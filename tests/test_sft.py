"""sft.py: conversations to tokens and mask, the loss, the run; and what a bad line leads to.

That train.py goes on from an adapter is tested in test_train.py.
"""

import asyncio
import json
import os
import signal
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_train import (
    assert_documented,
    assert_equal_runs,
    checkpoints,
    one_layer_base,
    random_pairs,
    rows_of,
    written,
)
from tiny import close, randomise_adapter, seeds, tiny_config, tiny_model

import broadcast
import sft
import train
from chat import Tokenizer, load_tokenizer
from config import ASSETS, RunConfig, read_toml, to_toml
from environments.wiki_search import WikiSearch
from lora import LoRAConfig, inject_lora, lora_parameters
from rollout import Completion, run_episode
from run import run_name

BASE, WIKI = ASSETS / "tiny-qwen3", ASSETS / "tiny-wiki"
TOKENIZER = load_tokenizer(BASE)


# --- conversations to tokens ----------------------------------------------------------------------


TEXT = st.text(st.sampled_from("ab {}\n\"'é日"), min_size=1, max_size=12)
CALLS = st.builds(
    lambda name, arguments, as_text: {
        "id": "call_1",
        "type": "function",
        "function": {
            "name": name,
            "arguments": json.dumps(arguments, separators=(",", ":")) if as_text else arguments,
        },
    },
    st.sampled_from(["search_pages", "f"]),
    st.dictionaries(TEXT, st.one_of(TEXT, st.integers()), max_size=2),
    st.booleans(),
)
SPEAKERS = st.one_of(
    st.builds(lambda text: {"role": "assistant", "content": text}, TEXT),
    st.builds(
        lambda text, calls: {"role": "assistant", "content": text, "tool_calls": calls},
        st.none() | TEXT,
        st.lists(CALLS, min_size=1, max_size=2),
    ),
)
OTHERS = st.builds(
    lambda role, text: {"role": role, "content": text}, st.sampled_from(["user", "tool"]), TEXT
)
TOOLS = st.sampled_from(
    [None, [], [{"type": "function", "function": {"name": "f", "parameters": {"properties": {}}}}]]
)


@st.composite
def conversations(draw) -> list[dict]:
    """A user's message, then any order of assistant, user and tool, the assistant last."""
    system = [{"role": "system", "content": draw(TEXT)}] if draw(st.booleans()) else []
    between = draw(st.lists(st.one_of(SPEAKERS, OTHERS), max_size=5))
    return [*system, {"role": "user", "content": draw(TEXT)}, *between, draw(SPEAKERS)]


def said(message: dict) -> str:
    """What an assistant's message is in Qwen3's form, written out by hand."""
    pieces = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls", []):
        arguments = call["function"]["arguments"]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        body = {"name": call["function"]["name"], "arguments": arguments}
        pieces.append(f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>")
    return "\n".join(pieces) + "<|im_end|>"


def masked_runs(episode) -> list[list[int]]:
    """The stretches of tokens that carry loss."""
    runs, before = [], 0
    for token, mask in zip(episode.token_ids, episode.loss_mask, strict=True):
        if mask and not before:
            runs.append([])
        if mask:
            runs[-1].append(token)
        before = mask
    return runs


@given(conversations(), TOOLS)
def test_loss_is_on_what_the_assistant_says_and_its_end_of_turn(messages, tools):
    given_messages = json.loads(json.dumps(messages))
    episode = sft.to_trajectory({"messages": messages, "tools": tools}, TOKENIZER)
    assert messages == given_messages
    turns = [said(message) for message in messages if message["role"] == "assistant"]
    runs = masked_runs(episode)
    assert [TOKENIZER.decode(run) for run in runs] == turns
    assert all(run.count(TOKENIZER.end_of_turn_id) == 1 for run in runs)
    assert all(run[-1] == TOKENIZER.end_of_turn_id for run in runs)
    assert episode.turns == len(turns)
    # The tiny template rewrites nothing: the stream is the whole conversation, rendered at once.
    whole = TOKENIZER.render(episode.messages, tools, add_generation_prompt=False)
    assert TOKENIZER.decode(episode.token_ids) + "\n" == whole


@pytest.mark.parametrize("file", ["demonstrations.jsonl", "eval_demonstrations.jsonl"])
def test_a_demonstration_is_the_episode_of_an_agent_that_says_it(file):
    """Token for token, by run_episode itself, with an engine that samples what was demonstrated."""
    corpus = WIKI / file.replace("demonstrations", "corpus")
    environment = WikiSearch(corpus, WIKI / "questions.jsonl", results=3)
    demonstrations = sft.read_demonstrations(WIKI / file, TOKENIZER, 512)
    for demonstration in demonstrations[:6]:
        turns = iter(masked_runs(demonstration))

        async def generate(request, turns=turns):
            ids = next(turns)
            return Completion(ids, [-1.0] * len(ids), "stop")

        engine = SimpleNamespace(generate=generate, max_length=512)
        task = demonstration.task
        options = {"adapter": None, "version": 0, "temperature": 1.0, "seed": 0}
        played = asyncio.run(run_episode(engine, TOKENIZER, environment, task, **options))
        assert played.token_ids == demonstration.token_ids
        assert played.loss_mask == demonstration.loss_mask
        assert (played.reward, played.finish_reason) == (1.0, "answered")


def other_template(assistant: str, generation_prompt: str) -> Tokenizer:
    """The tiny tokenizer with another template, simpler but for the assistant's messages."""
    template = (
        "{% for message in messages %}{% if message.role == 'assistant' %}<|im_start|>assistant\n"
        + assistant
        + "<|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        + "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
        + generation_prompt
        + "{% endif %}"
    )
    raw = tokenizers.Tokenizer.from_file(str(BASE / "tokenizer.json"))
    return Tokenizer(raw, template, list(TOKENIZER.stop_token_ids), {})


PLAIN = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "A"}]
THOUGHTFUL = [
    {"role": "user", "content": "a?"},
    {"role": "assistant", "reasoning_content": "one", "content": "A"},
    {"role": "user", "content": "b?"},
    {"role": "assistant", "reasoning_content": "two", "content": "B"},
]


@pytest.mark.parametrize("forced", ["", "<think>\n"])
def test_a_template_that_drops_earlier_thoughts_drops_none_that_the_model_had(forced):
    """As Qwen3's does, of which one variant opens the thought in its generation prompt."""
    thought = "{% if loop.last %}<think>\n{{ message.reasoning_content }}</think>{% endif %}"
    tokenizer = other_template(thought + "{{ message.content }}", forced)
    rendered = tokenizer.render(THOUGHTFUL, None, add_generation_prompt=False)
    assert "one" not in rendered and "two" in rendered
    # after_dummy renders a turn without thoughts, in the place of any earlier turn
    episode = sft.to_trajectory({"messages": THOUGHTFUL}, tokenizer)
    opened = "" if forced else "<think>\n"
    assert [tokenizer.decode(run) for run in masked_runs(episode)] == [
        f"{opened}one</think>A<|im_end|>",
        f"{opened}two</think>B<|im_end|>",
    ]


def test_a_template_whose_turn_does_not_follow_its_generation_prompt_is_refused():
    tokenizer = other_template("{{ message.content }}", "<think>\n")
    with pytest.raises(ValueError, match="generation prompt"):
        sft.to_trajectory({"messages": THOUGHTFUL}, tokenizer)


def test_of_a_prompt_nothing_carries_loss_and_texts_are_messages():
    asked = [*PLAIN, {"role": "user", "content": "b?"}]
    listed = sft.to_trajectory(
        {"prompt": asked, "completion": [{"role": "assistant", "content": "B"}]}, TOKENIZER
    )
    assert [TOKENIZER.decode(run) for run in masked_runs(listed)] == ["B<|im_end|>"]
    whole = sft.to_trajectory({"messages": listed.messages}, TOKENIZER)
    assert listed.token_ids == whole.token_ids and sum(whole.loss_mask) > sum(listed.loss_mask)
    texts = sft.to_trajectory({"prompt": "b?", "completion": "B"}, TOKENIZER)
    pair = [{"role": "user", "content": "b?"}, {"role": "assistant", "content": "B"}]
    same = sft.to_trajectory({"messages": pair}, TOKENIZER)
    assert (texts.token_ids, texts.loss_mask) == (same.token_ids, same.loss_mask)


def conversation_of(name: str, arguments: dict, **more) -> dict:
    """A call with these arguments, and a tool that takes them; "id" is no column of ours."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    properties = {key: {"type": "string"} for key in arguments}
    tool = {"name": name, "parameters": {"type": "object", "properties": properties}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "b"},
        {"role": "assistant", "content": "c"},
    ]
    return {"messages": messages, "tools": [{"type": "function", "function": tool}]} | more


CONVERSATIONS = [
    conversation_of("search", {"query": "x"}),
    conversation_of("read", {"page_id": "y", "section": "z"}),
]


def test_the_nulls_that_parquet_fills_up_with_are_not_learned(monkeypatch):
    rows = json.loads(json.dumps(CONVERSATIONS))
    for row in rows:  # objects of one column have the keys of all of them
        for message in row["messages"]:
            message.setdefault("tool_calls", None)
        function = row["messages"][1]["tool_calls"][0]["function"]
        properties = row["tools"][0]["function"]["parameters"]["properties"]
        for key in ("query", "page_id", "section"):
            function["arguments"].setdefault(key, None)
            properties.setdefault(key, None)
    monkeypatch.setattr(sft, "read_lines", lambda source: rows)
    found = sft.read_demonstrations("my.parquet", TOKENIZER, 512)
    expected = [sft.to_trajectory(row, TOKENIZER) for row in CONVERSATIONS]
    assert [episode.token_ids for episode in found] == [e.token_ids for e in expected]
    # In JSON a null was written by somebody.
    said = json.loads(json.dumps(conversation_of("search", {"query": None})))
    assert "null" in TOKENIZER.decode(masked_runs(sft.to_trajectory(said, TOKENIZER))[0])


def test_a_parquet_file_is_learned_as_the_same_lines_of_json_are(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    dated = [row | {"at": datetime.now(), "prompt": "a"} for row in CONVERSATIONS]
    write_table(pa.Table.from_pylist(dated), tmp_path / "my.parquet")
    found = sft.read_demonstrations(tmp_path / "my.parquet", TOKENIZER, 512)
    expected = [sft.to_trajectory(row, TOKENIZER) for row in CONVERSATIONS]
    assert [episode.token_ids for episode in found] == [e.token_ids for e in expected]


def test_columns_that_are_not_ours_are_left_alone():
    plain = sft.to_trajectory({"messages": PLAIN}, TOKENIZER)
    row = {"messages": PLAIN, "prompt": "a?", "prompt_id": "\ud800", "at": datetime.now()}
    assert sft.to_trajectory(row, TOKENIZER).token_ids == plain.token_ids


# --- bad lines ------------------------------------------------------------------------------------

USER, REPLY = '{"role": "user", "content": "a"}', '{"role": "assistant", "content": "b"}'
GOOD = f'{{"messages": [{USER}, {REPLY}]}}'
LONG = json.dumps({"prompt": "a " * 300, "completion": "b"})


def calls(text: str, role: str = "assistant") -> str:
    message = f'{{"role": "{role}", "content": "b", "tool_calls": {text}}}'
    return f'{{"messages": [{USER}, {message}, {REPLY}]}}'


BAD_LINES = {
    # the line -> what the message about it says
    "{": "Expecting",
    "[1]": "expected an object, not list",
    "{}": "expected messages, or prompt and completion",
    '{"messages": []}': "expected a list of messages",
    '{"messages": "a"}': "nothing stands before",
    '{"messages": [1]}': "a message must be an object",
    f'{{"messages": [{REPLY}]}}': "nothing stands before",
    f'{{"messages": [{USER}]}}': "the last message must be the assistant's, not the user's",
    '{"prompt": "a"}': "it has prompt",
    '{"prompt": "a", "completion": ""}': "the assistant says nothing",
    f'{{"prompt": "a", "completion": [{USER}]}}': "the last message must be the assistant's",
    f'{{"messages": [{USER}, {{"role": "bot", "content": "b"}}]}}': "not 'bot'",
    f'{{"messages": [{{"role": "user"}}, {REPLY}]}}': "user's content must be text, not None",
    f'{{"messages": [{USER}, {{"role": "assistant", "content": [1]}}]}}': "must be text, not [1]",
    f'{{"messages": [{USER}, {{"role": "assistant"}}]}}': "must be text, not None",
    f'{{"messages": [{USER}, {REPLY}], "tools": ["f"]}}': "tools must be a list",
    '{"prompt": "a", "completion": "b<|im_end|>c"}': "<|im_end|>, which ends it",
    '{"prompt": "a", "completion": "\\ud800"}': "surrogates not allowed",
    calls('[{"function": {}}]'): "a tool call must be",
    calls('[{"function": {"name": "f", "arguments": "{"}}]'): "Expecting",
    calls('[{"function": {"name": "f", "arguments": "[1]"}}]'): "arguments of f must be an object",
    calls('[{"function": {"name": "f"}}]', "user"): "only the assistant calls tools, not the user",
    calls("5"): "tool_calls must be a list, not 5",
    f'{{"messages": [{USER}, {REPLY[:-1]}, "reasoning_content": "c"}}]}}': "no reasoning_content",
    # OpenAI's tools need no parameters; the tiny template does.
    f'{GOOD[:-1]}, "tools": [{{"function": {{"name": "f"}}}}]}}': "the chat template: 'dict",
    LONG: "tokens; --max-length is 512",
}


def test_all_bad_lines_are_listed_by_number(tmp_path):
    for line, words in BAD_LINES.items():
        file = written(tmp_path, "my.jsonl", f"{GOOD}\n\n{line}\n{GOOD}\n")
        with pytest.raises(ValueError) as caught:
            sft.read_demonstrations(file, TOKENIZER, 512)
        heading, listed = str(caught.value).split("\n")
        assert heading == f"{file}: 1 of 3 lines cannot be learned from"
        assert listed.startswith("  line 3: ") and words in listed, line
    text = "\n".join([*BAD_LINES, GOOD]) + "\n"
    with pytest.raises(ValueError) as caught:
        sft.read_demonstrations(written(tmp_path, "my.jsonl", text), TOKENIZER, 512)
    _, *listed, last = str(caught.value).split("\n")
    assert [int(line.split()[1][:-1]) for line in listed] == list(range(1, sft.MAX_LISTED + 1))
    assert last == f"  and {len(BAD_LINES) - sft.MAX_LISTED} more"


def refusal(arguments: list) -> str:
    with pytest.raises(SystemExit) as caught:
        sft.main([str(argument) for argument in arguments])
    assert caught.value.code not in (0, None)
    return str(caught.value.code)


@pytest.mark.parametrize(
    "lines, flags, words",
    [
        ("{}\n" + GOOD, [], ["my.jsonl", "1 of 2 lines", "line 1"]),
        ("\n", [], ["my.jsonl", "empty"]),
        (GOOD, [], ["my.jsonl", "--eval-data"]),
        (f"{GOOD}\n{GOOD}", ["--corpus", "x.jsonl"], ["--corpus", "--environment"]),
        (f"{GOOD}\n{GOOD}", ["--max-length", "2000"], ["--max-length 2000", "1024"]),
        (f"{GOOD}\n{GOOD}", ["--batch-size", "0"], ["--batch-size", "positive"]),
        (f"{GOOD}\n{GOOD}", ["--eval-data", "no.jsonl"], ["no.jsonl", "No such file"]),
        (f"{GOOD}\n{GOOD}", ["--resume"], ["no run to resume"]),
    ],
)
def test_bad_input_is_told_before_a_directory_is_made(tmp_path, lines, flags, words):
    data = written(tmp_path, "my.jsonl", lines)
    message = refusal(["--data", data, "--output", tmp_path / "run", *flags])
    assert message.startswith("sft.py: ") and not (tmp_path / "run").exists()
    for word in words:
        assert word in message


# --- the loss -------------------------------------------------------------------------------------


@given(seeds, st.integers(1, 100))
def test_the_loss_is_the_cross_entropy_of_the_marked_tokens_however_they_are_split(seed, tokens):
    model = tiny_model(tiny_config(), seed)
    inject_lora(model, LoRAConfig(rank=2, alpha=4.0))
    randomise_adapter(model, seed)
    parameters = list(lora_parameters(model).values())
    episodes = [episode for episode, _ in random_pairs(seed, model.config.vocab_size)]

    logits = [model(torch.tensor([episode.token_ids]))[0, :-1] for episode in episodes]
    labels = [
        torch.tensor([t if m else -100 for t, m in zip(e.token_ids, e.loss_mask, strict=True)][1:])
        for e in episodes
    ]
    naive = F.cross_entropy(torch.cat(logits), torch.cat(labels), ignore_index=-100)
    expected = torch.autograd.grad(naive, parameters)

    metrics = sft.pass_over(model, sft.in_batches(episodes, sft.SFTConfig(micro_tokens=tokens)))
    assert metrics["loss"] == pytest.approx(naive.item(), abs=1e-5)
    assert metrics["tokens_trained"] == sum(sum(episode.loss_mask) for episode in episodes)
    for parameter, gradient in zip(parameters, expected, strict=True):
        close(parameter.grad, gradient)


def test_validation_is_without_dropout_and_leaves_no_gradient():
    model = tiny_model()
    inject_lora(model, LoRAConfig(rank=2, dropout=0.9))
    randomise_adapter(model)
    episodes = [episode for episode, _ in random_pairs(0, model.config.vocab_size)]
    losses = {sft.validation_loss(model, episodes, sft.SFTConfig()) for _ in range(3)}
    assert len(losses) == 1 and model.training
    assert all(parameter.grad is None for parameter in lora_parameters(model).values())


# --- runs -----------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("run.plot", lambda run, *_: (run.directory / "loss.png").touch())


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The fields of a run of a second; dropout's random state is part of what is resumed."""
    directory = tmp_path_factory.mktemp("small")
    fields = {"model": str(one_layer_base(directory))}
    for field, name, lines in (
        ("data", "demonstrations", 12),
        ("eval_data", "eval_demonstrations", 3),
        ("eval_questions", "eval_questions", 3),
    ):
        text = (WIKI / f"{name}.jsonl").read_text().splitlines(keepends=True)[:lines]
        fields[field] = str(written(directory, f"{name}.jsonl", "".join(text)))
    return fields | {
        "environment": "wiki_search",
        "corpus": str(WIKI / "eval_corpus.jsonl"),
        "dropout": 0.2,
        "steps": 4,
        "batch_size": 5,
        "eval_every": 2,
        "save_every": 1,
        "eval_size": 3,
        "max_turns": 2,
        "max_new_tokens": 8,
        "slots": 4,
    }


def go(output: Path, fields: dict, **more) -> Path:
    asyncio.run(sft.train(sft.SFTConfig(**fields | more, output=str(output))))
    return output


@pytest.fixture(scope="module")
def straight(tmp_path_factory, small):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        return go(tmp_path_factory.mktemp("runs") / "straight", small)


def test_a_run_leaves_what_one_of_reinforcement_learning_does(straight, small):
    assert {path.name for path in straight.iterdir()} == {
        *("config.toml", "run.json", "metrics.jsonl", "samples.jsonl", "summary.json", ".lock"),
        *("loss.png", "broadcasts", "checkpoints", "adapter"),
    }
    assert (straight / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoints(straight) == ["step_000003", "step_000004"]
    config = read_toml(straight / "config.toml", sft.SFTConfig)
    assert sft.SFTConfig(**config) == sft.SFTConfig(**small)
    rows = rows_of(straight)
    assert [(row["step"], row["eval_loss"] is None) for row in rows] == [
        (1, True),
        (2, False),
        (3, True),
        (4, False),
    ]
    assert all(row["grad_norm"] > 0 and row["tokens_trained"] > 0 for row in rows)
    summary = json.loads((straight / "summary.json").read_text())
    assert summary["loss_after"] == rows[-1]["eval_loss"] < summary["loss_before"]
    assert 0 <= summary["eval_after"] <= 1 and sum(summary["outcomes_after"].values()) == 3
    for row in rows_of(straight, "samples.jsonl"):
        assert len(row["token_ids"]) == len(row["loss_mask"]) == len(row["logprobs"])
        spoken = [p for p, mask in zip(row["logprobs"], row["loss_mask"], strict=True) if mask]
        assert all(p <= 0 for p in spoken) and min(spoken) < 0
    _, tensors = broadcast.read_adapter(straight / "adapter")
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_resumed_is_uninterrupted(tmp_path, small, straight, monkeypatch, number):
    output, append_row = tmp_path / "run", sft.append_row

    def then_signal(file, row):
        append_row(file, row)
        if file.name == "metrics.jsonl" and row["step"] == 3:
            os.kill(os.getpid(), number)

    (tmp_path / "c.toml").write_text(to_toml(sft.SFTConfig(**small)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # "pytest &" ignores it
    with monkeypatch.context() as patch:
        patch.setattr(sft, "append_row", then_signal)
        assert refusal(["--config", tmp_path / "c.toml", "--output", output]) == "130"
    signal.signal(signal.SIGINT, before)
    assert checkpoints(output)[-1] == "step_000003"
    assert json.loads((output / "summary.json").read_text())["loss_before"] > 0
    sft.main(["--output", str(output), "--resume"])
    assert_equal_runs(output, straight, 4)


def test_killed_between_checkpoints_it_repeats_what_came_after(
    tmp_path, small, straight, monkeypatch
):
    output = tmp_path / "run"

    def killed(*arguments):
        raise KeyboardInterrupt  # and finish, which would save, is not reached either

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sft, "finish", lambda *_: None)
        patch.setattr(sft, "step_line", lambda row, *_: killed() if row["step"] == 3 else "")
        go(output, small, save_every=2)
    assert checkpoints(output) == ["step_000002"] and len(rows_of(output)) == 3
    sft.main(["--output", str(output), "--resume"])
    assert_equal_runs(output, straight, 4)


@pytest.mark.parametrize(
    "mode, left", [({"full": True, "lr": 1e-4}, "model"), ({"quantize": "nf4"}, "adapter")]
)
def test_every_weight_or_a_4_bit_base_is_taught_and_resumed_too(
    tmp_path, small, capsys, mode, left
):
    output = go(tmp_path / "run", small | {"dropout": 0.0}, **mode, steps=2)
    sft.main(["--output", str(output), "--resume", "--steps", "3"])
    assert [row["step"] for row in rows_of(output)] == [1, 2, 3]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["loss_after"] < summary["loss_before"] and summary["eval_after"] is not None
    assert (output / left).is_dir()
    # The viewer shows episodes that were sampled, and would take these rows for damaged ones.
    last = capsys.readouterr().out.split("held out")[-1]
    assert f"see {output}/loss.png, samples.jsonl\n" in last


def test_a_runs_directory_says_what_was_trained():
    assert run_name(sft.SFTConfig(rank=4), "sft") == "sft-rank4-seed0"
    assert run_name(sft.SFTConfig(full=True), "sft") == "sft-full-seed0"


def test_data_of_ones_own_is_split_and_plays_no_environment(tmp_path, small):
    lines = [json.dumps({"prompt": f"{i}?", "completion": str(i)}) for i in range(21)]
    data = written(tmp_path, "my.jsonl", "\n".join(lines))
    fields = {"model": small["model"], "data": str(data), "steps": 1, "output": str(tmp_path / "r")}
    trainer, kept, held_out = sft.set_up(sft.SFTConfig(**fields))
    assert trainer.engine is None and trainer.environment is None
    assert [demonstration.task.answer for demonstration in held_out] == ["0", "10", "20"]
    assert len(kept) == 18 and not {id(d) for d in kept} & {id(d) for d in held_out}
    asyncio.run(sft.train(sft.SFTConfig(**fields | {"output": str(tmp_path / "run")})))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["loss_after"] > 0 and summary["eval_after"] is None


def test_the_shipped_demonstrations_are_the_default_and_fit():
    data, validation = sft.load_data(sft.SFTConfig(), TOKENIZER)
    assert len(data) == 240 and len(validation) == 48
    questions = {demonstration.task.question for demonstration in data}
    assert not questions & {demonstration.task.question for demonstration in validation}


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        sft.main(["--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert_documented(printed, sft.SFTConfig, RunConfig)


def test_prime_rls_lora_table_is_read_as_it_stands(tmp_path):
    text = 'batch_size = 2\n[model.lora]\nrank = 4\nalpha = 16\ntarget_modules = ["q_proj"]\n'
    file = written(tmp_path, "sft.toml", text)
    config = train.parse_config(["--config", str(file), "--steps", "3"], sft.SFTConfig)
    assert config == sft.SFTConfig(
        batch_size=2, rank=4, alpha=16.0, target_modules=("q_proj",), steps=3
    )


@pytest.mark.slow
def test_demonstrations_teach_and_reinforcement_learning_goes_on_from_there(tmp_path, monkeypatch):
    monkeypatch.undo()
    sft.main(["--steps", "8", "--eval-size", "128", "--output", str(tmp_path / "sft")])
    taught = json.loads((tmp_path / "sft" / "summary.json").read_text())
    assert taught["loss_after"] < 0.5 * taught["loss_before"]
    assert taught["eval_before"] <= 0.5 and taught["eval_after"] >= taught["eval_before"] + 0.2
    flags = ["--steps", "2", "--group-size", "4", "--eval-size", "128", "--kl", "0.01"]
    adapter = str(tmp_path / "sft" / "adapter")
    train.main(["--init-adapter", adapter, *flags, "--output", str(tmp_path / "rl")])
    summary = json.loads((tmp_path / "rl" / "summary.json").read_text())
    rows = rows_of(tmp_path / "rl")
    assert summary["eval_before"] == taught["eval_after"]
    assert rows[0]["reward"] > taught["eval_before"] + 0.2
    assert rows[0]["reference_kl"] == 0 < rows[1]["reference_kl"]
