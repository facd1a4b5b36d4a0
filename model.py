"""Qwen3 in one file (and Qwen2): the model, its key-value cache, a head without logits.

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

from checkpoint import check_tensors, checkpoint_directory, read_checkpoint, read_json
from experts import MixtureOfExperts, split_experts, stack_experts

# --- configuration -------------------------------------------------------------------------------

MIXTURE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


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
            file = checkpoint_directory(path) / "config.json"
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
        # transformers 4 writes rope_theta and rope_scaling, transformers 5 one rope_parameters.
        rope = dict(raw.get("rope_scaling") or {}) | dict(raw.get("rope_parameters") or {})
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        rotary_share = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
        required = {
            "rope type": (rope_type, "default"),
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
            values["num_experts"] = raw.get("num_experts") or raw.get("num_local_experts")
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
        for tensor in (self.keys, self.values):
            tensor[:, [a, b], :, :length] = tensor[:, [b, a], :, :length]


# --- layers --------------------------------------------------------------------------------------


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in fp32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


def rotary_angles(positions: Tensor, config: Qwen3Config, dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary embedding (arXiv 2104.09864) at `positions` (..., T): (..., T, C).

    Half-split layout, as in Hugging Face's checkpoints: channel i turns together with i + C/2.

        [ x_0 ... x_{C/2-1} | x_{C/2} ... x_{C-1} ]      angle_i = position * theta^(-2i/C)
    """
    channels = torch.arange(0, config.head_dim, 2, device=positions.device, dtype=torch.float32)
    # Written as transformers does: theta^(-x) rounds otherwise, which 8,000 positions multiply.
    frequencies = 1.0 / config.rope_theta ** (channels / config.head_dim)
    angles = positions[..., None].float() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to (..., T, C)."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass
class CacheWrite:
    """Where a forward pass over new tokens reads and writes the cache.

    rows: the slots, as a slice (a view: the decode path copies nothing) or an index tensor (S,);
    row_numbers: the same as a tensor. positions: (S, T) place of each new token in its stream.
    valid: (S, T), or None when every token is real. visible: (S, 1, T, cached tokens) which keys
    each new token sees.
    """

    cache: KVCache
    rows: slice | Tensor
    row_numbers: Tensor
    positions: Tensor
    valid: Tensor | None
    visible: Tensor


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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, write: CacheWrite | None) -> Tensor:
        S, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(S, T, self.heads, self.head_dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(S, T, self.kv_heads, self.head_dim)).transpose(1, 2)
        v = self.v_proj(x).view(S, T, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # (S, H, T, C), (S, K, T, C)
        if write is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        else:
            out = self.attend_to_cache(q, k, v, write)
        return self.o_proj(out.transpose(1, 2).reshape(S, T, -1))

    def attend_to_cache(self, q: Tensor, k: Tensor, v: Tensor, write: CacheWrite) -> Tensor:
        """Writes the new keys and values into the cache; (S, H, T, C) of all that is visible."""
        keys, values = write.cache.keys[self.layer], write.cache.values[self.layer]
        rows, positions = write.row_numbers[:, None].expand_as(write.positions), write.positions
        k, v = k.transpose(1, 2), v.transpose(1, 2)  # (S, T, K, C), the order of indexed writes
        if write.valid is None:
            keys[rows, :, positions], values[rows, :, positions] = k, v
        else:  # padding is never written: a slot has room for its own stream only
            rows, positions = rows[write.valid], positions[write.valid]
            keys[rows, :, positions], values[rows, :, positions] = k[write.valid], v[write.valid]
        S, _, T, C = q.shape
        length = write.visible.shape[-1]
        keys, values = keys[write.rows, :, :length], values[write.rows, :, :length]
        # The H/K query heads of a group stand side by side on the query axis, so that keys and
        # values are read once and never repeated.
        group = self.heads // self.kv_heads
        q = q.reshape(S, self.kv_heads, group * T, C)
        visible = write.visible.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible)
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

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, write: CacheWrite | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, write)
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

    def forward(
        self, input_ids: Tensor, positions: Tensor, write: CacheWrite | None = None
    ) -> Tensor:
        x = self.embed_tokens(input_ids)  # (S, T, D)
        cos, sin = rotary_angles(positions, self.config, x.dtype)
        if positions.dim() == 2:
            cos, sin = cos[:, None], sin[:, None]  # (S, 1, T, C), one for all heads
        for layer in self.layers:
            if self.gradient_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, write, use_reentrant=False)
            else:
                x = layer(x, cos, sin, write)
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
        positions = torch.arange(input_ids.shape[1] - 1, device=input_ids.device)
        hidden = self.model(input_ids[:, :-1], positions)[mask]  # (wanted, D)
        targets = input_ids[:, 1:][mask]
        wanted, wanted_entropy = HeadLogprobs.apply(hidden, self.head_weight, targets, temperature)
        zeros = torch.zeros(mask.shape, dtype=torch.float32, device=hidden.device)
        index = mask.nonzero(as_tuple=True)
        return zeros.index_put(index, wanted), zeros.index_put(index, wanted_entropy)

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
        visible = torch.arange(length, device=device) <= positions[..., None]
        numbers = rows
        if isinstance(rows, slice):
            numbers = torch.arange(rows.start, rows.stop, device=device)
        valid = None if lengths is None else torch.arange(T, device=device) < lengths[:, None]
        write = CacheWrite(cache, rows, numbers, positions, valid, visible[:, None])
        hidden = self.model(input_ids, positions, write)
        last = (ends - starts - 1)[:, None, None].expand(-1, 1, hidden.shape[-1])
        return F.linear(hidden.gather(1, last).squeeze(1), self.head_weight)

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


class HeadLogprobs(torch.autograd.Function):
    """log softmax(W h / temperature)[target], its entropy, and its gradient, without all logits.

        d logprob / d h = (W[target] - softmax(W h / temperature) W) / temperature

    This gradient does not depend on what comes from above, so the forward pass computes it chunk by
    chunk and keeps (N, D) numbers; logits for all tokens (V = 151,936 in Qwen3: 1.2 GB for 2,048
    tokens in fp32) never exist. With a frozen head the backward pass is one product. A head that is
    trained (full fine-tuning) has a gradient of its own, a sum over tokens in which each one counts
    by what comes from above,

        d loss / d W = sum_n  upstream_n (onehot(target_n) - softmax_n) h_n / temperature

    so its backward pass makes the logits again, a chunk at a time.
    """

    CHUNK_ELEMENTS = 1 << 24  # 64 MB of fp32 logits at a time

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float):
        rows = max(1, HeadLogprobs.CHUNK_ELEMENTS // weight.shape[0])
        needs_gradient = ctx.needs_input_grad[0]
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        gradient = torch.empty_like(hidden) if needs_gradient else None
        normalizers = torch.empty_like(logprobs)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], weight).float().div_(temperature)  # (chunk, V)
            normalizers[part] = normalizer = logits.logsumexp(-1)
            target_logits = logits.gather(1, targets[part, None]).squeeze(1)
            logprobs[part] = target_logits - normalizer
            probabilities = logits.sub(normalizer[:, None]).exp_()
            # H = -sum p log p = log Z - sum p * logit
            entropy[part] = normalizer - torch.einsum("nv,nv->n", probabilities, logits)
            if needs_gradient:
                expected = probabilities.to(weight.dtype) @ weight
                gradient[part] = (weight[targets[part]] - expected) / temperature
        trained = (hidden, weight, targets, normalizers) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(gradient, *trained)
        ctx.temperature, ctx.rows = temperature, rows
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, upstream: Tensor, _):
        gradient, *trained = ctx.saved_tensors
        if gradient is not None:
            gradient = upstream[:, None].to(gradient.dtype) * gradient
        if not trained:
            return gradient, None, None, None
        hidden, weight, targets, normalizers = trained
        upstream = upstream / ctx.temperature
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            logits = F.linear(hidden[part], weight).float().div_(ctx.temperature)
            # From here on, in place: d loss / d logits * temperature, (chunk, V).
            logits.sub_(normalizers[part, None]).exp_().mul_(-upstream[part, None])
            logits.scatter_add_(1, targets[part, None], upstream[part, None])
            weight_gradient.addmm_(logits.T, hidden[part].float())
        return gradient, weight_gradient.to(weight.dtype), None, None
