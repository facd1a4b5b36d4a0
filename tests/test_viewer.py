"""tools/viewer.py: the page shows every token for what it is, and the conversation is an episode.

Pages are read back by Python's HTML parser, so what is compared is what a browser would show.
"""

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import randomise_adapter, seeds

from broadcast import save_adapter
from chat import load_tokenizer
from config import Config
from environments import Task
from lora import LoRAConfig, adapter_disabled, inject_lora
from model import Qwen3
from quant import quantize_base
from rollout import TorchEngine, Trajectory, run_episode
from run import sample_row
from tools import viewer
from train import load_environments

ROOT = Path(viewer.__file__).parent.parent
BASE = ROOT / "assets" / "tiny-qwen3"
TOKENIZER = load_tokenizer(BASE)
EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)> \"'&amp; {{facts}} </details>"


# --- pages ----------------------------------------------------------------------------------------


def row(ids=(5, 6, 7), mask=(0, 1, 1), **fields) -> dict:
    """A row of samples.jsonl as train.py writes it."""
    tokens = len(ids)
    messages = [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "There."}]
    return {
        **{"step": 1, "version": 0, "question": "Where?", "answer": "There.", "reward": 1.0},
        **{"advantage": 0.5, "outcome": "solved", "finish_reason": "answered"},
        **{"messages": messages, "token_ids": list(ids), "loss_mask": list(mask)},
        **{"logprobs": [-0.5 * m for m in mask], "log_ratios": [0.0] * tokens},
        **fields,
    }


def run_of(directory: Path, rows: list[dict]) -> Path:
    """What a run leaves, as far as its page needs it."""
    directory.mkdir(exist_ok=True)
    (directory / "config.toml").write_text(f"model = {json.dumps(str(BASE))}\nrank = 8\n")
    metrics = [{"step": step, "reward": 0.5} for step in sorted({row["step"] for row in rows})]
    for name, lines in (("metrics", metrics), ("samples", rows)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (directory / f"{name}.jsonl").write_text(text)
    return directory


class Page(HTMLParser):
    """A page as read: tags, attributes, texts by tag or class, and the tokens of each episode."""

    def __init__(self, text: str):
        super().__init__()
        self.tags, self.attributes, self.episodes, self.open = [], [], [], []
        self.texts = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attributes]
        attributes = dict(attributes)
        if tag not in ("meta", "path", "polyline", "line"):
            self.open.append((tag, attributes.get("class", "")))
        if tag == "article":
            self.episodes.append([])
        if tag in "bi" and self.open[-2:-1] == [("div", "stream")]:
            self.episodes[-1].append([tag, "", attributes])

    def handle_endtag(self, tag):
        if self.open and self.open[-1][0] == tag:
            self.open.pop()

    def handle_data(self, text):
        for key in self.open[-1] if self.open else ():
            self.texts.setdefault(key, []).append(text)
        if self.open and self.open[-1][0] in "bi" and self.open[-2] == ("div", "stream"):
            self.episodes[-1][-1][1] += text


def page_of(run: Path) -> Page:
    return Page(viewer.write_page(run).read_text())


ids = st.integers(0, TOKENIZER.tokenizer.get_vocab_size() - 1)
logprobs = st.floats(-30, 0)
tokens = st.tuples(ids, st.booleans(), logprobs, st.floats(-3, 3))


