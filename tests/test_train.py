"""train.py and run.py: the loop, what a run leaves, resuming, interruption, failure, bad input.

Most runs here take a second: one layer of the shipped base, which babbles, two short turns, and a
hash of an episode's tokens for its reward, so that every step has a gradient. The tests at the end
run the job as a user does.
"""

import ast
import asyncio
import contextlib
import dataclasses
import errno
import io
import itertools
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tiny import close, randomise_adapter, seeds, tiny_config, tiny_model

import broadcast
import distributed
import sft
import train
import update
from config import COMMANDS, Config, RunConfig, read_toml, to_toml
from grpo import LOSSES
from lora import LoRAConfig, inject_lora, lora_layers, lora_parameters, use_adapters
from model import Qwen3
from packing import pack
from rollout import Completion, Trajectory
from run import append_row, cut_back, random_state, set_random_state
from tools.rehearse import upcycle

ROOT = Path(train.__file__).parent
BASE = ROOT / "assets" / "tiny-qwen3"
WIKI = ROOT / "assets" / "tiny-wiki"
TIMES = ("seconds", "seconds_waiting", "sample_tokens_per_second", "train_tokens_per_second")


# --- short runs -----------------------------------------------------------------------------------


def hashed(episode: Trajectory) -> float:
    """A reward in [0, 1] that nearly every two episodes differ in."""
    return zlib.crc32(repr(episode.token_ids).encode()) / 2**32


def one_layer_base(directory: Path) -> Path:
    """The shipped checkpoint without its layers but the first."""
    base = directory / "one-layer"
    shutil.copytree(BASE, base)
    config = json.loads((base / "config.json").read_text()) | {"num_hidden_layers": 1}
    config.pop("layer_types", None)
    written(base, "config.json", json.dumps(config))
    tensors = safetensors.torch.load_file(base / "model.safetensors")
    kept = {n: t for n, t in tensors.items() if ".layers." not in n or ".layers.0." in n}
    safetensors.torch.save_file(kept, base / "model.safetensors")
    return base


def mixture_of(fields: dict, directory: Path) -> Path:
    """The same with four experts."""
    return upcycle(Path(fields["model"]), directory / "mixture")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The fields of a run of a second, and what it reads."""
    directory = tmp_path_factory.mktemp("small")
    for name, lines in (("questions", 12), ("eval_questions", 3)):
        text = (WIKI / f"{name}.jsonl").read_text().splitlines(keepends=True)[:lines]
        written(directory, f"{name}.jsonl", "".join(text))
    return {
        "model": str(one_layer_base(directory)),
        "questions": str(directory / "questions.jsonl"),
        "eval_questions": str(directory / "eval_questions.jsonl"),
        "eval_corpus": str(WIKI / "eval_corpus.jsonl"),
        "groups": 2,
        "group_size": 4,
        "temperature": 1.3,
        "max_turns": 2,
        "max_new_tokens": 8,
        "eval_size": 3,
        "slots": 8,
        "steps": 4,
        "save_every": 1,
    }


def replace_rewards(patch: pytest.MonkeyPatch, reward=hashed) -> None:
    original = train.run_groups

    async def run_groups(*arguments, **options):
        groups = await original(*arguments, **options)
        for episode in [episode for group in groups for episode in group]:
            episode.reward = reward(episode)
        return groups

    patch.setattr(train, "run_groups", run_groups)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """No waiting for the disk or for matplotlib; rewards of which every step learns."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("run.plot", lambda run, *_: (run.directory / "reward.png").touch())
    replace_rewards(monkeypatch)


def go(output: Path, fields: dict, **more) -> Path:
    asyncio.run(train.train(Config(**fields | more, output=str(output))))
    return output


def again(output: Path, *flags: str) -> None:
    """Resumes a run as its user would, by the configuration that it left."""
    train.main(["--config", f"{output}/config.toml", "--output", str(output), "--resume", *flags])


def refusal(arguments: list) -> str:
    """What `python train.py ARGUMENTS` ends with, which must be a nonzero exit."""
    with pytest.raises(SystemExit) as caught:
        train.main([str(argument) for argument in arguments])
    assert caught.value.code not in (0, None)
    return str(caught.value.code)


def rows_of(output: Path, file: str = "metrics.jsonl") -> list[dict]:
    rows = [json.loads(line) for line in (output / file).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key not in TIMES} for row in rows]


def rows_so_far(output: Path) -> list[dict]:
    return rows_of(output) if (output / "metrics.jsonl").is_file() else []


def contents(directory: Path) -> dict[str, bytes]:
    files = [path for path in sorted(directory.rglob("*")) if path.is_file()]
    return {str(file.relative_to(directory)): file.read_bytes() for file in files}


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


def state_of(output: Path, step: int):
    """All of a checkpoint but times and the names of its run."""
    directory = output / "checkpoints" / f"step_{step:06d}"
    state = torch.load(directory / "state.pt", weights_only=True)
    names = ("seconds", "run_id", "attempt", "directory", "eval_after")
    progress = {key: value for key, value in state["run"].items() if key not in names}
    groups = state["optimizer"]["param_groups"]
    moments = {
        (number, key): value.tolist()
        for number, moments in state["optimizer"]["state"].items()
        for key, value in moments.items()
    }
    return contents(directory / "adapter"), progress, groups, moments, state["torch"].tolist()


def assert_equal_runs(one: Path, other: Path, step: int) -> None:
    """Bit for bit: metrics, samples, adapter, and the checkpoint at the end."""
    assert rows_of(one) == rows_of(other)
    assert rows_of(one, "samples.jsonl") == rows_of(other, "samples.jsonl")
    assert contents(one / "adapter") == contents(other / "adapter")
    assert state_of(one, step) == state_of(other, step)
    keys = ("eval_before", "eval_after", "outcomes_after", "steps")
    summaries = [json.loads((output / "summary.json").read_text()) for output in (one, other)]
    assert [summaries[0][key] for key in keys] == [summaries[1][key] for key in keys]


def live_versions(output: Path) -> list[Path]:
    attempts = sorted((output / "broadcasts").iterdir())
    return [version for attempt in attempts for version in broadcast.list_published(attempt)]


def cancel_in(patch: pytest.MonkeyPatch, step: int, group_size: int) -> None:
    """Ctrl-C, as asyncio delivers it, when two episodes of that play are done, others under way."""
    original = train.run_groups

    async def run_groups(*arguments, **options):
        if (options["step"], arguments[4]) == (step, group_size):
            main, progress = asyncio.current_task(), options["progress"]

            def then_cancel(done, total):
                progress(done, total)
                if done == 2:
                    main.cancel()

            options["progress"] = then_cancel
        return await original(*arguments, **options)

    patch.setattr(train, "run_groups", run_groups)


def undisturbed(output: Path, fields: dict) -> SimpleNamespace:
    """A whole run, with all that it was made of; its picture is drawn."""
    seen = SimpleNamespace(output=output, printed=io.StringIO())
    original = train.set_up

    def set_up(config):
        seen.trainer = original(config)
        named = seen.trainer.model.named_parameters()
        seen.base = {name: p.clone() for name, p in named if ".lora_" not in name}
        return seen.trainer

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(seen.printed):
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setattr(train, "set_up", set_up)
        replace_rewards(patch)
        go(output, fields)
    return seen


@pytest.fixture(scope="module")
def straight(tmp_path_factory, small):
    return undisturbed(tmp_path_factory.mktemp("runs") / "straight", small)


# --- what a run leaves ----------------------------------------------------------------------------


def test_a_run_leaves_the_files_that_it_promises(straight):
    output = straight.output
    assert {path.name for path in output.iterdir()} == {
        *("config.toml", "run.json", "metrics.jsonl", "samples.jsonl", "summary.json"),
        *("reward.png", "broadcasts", "checkpoints", "adapter", ".lock"),
    }
    assert (output / "reward.png").read_bytes().startswith(b"\x89PNG")
    assert checkpoints(output) == ["step_000003", "step_000004"]
    assert not [path for path in output.rglob("*") if ".tmp" in path.name]
    assert all(row["token_ids"] for row in rows_of(output, "samples.jsonl"))


