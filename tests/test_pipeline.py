"""Sampling while the trainer steps: order, staleness, who is alive, ends of either side, restarts.

    trainer's thread   take(b) ─ step ─ publish ─ take(b + 1) ...      delays from Hypothesis
    sampler's thread   episodes of b .. b + k, turn after turn         on either side

The runs in the middle are whole ones with their server in a thread; those at the end (slow) are
processes, one of which is killed.
"""

import asyncio
import dataclasses
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import test_train
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import (
    again,
    as_it_is,
    go,
    live_versions,
    on_call,
    quick,
    refusal,
    rows_of,
    small,
)
from tiny import tiny_config, tiny_model

import broadcast
import train
from benchmarks import faults
from broadcast import save_adapter
from config import Config, threads_of, to_toml
from engine import TorchEngine
from lora import LoRAConfig, inject_lora, lora_parameters
from model import Qwen3
from pipeline import Pipeline, cancel_others
from run import Run, load_checkpoint, open_run, save_checkpoint
from tools import vllm_server
from tools.serve import Server

__all__ = ["as_it_is", "quick", "small"]  # fixtures
ROOT = Path(train.__file__).parent
LIMIT = 10.0  # seconds to wait for what should take a hundredth of one
delays = st.lists(st.floats(0, 0.003), min_size=1, max_size=8)


# --- the mechanism --------------------------------------------------------------------------------


class Episodes:
    """Stands for an engine and its episodes, `size` a batch: knows who is alive, and whether he may
    be; gives every episode a number of its own."""

    def __init__(self, delays: list[float], size: int, turns: int = 3):
        self.delays, self.size, self.turns = delays, size, turns
        self.numbers = itertools.count()
        self.directories: dict[str, Path] = {}
        self.ever: list[str] = []
        self.live: Counter[str] = Counter()
        self.most = 0

    def add_adapter(self, name: str, directory: Path) -> None:
        assert name not in self.ever and directory.is_dir()
        self.ever.append(name)
        self.directories[name] = directory
        self.most = max(self.most, len(self.directories))

    def remove_adapter(self, name: str) -> None:
        assert not self.live[name], "retired before its last trajectory ended"
        del self.directories[name]

    async def play(self, batch: int, name: str, version: int) -> list[SimpleNamespace]:
        episodes = (self.episode(batch, name, version) for _ in range(self.size))
        return await asyncio.gather(*episodes)

    async def episode(self, batch: int, name: str, version: int) -> SimpleNamespace:
        number = next(self.numbers)
        self.live[name] += 1
        try:
            for turn in range(self.turns):
                await asyncio.sleep(self.delays[(number + turn) % len(self.delays)])
                assert self.directories[name].is_dir(), "its version is gone"
            return SimpleNamespace(number=number, batch=batch, version=version)
        finally:
            self.live[name] -= 1


def trainer_with(engine, staleness: int, directory: Path, lora: LoRAConfig, model) -> train.Trainer:
    run = Run(directory, "run")
    parts = (Config(), None, None, None, model, lora, None, engine, run, None)
    return train.Trainer(*parts, Pipeline(staleness))


@pytest.fixture(scope="module")
def adapted():
    model, lora = tiny_model(tiny_config(num_hidden_layers=1)), LoRAConfig(rank=2)
    inject_lora(model, lora)
    return lora, model


@settings(max_examples=15)
@given(st.integers(0, 3), st.integers(1, 7), st.integers(1, 4), delays, delays)
def test_batches_come_in_order_once_each_and_never_too_old(
    adapted, staleness, steps, size, sampling, training
):
    """And each of their episodes once; what they name is there until the last of them has ended,
    and not much longer."""
    engine, started, taken = Episodes(sampling, size), [], []

    async def loop(trainer):
        def play(batch):
            started.append((batch, trainer.run.step))
            return engine.play(batch, trainer.adapter, trainer.run.step)

        async with trainer.pipeline as pipeline:
            trainer.publish()
            for step in range(steps):
                episodes, _ = await pipeline.take(step, steps, play)
                assert [episode.batch for episode in episodes] == [step] * size
                assert all(0 <= step - episode.version <= staleness for episode in episodes)
                taken.extend(episode.number for episode in episodes)
                time.sleep(training[step % len(training)])  # as torch: the loop stands still
                trainer.run.step += 1
                trainer.publish()
            assert not pipeline.under_way
        return trainer

    with tempfile.TemporaryDirectory() as directory:
        trainer = asyncio.run(loop(trainer_with(engine, staleness, Path(directory), *adapted)))
        # Batch b starts with version b - k, as soon as that is there, and none starts in vain.
        assert started == [(batch, max(0, batch - staleness)) for batch in range(steps)]
        # Of the episodes that were ever played none is lost and none comes twice.
        assert sorted(taken) == list(range(next(engine.numbers)))
        assert len(taken) == steps * size
        assert engine.most <= staleness + 2
        assert list(engine.directories) == [trainer.adapter] == [f"run-1-{steps}"]
        (version,) = live_versions(Path(directory))
        assert version == engine.directories[trainer.adapter]
    assert not [t for t in threading.enumerate() if t.name == "sampler"]


