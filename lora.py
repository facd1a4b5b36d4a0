"""LoRA in one file: W = W0 + (alpha / r) B A  (Hu et al. 2021, arXiv 2106.09685, section 4.1).

        x (.., in) ──────────► W0 (out, in), frozen ───────────────► + ──► y (.., out)
              │                                                      ▲
              └─► dropout ─► A (r, in) ─► B (out, r) ─► * alpha / r ─┘

A starts Kaiming-uniform (as in the authors' code; their paper says Gaussian), B starts at zero, so
training starts exactly at the base model.

One layer, one mechanism. A layer holds any number of named adapters beside one frozen base, and a
selection that all layers of a model share says which adapter acts on which rows of the batch:

        selection                               y
        [("trainable", None)]                   base(x) + update of the adapter in training
        []                                      base(x): the reference policy, for free
        [("v17", None)]                         base(x) + update of version 17: the sampler
        [("a", 0:3), ("b", 3:5)]                rows 0-2 with a, rows 3-4 with b, the rest the base

so the trainer, the reference and every sampler version share one set of base tensors. Here segment
follows segment, which is the definition; segments.py applies many short ones together. A projection
of experts (experts.py) is E such layers at once, each expert with an A and a B of its own.

Axes: S rows (sequences), R rank, E experts, N (token, expert) pairs. Adapter tensors are fp32
masters, used in the base's dtype.

Left out on purpose: variants (DoRA, rsLoRA, LoRA+), biases, embeddings and the output head as
targets, and merging as a side effect of train() or eval(): merging is a call that one sees.

    python lora.py Qwen/Qwen3-4B-Instruct-2507 --rank 8       what is trained, stored and shipped
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn
from torch.nn import Parameter

from experts import PACKED_ROWS, GroupedLinear, Pairs, grouped_linear

TRAINABLE = "trainable"  # the name of the one adapter that has gradients
# "experts" is the three projections of every expert.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "experts")
TIED = "input and output embeddings may be one tensor, and an update of one would change the other"
FORBIDDEN_TARGETS = {
    "embed_tokens": TIED,
    "lm_head": TIED,
    "gate": "it is the router, and with it the tokens of every expert would change",
}
MODEL_FACTS = Path(__file__).parent / "configs" / "models"

ADAPTABLE = (nn.Linear, GroupedLinear)
Segments = list[tuple[str, slice | Tensor | None]]


@dataclass(frozen=True)
class LoRAConfig:
    """What an adapter is, apart from its numbers.

    alpha / rank scales the update; 32 is the value of LoRA Without Regret (Thinking Machines, 2025)
    and of prime-rl, and with it the best learning rate hardly depends on the rank.
    """

    rank: int = 8
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = TARGETS

    def __post_init__(self):
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be a whole number of at least 1, not {self.rank!r}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha must be a positive number, not {self.alpha!r}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), not {self.dropout!r}")
        if not self.target_modules:
            raise ValueError("target_modules is empty: name at least one projection")

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank


class Selection:
    """Which adapter acts on which rows; one object, shared by all LoRA layers of a model."""

    def __init__(self):
        self.segments: Segments = [(TRAINABLE, None)]
        self.names: set[str] = set()  # of all adapters that the model holds
        self.batch = None  # segments.py: the same segments, applied together


class LoRALinear(nn.Module):
    """A frozen linear layer and the named adapters beside it."""

    def __init__(self, base: nn.Module, selection: Selection):
        super().__init__()
        self.base = base
        self.selection = selection
        self.lora_A = nn.ParameterDict()  # name -> (R, in)
        self.lora_B = nn.ParameterDict()  # name -> (out, R)
        self.scaling: dict[str, float] = {}
        self.dropout: dict[str, float] = {}
        self.merged: Tensor | None = None  # W0 + scaling B A, see merge_lora

    def add(self, name: str, A: Tensor, B: Tensor, config: LoRAConfig) -> None:
        self.lora_A[name] = Parameter(A, requires_grad=name == TRAINABLE)
        self.lora_B[name] = Parameter(B, requires_grad=name == TRAINABLE)
        self.scaling[name] = config.scaling
        # A frozen adapter samples or refers, and does so without dropout whatever the model's mode.
        self.dropout[name] = config.dropout if name == TRAINABLE else 0.0

    def remove(self, name: str) -> None:
        for store in (self.lora_A, self.lora_B, self.scaling, self.dropout):
            del store[name]
        if name == TRAINABLE:
            self.merged = None

    def forward(self, x: Tensor) -> Tensor:
        segments = self.selection.segments
        if self.merged is not None and segments == [(TRAINABLE, None)]:
            return F.linear(x, self.merged, self.base.bias)
        if x.dim() == 2 and any(rows is not None for _, rows in segments):
            raise ValueError(PACKED_ROWS)
        y = self.base(x)
        if self.selection.batch is not None:
            return self.selection.batch.add_updates(self, x, y)
        for name, rows in segments:
            if name not in self.lora_A:
                continue  # this adapter leaves this layer alone
            if rows is None:
                y = y + self.update(name, x)
            else:
                y[rows] = y[rows] + self.update(name, x[rows])
        return y

    def update(self, name: str, x: Tensor) -> Tensor:
        """(alpha / r) B A dropout(x), in x's dtype."""
        x = F.dropout(x, self.dropout[name], self.training)
        A, B = self.lora_A[name].to(x.dtype), self.lora_B[name].to(x.dtype)
        # Scaled while it is narrow: R numbers a row instead of `out`. Of a B that lies in memory by
        # rank, the gradient is one product of R long rows, not `out` short ones: 8 times as fast.
        return (F.linear(x, A) * self.scaling[name]) @ B.T.contiguous()


class LoRAGrouped(LoRALinear):
    """The same beside the E matrices of a projection of experts: A (E, R, in), B (E, out, R).

    Every expert has an A and a B of its own. A segment's rows become the (token, expert) pairs of
    those rows, which stay sorted by expert; what segments.py prepares (`batch`) has no part in it.
    """

    def forward(self, x: Tensor, pairs: Pairs) -> Tensor:
        """x (N, in), one row a pair -> (N, out)."""
        if self.merged is not None and self.selection.segments == [(TRAINABLE, None)]:
            return grouped_linear(x, self.merged, pairs.ends)
        y = self.base(x, pairs)
        for name, rows in self.selection.segments:
            if name not in self.lora_A:
                continue
            if rows is None:
                y = y + self.update(name, x, pairs)
            else:
                places, its_pairs = pairs.of(rows)
                y[places] = y[places] + self.update(name, x[places], its_pairs)
        return y

    def update(self, name: str, x: Tensor, pairs: Pairs) -> Tensor:
        """(alpha / r) B_e A_e x for each row's expert e, in x's dtype."""
        A, B = self.lora_A[name].to(x.dtype), self.lora_B[name].to(x.dtype)
        narrow = grouped_linear(x, A, pairs.ends) * self.scaling[name]
        return grouped_linear(narrow, B, pairs.ends)


# --- putting it in -------------------------------------------------------------------------------


def lora_layers(model: nn.Module) -> dict[str, LoRALinear]:
    """The LoRA layers of a model by their module names."""
    return {name: m for name, m in model.named_modules() if isinstance(m, LoRALinear)}


def adaptable_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that an adapter may stand beside or stands beside, by their module names."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (*ADAPTABLE, LoRALinear))
        and name.rpartition(".")[2] not in ("base", *FORBIDDEN_TARGETS)
    }


def matrix_shape(base: nn.Module) -> tuple[int, ...]:
    """(out, in), of experts (E, out, in), from attributes: a 4-bit layer makes its weight anew."""
    if isinstance(base, nn.Linear):
        return base.out_features, base.in_features
    return tuple(base.weight.shape)


def target_of(name: str) -> str:
    """The target name of a layer: its last component, and "experts" for a projection of experts."""
    return "experts" if ".experts." in name else name.rpartition(".")[2]


