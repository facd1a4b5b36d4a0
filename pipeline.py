"""Sampling and training at the same time: batches in order, each by one version of bounded age.

Version v is the adapter after v steps, batch b makes step b + 1 of it. A batch may be sampled by a
version up to k = --max-staleness steps older than the one that it trains; k = 0 takes turns:

    k = 0    sampler │ batch 0, v0 │          │ batch 1, v1 │          │ batch 2, v2 │
             trainer │             │ step ► v1│             │ step ► v2│             │ step ► v3│

    k = 1    sampler │ batch 0, v0 │ batch 1, v0 │ batch 2, v1 │ batch 3, v2 │ ...
             trainer │             │ step ► v1│  │ step ► v2│  │ step ► v3│  │ ...
                                              └── v1 is published: batch 2 may start

The one rule: when the trainer asks for batch b, version b is the newest, so every batch up to b + k
that is not under way starts now, with version b, and keeps it from its first turn to its last. Then
the trainer waits for batch b. So staleness is at most k, by construction; the trainer asserts it.
(Drawn one after another, batches under way in fact share the sampler: the next one fills the rows
that the last episodes of the one before leave empty.)

With k > 0 the sampler is a server in another process, and its client lives here, in a thread with
an event loop of its own: torch releases Python's lock in its kernels, so turns are answered and
tools run while the trainer computes. Only that thread touches requests; only the trainer's thread
starts batches, publishes and retires versions, so there is no lock. With k = 0 there is no thread:
what is asked for is awaited in place.

A version is alive while a batch under way names it, or while it is the newest: at most k + 2, the
one about to be retired included.

Left out on purpose: changing the version within an episode (its tokens would be of several
policies), taking batches out of order, mixing episodes of several versions in a batch.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any


class Pipeline:
    """The batches under way. `async with` it, where staleness > 0: that is the thread's life."""

    def __init__(self, staleness: int = 0):
        self.staleness = staleness
        self.under_way: dict[int, tuple[int, Awaitable]] = {}  # batch -> its version, its episodes
        self.loop: asyncio.AbstractEventLoop | None = None  # None: the caller's own

    @property
    def versions(self) -> set[int]:
        """Those that a batch under way names, which must not be retired."""
        return {version for version, _ in self.under_way.values()}

    def on_sampler(self, coroutine: Coroutine) -> Awaitable:
        """The coroutine where the sampler's client lives; with a thread it starts at once."""
        if self.loop is None:
            return coroutine
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self.loop))

    async def take(
        self, batch: int, end: int, play: Callable[[int], Coroutine]
    ) -> tuple[Any, float]:
        """What batch number `batch` came to, and the seconds that it took; to be asked in order.

        First starts every batch before `end` that may be sampled by the newest version, which is
        number `batch`. play(b): a coroutine for the episodes of batch b by that version, looked up
        when it is made, not when it is awaited. An error is raised when its batch is asked for.
        """
        for ahead in range(batch, min(batch + self.staleness + 1, end)):
            if ahead not in self.under_way:
                self.under_way[ahead] = batch, self.on_sampler(timed(play(ahead)))
        episodes = await self.under_way[batch][1]
        del self.under_way[batch]
        return episodes

    async def drop(self) -> None:
        """Cancels all batches under way, and waits until they have ended."""
        started = [future for _, future in self.under_way.values()]
        self.under_way.clear()
        if self.loop is not None:
            await self.on_sampler(cancel_others())
            await asyncio.gather(*started, return_exceptions=True)  # nobody asks for them any more

    async def __aenter__(self) -> "Pipeline":
        if self.staleness:
            self.loop = asyncio.new_event_loop()
            self.thread = threading.Thread(
                target=self.loop.run_forever, name="sampler", daemon=True
            )
            self.thread.start()
        return self

    async def __aexit__(self, *_) -> None:
        try:
            await self.drop()
        finally:  # a second Ctrl-C must not leave the thread behind
            if self.loop is not None:
                self.loop.call_soon_threadsafe(self.loop.stop)
                self.thread.join()
                self.loop.close()
                self.loop = None


async def timed(coroutine: Coroutine) -> tuple[Any, float]:
    started = time.monotonic()
    return await coroutine, time.monotonic() - started


async def cancel_others() -> None:
    """Ends every other task of this event loop."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
