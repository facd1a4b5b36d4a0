"""Qwen3 in one file (and Qwen2): the model, its key-value cache, its three ways to be called.

    x = embed(ids)
    for each layer:   x = x + attention(norm(x));  x = x + mlp(norm(x))
    logits = norm(x) @ head.T                      head = embed.weight where the embeddings are tied

What makes it Qwen3 (arXiv 2505.09388): K key-value heads shared by groups of H/K query heads, an
RMSNorm on every single query and key head before the rotary embedding, SwiGLU, and a head_dim that
need not be hidden_size / H. Qwen3-MoE has a router and many small MLPs (experts.py) in the place of
the one MLP of some or all layers. Qwen2 (arXiv 2407.10671), the architecture of
DeepSeek-R1-Distill-Qwen, is Qwen3 without the norm of the heads and with a bias on q, k and v.

Parameters carry Hugging Face's names ("model.layers.0.self_attn.q_proj.weight"), so a checkpoint is
loaded (checkpoint.py) without a mapping table; experts are stacked on the way.

Axes: S sequences, T tokens, D hidden, V vocabulary, H query heads, K key-value heads, C channels of
a head (head_dim), L layers.

Left out on purpose: LoRA (lora.py puts it in from outside), rope scaling and sliding windows (a
checkpoint that asks for one is refused by name), attention dropout.
"""

from dataclasses import MISSING, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from checkpoint import check_fields, check_tensors, checkpoint_directory, read_checkpoint, read_json
from experts import MixtureOfExperts, split_experts, stack_experts
from head import HeadLogprobs, few_logits
from packing import Packing, gather, pack

# --- configuration -------------------------------------------------------------------------------

MIXTURE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
NO_EXPERTS = (*MIXTURE_FIELDS, "num_local_experts")  # are 0 where there are none
DTYPES = ("float32", "bfloat16", "float16", "float64")
# Of what config.json has besides Qwen3Config's fields, or in another form.
OTHER_KINDS = {"dtype": str, "num_local_experts": int, "layer_types": list}
OTHER_KINDS |= {"mlp_only_layers": list, "rope_parameters": dict, "rope_scaling": dict}