class Broken(Exception):
    """What a test lets fail."""


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("side", ["sampler", "trainer", "signal"])
def test_an_error_on_either_side_ends_both(staleness, side):
    ended = []

    async def play(batch):
        try:
            if batch == 2 and side == "sampler":
                raise Broken
            await asyncio.sleep(0.002 if batch < 3 else 60)  # from 3 on they would never end
            return batch
        finally:
            ended.append(batch)

    async def loop():
        async with Pipeline(staleness) as pipeline:
            for step in range(9):
                if step == 3 and side == "signal":
                    task = asyncio.current_task()
                    asyncio.get_running_loop().call_later(0.02, task.cancel)
                assert (await pipeline.take(step, 9, play))[0] == step
                if step == 2 and side == "trainer":
                    raise Broken

    before, started = threading.active_count(), time.monotonic()
    with pytest.raises(asyncio.CancelledError if side == "signal" else Broken):
        asyncio.run(loop())
    assert time.monotonic() - started < LIMIT and threading.active_count() == before
    # Of those that were under way each has ended, and none is left behind in a dead loop.
    assert ended and set(range(max(ended) + 1)) == set(ended)
    assert max(ended) <= 3 + staleness


def test_batches_under_way_at_an_end_are_dropped():
    async def play(batch):
        await asyncio.sleep(0.001 if batch == 0 else 60)

    async def loop():
        async with Pipeline(2) as pipeline:
            await pipeline.take(0, 9, play)
            assert pipeline.versions == {0} and sorted(pipeline.under_way) == [1, 2]
            await pipeline.drop()
            assert not pipeline.versions

    asyncio.run(loop())


def test_a_server_forgets_a_version_after_its_last_request(tmp_path):
    """A killed run leaves requests behind; what resumes it unloads their version and goes on."""
    model, lora = tiny_model(tiny_config(num_hidden_layers=1)), LoRAConfig(rank=2)
    inject_lora(model, lora)
    save_adapter(model, lora, tmp_path / "v0")
    body = {"model": "v0", "prompt": [1, 2, 3], "max_tokens": 20, "seed": 1}

    async def scenario():
        server = Server(TorchEngine(model, slots=4, max_length=32), "base")
        await server.load({"lora_name": "v0", "lora_path": str(tmp_path / "v0")})
        answer = asyncio.create_task(server.complete(body))
        while not server.engine.unfinished():
            await asyncio.sleep(0)
        unloaded = asyncio.create_task(server.unload({"lora_name": "v0"}))
        await asyncio.sleep(0)
        assert not unloaded.done() and server.engine.adapters == ["v0"]
        assert (await server.answer("POST /v1/completions", json.dumps(body).encode()))[0] == 404
        assert len((await answer)["choices"][0]["token_ids"]) == 20
        await unloaded
        assert server.engine.adapters == []

    asyncio.run(scenario())


# --- whole runs -----------------------------------------------------------------------------------


