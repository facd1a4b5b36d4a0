"""--profile N: where the time of a run's first N steps went, as a table.

    python train.py --rank 8 --steps 3 --profile 3        prints profile.md of the run's directory

The loop knows nothing of it. While it is on, the functions that do the work of a stage are wrapped
from outside, and a stopwatch runs for whichever of them was entered last:

    take ............................................ token_logprobs  backward  optimizer_step
    │  step    step  answer_call  step  reward  │
    └ sampling ┴─── tool calls, scoring ... what is left of take is waiting

so no second counts twice, and all of them add up to the steps' time. A thread has a stopwatch of
its own: with --max-staleness tools run and answers are scored in the sampler's thread, beside the
trainer, and that is another column. What a server computes is not seen: the trainer waits for it,
or does not have to. Wall time; on a GPU kernels are waited for where a number is first read.

Left out on purpose: operators and their shapes (torch.profiler has them).
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import isawaitable
from time import perf_counter
from typing import Any

import torch

import rollout
import update

# (name in the table, what it is)
ROWS = {
    "sampling": "the embedded engine's steps: prefill, decode, draw",
    "tool calls": "parsed, checked, run",
    "scoring": "rewards; with --judge-url, while a judge is asked and nothing else runs",
    "forward": "logprobs of the sampled tokens, with the head's gradient; the reference's too",
    "backward": "from the head's input to the adapter",
    "optimizer": "clip, step",
    "publishing": "the adapter's directory written, checked, loaded by the engine",
    "waiting": "for episodes; with the embedded engine, their own Python: rendering, parsing",
    "the rest": "losses, metrics, probe, what is written",
}


@dataclass
class Lane:
    """A thread's stopwatch: seconds of each name, without what ran inside it."""

    base: str  # what runs when nothing named does
    seconds: Counter = field(default_factory=Counter)
    names: list[str] = field(default_factory=list)
    since: float = field(default_factory=lambda: perf_counter())

    def stop(self) -> None:
        """Books the time since the last call for what has run since then."""
        now = perf_counter()
        self.seconds[self.names[-1] if self.names else self.base] += now - self.since
        self.since = now

    @contextmanager
    def running(self, name: str) -> Iterator[None]:
        self.stop()
        self.names.append(name)
        try:
            yield
        finally:
            self.stop()
            self.names.pop()


class Stopwatch:
    """One lane a thread; the one that makes it is the trainer's."""

    def __init__(self):
        self.trainer = Lane("the rest")
        self.beside: Lane | None = None  # the sampler's thread, if there is one
        self.thread = threading.get_ident()

    def lane(self) -> Lane:
        if threading.get_ident() == self.thread:
            return self.trainer
        self.beside = self.beside or Lane("idle")
        return self.beside

    def wrapped(self, name: str, function: Callable) -> Callable:
        """The function, its time booked as `name`: until it returns and, if what it returns is to
        be awaited, while that is."""

        async def awaited(result):
            with self.lane().running(name):
                return await result

        def wrapper(*arguments, **options):
            with self.lane().running(name):
                result = function(*arguments, **options)
            return awaited(result) if isawaitable(result) else result

        return wrapper

    def table(self, steps: int) -> str:
        """Markdown: seconds a step and shares, of the trainer's thread and of the one beside it."""
        total = sum(self.trainer.seconds.values())
        lines = [
            f"Where the time went: {steps} steps, {total / steps:.2f} s each",
            "",
            "| what | s a step | share | beside, s a step | of it |",
            "|---|---|---|---|---|",
        ]
        for name, what in ROWS.items():
            seconds = self.trainer.seconds[name]
            beside = self.beside.seconds[name] / steps if self.beside else 0.0
            lines.append(
                f"| {name} | {seconds / steps:.3f} | {seconds / total:.1%} | "
                f"{f'{beside:.3f}' if beside else ''} | {what} |"
            )
        return "\n".join(lines) + "\n"


@contextmanager
def profiling(trainer: Any, steps: int) -> Iterator[Callable[[], None]]:
    """Inside, the first `steps` steps are timed (0: none). Yields what the loop calls after each
    step, which writes profile.md anew, and prints it after the last one: of those steps, or of a
    run that ends before."""
    watch, done = Stopwatch(), 0
    places = [
        ("tool calls", rollout, "answer_call"),
        ("scoring", trainer.environment, "reward"),
        ("forward", trainer.model, "token_logprobs"),
        ("backward", torch.autograd, "backward"),
        ("optimizer", update, "optimizer_step"),
        ("publishing", trainer, "publish"),
        ("waiting", trainer.pipeline, "take"),
    ]
    if hasattr(trainer.engine, "step"):  # the embedded engine
        places.append(("sampling", trainer.engine, "step"))
    if trainer.frozen is not None:  # of full fine-tuning
        places.append(("forward", trainer.frozen, "token_logprobs"))
    file = trainer.run.directory / "profile.md"

    def step_done() -> None:
        nonlocal done
        done += 1
        if done > steps:
            return
        watch.trainer.stop()
        file.write_text(watch.table(done))
        if done == steps:
            wraps.close()
            show()

    def show() -> None:
        print(f"\n{file.read_text()}written to {file}\n", flush=True)

    with ExitStack() as wraps:
        for name, owner, attribute in places if steps else ():
            timed = watch.wrapped(name, getattr(owner, attribute))
            wraps.callback(replace(owner, attribute, timed))
        try:
            yield step_done
        finally:
            if 0 < done < steps:
                show()


def replace(owner: Any, attribute: str, value: Any) -> Callable[[], None]:
    """Sets an attribute; what it returns puts back what was there, or was inherited."""
    own, before = attribute in vars(owner), vars(owner).get(attribute)
    setattr(owner, attribute, value)
    return lambda: setattr(owner, attribute, before) if own else delattr(owner, attribute)
