"""The 4-bit base: data types, layer, one model for trainer and sampler, equal to bitsandbytes.

The comparison with the real package needs it: .venv-peers/bin/python -m pytest -m peers
"""

import asyncio
import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    close,
    lora_configs,
    randomise_adapter,
    seeds,
    tiny_config,
    tiny_configs,
    tiny_model,
    tiny_tokens,
)

import quant
from broadcast import publish
from engine import Request, TorchEngine
from lora import (
    LoRAConfig,
    adapter_disabled,
    inject_lora,
    lora_layers,
    lora_parameters,
    merge_lora,
    unmerge_lora,
)
from quant import (
    QuantizedLinear,
    dequantize,
    dynamic_levels,
    normal_float_levels,
    quantize,
    quantize_base,
)

with contextlib.suppress(ImportError):  # the default tier collects this file without it
    import bitsandbytes

dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@st.composite
def matrices(draw) -> torch.Tensor:
    """Normal or heavy-tailed, with blocks of zeros, in whole blocks or not."""
    shape = draw(st.sampled_from([(1, 1), (3, 5), (7, 64), (24, 64), (130, 192)]))
    generator = torch.Generator().manual_seed(draw(seeds))
    weight = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-6, 3))
    weight = weight ** draw(st.sampled_from([1, 3]))
    return (weight * (torch.arange(shape[0])[:, None] % 3 > 0)).to(draw(dtypes))


