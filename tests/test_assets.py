"""The tiny checkpoint and its wiki: made by their script, held out as promised, poor but able.

The tests marked `peers` need transformers.
"""

import json
import random
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from chat import load_tokenizer
from environments import tool_schema
from model import Qwen3

ASSETS = Path(__file__).resolve().parent.parent / "assets"
MODEL, WIKI = ASSETS / "tiny-qwen3", ASSETS / "tiny-wiki"
sys.path.insert(0, str(ASSETS))

import make_tiny_qwen3  # noqa: E402
import wiki  # noqa: E402


@pytest.fixture(scope="module")
def environment():
    return make_tiny_qwen3.held_out_world()


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


def test_wiki_and_tokenizer_are_those_of_the_script(tmp_path, monkeypatch):
    monkeypatch.setattr(make_tiny_qwen3, "WIKI", tmp_path / "wiki")
    monkeypatch.setattr(make_tiny_qwen3, "MODEL", tmp_path / "model")
    make_tiny_qwen3.main(data_only=True)
    for made in [*(tmp_path / "wiki").iterdir(), *(tmp_path / "model").iterdir()]:
        shipped = (WIKI if made.parent.name == "wiki" else MODEL) / made.name
        assert made.read_bytes() == shipped.read_bytes(), shipped


def names_in(file: str) -> set[str]:
    """Every name of the miniature that occurs anywhere in a file of the wiki."""
    names = {f"{h} {t}" for heads, tails in wiki.NAMES.values() for h in heads for t in tails}
    text = (WIKI / file).read_text()
    written = set(re.findall(r"(?=\b([A-Z]\w+ [A-Z]\w+)\b)", text))
    ids = set(re.findall(r"\b[a-z]+_[a-z]+\b", text))
    return {name for name in names if name in written or name.lower().replace(" ", "_") in ids}


def test_no_name_of_the_evaluation_occurs_in_training():
    files = ("corpus.jsonl", "questions.jsonl", "demonstrations.jsonl")
    train = set().union(*map(names_in, files))
    held_out = set().union(*(names_in(f"eval_{file}") for file in files))
    assert len(train) > 100 and len(held_out) > 100
    assert all(wiki.held_out(*name.split(" ")) for name in held_out)
    assert not any(wiki.held_out(*name.split(" ")) for name in train)


def test_demonstrations_use_no_held_out_name_and_three_in_five_have_a_flaw(tokenizer):
    rng = random.Random(1)
    world = wiki.make_world(rng, False)
    assert not any(wiki.held_out(*title.split(" ")) for title in world.pages)
    behaviours = [wiki.choose_behaviour(rng.choice(wiki.KINDS), rng) for _ in range(4000)]
    counts = Counter(behaviours)
    assert 0.5 < 1 - counts["sound"] / len(behaviours) < 0.7
    assert set(counts) == {"sound", *wiki.FLAWS}


def test_a_sound_demonstration_is_an_episode_that_the_environment_rewards(environment, tokenizer):
    """The demonstrator's tokens are those of run_episode, were its turns sampled."""
    rng = random.Random(2)
    world = wiki.make_world(rng, False)
    surroundings = make_tiny_qwen3.world_environment(world)
    for kind in wiki.KINDS:
        subject = rng.choice(world.subjects(kind))
        turns = list(wiki.demonstrate(world, subject, kind, "sound", rng))
        assert turns[-1] == world.answer(subject, kind)
        question = kind.wording.format(subject)
        ids, mask = wiki.as_tokens(tokenizer, surroundings, question, turns)
        spoken = [token for token, sampled in zip(ids, mask, strict=True) if sampled]
        assert tokenizer.decode(spoken) == "".join(turn + "<|im_end|>" for turn in turns)
        assert "error" not in tokenizer.decode(ids)


def test_names_are_two_tokens_wherever_they_stand(tokenizer):
    for heads, tails in wiki.NAMES.values():
        name = f"{heads[0]} {tails[0]}"
        ids = tokenizer.encode(name)
        assert len(ids) == 2
        for text in (f'"{name}"', f"Who founded {name}?", f"\n{name}\n", f"in {name}."):
            encoded = tokenizer.encode(text)
            assert any(encoded[i : i + 2] == ids for i in range(len(encoded)))


def test_any_text_survives_the_tokenizer(tokenizer):
    for text in ("plain", "ünïcödé 日本 🙂", 'a "quoted" {"json": [1, 2]}', "tabs\tand\r\nlines"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_the_base_is_poor_able_and_has_no_dominant_flaw(environment, tokenizer):
    model = Qwen3.from_pretrained(MODEL).requires_grad_(False)
    assert sum(p.numel() for p in model.parameters()) < 1.2e6
    episodes = make_tiny_qwen3.play_held_out(model, tokenizer, environment, 0.0)
    assert len(episodes) >= 256
    assert 0.25 <= sum(episode.reward for episode in episodes) / len(episodes) <= 0.45
    outcomes = Counter(environment.outcome(e.task, e.messages, e.reward) for e in episodes)
    failures = sum(outcomes.values()) - outcomes["solved"]
    for outcome, count in outcomes.items():
        assert outcome == "solved" or count <= failures / 2, outcome


@pytest.mark.peers
def test_transformers_loads_the_checkpoint_and_computes_the_same(environment, tokenizer):
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    ours = Qwen3.from_pretrained(MODEL)
    schemas = [tool_schema(tool) for tool in environment.tools]
    assert their_tokenizer.eos_token_id == tokenizer.end_of_turn_id
    for task in environment.eval[:8]:
        call = {"name": "search_pages", "arguments": {"query": "Norda Works"}}
        messages = environment.prompt(task) + [
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": json.dumps(environment.search_pages("Norda Works"))},
        ]
        for upto in (2, 3, 4):
            options = {"tools": schemas, "add_generation_prompt": upto != 3}
            text = their_tokenizer.apply_chat_template(messages[:upto], tokenize=False, **options)
            assert text == tokenizer.render(messages[:upto], schemas, upto != 3)
            ids = their_tokenizer(text, add_special_tokens=False)["input_ids"]
            assert ids == tokenizer.encode(text)
            assert their_tokenizer.decode(ids) == tokenizer.decode(ids) == text
        with torch.no_grad():
            input_ids = torch.tensor([ids])
            torch.testing.assert_close(ours(input_ids), theirs(input_ids).logits, atol=1e-4, rtol=0)
