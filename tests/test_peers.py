"""The same numbers as transformers and PEFT: models, adapter directories both ways, merging.

Run in an environment that has both: .venv-peers/bin/python -m pytest -m peers
"""

import contextlib
import dataclasses
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    PROJECTIONS,
    close,
    config_json,
    lora_configs,
    randomise_adapter,
    save_checkpoint,
    seeds,
    tiny_config,
    tiny_configs,
    tiny_model,
    tiny_moe_config,
    tiny_moe_configs,
    tiny_tokens,
)

from broadcast import load_adapter, read_adapter, save_adapter
from config import ASSETS
from full import save_model
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, merge_lora, use_adapters
from model import KVCache, Qwen3, rotary_angles

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]

with contextlib.suppress(ImportError):  # the default tier collects this file without them
    import peft
    import transformers


def transformers_model(config, directory, seed=0, version=5):
    """Our random weights, written as a checkpoint, as transformers reads it."""
    save_checkpoint(directory, config_json(config, version), tiny_model(config, seed).state_dict())
    # Their grouped experts stop at sizes that torch's grouped_mm does not take; "eager" loops.
    options = {"experts_implementation": "eager"} if config.num_experts else {}
    return transformers.AutoModelForCausalLM.from_pretrained(directory, **options).eval()


@torch.no_grad()
def logits_of(model, ids):
    return model(ids).logits


# --- the model ------------------------------------------------------------------------------------


@given(config=tiny_configs(), T=st.integers(1, 40), seed=seeds, version=st.sampled_from([4, 5]))
def test_logits_equal_transformers(tmp_path_factory, config, T, seed, version):
    theirs = transformers_model(config, tmp_path_factory.mktemp("model"), seed, version)
    ids = tiny_tokens(config, 2, T, seed)
    close(tiny_model(config, seed)(ids), logits_of(theirs, ids), 1e-4)


@settings(max_examples=15)
@given(config=tiny_moe_configs(), T=st.integers(1, 12), seed=seeds, version=st.sampled_from([4, 5]))
def test_logits_of_a_mixture_equal_transformers(tmp_path_factory, config, T, seed, version):
    """With one token, most experts get none; with and without renormalised weights."""
    theirs = transformers_model(config, tmp_path_factory.mktemp("model"), seed, version)
    assert type(theirs).__name__ == "Qwen3MoeForCausalLM"
    ids = tiny_tokens(config, 2, T, seed)
    close(tiny_model(config, seed)(ids), logits_of(theirs, ids), 1e-4)


def test_a_mixture_that_transformers_saved_loads(tmp_path):
    config = tiny_moe_config(num_hidden_layers=3, mlp_only_layers=(1,))
    torch.manual_seed(0)
    their_config = transformers.Qwen3MoeConfig.from_dict(config_json(config))
    theirs = transformers.Qwen3MoeForCausalLM(their_config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():  # large enough to show in the logits
            parameter.mul_(10) if parameter.dim() > 1 else None
    theirs.save_pretrained(tmp_path)
    model, ids = Qwen3.from_pretrained(tmp_path), tiny_tokens(config, 2, 9)
    assert model.config.mlp_only_layers == (1,) and model.config.num_experts == 4
    expected = logits_of(theirs, ids)
    close(model(ids), expected, 1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0, 5_000_000.0])
def test_logits_equal_transformers_at_8192_positions(tmp_path, theta):
    """The full pass, and a decode step after 8,191 cached tokens."""
    config = tiny_config(head_dim=16, rope_theta=theta, max_position_embeddings=8192)
    model, ids = tiny_model(config), tiny_tokens(config, 1, 8192)
    expected = logits_of(transformers_model(config, tmp_path), ids)
    with torch.no_grad():
        close(model(ids), expected, 1e-4)
    cache = KVCache(config, slots=1, capacity=8192, dtype=torch.float32)
    model.extend(ids[:, :4000], cache, slice(0, 1), torch.tensor([0]))
    model.extend(ids[:, 4000:8191], cache, slice(0, 1), torch.tensor([4000]))
    last = model.extend(ids[:, 8191:], cache, slice(0, 1), torch.tensor([8191]))
    close(last, expected[:, -1], 1e-4)


