"""lora.py: what an adapter does to a model, what it must not do, and what it counts."""

import math
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    PROJECTIONS,
    close,
    lora_configs,
    random_adapter,
    randomise_adapter,
    seeds,
    tiny_config,
    tiny_configs,
    tiny_model,
    tiny_moe_configs,
    tiny_tokens,
)

from lora import (
    TARGETS,
    TRAINABLE,
    LoRAConfig,
    adapter_disabled,
    add_adapter,
    inject_lora,
    lora_layers,
    lora_parameters,
    merge_lora,
    remove_adapter,
    unmerge_lora,
    use_adapters,
)

SCRIPT = Path(__file__).parents[1] / "lora.py"
# A rank larger than a side of these small layers is said once; here it is meant.
pytestmark = pytest.mark.filterwarnings("ignore:rank .* is larger")


def adapted(config, lora, seed=0):
    """A model with a nonzero trainable adapter, and token ids for it."""
    model = tiny_model(config, seed)
    inject_lora(model, lora)
    randomise_adapter(model, seed)
    return model, tiny_tokens(config, 3, 6, seed)


def base_tensors(model):
    return {n: p.clone() for n, p in model.named_parameters() if ".lora_" not in n}


def assert_bits(before, after):
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name


def train(model, ids, steps=3):
    """A few steps on the log-probability of `ids`; returns the optimizer."""
    optimizer = torch.optim.AdamW(lora_parameters(model).values(), lr=0.05)
    for _ in range(steps):
        optimizer.zero_grad()
        logprobs, _ = model.token_logprobs(ids, torch.ones(ids.shape[0], ids.shape[1] - 1))
        (-logprobs.mean()).backward()
        optimizer.step()
    return optimizer


# --- what it computes -----------------------------------------------------------------------------


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_a_fresh_adapter_changes_not_a_bit(config, lora, seed):
    model, ids = tiny_model(config, seed), tiny_tokens(config, 2, 5, seed)
    base = model(ids)
    names = inject_lora(model, lora)
    assert torch.equal(model(ids), base)
    parameters = lora_parameters(model)
    assert len(parameters) == 2 * len(names) > 0
    for name, parameter in parameters.items():
        assert parameter.any() == ("lora_A" in name), name


def test_A_starts_kaiming_uniform_with_a_of_sqrt_5():
    """Which is uniform in +-1 / sqrt(in)."""
    model = torch.nn.Sequential()
    model.q_proj = torch.nn.Linear(100, 80)
    inject_lora(model, LoRAConfig(rank=64, target_modules=("q_proj",)))
    A = lora_parameters(model)["q_proj.lora_A.weight"]
    assert 0.095 < A.max() <= 0.1 and -0.1 <= A.min() < -0.095
    close(A.std(), torch.tensor(0.1 / math.sqrt(3)), 0.002)


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_the_update_is_alpha_over_r_times_B_A(config, lora, seed):
    """The adapted model is the plain model with W0 + (alpha / r) B A written into its weights."""
    model, ids = adapted(config, lora, seed)
    plain = tiny_model(config, seed)
    weights = plain.state_dict()
    for name, layer in lora_layers(model).items():
        A, B = layer.lora_A[TRAINABLE].double(), layer.lora_B[TRAINABLE].double()
        W0 = weights[f"{name}.weight"]
        W0.copy_(W0.double() + lora.alpha / lora.rank * (B @ A))
    assert len(lora_layers(model)) == config.num_hidden_layers * len(lora.target_modules)
    close(model(ids), plain(ids))
    for name, layer in lora_layers(model).items():
        x = torch.randn(4, layer.base.in_features)
        close(layer(x), plain.get_submodule(name)(x))


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_a_disabled_adapter_is_the_base_merged_or_not(config, lora, seed):
    model, ids = adapted(config, lora, seed)
    base = tiny_model(config, seed)(ids)
    active = model(ids)
    assert not torch.equal(active, base)
    for prepare in (lambda model: None, merge_lora, unmerge_lora):
        prepare(model)
        with adapter_disabled(model):
            assert torch.equal(model(ids), base)
        close(model(ids), active)