@settings(max_examples=15)
@given(episodes=st.lists(st.lists(tokens, min_size=1, max_size=30), min_size=1, max_size=4))
def test_every_token_is_there_in_order_as_what_it_is(tmp_path_factory, episodes):
    rows = []
    for number, episode in enumerate(episodes):
        token_ids, mask, logprobs, ratios = (list(column) for column in zip(*episode, strict=True))
        mask = [int(sampled) for sampled in mask]
        rows.append(
            row(token_ids, mask, logprobs=logprobs, log_ratios=ratios, step=1 + number // 2)
        )
    page = page_of(run_of(tmp_path_factory.mktemp("run"), rows))
    assert len(page.episodes) == len(rows)
    for shown, expected in zip(page.episodes, rows, strict=True):
        assert [tag == "b" for tag, *_ in shown] == [m == 1 for m in expected["loss_mask"]]
        runs = groupby(zip(shown, expected["token_ids"], strict=True), lambda pair: pair[0][0])
        for _, group in runs:
            pairs = list(group)
            text = "".join(token[1] for token, _ in pairs)
            whole = TOKENIZER.decode([token for _, token in pairs])
            if "\ufffd" in whole:  # bytes that make up no character spoil their neighbours as well
                continue
            assert text.splitlines() == whole.replace("\0", "\ufffd").splitlines()  # \r is \n there
        values = zip(shown, expected["logprobs"], expected["log_ratios"], strict=True)
        for (tag, _, attributes), logprob, ratio in values:
            assert ("data-l" in attributes) == (tag == "b")
            if tag == "b":
                assert float(attributes["data-l"]) == pytest.approx(logprob, abs=1e-4)
                bounds = viewer.PROBABILITIES
                colour = f"p{sum(viewer.math.exp(logprob) >= bound for bound in bounds)}"
                assert colour in attributes["class"].split()
                assert float(attributes["data-r"]) == pytest.approx(
                    viewer.math.exp(ratio), abs=1e-4
                )


def test_a_character_of_several_tokens_appears_once():
    text = "Zoë 日本"
    ids = TOKENIZER.encode(text)
    texts = viewer.token_texts(TOKENIZER, ids)
    assert len(texts) == len(ids) and "" in texts
    assert "".join(texts) == text and "\ufffd" not in "".join(texts)
    cut = viewer.token_texts(TOKENIZER, ids[:-1])
    assert len(cut) == len(ids) - 1 and cut[-1].endswith("\ufffd")


def test_the_page_loads_nothing(tmp_path):
    run = run_of(tmp_path / "run", [row(), row(step=2)])
    text = viewer.write_page(run).read_text()
    page = Page(text)
    assert not {"link", "img", "iframe", "base", "object"} & set(page.tags)
    assert not [a for a in page.attributes if a[1] in ("src", "href", "action", "style")]
    for loads in ("http:", "https:", "@import", "url(", "fetch(", "import(", "XMLHttp", "{{"):
        assert loads not in text
    assert "default-src 'none'" in text  # and the browser would refuse


def test_what_a_model_or_a_page_wrote_stays_text(tmp_path):
    messages = [
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": f"<tool_call>{EVIL}</tool_call>"},
        {"role": "tool", "content": EVIL},
        {"role": "assistant", "content": EVIL},
    ]
    evil = TOKENIZER.encode(EVIL)
    mask = [0] * len(evil) + [1] * len(evil) + [0] * len(evil) + [1] * len(evil)
    strings = dict.fromkeys(("question", "answer", "outcome", "finish_reason"), EVIL)
    harmless = page_of(run_of(tmp_path / "harmless", [row(evil * 4, mask)]))
    run = run_of(tmp_path / "a<b>&", [row(evil * 4, mask, messages=messages, **strings)])
    (run / "config.toml").write_text(
        f"model = {json.dumps(str(BASE))}\nloss = {json.dumps(EVIL)}\n"
    )
    page = page_of(run)
    assert page.tags == harmless.tags and page.tags.count("script") == 1
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]
    assert EVIL in page.texts["h3"] and f"expected: {EVIL}" in page.texts["answer"]
    assert page.texts["dd"].count(EVIL) == 2 and page.texts["h1"] == ["a<b>&"]
    assert "".join(text for _, text, _ in page.episodes[0]) == EVIL * 4
    said = " ".join(EVIL.split())
    assert page.texts["said"] == [said] * 4


def test_a_row_of_an_older_run_shows_what_it_has(tmp_path):
    old = row()
    for name in ("version", "outcome", "log_ratios"):
        del old[name]
    page = page_of(run_of(tmp_path / "run", [old]))
    assert [tag for tag, *_ in page.episodes[0]] == ["i", "b", "b"]
    assert all("data-r" not in attributes for *_, attributes in page.episodes[0])
    assert "not recorded" in page.texts["dd"] and "outcome" not in page.texts["dt"]
    page = page_of(run_of(tmp_path / "run", [row(log_ratios=[])]))
    assert "none: not trained on" in page.texts["dd"]


def test_segments_are_told_by_what_they_say(tmp_path):
    call = '<tool_call>\n{"name": "search_pages", "arguments": {"query": "Norda"}}\n</tool_call>'
    messages = [
        *({"role": "system", "content": "Help."}, {"role": "user", "content": "Where is Norda?"}),
        {"role": "assistant", "content": call},
        {"role": "tool", "content": "[1]"},
        {"role": "assistant", "content": "There"},
    ]
    mask = [0, 0, 1, 1, 0, 1]
    page = page_of(run_of(tmp_path / "run", [row(range(6), mask, messages=messages)]))
    assert page.texts["what"] == ["prompt", "call", "result", "reply"]
    assert page.texts["said"] == ["Where is Norda?", 'search_pages(query="Norda")', "[1]", "There"]
    assert page.texts["count"] == ["2 forced", "2 sampled", "1 forced", "1 sampled"]
    opened = [attribute[2] for attribute in page.attributes if attribute[0] == "details"]
    assert opened == ["forced", "sampled", None, "forced", "sampled", None]  # None: open


