"""Bugs that users of other projects reported and that the tests of our parts did not yet show to be
absent here: the rest of the table in tests/README.md, where every report stands beside its test.

Fixtures and helpers are those of test_rollout.py and test_train.py.
"""

import asyncio
import json
import shutil

import pytest
import test_rollout
import test_train
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import check, make_engine, play
from test_train import go, random_pairs, rows_of
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

import start
import train
from broadcast import TENSOR_FILE, load_adapter, publish, read_adapter
from config import Config, check_config
from engine import Request, draw
from grpo import group_advantages, kl_loss
from lora import (
    TRAINABLE,
    LoRAConfig,
    adapter_disabled,
    add_adapter,
    inject_lora,
    lora_layers,
    lora_parameters,
    merge_lora,
    unmerge_lora,
    use_adapters,
)
from model import HeadLogprobs

pytestmark = pytest.mark.filterwarnings("ignore:rank .* is larger")
published = test_rollout.published
small, quick = test_train.small, test_train.quick


def adapted(config, lora: LoRAConfig, seed: int, dtype=torch.float32):
    model = tiny_model(config, seed).to(dtype)
    inject_lora(model, lora)
    randomise_adapter(model, seed)
    return model


# --- the adapter on its way to the sampler --------------------------------------------------------


@settings(max_examples=8)
@given(
    config=tiny_configs(),
    lora=lora_configs(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=seeds,
)
def test_published_and_loaded_twice_it_is_the_same_and_nothing_else_moves(
    tmp_path_factory, config, lora, dtype, seed
):
    """A scale folded in place would grow with each load, a merged model would be shipped for its
    adapter, a load would take the dtype of the base."""
    root, ids = tmp_path_factory.mktemp("published"), tiny_tokens(config, 2, 6, seed)
    trainer, sampler = adapted(config, lora, seed, dtype), tiny_model(config, seed).to(dtype)
    trained = {name: p.clone() for name, p in trainer.named_parameters()}
    active, base = trainer(ids), sampler(ids)
    merge_lora(trainer)
    paths = [publish(trainer, lora, root, 0)]
    unmerge_lora(trainer)
    paths.append(publish(trainer, lora, root, 1))
    files = [(path / TENSOR_FILE).read_bytes() for path in paths]
    assert files[0] == files[1]
    for name, path in zip(("v0", "v1"), paths, strict=True):
        add_adapter(sampler, name, *read_adapter(path))
        load_adapter(trainer, path)
    for name in ("v0", "v1", "v0"):
        with use_adapters(sampler, [(name, None)]):
            assert torch.equal(sampler(ids), active)
    with adapter_disabled(sampler):
        assert torch.equal(sampler(ids), base)
    assert torch.equal(trainer(ids), active)
    for name, parameter in trainer.named_parameters():
        assert torch.equal(parameter, trained[name]) and parameter.dtype == trained[name].dtype
    for layer in lora_layers(sampler).values():
        assert {p.dtype for p in (*layer.lora_A.values(), *layer.lora_B.values())} == {
            torch.float32
        }


def test_an_adapter_that_is_loaded_needs_its_directory_no_more(tmp_path, published):
    directory = shutil.copytree(published["a"], tmp_path / "v0")
    engine = make_engine({"v0": directory})
    shutil.rmtree(directory)
    request = Request([1, 2, 3], 6, adapter="v0", seed=0)
    check(engine.model, request, play(engine, [request])[0])


@settings(max_examples=5)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(2, 4), seeds)
def test_publishing_during_generation_leaves_what_is_in_flight_as_it_was(
    published, pauses, slots, seed
):
    engine = make_engine({"a": published["a"]}, slots)
    asked = [Request([1, 2, i], 25, adapter="a", seed=seed + i) for i in range(2)]

    async def scenario():
        running = [asyncio.create_task(engine.generate(request)) for request in asked]
        for version, pause in enumerate(pauses):
            for _ in range(pause):
                await asyncio.sleep(0)
            engine.add_adapter(f"v{version}", published["b"])
            assert version or not any(task.done() for task in running)
            await engine.generate(Request([1, 2, 0], 2, adapter=f"v{version}", seed=0))
            engine.remove_adapter(f"v{version}")
        return await asyncio.gather(*running)

    for request, completion in zip(asked, asyncio.run(scenario()), strict=True):
        check(engine.model, request, completion)


@settings(max_examples=3)
@given(lora_configs(dropout=0.3))
def test_every_setting_of_the_adapter_reaches_its_layers(lora):
    settings = (lora.rank, lora.alpha, lora.dropout, lora.target_modules)
    model, used, *_ = start.load_policy(Config(*settings))
    assert used == lora
    layers = lora_layers(model)
    assert {name.rpartition(".")[2] for name in layers} == set(lora.target_modules)
    for layer in layers.values():
        assert layer.lora_A[TRAINABLE].shape[0] == layer.lora_B[TRAINABLE].shape[1] == lora.rank
        assert layer.scaling[TRAINABLE] == lora.alpha / lora.rank
        assert layer.dropout[TRAINABLE] == lora.dropout