def test_the_adapter_comes_back_after_an_exception_inside():
    model, ids = adapted(tiny_config(), LoRAConfig(rank=2))
    active = model(ids)
    with pytest.raises(RuntimeError), adapter_disabled(model):
        raise RuntimeError
    assert torch.equal(model(ids), active)


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_merging_changes_no_logit_and_unmerging_restores_every_bit(config, lora, seed):
    model, ids = adapted(config, lora, seed)
    base, active = base_tensors(model), model(ids)
    merge_lora(model)
    merged = model(ids)
    close(merged, active)
    merge_lora(model)
    assert torch.equal(model(ids), merged)
    unmerge_lora(model)
    unmerge_lora(model)
    assert torch.equal(model(ids), active)
    assert_bits(base, base_tensors(model))


def test_merging_is_no_side_effect_of_train_and_eval():
    model, ids = adapted(tiny_config(), LoRAConfig(rank=2))
    active = model(ids)
    model.eval()
    assert all(layer.merged is None for layer in lora_layers(model).values())
    merge_lora(model)
    model.train()
    assert all(layer.merged is not None for layer in lora_layers(model).values())
    close(model(ids), active)


def test_a_second_merge_takes_the_trained_adapter():
    model, ids = adapted(tiny_config(), LoRAConfig(rank=2))
    merge_lora(model)
    randomise_adapter(model, seed=1)
    stale = model(ids)
    merge_lora(model)
    merged = model(ids)
    assert not torch.equal(merged, stale)
    unmerge_lora(model)
    close(merged, model(ids))


def test_dropout_acts_on_the_adapters_input_alone_and_not_in_eval():
    model, _ = adapted(tiny_config(), LoRAConfig(rank=2, alpha=3.0, dropout=0.4))
    layer = lora_layers(model)["model.layers.0.mlp.up_proj"]
    x = torch.randn(50, 12)
    A, B, base = layer.lora_A[TRAINABLE], layer.lora_B[TRAINABLE], layer.base(x)
    torch.manual_seed(7)
    dropped = F.dropout(x, 0.4)
    torch.manual_seed(7)
    close(layer.train()(x), base + 1.5 * dropped @ A.T @ B.T)
    close(layer.eval()(x), base + 1.5 * x @ A.T @ B.T)
    with adapter_disabled(model):
        assert torch.equal(layer.train()(x), base)


def test_adapters_are_fp32_masters_used_in_the_dtype_of_the_base():
    model, ids = tiny_model().bfloat16(), tiny_tokens(tiny_config(), 2, 5)
    inject_lora(model, LoRAConfig(rank=2))
    randomise_adapter(model)
    assert all(p.dtype == torch.float32 for p in lora_parameters(model).values())
    assert model(ids).dtype == torch.bfloat16
    merge_lora(model)
    assert model(ids).dtype == torch.bfloat16
    unmerge_lora(model)
    train(model, ids, steps=1)
    assert all(p.grad.dtype == torch.float32 for p in lora_parameters(model).values())


# --- what is trained ------------------------------------------------------------------------------


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_only_A_and_B_are_trained_and_all_of_them_by_the_second_step(config, lora, seed):
    model, ids = tiny_model(config, seed), tiny_tokens(config, 3, 6, seed)
    model.requires_grad_(True)  # as a model comes from disk
    base = base_tensors(model)
    inject_lora(model, lora)
    parameters = lora_parameters(model)
    trained = {id(p) for p in model.parameters() if p.requires_grad}
    assert trained == {id(p) for p in parameters.values()}
    initial = {name: p.detach().clone() for name, p in parameters.items()}

    optimizer = train(model, ids, steps=1)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == trained
    for name, parameter in parameters.items():  # dL/dA = B^T (...) and B is zero
        assert parameter.grad.any() == ("lora_B" in name), name
    train(model, ids, steps=2)
    for name, parameter in parameters.items():
        assert parameter.grad.any(), name
        assert not torch.equal(parameter, initial[name]), name
    merge_lora(model)
    unmerge_lora(model)
    for parameter in model.parameters():
        assert parameter.requires_grad or parameter.grad is None
    unwrapped = {n.replace(".base.", "."): t for n, t in base_tensors(model).items()}
    assert_bits(base, unwrapped)