@given(config=tiny_configs(), head_dim=st.sampled_from([6, 16, 64, 128]))
def test_rotary_angles_are_those_of_transformers_bit_for_bit(config, head_dim):
    """A rounding of the frequencies is multiplied by the position: at 8,192 it would show."""
    config = dataclasses.replace(config, head_dim=head_dim)
    their_config = transformers.Qwen3Config.from_dict(config_json(config))
    rotary = transformers.models.qwen3.modeling_qwen3.Qwen3RotaryEmbedding(their_config)
    positions = torch.arange(8192)
    their_cos, their_sin = (angles[0] for angles in rotary(torch.zeros(1), positions[None]))
    cos, sin = (x.squeeze(-2) for x in rotary_angles(positions, config, torch.float32))
    assert torch.equal(cos, their_cos)
    half = head_dim // 2  # where ours are negative, since rotate negates nothing
    assert torch.equal(sin[:, half:], their_sin[:, half:])
    assert torch.equal(-sin[:, :half], their_sin[:, :half])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_size", ["1GB", "4KB"])
def test_a_model_that_transformers_saved_loads(tmp_path, tied, max_shard_size):
    raw = config_json(tiny_config(tie_word_embeddings=tied))
    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config.from_dict(raw)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "4KB")
    model, ids = Qwen3.from_pretrained(tmp_path), tiny_tokens(tiny_config(), 2, 9)
    close(model(ids), logits_of(theirs, ids), 1e-4)


@given(config=tiny_configs(), seed=seeds, version=st.sampled_from([4, 5]))
def test_a_model_that_full_fine_tuning_saved_loads_in_transformers(
    tmp_path_factory, config, seed, version
):
    """Every bit of every tensor, the dtype of the weights and not of the source, the tokenizer."""
    root, ours = tmp_path_factory.mktemp("full"), tiny_model(config, seed)
    half = {name: tensor.bfloat16() for name, tensor in tiny_model(config).state_dict().items()}
    raw = config_json(config, version) | {"dtype" if version == 5 else "torch_dtype": "bfloat16"}
    save_checkpoint(root / "source", raw, half)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "tiny-qwen3" / name, root / "source")
    save_model(ours, root / "model", str(root / "source"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "model").eval()
    assert theirs.dtype == torch.float32
    arrived = theirs.state_dict()
    assert all(torch.equal(arrived[name], t) for name, t in ours.state_dict().items())
    assert arrived.keys() - ours.state_dict().keys() <= {"lm_head.weight"}  # tied: the embedding
    ids = tiny_tokens(config, 2, 9, seed)
    close(ours(ids), logits_of(theirs, ids), 1e-4)
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(d) for d in (root / "model", root / "source")
    ]
    messages = [{"role": "user", "content": "Who founded Norda?"}]
    rendered = [t.apply_chat_template(messages, add_generation_prompt=True) for t in tokenizers]
    assert rendered[0] == rendered[1]


# --- the adapter ----------------------------------------------------------------------------------

targets = st.sets(st.sampled_from(PROJECTIONS), min_size=1).map(lambda s: tuple(sorted(s)))