def test_the_saved_configuration_is_the_one_that_ran(straight, small):
    file = straight.output / "config.toml"
    assert train.parse_config(["--config", str(file)]) == Config(**small)


def test_a_row_of_metrics_has_every_column_and_versions_are_on_policy(straight):
    rows = [
        json.loads(line) for line in (straight.output / "metrics.jsonl").read_text().splitlines()
    ]
    promised = """step version reward eval_reward mismatch_kl mismatch_max reference_kl entropy loss
        grad_norm turns tokens_sampled tokens_trained reward_bits groups_skipped truncated
        staleness_max seconds sample_tokens_per_second train_tokens_per_second"""
    for number, row in enumerate(rows, start=1):
        assert set(promised.split()) <= set(row)
        assert (row["step"], row["version"], row["staleness_max"]) == (number, number - 1, 0)
        assert row["grad_norm"] > 0 and row["mismatch_max"] < 1e-4
        assert 0 < row["tokens_trained"] <= row["tokens_sampled"]
    assert len(rows) == 4
    assert rows[0]["reference_kl"] == 0 < rows[-1]["reference_kl"]  # B = 0 at first, then not


def test_samples_are_whole_groups_at_first_and_now_and_then_with_the_ratios_of_the_step(straight):
    rows = rows_of(straight.output, "samples.jsonl")
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 2 + [3] * 2 + [4] * 4
    for row in rows:
        assert row["version"] == row["step"] - 1
        assert row["outcome"] and len(row["log_ratios"]) == len(row["token_ids"])
        assert max(map(abs, row["log_ratios"])) < 1e-4  # on-policy
    assert len({row["question"] for row in rows if row["step"] == 4}) == 1


def test_the_summary_has_every_key(straight):
    summary = json.loads((straight.output / "summary.json").read_text())
    promised = """eval_before eval_after seconds steps adapter_parameters base_parameters
        adapter_bytes peak_memory_bytes"""
    assert set(promised.split()) <= set(summary)
    assert summary["steps"] == 4 and 0 <= summary["eval_before"] <= 1
    parameters = lora_parameters(straight.trainer.model).values()
    assert summary["adapter_parameters"] == sum(p.numel() for p in parameters)
    assert summary["base_parameters"] == sum(p.numel() for p in straight.base.values())
    file = straight.output / "adapter" / "adapter_model.safetensors"
    assert summary["adapter_bytes"] == file.stat().st_size
    assert 2e8 < summary["peak_memory_bytes"] < 1e11  # bytes, not kilobytes


def test_the_last_lines_tell_how_to_load_the_adapter(straight):
    page, ask, _, peft, vllm = straight.printed.getvalue().splitlines()[-5:]
    assert page.endswith(f"python tools/viewer.py {straight.output}")
    assert ask.endswith(f"python tools/viewer.py --chat {straight.output / 'adapter'}")
    assert "PeftModel.from_pretrained(" in peft and str(straight.output / "adapter") in peft
    assert (
        "vllm.entrypoints.openai.api_server --model" in vllm
        and str(straight.output / "adapter") in vllm
    )


def test_a_mixture_with_dense_layers_gets_no_peft_command(tmp_path, small, capsys):
    """PEFT would load the adapter without those layers' MLPs (tests/test_peers.py)."""
    base = tmp_path / "mixture"
    shutil.copytree(small["model"], base)
    raw = json.loads((base / "config.json").read_text()) | {"model_type": "qwen3_moe"}
    raw |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    written(base, "config.json", json.dumps(raw | {"mlp_only_layers": [0]}))
    go(tmp_path / "run", small, model=str(base), steps=1)
    printed = capsys.readouterr().out
    assert "PEFT will not load this adapter right" in printed and "PeftModel" not in printed
    go(tmp_path / "other", small, model=str(base), steps=1, target_modules=("q_proj",))
    printed = capsys.readouterr().out
    assert "PEFT will not" not in printed and "PeftModel" in printed


def test_the_adapter_to_deploy_is_the_last_version_that_was_published(straight):
    config, tensors = broadcast.read_adapter(straight.output / "adapter")
    assert (config.rank, config.alpha) == (8, 32.0)
    live = live_versions(straight.output)
    assert [path.name for path in live] == ["v000004"]
    _, published = broadcast.read_adapter(live[0])
    trained = lora_parameters(straight.trainer.model)
    assert tensors.keys() == published.keys() == trained.keys()
    for name in tensors:
        assert torch.equal(tensors[name], published[name])
        assert torch.equal(tensors[name], trained[name])
    assert any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)
    assert straight.trainer.engine.adapters == [straight.trainer.adapter]
    assert not straight.trainer.engine.lengths.any()  # no cache that another step could find


def test_no_bit_of_the_base_changes_in_a_run(straight):
    after = dict(straight.trainer.model.named_parameters())
    assert len(straight.base) > 10
    for name, tensor in straight.base.items():
        assert torch.equal(after[name], tensor), name
        assert not after[name].requires_grad and after[name].grad is None


def test_the_optimizer_holds_the_adapter_and_the_adapter_alone(tmp_path, small):
    trainer = train.set_up(Config(**small, output=str(tmp_path / "run")))
    adapter = {id(parameter) for parameter in lora_parameters(trainer.model).values()}
    groups = trainer.optimizer.param_groups
    assert {id(p) for group in groups for p in group["params"]} == adapter
    assert {id(p) for p in trainer.model.parameters() if p.requires_grad} == adapter
    assert adapter and len(adapter) < len(list(trainer.model.parameters()))


# --- the same again -------------------------------------------------------------------------------


def test_a_seed_repeats_its_run_bit_for_bit_and_another_seed_does_not(
    tmp_path, small, straight, monkeypatch
):
    one = go(tmp_path / "one", small, steps=3)
    assert rows_of(one) == rows_of(straight.output)[:3]
    assert state_of(one, 3) == state_of(straight.output, 3)
    seeds_of_draws, run_groups = [], train.run_groups
    monkeypatch.setattr(
        train, "run_groups", lambda *a, **o: seeds_of_draws.append(o["seed"]) or run_groups(*a, **o)
    )
    other = go(tmp_path / "other", small, steps=1, seed=1)
    assert set(seeds_of_draws) == {1}
    assert rows_of(other)[0] != rows_of(one)[0]
    assert state_of(other, 1)[0] != contents(one / "adapter")


def test_a_run_made_longer_is_the_long_run(tmp_path, small, straight):
    output = go(tmp_path / "run", small, steps=2)
    assert json.loads((output / "summary.json").read_text())["steps"] == 2
    again(output, "--steps", "4")
    assert_equal_runs(output, straight.output, 4)


def test_a_run_on_a_quantised_base_made_longer_is_the_long_run(tmp_path, small, straight):
    nf4 = small | {"quantize": "nf4"}
    long = undisturbed(tmp_path / "long", nf4 | {"steps": 3})
    output = go(tmp_path / "run", nf4, steps=2)
    again(output, "--steps", "3")
    assert_equal_runs(output, long.output, 3)
    assert rows_of(output)[0] != rows_of(straight.output)[0]  # it is another policy
    assert "BitsAndBytesConfig(load_in_4bit=True" in long.printed.getvalue()
    assert "BitsAndBytesConfig" not in straight.printed.getvalue()
    assert "quantize = 'nf4'" in refusal(["--output", output, "--resume", "--quantize", "none"])


@pytest.fixture(scope="module")
def hard(small):
    """All that could make a resumed run another one: dropout's random state, KL, evaluations."""
    return small | {"dropout": 0.2, "kl": 0.1, "eval_every": 1, "steps": 3, "groups": 1}


@pytest.fixture(scope="module")
def hard_straight(tmp_path_factory, hard):
    return undisturbed(tmp_path_factory.mktemp("runs") / "hard", hard)


