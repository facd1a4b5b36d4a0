"""More than one process: each rank holds a replica, and rank 0 alone runs the run.

    torchrun --nproc-per-node 2 train.py --rank 8
    torchrun --nproc-per-node 8 train.py --device cuda --shard-base --engine vllm --vllm-url URL

Rank 0 is the program of one process: it samples, scores, publishes, evaluates, prints and writes.
The others wait for its orders, a function and their share of the work:

      rank 0    sample, score, advantages, micro-batches
        │ scatter: a function of the program, every N-th micro-batch
      ┌─┴────────┬──────────┐
    rank 0     rank 1     rank 2    forward, backward; an optimizer step later, the same state
      └─┬────────┴──────────┘
        │ gather: loss and logprobs of each micro-batch        all-reduce: one flat fp32 buffer,
      rank 0    metrics as of one process                      the gradients of A and B alone

The micro-batches are those of one process, so who computes which changes the order of a sum and
nothing else. The adapter is sent once, at the start, new or of a checkpoint (of any number of
ranks); from then on all take the same optimizer steps. A replica that drifted would show in
`mismatch_max`, which is over the logprobs of all ranks.

--shard-base: FSDP2 gives each rank 1/N of every frozen tensor, gathered a layer at a time while it
is in use. The adapter is put in afterwards, so FSDP never sees it: every rank has a whole one. A
forward pass then takes all ranks: in rank 0's own (probe, self-check) the others accompany it, and
a rank without a micro-batch computes an empty one.

A rank that dies closes its connections: whoever waits for it raises LostRank, and torchrun ends the
rest. Rank 0 saves what was whole first. A rank that hangs in an order is noticed after PATIENCE.

Left out on purpose: sampling on other ranks than 0 (vLLM scales it, by its own parallelism and by
more servers), dropout masks that do not depend on the number of ranks.
"""

import io
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from lora import trainable

# How long ranks wait for one another within an order, which is for all at once, and rank 0 until
# all take one; and how long the others wait for one, while rank 0 samples or evaluates. Only a rank
# that hangs is waited for that long: one that dies closes its connections.
PATIENCE, ORDER_PATIENCE = timedelta(minutes=30), timedelta(days=7)
order_group: dist.ProcessGroup | None = None  # of all ranks, with the second; made by join


class LostRank(RuntimeError):
    """Another rank does not answer; it died, and its own last line says of what, or it hangs."""


@contextmanager
def noticing_loss() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        reason = str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0]
        raise LostRank(f"another rank died, or hangs ({reason})") from error


# --- ranks ----------------------------------------------------------------------------------------


class Replica(NamedTuple):
    """What every rank holds, rank 0 too; start.py makes it."""

    model: nn.Module
    lora: Any  # the adapter's LoRAConfig; None: there is none, every weight is trained
    optimizer: torch.optim.Optimizer
    base_parameters: int
    frozen: nn.Module | None = None  # the reference of full fine-tuning


def world_size() -> int:
    """Ranks that have joined; 1 without torchrun."""
    return dist.get_world_size() if dist.is_initialized() else 1


def follows() -> bool:
    """Whether torchrun started this process, and not as rank 0."""
    return int(os.environ.get("RANK", 0)) > 0


def join() -> None:
    """Meets the other ranks that torchrun started, each on the GPU of its LOCAL_RANK, if any."""
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    global order_group
    # Objects travel over gloo, a GPU's gradients over NCCL.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=PATIENCE)
    order_group = dist.new_group(backend="gloo", timeout=ORDER_PATIENCE)


def leave() -> None:
    """Ends this rank's part. No group is left to the interpreter's own end, where gloo's threads
    outlive what they belong to and abort the process ("terminate called")."""
    global order_group
    dist.destroy_process_group()
    order_group = None