class InThread:
    """A TorchServer whose process is a thread: starts in no time."""

    seen: list["InThread"] = []

    def __init__(self, model, log, threads, dtype, device, max_length, slots):
        self.model, self.max_length, self.slots = model, max_length, slots
        self.most, self.names = 0, []
        InThread.seen.append(self)

    async def __aenter__(self):
        model = Qwen3.from_pretrained(self.model).requires_grad_(False)
        self.engine = TorchEngine(model, self.slots, self.max_length)
        add_adapter = self.engine.add_adapter

        def watched(name, directory):
            add_adapter(name, directory)
            self.names.append((name, directory))
            self.most = max(self.most, len(self.engine.adapters))

        self.engine.add_adapter = watched
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()
        server = Server(self.engine, "base")
        self.url = asyncio.run_coroutine_threadsafe(server.start(), self.loop).result()
        return self

    async def __aexit__(self, *_):
        asyncio.run_coroutine_threadsafe(cancel_others(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()

    def last_words(self):
        return "it was a thread"


@pytest.fixture
def in_thread(monkeypatch):
    monkeypatch.setattr(vllm_server, "TorchServer", InThread)
    monkeypatch.setattr(InThread, "seen", [])
    return InThread.seen


def test_a_run_one_step_stale_learns_from_the_versions_that_it_should(tmp_path, small, in_thread):
    output = go(tmp_path / "run", small, max_staleness=1, steps=3)
    rows = rows_of(output)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["version"] for row in rows] == [0, 0, 1]
    assert [row["staleness_max"] for row in rows] == [0, 1, 1]
    assert all(row["grad_norm"] > 0 for row in rows)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["episodes_dropped"] == 0 and summary["eval_after"] is not None
    (server,) = in_thread
    assert [Path(path).name for _, path in server.names] == [f"v00000{v}" for v in range(4)]
    assert server.most <= 3 and server.engine.adapters == []  # left as it was found
    assert [path.name for path in live_versions(output)] == ["v000003"]


def test_a_stale_run_that_is_cut_short_goes_on_without_gap_or_repetition(
    tmp_path, small, in_thread, monkeypatch
):
    output = tmp_path / "run"

    def end(model):
        raise RuntimeError("the end")

    fields = small | {"max_staleness": 2, "steps": 6, "group_size": 2}
    (tmp_path / "c.toml").write_text(to_toml(Config(**fields)))
    with monkeypatch.context() as patch:
        on_call(patch, "loss_and_backward", 3, end)
        message = refusal(["--config", tmp_path / "c.toml", "--output", output])
    assert "step 3: the end" in message
    # Taken: 0, 1, 2. Under way: 3 and 4, which are lost; 2 was sampled, but trained no step.
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["steps"], summary["episodes_dropped"]) == (2, 3 * 4)
    again(output)
    rows = rows_of(output)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["version"] for row in rows] == [0, 0, 2, 2, 2, 3]
    assert json.loads((output / "summary.json").read_text())["episodes_dropped"] == 3 * 4
    names = [name for server in in_thread for name, _ in server.names]
    assert len(set(names)) == len(names) == 3 + 5  # 0, 1, 2 and then 2 to 6
    assert [path.name for path in live_versions(output)] == ["v000006"]


def test_a_pipeline_that_is_cancelled_twice_leaves_no_thread():
    async def play(batch):
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.3)  # a request that takes its time to be aborted

    async def interrupted():
        async with Pipeline(1) as pipeline:
            task, loop = asyncio.current_task(), asyncio.get_running_loop()
            loop.call_later(0.05, task.cancel)
            loop.call_later(0.15, task.cancel)
            await pipeline.take(0, 9, play)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert "sampler" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize(
    ("flags", "half"),
    [
        ({"max_staleness": 1}, True),
        ({}, False),
        ({"max_staleness": 1, "threads": 1}, False),
        ({"max_staleness": 1, "engine": "vllm", "vllm_url": ("http://127.0.0.1:1",)}, False),
    ],
)
def test_trainer_and_its_server_share_the_cores(monkeypatch, flags, half):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(8), raising=False)
    config = Config(**flags)
    assert threads_of(config) == ((4, 4) if half else (config.threads, config.sampler_threads))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert threads_of(config) == (config.threads, config.sampler_threads)


def test_a_second_signal_costs_nothing_that_the_first_would_have_kept(
    tmp_path, small, in_thread, monkeypatch
):
    """It comes while the run waits for the batches under way to end."""
    output, drop, append_row = tmp_path / "run", Pipeline.drop, train.append_row
    dropped = []

    def then_signal(file, row):
        append_row(file, row)
        if file.name == "metrics.jsonl":
            os.kill(os.getpid(), signal.SIGTERM)

    async def again_while_waiting(pipeline):
        if not dropped:
            dropped.append(pipeline)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(LIMIT)
        await drop(pipeline)

    (tmp_path / "c.toml").write_text(to_toml(Config(**small | {"max_staleness": 1})))
    monkeypatch.setattr(train, "append_row", then_signal)
    monkeypatch.setattr(Pipeline, "drop", again_while_waiting)
    assert refusal(["--config", tmp_path / "c.toml", "--output", output]) == "130" and dropped
    assert json.loads((output / "summary.json").read_text())["steps"] == 1
    assert in_thread[0].engine.adapters == []
    assert not [t for t in threading.enumerate() if t.name == "sampler"]