@pytest.mark.parametrize("group_size", [4, 1])
def test_interrupted_and_resumed_is_uninterrupted(
    tmp_path, hard, hard_straight, monkeypatch, group_size
):
    """In the middle of a step's sampling, and of an evaluation."""
    output = tmp_path / "run"
    names = []
    add_adapter = train.TorchEngine.add_adapter
    with monkeypatch.context() as patch:
        patch.setattr(
            train.TorchEngine,
            "add_adapter",
            lambda self, name, path: names.append((name, path)) or add_adapter(self, name, path),
        )
        with patch.context() as interruption, pytest.raises(asyncio.CancelledError):
            cancel_in(interruption, step=2, group_size=group_size)
            go(output, hard)
        assert checkpoints(output) == ["step_000001", "step_000002"]
        assert [row["step"] for row in rows_of(output)] == [1, 2]
        summary = json.loads((output / "summary.json").read_text())
        assert (summary["steps"], summary["eval_after"]) == (2, None)
        broadcast.read_adapter(output / "adapter")
        again(output)
    assert_equal_runs(output, hard_straight.output, 3)
    assert [row["eval_reward"] is None for row in rows_of(output)] == [True, False, False]
    # 0, 1, 2, then 2 and 3 once more: a name or a path that serves twice would find stale caches.
    assert len(names) == 5 and all(len(set(column)) == 5 for column in zip(*names, strict=True))
    assert len(live_versions(output)) == 1


def test_killed_between_checkpoints_it_repeats_what_came_after(
    tmp_path, small, monkeypatch, straight
):
    output, fields = tmp_path / "run", small | {"save_every": 2}
    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        patch.setattr(train, "finish", lambda *_: None)  # kill -9 asks nobody
        cancel_in(patch, step=3, group_size=4)
        go(output, fields)
    assert checkpoints(output) == ["step_000002"]
    assert [row["step"] for row in rows_of(output)] == [1, 2, 3]
    with (output / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 4, "rew')
    again(output)
    assert_equal_runs(output, straight.output, 4)


def test_killed_while_rows_are_cut_back_the_file_stays_as_it_was(tmp_path, monkeypatch):
    file = written(tmp_path, "metrics.jsonl", '{"step": 1}\n{"step": 2}\n{"step": 3')
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        original = Path.write_bytes

        def killed(path, content):
            original(path, content[:5])
            raise KeyboardInterrupt

        patch.setattr(Path, "write_bytes", killed)
        cut_back(file, 2)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3'
    cut_back(file, 2)
    assert rows_of(tmp_path) == [{"step": 1}, {"step": 2}]


def test_a_row_ends_at_a_newline_alone(tmp_path):
    """JSON may hold the other ends of a line that Unicode knows; and a kill may halve a letter."""
    file = tmp_path / "samples.jsonl"
    append_row(file, {"step": 1, "question": "a\u2028b\u2029c\u0085d"})
    whole = file.read_bytes()
    file.write_bytes(whole + '{"step": 2, "question": "é'.encode()[:-1])
    cut_back(file, 1)
    assert file.read_bytes() == whole


def test_killed_before_the_first_checkpoint_it_starts_anew(tmp_path, small, monkeypatch, straight):
    output, fields = tmp_path / "run", small | {"save_every": 100}
    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        patch.setattr(train, "finish", lambda *_: None)
        cancel_in(patch, step=1, group_size=4)
        go(output, fields)
    again(output)
    assert_equal_runs(output, straight.output, 4)
    assert [path.parent.name for path in live_versions(output)] == ["attempt_2"]


def test_what_killed_attempts_had_half_written_is_removed(tmp_path, small, straight):
    output = go(tmp_path / "run", small, steps=2)
    attempt = output / "broadcasts" / "attempt_1"
    for name in ("..adapter.tmp.tmp-71", ".reference.tmp-71", "checkpoints/.step_000009.tmp"):
        (output / name / "deeper").mkdir(parents=True)
    for name in (".v000003.tmp-71", ".v000001.retired"):
        (attempt / name).mkdir(exist_ok=True)
        (attempt / name / "adapter_config.json").touch()
    (output / ".summary.json.tmp").touch()
    again(output, "--steps", "4")
    assert not [path for path in output.rglob("*") if ".tmp" in path.name]
    assert not contents(attempt)  # retired versions hold nothing
    assert_equal_runs(output, straight.output, 4)


def test_a_checkpoint_holds_the_random_state_of_the_gpu_too(monkeypatch):
    """Played by stand-ins: dropout on a GPU draws from a generator of its own."""
    model = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=torch.device("cuda"))]))
    states = [torch.tensor([1, 2], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: states[-1])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.append(state))
    saved = random_state(model)
    states.append(None)  # it went on
    set_random_state(model, saved)
    assert states[-1] is states[0]
    assert random_state(tiny_model()).keys() == {"torch"}


# --- from an adapter on ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_from_it(tmp_path_factory, small, straight):
    """A run from the adapter of another one, with all that could go wrong when it is resumed."""
    adapter = straight.output / "adapter"
    fields = small | {"init_adapter": str(adapter), "kl": 0.1, "steps": 3, "groups": 1}
    return undisturbed(tmp_path_factory.mktemp("runs") / "on", fields), fields


def test_a_run_from_an_adapter_starts_as_it_and_refers_to_it(
    tmp_path, on_from_it, straight, monkeypatch
):
    seen, fields = on_from_it
    adapter = straight.output / "adapter"
    start, original = [], train.loss_and_backward

    def spy(model, batches, *arguments):
        with torch.no_grad():
            mine = [model.token_logprobs(batch.ids, batch.mask)[0] for batch in batches]
            with update.reference_policy(model):
                its = [model.token_logprobs(batch.ids, batch.mask)[0] for batch in batches]
            with use_adapters(model, []):
                base = [model.token_logprobs(batch.ids, batch.mask)[0] for batch in batches]
        start.append((mine, its, base))
        return original(model, batches, *arguments)

    monkeypatch.setattr(train, "loss_and_backward", spy)
    output = go(tmp_path / "run", fields, steps=1)
    ((mine, its, base),) = start
    assert all(torch.equal(*pair) for pair in zip(mine, its, strict=True))
    assert not any(torch.equal(*pair) for pair in zip(its, base, strict=True))
    rows = rows_of(seen.output)
    assert rows[:1] == rows_of(output) and rows[0]["reference_kl"] == 0 < rows[1]["reference_kl"]
    assert "the adapter is its frozen copy" in seen.printed.getvalue()
    # What it started from is kept, and stays as it was while the adapter moved on.
    name = "adapter_model.safetensors"
    assert (output / "reference" / name).read_bytes() == (adapter / name).read_bytes()
    _, tensors = broadcast.read_adapter(adapter)
    for layer, module in lora_layers(seen.trainer.model).items():
        assert torch.equal(module.lora_B["reference"], tensors[f"{layer}.lora_B.weight"])
        assert not torch.equal(module.lora_B["trainable"], tensors[f"{layer}.lora_B.weight"])


def test_a_run_from_an_adapter_is_resumed_without_the_original(
    tmp_path, on_from_it, straight, monkeypatch
):
    seen, fields = on_from_it
    adapter, output = tmp_path / "adapter", tmp_path / "run"
    shutil.copytree(straight.output / "adapter", adapter)
    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        cancel_in(patch, step=2, group_size=4)
        go(output, fields, init_adapter=str(adapter))
    shutil.rmtree(adapter)
    again(output)
    assert_equal_runs(output, seen.output, 3)


def test_dropout_disturbs_no_self_check_of_a_run_from_an_adapter(tmp_path, on_from_it):
    _, fields = on_from_it
    go(tmp_path / "run", fields, steps=1, dropout=0.5)


