"""Many adapters in one batch: the base product once over all rows, the low-rank updates together.

A server of many adapters (the versions of a run, the runs of a fleet) would be as slow as all of
them one after another if each had a batch of its own. But x W0^T is the same for everybody; what
differs is x A^T B^T, a few percent of the work. So all rows share a batch, in any order, and those
of one adapter, its segment, are brought together for the update alone:

    row  adapter      slot   its rows, padded      A (N, R, in)       B (N, R, out)
    x0   b            0  a   x2  x4  ─┐
    x1   c            1  b   x0  --   ├──────────► shrink, one bmm ─► expand, one bmm ──► added to
    x2   a     ──►    2  c   x1  x5  ─┘            (N, m, R)          (N, m, out)         y2 y4 y0
    x3   -                   (N, m, in)                                                   y1 y5
    x4   a
    x5   c     ──►    y = base(x): one product for all six rows, x3 included

This is the shrink and expand of Punica (arXiv 2310.18547) with torch's batched product for a
kernel. Ranks, scalings and targets may differ: A and B are padded with zeros to the largest rank,
and the scaling is folded into B. As in S-LoRA (arXiv 2311.03285), adapters that are not needed live
elsewhere (engine.py: on disk) and enter a slot when a request names them.

Padding must not cost more than it saves. If one segment is much longer than the others, it is
applied alone, as lora.py does it: a long product needs no company. And if all rows have one
adapter, as in a run, nothing is brought together: its slot serves the batch as it stands, and the
second product is added to y by the product itself (addmm), without a pass for the scaling, a tensor
for the update, and a pass for the sum: two to three times as fast as the definition, at decode
sizes (benchmarks/sampling_parts.py).

Why not torch.nn.functional.grouped_mm, which needs no padding: on CPUs it makes one product after
another, and for segments of one to four rows what surrounds each product takes longer than it does
(benchmarks/adapters.py prints both). Experts have it; there the segments are long.

Axes: S rows (sequences), T tokens, N slots of the stack, R rank.

Left out on purpose: gradients (a run trains one adapter, on all rows), and experts, to which
lora.py applies segment after segment.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from lora import LoRAGrouped, LoRALinear, lora_layers, matrix_shape, use_adapters

PADDING = 2  # rows computed together, idle slots too, may be this many times those there are


class Stack:
    """A and B of the adapters that act together, side by side: a copy of what the layers hold.

    It changes only when other adapters than it holds are asked for, and then by one slot for each;
    slots of those that have left are kept until they are needed. Never more than the most adapters
    that were ever held at once.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype, device: torch.device):
        self.model, self.dtype, self.device = model, dtype, device
        self.slots: list[str | None] = []  # name of the adapter in each, None: free
        self.matrices: dict[LoRALinear, tuple[Tensor, Tensor]] = {}  # (N, R, in), (N, R, out)
        self.views: dict[int, dict[LoRALinear, tuple[Tensor, Tensor]]] = {}  # see of_slot

    @torch.inference_mode()
    def hold(self, names: Iterable[str]) -> None:
        """Makes sure that these adapters, which the model holds, have slots."""
        names = list(dict.fromkeys(names))
        missing = [name for name in names if name not in self.slots]
        roomy = len(self.slots) > PADDING * len(names)
        if not missing and not roomy:
            return
        layers = [m for m in lora_layers(self.model).values() if not isinstance(m, LoRAGrouped)]
        free = [slot for slot, name in enumerate(self.slots) if name not in names]
        fit = all(
            layer in self.matrices and len(layer.lora_A[name]) <= self.matrices[layer][0].shape[1]
            for layer in layers
            for name in missing
            if name in layer.lora_A
        )
        if roomy or len(missing) > len(free) or not fit:
            self.make(layers, names)
            free, missing = range(len(names)), names
        for slot, name in zip(free, missing, strict=False):
            self.write(slot, name)

    def make(self, layers: list[LoRALinear], names: list[str]) -> None:
        """As many free slots as there are names, with room for the rank of each."""
        self.slots, self.matrices, self.views = [None] * len(names), {}, {}
        for layer in layers:
            ranks = [len(layer.lora_A[name]) for name in names if name in layer.lora_A]
            if ranks:
                rank = max(ranks)
                out_size, in_size = matrix_shape(layer.base)
                self.matrices[layer] = tuple(
                    torch.zeros(len(names), *shape, dtype=self.dtype, device=self.device)
                    for shape in ((rank, in_size), (rank, out_size))
                )

    def write(self, slot: int, name: str) -> None:
        for layer, (A, B) in self.matrices.items():
            A[slot] = B[slot] = 0
            if name in layer.lora_A:
                rank = len(layer.lora_A[name])
                A[slot, :rank] = layer.lora_A[name]
                B[slot, :rank] = layer.lora_B[name].mT * layer.scaling[name]
        self.slots[slot] = name

    def of_slot(self, slot: int) -> dict[LoRALinear, tuple[Tensor, Tensor]]:
        """Views of one slot, (in, R) and (R, out) of each layer, made once: a small model's decode
        step takes milliseconds, and slicing 28 pairs of matrices again would be 3% of them."""
        if slot not in self.views:
            self.views[slot] = {
                layer: (A[slot].mT, B[slot]) for layer, (A, B) in self.matrices.items()
            }
        return self.views[slot]

    def forget(self, name: str) -> None:
        """Frees a slot: the adapter leaves for good, or other weights come under its name."""
        self.slots = [None if held == name else held for held in self.slots]