@pytest.mark.parametrize("rank", [1, 3, 4, 8, 12])
@pytest.mark.parametrize("alpha", ["1", "r", "2r", "32"])
@settings(max_examples=3)
@given(config=tiny_configs(), target_modules=targets, seed=seeds)
def test_adapter_directories_go_both_ways(
    tmp_path_factory, rank, alpha, config, target_modules, seed
):
    alpha = {"1": 1.0, "r": float(rank), "2r": 2.0 * rank, "32": 32.0}[alpha]
    lora, root = LoRAConfig(rank, alpha, 0.0, target_modules), tmp_path_factory.mktemp("peers")
    ours, ids = tiny_model(config, seed), tiny_tokens(config, 2, 7, seed)
    base = ours(ids)
    inject_lora(ours, lora)
    randomise_adapter(ours, seed)
    active = ours(ids)
    assert (active - base).abs().max() > 1e-3

    # ours -> theirs: every tensor arrives, and none besides
    directory = save_adapter(ours, lora, root / "ours")
    theirs = peft.PeftModel.from_pretrained(transformers_model(config, root / "a", seed), directory)
    arrived = peft.get_peft_model_state_dict(theirs)
    expected = {f"base_model.model.{n}": p for n, p in lora_parameters(ours).items()}
    assert arrived.keys() == expected.keys()
    assert all(torch.equal(arrived[name], expected[name]) for name in expected)
    close(logits_of(theirs, ids), active)
    merge_lora(ours)
    close(logits_of(theirs.merge_and_unload(), ids), ours(ids))

    # theirs -> ours, as a trainable adapter and as a sampler's
    peft_config = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        task_type="CAUSAL_LM",
        init_lora_weights=False,  # random B
    )
    torch.manual_seed(seed)
    theirs = peft.get_peft_model(transformers_model(config, root / "b", seed), peft_config).eval()
    theirs.save_pretrained(root / "theirs")
    active = logits_of(theirs, ids)
    rounding = 1e-5 * max(1.0, active.abs().max().item())  # PEFT's random B makes large logits
    read, tensors = read_adapter(root / "theirs")
    assert read == lora
    trainer, sampler = tiny_model(config, seed), tiny_model(config, seed)
    inject_lora(trainer, read)
    load_adapter(trainer, root / "theirs")
    close(trainer(ids), active, rounding)
    add_adapter(sampler, "v0", read, tensors)
    with use_adapters(sampler, [("v0", None)]):
        close(sampler(ids), active, rounding)
    merge_lora(trainer)
    close(trainer(ids), logits_of(theirs.merge_and_unload(), ids))


@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_our_directory_has_pefts_keys_and_settings(tmp_path_factory, config, lora, seed):
    root, ours = tmp_path_factory.mktemp("keys"), tiny_model(config, seed)
    inject_lora(ours, lora)
    directory = save_adapter(ours, lora, root / "ours", base_model=str(root / "base"))
    written = peft.LoraConfig.from_pretrained(directory)
    assert (written.r, written.lora_alpha) == (lora.rank, lora.alpha)
    assert written.target_modules == set(lora.target_modules)
    fresh = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.target_modules),
        task_type="CAUSAL_LM",
        base_model_name_or_path=str(root / "base"),
        inference_mode=True,
    )
    differing = {k: v for k, v in vars(written).items() if v != vars(fresh)[k]}
    assert not differing
    theirs = peft.get_peft_model(transformers_model(config, root / "base", seed), fresh)
    expected = peft.get_peft_model_state_dict(theirs)
    found = {f"base_model.model.{name}": t for name, t in read_adapter(directory)[1].items()}
    assert {k: t.shape for k, t in found.items()} == {k: t.shape for k, t in expected.items()}


@pytest.mark.parametrize("rank", [1, 4, 8])
@settings(max_examples=5)
@given(
    config=tiny_moe_configs(dense_layers=False),
    alpha=st.sampled_from([4.0, 32.0]),
    target_modules=st.sampled_from([("experts",), ("experts", "q_proj", "o_proj"), ("v_proj",)]),
    seed=seeds,
)
def test_adapters_of_experts_load_in_peft(
    tmp_path_factory, rank, alpha, config, target_modules, seed
):
    """PEFT fuses our tensors an expert into its stacked ones: the same logits, adapted and merged.

    Every layer has experts, as in all published Qwen3-MoE models: PEFT takes the names of a dense
    MLP between them for those of experts.
    """
    lora, root = LoRAConfig(rank, alpha, 0.0, target_modules), tmp_path_factory.mktemp("peers")
    ours, ids = tiny_model(config, seed), tiny_tokens(config, 2, 7, seed)
    base = ours(ids)
    inject_lora(ours, lora)
    randomise_adapter(ours, seed)
    active = ours(ids)
    assert (active - base).abs().max() > 1e-3
    directory = save_adapter(ours, lora, root / "ours")
    theirs = peft.PeftModel.from_pretrained(transformers_model(config, root / "a", seed), directory)
    close(logits_of(theirs.eval(), ids), active)
    merge_lora(ours)
    close(logits_of(theirs, ids), ours(ids))
    close(logits_of(theirs.merge_and_unload(), ids), ours(ids))
