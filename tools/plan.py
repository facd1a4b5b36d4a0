"""What a run will need, before anything is loaded: from the shapes of its model alone.

    python train.py --config configs/wiki_search.toml --plan --plan-device h200

    memory   base │ adapters │ gradients │ Adam │ kept for the backward pass │ cache │ server
    FLOPs    sampled: prefill, decode     trained: forward, backward, the reference
    bytes    the adapter that is shipped a step, against all weights

Each number is a sum over layers that costs_of_layer writes down: what autograd keeps and what a
matrix product costs follow from which inputs carry a gradient. With LoRA that is less than it
looks: a frozen matrix has no gradient of its own, and the first layer's projections pass none on.

Bytes and FLOPs are held against measured small runs (tests/test_scale.py): parameters, adapters,
optimizer and cache to the byte, FLOPs and what autograd keeps within 6%, peak memory within 15%.
Hours are an estimate: a device's peak rates times a share of them that is assumed, for episodes of
an assumed length that have an assumed prompt in common; all assumptions are printed.

Left out on purpose: the process itself (Python, torch and CUDA: 0.5 to 2 GB), fragmentation (on a
CPU glibc keeps up to half as much again of what was freed; MALLOC_MMAP_THRESHOLD_=65536 in the
environment gives it back), time for tools, judges and the publishing.

Axes: L layers, D hidden, V vocabulary, H query heads, K key-value heads, C channels of a head, I
width of the MLP, R rank, E experts, k experts of a token, T tokens of a sequence.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from config import Config
from head import HeadLogprobs
from lora import MODEL_FACTS, LoRAConfig, matrix_shape, target_names
from model import Qwen3, Qwen3Config
from quant import BLOCK, SCALE_BLOCK

QKV, FP32, ADAM = ("q_proj", "k_proj", "v_proj"), 4, 8
BYTES = {"float32": 4, "bfloat16": 2}


# --- what is assumed ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """Peak rates as the vendor gives them (dense bfloat16), and the shares that are assumed.

    train_share: of the peak FLOPs, forward and backward pass. decode_share: of the memory bandwidth
    while tokens are decoded, where every weight is read once a step of all live episodes.
    """

    words: str
    flops: float  # a second
    bandwidth: float  # bytes a second
    memory: float  # bytes
    train_share: float = 0.35
    decode_share: float = 0.5


DEVICES = {
    "h200": Device("one H200 SXM, 141 GB", 989e12, 4.8e12, 141e9),
    "a100": Device("one A100 SXM, 80 GB", 312e12, 2.04e12, 80e9),
    "l40s": Device("one L40S, 48 GB", 362e12, 864e9, 48e9),
    "4090": Device("one RTX 4090, 24 GB", 165e12, 1.01e12, 24e9),
    # Measured on one core: 77 GFLOP/s in fp32, 26 GB/s for all cores together.
    "cpu2": Device("two CPU cores, fp32", 154e9, 26e9, 16e9, train_share=0.5),
}
FILL = 0.5  # tokens of a mean episode without --plan-length, as a share of --max-length
SAMPLED = {"wiki_search": 1 / 3, "math_qa": 0.9}  # of them sampled; of the others tools wrote most
PROMPT = 0.1  # tokens of the prompt, which a group shares, as a share of the mean episode


# --- shapes ---------------------------------------------------------------------------------------


def model_shapes(model: str) -> Qwen3Config:
    """The config.json of a local checkpoint, or what configs/models/ knows of a Hub id.

    Raises ValueError for a model that neither has: a plan downloads nothing.
    """
    facts = MODEL_FACTS / f"{model.rpartition('/')[2]}.json"
    local = Path(model) / "config.json"
    if not local.is_file() and not facts.is_file():
        known = ", ".join(sorted(file.stem for file in MODEL_FACTS.glob("*.json")))
        raise ValueError(
            f"{model}: no such directory, and configs/models/ knows only {known}; put its "
            f"config.json there as {facts.name}"
        )
    return Qwen3Config.from_pretrained(local if local.is_file() else facts)


@cache
def on_paper(shapes: Qwen3Config) -> Qwen3:
    """The model on the meta device: shapes without numbers."""
    with torch.device("meta"):
        return Qwen3(shapes)


def parameters_of(shapes: Qwen3Config, lora: LoRAConfig | None) -> tuple[int, int]:
    """(base, adapter) numbers of parameters."""
    model, adapter = on_paper(shapes), 0
    for name in target_names(model, lora.target_modules) if lora else ():
        *experts, rows, columns = matrix_shape(model.get_submodule(name))
        adapter += math.prod(experts) * lora.rank * (rows + columns)
    return sum(p.numel() for p in model.parameters()), adapter


def base_bytes(shapes: Qwen3Config, dtype: str, quantize: str = "none") -> int:
    """Of the frozen base; in 4 bits all linear layers but the head are packed."""
    model, total, packed = on_paper(shapes), 0, set()
    if quantize == "nf4":
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                packed.add(f"{name}.weight")
                scales = -(-module.weight.numel() // BLOCK)
                # Two codes a byte, a byte a scale, an fp32 number a block of scales and one of all.
                total += scales * BLOCK // 2 + scales + FP32 * (-(-scales // SCALE_BLOCK) + 1)
    plain = (p.numel() for name, p in model.named_parameters() if name not in packed)
    return total + BYTES[dtype] * sum(plain)


def cache_bytes(shapes: Qwen3Config, streams: int, length: int, dtype: str) -> int:
    """Keys and values of `streams` episodes of `length` tokens."""
    per_token = 2 * shapes.num_hidden_layers * shapes.num_key_value_heads * shapes.head_dim
    return per_token * streams * length * BYTES[dtype]


# --- one layer ------------------------------------------------------------------------------------


@dataclass
class Costs:
    """Of one token. saved: bytes that autograd keeps; angles: those of cos and sin, which layers
    share. The others: FLOPs of matrix products, two a multiply-add; those of attention for each
    token that is attended to."""

    saved: float = 0.0
    angles: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    attention: float = 0.0
    attention_backward: float = 0.0

    def __add__(self, other: "Costs") -> "Costs":
        return Costs(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )

    def __mul__(self, tokens: float) -> "Costs":
        return Costs(*(tokens * value for value in vars(self).values()))


def costs_of_layers(
    shapes: Qwen3Config, targets: tuple[str, ...], rank: int, dtype: str, full: bool = False
) -> Iterator[tuple[Costs, Costs]]:
    """Of each layer in turn. `stream`: whether the layer's input carries a gradient, which in LoRA
    is so from the first adapter on, and with full from the embedding on."""
    stream = full
    for layer in range(shapes.num_hidden_layers):
        seen, asking, stream = costs_of_layer(shapes, targets, rank, dtype, full, layer, stream)
        yield seen, asking


def costs_of_layer(
    shapes: Qwen3Config,
    targets: tuple[str, ...],
    rank: int,
    dtype: str,
    full: bool,
    layer: int,
    stream: bool,
) -> tuple[Costs, Costs, bool]:
    """The costs of one layer, and whether its output carries a gradient: of a token that others
    attend to, and what is added if its own output is wanted; the last layer has tokens of which
    it is not (packing.py)."""
    D, C, b = shapes.hidden_size, shapes.head_dim, BYTES[dtype]
    H, K = shapes.num_attention_heads, shapes.num_key_value_heads
    last = layer == shapes.num_hidden_layers - 1
    costs = Costs()

    def trained(name: str) -> bool:
        return full or name in targets

    def linear(name: str, inside: int, outside: int, arrives: bool, target: str = "") -> bool:
        """One projection; `arrives`: its input carries a gradient. Whether its output does."""
        product = 2 * inside * outside
        costs.forward += product
        costs.backward += product * arrives + product * full
        if not full and (target or name) in targets:
            costs.forward += 2 * rank * (inside + outside)
            # To A, to B, to the narrow product; to the input only where that carries a gradient.
            costs.backward += 2 * rank * (inside + 2 * outside + inside * arrives)
            costs.saved += b * rank
        return arrives or trained(target or name)

    def norm(width: int, arrives: bool, heads: int = 1) -> None:
        """Its input and the inverse root."""
        costs.saved += (b * width + 4 * heads) * (arrives or full)

    norm(D, stream)
    live = {name: linear(name, D, K * C, stream) for name in ("k_proj", "v_proj")}
    if shapes.model_type != "qwen2":
        norm(K * C, live["k_proj"], K)
    input_kept = trained("k_proj") or trained("v_proj")
    costs.saved += b * D * input_kept

    seen, costs = costs, Costs()
    live["q_proj"] = linear("q_proj", D, H * C, stream)
    if shapes.model_type != "qwen2":
        norm(H * C, live["q_proj"], H)
    costs.saved += b * D * (trained("q_proj") and (last or not input_kept))  # there of other rows
    # Of all tokens; the last layer's queries have some of their own.
    seen.angles = 2 * b * C * (live["k_proj"] or (live["q_proj"] and not last))
    costs.angles = 2 * b * C * (live["q_proj"] and last)
    attends = any(live.values())  # q, k, v; four products go back if all do
    costs.attention = 4 * H * C
    if attends:
        scores = live["q_proj"] + live["k_proj"]
        costs.attention_backward = 2 * H * C * (scores + (scores > 0) + live["v_proj"])
        seen.saved += b * 2 * K * C  # k, v
        costs.saved += b * 2 * H * C + 4 * H  # q, the output; its normalizer
    if trained("o_proj"):
        costs.saved += b * H * C  # the outputs of all streams, packed
    stream = linear("o_proj", H * C, D, attends) or stream

    norm(D, stream)
    if shapes.has_experts(layer):
        k, E, inner = shapes.num_experts_per_tok, shapes.num_experts, shapes.moe_intermediate_size
        linear("gate", D, E, stream, "router")  # frozen, but its input's gradient passes through
        costs.saved += 4 * E * stream + b * D * full
        width, copies, target = inner, k, "experts"
    else:
        width, copies, target = shapes.intermediate_size, 1, ""
    before, costs = costs, Costs()
    if trained(target or "gate_proj") or trained(target or "up_proj"):
        costs.saved += b * D
    gate = linear("gate_proj", D, width, stream, target)
    up = linear("up_proj", D, width, stream, target)
    # silu keeps its input; the product keeps the factor that the other side's gradient needs.
    costs.saved += b * width * (gate + gate + up)
    if trained(target or "down_proj"):
        costs.saved += b * width
    out = linear("down_proj", width, D, gate or up, target)
    mlp = costs * copies
    if copies > 1 or target:
        # Weighted by the router: each expert's output, its weight, and where each row came from.
        mlp.saved += copies * (b + 8 + stream * (b * D + 2 * 8 + FP32))
    return seen, before + mlp, out or stream


# --- a micro-batch, a step ------------------------------------------------------------------------


def kept_bytes(
    shapes: Qwen3Config,
    lora: LoRAConfig | None,
    dtype: str,
    *,
    tokens: int,
    wanted: int,
    length: int,
    checkpointing: bool = False,
) -> int:
    """What the forward pass of a micro-batch of `tokens`, of which `wanted` carry loss, in streams
    of `length` that share nothing, keeps for the backward pass. lora None: full fine-tuning.
    checkpointing: of each layer its input alone, and of the one that is computed again everything.
    """
    D, b, full = shapes.hidden_size, BYTES[dtype], lora is None
    each = layers(shapes, lora, tokens, wanted, dtype)
    copied = 0 if full else copied_bytes(shapes, lora, dtype)
    saved = [costs.saved + copied / len(each) for costs in each]
    if each[-1].attention_backward:
        saved[-1] += wanted * length * b  # which tokens the last layer's queries see
    kept = len(saved) * tokens * b * D + max(saved) if checkpointing else sum(saved)
    kept += max(costs.angles for costs in each)
    # The last norm; HeadLogprobs: its gradient, and where each number goes.
    return int(kept + wanted * (b * D + 4 + b * D + 4 * 8 + (b * D + 12) * full))


def copied_bytes(shapes: Qwen3Config, lora: LoRAConfig, dtype: str) -> int:
    """Of the adapter's copies that the forward pass makes: A and B in a narrower base's dtype, else
    each B of a dense layer as it lies by rank."""
    if dtype != "float32":
        return BYTES[dtype] * parameters_of(shapes, lora)[1]
    model = on_paper(shapes)
    sizes = [matrix_shape(model.get_submodule(n)) for n in target_names(model, lora.target_modules)]
    return FP32 * sum(lora.rank * size[0] for size in sizes if len(size) == 2 and lora.rank > 1)


def layers(
    shapes: Qwen3Config,
    lora: LoRAConfig | None,
    tokens: float,
    wanted: float,
    dtype: str = "float32",
) -> list[Costs]:
    """Of each layer for all tokens; of the last, whose output serves the head alone, only `wanted`
    tokens have one."""
    targets, rank = (lora.target_modules, lora.rank) if lora else ((), 0)
    *pairs, (seen, asking) = costs_of_layers(shapes, targets, rank, dtype, full=lora is None)
    return [(one + other) * tokens for one, other in pairs] + [seen * tokens + asking * wanted]


def head_bytes(shapes: Qwen3Config, dtype: str) -> int:
    """Of one block of logits and what is made of it, see HeadLogprobs: fp32 logits and their
    exponentials."""
    rows, entries = HeadLogprobs.BLOCK
    narrow = 0 if dtype == "float32" else 2 * BYTES[dtype]  # before and after the fp32 softmax
    return rows * min(entries, shapes.vocab_size) * (2 * FP32 + narrow)


def trained_flops(
    shapes: Qwen3Config, lora: LoRAConfig | None, *, tokens: int, length: float, wanted: int
) -> tuple[int, int]:
    """(forward, backward) FLOPs of `tokens` in sequences of mean `length`, `wanted` with loss; of
    what sequences begin with in common, which is computed once (packing.py), count it once.

    Attention counts whole, as torch's flop counter does; a causal kernel skips up to half of it,
    and one that makes the scores again in the backward pass adds half.
    """
    D, V, full = shapes.hidden_size, shapes.vocab_size, lora is None
    total = sum(layers(shapes, lora, tokens, wanted), Costs())
    # The frozen head: logits, and its gradient already in the forward pass; trained, twice more.
    forward = total.forward + total.attention * length + wanted * 4 * D * V
    backward = total.backward + total.attention_backward * length
    return int(forward), int(backward + wanted * 4 * D * V * full)


def sampled_flops(
    shapes: Qwen3Config, lora: LoRAConfig | None, *, tokens: int, context: float, wanted: int
) -> int:
    """Of `tokens` that go through the model with `context` before them on average, `wanted` of
    which have their logits computed."""
    total = sum(layers(shapes, lora, tokens, wanted), Costs())
    head = 2 * shapes.hidden_size * shapes.vocab_size
    return int(total.forward + total.attention * context + wanted * head)


def reference_flops(shapes: Qwen3Config, *, tokens: int, length: float, wanted: int) -> int:
    """Of the base alone, without gradient."""
    none = LoRAConfig(rank=1, target_modules=("none",))
    forward, _ = trained_flops(shapes, none, tokens=tokens, length=length, wanted=wanted)
    return forward - wanted * 2 * shapes.hidden_size * shapes.vocab_size  # the head's gradient


# --- the plan -------------------------------------------------------------------------------------


def memory(config: Config) -> dict[str, int]:
    """Bytes by part, of the trainer's process and (server: ...) of a vLLM that the run needs."""
    shapes, lora = model_shapes(config.model), adapter_of(config)
    base, adapter = parameters_of(shapes, lora)
    trained = adapter if lora else base
    tokens = max(config.micro_tokens, config.max_length)  # a batch has at least one episode
    wanted = int(tokens * SAMPLED[config.environment])
    parts = {"base": base_bytes(shapes, config.dtype, config.quantize)}
    embedded = config.engine == "torch" and not config.max_staleness
    if lora:
        # Embedded: also the version that samples, and the one that is coming.
        copies = 1 + 2 * embedded + bool(config.init_adapter)
        parts["adapters, fp32"] = copies * FP32 * adapter
    else:
        parts["the frozen copy"] = parts["base"]
    parts["gradients"] = FP32 * trained
    parts["Adam's moments"] = ADAM * trained
    counted = {"tokens": tokens, "wanted": wanted, "length": config.max_length}
    how = {"checkpointing": config.gradient_checkpointing}
    kept = kept_bytes(shapes, lora, config.dtype, **counted, **how)
    parts["kept for the backward pass"] = kept
    parts["logits, a block"] = head_bytes(shapes, config.dtype)
    streams = config.slots * (config.max_staleness + 1)  # of all batches under way
    cache = cache_bytes(shapes, streams, config.max_length, config.dtype)
    if embedded:
        return parts | {"cache": cache}
    held = (config.max_staleness + 2) * adapter
    held *= BYTES[config.dtype] if config.engine == "vllm" else FP32
    server = {"server: base": base_bytes(shapes, config.dtype), "server: adapters": held}
    return parts | server | {"server: cache, if every episode were full": cache}


