"""full.py and train.py --full: the same loop without an adapter, as exact as the one with it.

Runs take a second, as in test_train.py, whose fixtures and helpers serve here too.
"""

import asyncio
import json
import random
import shutil

import pytest
import safetensors.torch
import test_train
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_train import (
    BASE,
    again,
    cancel_in,
    checkpoints,
    contents,
    go,
    on_call,
    random_pairs,
    refusal,
    rows_of,
    state_of,
    undisturbed,
)
from tiny import (
    close,
    config_json,
    save_checkpoint,
    seeds,
    tiny_config,
    tiny_configs,
    tiny_model,
    tiny_moe_configs,
    tiny_tokens,
)

import train
from config import Config, to_toml
from full import COMPANIONS, load_weights, save_model, save_weights
from grpo import LOSSES
from lora import LoRAConfig, inject_lora, lora_parameters, trainable
from model import Qwen3
from rollout import Request

small, quick, as_it_is = test_train.small, test_train.quick, test_train.as_it_is


@pytest.fixture(scope="module")
def fields(small):
    """All that could make a resumed run another one; a rate at which every step moves far."""
    return small | {"full": True, "kl": 0.1, "eval_every": 1, "lr": 1e-3, "steps": 3, "groups": 1}


@pytest.fixture(scope="module")
def straight(tmp_path_factory, fields):
    return undisturbed(tmp_path_factory.mktemp("full") / "straight", fields)


def assert_equal_runs(one, other, step: int) -> None:
    """Bit for bit: metrics, samples, the model, and the checkpoint at the end."""
    assert rows_of(one) == rows_of(other)
    assert rows_of(one, "samples.jsonl") == rows_of(other, "samples.jsonl")
    assert contents(one / "model") == contents(other / "model")
    assert state_of(one, step) == state_of(other, step)
    weights = [
        contents(output / "checkpoints" / f"step_{step:06d}/model") for output in (one, other)
    ]
    assert weights[0] == weights[1] and list(weights[0]) == ["model.safetensors"]


# --- what is trained ------------------------------------------------------------------------------


def test_trainable_is_the_adapter_or_without_one_every_weight():
    model = tiny_model()
    assert trainable(model).keys() == model.state_dict().keys()
    inject_lora(model, LoRAConfig(rank=2))
    assert trainable(model).keys() == lora_parameters(model).keys()


@settings(max_examples=12)
@given(
    tiny_configs(),
    seeds,
    st.integers(1, 100),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.7, 1.0]),
)
def test_splitting_order_and_padding_change_neither_loss_nor_gradient(
    config, seed, tokens, loss, kl, temperature
):
    """Of every weight: the embedding, its twin the head, norms and biases."""
    model, frozen = tiny_model(config, seed).requires_grad_(True), tiny_model(config, seed + 1)
    run = Config(loss=loss, kl=kl, temperature=temperature)
    pairs = random_pairs(seed, config.vocab_size)
    denominator = sum(sum(trajectory.loss_mask) for trajectory, _ in pairs)

    def results(batches):
        model.zero_grad(set_to_none=True)
        metrics = train.loss_and_backward(model, batches, denominator, run, frozen)
        if kl == 0:
            del metrics["reference_kl"], metrics["reference_max"]  # of one micro-batch alone
        gradients = {name: p.grad for name, p in trainable(model).items()}
        assert all(gradient is not None for gradient in gradients.values())
        return metrics, torch.cat([gradient.flatten() for gradient in gradients.values()])

    alone = [batch for pair in pairs for batch in train.micro_batches([pair], 1, "cpu")]
    expected, gradient = results(alone)
    shuffled = random.Random(seed).sample(pairs, len(pairs))
    metrics, other_gradient = results(train.micro_batches(shuffled, tokens, "cpu"))
    close(other_gradient, gradient, 1e-5 * float(gradient.abs().max().clamp(min=1)))
    for name in expected:
        assert metrics[name] == pytest.approx(expected[name], abs=1e-5, rel=1e-4), name
    assert all(parameter.grad is None for parameter in frozen.parameters())