@settings(max_examples=10)
@given(config=st.one_of(tiny_configs(), tiny_moe_configs()), seed=seeds, data=st.data())
def test_gradient_checkpointing_computes_layers_again_and_changes_no_gradient(config, seed, data):
    model = tiny_model(config, seed)
    dropout = 0.0 if config.num_experts else data.draw(st.sampled_from([0.0, 0.5]))
    inject_lora(model, LoRAConfig(2, 4.0, dropout))
    randomise_adapter(model, seed)
    ids = tiny_tokens(config, 3, 7, seed)
    computed = []
    model.model.layers[0].register_forward_pre_hook(lambda *_: computed.append(1))

    def gradients(on: bool) -> list:
        model.model.gradient_checkpointing = on
        model.zero_grad(set_to_none=True)
        computed.clear()
        torch.manual_seed(seed)  # of the dropout
        logprobs, _ = model.token_logprobs(ids, torch.ones(3, 6))
        with adapter_disabled(model), torch.no_grad():
            model.token_logprobs(ids, torch.ones(3, 6))  # between forward and backward, as the KL
        logprobs.square().sum().backward()
        return [parameter.grad for parameter in lora_parameters(model).values()]

    off, before = gradients(False), len(computed)
    on = gradients(True)
    assert (before, len(computed)) == (2, 3)
    for one, other in zip(off, on, strict=True):
        assert one is not None and torch.equal(one, other)


# --- many adapters in one batch -------------------------------------------------------------------


@given(
    config=tiny_configs(),
    loras=st.lists(lora_configs(), min_size=2, max_size=3),
    seed=seeds,
    by_index=st.booleans(),
)
def test_every_row_gets_the_adapter_of_its_segment_and_the_rest_the_base(
    config, loras, seed, by_index
):
    """Different ranks, scalings and targets in one batch; each row equals that row alone."""
    model, base = tiny_model(config, seed), tiny_model(config, seed)
    inject_lora(model, loras[0])
    randomise_adapter(model, seed)
    names = [TRAINABLE]
    for i, lora in enumerate(loras[1:]):
        add_adapter(model, f"v{i}", lora, random_adapter(model, lora, seed + i))
        names.append(f"v{i}")
    ids = tiny_tokens(config, 2 * len(names) + 1, 5, seed)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    segments, expected = [], torch.empty(len(ids), 5, config.vocab_size)
    for i, name in enumerate(names):
        rows = order[2 * i : 2 * i + 2] if by_index else slice(2 * i, 2 * i + 2)
        segments.append((name, rows))
        with use_adapters(model, [(name, None)]):
            expected[rows] = model(ids[rows])
    rest = order[-1:] if by_index else slice(len(ids) - 1, None)
    expected[rest] = base(ids[rest])
    with use_adapters(model, segments):
        mixed = model(ids)
        with pytest.raises(ValueError, match="score the streams of each adapter by themselves"):
            model.token_logprobs(ids, torch.ones(len(ids), 4))
    close(mixed, expected)
    mixed[segments[0][1]].square().sum().backward()  # a segment trains its own adapter
    assert all(p.grad is not None for p in lora_parameters(model).values())


