"""timing.py: every second is booked once, under what ran last, and no run is changed by it."""

import asyncio
import re
import threading
from collections import Counter
from types import SimpleNamespace

import pytest
import test_train
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_train import contents, go, refusal, rows_of

import rollout
import timing
import update
from engine import TorchEngine
from timing import ROWS, Stopwatch

small, quick = test_train.small, test_train.quick
names = st.sampled_from(list(ROWS))
calls = st.recursive(  # (name, seconds before what is called inside, the calls inside)
    st.tuples(names, st.integers(0, 5), st.just([])),
    lambda inside: st.tuples(names, st.integers(0, 5), st.lists(inside, max_size=3)),
)


@pytest.fixture
def clock(monkeypatch):
    """Time that passes only where a test says so, for each thread alike."""
    now = SimpleNamespace(seconds=0)
    monkeypatch.setattr(timing, "perf_counter", lambda: now.seconds)
    yield now
    now.seconds = 0


def playing(watch: Stopwatch, now, expected: Counter):
    def play(call) -> None:
        name, seconds, inside = call

        def work() -> None:
            now.seconds += seconds
            expected[name] += seconds
            for other in inside:
                play(other)

        watch.wrapped(name, work)()

    return play


def test_every_second_is_booked_once_and_under_what_ran_last(clock):
    @given(st.lists(st.tuples(st.integers(0, 3), calls), max_size=4))
    def check(sequence):
        watch, expected = Stopwatch(), Counter()
        play, start = playing(watch, clock, expected), clock.seconds
        for pause, call in sequence:
            clock.seconds += pause
            expected["the rest"] += pause
            play(call)
        watch.trainer.stop()
        assert +watch.trainer.seconds == +expected and watch.beside is None
        assert sum(expected.values()) == clock.seconds - start

    check()


def test_what_runs_while_something_is_awaited_is_not_waiting(clock):
    watch = Stopwatch()
    gate = asyncio.Event()

    async def take() -> str:
        clock.seconds += 1
        await gate.wait()
        clock.seconds += 2
        return "episodes"

    def step() -> None:
        clock.seconds += 10

    async def everyone() -> str:
        taken = asyncio.create_task(watch.wrapped("waiting", take)())
        await asyncio.sleep(0)
        watch.wrapped("sampling", step)()
        clock.seconds += 4
        gate.set()
        return await taken

    assert asyncio.run(everyone()) == "episodes"
    assert watch.trainer.seconds == {"the rest": 0, "waiting": 7, "sampling": 10}


def test_what_a_function_returns_to_be_awaited_is_its_own(clock):
    """As an environment's reward does, where a judge is asked."""
    watch, gate = Stopwatch(), asyncio.Event()

    async def judge() -> float:
        await gate.wait()
        clock.seconds += 3
        return 1.0

    def reward():
        clock.seconds += 1
        return judge()

    async def score() -> float:
        asking = asyncio.create_task(watch.wrapped("scoring", reward)())
        await asyncio.sleep(0)
        clock.seconds += 2
        gate.set()
        return await asking

    assert asyncio.run(score()) == 1.0
    assert watch.trainer.seconds["scoring"] == 6


def test_another_thread_has_a_stopwatch_of_its_own(clock):
    watch = Stopwatch()

    def tool() -> None:
        clock.seconds += 5

    thread = threading.Thread(target=watch.wrapped("tool calls", tool))
    thread.start()
    thread.join()
    watch.trainer.stop()
    assert watch.trainer.seconds == {"the rest": 5}  # it did not stop meanwhile
    assert watch.beside.seconds["tool calls"] == 5
    assert "| tool calls | 0.000 | 0.0% | 2.500 |" in watch.table(2)


def pretended(directory, clock) -> SimpleNamespace:
    """A trainer whose two models take 2 and 5 seconds for their logprobs."""

    def model(seconds: int) -> SimpleNamespace:
        def token_logprobs() -> None:
            clock.seconds += seconds

        return SimpleNamespace(token_logprobs=token_logprobs)

    return SimpleNamespace(
        environment=SimpleNamespace(reward=None),
        model=model(2),
        frozen=model(5),
        publish=None,
        pipeline=SimpleNamespace(take=None),
        engine=None,
        run=SimpleNamespace(directory=directory),
    )


def test_the_reference_of_full_fine_tuning_is_a_forward_pass(tmp_path, clock):
    trainer = pretended(tmp_path, clock)
    with timing.profiling(trainer, 1) as step_done:
        trainer.model.token_logprobs()
        trainer.frozen.token_logprobs()
        step_done()
    assert "| forward | 7.000 | 100.0% |" in (tmp_path / "profile.md").read_text()


@pytest.mark.parametrize("steps, tables", [(0, 0), (2, 1), (3, 1), (4, 1)])
def test_a_run_of_fewer_steps_than_are_profiled_prints_its_table(
    tmp_path, clock, capsys, steps, tables
):
    trainer = pretended(tmp_path, clock)
    with timing.profiling(trainer, 3) as step_done:
        for _ in range(steps):
            trainer.model.token_logprobs()
            step_done()
    printed = capsys.readouterr().out
    assert printed.count("Where the time went") == tables
    assert not tables or f"Where the time went: {min(steps, 3)} steps, 2.00 s each" in printed


def test_a_profiled_run_is_the_same_run(tmp_path, small, capsys):
    before = (rollout.answer_call, torch.autograd.backward, update.optimizer_step)
    fields = small | {"steps": 2, "save_every": 9}
    profiled = go(tmp_path / "profiled", fields, profile=1)
    printed = capsys.readouterr().out
    assert (rollout.answer_call, torch.autograd.backward, update.optimizer_step) == before
    plain = go(tmp_path / "plain", fields)
    assert rows_of(profiled) == rows_of(plain)
    assert contents(profiled / "adapter") == contents(plain / "adapter")
    assert not (plain / "profile.md").exists()
    assert (profiled / "config.toml").read_text() == (plain / "config.toml").read_text()

    table = (profiled / "profile.md").read_text()
    assert table in printed and printed.index(table) < printed.index("the adapter is a PEFT")
    assert table.startswith("Where the time went: 1 steps, ")
    rows = re.findall(r"^\| ([\w ]+) \| ([\d.]+) \| ([\d.]+)% \|  \|", table, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(ROWS)
    assert sum(float(share) for _, _, share in rows) == pytest.approx(100, abs=0.5)
    seconds = {name: float(value) for name, value, _ in rows}
    for name in ("sampling", "forward", "backward", "optimizer", "publishing", "waiting"):
        assert seconds[name] > 0, name


def test_what_is_wrapped_is_put_back_when_a_run_fails(tmp_path, small, monkeypatch):
    before = (rollout.answer_call, torch.autograd.backward, update.optimizer_step, TorchEngine.step)

    def fail(*_):
        raise RuntimeError("no step")

    monkeypatch.setattr("train.append_row", fail)
    with pytest.raises(RuntimeError, match="no step"):
        go(tmp_path / "fails", small, profile=2)
    after = (rollout.answer_call, torch.autograd.backward, update.optimizer_step, TorchEngine.step)
    assert after == before
    assert "--profile must be 0 or more" in refusal(["--profile", "-1"])