def test_a_mixture_goes_on_from_an_adapter_too(tmp_path, small):
    """Whose experts PEFT's file knows by their projections' names."""
    model, lora = Qwen3.from_pretrained(mixture_of(small, tmp_path)), LoRAConfig()
    inject_lora(model, lora)
    randomise_adapter(model)
    adapter = broadcast.save_adapter(model, lora, tmp_path / "adapter")
    more = {"model": str(tmp_path / "mixture"), "init_adapter": str(adapter), "steps": 1}
    output = go(tmp_path / "run", small, **more)
    assert rows_of(output)[0]["reference_kl"] == 0
    name = "adapter_model.safetensors"
    assert (output / "reference" / name).read_bytes() == (adapter / name).read_bytes()


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--rank", "4"], ["--rank 8, not 4"]),
        (["--alpha", "8"], ["--alpha 32, not 8"]),
        (["--target-modules", "q_proj"], ["--target-modules down_proj", "not q_proj"]),
        (["--model", BASE], ["model.layers.1", "not in the file"]),
        (["--init-adapter", "nowhere"], ["nowhere/adapter_config.json", "no such file"]),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(tmp_path, small, straight, flags, words):
    (tmp_path / "c.toml").write_text(to_toml(Config(**small)))
    start = ["--config", tmp_path / "c.toml", "--init-adapter", straight.output / "adapter"]
    message = refusal([*start, "--output", tmp_path / "run", *flags])
    assert all(word in message for word in words) and not (tmp_path / "run").exists()


# --- the stages -----------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 4), seeds)
def test_every_epoch_visits_each_question_once(questions, groups, epochs, seed):
    tasks = list(range(questions))
    steps = range(-(-questions * epochs // groups))
    visited = [task for step in steps for task in train.tasks_of_step(tasks, step, groups, seed)]
    for epoch in range(epochs):
        assert sorted(visited[epoch * questions : (epoch + 1) * questions]) == tasks
    # From step and seed alone, whatever was asked before.
    later = train.tasks_of_step(tasks, len(steps) - 1, groups, seed)
    assert later == visited[-groups:] and tasks == list(range(questions))


def test_epochs_and_seeds_have_their_own_order():
    tasks = list(range(50))
    orders = [train.tasks_of_step(tasks, step, 50, seed) for step in (0, 1) for seed in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4


def random_pairs(seed: int, vocabulary: int) -> list[tuple[Trajectory, float]]:
    """(trajectory, advantage) of any lengths, many of which begin as another one; the sampler's
    logprobs are near those of a policy."""
    rng = random.Random(seed)
    pairs = []
    for _ in range(rng.randint(1, 6)):
        length = rng.randint(2, 20)
        mask = [0] + [rng.randint(0, 1) for _ in range(length - 2)] + [1]
        ids = rng.choice(pairs)[0].token_ids[: rng.randint(0, length)] if pairs else []
        ids = ids + [rng.randrange(vocabulary) for _ in mask[len(ids) :]]
        logprobs = [rng.uniform(-4, -2) * sampled for sampled in mask]
        pairs.append((Trajectory(None, None, 0, [], ids, mask, logprobs), rng.uniform(-1, 1)))
    return pairs


@given(
    seeds,
    st.integers(1, 100),
    st.integers(0, 5),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.7, 1.0]),
)
def test_splitting_order_and_padding_change_neither_loss_nor_gradient(
    seed, tokens, padding, loss, kl, temperature
):
    model = tiny_model(tiny_config(), seed)
    inject_lora(model, LoRAConfig(rank=2, alpha=4.0))
    randomise_adapter(model, seed)
    config = Config(loss=loss, kl=kl, temperature=temperature)
    pairs = random_pairs(seed, model.config.vocab_size)
    denominator = sum(sum(trajectory.loss_mask) for trajectory, _ in pairs)

    def results(batches):
        model.zero_grad(set_to_none=True)
        metrics = train.loss_and_backward(model, batches, denominator, config)
        if kl == 0:
            # Of one micro-batch: nothing else needs a reference.
            del metrics["reference_kl"], metrics["reference_max"]
        gradient = torch.cat([p.grad.flatten() for p in lora_parameters(model).values()])
        return metrics, gradient

    alone = [batch for pair in pairs for batch in train.micro_batches([pair], 1, "cpu")]
    expected, gradient = results(alone)
    assert expected["tokens_trained"] == denominator
    if loss in ("reinforce", "tis", "cispo"):  # the others may drop the gradient of every token
        assert gradient.abs().max() > 1e-4

    shuffled = random.Random(seed).sample(pairs, len(pairs))
    batches = train.micro_batches(shuffled, tokens, "cpu")
    computed = [len(pack(batch.ids, batch.mask).ids) for batch in batches]
    assert all(n <= tokens or len(b.ids) == 1 for n, b in zip(computed, batches, strict=True))
    for batch in batches:  # more padding, and nobody may look at it
        batch.ids = F.pad(batch.ids, (0, padding), value=seed % model.config.vocab_size)
        batch.mask = F.pad(batch.mask, (0, padding))
        batch.sampler_logprobs = F.pad(batch.sampler_logprobs, (0, padding), value=float("nan"))
    metrics, other_gradient = results(batches)
    close(other_gradient, gradient)
    assert metrics.keys() == expected.keys()
    for name in metrics:
        assert metrics[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name


@pytest.mark.parametrize("kl", [0.0, 0.1])
def test_groups_of_equal_reward_are_skipped_but_counted_and_kept_for_the_kl(
    tmp_path, small, monkeypatch, kl
):
    """Their tokens stay in the denominator either way."""
    seen = []
    run_groups, loss_and_backward = train.run_groups, train.loss_and_backward

    async def first_group_equal(*arguments, **options):
        groups = await run_groups(*arguments, **options)
        for episode in groups[0]:
            episode.reward = 0.1
        for number, episode in enumerate(groups[-1]):
            episode.reward = number / 4
        seen.append(groups)
        return groups

    def spy(model, batches, denominator, *arguments):
        seen.append((batches, denominator))
        return loss_and_backward(model, batches, denominator, *arguments)

    monkeypatch.setattr(train, "run_groups", first_group_equal)
    monkeypatch.setattr(train, "loss_and_backward", spy)
    output = go(tmp_path / "run", small, steps=1, kl=kl)
    _, groups, (batches, denominator), _ = seen
    sampled = [sum(sum(episode.loss_mask) for episode in group) for group in groups]
    assert denominator == sum(sampled)
    assert sum(len(batch.ids) for batch in batches) == (8 if kl else 4)
    advantages = sorted(a for batch in batches for a in batch.advantages.tolist())
    assert advantages == pytest.approx([-0.375, -0.125] + [0] * (4 if kl else 0) + [0.125, 0.375])
    for batch in batches:  # each episode has the advantage of its own place in its own group
        for episode, advantage in zip(batch.trajectories, batch.advantages.tolist(), strict=True):
            mean = 0.1 if any(episode is other for other in groups[0]) else 0.375
            assert advantage == pytest.approx(episode.reward - mean)
    (row,) = rows_of(output)
    assert row["groups_skipped"] == 1 and row["tokens_sampled"] == denominator
    assert row["tokens_trained"] == (sum(sampled) if kl else sampled[1])


def test_a_step_without_any_gradient_goes_on(tmp_path, small, monkeypatch):
    replace_rewards(monkeypatch, lambda episode: 0.5)
    output = go(tmp_path / "run", small, steps=2)
    for row in rows_of(output):
        assert (row["groups_skipped"], row["tokens_trained"], row["grad_norm"]) == (2, 0, 0)
    _, tensors = broadcast.read_adapter(output / "adapter")
    assert not any(tensor.any() for name, tensor in tensors.items() if "lora_B" in name)


def test_the_learning_rate_warms_up_and_the_gradient_is_clipped():
    model = tiny_model()
    inject_lora(model, LoRAConfig(rank=2))
    parameters = lora_parameters(model).values()
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    rates, config = [], Config(lr=0.1, warmup=3, max_grad_norm=0.5)
    for step in range(6):
        before = [parameter.detach().clone() for parameter in parameters]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        norm = update.optimizer_step(model, optimizer, step, config)
        assert norm == pytest.approx(sum(p.numel() for p in parameters) ** 0.5)
        moved = torch.cat(
            [(p.detach() - b).flatten() for p, b in zip(parameters, before, strict=True)]
        )
        rates.append(moved.norm().item() / 0.5)
        assert all(parameter.grad is None for parameter in parameters)
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1], rel=1e-3)