def adapter_of(config: Config) -> LoRAConfig | None:
    if config.full:
        return None
    return LoRAConfig(config.rank, config.alpha, config.dropout, tuple(config.target_modules))


def episode_length(config: Config) -> float:
    """Tokens of a mean episode, as assumed."""
    return config.plan_length or FILL * config.max_length


def step_flops(config: Config) -> dict[str, float]:
    """FLOPs of one step by part, for episodes of the assumed mean length."""
    shapes, lora = model_shapes(config.model), adapter_of(config)
    episodes, length = config.groups * config.group_size, episode_length(config)
    wanted = episodes * length * SAMPLED[config.environment]
    # A group's prompt is computed once, by the sampler (its cache) and the trainer (packing.py).
    tokens = episodes * length - (episodes - config.groups) * PROMPT * length
    prefilled = tokens - wanted
    forward, backward = trained_flops(shapes, lora, tokens=tokens, length=length, wanted=wanted)
    compared = 1.0 if config.kl > 0 else min(1.0, config.micro_tokens / tokens)
    reference = reference_flops(shapes, tokens=tokens, length=length, wanted=wanted)
    passing = {"context": length / 2}
    return {
        "prefill": sampled_flops(shapes, lora, tokens=prefilled, wanted=0, **passing),
        "decode": sampled_flops(shapes, lora, tokens=wanted, wanted=wanted, **passing),
        "forward": forward,
        "backward": backward,
        "reference": compared * reference,
    }