def linear_layer(out_size: int, in_size: int, dtype=torch.float32, seed=0) -> torch.nn.Linear:
    layer = torch.nn.Linear(in_size, out_size, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    layer.weight.data = torch.randn(out_size, in_size, generator=generator).to(dtype) / in_size**0.5
    return layer.requires_grad_(False)


def twins(config, seed=0):
    """A quantised model, and a plain one that holds the dequantised weights."""
    packed, plain = tiny_model(config, seed), tiny_model(config, seed)
    for name in quantize_base(packed):
        plain.get_submodule(name).weight.copy_(packed.get_submodule(name).weight)
    return packed, plain


# --- the data types -------------------------------------------------------------------------------


def test_the_levels_are_those_of_the_papers_appendix():
    """QLoRA, appendix E, rounded; the first negative and the first positive quantile differ."""
    below = [-1.0, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0.0]
    above = [0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262, 0.72296, 1.0]
    close(normal_float_levels(), torch.tensor(below + above))
    levels = dynamic_levels()
    assert len(levels.unique()) == 256 and (levels.diff() > 0).all()
    assert levels[-1] == 1 and 0 in levels and abs(levels[0]) < 1


@given(weight=matrices())
def test_every_code_is_the_nearest_and_the_error_has_its_bound(weight):
    codes, scale_codes, scale_absmax, scale_mean = quantize(weight)
    flat = weight.flatten().float()
    blocks = F.pad(flat, (0, -len(flat) % 64)).view(-1, 64)
    absmax = blocks.abs().amax(1, keepdim=True)
    unpacked = torch.stack((codes >> 4, codes & 15), 1).view(-1, 64).long()
    chosen = (blocks / absmax.clamp(min=1e-38) - normal_float_levels()[unpacked]).abs()
    candidates = blocks[..., None] / absmax.clamp(min=1e-38)[..., None] - normal_float_levels()
    close(chosen, candidates.abs().amin(-1), 1e-6)

    # Half the widest gap of the levels, and the same of the scales' levels.
    scale_error = scale_absmax.max() * dynamic_levels().diff().max() / 2 + 1e-6 * absmax.max()
    packed = (codes, scale_codes, scale_absmax, scale_mean)
    error = (dequantize(*packed).view(-1, 64) - blocks).abs()
    half = normal_float_levels().diff().max() / 2
    assert (error <= absmax * half * 1.0001 + scale_error + 1e-38).all()
    assert not dequantize(*packed).view(-1, 64)[blocks == 0].any()  # zero is exact


def test_bits_and_error_are_those_of_the_paper():
    weight = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    packed = quantize(weight)
    assert [tensor.numel() for tensor in packed] == [2**19, 2**14, 64, 1]
    bits = 8 * sum(tensor.nbytes for tensor in packed[:3]) / weight.numel()
    assert bits == 4 + 8 / 64 + 32 / (64 * 256)
    error = (dequantize(*packed).view_as(weight) - weight).square().mean().sqrt() / 0.02
    assert error.item() == pytest.approx(0.092, abs=0.001)


# --- the layer ------------------------------------------------------------------------------------


@given(st.sampled_from([(1, 1), (5, 3), (40, 64), (64, 96)]), dtypes, st.integers(0, 9), seeds)
def test_a_layer_is_the_product_with_its_dequantised_weight(shape, dtype, rows, seed):
    layer = QuantizedLinear(linear_layer(*shape, dtype, seed))
    assert isinstance(layer, torch.nn.Linear) and layer.weight.dtype == dtype
    x = torch.randn(rows, 2, shape[1]).to(dtype)
    ours, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = layer(ours), F.linear(plain, layer.weight, layer.bias)
    assert torch.equal(y, expected)
    upstream = torch.randn(y.shape).to(dtype)
    y.backward(upstream)
    expected.backward(upstream)
    close(ours.grad, plain.grad, 1e-5 if dtype == torch.float32 else 0.1)
    assert all(parameter.grad is None for parameter in layer.parameters())


@pytest.mark.parametrize("bias", [True, False])
def test_only_packed_storage_is_kept_and_nothing_is_saved_for_the_backward_pass(bias):
    linear = linear_layer(256, 512)
    linear.bias = linear.bias if bias else None
    layer = QuantizedLinear(linear)
    kept = sum(parameter.nbytes for parameter in layer.parameters())
    assert kept == 256 * 512 * 33 // 64 + 256 * 512 // 64 // 256 * 4 + 4 + 1024 * bias
    assert not list(layer.buffers()) and not any(p.requires_grad for p in layer.parameters())
    saved = []
    x = torch.randn(2, 512, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x)
    assert saved == []
    y.sum().backward()


# --- the model ------------------------------------------------------------------------------------


@settings(max_examples=10)
@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_a_quantised_model_is_the_model_of_the_dequantised_weights(config, lora, seed):
    """Forward, disabled, merged, unmerged, and the gradient of every A and B."""
    packed, plain = twins(config, seed)
    ids = tiny_tokens(config, 2, 6, seed)
    base = packed(ids)
    assert torch.equal(base, plain(ids))
    for model in (packed, plain):
        torch.manual_seed(seed)
        inject_lora(model, lora)
        assert torch.equal(model(ids), base)
        randomise_adapter(model, seed)
        logprobs, _ = model.token_logprobs(ids, torch.ones(2, 5))
        logprobs.sum().backward()
    theirs = lora_parameters(plain)
    for name, parameter in lora_parameters(packed).items():
        assert parameter.grad.any(), name
        assert (parameter.grad - theirs[name].grad).norm() <= 1e-4 * theirs[name].grad.norm(), name
    active = packed(ids)
    assert torch.equal(active, plain(ids)) and not torch.equal(active, base)
    for model in (packed, plain):
        merge_lora(model)
    assert torch.equal(packed(ids), plain(ids))
    close(packed(ids), active)
    with adapter_disabled(packed):
        assert torch.equal(packed(ids), base)
    unmerge_lora(packed)
    assert torch.equal(packed(ids), active)


def test_trainer_and_sampler_use_the_same_dequantised_weights(tmp_path, monkeypatch):
    """Bit for bit, in the forward pass, the backward pass, prefill and decode."""
    model, lora = tiny_model(), LoRAConfig(rank=2)
    names = quantize_base(model)
    inject_lora(model, lora)
    randomise_adapter(model)
    engine = TorchEngine(model, slots=4, max_length=32)
    engine.add_adapter("v0", publish(model, lora, tmp_path, 0))
    uses, mode = [], ""

    def recorded(codes, *scales):
        weight = dequantize(codes, *scales)
        uses.append((codes.data_ptr(), mode, weight.numpy().tobytes()))
        return weight

    monkeypatch.setattr(quant, "dequantize", recorded)
    mode = "sample"
    request = Request([1, 2, 3], 12, adapter="v0", seed=0)
    completion = asyncio.run(engine.generate(request))
    ids = torch.tensor([[1, 2, 3, *completion.token_ids]])
    mode = "forward"
    logprobs, _ = model.token_logprobs(ids, torch.ones(1, ids.shape[1] - 1))
    mode = "backward"
    logprobs.sum().backward()
    assert len({(layer, weight) for layer, _, weight in uses}) == len(names)
    # The gradient of the first layer's input is nobody's; every other layer passes one on.
    assert {layer for layer, mode, _ in uses if mode == "sample"} == {
        layer for layer, mode, _ in uses if mode == "forward"
    }
    assert len([use for use in uses if use[1] == "forward"]) == len(names)
    assert len([use for use in uses if use[1] == "backward"]) == len(names) - 3
    close(logprobs[0, 2:].detach(), torch.tensor(completion.logprobs))


def test_all_but_the_projections_keep_their_dtype():
    model = tiny_model(tiny_config(tie_word_embeddings=False)).bfloat16()
    before = {name: parameter for name, parameter in model.named_parameters()}
    names = quantize_base(model)
    assert len(names) == 7 * model.config.num_hidden_layers
    after = dict(model.named_parameters())
    kept = {name for name in before if name.rpartition(".")[0] not in names}
    assert {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"} <= kept
    assert all(after[name] is before[name] for name in kept)
    assert not any(f"{name}.weight" in after for name in names)
    inject_lora(model, LoRAConfig())
    assert all(parameter.dtype == torch.float32 for parameter in lora_parameters(model).values())
    assert all(layer.base.weight.dtype == torch.bfloat16 for layer in lora_layers(model).values())


def test_what_cannot_be_quantised_is_refused_by_name():
    model = tiny_model()
    quantize_base(model)
    with pytest.raises(ValueError, match="quantised once"):
        quantize_base(model)
    with pytest.raises(TypeError, match="cast to torch.bfloat16"):
        model.bfloat16()(tiny_tokens(model.config, 1, 3))
    model = tiny_model()
    model.model.layers[1].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj: .* not finite"):
        quantize_base(model)
    model.experts = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(ValueError, match="experts: only linear layers"):
        quantize_base(model)


# --- the real package -----------------------------------------------------------------------------


@pytest.mark.peers
def test_the_levels_are_bitsandbytes_to_the_last_bit():
    functional = bitsandbytes.functional
    assert torch.equal(normal_float_levels(), functional.get_4bit_type("nf4", device="cpu"))
    assert torch.equal(dynamic_levels(), functional.create_dynamic_map())


@pytest.mark.peers
@given(weight=matrices())
def test_codes_and_weights_are_those_of_bitsandbytes(weight):
    """Every 4-bit code; every scale but where two 8-bit levels are about equally near and its CPU
    kernel takes the farther one; the weights, bit for bit, from the same codes and scales."""
    if weight.numel() < 64:  # it divides where it multiplies in whole blocks
        return
    weight = weight.flatten()[: weight.numel() // 64 * 64].view(-1, 64)
    theirs, state = bitsandbytes.functional.quantize_4bit(
        weight, blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    codes, scale_codes, scale_absmax, scale_mean = quantize(weight)
    assert torch.equal(codes, theirs.flatten())
    assert torch.equal(scale_mean, state.offset)
    assert torch.equal(scale_absmax, state.state2.absmax)
    differing = scale_codes != state.absmax
    both = dynamic_levels()[torch.stack((scale_codes, state.absmax)).long()]
    scales = (weight.float().abs().amax(1) - scale_mean) / scale_absmax.repeat_interleave(256)[
        : len(scale_codes)
    ].clamp(min=1e-38)
    near, far = (both - scales).abs()[:, differing]
    assert (near <= far + 1e-6).all() and (far - near < 2**-14).all()

    expected = bitsandbytes.functional.dequantize_4bit(theirs, state)
    ours = dequantize(codes, state.absmax, scale_absmax, scale_mean)
    assert torch.equal(ours.view_as(weight).to(weight.dtype), expected)


@pytest.mark.peers
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_of_bitsandbytes_has_our_size_error_output_and_gradient(dtype):
    linear = linear_layer(512, 1024, dtype)
    theirs = bitsandbytes.nn.Linear4bit(
        1024, 512, compute_dtype=dtype, compress_statistics=True, quant_type="nf4"
    )
    # Assigned before the move to a device, which is what packs it.
    theirs.weight = bitsandbytes.nn.Params4bit(
        linear.weight.data.clone(), requires_grad=False, quant_type="nf4"
    )
    theirs.bias = linear.bias
    theirs = theirs.to("cpu")
    ours = QuantizedLinear(linear)
    state = theirs.weight.quant_state
    size = theirs.weight.nbytes + state.absmax.nbytes + state.state2.absmax.nbytes
    assert size == ours.codes.nbytes + ours.scale_codes.nbytes + ours.scale_absmax.nbytes
    assert 8 * size / linear.weight.numel() == pytest.approx(4.127, abs=0.0005)
    weight = bitsandbytes.functional.dequantize_4bit(theirs.weight, state)
    errors = [(w.float() - linear.weight.float()).norm().item() for w in (weight, ours.weight)]
    assert errors[0] == pytest.approx(errors[1], rel=1e-5)
    assert (ours.scale_codes != state.absmax).float().mean() < 0.005
    ours.scale_codes.copy_(state.absmax)  # the few that its CPU kernel misses, see above
    x = torch.randn(4, 1024).to(dtype)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    close(ours(a), theirs(b), tolerance)
    ours(a).sum().backward()
    theirs(b).sum().backward()
    close(a.grad, b.grad, tolerance if dtype == torch.float32 else 0.5)
