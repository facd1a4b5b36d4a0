"""Tiny random models for the tests: all weights drawn from a seed, norms and biases included."""

import dataclasses
import json
from pathlib import Path

import safetensors.torch
import torch
from hypothesis import strategies as st
from torch import Tensor

from experts import split_experts
from lora import TRAINABLE, LoRAConfig, inject_lora, lora_layers, lora_parameters
from model import MIXTURE_FIELDS, Qwen3, Qwen3Config

seeds = st.integers(0, 10_000)
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal but for rounding: the second kind of equality of the design, absolute."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance)


def tiny_config(**overrides) -> Qwen3Config:
    """Two layers, two query heads a key head, and a head_dim that is not hidden / heads."""
    values = {
        "vocab_size": 23,
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "max_position_embeddings": 64,
        "rope_theta": 10_000.0,
    }
    values["model_type"] = "qwen3_moe" if overrides.get("num_experts") else "qwen3"
    return Qwen3Config(**values | overrides)


@st.composite
def tiny_configs(draw) -> Qwen3Config:
    kv_heads = draw(st.sampled_from([1, 2]))
    return tiny_config(
        vocab_size=draw(st.integers(5, 30)),
        hidden_size=draw(st.sampled_from([16, 20, 24])),
        intermediate_size=draw(st.sampled_from([10, 20])),
        num_hidden_layers=draw(st.integers(1, 2)),
        num_attention_heads=kv_heads * draw(st.integers(1, 3)),
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from([4, 6, 8])),
        rope_theta=draw(st.sampled_from([100.0, 10_000.0, 5_000_000.0])),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        model_type=draw(st.sampled_from(["qwen3", "qwen2"])),
    )


def tiny_moe_config(**overrides) -> Qwen3Config:
    """Four experts, two a token, in both layers."""
    values = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "norm_topk_prob": True,
    }
    return tiny_config(**values | overrides)


@st.composite
def tiny_moe_configs(draw, dense_layers: bool = True) -> Qwen3Config:
    """Sizes that grouped_mm takes and sizes that it does not; at least one layer with experts, and
    all of them unless dense_layers."""
    layers = draw(st.integers(1, 2))
    # With a step of 2, layer 1 has experts and layer 0 has none.
    step, dense = 1, ()
    if dense_layers and layers == 2:
        step, dense = draw(st.sampled_from([(1, ()), (2, ()), (1, (0,)), (1, (1,)), (2, (0,))]))
    experts = draw(st.integers(2, 5))
    return dataclasses.replace(
        draw(tiny_configs()),
        model_type="qwen3_moe",
        hidden_size=draw(st.sampled_from([16, 18])),
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=draw(st.integers(1, experts)),
        moe_intermediate_size=draw(st.sampled_from([6, 8])),
        norm_topk_prob=draw(st.booleans()),
        decoder_sparse_step=step,
        mlp_only_layers=dense,
    )


@st.composite
def lora_configs(draw, dropout: float = 0.0) -> LoRAConfig:
    targets = draw(st.sets(st.sampled_from(PROJECTIONS), min_size=1))
    rank = draw(st.sampled_from([1, 2, 3, 4, 8]))
    alpha = draw(st.sampled_from([1.0, float(rank), 2.0 * rank, 12.5]))
    return LoRAConfig(rank, alpha, dropout, tuple(sorted(targets)))


def tiny_model(config: Qwen3Config | None = None, seed: int = 0) -> Qwen3:
    """A frozen model whose logits are of order one; norms and biases are random too."""
    model = Qwen3(config or tiny_config())
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
    return model.requires_grad_(False)


def randomise_adapter(model: torch.nn.Module, seed: int = 0, size: float = 0.3) -> None:
    """Makes the trainable adapter a random update of about `size` times the base's weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in lora_layers(model).values():
            if TRAINABLE in layer.lora_A:
                A, B = layer.lora_A[TRAINABLE], layer.lora_B[TRAINABLE]
                rank, in_size = A.shape[-2:]
                A.copy_(torch.randn(A.shape, generator=generator) / in_size**0.5)
                B.copy_(torch.randn(B.shape, generator=generator) * size / rank**0.5)
                B.div_(layer.scaling[TRAINABLE])


def random_adapter(model: Qwen3, lora: LoRAConfig, seed: int = 0) -> dict[str, Tensor]:
    """Tensors of another adapter for `model`, as read_adapter returns them."""
    other = tiny_model(model.config)
    inject_lora(other, lora)
    randomise_adapter(other, seed)
    return {name: parameter.detach() for name, parameter in lora_parameters(other).items()}


def tiny_tokens(config: Qwen3Config, S: int, T: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocab_size, (S, T), generator=generator)


def config_json(config: Qwen3Config, transformers: int = 5, **overrides) -> dict:
    """What transformers 4 or 5 writes into config.json."""
    kind = {"qwen3": "Qwen3", "qwen2": "Qwen2", "qwen3_moe": "Qwen3Moe"}[config.model_type]
    raw = {"architectures": [f"{kind}ForCausalLM"], "hidden_act": "silu"}
    raw |= {"attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None}
    raw |= dataclasses.asdict(config)
    if config.num_experts:
        raw["mlp_only_layers"] = list(config.mlp_only_layers)
    else:
        others = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
        raw = {name: raw[name] for name in raw if name not in (*MIXTURE_FIELDS, *others)}
    if transformers == 5:
        raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta"), "rope_type": "default"}
        raw["dtype"] = raw.pop("torch_dtype")
        raw["layer_types"] = ["full_attention"] * config.num_hidden_layers
    else:
        raw["rope_scaling"] = None
    return raw | overrides


def save_checkpoint(
    directory: Path, config: dict, tensors: dict[str, Tensor], shards: int = 1
) -> Path:
    """Writes a Hugging Face checkpoint: config.json and one safetensors file, or shards."""
    tensors = {name: tensor.contiguous() for name, tensor in split_experts(tensors).items()}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    if shards == 1:
        safetensors.torch.save_file(tensors, directory / "model.safetensors")
        return directory
    files = {
        f"model-{i + 1:05d}-of-{shards:05d}.safetensors": names[i::shards] for i in range(shards)
    }
    for file, part in files.items():
        safetensors.torch.save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory
