"""experts.py, and what model.py, lora.py, broadcast.py and engine.py make of it.

The specification of the layer is a loop over tokens and their experts in float64. Routing is
discrete: where two probabilities lie within rounding, two right answers differ. Random weights
hardly ever come so close.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny import (
    PROJECTIONS,
    close,
    config_json,
    random_adapter,
    randomise_adapter,
    save_checkpoint,
    seeds,
    tiny_model,
    tiny_moe_config,
    tiny_moe_configs,
    tiny_tokens,
)

from broadcast import load_adapter, read_adapter, save_adapter
from config import ASSETS
from engine import Request, TorchEngine
from experts import Experts, Pairs, grouped_linear, split_experts, stack_experts
from lora import (
    TARGETS,
    TRAINABLE,
    LoRAConfig,
    LoRAGrouped,
    adapter_disabled,
    add_adapter,
    inject_lora,
    lora_layers,
    lora_parameters,
    main,
    merge_lora,
    remove_adapter,
    size_table,
    unmerge_lora,
    use_adapters,
)
from model import KVCache, Qwen3, Qwen3Config
from tools.rehearse import upcycle

ROOT = Path(__file__).parents[1]
few = settings(max_examples=8)
pytestmark = pytest.mark.filterwarnings(
    "ignore:rank .* is larger", "ignore:target_modules .* are not in this model"
)

# rank 3 and 5 are none that grouped_mm takes, 4 and 8 are
loras = st.builds(
    LoRAConfig,
    rank=st.sampled_from([1, 3, 4, 8]),
    alpha=st.sampled_from([1.0, 8.0, 12.5]),
    target_modules=st.sampled_from([TARGETS, ("experts",), ("experts", "q_proj", "up_proj")]),
)
MIXTURES = tiny_moe_configs()


def random_tensor(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapted(config, lora, seed=0):
    model = tiny_model(config, seed)
    inject_lora(model, lora)
    randomise_adapter(model, seed)
    return model


def mixture_layers(config: Qwen3Config) -> list[int]:
    return [i for i in range(config.num_hidden_layers) if config.has_experts(i)]


# --- the layer ------------------------------------------------------------------------------------


@given(
    counts=st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(any),
    sizes=st.tuples(st.sampled_from([4, 6, 8]), st.sampled_from([3, 4, 8])),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    seed=seeds,
)
def test_the_grouped_product_is_one_product_a_group(counts, sizes, dtype, seed):
    """Whether or not grouped_mm takes these sizes, with its gradients; groups may be empty."""
    in_size, out_size = sizes
    x = random_tensor(sum(counts), in_size, seed=seed).to(dtype).requires_grad_()
    weight = random_tensor(len(counts), out_size, in_size, seed=seed + 1).to(dtype).requires_grad_()
    upstream = random_tensor(sum(counts), out_size, seed=seed + 2).to(dtype)
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    ends = Pairs(torch.zeros_like(experts), experts, 1, len(counts)).ends
    assert ends.tolist() == np.cumsum(counts).tolist() and ends.dtype == torch.int32
    y = grouped_linear(x, weight, ends)
    expected = torch.einsum("ni,noi->no", x, weight[experts])
    tolerance = 0.1 if dtype == torch.bfloat16 else 1e-5
    close(y, expected, tolerance)
    found, wanted = (torch.autograd.grad(t, (x, weight), upstream) for t in (y, expected))
    for gradient, right in zip(found, wanted, strict=True):
        close(gradient, right, tolerance)


def naive_mixture(mlp, x: torch.Tensor, k: int, norm_topk_prob: bool) -> torch.Tensor:
    """A loop over tokens and their experts, in float64."""
    weights = {name: tensor.double() for name, tensor in mlp.state_dict().items()}
    out = torch.zeros_like(x, dtype=torch.float64)
    for place in np.ndindex(x.shape[:2]):
        token = x[place].double()
        p = (weights["gate.weight"] @ token).softmax(0)
        chosen = sorted(range(len(p)), key=lambda e: -float(p[e]))[:k]
        total = sum(p[e] for e in chosen) if norm_topk_prob else 1.0
        for e in chosen:
            gate, up, down = (
                weights[f"experts.{m}_proj.weight"][e] for m in ("gate", "up", "down")
            )
            out[place] += p[e] / total * (down @ (F.silu(gate @ token) * (up @ token)))
    return out


@few
@given(config=MIXTURES, S=st.integers(1, 3), T=st.integers(1, 5), seed=seeds)
@example(config=tiny_moe_config(num_experts=5), S=1, T=1, seed=0)  # most experts get no token
def test_the_mixture_is_the_loop_over_tokens_and_experts(config, S, T, seed):
    mlp = tiny_model(config, seed).model.layers[mixture_layers(config)[0]].mlp
    x = random_tensor(S, T, config.hidden_size, seed=seed)
    expected = naive_mixture(mlp, x, config.num_experts_per_tok, config.norm_topk_prob)
    close(mlp(x).double(), expected)


def test_an_expert_that_no_token_reaches_gets_a_gradient_of_zero():
    experts = Experts(4, 8, 8)
    x, weights = random_tensor(1, 3, 8).requires_grad_(), torch.ones(1, 3, 2)
    chosen = torch.tensor([[[0, 3], [3, 0], [0, 3]]])
    experts(x, chosen, weights).square().sum().backward()
    for projection in (experts.gate_proj, experts.up_proj, experts.down_proj):
        gradient = projection.weight.grad
        assert not gradient[1:3].any() and gradient[0].any() and gradient[3].any()
    assert torch.isfinite(x.grad).all() and x.grad.any()


@few
@given(config=MIXTURES, T=st.integers(2, 8), seed=seeds)
def test_neighbours_padding_and_chunks_change_rounding_alone(config, T, seed):
    """Other tokens change how many rows an expert multiplies, and nothing else of a token."""
    model, ids = tiny_model(config, seed), tiny_tokens(config, 3, T, seed)
    full = model(ids)
    close(full[1:2], model(ids[1:2]))
    for content in (0, config.vocab_size - 1):
        padded = torch.cat((ids, torch.full((3, 4), content)), dim=1)
        close(model(padded)[:, :T], full)
    cache = KVCache(config, slots=4, capacity=T, dtype=torch.float32)
    lengths = torch.tensor([1, T, T - 1])  # prefill with padding, then token by token
    model.extend(
        ids, cache, slice(0, 3), torch.zeros(3, dtype=torch.long), lengths - 1 + (lengths == 1)
    )
    for t in range(1, T):
        logits = model.extend(ids[:1, t : t + 1], cache, slice(0, 1), torch.tensor([t]))
        close(logits, full[:1, t])
    close(model.extend(ids[1:2, -1:], cache, slice(1, 2), torch.tensor([T - 1])), full[1:2, -1])


def test_which_layers_have_experts():
    def layers(**settings):
        return mixture_layers(tiny_moe_config(num_hidden_layers=6, **settings))

    assert layers() == [0, 1, 2, 3, 4, 5]
    assert layers(decoder_sparse_step=2) == [1, 3, 5]
    assert layers(decoder_sparse_step=2, mlp_only_layers=(0, 3)) == [1, 5]
    assert layers(num_experts=0) == []


# --- names on disk --------------------------------------------------------------------------------


@few
@given(config=MIXTURES, transformers=st.sampled_from([4, 5]), seed=seeds, shards=st.integers(1, 3))
def test_a_checkpoint_gives_its_model_back(tmp_path_factory, transformers, config, seed, shards):
    model = tiny_model(config, seed)
    raw = config_json(config, transformers)
    if transformers == 5:
        raw["num_local_experts"] = raw.pop("num_experts")
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory, raw, model.state_dict(), shards)
    names = {key for f in directory.glob("*.safetensors") for key in safe_open(f, "pt").keys()}
    at = f"model.layers.{mixture_layers(config)[0]}.mlp"
    assert f"{at}.experts.{config.num_experts - 1}.down_proj.weight" in names
    assert f"{at}.gate.weight" in names and f"{at}.experts.down_proj.weight" not in names
    loaded = Qwen3.from_pretrained(directory)
    assert loaded.config == config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)


def test_missing_surplus_and_misshapen_experts_are_all_listed(tmp_path):
    config = tiny_moe_config()
    save_checkpoint(tmp_path, config_json(config), tiny_model(config).state_dict())
    tensors = load_file(tmp_path / "model.safetensors")
    at = "model.layers.1.mlp.experts"
    del tensors[f"{at}.2.up_proj.weight"]
    tensors[f"{at}.4.up_proj.weight"] = torch.zeros(8, 12)
    tensors[f"{at}.0.down_proj.weight"] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as error:
        Qwen3.from_pretrained(tmp_path)
    assert f"missing {at}.2.up_proj.weight" in str(error.value)
    assert f"surplus {at}.4.up_proj.weight" in str(error.value)
    assert f"{at}.0.down_proj.weight has shape (3, 3), expected (12, 8)" in str(error.value)


def test_a_mixture_of_no_experts_or_in_an_existing_place_is_not_made(tmp_path):
    source = ASSETS / "tiny-qwen3"
    for experts, chosen in ((0, 0), (1, 2), (4, 0)):
        with pytest.raises(ValueError, match=f"not {chosen} of {experts}"):
            upcycle(source, tmp_path / "new", experts, chosen)
    with pytest.raises(FileExistsError, match="exists already; remove it"):
        upcycle(source, tmp_path)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_experts": None}, "missing num_experts"),
        ({"num_experts_per_tok": None}, "missing num_experts_per_tok"),
        ({"moe_intermediate_size": None}, "missing moe_intermediate_size"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than the 4 experts"),
        ({"model_type": "qwen2_moe"}, "model_type is 'qwen2_moe'"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok must be 1 or more: 0"),
        ({"num_experts_per_tok": -1}, "num_experts_per_tok must be 1 or more: -1"),
        ({"num_experts": None, "num_local_experts": "4"}, "num_local_experts must be int, not '4'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step must be 1 or more: 0"),
        ({"mlp_only_layers": 3}, "mlp_only_layers must be list, not 3"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_name(change, named):
    with pytest.raises(ValueError, match=named):
        Qwen3Config.from_dict(config_json(tiny_moe_config()) | change)


def test_stacking_undoes_splitting_and_names_what_it_lacks():
    def single():
        return split_experts({"x.experts.up.weight": random_tensor(12, 2, 4), "y": torch.ones(2)})

    assert list(single()) == [f"x.experts.{e}.up.weight" for e in range(12)] + ["y"]
    tensors = dict(sorted(single().items()))  # as text, "10" comes before "2"
    stacked = stack_experts(tensors)
    assert not tensors and torch.equal(stacked["x.experts.up.weight"], random_tensor(12, 2, 4))
    with pytest.raises(ValueError, match="x.experts.1.up.weight is missing, and .* of expert 11"):
        stack_experts({n: t for n, t in single().items() if ".1." not in n})
    with pytest.raises(ValueError, match=r"x.experts.2.up.weight has shape \(1,\)"):
        stack_experts(single() | {"x.experts.2.up.weight": torch.ones(1)})


# --- adapters -------------------------------------------------------------------------------------


@few
@given(config=MIXTURES, lora=loras, seed=seeds)
def test_a_fresh_adapter_changes_not_a_bit_and_holds_what_the_formula_says(config, lora, seed):
    model, ids = tiny_model(config, seed), tiny_tokens(config, 2, 5, seed)
    base = model(ids)
    names = inject_lora(model, lora)
    assert torch.equal(model(ids), base)
    parameters = lora_parameters(model)
    assert len(parameters) == 2 * len(names)
    mixtures = len(mixture_layers(config))
    assert sum(".experts." in name for name in names) == 3 * mixtures
    assert not any(name.endswith(".gate") for name in names)
    sides = config.hidden_size + config.moe_intermediate_size
    expected = mixtures * config.num_experts * 3 * lora.rank * sides
    assert expected == sum(p.numel() for n, p in parameters.items() if ".experts." in n)
    for name, p in parameters.items():
        if ".experts." in name and "lora_A" in name:  # as on any matrix: uniform in +-1 / sqrt(in)
            assert p.shape[0] == config.num_experts
            bound = p.shape[-1] ** -0.5
            assert 0.5 * bound < p.abs().max() <= bound


@few
@given(config=MIXTURES, lora=loras, seed=seeds)
def test_the_update_merging_and_disabling_are_those_of_any_layer(config, lora, seed):
    """W0 + (alpha / r) B A of each expert, written into a plain model; merged, disabled, undone."""
    model, ids = adapted(config, lora, seed), tiny_tokens(config, 3, 6, seed)
    plain = tiny_model(config, seed)
    base, weights = plain(ids), plain.state_dict()
    for name, layer in lora_layers(model).items():
        A, B = layer.lora_A[TRAINABLE].double(), layer.lora_B[TRAINABLE].double()
        W0 = weights[f"{name}.weight"]
        update = torch.einsum("...or,...ri->...oi", B, A)
        W0.copy_(W0.double() + lora.alpha / lora.rank * update)
    active = model(ids)
    assert not torch.equal(active, base)
    close(active, plain(ids))
    before = {n: p.clone() for n, p in model.named_parameters()}
    for prepare in (lambda model: None, merge_lora, unmerge_lora):
        prepare(model)
        with adapter_disabled(model):
            assert torch.equal(model(ids), base)
        close(model(ids), active)
    assert torch.equal(model(ids), active)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@few
@given(config=MIXTURES, lora=loras, seed=seeds)
def test_gradients_reach_A_and_B_of_every_expert_with_a_token_and_nothing_else(config, lora, seed):
    model, ids = tiny_model(config, seed), tiny_tokens(config, 3, 6, seed)
    model.requires_grad_(True)
    inject_lora(model, lora)
    parameters = lora_parameters(model)
    assert {id(p) for p in model.parameters() if p.requires_grad} == set(
        map(id, parameters.values())
    )
    reached = {}
    for layer in mixture_layers(config):

        def record(module, arguments, _, layer=layer):
            reached[layer] = set(arguments[1].flatten().tolist())

        model.model.layers[layer].mlp.experts.register_forward_hook(record)
    optimizer = torch.optim.SGD(parameters.values(), lr=0.05)
    for step in range(2):
        optimizer.zero_grad()
        logprobs, _ = model.token_logprobs(ids, torch.ones(3, 5))
        logprobs.sum().backward()
        if step == 0:
            first = dict(reached)  # the update may send tokens to other experts
        for name, parameter in parameters.items():
            has_gradient = step == 1 or "lora_B" in name  # dL/dA = B^T (...), and B starts at zero
            if ".experts." not in name:
                assert parameter.grad.any() == has_gradient, name
                continue
            for e, gradient in enumerate(parameter.grad):
                layer = int(name.split(".")[2])
                here = e in reached[layer] and ("lora_B" in name or e in first[layer])
                assert gradient.any() == (has_gradient and here), f"{name} {e}"
        optimizer.step()
    assert all(p.requires_grad or p.grad is None for p in model.parameters())


@few
@given(
    config=MIXTURES,
    mixed=st.lists(loras, min_size=2, max_size=3),
    seed=seeds,
    by_index=st.booleans(),
)
def test_every_row_gets_the_experts_of_its_adapter_and_the_rest_the_base(
    config, mixed, seed, by_index
):
    model = adapted(config, mixed[0], seed)
    names = [TRAINABLE]
    for i, lora in enumerate(mixed[1:]):
        add_adapter(model, f"v{i}", lora, random_adapter(model, lora, seed + i))
        names.append(f"v{i}")
    ids = tiny_tokens(config, 2 * len(names) + 1, 4, seed)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    segments, expected = [], tiny_model(config, seed)(ids)
    for i, name in enumerate(names):
        rows = order[2 * i : 2 * i + 2] if by_index else slice(2 * i, 2 * i + 2)
        segments.append((name, rows))
        with use_adapters(model, [(name, None)]):
            expected[rows] = model(ids[rows]).detach()
    with use_adapters(model, segments):
        mixed_logits = model(ids)
    close(mixed_logits, expected)
    mixed_logits[segments[0][1]].square().sum().backward()  # a segment trains its own adapter
    assert all(p.grad is not None for p in lora_parameters(model).values())


def test_adapters_come_and_go_and_what_does_not_fit_is_refused():
    lora = LoRAConfig(rank=2, target_modules=("experts",))
    model, ids = tiny_model(tiny_moe_config()), tiny_tokens(tiny_moe_config(), 2, 4)
    base, good = model(ids), random_adapter(model, lora, seed=1)
    name = "model.layers.0.mlp.experts.up_proj"
    bad = [
        (good | {f"{name}.lora_A.weight": torch.zeros(3, 2, 12)}, r"must have shape \(4, 2, 12\)"),
        (good | {f"{name}.lora_B.weight": torch.zeros(4, 9, 2)}, r"must have shape \(4, 8, 2\)"),
        ({"model.layers.0.mlp.gate.lora_A.weight": torch.zeros(2, 12)}, "no projection"),
    ]
    for tensors, message in bad:
        with pytest.raises(ValueError, match=message):
            add_adapter(model, "v1", lora, tensors)
        assert not lora_layers(model)
    add_adapter(model, "v1", lora, good)
    assert {type(layer) for layer in lora_layers(model).values()} == {LoRAGrouped}
    with use_adapters(model, [("v1", None)]):
        assert not torch.equal(model(ids), base)
    remove_adapter(model, "v1")
    with adapter_disabled(model):
        assert torch.equal(model(ids), base)
    assert not lora_parameters(model)


def test_the_router_is_no_target_and_experts_have_no_dropout(recwarn):
    with pytest.raises(ValueError, match="gate cannot be a target: it is the router"):
        inject_lora(tiny_model(tiny_moe_config()), LoRAConfig(target_modules=("q_proj", "gate")))
    with pytest.raises(ValueError, match=r"dropout 0\.1 on experts is not implemented"):
        inject_lora(tiny_model(tiny_moe_config()), LoRAConfig(dropout=0.1))
    with pytest.raises(ValueError, match=r"its projections are \['experts', 'k_proj'"):
        inject_lora(tiny_model(tiny_moe_config()), LoRAConfig(target_modules=("up_proj",)))
    attention = ("q_proj", "k_proj", "v_proj", "o_proj")
    model = tiny_model(tiny_moe_config())
    inject_lora(model, LoRAConfig(rank=2, dropout=0.1, target_modules=attention))
    assert len(lora_layers(model)) == 2 * 4
    inject_lora(tiny_model(tiny_moe_config()), LoRAConfig(rank=2))  # the default needs no notice
    assert not recwarn


def test_a_list_of_projections_that_leaves_the_experts_out_says_so():
    """PEFT's own seven names, of which a mixture has four outside its experts."""
    model = tiny_model(tiny_moe_config())
    with pytest.warns(UserWarning, match=r"\['gate_proj', 'up_proj', 'down_proj'\].*'experts'"):
        inject_lora(model, LoRAConfig(rank=2, target_modules=PROJECTIONS))
    assert len(lora_layers(model)) == 2 * 4


def test_adapters_of_experts_are_fp32_masters_used_in_the_dtype_of_the_base():
    config = tiny_moe_config(hidden_size=16)  # 8 is a rank that grouped_mm takes in bf16, 2 is none
    for rank in (2, 8):
        model, ids = tiny_model(config).bfloat16(), tiny_tokens(config, 2, 5)
        inject_lora(model, LoRAConfig(rank=rank))
        randomise_adapter(model)
        active = model(ids)
        merge_lora(model)
        assert model(ids).dtype == active.dtype == torch.bfloat16
        close(model(ids), active, 0.1)
        unmerge_lora(model)
        model.token_logprobs(ids, torch.ones(2, 4))[0].sum().backward()
        assert all(p.grad.dtype == torch.float32 for p in lora_parameters(model).values())


# --- the directory --------------------------------------------------------------------------------


@few
@given(config=MIXTURES, lora=loras, seed=seeds)
def test_the_directory_has_a_tensor_an_expert_and_is_read_to_the_last_one(
    tmp_path_factory, config, lora, seed
):
    root, model = tmp_path_factory.mktemp("adapter"), adapted(config, lora, seed)
    first = save_adapter(model, lora, root / "first")
    parameters = lora_parameters(model)
    tensors = load_file(first / "adapter_model.safetensors")
    stacked = {n: p for n, p in parameters.items() if ".experts." in n}
    assert len(tensors) == len(parameters) + (config.num_experts - 1) * len(stacked)
    for name, parameter in stacked.items():
        before, after = name.split(".experts.")
        for e in range(config.num_experts):
            key = f"base_model.model.{before}.experts.{e}.{after}"
            assert torch.equal(tensors[key], parameter[e])
    settings = json.loads((first / "adapter_config.json").read_text())
    assert {"gate_proj", "up_proj", "down_proj"} <= set(settings["target_modules"])
    assert set(settings["target_modules"]) <= set(PROJECTIONS)
    read, arrived = read_adapter(first)
    assert set(read.target_modules) <= set(lora.target_modules) and "experts" in read.target_modules
    assert arrived.keys() == parameters.keys()
    other = tiny_model(config, seed)
    inject_lora(other, read)
    load_adapter(other, first)
    second = save_adapter(other, read, root / "second")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    sampler, ids = tiny_model(config, seed), tiny_tokens(config, 2, 6, seed)
    add_adapter(sampler, "v0", read, arrived)
    with use_adapters(sampler, [("v0", None)]):
        assert torch.equal(sampler(ids), model(ids))