def target_names(model: nn.Module, target_modules: tuple[str, ...]) -> list[str]:
    """Names of the linear layers whose target name is one of `target_modules`.

    Raises ValueError for the embedding, the head or the router as a target and if nothing matches.
    A name that matches nothing is ignored with one warning (none for the default list, of which
    dense models and mixtures of experts have different parts).
    """
    if isinstance(target_modules, str):
        raise ValueError(f"target_modules must be a list of names, not {target_modules!r}")
    for name, reason in FORBIDDEN_TARGETS.items():
        if name in target_modules:
            raise ValueError(f"{name} cannot be a target: {reason}; name projections instead")
    targets = {name: target_of(name) for name in adaptable_layers(model)}
    names = [name for name, target in targets.items() if target in target_modules]
    available = sorted(set(targets.values()))
    if not names:
        raise ValueError(
            f"target_modules {list(target_modules)} match no layer of this model; "
            f"its projections are {available}"
        )
    unknown = [target for target in target_modules if target not in available]
    if unknown and set(target_modules) != set(TARGETS):
        ignored = f"target_modules {unknown} are not in this model and ignored; it has {available}"
        warnings.warn(ignored, stacklevel=1)  # from one place: said once
    return names


def _wrap(model: nn.Module, names: list[str]) -> list[LoRALinear]:
    """Puts a LoRA layer around each named layer that has none yet."""
    if not hasattr(model, "lora_selection"):
        model.lora_selection = Selection()
    layers = []
    for name in names:
        parent = model.get_submodule(name.rpartition(".")[0])
        child = name.rpartition(".")[2]
        layer = getattr(parent, child)
        if not isinstance(layer, LoRALinear):
            kind = LoRAGrouped if isinstance(layer, GroupedLinear) else LoRALinear
            layer = kind(layer, model.lora_selection)
            setattr(parent, child, layer)
        layers.append(layer)
    return layers


def inject_lora(model: nn.Module, config: LoRAConfig) -> list[str]:
    """Freezes the model and adds the trainable adapter; returns the names of the adapted layers.

    A is Kaiming-uniform with a = sqrt(5), i.e. uniform in +-1/sqrt(in), drawn from torch's global
    generator; B is zero. Raises ValueError if the model has a trainable adapter already, and for
    dropout on experts, which PEFT would refuse to load.
    """
    if any(TRAINABLE in layer.lora_A for layer in lora_layers(model).values()):
        raise ValueError("the model has a trainable adapter already; an adapter is injected once")
    names = target_names(model, config.target_modules)
    if config.dropout and any(target_of(name) == "experts" for name in names):
        raise ValueError(
            f"dropout {config.dropout} on experts is not implemented, as PEFT has none there; set "
            "it to 0 or leave experts out of the targets"
        )
    model.requires_grad_(False)
    beyond = []
    for name, layer in zip(names, _wrap(model, names), strict=True):
        *experts, rows, columns = matrix_shape(layer.base)  # experts: [E], or [] of one matrix
        device = next(layer.base.parameters()).device
        A = torch.empty(*experts, config.rank, columns, dtype=torch.float32, device=device)
        nn.init.kaiming_uniform_(A.view(-1, columns), a=math.sqrt(5))
        B = torch.zeros(*experts, rows, config.rank, dtype=torch.float32, device=device)
        layer.add(TRAINABLE, A, B, config)
        if config.rank > min(rows, columns):
            beyond.append(name)
    model.lora_selection.names.add(TRAINABLE)
    if beyond:
        warnings.warn(
            f"rank {config.rank} is larger than the smaller side of {len(beyond)} layers "
            f"(first: {beyond[0]}): allowed, but a smaller rank has the same reach",
            stacklevel=2,
        )
    return names


def lora_parameters(model: nn.Module) -> dict[str, Parameter]:
    """The trainable adapter: "<layer>.lora_A.weight" (R, in), "<layer>.lora_B.weight" (out, R).

    Of experts (E, R, in) and (E, out, R); broadcast.py writes a tensor an expert.
    """
    parameters = {}
    for name, layer in lora_layers(model).items():
        if TRAINABLE in layer.lora_A:
            parameters[f"{name}.lora_A.weight"] = layer.lora_A[TRAINABLE]
            parameters[f"{name}.lora_B.weight"] = layer.lora_B[TRAINABLE]
    return parameters


def trainable(model: nn.Module) -> dict[str, Parameter]:
    """What an optimizer moves: the adapter, or all weights of a model that has none (full.py)."""
    return lora_parameters(model) or dict(model.named_parameters())