@given(
    st.sampled_from(["float32", "bfloat16"]),
    st.booleans(),
    st.floats(0.01, 3.0),
    st.integers(0, 30),
    seeds,
)
def test_a_sampler_that_stays_behind_is_found_once_the_trainer_has_moved_and_a_good_one_never(
    dtype, mixture, pace, stuck, seed
):
    """Logprobs of eight tokens that drift, and a sampler with noise of its own that stops at a
    version, the base or a later one."""
    enough, draw = update.PROBE_MOVED[dtype], random.Random(seed)
    directions = [draw.choice([-1, 1]) * draw.uniform(0.5, 1) for _ in range(8)]

    def trainer(version):
        return [-3 + version * pace * enough * direction for direction in directions]

    def sampler(version):
        noise = 0.1 * enough
        return [logprob + draw.uniform(-noise, noise) for logprob in trainer(version)]

    def probes(of_sampler):
        before, found = None, []
        for version in range(stuck + 1 + 2 * math.ceil(4 / pace)):
            answer = Completion([1] * 8, sampler(of_sampler(version)), "length")
            probe = update.Probe(version, answer, trainer(version), dtype, mixture)
            followed = probe.has_followed(before or probe)
            found.append(followed)
            if followed is False:
                break
            before = probe if followed or before is None else before
        return found

    assert False not in probes(lambda version: version)
    found = probes(lambda version: min(version, stuck))
    assert found[-1] is False and len(found) > stuck
    # Other tokens are those of another version.
    one, other = (Completion([token] * 8, trainer(0), "length") for token in (1, 2))
    first = update.Probe(0, one, trainer(0), dtype, mixture)
    assert update.Probe(9, other, trainer(9), dtype, mixture).has_followed(first)


# --- trainer and sampler --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, gap, tokens, agree",
    [
        ("float32", 2e-3, 1, False),
        ("bfloat16", 1.2, 1, True),  # one of 120, as where a router chose another expert
        ("bfloat16", 0.4, 120, False),
    ],
)
def test_the_self_check_forgives_single_tokens_in_bfloat16(dtype, gap, tokens, agree):
    model = tiny_model(tiny_config()).to(getattr(torch, dtype))
    inject_lora(model, LoRAConfig(rank=2))
    ids = torch.randint(23, (6, 21), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logprobs, _ = model.token_logprobs(ids, torch.ones(6, 20))
    logprobs.view(-1)[:tokens] += gap
    rows = zip(ids.tolist(), logprobs.tolist(), strict=True)
    episodes = [Trajectory(None, None, 0, [], i, [0] + [1] * 20, [0.0, *p]) for i, p in rows]
    check = lambda: update.self_check(model, episodes, Config(dtype=dtype))  # noqa: E731
    if agree:
        assert "differ by at most 1e+00" in check()
    else:
        with pytest.raises(RuntimeError, match="two policies"):
            check()


@pytest.mark.parametrize(
    "dtype, gaps, metric, bound",
    [
        ("float32", (2e-3, 5e-4), "mismatch_max", 1e-3),
        # Of all tokens, a KL of about gap^2 / 2: 5e-3, and 5e-4, whatever the largest gap.
        ("bfloat16", (0.1, 0.03), "mismatch_kl", 2e-3),
    ],
)
def test_a_mismatch_beyond_rounding_is_an_alarm_and_a_smaller_one_is_none(
    tmp_path, small, monkeypatch, capsys, dtype, gaps, metric, bound
):
    """Of two steps, in the first of which the sampler tells logprobs that are too far off."""
    run_groups = train.run_groups

    async def moved(*arguments, **options):
        groups = await run_groups(*arguments, **options)
        if options["temperature"]:  # not the greedy evaluation, whose gap would end the run
            for episode in [episode for group in groups for episode in group]:
                gap = gaps[options["step"]]
                pairs = zip(episode.logprobs, episode.loss_mask, strict=True)
                episode.logprobs = [logprob + gap * sampled for logprob, sampled in pairs]
        return groups

    monkeypatch.setattr(train, "run_groups", moved)
    far, near = rows_of(go(tmp_path / "run", small, steps=2, dtype=dtype))
    assert far[metric] > bound > near[metric] > 0
    said = [line for line in capsys.readouterr().err.splitlines() if "sampler differ" in line]
    alarm = f"{metric} is {far[metric]:.2g}, and rounding stays below {bound}; see experiments/"
    assert said == [f"trainer and sampler differ: {alarm}mismatch.md"]


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("tokens", [2, 8])
def test_the_probe_forgives_a_mixture_single_tokens(tmp_path, small, experts, tokens):
    """In the place of a server whose router chooses otherwise: some logprobs are moved."""
    more = {"model": str(mixture_of(small, tmp_path))} if experts else {}
    trainer = train.set_up(Config(**small | more, output=str(tmp_path / "run")))
    generate = trainer.engine.generate

    async def moved(request):
        answer = await generate(request)
        answer.logprobs[:tokens] = [logprob - 0.3 for logprob in answer.logprobs[:tokens]]
        return answer

    trainer.engine.generate = moved
    trainer.publish()
    if experts and tokens == 2:
        asyncio.run(trainer.probe())
    else:
        with pytest.raises(RuntimeError, match="another model or dtype"):
            asyncio.run(trainer.probe())
    trainer.run.release()


# --- failure --------------------------------------------------------------------------------------


def on_call(patch: pytest.MonkeyPatch, name: str, number: int, spoil) -> None:
    """After the number-th call of train.<name> or update.<name>, spoil(its first argument)."""
    module = train if hasattr(train, name) else update
    original, calls = getattr(module, name), []

    def spoiled(*arguments):
        result = original(*arguments)
        calls.append(1)
        if len(calls) == number:
            spoil(arguments[0])
        return result

    patch.setattr(module, name, spoiled)


def test_a_gradient_that_is_not_finite_stops_the_run_and_nothing_of_it_stays(
    tmp_path, small, monkeypatch, straight
):
    output = tmp_path / "run"
    bad = "model.layers.0.mlp.up_proj.lora_B.weight"

    def spoil(model):
        lora_parameters(model)[bad].grad[0, 0] = float("nan")

    (tmp_path / "c.toml").write_text(to_toml(Config(**small)))
    with monkeypatch.context() as patch:
        on_call(patch, "loss_and_backward", 3, spoil)
        message = refusal(["--config", tmp_path / "c.toml", "--output", output])
    assert "step 3" in message and bad in message and "\n" not in message
    assert [path.name for path in live_versions(output)] == ["v000002"]
    assert checkpoints(output) == ["step_000001", "step_000002"]
    for directory in (output / "adapter", live_versions(output)[0]):
        broadcast.read_adapter(directory)  # refuses what is not finite
    again(output)
    assert_equal_runs(output, straight.output, 4)


def test_an_adapter_that_is_not_finite_is_neither_published_nor_saved(
    tmp_path, small, monkeypatch, straight
):
    output = tmp_path / "run"
    bad = "model.layers.0.self_attn.q_proj.lora_A.weight"

    def spoil(model):
        lora_parameters(model)[bad].data[0, 0] = float("inf")

    (tmp_path / "c.toml").write_text(to_toml(Config(**small)))
    with monkeypatch.context() as patch:
        on_call(patch, "optimizer_step", 3, spoil)
        message = refusal(["--config", tmp_path / "c.toml", "--output", output])
    assert "step 3" in message and bad in message and "\n" not in message
    assert [path.name for path in live_versions(output)] == ["v000002"]
    assert checkpoints(output) == ["step_000001", "step_000002"]
    again(output)
    assert_equal_runs(output, straight.output, 4)


def test_half_a_step_is_no_step(tmp_path, small, monkeypatch, straight):
    """The memory, or a second Ctrl-C, ends it between two parameters: nothing of it is saved."""
    output, step = tmp_path / "run", torch.optim.Adam.step

    def halfway(optimizer):
        step(optimizer)
        if len(rows_so_far(output)) == 2:
            raise RuntimeError("out of memory")

    (tmp_path / "c.toml").write_text(to_toml(Config(**small | {"save_every": 100})))
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.Adam, "step", halfway)
        message = refusal(["--config", tmp_path / "c.toml", "--output", output])
    assert "step 3: out of memory" in message and not (output / "checkpoints").exists()
    again(output)
    assert_equal_runs(output, straight.output, 4)


