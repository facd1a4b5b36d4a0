"""Mixture of experts: each token visits k of E small MLPs, as in Qwen3-MoE (arXiv 2505.09388).

    p = softmax(gate(x))                              E probabilities a token, in fp32
    y = sum of p_e * down_e(silu(gate_e(x)) * up_e(x))   over the k largest p_e

with p divided by the sum of the k chosen where norm_topk_prob is set. Only the k chosen experts are
computed, and nothing loops over tokens: the (token, expert) pairs are sorted by expert, and each
projection of all experts is one grouped product.

    token  chosen     pairs by expert          ends
    t0     0, 2       expert 0: t0 t1          2
    t1     0, 2       expert 1: (nobody)       2      rows ends[e-1]:ends[e] of x (N, in)
    t2     2, 3       expert 2: t0 t1 t2       5      meet weight[e] (out, in)
                      expert 3: t2             6

In memory the experts of a layer are stacked: "mlp.experts.gate_proj.weight" (E, out, in). On disk,
in checkpoints as in adapters, each has a name of its own: "mlp.experts.7.gate_proj.weight".

What a router means for equality: the k-th and the next probability of a token may lie within
rounding of each other. Two correct programs (a trainer and a sampler, two batch sizes) then choose
different experts, and the outputs differ by more than rounding. It is rare in fp32; in bf16 it is
a known cause of collapse (arXiv 2510.11370, whose remedy is to replay the sampler's choices).

Axes: S sequences, T tokens, k experts of a token, N = S T k pairs, E experts, D hidden.

Left out on purpose: that replay, the load-balancing loss (beside an adapter the router is frozen;
with --full it trains, and without that loss), shared experts (Qwen3 has none), expert parallelism.
"""

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

PACKED_ROWS = (
    "adapters of some rows of a batch, and these are packed streams (packing.py), whose rows are "
    "tokens that several may share; score the streams of each adapter by themselves"
)

# --- the grouped product --------------------------------------------------------------------------


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """x (N, in), weight (E, out, in) -> (N, out): rows ends[e-1]:ends[e] of x times weight[e].T.

    ends: (E,) int32, ascending, the last one N; a group may be empty.
    """
    # grouped_mm knows no float64, and wants rows of a multiple of 16 bytes in and out.
    aligned = all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    if aligned and x.dtype != torch.float64:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)
    groups = x.tensor_split(ends[:-1].tolist())
    return torch.cat([F.linear(rows, matrix) for rows, matrix in zip(groups, weight, strict=True)])


@dataclass
class Pairs:
    """The (token, expert) pairs of a batch, sorted by expert; row i of an expert's input is pair i.

    sequences: (N,) the row of the batch that each pair's token stands in, None of packed tokens;
    experts: (N,) ascending.
    """

    sequences: Tensor | None
    experts: Tensor
    num_sequences: int
    num_experts: int

    def __post_init__(self):
        numbers = torch.arange(self.num_experts, device=self.experts.device)
        self.ends = torch.searchsorted(self.experts, numbers, right=True).to(torch.int32)  # (E,)

    def of(self, rows: slice | Tensor) -> tuple[Tensor, "Pairs"]:
        """The pairs of some sequences: their places among all, and themselves, still sorted.

        ValueError for packed tokens, of which nobody knows whose they are.
        """
        if self.sequences is None:
            raise ValueError(PACKED_ROWS)
        chosen = torch.zeros(self.num_sequences, dtype=torch.bool, device=self.experts.device)
        chosen[rows] = True
        places = chosen[self.sequences].nonzero().squeeze(1)
        pairs = (self.sequences[places], self.experts[places])
        return places, Pairs(*pairs, self.num_sequences, self.num_experts)


# --- layers ---------------------------------------------------------------------------------------