# --- damage ---------------------------------------------------------------------------------------


def refusal(*arguments) -> str:
    with pytest.raises(SystemExit) as caught:
        viewer.main([str(argument) for argument in arguments])
    assert str(caught.value.code).startswith("viewer.py: ")
    return str(caught.value.code)


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "samples.jsonl"])
def test_a_missing_or_spoilt_file_is_named(tmp_path, name):
    run = run_of(tmp_path / "run", [row()])
    deep = b"[" * 100_000 + b"\n"
    for spoil in (b"\xff\xfe{\n", b"[1, 2\n", b'{"step": "one"}\n', deep, None):
        (run / name).unlink() if spoil is None else (run / name).write_bytes(spoil)
        assert str(run / name) in refusal(run)
        assert not (run / "trajectories.html").exists()


def test_a_model_that_is_no_text_is_named(tmp_path):
    run = run_of(tmp_path / "run", [row()])
    (run / "config.toml").write_text("model = 5\n")
    assert f"{run / 'config.toml'}: model must be text, not 5" in refusal(run)


@pytest.mark.parametrize(
    "fields",
    [
        {"loss_mask": [0, 1]},
        {"loss_mask": [0, 1, 2]},
        {"logprobs": [0.0, float("nan"), 0.0]},
        {"logprobs": [0.0, None, 0.0]},
        {"log_ratios": [0.0]},
        {"log_ratios": [0.0, 0.0, 1e5]},
        {"token_ids": [5, -6, 7]},
        {"token_ids": [5, "6", 7]},
        {"messages": ["Where?"]},
        {"messages": [{"content": "Where?"}]},
        {"messages": [{"role": [], "content": "Where?"}]},
        {"reward": float("nan")},
        {"reward": "1"},
        {"step": None},
    ],
)
def test_a_damaged_row_is_named_by_file_and_line(tmp_path, fields):
    run = run_of(tmp_path / "run", [row()])
    with (run / "samples.jsonl").open("a") as stream:
        stream.write(json.dumps(row() | fields) + "\n")
    assert f"{run / 'samples.jsonl'}, line 2: damaged" in refusal(run)


def test_a_row_that_a_run_is_writing_is_left_for_later(tmp_path):
    run = run_of(tmp_path / "run", [row()])
    with (run / "samples.jsonl").open("a") as stream:
        stream.write('{"step": 2, "quest')
    assert len(page_of(run).episodes) == 1
    (run / "samples.jsonl").write_text("")
    assert "samples.jsonl: empty" in refusal(run)


def test_a_checkpoint_that_moved_is_named_and_can_be_pointed_to(tmp_path):
    run = run_of(tmp_path / "run", [row()])
    (run / "config.toml").write_text('model = "/gone/tiny"\n')
    message = refusal(run)
    assert "/gone/tiny" in message and "--model" in message
    viewer.main([str(run), "--model", str(BASE)])
    assert (run / "trajectories.html").exists()


# --- what train.py records ------------------------------------------------------------------------


def test_a_recorded_row_has_the_ratio_of_every_token():
    task = Task("1", "Where?", "There.")
    episode = Trajectory(task, "adapter", 3, [], [5, 6], [0, 1], [0.0, -0.25])
    run = SimpleNamespace(step=4)
    assert sample_row(run, episode, 0.5, "solved")["log_ratios"] == []
    episode.trainer_logprobs = [0.0, -0.5]
    recorded = sample_row(run, episode, 0.5, "solved")
    assert recorded["log_ratios"] == [0.0, -0.25]
    assert (recorded["version"], recorded["outcome"]) == (3, "solved")


# --- the conversation -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    """A random adapter of the shipped base, in a run whose turns are short."""
    run = tmp_path_factory.mktemp("runs") / "x"
    run.mkdir()
    (run / "config.toml").write_text(
        f"model = {json.dumps(str(BASE))}\nmax_turns = 3\nmax_new_tokens = 24\nweight_decay = 0.1\n"
    )
    model, lora = Qwen3.from_pretrained(BASE), LoRAConfig()
    inject_lora(model, lora)
    randomise_adapter(model, seed=1, size=2.0)
    return save_adapter(model, lora, run / "adapter", str(BASE))