def test_a_trajectory_that_is_too_old_is_never_trained_on(tmp_path, small, monkeypatch):
    run_groups = train.run_groups

    async def aged(*arguments, **options):
        groups = await run_groups(*arguments, **options)
        groups[-1][-1].version -= options["step"] == 0 and len(groups) == 2
        return groups

    monkeypatch.setattr(train, "run_groups", aged)
    (tmp_path / "c.toml").write_text(to_toml(Config(**small)))
    message = refusal(["--config", tmp_path / "c.toml", "--output", tmp_path / "run"])
    assert "step 1" in message and "beyond --max-staleness" in message


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--full", "--lr", "1e-4", "--max-staleness", "1"], "--full"),
        (["--quantize", "nf4", "--max-staleness", "1"], "two policies"),
        (["--max-staleness", "-1"], "must be 0 or more"),
        (["--sampler-threads", "1"], "there is none"),
    ],
)
def test_a_configuration_that_means_nothing_is_refused(tmp_path, flags, words):
    assert words in refusal([*flags, "--output", tmp_path / "run"])


def test_what_a_dead_attempt_left_is_retired_after_servers_have_unloaded_it(
    tmp_path, small, in_thread, monkeypatch
):
    """A shared server, which outlives the run; a directory that goes first may kill it."""
    output, order = tmp_path / "run", []
    forget, retire = train.VLLMEngine.forget, broadcast.retire

    def forgetting(engine, prefix):
        order.append(("forget", names := forget(engine, prefix)))
        return names

    def retiring(path):
        order.append(("retire", Path(path).parent.name, Path(path).name))
        return retire(path)

    async def scenario():
        async with InThread(small["model"], None, 0, "float32", "cpu", 512, 8) as server:
            fields = small | {"engine": "vllm", "vllm_url": (server.url,), "steps": 2, "groups": 1}
            with monkeypatch.context() as patch:  # a kill: nobody unloads, finishes, retires
                patch.setattr(train.VLLMEngine, "close", lambda self: asyncio.sleep(0))
                patch.setattr(train, "finish", lambda *_: None)
                await train.train(Config(**fields, output=str(output)))
            (left,) = server.engine.adapters
            monkeypatch.setattr(train.VLLMEngine, "forget", forgetting)
            monkeypatch.setattr(broadcast, "retire", retiring)
            fields |= {"steps": 3, "resume": True}
            await train.train(Config(**fields, output=str(output)))
            assert server.engine.adapters == []
            return left

    left = asyncio.run(scenario())
    assert left.endswith("-1-2")
    assert order[0] == ("forget", [left]) and ("retire", "attempt_1", "v000002") in order
    assert [path.parent.name for path in live_versions(output)] == ["attempt_2"]


def test_a_resumed_run_that_is_told_its_servers_anew_has_those_alone(tmp_path):
    """Else a server would be asked to load everything twice, or one that is gone would be asked."""
    fields = Config(engine="vllm", vllm_url=("http://old:1",), output=str(tmp_path))
    (tmp_path / "config.toml").write_text(to_toml(fields))
    for start in (["--resume"], ["--config", str(tmp_path / "config.toml")]):
        flags = ["--output", str(tmp_path), *start]
        assert train.parse_config(flags).vllm_url == ("http://old:1",)
        told = train.parse_config([*flags, "--vllm-url", "http://a:1", "--vllm-url", "http://b:2"])
        assert told.vllm_url == ("http://a:1", "http://b:2")


# --- who has a directory --------------------------------------------------------------------------


def test_a_directory_in_use_is_refused_with_the_process_named(tmp_path, small):
    fields = small | {"output": str(tmp_path / "run")}
    run = open_run(Config(**fields), "x")
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
        open_run(Config(**fields, resume=True), "x")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["attempt"] == 1
    run.release()
    open_run(Config(**fields, resume=True), "x").release()


