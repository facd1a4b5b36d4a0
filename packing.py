"""Streams of tokens side by side: no padding, and what they begin with in common computed once.

In a causal model the state of a token depends on the tokens up to it, so streams that begin alike
(the samples of a group on their prompt, a batch on its system prompt, episodes whose first turns
agree) have equal states there. Sorted, they stand next to each other, and each adds to the packed
rows only what the stream before it did not have:

    input_ids (S, T)          packed (N)                  new rows    its tokens are the rows
    a b c d                   a b c d                     0:4         0 1 2 3
    a b e f g          ──►            e f g               4:7         0 1 4 5 6
    a b e h .                               h             7:8         0 1 4 7

Norms, projections and MLPs, which look at one token at a time, work on the N rows as they stand.
Attention takes a stream at a time: the new rows ask, the rows of all its tokens answer. Autograd
adds up what every stream asks of a shared row, so gradients are those of S separate streams.

What no wanted log-probability depends on is not computed at all: padding, the tokens after a
stream's last wanted one and, in the last layer, all but the wanted rows as queries.

Axes: S streams, T tokens, N packed rows, W of them wanted, M pairs of a row and its next token;
H query heads, K key-value heads, C channels of a head.

Left out on purpose: attention of many short streams in one call (a varlen kernel, where the device
has one), dropout drawn anew for each stream on a token that they share.
"""

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor


def gather(x: Tensor, rows: Tensor) -> Tensor:
    """x[rows] of x (N, D), each row as often as it is named: the backward pass, unlike that of an
    index, adds up in an order that is always the same."""
    return F.embedding(rows, x)


@dataclass
class Stretch:
    """Rows of one stream that ask together.

    queries: how many. visible: (queries, length of the stream), 0 for the tokens that each one sees
    and -inf for the others; None where query i is token i, so that it sees tokens 0..i.
    """

    queries: int
    visible: Tensor | None


@dataclass
class Packing:
    """What to compute for S streams; all tensors on the device of the model.

    ids, positions: (N,) the tokens and their places in their streams. sources: (N',) the rows of
    all tokens of every stream that has new rows, one stream after the other, and lengths: how many
    are each one's; None where nothing is shared, so that the rows are these. every: the stretches
    of all rows; asked: those of the wanted ones.

    wanted: (W,) rows that the head meets. The M different pairs of a wanted row and a next token
    are numbered: pair_rows (M,) places among the wanted rows, pair_targets (M,) the tokens.
    pairs: (number of wanted log-probabilities,) in the order of the mask, the pair of each.
    """

    ids: Tensor
    positions: Tensor
    sources: Tensor | None
    lengths: list[int]
    every: list[Stretch]
    asked: list[Stretch]
    wanted: Tensor
    pair_rows: Tensor
    pair_targets: Tensor
    pairs: Tensor

    def attend(self, q: Tensor, k: Tensor, v: Tensor, wanted: bool) -> Tensor:
        """q (N, H, C), or (W, H, C) of the wanted rows alone; k, v (N, K, C) -> as q."""
        stretches = self.asked if wanted else self.every
        if self.sources is not None:
            shape = (-1, *k.shape[1:])
            k, v = (gather(x.flatten(1), self.sources).view(shape) for x in (k, v))
        parts = zip(
            stretches,
            q.split([stretch.queries for stretch in stretches]),
            k.split(self.lengths),
            v.split(self.lengths),
            strict=True,
        )
        out = []
        for stretch, *heads_last in parts:
            if stretch.queries:
                q_part, k_part, v_part = (x.transpose(0, 1)[None] for x in heads_last)
                attended = F.scaled_dot_product_attention(
                    q_part,
                    k_part,
                    v_part,
                    attn_mask=stretch.visible,
                    is_causal=stretch.visible is None,
                    enable_gqa=True,
                )
                out.append(attended[0].transpose(0, 1))
        return torch.cat(out)


def pack(input_ids: Tensor, mask: Tensor, dtype: torch.dtype = torch.float32) -> Packing:
    """The packing of what is wanted: input_ids (S, T); mask (S, T-1), true at t where token t+1 is.

    dtype: of the model, whose attention takes its masks in it.
    Tokens after the last wanted one of a row are never looked at. Where nothing is wanted, the
    first token is computed all the same: a rank without work takes part in all ranks' passes.
    """
    device = input_ids.device
    input_ids, mask = input_ids.cpu(), mask.cpu()
    ends = (mask * torch.arange(1, mask.shape[1] + 1)).amax(1).tolist()  # (S,)
    if not any(ends):
        ends[0] = 1
    streams = [row[:end].tolist() for row, end in zip(input_ids, ends, strict=True)]
    order = sorted(range(len(streams)), key=streams.__getitem__)

    rows = torch.zeros(mask.shape, dtype=torch.long)  # (S, T-1): the packed row of each token
    new = []  # (stream, first new token), where there is one
    count = 0
    for before, s in pairwise([None, *order]):
        shared = 0 if before is None else common(streams[before], streams[s])
        rows[s, :shared] = rows[before, :shared] if shared else 0
        rows[s, shared : ends[s]] = torch.arange(count, count + ends[s] - shared)
        count += ends[s] - shared
        if shared < ends[s]:
            new.append((s, shared))

    # Of the rows that are wanted, those of a token with the same next one count once.
    pairs = torch.stack((rows[mask], input_ids[:, 1:][mask]))  # (2, wanted log-probabilities)
    (pair_rows, pair_targets), numbers = pairs.unique(dim=1, return_inverse=True)
    wanted, pair_rows = pair_rows.unique_consecutive(return_inverse=True)
    if not len(wanted):
        wanted = torch.zeros(1, dtype=torch.long)

    positions = [torch.arange(start, ends[s]) for s, start in new]
    first_rows = [int(rows[s, start]) for s, start in new]
    asking = [
        wanted[(wanted >= first) & (wanted < first + len(part))] - first
        for first, part in zip(first_rows, positions, strict=True)
    ]

    def stretch(s: int, queries: Tensor) -> Stretch:  # queries: their positions in stream s
        if torch.equal(queries, torch.arange(ends[s])):
            return Stretch(ends[s], None)
        future = torch.arange(ends[s]) > queries[:, None]
        visible = torch.zeros(future.shape, dtype=dtype).masked_fill_(future, float("-inf"))
        return Stretch(len(queries), visible.to(device))

    every = [stretch(s, part) for (s, _), part in zip(new, positions, strict=True)]
    asked = [
        stretch(s, part[places])
        for (s, _), part, places in zip(new, positions, asking, strict=True)
    ]
    sources = torch.cat([rows[s, : ends[s]] for s, _ in new])
    ids = torch.cat([input_ids[s, start : ends[s]] for s, start in new])
    shares = len(sources) > len(ids)
    tensors = (wanted, pair_rows, pair_targets, numbers)
    return Packing(
        ids.to(device),
        torch.cat(positions).to(device),
        sources.to(device) if shares else None,
        [ends[s] for s, _ in new],
        every,
        asked,
        *(tensor.to(device) for tensor in tensors),
    )


def common(a: list[int], b: list[int]) -> int:
    """How many tokens two streams begin with in common."""
    for number, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return number
    return min(len(a), len(b))