@dataclass(frozen=True)
class Qwen3Config:
    """The fields of config.json that shape the computation, under Hugging Face's names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False  # of Qwen3's four projections; Qwen2 has no such setting
    torch_dtype: str = "float32"
    model_type: str = "qwen3"
    # Of model_type "qwen3_moe" alone:
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()

    def has_experts(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, has experts instead of one MLP."""
        if not self.num_experts or layer in self.mlp_only_layers:
            return False
        return (layer + 1) % self.decoder_sparse_step == 0

    @classmethod
    def from_pretrained(cls, path: str | Path) -> "Qwen3Config":
        """Reads config.json (from a checkpoint directory, a Hub id, or the JSON file itself).

        Raises ValueError for another architecture and for any setting that this file does not
        compute: a wrong answer without a word is worse than none.
        """
        file = Path(path)
        if file.suffix != ".json":
            file = checkpoint_directory(path, ("config.json",)) / "config.json"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; a checkpoint directory needs a config.json")
        return cls.from_dict(read_json(file), str(file))

    @classmethod
    def from_dict(cls, raw: dict, where: str = "config.json") -> "Qwen3Config":
        """As from_pretrained, from the parsed JSON; `where` names the source in errors."""
        if raw.get("model_type") not in ("qwen3", "qwen3_moe", "qwen2"):
            raise ValueError(
                f"{where}: model_type is {raw.get('model_type')!r}, and only 'qwen3', 'qwen3_moe' "
                "and 'qwen2' are implemented"
            )
        mixture = raw["model_type"] == "qwen3_moe"
        kinds = {name: field.type for name, field in cls.__dataclass_fields__.items()}
        experts = raw.get("num_experts") or raw.get("num_local_experts")
        check_fields(where, raw, kinds | OTHER_KINDS, () if experts else NO_EXPERTS)
        # transformers 4 writes rope_theta and rope_scaling, transformers 5 one rope_parameters.
        parts = [dict(raw.get(name) or {}) for name in ("rope_parameters", "rope_scaling")]
        rope = parts[0] | parts[1]  # where there are both, transformers takes the latter
        check_fields(where, rope, {"rope_theta": float, "partial_rotary_factor": float})
        rope_types = {str(part[k]) for part in parts for k in ("rope_type", "type") if k in part}
        rotary_share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        required = {
            "rope type": (rope_types | {"default"}, {"default"}),
            "partial_rotary_factor": (rotary_share or 1.0, 1.0),
            "use_mrope": (raw.get("use_mrope") or False, False),
            "use_sliding_window": (raw.get("use_sliding_window") or False, False),
            "layer_types": (set(raw.get("layer_types") or ["full_attention"]), {"full_attention"}),
            "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
            "attention_dropout": (raw.get("attention_dropout") or 0.0, 0.0),
        }
        for name, (found, implemented) in required.items():
            if found != implemented:
                raise ValueError(
                    f"{where}: {name} {found!r} is not implemented (only {implemented!r} is)"
                )
        hidden, heads = raw.get("hidden_size") or 0, raw.get("num_attention_heads") or 1
        values = {
            "rope_theta": rope.get("rope_theta", raw.get("rope_theta")),
            "head_dim": raw.get("head_dim") or hidden // heads,
            "torch_dtype": raw.get("dtype") or raw.get("torch_dtype") or cls.torch_dtype,
        }
        if mixture:  # transformers 5 writes num_local_experts
            values["num_experts"] = experts
            values["mlp_only_layers"] = tuple(raw.get("mlp_only_layers") or ())
        else:
            values |= dict.fromkeys(MIXTURE_FIELDS)
        for name in cls.__dataclass_fields__:
            values.setdefault(name, raw.get(name))
        values = {name: value for name, value in values.items() if value is not None}
        missing = [
            name
            for name, field in cls.__dataclass_fields__.items()
            if name not in values
            and (field.default is MISSING or (mixture and name in MIXTURE_FIELDS))
        ]
        if missing:
            raise ValueError(f"{where}: missing {', '.join(missing)}")
        config = cls(**values)
        if config.torch_dtype not in DTYPES:
            raise ValueError(f"{where}: dtype {config.torch_dtype!r} is none of {DTYPES}")
        if config.num_experts_per_tok > config.num_experts:
            raise ValueError(
                f"{where}: num_experts_per_tok {config.num_experts_per_tok} is more than the "
                f"{config.num_experts} experts there are"
            )
        return config


# --- key-value cache -----------------------------------------------------------------------------


class KVCache:
    """Keys and values of `slots` token streams, `capacity` tokens each, allocated once.

    keys, values: (L, slots, K, capacity, C). A slot belongs to one stream; which tokens it holds is
    the caller's knowledge (engine.py), since only the caller knows which adapter computed them.
    """

    def __init__(self, config: Qwen3Config, slots: int, capacity: int, dtype, device="cpu"):
        shape = (
            config.num_hidden_layers,
            slots,
            config.num_key_value_heads,
            capacity,
            config.head_dim,
        )
        self.slots, self.capacity = slots, capacity
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    def copy(self, source: int, target: int, length: int) -> None:
        """Gives slot `target` the first `length` tokens of slot `source`."""
        for tensor in (self.keys, self.values):
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def swap(self, a: int, b: int, length: int) -> None:
        """Exchanges the first `length` tokens of two slots, so that live streams can stay side by
        side in slots 0..n-1."""
        # Views: indexing by lists would make two copies, and these are a tenth of a step's time.
        for tensor in (self.keys, self.values):
            first, second = tensor[:, a, :, :length], tensor[:, b, :, :length]
            kept = first.clone()
            first.copy_(second)
            second.copy_(kept)


# --- layers --------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32 at least."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32 and not torch.is_grad_enabled():
            # The same bits, and of a decode step's few rows twice as fast. (In bfloat16 it would
            # round once where checkpoints were trained with two roundings.)
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        return Normed.apply(x, self.weight, self.eps)