def test_a_conversation_answers_as_the_adapter_and_the_base_alone_do(adapter):
    """Greedy episodes of both at once equal those of engines that hold nothing else."""
    chat = viewer.Chat(adapter)
    tasks = [*chat.environment.eval[:2], Task("chat", "Who is the mayor of Nowhere?", "")]
    pairs = [asyncio.run(chat.ask(chat.task(task.question))) for task in tasks]
    for place, name in enumerate(("alone", None)):
        engine = TorchEngine(Qwen3.from_pretrained(BASE), slots=1, max_length=512)
        if name:
            engine.add_adapter(name, adapter)
        for task, pair in zip(tasks, pairs, strict=True):
            options = {"adapter": name, "version": 0, "temperature": 0.0, "seed": 7}
            options |= {"max_turns": 3, "max_new_tokens": 24}
            episode = run_episode(engine, chat.tokenizer, chat.environment, task, **options)
            expected = asyncio.run(episode)
            assert pair[place].messages == expected.messages
            assert pair[place].token_ids == expected.token_ids
    assert all(adapted.token_ids != base.token_ids for adapted, base in pairs)


def test_a_conversation_is_with_the_base_that_the_run_had(adapter, tmp_path):
    shutil.copytree(adapter.parent, tmp_path / "run")
    with (tmp_path / "run" / "config.toml").open("a") as stream:
        stream.write('quantize = "nf4"\n')
    chat, base = viewer.Chat(tmp_path / "run" / "adapter"), Qwen3.from_pretrained(BASE)
    quantize_base(base)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), adapter_disabled(chat.engine.model):
        assert torch.equal(chat.engine.model(ids), base(ids))


TYPED = "2\n\nWho is \x1b[31m Nobody?\n" + "x" * 3000 + "\n"


def check_printed(printed: str, columns: int) -> None:
    held_out = load_environments(Config())[1].eval
    assert printed.count(held_out[1].question) == 2  # as an example, and as what was asked
    assert f"expected: {held_out[1].answer}" in printed
    assert printed.count("[adapter]") == printed.count("[base]") == 2
    assert printed.count(" │ [base]") == (2 if columns >= 80 else 0)
    assert "cannot be asked" in printed and "\x1b" not in printed


@pytest.mark.parametrize("columns", [120, 60])
def test_typed_on_standard_input_side_by_side_or_one_after_the_other(
    adapter, monkeypatch, capsys, columns
):
    monkeypatch.setattr(sys, "stdin", io.StringIO(TYPED))
    monkeypatch.setenv("COLUMNS", str(columns))
    viewer.main(["--chat", str(adapter)])
    check_printed(capsys.readouterr().out, columns)


@pytest.mark.slow
def test_the_commands_run_from_anywhere(adapter, tmp_path):
    command = [sys.executable, str(ROOT / "tools" / "viewer.py")]
    environment = os.environ | {"COLUMNS": "120"}
    options = {"env": environment, "cwd": tmp_path, "text": True, "check": True}
    run_of(tmp_path / "run", [row()])
    subprocess.run([*command, "run"], **options)
    assert (tmp_path / "run" / "trajectories.html").exists()
    chat = [*command, "--chat", str(adapter)]
    done = subprocess.run(chat, input=TYPED, capture_output=True, **options)
    check_printed(done.stdout, 120)


@given(seed=seeds, width=st.integers(20, 200))
def test_no_line_of_a_transcript_is_wider_than_the_terminal(seed, width):
    words = [f"{'word' * (1 + (seed + n) % 40)} tail" for n in range(5)]
    printed = viewer.side_by_side(words, words[:2], width)
    assert max(map(len, printed.splitlines())) <= width
    kept = "".join("".join(printed.split()).split("│"))
    assert len(kept) == sum(len("".join(word.split())) for word in words + words[:2])


def test_what_a_model_writes_cannot_drive_the_terminal():
    episode = Trajectory(
        Task("1", "?", ""), None, 0, [{"role": "tool", "content": "a\x1b[2Jb\n\x07c"}]
    )
    assert viewer.transcript("[base]", episode, "guessed")[1] == "   a?[2Jb ?c"


def test_settings_come_from_the_nearest_run_or_from_the_adapter(adapter, tmp_path):
    config, source = viewer.settings_above(adapter)
    assert (config.max_turns, config.max_new_tokens) == (3, 24) and "config.toml" in source
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in adapter.iterdir():
        (alone / file.name).write_bytes(file.read_bytes())
    config, source = viewer.settings_above(alone)
    assert config.model == str(BASE) and "defaults" in source
    # Of a supervised run, which may leave the environment to its data.
    (tmp_path / "config.toml").write_text('environment = ""\nbatch_size = 2\n')
    config, _ = viewer.settings_above(alone)
    assert config.environment == Config.environment


def test_an_adapter_that_is_none_is_named(adapter, tmp_path):
    assert str(tmp_path / "adapter_config.json") in refusal("--chat", tmp_path)
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    assert "adapter_model.safetensors" in refusal("--chat", tmp_path)
    for arguments in ([], [str(tmp_path), "--chat", str(adapter)]):
        with pytest.raises(SystemExit):
            viewer.main(arguments)
