"""The embedded sampler: continuous batching on one model, adapters chosen per request by name.

TorchEngine batches whatever waits. One step of it:

    waiting ──► admit ──► prefill what no slot holds yet ──► decode a token for every live slot
       ▲                                                         │ finished: the slot keeps its
       └───── the episode runs its tools, asks for a turn ◄──────┘ tokens until room is needed

A cache kept between calls is found by the longest token prefix under the same adapter: a group's
shared prompt and a conversation's earlier turns are the same mechanism.

Projections stay separate: q, k, v and gate, up as one product each, with one shrink for their
adapters, would save 9% of a layer when the tiny model decodes 32 rows and 5% at 128, and in the
shapes of Qwen3-0.6B 4% of prefill and nothing of such decoding (benchmarks/fusion.py), at the price
of a second copy of the base or of other names than the checkpoint's.

Adapters are directories on disk, of which max_adapters are in memory. A request that names another
one has it paged in before its prefill, and the one that was used least recently leaves:

    add_adapter ──► read, checked, ──► in memory ──── room is needed, no live request ───► on disk
                    fingerprinted          ▲                                                  │
                                           └── a request names it: read, same fingerprint? ◄──┘

Keys and values outlive the paging, since the weights are the same bytes. A directory that has gone
or changed meanwhile is an error for the request that names it, and for nobody else.

Axes: S live streams, T tokens, V vocabulary.

Left out on purpose: top-p, top-k and penalties (the trainer's ratio needs the full distribution),
beam search, paged memory (a slot is one stream of max_length tokens).
"""

import asyncio
import hashlib
import math
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

import lora
from broadcast import read_adapter
from model import KVCache, Qwen3
from segments import Stack, use_rows

# --- what every engine takes and gives, VLLMEngine too -------------------------------------------