def test_adapters_share_the_base_and_leave_when_asked():
    model, ids = adapted(tiny_config(), LoRAConfig(rank=2))
    base, active = base_tensors(model), model(ids)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    lora = LoRAConfig(rank=3, alpha=6.0, target_modules=("q_proj",))
    add_adapter(model, "v1", lora, random_adapter(model, lora, seed=1))
    assert torch.equal(model(ids), active)  # beside, not on top
    assert not any(p.requires_grad for n, p in model.named_parameters() if n.endswith(".v1"))
    with use_adapters(model, [("v1", None)]):
        assert not torch.equal(model(ids), active)
    assert {n: p.data_ptr() for n, p in model.named_parameters() if n in places} == places
    remove_adapter(model, "v1")
    assert_bits(base, base_tensors(model))
    assert not any(n.endswith(".v1") for n, _ in model.named_parameters())
    with pytest.raises(KeyError, match="v1"):
        remove_adapter(model, "v1")


def test_a_name_that_the_model_does_not_hold_is_an_error_and_never_the_base():
    model, ids = tiny_model(), tiny_tokens(tiny_config(), 1, 4)
    lora = LoRAConfig(rank=2, target_modules=("q_proj",))

    def sample():
        with use_adapters(model, [("v1", None)]):
            return model(ids)

    with adapter_disabled(model):  # a plain model is its own base
        base = model(ids)
    with pytest.raises(ValueError, match="no adapter named 'v1'"):
        sample()
    add_adapter(model, "v1", lora, random_adapter(model, lora, seed=1))
    assert not torch.equal(sample(), base)
    remove_adapter(model, "v1")
    with pytest.raises(ValueError, match="no adapter named 'v1'"):
        sample()


def test_add_adapter_refuses_what_does_not_fit():
    lora = LoRAConfig(rank=2, target_modules=("q_proj",))
    model = tiny_model()
    good = random_adapter(model, lora, seed=1)
    name = "model.layers.0.self_attn.q_proj"
    bad = [
        ({k.replace("layers.0", "layers.7"): t for k, t in good.items()}, "no projection"),
        ({k.replace("model.", "", 1): t for k, t in good.items()}, "no projection"),
        (good | {f"{name}.lora_A.weight": torch.zeros(2, 11)}, r"must have shape \(2, 12\)"),
        (good | {f"{name}.lora_B.weight": torch.zeros(24, 3)}, r"must have shape \(24, 2\)"),
        ({k: t for k, t in good.items() if k != f"{name}.lora_B.weight"}, "found nothing"),
        ({"lm_head.lora_A.weight": torch.zeros(2, 12)}, "no projection 'lm_head'"),
    ]
    for tensors, message in bad:
        with pytest.raises(ValueError, match=message):
            add_adapter(model, "v1", lora, tensors)
        assert not lora_layers(model)  # nothing was changed
    add_adapter(model, "v1", lora, good)
    with pytest.raises(ValueError, match="there already"):
        add_adapter(model, "v1", lora, good)
    of_a_parameter_dict = ("train", "keys", "update", "training", "_keys")
    for reserved in (TRAINABLE, "a.b", "", *of_a_parameter_dict):
        with pytest.raises(ValueError, match="cannot name"):
            add_adapter(model, reserved, lora, good)


# --- targets and settings -------------------------------------------------------------------------


def notices(action) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    return [str(warning.message) for warning in caught]