def test_an_expert_that_the_file_lacks_is_named(tmp_path):
    lora = LoRAConfig(rank=2, target_modules=("experts",))
    directory = save_adapter(adapted(tiny_moe_config(), lora), lora, tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    whole = load_file(file)
    save_file({n: t for n, t in whole.items() if ".experts.1.up_proj" not in n}, file)
    with pytest.raises(ValueError, match=r"experts\.1\.up_proj\.lora_[AB]\.weight is missing"):
        read_adapter(directory)
    save_file({n: t for n, t in whole.items() if ".experts.3." not in n}, file)
    model = tiny_model(tiny_moe_config())
    with pytest.raises(ValueError, match=r"must have shape \(4, 2, 8\), found \(3, 2, 8\)"):
        add_adapter(model, "v0", *read_adapter(directory))
    inject_lora(model, lora)
    with pytest.raises(ValueError, match=r"has shape \(3, 2, 12\), in the model \(4, 2, 12\)"):
        load_adapter(model, directory)


@pytest.mark.vllm
def test_vllm_loads_every_tensor_and_packs_what_we_hold(tmp_path):
    """vLLM's own reader and packing of a mixture's adapter, without an engine (0.32)."""
    from vllm.config.lora import LoRAConfig as VLLMConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import PackedLoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.models.qwen3_moe import Qwen3MoeForCausalLM

    config, lora = tiny_moe_config(), LoRAConfig(rank=4, alpha=8.0)
    model = adapted(config, lora)
    directory = save_adapter(model, lora, tmp_path / "adapter")
    assert not Qwen3MoeForCausalLM.is_3d_moe_weight  # it expects a tensor an expert
    mapping = RoutedExperts.build_expert_params_mapping("gate_proj", "down_proj", "up_proj", 4)
    experts = [name.rstrip(".") for _, name, _, _ in mapping]
    helper = PEFTHelper.from_local_dir(str(directory), config.max_position_embeddings)
    helper.validate_legal(VLLMConfig(max_lora_rank=8))
    loaded = LoRAModel.from_local_checkpoint(
        str(directory),
        {"q_proj", "k_proj", "v_proj", "o_proj", *experts},
        peft_helper=helper,
        lora_model_id=1,
        device="cpu",
    )
    parameters = lora_parameters(model)
    modules = {n.rpartition(".lora_")[0] for n in split_experts(parameters)}
    assert set(loaded.loras) == modules and len(modules) == 2 * (4 + 3 * 4)
    for layer in range(2):
        at = f"model.layers.{layer}.mlp"
        names = [f"{at}.{name}" for name in experts]
        packed = PackedLoRALayerWeights.pack_moe([loaded.loras[n] for n in names], f"{at}.experts")
        for i, projection in enumerate(("gate_proj", "down_proj", "up_proj")):
            assert torch.equal(
                packed.lora_a[i], parameters[f"{at}.experts.{projection}.lora_A.weight"]
            )
            assert torch.equal(
                packed.lora_b[i], parameters[f"{at}.experts.{projection}.lora_B.weight"]
            )
            assert packed.scaling[i] == lora.scaling


# --- sampling, counting, the tiny mixture ---------------------------------------------------------


@few
@given(config=MIXTURES, mixed=st.tuples(loras, loras), seed=seeds)
def test_sampler_logprobs_are_the_trainers(tmp_path_factory, config, mixed, seed):
    """Two published versions and the base in one batch of the engine, streams of two lengths."""
    root, models = tmp_path_factory.mktemp("published"), {None: tiny_model(config, seed)}
    engine = TorchEngine(tiny_model(config, seed), slots=4, max_length=20)
    for name, lora in zip("ab", mixed, strict=True):
        models[name] = adapted(config, lora, seed)
        randomise_adapter(models[name], seed + ord(name))
        engine.add_adapter(name, save_adapter(models[name], lora, root / name))
    requests = [
        Request(tiny_tokens(config, 1, length, seed)[0].tolist(), 5, 1.0, name, seed=seed)
        for name, length in ((None, 3), ("a", 7), ("b", 3), ("a", 2))
    ]

    async def everyone():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    for request, completion in zip(requests, asyncio.run(everyone()), strict=True):
        stream = torch.tensor([request.prompt_ids + completion.token_ids])
        with torch.no_grad():
            mask = torch.ones(1, stream.shape[1] - 1)
            logprobs, _ = models[request.adapter].token_logprobs(stream, mask)
        close(torch.tensor(completion.logprobs), logprobs[0, len(request.prompt_ids) - 1 :])


def test_the_table_counts_every_expert(capsys):
    main("Qwen/Qwen3-30B-A3B", rank=8)
    output = capsys.readouterr().out
    lines = {line.split()[0]: line.split()[1:] for line in output.splitlines() if line}
    count = ["1,572,864", "22,528", "48", "x", "128"]
    assert lines["experts.gate_proj"] == lines["experts.up_proj"] == ["768", "x", "2048", *count]
    assert lines["experts.down_proj"] == ["2048", "x", "768", *count]
    attention, experts = 2 * (49_152 + 20_480), 3 * 128 * 22_528
    assert lines["all"][2] == f"{48 * (attention + experts):,}"
    assert lines["the"][1] == "30,532,122,624"  # "30.5B in total", says the model's card


@pytest.mark.parametrize("step, row", [(1, True), (2, False)])
def test_one_layer_is_counted_only_where_all_are_alike(step, row):
    model, lora = tiny_model(tiny_moe_config(decoder_sparse_step=step)), LoRAConfig(rank=2)
    assert ("one layer" in size_table(model, lora)) == row


@pytest.fixture(scope="module")
def tiny_mixture(tmp_path_factory):
    base, output = ROOT / "assets" / "tiny-qwen3", tmp_path_factory.mktemp("moe") / "model"
    return upcycle(base, output)


def test_the_tiny_mixture_starts_with_the_skill_of_its_base(tiny_mixture):
    base, mixture = (
        Qwen3.from_pretrained(p) for p in (ROOT / "assets" / "tiny-qwen3", tiny_mixture)
    )
    assert mixture.config.num_experts == 4
    ids = tiny_tokens(base.config, 2, 50)
    with torch.no_grad():
        close(mixture(ids), base(ids), 1e-4)


@pytest.mark.slow
def test_a_mixture_learns_the_default_task(tmp_path, tiny_mixture):
    """The default job on a model with experts, shortened: adapters on every expert, published a
    tensor an expert, sampled by the embedded engine."""
    command = [sys.executable, ROOT / "train.py", "--model", tiny_mixture, "--output", tmp_path]
    command += ["--steps", "16", "--group-size", "8", "--eval-size", "128"]
    subprocess.run([str(word) for word in command], check=True, timeout=900)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["eval_before"] <= 0.5 and summary["eval_after"] >= 0.75
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["mismatch_max"] < 1e-4
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    moved = [t for n, t in names.items() if ".experts." in n and "lora_B" in n]
    assert len(moved) == 4 * 4 * 3 and all(tensor.any() for tensor in moved)