def test_gradients_that_come_to_nothing_cost_no_step(tmp_path, small, monkeypatch):
    """A rank that dies before the optimizer has moved anything."""
    output = tmp_path / "run"

    def lose(ranks):
        if len(rows_so_far(output)) == 2:
            raise distributed.LostRank("another rank died")

    (tmp_path / "c.toml").write_text(to_toml(Config(**small | {"save_every": 100})))
    monkeypatch.setattr(distributed.Ranks, "reduce_gradients", lose)
    message = refusal(["--config", tmp_path / "c.toml", "--output", output])
    assert "step 3: another rank died" in message and checkpoints(output) == ["step_000002"]


@pytest.mark.parametrize(
    "place, lasting",
    [
        (".v000003.tmp-*/adapter_model.safetensors", True),
        (".v000003.tmp-*/adapter_model.safetensors", False),
        ("state.pt", False),
        ("metrics.jsonl", False),
    ],
)
def test_a_full_disk_costs_one_line_and_no_checkpoint(
    tmp_path, small, monkeypatch, straight, place, lasting
):
    """It fills in step 3, while the run writes to `place`, for good or for a moment."""
    output, steps, failures = tmp_path / "run", [], []
    (tmp_path / "c.toml").write_text(to_toml(Config(**small)))

    def guarded(method):
        def write(path, *arguments, **options):
            reads = method.__name__ == "open" and (*arguments, *options.values(), "r")[0][0] == "r"
            fails = lasting if failures else path.match(place)
            if output in path.parents and len(steps) == 3 and fails and not reads:
                failures.append(path)
                raise OSError(errno.ENOSPC, "No space left on device")
            return method(path, *arguments, **options)

        return write

    with monkeypatch.context() as patch:
        for number in (1, 2, 3):
            on_call(patch, "loss_and_backward", number, steps.append)
        for method in (Path.write_bytes, Path.write_text, Path.open):
            patch.setattr(Path, method.__name__, guarded(method))
        message = refusal(["--config", tmp_path / "c.toml", "--output", output])
    assert failures and "No space left on device" in message and str(output) in message
    assert "make room" in message and "--resume" in message and "\n" not in message
    assert "step_000002" in checkpoints(output)
    again(output)
    assert_equal_runs(output, straight.output, 4)
    assert not [path for path in output.rglob("*") if ".tmp" in path.name]


def test_a_finished_run_made_longer_and_interrupted_has_no_result_yet(
    tmp_path, monkeypatch, straight, capsys
):
    """But it has episodes, and says how they are read."""
    output = tmp_path / "run"
    shutil.copytree(straight.output, output)
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        cancel_in(patch, step=4, group_size=4)
        again(output, "--steps", "6")
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["steps"], summary["eval_after"]) == (4, None)
    assert capsys.readouterr().out.endswith(f"python tools/viewer.py {output}\n")


def test_a_rehearsal_recommends_no_command_that_needs_its_base(
    tmp_path, monkeypatch, small, capsys
):
    monkeypatch.setattr("tools.rehearse.rehearsal", contextlib.nullcontext)
    go(tmp_path / "run", small, steps=1, rehearse=True)
    said = capsys.readouterr().out
    assert "held out" in said and "reward.png" in said
    assert not [word for word in ("viewer.py", "PEFT", "vLLM") if word in said]


def test_a_finished_run_keeps_its_result_if_it_is_interrupted_while_it_evaluates_again(
    tmp_path, monkeypatch, straight
):
    output = tmp_path / "run"
    shutil.copytree(straight.output, output)
    before = json.loads((output / "summary.json").read_text())
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="130"):
        cancel_in(patch, step=4, group_size=1)
        again(output)
    after = json.loads((output / "summary.json").read_text())
    varying = ("seconds", "peak_memory_bytes", "episodes_dropped")
    for key in before.keys() - varying:
        assert after[key] == before[key], key
    assert before["eval_after"] is not None


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path, small, straight):
    output = tmp_path / "run"
    shutil.copytree(straight.output, output)
    last = output / "checkpoints" / "step_000004"
    (last / "state.pt").write_bytes((last / "state.pt").read_bytes()[:1000])
    message = refusal(["--config", output / "config.toml", "--output", output, "--resume"])
    assert str(last) in message and "remove it" in message
    shutil.rmtree(last)
    again(output)
    assert_equal_runs(output, straight.output, 4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_keeps_what_there_is(tmp_path, small, monkeypatch, number):
    output = tmp_path / "run"
    append_row = train.append_row

    def then_signal(file, row):
        append_row(file, row)
        if file.name == "metrics.jsonl":
            os.kill(os.getpid(), number)

    monkeypatch.setattr(train, "append_row", then_signal)
    (tmp_path / "c.toml").write_text(to_toml(Config(**small)))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # "pytest &" ignores it
    try:
        assert refusal(["--config", tmp_path / "c.toml", "--output", output]) == "130"
    finally:
        signal.signal(signal.SIGINT, before)
    assert checkpoints(output) == ["step_000001"]
    assert {"adapter", "summary.json", "reward.png"} <= {path.name for path in output.iterdir()}


# --- the configuration ----------------------------------------------------------------------------


@pytest.mark.parametrize("main", [train.main, sft.main])
def test_a_model_that_is_not_computed_is_refused_before_its_tokenizer_is_read(tmp_path, main):
    written(tmp_path, "config.json", '{"model_type": "llama"}')
    with pytest.raises(SystemExit, match="config.json: model_type is 'llama'"):
        main(["--model", str(tmp_path), "--output", str(tmp_path / "run")])


def test_a_mixture_in_4_bits_is_refused_by_its_flag(tmp_path, small):
    model = mixture_of(small, tmp_path)
    (model / "model.safetensors").unlink()  # nothing of it is loaded
    message = refusal(["--quantize", "nf4", "--model", model, "--output", tmp_path / "run"])
    assert "--quantize nf4" in message and "mixture of experts" in message


def test_of_the_hub_the_config_alone_is_downloaded_first(monkeypatch, tmp_path):
    asked = []
    written(tmp_path, "config.json", '{"model_type": "llama"}')
    monkeypatch.setattr(
        "checkpoint.snapshot_download", lambda name, **how: asked.append(how) or str(tmp_path)
    )
    assert "model_type is 'llama'" in refusal(["--model", "some/model"])
    assert asked == [{"allow_patterns": ["config.json"]}]


# DEL is the one character that JSON writes as it is and TOML refuses.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x7f"))
VALUES = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(allow_nan=False, allow_infinity=False),
    bool: st.booleans(),
    str: TEXT,
    tuple[str, ...]: st.lists(TEXT).map(tuple),
}


def values_of(hint):
    return st.sampled_from(get_args(hint)) if get_origin(hint) is Literal else VALUES[hint]


CONFIGS = st.builds(
    Config, **{name: values_of(hint) for name, hint in get_type_hints(Config).items()}
)


@given(CONFIGS)
def test_a_configuration_survives_its_file(config):
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "config.toml"
        file.write_text(to_toml(config))
        read = Config(**read_toml(file, Config))
    commands = {name: getattr(Config, name) for name in COMMANDS}
    assert read == dataclasses.replace(config, **commands)
    assert to_toml(read) == to_toml(config)