class Normed(torch.autograd.Function):
    """RMSNorm, y = w n with n = r x and r = 1 / sqrt(mean(x^2) + eps), and its gradient:

        d loss / d x = r (g w - n mean(g w n))        d loss / d w = sum of g n over all rows

    for g = d loss / d y. Autograd would keep more tensors and pass over them more often, which a
    small model feels.
    """

    @staticmethod
    def widen(x: Tensor) -> Tensor:
        return x.to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = Normed.widen(x)
        r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, r)
        return (wide * r).to(x.dtype) * weight

    @staticmethod
    def backward(ctx, g: Tensor):
        x, weight, r = ctx.saved_tensors
        normed = Normed.widen(x) * r
        over_rows = tuple(range(g.dim() - 1))
        trained = (g * normed).sum(over_rows).to(weight.dtype) if ctx.needs_input_grad[1] else None
        g = Normed.widen(g) * weight
        along = torch.linalg.vecdot(g, normed)[..., None] / g.shape[-1]  # mean(g w n)
        return g.addcmul_(normed, along, value=-1).mul_(r).to(x.dtype), trained, None


def rotary_angles(positions: Tensor, config: Qwen3Config, dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding (arXiv 2104.09864) at `positions`: (*positions, 1, C).

    Half-split layout, as in Hugging Face's checkpoints: channel i turns together with i + C/2.

        [ x_0 ... x_{C/2-1} | x_{C/2} ... x_{C-1} ]      angle_i = position * theta^(-2i/C)

    The sines of the first half are negative, so that rotate need not negate half of x.
    """
    channels = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    # Written as transformers does: theta^(-x) rounds otherwise, which 8,000 positions multiply.
    frequencies = 1.0 / config.rope_theta ** (channels / config.head_dim)
    angles = positions[..., None, None].float() * frequencies  # one for all heads
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to (..., heads, C)."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat((second, first), dim=-1)
    if x.dtype == torch.bfloat16:  # each product rounded, as checkpoints were trained
        return x * cos + turned * sin
    return torch.addcmul(x * cos, turned, sin)


@dataclass
class CacheWrite:
    """Where a forward pass over new tokens reads and writes the cache.

    rows: the slots, as a slice (a view: the decode path copies nothing) or an index tensor (S,).
    valid: (S, T), or None when every token is real; places: (N K,), for each of the N real tokens
    and each head, where it goes among the (slots K capacity) heads of a layer's cache. mask: (S, 1,
    H/K T, cached tokens), added to the scores: 0 for the keys that each new token sees, -inf for
    the others. None where the streams begin here, so that the new tokens see each other alone.
    wanted: the index (streams, last new tokens) of what the last layer is asked for, and last_mask,
    (S, 1, H/K, cached tokens), what those see; None for one new token a stream, which is the last.
    All made once for all layers.
    """

    cache: KVCache
    rows: slice | Tensor
    valid: Tensor | None
    places: Tensor
    mask: Tensor | None
    wanted: tuple[Tensor, Tensor] | None
    last_mask: Tensor | None


# Where the tokens stand: side by side in streams of equal length, packed, or after cached ones.
Place = None | Packing | CacheWrite
Rows = Tensor | tuple[Tensor, Tensor] | None


def pick(x: Tensor, rows: Rows) -> Tensor:
    """What place.wanted names: of a packing (N, D) -> (W, D), of streams (S, T, D) -> (S, 1, D)."""
    return x[rows] if isinstance(rows, tuple) else gather(x, rows)


class Attention(nn.Module):
    """Grouped-query attention with an RMSNorm on each query and key head (none in Qwen2)."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        qwen2 = config.model_type == "qwen2"
        hidden, o_bias = config.hidden_size, config.attention_bias and not qwen2
        bias = config.attention_bias or qwen2
        self.q_proj = nn.Linear(hidden, self.heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.heads * self.head_dim, hidden, bias=o_bias)
        self.q_norm = nn.Identity() if qwen2 else RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = nn.Identity() if qwen2 else RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, place: Place, rows: Rows = None
    ) -> Tensor:
        """x (.., D) -> (.., D); with the rows that place.wanted names, of those alone."""
        asking, angles = x, (cos, sin)
        if rows is not None:
            asking, angles = pick(x, rows), (cos[rows], sin[rows])
        split = (-1, self.head_dim)
        q = rotate(self.q_norm(self.q_proj(asking).unflatten(-1, split)), *angles)  # (.., H, C)
        k = rotate(self.k_norm(self.k_proj(x).unflatten(-1, split)), cos, sin)  # (.., K, C)
        v = self.v_proj(x).unflatten(-1, split)
        if isinstance(place, Packing):
            return self.o_proj(place.attend(q, k, v, rows is not None).flatten(-2))
        if place is not None:
            self.store(k, v, place)
            mask = place.mask if rows is None else place.last_mask
        q = q.transpose(1, 2)  # (S, H, T, C)
        if place is None or mask is None:
            k, v = k.transpose(1, 2), v.transpose(1, 2)  # (S, K, T, C)
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = self.attend_to_cache(q, place, mask)
        return self.o_proj(out.transpose(1, 2).flatten(-2))

    def store(self, k: Tensor, v: Tensor, write: CacheWrite) -> None:
        """Writes new keys and values (S, T, K, C) into the cache. Padding is never written: a slot
        has room for its own stream only."""
        for new, cached in ((k, write.cache.keys), (v, write.cache.values)):
            new = new if write.valid is None else new[write.valid]
            heads = cached[self.layer].view(-1, self.head_dim)
            heads.index_copy_(0, write.places, new.reshape(-1, self.head_dim))

    def attend_to_cache(self, q: Tensor, write: CacheWrite, mask: Tensor) -> Tensor:
        """q (S, H, T, C) -> the same, of all cached tokens that each query sees."""
        S, _, T, C = q.shape
        length = mask.shape[-1]
        keys = write.cache.keys[self.layer][write.rows, :, :length]
        values = write.cache.values[self.layer][write.rows, :, :length]
        # The H/K query heads of a group stand side by side on the query axis, so that keys and
        # values are read once and never repeated.
        group = self.heads // self.kv_heads
        q = q.reshape(S, self.kv_heads, group * T, C)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return out.reshape(S, self.heads, T, C)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def mixture_of_experts(config: Qwen3Config) -> MixtureOfExperts:
    return MixtureOfExperts(
        config.hidden_size,
        config.moe_intermediate_size,
        config.num_experts,
        config.num_experts_per_tok,
        config.norm_topk_prob,
    )