class GroupedLinear(nn.Module):
    """The same projection of E experts: E matrices (out, in) without bias, as one tensor."""

    def __init__(self, num_experts: int, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))
        nn.init.uniform_(self.weight, -(in_features**-0.5), in_features**-0.5)  # as nn.Linear

    def forward(self, x: Tensor, pairs: Pairs) -> Tensor:
        return grouped_linear(x, self.weight, pairs.ends)


class Experts(nn.Module):
    """E SwiGLU MLPs, of which each token visits its chosen ones."""

    def __init__(self, num_experts: int, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.num_experts = num_experts
        self.gate_proj = GroupedLinear(num_experts, hidden_size, intermediate_size)
        self.up_proj = GroupedLinear(num_experts, hidden_size, intermediate_size)
        self.down_proj = GroupedLinear(num_experts, intermediate_size, hidden_size)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x (S, T, D), chosen (S, T, k) numbers of experts, weights (S, T, k) -> (S, T, D).

        Packed tokens (packing.py) have one axis less: x (T, D), chosen, weights (T, k).
        """
        *S, T, k = chosen.shape
        experts, order = chosen.flatten().sort(stable=True)  # (N,)
        sequences = order // (T * k) if S else None
        pairs = Pairs(sequences, experts, S[0] if S else 1, self.num_experts)
        # Copied k times, then permuted: both have a deterministic backward pass, a gather has none.
        x = x.flatten(0, -2)[:, None].expand(-1, k, -1).flatten(0, 1)[order]  # (N, D)
        hidden = F.silu(self.gate_proj(x, pairs)) * self.up_proj(x, pairs)
        y = self.down_proj(hidden, pairs)[order.argsort()].view(*chosen.shape, -1)
        return (y * weights[..., None]).sum(-2)


class MixtureOfExperts(nn.Module):
    """Router and experts, in the place of a dense layer's MLP."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        num_experts_per_tok: int,
        norm_topk_prob: bool,
    ):
        super().__init__()
        self.num_experts_per_tok, self.norm_topk_prob = num_experts_per_tok, norm_topk_prob
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)  # the router, by its name there
        self.experts = Experts(num_experts, hidden_size, intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = self.gate(x).softmax(-1, dtype=torch.float32)  # (S, T, E)
        weights, chosen = probabilities.topk(self.num_experts_per_tok)  # (S, T, k)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(x, chosen, weights.to(x.dtype))


# --- names on disk --------------------------------------------------------------------------------

STACKED = re.compile(r"(.*\.experts)\.([a-z].*)")  # "...mlp.experts.gate_proj.weight"
SINGLE = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")  # "...mlp.experts.7.gate_proj.weight"


def split_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stacked tensors (E, ...) as E tensors with names of their own (views); others as they are."""
    split = {}
    for name, tensor in tensors.items():
        if match := STACKED.fullmatch(name):
            before, after = match.groups()
            split |= {f"{before}.{e}.{after}": part for e, part in enumerate(tensor)}
        else:
            split[name] = tensor
    return split


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse. Empties `tensors` as it goes, so that never two copies of a model exist.

    Raises ValueError that names an expert which is missing or has another shape than the first.
    """
    stacked, experts = {}, {}
    for name in list(tensors):
        if match := SINGLE.fullmatch(name):
            before, number, after = match.groups()
            experts.setdefault((before, after), {})[int(number)] = name
        else:
            stacked[name] = tensors.pop(name)
    for (before, after), names in experts.items():
        for e in range(max(names) + 1):
            name = f"{before}.{e}.{after}"
            if name not in tensors:
                raise ValueError(f"{name} is missing, and there is one of expert {max(names)}")
            if tensors[name].shape != tensors[names[min(names)]].shape:
                raise ValueError(
                    f"{name} has shape {tuple(tensors[name].shape)}, and that of expert "
                    f"{min(names)} {tuple(tensors[names[min(names)]].shape)}"
                )
        stacked[f"{before}.{after}"] = torch.stack([tensors.pop(names[e]) for e in sorted(names)])
    return stacked