def test_every_weight_moves_and_the_reference_does_not(straight):
    trained = dict(straight.trainer.model.named_parameters())
    frozen = dict(straight.trainer.frozen.named_parameters())
    assert trained.keys() == frozen.keys() == straight.base.keys()
    for name, before in straight.base.items():
        assert torch.equal(frozen[name], before) and not frozen[name].requires_grad
        assert not torch.equal(trained[name], before), name
    optimized = {id(p) for g in straight.trainer.optimizer.param_groups for p in g["params"]}
    assert optimized == {id(parameter) for parameter in trained.values()}


# --- what samples ---------------------------------------------------------------------------------


def test_the_trained_weights_are_what_samples(straight):
    rows = rows_of(straight.output)
    assert [row["version"] for row in rows] == [0, 1, 2] and len(rows) == 3
    for row in rows:
        assert row["staleness_max"] == 0 < row["grad_norm"] and row["mismatch_max"] < 1e-4
    # The policy has moved by far more than trainer and sampler differ.
    assert rows[0]["reference_kl"] == 0 and rows[-1]["reference_kl"] > 1e-3
    assert straight.trainer.engine.adapters == [] and straight.trainer.adapter is None


def test_keys_and_values_of_the_weights_before_serve_nobody(tmp_path, fields):
    trainer = train.set_up(Config(**fields, output=str(tmp_path / "run")))
    prompt = tiny_tokens(trainer.model.config, 1, 12)[0].tolist()

    def sample(engine):
        return asyncio.run(engine.generate(Request(prompt, max_new_tokens=4, seed=0)))

    trainer.publish()
    before = sample(trainer.engine)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.1)
    trainer.publish()
    after = sample(trainer.engine)
    assert after == sample(train.TorchEngine(trainer.model, 2, 64))
    assert after.logprobs != before.logprobs


# --- what a run leaves ----------------------------------------------------------------------------


def test_a_run_leaves_a_checkpoint_where_the_adapter_would_be(straight):
    output = straight.output
    assert {path.name for path in output.iterdir()} == {
        *("config.toml", "run.json", "metrics.jsonl", "samples.jsonl", "summary.json", ".lock"),
        *("reward.png", "checkpoints", "model"),
    }
    assert checkpoints(output) == ["step_000002", "step_000003"]
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["adapter_parameters"], summary["adapter_bytes"]) == (0, 0)
    assert summary["base_parameters"] == sum(p.numel() for p in straight.base.values())
    assert summary["model_bytes"] == (output / "model/model.safetensors").stat().st_size
    transformers, vllm = straight.printed.getvalue().splitlines()[-2:]
    assert f'AutoModelForCausalLM.from_pretrained("{output}/model")' in transformers
    assert f"vllm.entrypoints.openai.api_server --model {output}/model" in vllm


def test_the_model_that_a_run_leaves_is_the_trained_one(straight, tmp_path, fields):
    directory = straight.output / "model"
    loaded = Qwen3.from_pretrained(directory)
    trained = straight.trainer.model.state_dict()
    assert loaded.config == straight.trainer.model.config
    assert loaded.state_dict().keys() == trained.keys()
    assert all(torch.equal(tensor, trained[name]) for name, tensor in loaded.state_dict().items())
    assert "tokenizer.json" in contents(directory) and "generation_config.json" in contents(
        directory
    )
    for name in set(COMPANIONS) & contents(BASE).keys():
        assert (directory / name).read_bytes() == (BASE / name).read_bytes()
    # It is a base like any other: a run that starts from it finds the policy where the run ended.
    next_run = go(tmp_path / "run", fields | {"full": False, "model": str(directory), "steps": 1})
    summaries = [json.loads((o / "summary.json").read_text()) for o in (straight.output, next_run)]
    assert summaries[1]["eval_before"] == summaries[0]["eval_after"]
    assert summaries[1]["outcomes_before"] == summaries[0]["outcomes_after"]


@settings(max_examples=12)
@given(st.one_of(tiny_configs(), tiny_moe_configs()), seeds, st.sampled_from([4, 5]))
def test_a_saved_model_comes_back_bit_for_bit_whatever_dtype_its_source_had(
    tmp_path_factory, config, seed, version
):
    root, model = tmp_path_factory.mktemp("saved"), tiny_model(config, seed)
    half = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    raw = config_json(config, version) | {"dtype" if version == 5 else "torch_dtype": "bfloat16"}
    save_checkpoint(root / "source", raw, half)
    save_model(model, root / "model", str(root / "source"))
    loaded = Qwen3.from_pretrained(root / "model")
    assert loaded.config == config
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in loaded.state_dict().items())
    other = tiny_model(config, seed + 1)
    load_weights(other, root / "model")
    assert all(torch.equal(t, model.state_dict()[n]) for n, t in other.state_dict().items())
    save_weights(loaded, root / "again")
    first, second = (root / d / "model.safetensors" for d in ("model", "again"))
    assert first.read_bytes() == second.read_bytes()