@contextmanager
def leading() -> Iterator[None]:
    """What rank 0 does inside, it may do with the others; at the end they are sent home."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        yield
        return
    join()
    try:
        yield
    except LostRank:
        raise  # who is left cannot be reached: an order is for all
    except BaseException:
        if dist.is_initialized():  # else it failed within an order, see Ranks.obey
            with suppress(LostRank):
                give([None] * world_size())
        raise
    give([None] * world_size())
    leave()


def follow() -> None:
    """What every other rank does: makes a replica, then obeys until rank 0 has no more orders."""
    join()
    # Ctrl-C and SIGTERM are rank 0's to answer, which then sends the others home.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if first := take():
        load, arguments = first
        replica = load(*arguments)
        ranks = Ranks(replica.model, replica.optimizer, replica.frozen)
        while order := take():
            ranks.obey(*order)
    leave()


def give(orders: list) -> Any:
    """Rank 0 sends each rank its order, and gets its own."""
    return exchange(orders)


def take() -> Any:
    """The order of another rank, for which it waits."""
    return exchange(None)


def exchange(orders: list | None) -> Any:
    received, patience = [None], PATIENCE if orders else ORDER_PATIENCE
    with noticing_loss():
        dist.monitored_barrier(order_group, timeout=patience)
        dist.scatter_object_list(received, orders, src=0, group=order_group)
    return received[0]


def recruit(load: Callable[..., Replica], *arguments) -> Replica:
    """load(*arguments) on every rank, which keeps what it made; returns rank 0's.

    load: a function that all ranks can import.
    """
    if world_size() > 1:
        give([(load, arguments)] * world_size())
    return load(*arguments)


@dataclass
class Ranks:
    """This rank's replica, and on rank 0 the way to have the others work with theirs."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None
    frozen: nn.Module | None = None  # the reference of full fine-tuning

    def __post_init__(self):
        self.size, self.number = world_size(), dist.get_rank() if world_size() > 1 else 0
        self.sharded = is_sharded(self.model)
        self.device = next(iter(trainable(self.model).values())).device  # of what it computes
        self.busy = False  # all are in one order

    def lead(self, seed: int) -> None:
        """Rank 0: gives all its parameters and the optimizer's state, fresh or of a checkpoint.

        seed: of the others' dropout.
        """
        if self.size > 1:
            state = {name: p.detach() for name, p in trainable(self.model).items()}
            torch.save((state, self.optimizer.state_dict()), data := io.BytesIO())
            self.everywhere(adopt, data.getvalue(), seed)
        if self.sharded:
            alone = self.model.token_logprobs  # which FSDP has wrapped, to gather for a pass

            def token_logprobs(*arguments):
                if self.busy:  # within an order, which has all ranks make this pass
                    return alone(*arguments)
                give([(accompany, (), False)] * self.size)
                return self.obey(lambda ranks: alone(*arguments), (), False)

            self.model.token_logprobs = token_logprobs

    def everywhere(self, function: Callable, *arguments) -> Any:
        """function(ranks, *arguments) on every rank; returns rank 0's result.

        Nobody waits for the others' end, so what rank 0 has done is done, whoever dies meanwhile.
        """
        order = (function, arguments, False)
        if self.size > 1:
            order = give([order] * self.size)
        return self.obey(*order)

    def map(self, function: Callable, items: list, *arguments, empty: Any = None) -> list:
        """Results of all items, in order: function(ranks, share, *arguments) returns those of its
        share, a list of every N-th item. empty: an item that fills the shares up where the base is
        sharded, since each forward pass needs all ranks."""
        if self.size == 1:
            return function(self, items, *arguments)
        lacking = -len(items) % self.size if self.sharded else 0
        shared = [*items, *[empty] * lacking]
        shares = [shared[number :: self.size] for number in range(self.size)]
        results = self.obey(*give([(function, (share, *arguments), True) for share in shares]))
        return [results[i % self.size][i // self.size] for i in range(len(items))]

    def obey(self, function: Callable, arguments: tuple, answers: bool) -> Any:
        """Carries out an order; with `answers`, rank 0 gets the results of all ranks.

        If rank 0 fails in it, it leaves the others: where each of them waits, nobody knows, and no
        order would find them there. Unless they failed as well, they raise LostRank.
        """
        self.busy = True
        try:
            result = function(self, *arguments)
        except BaseException:
            if self.size > 1 and self.number == 0:
                leave()
            raise
        finally:
            self.busy = False
        if not answers:
            return result
        results = [None] * self.size if self.number == 0 else None
        with noticing_loss():
            dist.gather_object(result, results, dst=0)
        return results

    def reduce_gradients(self) -> None:
        """Sums the gradients of all ranks, on every rank, in one flat fp32 buffer.

        A parameter without a gradient anywhere stays without: zeros would still move it, by Adam's
        momentum. So behind the gradients stands, for each parameter, how many ranks have one.
        """
        if self.size == 1:
            return
        parameters = list(trainable(self.model).values())
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        owners = torch.tensor([p.grad is not None for p in parameters], dtype=torch.float32)
        flat = torch.cat(
            [g.flatten().float() for g in gradients] + [owners.to(gradients[0].device)]
        )
        with noticing_loss():
            dist.all_reduce(flat)
        *sums, owners = flat.split([p.numel() for p in parameters] + [len(parameters)])
        for parameter, gradient, owned in zip(parameters, sums, owners.tolist(), strict=True):
            parameter.grad = gradient.view_as(parameter).to(parameter.dtype) if owned else None


def adopt(ranks: Ranks, data: bytes, seed: int) -> None:
    """Takes over rank 0's state; only dropout is drawn by each rank for itself."""
    if ranks.number:
        stream = io.BytesIO(data)
        parameters, optimizer_state = torch.load(stream, map_location="cpu", weights_only=True)
        with torch.no_grad():
            for name, parameter in trainable(ranks.model).items():
                parameter.copy_(parameters[name])
        ranks.optimizer.load_state_dict(optimizer_state)
        torch.manual_seed(seed + ranks.number)


def traffic(trained: int, weights: int, sharded: bool = False) -> str:
    """What a step sends, in one line; trained, weights: numbers of parameters."""
    return (
        f"{world_size()} ranks; a step all-reduces {trained * 4 / 1e6:,.2f} MB of gradients, "
        f"of every weight it would be {weights * 4 / 1e6:,.2f} MB (1/{weights / trained:.0f})"
        f"{'; besides, every pass gathers the sharded base' if sharded else ''}"
    )


# --- the sharded base -----------------------------------------------------------------------------


def shard_base(model: nn.Module, device: str) -> None:
    """Leaves on this rank, on its device, 1/N of each tensor of a frozen model; on all ranks alike.

    Call it before inject_lora. The tensors move a layer at a time: no device has to hold the whole
    model, but each rank has read one into the host's memory: of a mixture, whose experts are
    stacked, N copies for N ranks of a host; of a dense model in its own dtype the ranks share the
    pages of the file.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    model.requires_grad_(False)
    mesh = init_device_mesh(torch.device(device).type, (world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    # Embedding, last norm and head; a frozen head is not needed again in the backward pass.
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    register_fsdp_forward_method(model, "token_logprobs")


def is_sharded(model: nn.Module) -> bool:
    return any(hasattr(parameter, "full_tensor") for parameter in model.parameters())


@torch.no_grad()
def accompany(ranks: Ranks) -> None:
    """Takes part in a forward pass that rank 0 alone needs."""
    if ranks.number:
        nothing = torch.zeros(1, 1, dtype=torch.bool, device=ranks.device)
        token_ids = torch.zeros(1, 2, dtype=torch.long, device=ranks.device)
        ranks.model.token_logprobs(token_ids, nothing)


def check_ranks(config) -> None:
    """ValueError for what this number of ranks cannot do."""
    if config.shard_base and world_size() == 1:
        raise ValueError(
            "--shard-base shares the base out among ranks, and this is one process; start several "
            "by torchrun --nproc-per-node N"
        )
    if world_size() == 1:
        return
    if config.device not in ("cpu", "cuda"):
        raise ValueError(f"--device {config.device} would be every rank's; say cuda, each has one")
    if config.engine == "vllm" and not config.vllm_url:
        raise ValueError(
            "a vLLM server of the run's own would share rank 0's device and environment; start "
            "servers beside it and name each by --vllm-url"
        )