def test_a_killed_run_holds_its_directory_no_longer(tmp_path, small):
    fields = small | {"output": str(tmp_path / "run")}
    open_run(Config(**fields), "x").release()
    code = """
import fcntl, os, sys, time
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print(os.getpid(), file=file, flush=True)
print("held", flush=True)
time.sleep(60)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "run" / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        with pytest.raises(ValueError, match=f"in use by process {other.pid}"):
            open_run(Config(**fields, resume=True), "x")
        other.kill()
    open_run(Config(**fields, resume=True), "x").release()


def test_a_copied_directory_goes_on_under_names_of_its_own(tmp_path, small):
    """Else one run of the two would unload the other's adapters from a server that both use."""
    fields = small | {"output": str(tmp_path / "run")}
    first = open_run(Config(**fields), "x")
    first.release()
    same = open_run(Config(**fields, resume=True), "x")
    same.release()
    assert (same.run_id, same.attempt) == (first.run_id, 2)
    model, lora = tiny_model(tiny_config(num_hidden_layers=1)), LoRAConfig(rank=2)
    inject_lora(model, lora)
    optimizer = torch.optim.Adam(lora_parameters(model).values())
    save_checkpoint(same, model, lora, optimizer)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copied = open_run(Config(**fields | {"output": str(tmp_path / "copy")}, resume=True), "x")
    copied = load_checkpoint(copied, model, optimizer)
    copied.release()
    assert copied.run_id != first.run_id and copied.attempt == 3
    again = open_run(Config(**fields | {"output": str(tmp_path / "copy")}, resume=True), "x")
    again.release()
    assert (again.run_id, again.attempt) == (copied.run_id, 4)


def test_a_directory_that_was_moved_is_the_same_run_still(tmp_path, small):
    """So that it finds, by its names, what its dead attempt has left on a shared server."""
    fields = small | {"output": str(tmp_path / "run")}
    first = open_run(Config(**fields), "x")
    first.release()
    (tmp_path / "run").rename(tmp_path / "moved")
    for _ in range(2):
        moved = open_run(Config(**fields | {"output": str(tmp_path / "moved")}, resume=True), "x")
        moved.release()
        assert moved.run_id == first.run_id
    shutil.copytree(tmp_path / "moved", tmp_path / "run")
    copied = open_run(Config(**fields, resume=True), "x")
    copied.release()
    assert copied.run_id != first.run_id


def test_a_directory_that_came_from_another_machine_is_a_copy(tmp_path, small, monkeypatch):
    """There the original may be alive, and both may name one server."""
    fields = small | {"output": str(tmp_path / "run")}
    first = open_run(Config(**fields), "x")
    first.release()
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    same_path = open_run(Config(**fields, resume=True), "x")  # a disk that machines share
    same_path.release()
    assert same_path.run_id == first.run_id
    monkeypatch.undo()
    (tmp_path / "run").rename(tmp_path / "sent")
    sent = open_run(Config(**fields | {"output": str(tmp_path / "sent")}, resume=True), "x")
    sent.release()
    assert sent.run_id != first.run_id


def test_threads_may_differ_on_resume_and_it_says_so(tmp_path, small, capsys, monkeypatch):
    """A machine with fewer cores refuses the run's own number of them."""
    fields, used = small | {"output": str(tmp_path / "run"), "threads": 4}, torch.get_num_threads()
    open_run(Config(**fields), "x").release()
    open_run(Config(**fields, resume=True), "x").release()
    open_run(Config(**fields | {"threads": 2}, resume=True), "x").release()
    assert "bits may differ" not in capsys.readouterr().out  # what is used counts, not what is said
    monkeypatch.setattr(torch, "get_num_threads", lambda: used + 1)
    open_run(Config(**fields, resume=True), "x").release()
    assert f"{used + 1} threads, not {used}: bits may differ" in capsys.readouterr().out


@pytest.mark.parametrize("written", [[], ["run.json"], ["run.json", ".config.toml.tmp"]])
def test_killed_while_it_opened_its_directory_a_run_can_be_started_again(tmp_path, small, written):
    """And what says that there is a run to resume, config.toml, is written last."""
    config = Config(**small | {"output": str(tmp_path / "run")})
    order, replace = [], Path.replace
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", lambda self, to: order.append(to.name) or replace(self, to))
        open_run(config, "x").release()
    assert order == ["run.json", "config.toml"]
    for path in (tmp_path / "run").iterdir():
        if path.name not in (".lock", *written):
            path.unlink()
    for name in written:
        (tmp_path / "run" / name).touch()
    with pytest.raises(ValueError, match="no run to resume"):
        open_run(dataclasses.replace(config, resume=True), "x")
    open_run(config, "x").release()
    open_run(dataclasses.replace(config, resume=True), "x").release()


# --- it learns ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_overlapped_run_learns(tmp_path, as_it_is):
    """The default job, shortened, sampled by a server one step behind."""
    fields = {"max_staleness": 1, "threads": 1, "sampler_threads": 1}
    fields |= {"steps": 12, "group_size": 8, "eval_size": 64}
    output = go(tmp_path / "run", fields)
    summary, rows = json.loads((output / "summary.json").read_text()), rows_of(output)
    assert [row["staleness_max"] for row in rows] == [0] + 11 * [1]
    assert summary["eval_before"] <= 0.5 and summary["eval_after"] >= summary["eval_before"] + 0.2