def step_seconds(config: Config, device: Device) -> dict[str, float]:
    """Estimated seconds of a step by part: see plan's assumptions."""
    shapes, lora, flops = model_shapes(config.model), adapter_of(config), step_flops(config)
    rate, bandwidth = device.flops * device.train_share, device.bandwidth * device.decode_share
    episodes, length = config.groups * config.group_size, episode_length(config)
    live = min(config.slots, episodes)
    waves = -(-episodes // live)
    weights = base_bytes(shapes, config.dtype) + FP32 * parameters_of(shapes, lora)[1]
    read = weights + cache_bytes(shapes, live, int(length / 2), config.dtype)
    steps = waves * length * SAMPLED[config.environment]  # of decoding, one token each
    decode = max(steps * read / bandwidth, flops["decode"] / rate)
    trained = flops["forward"] + flops["backward"] + flops["reference"]
    return {"sample": flops["prefill"] / rate + decode, "train": trained / rate}


def plan(config: Config) -> str:
    """What `python train.py --plan` prints."""
    shapes, lora, device = (
        model_shapes(config.model),
        adapter_of(config),
        DEVICES[config.plan_device],
    )
    base, adapter = parameters_of(shapes, lora)
    parts, flops, seconds = memory(config), step_flops(config), step_seconds(config, device)
    here = {name: size for name, size in parts.items() if not name.startswith("server")}
    server = {name: size for name, size in parts.items() if name.startswith("server")}
    trained = FP32 * (adapter or base)
    lines = [f"{config.model}: {base:,} parameters, {adapter:,} in adapters ({adapter / base:.2%})"]
    lines += ["", "memory of the trainer", *table(here | {"all": sum(here.values())})]
    if server:
        where = ", somewhere else" if config.vllm_url else ""
        lines += ["", f"memory of the sampler's process{where}"]
        lines += table({name.removeprefix("server: "): size for name, size in server.items()})
    lines += ["", fits(config, here, server, device)]
    lines += ["", "computed a step", *table(flops, "FLOP")]
    lines += ["", "shipped a step"]
    if lora:
        whole = BYTES[config.dtype] * base
        lines += table({"the adapter, fp32": trained, f"all weights, {config.dtype}": whole})
        lines += [f"  {'share':<44}{f'1/{whole / trained:.0f}':>12}"]
    else:
        lines += ["  nothing: the embedded engine samples the trained weights"]
    hours = config.steps * sum(seconds.values()) / 3600
    lines += ["", f"estimated on {device.words}"]
    lines += [f"  {f'{name}, seconds a step':<44}{value:12.1f}" for name, value in seconds.items()]
    lines += [f"  {f'{config.steps} steps, hours':<44}{hours:12.2f}", ""]
    return "\n".join(lines + assumptions(config, device))


def human(number: float, unit: str = "B") -> str:
    """Three digits and a prefix: 8.04 GB."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} P{unit}"


def table(parts: dict[str, float], unit: str = "B") -> list[str]:
    return [f"  {name:<44}{human(number, unit):>12}" for name, number in parts.items()]


def fits(config: Config, here: dict, server: dict, device: Device) -> str:
    """Whether the device holds it."""
    need, least = sum(here.values()), 0
    if server and config.engine == "torch":
        least = sum(server.values())
    elif server and not config.vllm_url:
        least = server["server: base"] + server["server: adapters"]
        if least > device.memory / 2:
            return (
                f"does not fit {device.words}: the run's own vLLM has half of it, and its weights "
                f"need {human(least)}; start one elsewhere and name it by --vllm-url"
            )
        least = device.memory / 2  # what tools/vllm_server.py gives it
    free = device.memory - need - least
    if free < 0:
        return (
            f"does not fit {device.words}: {human(-free)} too many; lower --micro-tokens or --slots"
        )
    whose = "the run's own vLLM takes half of it, " if least == device.memory / 2 else ""
    return f"fits {device.words}: {whose}{human(free)} are left for what is not counted"


def assumptions(config: Config, device: Device) -> list[str]:
    """What the FLOPs, the seconds and the hours rest on, and what the memory leaves out."""
    length = episode_length(config)
    half = "" if config.plan_length else ", half of --max-length (else --plan-length)"
    shares = f"{device.train_share:.0%} of {device.flops / 1e12:g} TFLOP/s"
    return [
        "assumed",
        f"  an episode has {length:.0f} tokens{half}; "
        f"{SAMPLED[config.environment]:.0%} of them are sampled",
        f"  {PROMPT:.0%} of them, {PROMPT * length:.0f}, are the prompt, which is computed once a "
        "group in sampling and in training; its episodes share no more",
        "  every group trains, every micro-batch is full, and every expert is read in each decode "
        "step",
        f"  {shares} are reached in prefill, forward and backward pass, "
        f"{device.decode_share:.0%} of {device.bandwidth / 1e9:g} GB/s in decoding",
        "  sampling and training take turns, also with --max-staleness; evaluations, tools, judges "
        "and loading take no time; one process trains, with the whole base",
        "  not counted: the process itself (0.5 to 2 GB), what a prefill needs, fragmentation",
    ]