@settings(max_examples=3)
@given(config=tiny_configs(), lora=lora_configs(), seed=seeds)
def test_a_hundred_merges_in_bfloat16_move_no_bit_of_the_base(config, lora, seed):
    model, ids = adapted(config, lora, seed, torch.bfloat16), tiny_tokens(config, 2, 5, seed)
    before = {name: p.clone() for name, p in model.named_parameters() if ".lora_" not in name}
    active = model(ids)
    for cycle in range(1, 101):
        randomise_adapter(model, seed + cycle)
        merge_lora(model)
        unmerge_lora(model)
    assert all(torch.equal(dict(model.named_parameters())[n], t) for n, t in before.items())
    randomise_adapter(model, seed)
    assert torch.equal(model(ids), active)


def test_vllm_is_not_sampled_from_while_training_on_4_bit_weights():
    with pytest.raises(ValueError, match="vLLM would sample from others: two policies"):
        check_config(Config(quantize="nf4", engine="vllm", vllm_url=("http://x",)))


# --- logprobs, advantages, the loss ---------------------------------------------------------------


@given(
    st.integers(1, 5),
    st.integers(2, 300),
    st.sampled_from([0.7, 1.0, 1.5]),
    st.floats(0, 0.999),
    seeds,
)
def test_over_a_head_of_16_bits_the_softmax_is_taken_in_fp32(N, V, temperature, uniform, seed):
    """By the trainer and by the sampler."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, 16, generator=generator).bfloat16()
    weight = torch.randn(V, 16, generator=generator).bfloat16()
    targets = torch.randint(V, (N,), generator=generator)
    logits = F.linear(hidden, weight)
    exact = (logits.double() / temperature).log_softmax(-1)
    logprobs, _ = HeadLogprobs.apply(hidden, weight, targets, temperature)
    assert logprobs.dtype == torch.float32
    close(logprobs.double(), exact.gather(1, targets[:, None])[:, 0])
    tokens, drawn = draw(logits, torch.full((N,), temperature), torch.full((N,), uniform))
    close(drawn.double(), exact.gather(1, tokens[:, None])[:, 0])


@given(st.integers(1, 8), st.integers(-12, 0), st.floats(-1, 1), seeds)
def test_scaled_advantages_are_bounded_however_close_the_rewards_are(G, exponent, center, seed):
    """By sqrt(G - 1), what one of G numbers can be away from their mean in standard deviations."""
    spread = torch.rand(3, G, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    for rewards_P_G in (center + spread, center + spread.double()):
        assert group_advantages(rewards_P_G, scale="std").abs().max() <= (G - 1) ** 0.5 + 1e-3


@settings(max_examples=8)
@given(seeds, st.sampled_from(["reinforce", "grpo", "cispo"]), st.integers(1, 100))
def test_the_kl_alone_moves_the_adapter_as_kl_loss_says(seed, loss, tokens):
    """Nobody cuts its gradient, and the reference is the base: no advantage, full logits beside."""
    model = adapted(tiny_config(), LoRAConfig(rank=2, alpha=4.0), seed)
    parameters = list(lora_parameters(model).values())
    pairs = [(episode, 0.0) for episode, _ in random_pairs(seed, model.config.vocab_size)]
    N = sum(sum(episode.loss_mask) for episode, _ in pairs)

    def naive(episode):
        ids = torch.tensor([episode.token_ids])
        return model(ids)[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    total = 0.0
    for episode, _ in pairs:
        mask, sampler = (torch.tensor([x[1:]]) for x in (episode.loss_mask, episode.logprobs))
        with adapter_disabled(model), torch.no_grad():
            reference = naive(episode)
        total = total + 0.1 * kl_loss(naive(episode), sampler, reference, mask.bool(), N)
    expected = torch.autograd.grad(total, parameters)

    batches = train.micro_batches(pairs, tokens, "cpu")
    train.loss_and_backward(model, batches, N, Config(loss=loss, kl=0.1))
    assert any(gradient.abs().max() > 1e-4 for gradient in expected)
    for parameter, gradient in zip(parameters, expected, strict=True):
        close(parameter.grad, gradient, 1e-5 * float(gradient.abs().max().clamp(min=1)))


# --- the run --------------------------------------------------------------------------------------


def test_a_run_whose_turns_are_all_cut_off_says_so(tmp_path, small):
    output = go(tmp_path / "run", small, max_new_tokens=1, steps=1)
    (row,) = rows_of(output)
    assert row["truncated"] == 1.0
    summary = json.loads((output / "summary.json").read_text())
    assert summary["outcomes_before"] == {"no answer: length": 3}