class Batch:
    """Which row of a batch has which adapter; made once a step, used by every layer.

    names: of each row's adapter, None for the base. Those that the stack does not hold are applied
    alone, and those whose segments are so long that padding the others to it would cost too much.
    """

    def __init__(self, stack: Stack, names: Sequence[str | None]):
        self.everywhere = len(set(names)) == 1 and names[0] in stack.slots
        if self.everywhere:
            self.segments, self.alone = [(names[0], None)], []
            self.matrices = stack.of_slot(stack.slots.index(names[0]))
            return
        rows: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            if name is not None:
                rows.setdefault(name, []).append(row)
        by_adapter = torch.tensor([row for its in rows.values() for row in its]).to(stack.device)
        self.segments = list(zip(rows, by_adapter.split([*map(len, rows.values())]), strict=True))
        together = sorted((n for n in rows if n in stack.slots), key=lambda name: len(rows[name]))
        total = sum(len(rows[name]) for name in together)
        while together and len(together) * len(rows[together[-1]]) > PADDING * total:
            total -= len(rows[together.pop()])
        if len(together) == 1:
            together = []
        self.alone = [(name, index) for name, index in self.segments if name not in together]
        self.matrices = stack.matrices if together else {}
        if not together:
            return
        longest = len(rows[together[-1]])
        # All slots, unless too many would be idle: then those that are used are copied out.
        slots, self.chosen = list(range(len(stack.slots))), None
        if len(slots) * longest > PADDING * total:
            slots = [slot for slot in slots if stack.slots[slot] in together]
            self.chosen = torch.tensor(slots).to(stack.device)
        padded, targets, places = [], [], []
        for slot in slots:
            its_rows = rows[stack.slots[slot]] if stack.slots[slot] in together else []
            targets += its_rows
            places += range(len(padded), len(padded) + len(its_rows))
            padded += its_rows + [0] * (longest - len(its_rows))  # whose updates nobody reads
        self.rows = torch.tensor(padded).to(stack.device)  # (N m): the segment of each slot
        self.targets = torch.tensor(targets).to(stack.device)  # the rows that get an update
        self.places = torch.tensor(places).to(stack.device)  # and where in (N m) it stands

    def add_updates(self, layer: LoRALinear, x: Tensor, y: Tensor) -> Tensor:
        """y (S, T, out) plus, in place, the update of every row's adapter on x (S, T, in)."""
        for name, rows in self.alone:
            if name in layer.lora_A:
                y[rows] += layer.update(name, x[rows])
        if layer in self.matrices:
            A, B = self.matrices[layer]
            if self.everywhere:
                y.view(-1, y.shape[-1]).addmm_(x.flatten(0, 1) @ A, B)  # A (in, R), B (R, out)
                return y
            if self.chosen is not None:
                A, B = A[self.chosen], B[self.chosen]
            # index_select and index_add_: on CPUs twice as fast as x[rows] and y[targets] += ...
            its_x = x.index_select(0, self.rows).view(len(A), -1, x.shape[-1])  # (N, m T, in)
            narrow = torch.bmm(its_x, A.mT)  # (N, m T, R)
            wide = torch.bmm(narrow, B).view(-1, *y.shape[1:])  # (N m, T, out)
            y.index_add_(0, self.targets, wide.index_select(0, self.places))
        return y


def use_rows(model: nn.Module, stack: Stack, names: Sequence[str | None]):
    """Context manager: inside, row i of the batch has the adapter names[i] (None: the base alone).

    ValueError for a name that the model does not hold. No gradient passes.
    """
    if len(set(names)) == 1 and (names[0] is None or names[0] not in stack.slots):
        return use_adapters(model, [(names[0], None)] if names[0] is not None else [])
    batch = Batch(stack, names)
    return use_adapters(model, batch.segments, batch)