class Layer(nn.Module):
    """One decoder layer: attention and MLP, each behind its norm and beside a residual path."""

    def __init__(self, config: Qwen3Config, layer: int):
        super().__init__()
        self.self_attn = Attention(config, layer)
        self.mlp = mixture_of_experts(config) if config.has_experts(layer) else MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, place: Place, rows: Rows = None
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin, place, rows)
        x = (x if rows is None else pick(x, rows)) + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    """Embedding, layers, last norm: what Hugging Face's names call "model."."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # Keep a layer's input alone for the backward pass, which computes the layer again.
        self.gradient_checkpointing = False

    def forward(self, input_ids: Tensor, positions: Tensor, place: Place = None) -> Tensor:
        x = self.embed_tokens(input_ids)  # (S, T, D), packed (N, D)
        cos, sin = rotary_angles(positions, self.config, x.dtype)
        for layer in self.layers:
            last = place is not None and layer is self.layers[-1]
            arguments = (x, cos, sin, place, place.wanted if last else None)
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, *arguments, use_reentrant=False)
            else:
                x = layer(*arguments)
        return self.norm(x)


# --- the model -----------------------------------------------------------------------------------


class Qwen3(nn.Module):
    """A Qwen3 language model; see the three ways to call it: forward, token_logprobs, extend."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def head_weight(self) -> Tensor:
        """(V, D): the output head; the embedding itself where the two are tied."""
        tied = self.config.tie_word_embeddings
        return self.model.embed_tokens.weight if tied else self.lm_head.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        """input_ids (S, T) int64 -> logits (S, T, V). Pad on the right: no token sees it."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        return F.linear(self.model(input_ids, positions), self.head_weight)

    def token_logprobs(
        self, input_ids: Tensor, mask: Tensor, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities of the tokens that are there, without the logits of all others.

        input_ids (S, T); mask (S, T-1), true at t where token t+1 is wanted. Returns logprobs and
        entropy, (S, T-1) fp32 in nats at `temperature`: of token t+1 given tokens 0..t, zero where
        the mask is not. Only wanted positions meet the head. logprobs carry gradient, entropy none.
        """
        if mask.shape != (input_ids.shape[0], input_ids.shape[1] - 1):
            raise ValueError(
                f"mask {tuple(mask.shape)} must be (S, T-1) of input_ids {tuple(input_ids.shape)}"
            )
        mask = mask.bool()
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=mask.device)
        if not mask.numel():
            return zeros, zeros
        packing = pack(input_ids, mask, self.head_weight.dtype)
        hidden = self.model(packing.ids, packing.positions, packing)  # (W, D)
        hidden = gather(hidden, packing.pair_rows)  # (M, D)
        found = HeadLogprobs.apply(hidden, self.head_weight, packing.pair_targets, temperature)
        index = mask.nonzero(as_tuple=True)
        each = (gather(values[:, None], packing.pairs).squeeze(1) for values in found)
        logprobs, entropy = (zeros.index_put(index, values) for values in each)
        return logprobs, entropy

    @torch.no_grad()
    def extend(
        self,
        input_ids: Tensor,
        cache: KVCache,
        rows: slice | Tensor,
        starts: Tensor,
        lengths: Tensor | None = None,
    ) -> Tensor:
        """New tokens after cached ones: prefill, a chunk of it, or one decode step.

        input_ids (S, T), padded on the right where lengths (S,) says so; rows: the cache slots of
        the S streams (a slice for neighbours, else an index tensor); starts (S,): tokens that each
        stream holds already. Returns the logits (S, V) after each stream's last new token.
        """
        S, T = input_ids.shape
        device = input_ids.device
        positions = starts[:, None] + torch.arange(T, device=device)  # (S, T)
        ends = starts + (T if lengths is None else lengths)
        length = int(ends.max())
        if length > cache.capacity:
            raise ValueError(f"{length} tokens do not fit a cache of {cache.capacity} a stream")
        mask = self.mask(positions, length) if starts.any() else None
        numbers = rows
        if isinstance(rows, slice):
            numbers = torch.arange(rows.start, rows.stop, device=device)
        K = self.config.num_key_value_heads
        heads = numbers[:, None] * K + torch.arange(K, device=device)  # (S, K)
        places = heads[:, None] * cache.capacity + positions[..., None]  # (S, T, K)
        valid = None
        if lengths is not None:
            valid = torch.arange(T, device=device) < lengths[:, None]
            places = places[valid]
        last = ends - starts - 1  # (S,) of the new tokens
        wanted = last_mask = None
        if T > 1:
            wanted = torch.arange(S, device=device)[:, None], last[:, None]
            last_mask = self.mask(positions[wanted], length)
        write = CacheWrite(cache, rows, valid, places.flatten(), mask, wanted, last_mask)
        hidden = self.model(input_ids, positions, write)  # (S, 1, D)
        return few_logits(hidden[:, 0], self.head_weight)

    def mask(self, positions: Tensor, length: int) -> Tensor:
        """CacheWrite.mask of queries at `positions` (S, T) on `length` cached tokens."""
        visible = torch.arange(length, device=positions.device) <= positions[..., None]
        mask = torch.zeros(visible.shape, dtype=self.head_weight.dtype, device=visible.device)
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        return mask.masked_fill_(~visible, -torch.inf)[:, None].repeat(1, 1, group, 1)

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype=None, device=None) -> "Qwen3":
        """Loads a Hugging Face checkpoint: a local directory or a Hub id.

        dtype: None keeps the checkpoint's. Raises ValueError that lists every missing, surplus or
        misshapen tensor.
        """
        directory = checkpoint_directory(path)
        config = Qwen3Config.from_pretrained(directory)
        with torch.device("meta"):
            model = cls(config)
        tensors = read_checkpoint(directory)
        embedding = tensors.get("model.embed_tokens.weight")
        if config.tie_word_embeddings and "lm_head.weight" in tensors:
            # Some tied checkpoints (Qwen3-0.6B) ship the head as well; it has to be the same.
            if embedding is None or not torch.equal(tensors.pop("lm_head.weight"), embedding):
                raise ValueError(
                    f"{directory}: tie_word_embeddings is set, but lm_head.weight differs from "
                    "model.embed_tokens.weight"
                )
        check_tensors(directory, split_experts(model.state_dict()), tensors)
        tensors = stack_experts(tensors)
        dtype = dtype or getattr(torch, config.torch_dtype)
        for name, tensor in tensors.items():  # in place: two copies never exist at once
            tensors[name] = tensor.to(device=device or "cpu", dtype=dtype)
        model.load_state_dict(tensors, assign=True)
        return model