def test_unknown_targets_are_said_once_and_the_default_experts_not_at_all():
    lora = LoRAConfig(rank=2, target_modules=("q_proj", "fc1", "experts", "fc2"))
    model = tiny_model()
    said = notices(lambda: inject_lora(model, lora))
    ignored = "target_modules ['fc1', 'experts', 'fc2'] are not in this model and ignored"
    assert len(said) == 1 and said[0].startswith(f"{ignored}; it has ['down_proj', ")
    assert {name.rpartition(".")[2] for name in lora_layers(model)} == {"q_proj"}
    model = tiny_model()
    assert notices(lambda: inject_lora(model, LoRAConfig(rank=2))) == []
    assert len(lora_layers(model)) == 2 * 7


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("fc1",), r"\['fc1'\] match no layer .* 'q_proj'"),
        (("experts",), "match no layer"),
        (("q_proj", "embed_tokens"), "embed_tokens cannot be a target"),
        (("lm_head",), "lm_head cannot be a target"),
        ("q_proj", "must be a list"),
    ],
)
def test_impossible_targets_are_refused(targets, message):
    model = tiny_model()
    with pytest.raises(ValueError, match=message):
        inject_lora(model, LoRAConfig(rank=2, target_modules=targets))
    assert not lora_layers(model)


def test_a_model_is_adapted_once():
    model, _ = adapted(tiny_config(), LoRAConfig(rank=2, target_modules=("q_proj",)))
    with pytest.raises(ValueError, match="trainable adapter already"):
        inject_lora(model, LoRAConfig(rank=2, target_modules=("k_proj",)))


def test_a_rank_beyond_the_smaller_side_is_allowed_and_said_once():
    model, ids = tiny_model(), tiny_tokens(tiny_config(), 2, 5)
    said = notices(lambda: inject_lora(model, LoRAConfig(rank=13)))
    assert len(said) == 1 and said[0].startswith("rank 13 is larger than the smaller side of 14")
    randomise_adapter(model)
    active = model(ids)
    merge_lora(model)
    close(model(ids), active)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "rank must be a whole number of at least 1, not 0"),
        ({"rank": -8}, "not -8"),
        ({"rank": 2.0}, "not 2.0"),
        ({"alpha": 0.0}, "alpha must be a positive number"),
        ({"alpha": float("nan")}, "alpha must be a positive number"),
        ({"dropout": 1.0}, "dropout must be in"),
        ({"dropout": -0.1}, "dropout must be in"),
        ({"target_modules": ()}, "target_modules is empty"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        LoRAConfig(**settings)


# --- counting -------------------------------------------------------------------------------------


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_the_number_of_parameters_is_the_sum_of_r_times_d_plus_k(config, lora, seed):
    model = tiny_model(config, seed)
    inject_lora(model, lora)
    D, M, C = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * C, config.num_key_value_heads * C
    sides = {"q_proj": D + q, "k_proj": D + kv, "v_proj": D + kv, "o_proj": q + D}
    sides |= {"gate_proj": D + M, "up_proj": D + M, "down_proj": M + D}
    assert sides.keys() == set(PROJECTIONS) == set(TARGETS) - {"experts"}
    expected = config.num_hidden_layers * sum(lora.rank * sides[t] for t in lora.target_modules)
    assert sum(p.numel() for p in lora_parameters(model).values()) == expected


def test_the_worked_example_is_the_table_of_the_command_line():
    command = [sys.executable, SCRIPT, "Qwen/Qwen3-4B-Instruct-2507", "--rank", "8"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    lines = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line}
    square = ["10,485,760", "53,248", "36"]
    assert lines["q_proj"] == ["4096", "x", "2560", *square]
    assert lines["o_proj"] == ["2560", "x", "4096", *square]
    assert lines["k_proj"] == ["1024", "x", "2560", "2,621,440", "28,672", "36"]
    assert lines["v_proj"] == lines["k_proj"]
    wide = ["24,903,680", "98,304", "36"]
    assert lines["gate_proj"] == lines["up_proj"] == ["9728", "x", "2560", *wide]
    assert lines["down_proj"] == ["2560", "x", "9728", *wide]
    assert lines["one"] == ["layer", "100,925,440", "458,752"]
    assert lines["all"] == ["layers", "3,633,315,840", "16,515,072"]


def test_the_command_line_says_in_one_line_what_is_wrong(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lora.py", "no/such/model"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert stop.value.code.startswith("lora.py: no/such/model: no such directory")