@pytest.mark.parametrize("table", ["trainer.model.lora", "model.lora"])
def test_prime_rls_lora_table_is_read_as_it_stands(tmp_path, table):
    file = tmp_path / "rl.toml"
    lora = 'rank = 4\nalpha = 16\ndropout = 0.5\ntarget_modules = ["q_proj", "experts"]\n'
    wanted = Config(rank=4, alpha=16.0, dropout=0.5, target_modules=("q_proj", "experts"), steps=7)
    file.write_text(f"steps = 7\n\n[{table}]\n{lora}")
    assert train.parse_config(["--config", str(file)]) == wanted
    named = f'[{table.removesuffix(".lora")}]\nname = "Qwen/Qwen3-0.6B"\n'
    file.write_text(f"steps = 7\n{named}[{table}]\n{lora}")
    wanted = dataclasses.replace(wanted, model="Qwen/Qwen3-0.6B")
    assert train.parse_config(["--config", str(file)]) == wanted
    file.write_text(named)
    assert train.parse_config(["--config", str(file)]) == Config(model="Qwen/Qwen3-0.6B")


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "my.toml"
    file.write_text('rank = 4\nlr = 1\ntarget_modules = ["q_proj"]\n')
    flags = ["--rank", "2", "--target-modules", "k_proj", "v_proj"]
    for arguments in (["--config", str(file), *flags], [*flags, f"--config={file}"]):
        config = train.parse_config(arguments)
        assert config == Config(rank=2, lr=1.0, target_modules=("k_proj", "v_proj"))


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as caught:
        train.main(["--help"])
    assert caught.value.code == 0
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert_documented(printed, Config, RunConfig)


def assert_documented(printed: str, *kinds: type) -> None:
    """Every flag of the first of these dataclasses, which inherits from the others, is in what
    --help prints, with the sentence below its field in the source."""
    sentences = {}
    for kind in reversed(kinds):
        source = ast.parse(Path(sys.modules[kind.__module__].__file__).read_text())
        (node,) = (node for node in source.body if getattr(node, "name", "") == kind.__name__)
        for field, sentence in itertools.pairwise(node.body):
            if isinstance(field, ast.AnnAssign) and isinstance(sentence, ast.Expr):
                sentences[field.target.id] = " ".join(sentence.value.value.split())
    assert sentences.keys() == {field.name for field in dataclasses.fields(kinds[0])}
    for name, sentence in sentences.items():
        assert f"--{name.replace('_', '-')}" in printed and sentence in printed, name


# --- bad input ------------------------------------------------------------------------------------


def written(directory: Path, name: str, text: str | bytes) -> Path:
    (directory / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return directory / name


def toml(text: str | bytes):
    return lambda directory: ["--config", written(directory, "my.toml", text)]


def rows(flag: str, text: str | bytes):
    return lambda directory: [flag, written(directory, "my.jsonl", text)]


def model(**edits):
    """A copy of the tiny base: a file gone (None), or some keys of a JSON file replaced."""

    def build(directory: Path) -> list:
        copy = directory / "base"
        shutil.copytree(BASE, copy)
        for name, edit in edits.items():
            file = copy / name.replace("__", ".")
            if edit is None:
                file.unlink()
            elif isinstance(edit, int):
                file.write_bytes(file.read_bytes()[:edit])
            else:
                file.write_text(json.dumps(json.loads(file.read_text()) | edit))
        return ["--model", copy]

    return build


GOOD_ROW = '{"question": "Who?", "answer": "Nobody", "title": "Nobody", "content": "# Nobody"}\n'
BAD_INPUT = {
    # what the user gave -> what the line has to name
    "config that is not there": (["--config", "none.toml"], ["none.toml", "No such file"]),
    "config without a file": (["--config"], ["2"]),
    "unknown key": (toml("rnak = 3"), ["my.toml", "rnak", "known: rank"]),
    "unknown key in the table": (toml("[model.lora]\nr = 3"), ["my.toml", "'r'"]),
    "unknown table": (toml("[trainer]\nlr = 3"), ["my.toml", "[trainer]"]),
    "another field in the table": (
        toml("[model.lora]\nseed = 3"),
        ["my.toml", "[model.lora]", "seed"],
    ),
    "no table of a model": (toml("[model]\nfoo = 3"), ["my.toml", "[model]", "name"]),
    "a model that is a number": (toml("[model]\nname = 3"), ["my.toml", "model", "str"]),
    "model named twice": (toml('[trainer.model]\nname = "x"\n[model]\nname = "x"'), ["model"]),
    "numbers in a list": (toml("target_modules = [1, 2]"), ["my.toml", "target_modules", "[1, 2]"]),
    "key set twice": (toml("rank = 2\n[model.lora]\nrank = 3"), ["my.toml", "rank"]),
    "text for a number": (toml('rank = "8"'), ["my.toml", "rank", "int", "'8'"]),
    "number for a flag": (toml("resume = 1"), ["my.toml", "resume", "bool"]),
    "text for a list": (toml('target_modules = "q_proj"'), ["my.toml", "target_modules", "list"]),
    "unknown choice": (toml('loss = "ppo"'), ["my.toml", "loss", "'ppo'", "grpo"]),
    "unknown dtype": (toml('dtype = "float16"'), ["my.toml", "dtype", "bfloat16"]),
    "not TOML": (toml("rank = = 8"), ["my.toml", "TOML", "line 1"]),
    "not text": (toml(b"rank = 8 # \xff"), ["my.toml", "TOML"]),
    "targets that match nothing": (["--target-modules", "attn"], ["attn", "q_proj"]),
    "no targets": (["--target-modules"], ["target_modules", "empty"]),
    "the head as a target": (["--target-modules", "lm_head"], ["lm_head"]),
    "rank 0": (["--rank", "0"], ["rank", "at least 1", "0"]),
    "rank -1": (["--rank", "-1"], ["rank", "at least 1", "-1"]),
    "alpha 0": (["--alpha", "0"], ["alpha", "positive"]),
    "dropout 1": (["--dropout", "1"], ["dropout", "1.0"]),
    "lr -1": (["--lr", "-1"], ["--lr", "positive", "-1.0"]),
    "lr nan": (["--lr", "nan"], ["--lr", "positive", "nan"]),
    "steps 0": (["--steps", "0"], ["--steps", "positive", "0"]),
    "group size 0": (["--group-size", "0"], ["--group-size", "positive"]),
    "temperature 0": (["--temperature", "0"], ["--temperature", "positive"]),
    "kl inf": (["--kl", "inf"], ["--kl", "inf"]),
    "search results -1": (["--search-results", "-1"], ["--search-results", "-1"]),
    "too many search results": (
        ["--search-results", str(2**63 - 1)],
        ["--search-results", "below 2**31"],
    ),
    "more slots than memory": (["--slots", str(10**10)], ["--slots", "no memory", str(10**10)]),
    "an output that is a file": (["--output", __file__], [__file__, "no directory"]),
    "more threads than cores": (["--threads", "100000"], ["--threads", "100000", "cores"]),
    "seed too large": (["--seed", str(2**64)], ["--seed", "2**63"]),
    "a group of one": (["--group-size", "1"], ["--group-size 1", "at least 2"]),
    "colder than vLLM": (["--temperature", "0.001"], ["--temperature", "0.01"]),
    "more rank than a matrix has": (["--rank", "100000"], ["--rank 100000", "128"]),
    "no such device": (["--device", "abacus"], ["abacus", "cpu"]),
    "prompt longer than an episode": (["--max-length", "10"], ["tokens", "10", "--max-length"]),
    "episode longer than the context": (["--max-length", "9999999"], ["max_length", "9999999"]),
    "no such model": (["--model", "no/such/model"], ["no/such/model", "no such directory"]),
    "model without weights": (model(model__safetensors=None), ["model.safetensors"]),
    "model without config": (model(config__json=None), ["config.json", "no such file"]),
    "model without tokenizer": (model(tokenizer__json=None), ["tokenizer.json", "no such file"]),
    "model cut off": (model(model__safetensors=5000), ["model.safetensors", "unreadable"]),
    "tokenizer cut off": (model(tokenizer__json=5000), ["tokenizer.json", "unreadable"]),
    "foreign model": (model(config__json={"model_type": "llama"}), ["config.json", "'llama'"]),
    "model of other shapes": (
        model(config__json={"num_hidden_layers": 99}),
        ["base", "missing model.layers.", "more"],
    ),
    "corpus that is not there": (["--corpus", "none.jsonl"], ["none.jsonl", "No such file"]),
    "empty corpus": (rows("--corpus", "\n"), ["my.jsonl", "empty", "title, content"]),
    "malformed corpus": (rows("--corpus", GOOD_ROW + '{"title": '), ["my.jsonl, line 2"]),
    "corpus without content": (rows("--corpus", '{"title": "x"}'), ["my.jsonl, line 1", "content"]),
    "corpus that is not text": (rows("--corpus", b"\xff\xfe"), ["my.jsonl", "utf-8"]),
    "questions that are not there": (["--questions", "none.jsonl"], ["none.jsonl", "No such file"]),
    "empty questions": (rows("--questions", ""), ["my.jsonl", "empty", "question, answer"]),
    "malformed questions": (rows("--questions", GOOD_ROW + "[1]"), ["my.jsonl, line 2", "object"]),
    "malformed held-out questions": (rows("--eval-questions", "{}"), ["my.jsonl, line 1"]),
    "too few questions to hold any out": (
        lambda directory: [*rows("--questions", GOOD_ROW)(directory), "--eval-questions", ""],
        ["my.jsonl", "--eval-questions"],
    ),
    "no run to resume": (["--resume"], ["no run to resume", "--output"]),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_line_before_a_directory_is_made(tmp_path, small, monkeypatch, case):
    given_flags, wanted = BAD_INPUT[case]
    monkeypatch.chdir(tmp_path)
    flags = given_flags(tmp_path) if callable(given_flags) else given_flags
    questions = ["--questions", small["questions"], "--eval-questions", small["eval_questions"]]
    message = refusal([*questions, "--output", tmp_path / "run", *flags])
    for text in wanted:
        assert text in message
    if message != "2":  # argparse and tyro print their own
        lines = message.splitlines()
        assert lines[0].startswith("train.py: ")
        assert len(lines) == 1 or all(line.startswith("  ") for line in lines[1:])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--frobnicate", "3"], "--frobnicate"),
        (["--rank", "many"], "--rank"),
        (["--loss", "ppo"], "--loss"),
        (["--config"], "--config"),
    ],
)
def test_a_flag_that_cannot_be_read_is_named(tmp_path, monkeypatch, capsys, flags, named):
    monkeypatch.chdir(tmp_path)
    assert refusal(flags) == "2"
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_directory_of_another_run_is_left_alone(tmp_path, small, straight):
    before = contents(straight.output)
    message = refusal(["--config", straight.output / "config.toml", "--output", straight.output])
    assert str(straight.output) in message and "--resume" in message and "--output" in message
    file = written(tmp_path, "file", "mine")
    message = refusal(["--config", straight.output / "config.toml", "--output", file])
    assert str(file) in message and file.read_text() == "mine"
    assert contents(straight.output) == before