# --- the same again, and failure ------------------------------------------------------------------


@pytest.mark.parametrize("group_size", [4, 1])
def test_interrupted_and_resumed_is_uninterrupted(
    tmp_path, fields, straight, monkeypatch, group_size
):
    """In the middle of a step's sampling, and of an evaluation."""
    output = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(asyncio.CancelledError):
        cancel_in(patch, step=2, group_size=group_size)
        go(output, fields)
    assert checkpoints(output) == ["step_000001", "step_000002"]
    Qwen3.from_pretrained(output / "model")
    again(output)
    assert_equal_runs(output, straight.output, 3)


@pytest.mark.parametrize("what", ["gradient", "weight"])
def test_what_is_not_finite_stops_the_run_and_nothing_of_it_stays(
    tmp_path, fields, straight, monkeypatch, what
):
    output, bad = tmp_path / "run", "model.layers.0.mlp.up_proj.weight"

    def spoil(model):
        parameter = dict(model.named_parameters())[bad]
        (parameter.grad if what == "gradient" else parameter.data)[0, 0] = float("nan")

    (tmp_path / "c.toml").write_text(to_toml(Config(**fields)))
    with monkeypatch.context() as patch:
        on_call(patch, "loss_and_backward" if what == "gradient" else "optimizer_step", 3, spoil)
        message = refusal(["--config", tmp_path / "c.toml", "--output", output])
    assert "step 3" in message and bad in message and "\n" not in message
    assert checkpoints(output) == ["step_000001", "step_000002"]
    again(output)
    assert_equal_runs(output, straight.output, 3)


def test_a_damaged_checkpoint_is_named_and_the_one_before_serves(tmp_path, straight):
    output = tmp_path / "run"
    shutil.copytree(straight.output, output)
    file = output / "checkpoints" / "step_000003" / "model" / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    safetensors.torch.save_file({n: t for n, t in tensors.items() if "norm" not in n}, file)
    message = refusal(["--config", output / "config.toml", "--output", output, "--resume"])
    assert str(file.parent.parent) in message and "missing model.norm.weight" in message
    shutil.rmtree(file.parent.parent)
    again(output)
    assert_equal_runs(output, straight.output, 3)


@pytest.mark.parametrize(
    "flags, named",
    [
        (["--rank", "4"], "--rank shapes an adapter"),
        (["--alpha", "16"], "--alpha shapes an adapter"),
        (["--dropout", "0.1"], "--dropout shapes an adapter"),
        (["--target-modules", "q_proj"], "--target-modules shapes an adapter"),
        (["--dtype", "bfloat16"], "--dtype float32"),
    ],
)
def test_what_makes_no_sense_without_an_adapter_is_refused(tmp_path, flags, named):
    message = refusal(["--full", *flags, "--output", tmp_path / "run"])
    assert named in message and "\n" not in message
    assert not (tmp_path / "run").exists()


def test_a_model_of_other_shapes_changes_nothing(tmp_path):
    model, other = tiny_model(seed=1), tiny_model(tiny_config(intermediate_size=21))
    save_weights(other, tmp_path / "other")
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight has shape \(21, 12\)"):
        load_weights(model, tmp_path / "other")
    for name, tensor in tiny_model(seed=1).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor)


@pytest.mark.slow
def test_the_default_job_learns(tmp_path, as_it_is):
    """Shortened; at a tenth of the adapter's learning rate."""
    shorter = {"steps": 16, "group_size": 8, "eval_size": 128, "full": True, "lr": Config.lr / 10}
    output = go(tmp_path / "run", shorter)
    summary = json.loads((output / "summary.json").read_text())
    assert summary["eval_before"] <= 0.5 and summary["eval_after"] >= 0.75
    assert all(row["mismatch_max"] < 1e-4 for row in rows_of(output))