# --- killed ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_every_process_is_killed_once_and_every_run_ends_as_if_undisturbed():
    """One kill of each kind at a random moment; benchmarks/faults.py says what counts as one, and
    what is checked."""
    command = [sys.executable, str(ROOT / "benchmarks" / "faults.py"), "--rounds", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_round_without_a_kill_is_no_round(tmp_path, monkeypatch, capsys):
    """The run had ended, or there was nobody yet to be killed: the same kind is tried again."""
    # Exit code, victims; 1: a trainer that ended before it was struck.
    ends = [(0, 0), (0, 1), (-9, 1), (-9, 2), (1, 1), (-9, 1)]
    kinds, moments = [], []

    async def undisturbed(kind, job):
        return job

    async def round_of(kind, job, reference, moment):
        code, victims = ends[len(kinds)]
        kinds.append(kind)
        moments.append(moment)
        return {"kind": kind, "exit_code": code, "victims": victims, "steps_done": 1}

    monkeypatch.setattr(faults, "undisturbed", undisturbed)
    monkeypatch.setattr(faults, "round_of", round_of)
    result = tmp_path / "faults.json"
    for rounds in (2, 3):  # the second start goes on
        asyncio.run(faults.run(SimpleNamespace(result=str(result), rounds=rounds, seed=0)))
    first, second, third, *_ = faults.KINDS
    assert kinds == [first] * 3 + [second] + [third] * 2
    assert len(set(moments)) == 6 and len(json.loads(result.read_text())["rounds"]) == 6
    assert "3 rounds without a kill" in capsys.readouterr().out


def put(lines: list[dict], file: Path) -> None:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def finished(directory: Path) -> faults.Job:
    """What an undisturbed run of benchmarks/faults.py leaves, as far as it is compared."""
    directory.mkdir()
    steps = range(1, faults.STEPS + 1)
    tokens = {"tokens_sampled": 9, "tokens_trained": 9, "staleness_max": 0}
    put([{"step": s, "version": s - 1, **tokens} for s in steps], directory / "metrics.jsonl")
    put([{"step": s, "question": f"{s}?"} for s in steps], directory / "samples.jsonl")
    ended = {"steps": faults.STEPS, "eval_before": 0.25, "eval_after": 0.5, "episodes_dropped": 8}
    put([ended], directory / "summary.json")
    started = faults.STEPS * faults.EPISODES + 8
    put([{"episodes_started": started}], directory / "run.json")
    return faults.Job(directory, [])


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
@pytest.mark.parametrize(
    "file, change",
    [
        ("metrics.jsonl", {"tokens_sampled": 0}),
        ("metrics.jsonl", {"step": 5}),
        ("metrics.jsonl", {"staleness_max": 1, "version": faults.STEPS - 2}),
        ("samples.jsonl", {"question": "another?"}),
        ("summary.json", {"eval_after": 0.5 + faults.EVAL_BOUND + 1 / 32}),
        ("summary.json", {"eval_before": 0.5}),
        ("summary.json", {"episodes_dropped": 7}),
    ],
)
def test_a_run_that_did_not_end_as_an_undisturbed_one_is_found(tmp_path, monkeypatch, file, change):
    monkeypatch.setattr(faults.Job, "published", lambda job: [Path(f"v{faults.STEPS:06d}")])
    job, reference = (finished(tmp_path / name) for name in ("job", "reference"))
    faults.check(job, reference, False, 0)
    *rest, last = job.rows(file)
    put([*rest, last | change], job.output / file)
    with pytest.raises(AssertionError):
        faults.check(job, reference, False, 0)


# --- one base -------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_the_base_is_the_pages_of_its_file():
    """So that processes on one checkpoint share it: loading copies nothing."""
    file = test_train.BASE / "model.safetensors"
    model = Qwen3.from_pretrained(test_train.BASE)
    inject_lora(model, LoRAConfig())
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith(str(file)):
            start, end = line.split()[0].split("-")
            mapped.append((int(start, 16), int(end, 16)))
    frozen = [p for p in model.parameters() if not p.requires_grad]
    assert len(frozen) > 10
    for parameter in frozen:
        assert any(start <= parameter.data_ptr() < end for start, end in mapped)