@dataclass(frozen=True)
class Request:
    """One turn to sample. Temperature 0 takes the most probable token; a draw depends on the seed
    (None: the engine picks one) and on the token's position in the stream, and on nothing else."""

    prompt_ids: list[int]
    max_new_tokens: int
    temperature: float = 1.0
    adapter: str | None = None
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """What was sampled, stop token included. logprobs: at the sampling temperature (1 instead of
    0), of the full distribution."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: Literal["stop", "length"]


# Beside 0. Below, vLLM 0.32 samples at 0.01 and says so to its log alone (sampling_params.py).
TEMPERATURES = (0.01, 1e6)


def check_request(request: Request, vocab_size: int, max_length: int) -> None:
    """ValueError, before any work, for a request that no engine can serve."""
    prompt = request.prompt_ids
    # JSON knows no integers: 1.5 new tokens would never be reached, True is 1 to Python.
    whole = {"max_new_tokens": [request.max_new_tokens], "prompt_ids": prompt}
    whole |= {"stop_token_ids": request.stop_token_ids}
    whole |= {"seed": [] if request.seed is None else [request.seed]}
    for name, values in whole.items():
        if wrong := [value for value in values if type(value) is not int]:
            raise ValueError(f"{name}: {wrong[0]!r:.40} is no integer")
    if type(request.temperature) not in (int, float):
        raise ValueError(f"temperature must be a number, not {request.temperature!r:.40}")
    known = range(vocab_size)
    if not len(prompt):
        raise ValueError("the prompt is empty; sampling needs at least one token")
    for name, tokens in (("prompt_ids", prompt), ("stop_token_ids", request.stop_token_ids)):
        if outside := [token for token in tokens if token not in known]:
            raise ValueError(
                f"{name}: token id {outside[0]} is outside the vocabulary of {vocab_size}"
            )
    if len(prompt) + 1 > max_length:
        raise ValueError(
            f"prompt of {len(prompt)} tokens does not fit the context of {max_length}, where one "
            "new token needs room too: shorten it or raise max_length"
        )
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, not {request.max_new_tokens}")
    if request.temperature and not TEMPERATURES[0] <= request.temperature <= TEMPERATURES[1]:
        raise ValueError(
            f"temperature must be 0 or in {TEMPERATURES[0]:g}..{TEMPERATURES[1]:g}, not "
            f"{request.temperature!r:.40}"
        )


# --- drawing -------------------------------------------------------------------------------------

# See draw: blocks have at most so many tokens, a power of two, and smaller vocabularies have none.
BLOCK, UNDIVIDED = 512, 4096


def derive_seed(*parts: int) -> int:
    """63 bits from whatever numbers a sample, the same on every machine."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A number in [0, 1) for each (seed, position): splitmix64, a hash, so there is no state that a
    neighbour in the batch or the order of arrival could move. 24 bits, exact in fp32."""

    def mix(z: np.ndarray) -> np.ndarray:
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))

    step = np.uint64(0x9E3779B97F4A7C15)
    mixed = mix(mix(seeds + step) + positions.astype(np.uint64) * step)
    return (mixed >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-24)


def invert(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """weights (S, N), uniform (S, 1), both fp64 -> index (S, 1) drawn in proportion to the weights,
    and how far into its weight the uniform reaches, (S, 1): a uniform again."""
    cumulative = weights.cumsum(-1)
    # Below the total, also where rounding made the uniform 1. right=True: an index of weight 0 adds
    # nothing to the sum, so it is never the first one above the threshold.
    threshold = uniform.clamp(0, 1 - 2.0**-24) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, threshold, right=True)
    index = index.clamp_(max=weights.shape[1] - 1)  # NaN; found by its logprob
    return index, 1 - (cumulative.gather(1, index) - threshold) / weights.gather(1, index)


def draw(logits: Tensor, temperatures: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """logits (S, V), temperatures (S,), uniform (S,) -> tokens (S,), their logprobs (S,) in fp32.

    Inverts the cumulative distribution, which takes one number a row and no sort. Of a large one in
    two steps, since a sum over V numbers is fast and a running sum is not: first which block of
    tokens, then, by what is left of the uniform, which token of it (benchmarks/sampling_parts.py).

        blocks of 128     |  .10  |   .45   | .05 |  ...      1,187 of them in Qwen3's vocabulary
        uniform .37                 ▲ .60 of the way through the second block
        tokens in it              .03 .. .20 .. .11           again by .60
    """
    greedy = temperatures == 0
    if (temperatures != 1).any():  # else that pass over all logits would change nothing
        logits = logits.float() / torch.where(greedy, 1.0, temperatures)[:, None]
    probabilities = logits.softmax(-1, dtype=torch.float32)
    S, V = probabilities.shape
    inside, rest, before = probabilities, uniform[:, None].double(), 0
    if V > UNDIVIDED:
        blocks = probabilities.view(S, -1, math.gcd(V, BLOCK))
        block, rest = invert(blocks.sum(-1).double(), rest)
        inside = blocks.gather(1, block[:, :, None].expand(-1, 1, blocks.shape[2])).squeeze(1)
        before = block * blocks.shape[2]
    tokens = before + invert(inside.double(), rest)[0]
    if greedy.any():
        tokens = torch.where(greedy[:, None], probabilities.argmax(-1, keepdim=True), tokens)
    return tokens.squeeze(1), probabilities.gather(1, tokens).log().squeeze(1)


# --- the embedded engine -------------------------------------------------------------------------


def fingerprint(config: lora.LoRAConfig, tensors: dict[str, Tensor]) -> bytes:
    """Of all that an adapter computes."""
    digest = hashlib.sha256(repr(config).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().numpy())
    return digest.digest()


@dataclass
class Adapter:
    """A registered adapter: in memory, or only on disk."""

    directory: Path
    fingerprint: bytes
    in_memory: bool = False
    used: int = 0  # step of the last use: the oldest leaves first


@dataclass(eq=False)
class Stream:
    """A request on its way: waiting until it gets a slot, live from then on."""

    request: Request
    prompt: np.ndarray  # (T,) int32
    owner: int  # whose keys and values it may use, see TorchEngine.owners
    seed: int
    limit: int  # new tokens at most, by the request and by the context
    future: asyncio.Future
    slot: int = -1


class TorchEngine:
    """Continuous batching on one model, with a key-value cache reused by longest token prefix.

    slots: streams held at once, live or kept for reuse. max_length: tokens of a stream, prompt
    included. prefill_tokens: tokens of one prefill pass, padding included. max_adapters: how many
    are in memory at once (None: all), those that act together in one batch twice (segments.py).
    Adapters are published directories (broadcast.py), loaded beside the one base. The work is done
    in a background task of the running event loop, which ends when nothing is left to do.
    """

    def __init__(
        self,
        model: Qwen3,
        slots: int = 64,
        max_length: int = 1024,
        prefill_tokens: int = 8192,
        max_adapters: int | None = None,
    ):
        if slots < 1 or prefill_tokens < 1:
            raise ValueError(f"slots {slots} and prefill_tokens {prefill_tokens} must be positive")
        if max_adapters is not None and max_adapters < 1:
            raise ValueError(f"max_adapters must be at least 1, not {max_adapters}")
        if not 2 <= max_length <= model.config.max_position_embeddings:
            raise ValueError(
                f"max_length {max_length} must be in 2..{model.config.max_position_embeddings}, "
                "the model's max_position_embeddings"
            )
        weight = model.model.embed_tokens.weight
        self.model, self.device = model, weight.device
        self.slots, self.max_length, self.prefill_tokens = slots, max_length, prefill_tokens
        try:
            self.cache = KVCache(model.config, slots, max_length, weight.dtype, weight.device)
        except RuntimeError as error:
            what = f"no memory for the keys and values of {slots} slots of {max_length} tokens"
            raise RuntimeError(f"{what}; lower --slots or --max-length ({error})") from error
        self.live: list[Stream | None] = [None] * slots
        self.waiting: deque[Stream] = deque()
        # What each slot holds, also when no stream lives in it any more:
        self.tokens = np.zeros((slots, max_length), np.int32)
        self.lengths = np.zeros(slots, np.int64)  # tokens whose keys and values are cached
        self.owner = np.zeros(slots, np.int64)  # the adapter that computed them
        self.used = np.zeros(slots, np.int64)  # step of the last use: the oldest is evicted first
        # And how the stream that lives in it is sampled. Arrays, so that a step draws, records and
        # looks for ends in a few calls for all slots, and touches streams that end alone:
        self.seed = np.zeros(slots, np.uint64)
        self.temperature = np.zeros(slots, np.float32)
        self.end = np.zeros(slots, np.int64)  # tokens of the stream at most
        self.stops = np.zeros((slots, 0), np.int64)  # stop tokens, -1 where one has fewer
        self.logprobs = np.zeros((slots, max_length), np.float32)
        # An adapter gets a number that no other ever had: nothing computed under one is found under
        # another, nor under the same name loaded again.
        self.owners: dict[str | None, int] = {None: 0}
        self.adapters_added = self.steps = 0
        self.registered: dict[str, Adapter] = {}
        self.max_adapters = max_adapters
        self.stack = Stack(model, weight.dtype, weight.device)
        self.random = np.random.default_rng()
        self.task: asyncio.Task | None = None

    servers = 1  # as VLLMEngine.servers counts them: the trainer's probe asks each

    def name_of(self, server: int) -> str:
        return "the embedded engine"

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that a request may name."""
        return list(self.registered)

    def add_adapter(self, name: str, directory: str | Path) -> None:
        """Registers a published PEFT directory, the same files that vLLM reads, and loads it unless
        live requests need all the room there is.

        The directory must stay as it is until remove_adapter. Raises ValueError for a name that is
        taken and as read_adapter and lora.check_adapter, for what would fail later otherwise.
        """
        lora.check_name(self.model, name)
        if name in self.registered:
            raise ValueError(f"an adapter named {name!r} is there already, on disk")
        config, tensors = read_adapter(directory)
        lora.check_adapter(self.model, name, config, tensors)
        # An adapter that is never paged out is never compared: publishing does not pay for it.
        identity = b"" if self.max_adapters is None else fingerprint(config, tensors)
        adapter = Adapter(Path(directory).absolute(), identity)
        leaving = self.who_leaves()
        if leaving is not None:
            for other in leaving:
                self.page_out(other)
            lora.add_adapter(self.model, name, config, tensors)
            adapter.in_memory, adapter.used = True, self.steps
        self.registered[name] = adapter
        self.adapters_added += 1
        self.owners[name] = self.adapters_added

    def remove_adapter(self, name: str) -> None:
        """Forgets an adapter and what is cached of it; refused while a request needs it."""
        self.drop_cache(name)
        if self.registered[name].in_memory:
            self.page_out(name)
        del self.registered[name], self.owners[name]

    # Paging: which of the registered adapters are in memory.

    def who_leaves(self) -> list[str] | None:
        """Who would make room in memory for one more adapter: nobody while there is some, else the
        one used least recently; None if live requests need all that are there."""
        inside = [name for name, adapter in self.registered.items() if adapter.in_memory]
        if self.max_adapters is None or len(inside) < self.max_adapters:
            return []
        live = {stream.request.adapter for stream in self.live if stream}
        idle = [name for name in inside if name not in live]
        return [min(idle, key=lambda name: self.registered[name].used)] if idle else None

    def page_out(self, name: str) -> None:
        lora.remove_adapter(self.model, name)
        self.stack.forget(name)
        self.registered[name].in_memory = False

    @torch.inference_mode(False)  # tensors like those that add_adapter loads, in a step or not
    def page_in(self, name: str | None) -> bool:
        """Whether the adapter is in memory now. Raises RuntimeError if its directory is no longer
        what was added."""
        adapter = self.registered.get(name)
        if adapter is None or adapter.in_memory:  # None: the base
            return True
        leaving = self.who_leaves()
        if leaving is None:
            return False
        try:
            config, tensors = read_adapter(adapter.directory)
        except (ValueError, OSError) as error:
            raise RuntimeError(
                f"adapter {name!r} was paged out and cannot be read again: {error}"
            ) from error
        if fingerprint(config, tensors) != adapter.fingerprint:
            raise RuntimeError(
                f"adapter {name!r}: {adapter.directory} has changed since it was added, and keys "
                "and values that it computed are cached; publish under a new name and path"
            )
        for other in leaving:  # now that there is something to take its place
            self.page_out(other)
        lora.add_adapter(self.model, name, config, tensors)
        adapter.in_memory = True
        return True

    def drop_cache(self, adapter: str | None = None) -> None:
        """Forgets what was computed under `adapter` (None: under the base alone)."""
        owner = self.owner_of(adapter)
        users = sum(stream.owner == owner for stream in self.unfinished())
        if users:
            raise RuntimeError(f"adapter {adapter!r} is in use by {users} unfinished requests")
        held = self.owner == owner
        self.lengths[held] = self.used[held] = 0  # as if never used

    def owner_of(self, adapter: str | None) -> int:
        if adapter not in self.owners:
            raise ValueError(f"no adapter named {adapter!r}; the engine holds {self.adapters}")
        return self.owners[adapter]

    async def generate(self, request: Request) -> Completion:
        """Samples one request, in a batch with whatever else there is.

        Raises ValueError, before any work, for a request that cannot be served.
        """
        check_request(request, self.model.config.vocab_size, self.max_length)
        prompt = np.asarray(request.prompt_ids, dtype=np.int32)
        loop = asyncio.get_running_loop()
        idle = self.task is None or self.task.done()
        if not idle and self.task.get_loop() is not loop:
            raise RuntimeError("the engine is at work in another event loop")
        stream = Stream(
            request=request,
            prompt=prompt,
            owner=self.owner_of(request.adapter),
            seed=int(self.random.integers(2**63) if request.seed is None else request.seed) % 2**64,
            limit=min(request.max_new_tokens, self.max_length - len(prompt)),
            future=loop.create_future(),
        )
        if not self.reenter(stream):
            self.waiting.append(stream)
        if idle:
            self.task = loop.create_task(self.run())
        return await stream.future

    def unfinished(self) -> list[Stream]:
        everyone = [*self.waiting, *(stream for stream in self.live if stream)]
        return [stream for stream in everyone if not stream.future.done()]

    async def run(self) -> None:
        """The background task: steps until nothing is left, or until one fails."""
        try:
            while self.unfinished():
                self.step()
                # Episodes run their tools and ask for their next turns. Behind a server answer and
                # request take the loop two rounds each; whoever misses them waits for a step. Not
                # once nothing is left, although a next wave's first may then step alone: a loop
                # that ends meanwhile would cancel this task, and the cache would be cleared.
                for _ in range(4):
                    await asyncio.sleep(0)
                    if not self.unfinished():
                        break
        except BaseException as error:
            for stream in self.unfinished():  # nobody may wait for ever
                if isinstance(error, Exception):
                    stream.future.set_exception(error)
                else:
                    stream.future.cancel()
            self.live = [None] * self.slots
            self.waiting.clear()
            self.lengths[:] = self.used[:] = 0
            # A masked key has weight 0, but 0 times NaN is NaN: nothing bad may stay behind.
            self.cache.keys.zero_()
            self.cache.values.zero_()
            if not isinstance(error, Exception):
                raise

    @torch.inference_mode()
    def step(self) -> None:
        """Cancelled streams leave, waiting ones enter, every live one gets a token."""
        self.steps += 1
        for stream in self.live:
            if stream and stream.future.done():
                self.leave(stream)
        self.admit()
        names = {stream.request.adapter for stream in self.live if stream} - {None}
        for name in names:
            self.registered[name].used = self.steps
        if len(names) > 1 or not names <= {*self.stack.slots}:
            self.stack.hold(sorted(names, key=self.owners.get))
        self.prefill()
        self.decode()

    # Slots: who gets one, and what of its prompt is cached already.

    def shared_prefix(self, stream: Stream) -> np.ndarray:
        """(slots,): how many first tokens of the prompt each slot has too, cached or not. The
        prompt's last one never counts: it is computed anew for its logits."""
        T, shared = len(stream.prompt), np.zeros(self.slots, np.int64)
        its_own = np.flatnonzero(self.owner == stream.owner)
        same = self.tokens[its_own, :T] == stream.prompt
        shared[its_own] = np.where(same.all(axis=1), T - 1, same.argmin(axis=1))
        return shared

    def reenter(self, stream: Stream) -> bool:
        """Lets a conversation's next turn go on in the slot of the turn before.

        At once, before anybody in the queue can evict it; nothing is copied.
        """
        adapter = self.registered.get(stream.request.adapter)
        if adapter and not adapter.in_memory:
            return False
        shared = np.minimum(self.shared_prefix(stream), self.lengths)
        idle = np.array([other is None for other in self.live])
        whole = np.where(idle & (shared == self.lengths), shared, 0)
        slot = int(whole.argmax())
        if whole[slot] == 0 or whole[slot] < shared.max():
            return False
        self.enter(stream, slot)
        return True

    def admit(self) -> None:
        """Gives the idle slots to those who wait, each with the longest cached prefix there is."""
        promised = self.lengths.copy()  # what the slots will hold after this step's prefill
        for stream in self.live:
            if stream:
                promised[stream.slot] = max(promised[stream.slot], len(stream.prompt))
        postponed = []
        # A slot stays reserved for each one postponed, so that no newcomer overtakes it.
        while self.waiting and self.live.count(None) > len(postponed):
            stream = self.waiting.popleft()
            if stream.future.done():
                continue
            shared = self.shared_prefix(stream)
            cached = np.minimum(shared, self.lengths)
            missing = len(stream.prompt) - cached.max()
            if 2 * (len(stream.prompt) - np.minimum(shared, promised).max()) <= missing:
                # Most of what is missing is about to be computed, as by the first of a group for
                # the others: a step of patience saves doing it twice.
                postponed.append(stream)
                continue
            try:
                if not self.page_in(stream.request.adapter):
                    # Live requests will end and make room; who came later waits behind.
                    self.waiting.appendleft(stream)
                    break
                self.seat(stream, cached)
            except Exception as error:  # the fault of this request, and no matter of the others
                stream.future.set_exception(error)
                continue
            promised[stream.slot] = len(stream.prompt)
        self.waiting.extendleft(reversed(postponed))

    def seat(self, stream: Stream, cached: np.ndarray) -> None:
        """Gives a stream the idle slot that was used least recently, and what is cached of its
        prompt, (slots,) tokens in each."""
        source = int(cached.argmax())
        idle = [slot for slot, other in enumerate(self.live) if other is None]
        target = idle[int(self.used[idle].argmin())]
        if cached[source]:
            self.used[source] = self.steps
            if source != target:
                self.cache.copy(source, target, int(cached[source]))
        self.lengths[target] = cached[source]
        self.owner[target] = stream.owner
        self.enter(stream, target)

    def enter(self, stream: Stream, slot: int) -> None:
        request, T = stream.request, len(stream.prompt)
        self.tokens[slot, :T] = stream.prompt
        self.seed[slot], self.temperature[slot] = stream.seed, request.temperature
        self.end[slot] = T + stream.limit
        wider = len(request.stop_token_ids) - self.stops.shape[1]
        if wider > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, wider)), constant_values=-1)
        self.stops[slot] = -1
        self.stops[slot, : len(request.stop_token_ids)] = request.stop_token_ids
        self.live[slot], stream.slot = stream, slot

    def leave(self, stream: Stream) -> None:
        """The slot keeps what it holds, until somebody needs the room."""
        self.live[stream.slot] = None
        self.used[stream.slot] = self.steps

    # Computing: what the prompts lack, then a token for everybody.

    def prefill(self) -> None:
        """Computes what is not cached of the prompts of new streams; draws their first tokens."""

        def missing(stream: Stream) -> int:
            return len(stream.prompt) - int(self.lengths[stream.slot])

        new = [stream for stream in self.live if stream and missing(stream) > 0]
        while new:
            new.sort(key=missing, reverse=True)
            width = min(missing(new[0]), self.prefill_tokens)
            # Padding costs as much as tokens: those with less than half the width wait for a pass
            # of their own.
            batch = [s for s in new[: self.prefill_tokens // width] if 2 * missing(s) > width]
            slots = np.array([stream.slot for stream in batch])
            starts = self.lengths[slots]
            lengths = np.minimum([missing(stream) for stream in batch], width)
            columns = np.minimum(starts[:, None] + np.arange(width), self.max_length - 1)
            ids = self.tokens[slots[:, None], columns]
            rows = torch.as_tensor(slots, device=self.device)
            padded = bool((lengths < width).any())
            logits = self.extend(batch, ids, rows, starts, lengths if padded else None)
            self.lengths[slots] += lengths
            whole = [row for row, stream in enumerate(batch) if not missing(stream)]
            new = [stream for stream in new if missing(stream)]
            if whole:
                self.advance(logits[whole], slots[whole])

    def decode(self) -> None:
        """One more token for every live stream."""
        S = self.slots - self.live.count(None)
        if not S:
            return
        # Live streams move together into slots 0..S-1: a slice of the cache is read in place.
        gaps = [slot for slot in range(S) if self.live[slot] is None]
        beyond = [slot for slot in range(S, self.slots) if self.live[slot]]
        for a, b in zip(gaps, beyond, strict=True):
            self.cache.swap(a, b, int(self.lengths[[a, b]].max()))
            for array in (self.tokens, self.lengths, self.owner, self.used):
                array[[a, b]] = array[[b, a]]
            for array in (self.seed, self.temperature, self.end, self.stops, self.logprobs):
                array[a] = array[b]  # a is idle
            self.live[a], self.live[b] = self.live[b], None
            self.live[a].slot = a
        streams, starts = self.live[:S], self.lengths[:S]
        ids = self.tokens[np.arange(S), starts][:, None]  # the last token drawn
        logits = self.extend(streams, ids, slice(0, S), starts)
        self.lengths[:S] += 1
        self.advance(logits, np.arange(S))

    def extend(self, streams, ids, rows, starts, lengths=None) -> Tensor:
        """model.extend, with each stream's adapter on its row: logits (S, V)."""
        ids, starts = (torch.as_tensor(array, device=self.device) for array in (ids, starts))
        if lengths is not None:
            lengths = torch.as_tensor(lengths, device=self.device)
        with use_rows(self.model, self.stack, [stream.request.adapter for stream in streams]):
            return self.model.extend(ids, self.cache, rows, starts, lengths)

    def advance(self, logits: Tensor, slots: np.ndarray) -> None:
        """logits (S, V), slots (S,): draws the next token of the stream in each slot; those that
        end with it are answered and leave."""
        positions = self.lengths[slots]
        uniform = uniforms(self.seed[slots], positions)
        drawn = draw(
            logits,
            torch.as_tensor(self.temperature[slots], device=self.device),
            torch.as_tensor(uniform, device=self.device),
        )
        tokens, logprobs = (x.cpu().numpy() for x in drawn)
        finite = np.isfinite(logprobs)
        if not finite.all():
            for slot in slots[~finite]:
                self.expel(self.live[slot])
            slots, positions, tokens, logprobs = (
                x[finite] for x in (slots, positions, tokens, logprobs)
            )
        self.tokens[slots, positions] = tokens
        self.logprobs[slots, positions] = logprobs
        stopped = (tokens[:, None] == self.stops[slots]).any(axis=1)
        for row in np.flatnonzero(stopped | (positions + 1 == self.end[slots])):
            slot, stream = slots[row], self.live[slots[row]]
            sampled = slice(len(stream.prompt), positions[row] + 1)
            answer = Completion(
                self.tokens[slot, sampled].tolist(),
                self.logprobs[slot, sampled].tolist(),
                "stop" if stopped[row] else "length",
            )
            self.leave(stream)
            stream.future.set_result(answer)

    def expel(self, stream: Stream) -> None:
        """Ends a stream whose logits are not finite; its neighbours, of other adapters or of
        another run, go on. A masked key has weight 0, but 0 times NaN is NaN: nothing of it may
        stay in the slot."""
        slot = stream.slot
        error = FloatingPointError(
            f"adapter {stream.request.adapter!r} gives logits that are not finite, at position "
            f"{self.lengths[slot]} of a stream"
        )
        self.leave(stream)
        self.lengths[slot] = self.used[slot] = 0
        self.cache.keys[:, slot] = self.cache.values[:, slot] = 0
        if not stream.future.done():
            stream.future.set_exception(error)