def test_resuming_with_another_configuration_is_refused(straight):
    before = contents(straight.output)
    resume = ["--config", straight.output / "config.toml", "--output", straight.output, "--resume"]
    message = refusal([*resume, "--lr", "0.5", "--seed", "7"])
    assert "on --resume --steps, --vllm-url, " in message and str(straight.output) in message
    assert f"lr = {Config.lr}" in message and "seed = 0" in message
    assert contents(straight.output) == before


def test_a_resumed_run_needs_no_flag_repeated_and_never_shrinks(straight):
    resume = ["--output", str(straight.output), "--resume"]
    resumed = train.parse_config([*resume, "--steps", "9"])
    saved = Config(**read_toml(straight.output / "config.toml", Config))
    assert resumed == dataclasses.replace(saved, steps=9, output=str(straight.output), resume=True)
    before = contents(straight.output)
    assert "has 4 steps already" in refusal([*resume, "--steps", "3"])
    assert contents(straight.output) == before


def test_data_that_is_not_named_is_the_environments_own(tmp_path):
    own, held_out = train.load_environments(Config())
    assert own is not held_out and len(held_out.eval) >= 256
    assert not set(own.sections) & set(held_out.sections)  # no page of one world is in the other
    math, same = train.load_environments(Config(environment="math_qa"))
    assert math is same and math.train and math.eval
    # Other questions are evaluated on themselves, never on the shipped ones.
    (tmp_path / "q.jsonl").write_text('{"question": "Q?", "answer": "A"}\n' * 8)
    other, same = train.load_environments(Config(questions=str(tmp_path / "q.jsonl")))
    assert other is same and {task.question for task in other.eval} == {"Q?"}


# --- as a user runs it ----------------------------------------------------------------------------


@pytest.fixture
def as_it_is(monkeypatch):
    """Undoes `quick`."""
    monkeypatch.undo()


def test_the_shipped_base_plays_whole_episodes(tmp_path, as_it_is):
    output = go(tmp_path / "run", {"groups": 2, "group_size": 4, "eval_size": 8, "steps": 1})
    (row,) = rows_of(output)
    assert row["turns"] > 2 and row["truncated"] < 1 and row["mismatch_max"] < 1e-4
    assert 0 <= row["reward"] <= 1
    summary = json.loads((output / "summary.json").read_text())
    assert sum(summary["outcomes_before"].values()) == 8
    assert summary["eval_before"] == summary["outcomes_before"].get("solved", 0) / 8


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_in_a_terminal_and_on_again(tmp_path, number):
    output = tmp_path / "run"
    command = [sys.executable, str(ROOT / "train.py"), "--output", str(output)]
    command += ["--groups", "2", "--group-size", "4", "--eval-size", "8"]
    process = subprocess.Popen(
        [*command, "--steps", "50"],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # "pytest &" ignores it
    )
    for line in process.stdout:
        if line.startswith("step"):
            process.send_signal(number)
            break
    rest = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    assert "--resume" in rest
    done = len(rows_of(output))
    assert 1 <= done < 50 and checkpoints(output)[-1] == f"step_{done:06d}"
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == done and summary["eval_after"] is None
    assert (output / "reward.png").read_bytes().startswith(b"\x89PNG")
    broadcast.read_adapter(output / "adapter")

    steps = done + 1
    finished = subprocess.run(
        [*command, "--steps", str(steps), "--resume"], stdout=subprocess.PIPE, text=True, check=True
    )
    assert f"resumed after step {done}" in finished.stdout and "--lora-modules" in finished.stdout
    assert [row["step"] for row in rows_of(output)] == list(range(1, steps + 1))
    assert json.loads((output / "summary.json").read_text())["eval_after"] is not None


@pytest.mark.slow
@pytest.mark.parametrize("broadcasting", [True, False])
def test_what_is_broadcast_is_what_samples(tmp_path, as_it_is, monkeypatch, broadcasting):
    """The default job, shortened, is poor before and good after; with a sampler that keeps version
    0 it stays as poor as it was, although the trainer trains and publishes as before. The probe
    finds such a sampler out after the first step."""
    publish = train.Trainer.publish

    def publish_for_nobody(trainer):
        if not trainer.alive:
            return publish(trainer)
        directory = trainer.run.directory / "broadcasts" / "nobody_reads"
        broadcast.publish(trainer.model, trainer.lora, directory, trainer.run.step)

    if not broadcasting:
        monkeypatch.setattr(train.Trainer, "publish", publish_for_nobody)
        with pytest.raises(RuntimeError, match="step 1: the embedded engine does not sample"):
            go(tmp_path / "probed", {"steps": 16, "eval_size": 16})
        monkeypatch.setattr(train.Trainer, "probe", lambda trainer: asyncio.sleep(0))
    shorter = {"steps": 16, "group_size": 8, "eval_size": 128}
    output = go(tmp_path / "run", shorter)
    summary = json.loads((output / "summary.json").read_text())
    first, last = rows_of(output)[0], rows_of(output)[-1]
    assert summary["eval_before"] <= 0.5 and first["mismatch_max"] < 1e-4
    if broadcasting:
        assert summary["eval_after"] >= 0.75 and last["mismatch_max"] < 1e-4
    else:
        assert summary["eval_after"] == summary["eval_before"]
        assert last["mismatch_max"] > 0.1  # the trainer has moved away from its sampler