def add_adapter(
    model: nn.Module, name: str, config: LoRAConfig, tensors: dict[str, Tensor]
) -> None:
    """Adds a frozen adapter under `name`, beside whatever the model holds.

    tensors: names and shapes as lora_parameters gives them. Raises ValueError as check_name and
    check_adapter.
    """
    check_name(model, name)
    names = check_adapter(model, name, config, tensors)
    for layer_name, layer in zip(names, _wrap(model, names), strict=True):
        device = next(layer.base.parameters()).device
        A = tensors[f"{layer_name}.lora_A.weight"].to(device, torch.float32)
        B = tensors[f"{layer_name}.lora_B.weight"].to(device, torch.float32)
        layer.add(name, A, B, config)
    model.lora_selection.names.add(name)


def check_name(model: nn.Module, name: str) -> None:
    """ValueError for a name that no frozen adapter can have, or that one in the model has."""
    # A ParameterDict keeps its entries as attributes, beside its own methods and facts.
    if name in ("", TRAINABLE) or "." in name or hasattr(nn.ParameterDict(), name):
        raise ValueError(f"{name!r} cannot name a frozen adapter (empty, reserved, or with a dot)")
    if any(name in layer.lora_A for layer in lora_layers(model).values()):
        raise ValueError(f"an adapter named {name!r} is there already; names are never used twice")


def check_adapter(
    model: nn.Module, name: str, config: LoRAConfig, tensors: dict[str, Tensor]
) -> list[str]:
    """The layers that an adapter adapts, if it fits the model, whose shapes alone are read.

    Raises ValueError if a tensor has no layer, no partner, or another shape than layer and rank
    demand; `name` says which adapter in the message.
    """
    layers = {key.rpartition(".lora_")[0] for key in tensors}
    modules = adaptable_layers(model)
    for layer_name in sorted(layers):
        if layer_name not in modules:
            raise ValueError(f"adapter {name!r}: the model has no projection {layer_name!r}")
        layer = modules[layer_name]
        *experts, out_size, in_size = matrix_shape(getattr(layer, "base", layer))
        shapes = {"A": (*experts, config.rank, in_size), "B": (*experts, out_size, config.rank)}
        for matrix, shape in shapes.items():
            found = tensors.get(f"{layer_name}.lora_{matrix}.weight")
            if found is None or tuple(found.shape) != shape:
                raise ValueError(
                    f"adapter {name!r}: {layer_name}.lora_{matrix}.weight must have shape {shape}, "
                    f"found {'nothing' if found is None else tuple(found.shape)}"
                )
    return sorted(layers)


def remove_adapter(model: nn.Module, name: str) -> None:
    """Forgets the adapter `name`; KeyError if no layer has it."""
    layers = [layer for layer in lora_layers(model).values() if name in layer.lora_A]
    if not layers:
        raise KeyError(f"no adapter named {name!r}")
    for layer in layers:
        layer.remove(name)
    model.lora_selection.names.remove(name)


# --- choosing, disabling, merging ----------------------------------------------------------------


@contextmanager
def use_adapters(model: nn.Module, segments: Segments, batch=None) -> Iterator[None]:
    """Inside, each (name, rows) of `segments` applies its adapter to those rows of the batch.

    rows: a slice or an index tensor on the first axis, None for all; rows in no segment get the
    base. Segments must not overlap. ValueError for a name that the model does not hold: it would
    be the base that answers, and nobody would notice. batch: the same segments, prepared by
    segments.py to be applied together; many short ones are then much faster.
    """
    selection = getattr(model, "lora_selection", Selection())  # without adapters: one without names
    for name, _ in segments:
        if name not in selection.names:
            raise ValueError(f"no adapter named {name!r}; there are {sorted(selection.names)}")
    before = selection.segments, selection.batch
    selection.segments, selection.batch = segments, batch
    try:
        yield
    finally:
        selection.segments, selection.batch = before


def adapter_disabled(model: nn.Module):
    """Context manager: inside, the model is its base, bit for bit, merged or not."""
    return use_adapters(model, [])


@torch.no_grad()
def merge_lora(model: nn.Module) -> None:
    """From here to unmerge_lora the model computes with W0 + (alpha / r) B A as one matrix.

    The merged matrix (summed in fp32, in the base's dtype) is a snapshot that stands beside the
    base; the base tensors are never written, so unmerging restores them bit for bit. Calling it
    again takes a new snapshot.
    """
    for layer in lora_layers(model).values():
        if TRAINABLE in layer.lora_A:
            A, B = layer.lora_A[TRAINABLE], layer.lora_B[TRAINABLE]
            W0 = layer.base.weight
            if hasattr(W0, "full_tensor"):  # sharded (distributed.py): all ranks merge together
                W0 = W0.full_tensor()
            layer.merged = (W0.float() + layer.scaling[TRAINABLE] * (B @ A)).to(W0.dtype)


def unmerge_lora(model: nn.Module) -> None:
    """Undoes merge_lora; without one, nothing happens."""
    for layer in lora_layers(model).values():
        layer.merged = None


# --- counting ------------------------------------------------------------------------------------


def size_table(model: nn.Module, config: LoRAConfig) -> str:
    """The worked example: what each projection holds and what its adapter does, r (in + out).

    `model` may live on the meta device. Layers of equal name and shape are one row; a row of
    experts is one expert, with layers x experts in the last column.
    """
    total = sum(p.numel() for p in model.parameters())
    rows: dict[tuple[str, tuple[int, ...]], int] = {}
    for name in target_names(model, config.target_modules):
        short = name.rpartition(".")[2]
        key = f"experts.{short}" if target_of(name) == "experts" else short
        shape = matrix_shape(model.get_submodule(name))
        rows[key, shape] = rows.get((key, shape), 0) + 1
    width, last = (20, 12) if any(len(shape) == 3 for _, shape in rows) else (12, 8)
    lines = [f"{'projection':<{width}}{'shape':>16}{'full':>16}{'adapter':>12}{'layers':>{last}}"]
    adapted_total = adapter_total = 0
    for (name, (*experts, out_size, in_size)), layers in rows.items():
        full, adapter = out_size * in_size, config.rank * (out_size + in_size)
        count = " x ".join(str(number) for number in (layers, *experts))
        shape = f"{out_size} x {in_size}"
        lines.append(f"{name:<{width}}{shape:>16}{full:>16,}{adapter:>12,}{count:>{last}}")
        copies = layers * math.prod(experts)
        adapted_total += copies * full
        adapter_total += copies * adapter
    width += 16
    if len(set(rows.values())) == 1:  # in some mixtures, not all layers are alike
        one = f"{adapted_total // layers:>16,}{adapter_total // layers:>12,}"
        lines.append(f"{'one layer':<{width}}{one}")
    lines += [
        f"{'all layers':<{width}}{adapted_total:>16,}{adapter_total:>12,}",
        f"{'the model':<{width}}{total:>16,}{adapter_total / total:>12.2%}",
        "",
        f"shipped a step, fp32: adapter {adapter_total * 4 / 1e6:,.1f} MB, "
        f"all weights {total * 4 / 1e6:,.1f} MB: 1/{total / adapter_total:.0f}",
    ]
    return "\n".join(lines)


def main(
    model: Annotated[str, tyro.conf.arg(constructor=str), tyro.conf.Positional],
    rank: int = 8,
    target_modules: tuple[str, ...] = TARGETS,
) -> None:
    """Prints what a LoRA adapter trains, stores and ships for a model.

    Args:
        model: checkpoint directory, config.json, or Hub id (configs/models/ needs no download).
        rank: rank of every adapter.
        target_modules: names of the adapted projections.
    """
    from model import Qwen3, Qwen3Config  # only this command knows which model it counts

    facts = MODEL_FACTS / f"{model.rpartition('/')[2]}.json"
    use_facts = facts.is_file() and not Path(model).exists()
    with torch.device("meta"):
        shapes = Qwen3(Qwen3Config.from_pretrained(facts if use_facts else model))
    print(f"{model}, rank {rank}\n")
    print(size_table(shapes, LoRAConfig(rank=rank, target_modules=target_modules)))


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except ValueError as error:
        raise SystemExit(f"lora.py: {error}") from None
