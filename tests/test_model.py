"""model.py: the computation against a naive one, the cache, the head without logits, the loader."""

import dataclasses
import json
import math
import weakref
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny import (
    close,
    config_json,
    save_checkpoint,
    seeds,
    tiny_config,
    tiny_configs,
    tiny_model,
    tiny_tokens,
)
from torch.overrides import TorchFunctionMode

from head import HeadLogprobs, few_logits
from model import KVCache, Qwen3, Qwen3Config, RMSNorm

# --- the computation ------------------------------------------------------------------------------


def reference_logits(model: Qwen3, ids: list[int]) -> torch.Tensor:
    """One stream, in float64, token by token and head by head, rotations as complex numbers."""
    c, w = model.config, {name: t.double() for name, t in model.state_dict().items()}
    half = c.head_dim // 2

    def norm(x, weight):
        return x / math.sqrt(float(x @ x) / len(x) + c.rms_norm_eps) * weight

    def head_norm(x, name):  # Qwen2 has none
        return norm(x, w[name]) if name in w else x

    def linear(x, name):
        return w[f"{name}.weight"] @ x + w.get(f"{name}.bias", 0)

    def rotated(x, position):
        frequency = torch.tensor([c.rope_theta ** (-2 * i / c.head_dim) for i in range(half)])
        turn = torch.polar(torch.ones(half).double(), position * frequency.double())
        pairs = torch.complex(x[:half], x[half:]) * turn
        return torch.cat((pairs.real, pairs.imag))

    xs = [w["model.embed_tokens.weight"][i] for i in ids]
    for layer in range(c.num_hidden_layers):
        at = f"model.layers.{layer}"
        keys, values = [], []  # [position][key-value head]
        for t, x in enumerate(xs):
            normed = norm(x, w[f"{at}.input_layernorm.weight"])
            q, k, v = (
                linear(normed, f"{at}.self_attn.{p}_proj").view(-1, c.head_dim) for p in "qkv"
            )
            q_norm, k_norm = (f"{at}.self_attn.{p}_norm.weight" for p in "qk")
            keys.append([rotated(head_norm(head, k_norm), t) for head in k])
            values.append(v)
            out = []
            for h, head in enumerate(q):
                kv = h * c.num_key_value_heads // c.num_attention_heads
                query = rotated(head_norm(head, q_norm), t) / math.sqrt(c.head_dim)
                weights = torch.stack([key[kv] @ query for key in keys]).softmax(0)
                out.append(sum(weight * value[kv] for weight, value in zip(weights, values)))  # noqa: B905
            x = x + linear(torch.cat(out), f"{at}.self_attn.o_proj")
            normed = norm(x, w[f"{at}.post_attention_layernorm.weight"])
            gate, up = linear(normed, f"{at}.mlp.gate_proj"), linear(normed, f"{at}.mlp.up_proj")
            xs[t] = x + linear(gate * gate.sigmoid() * up, f"{at}.mlp.down_proj")
    head = model.head_weight.double()
    return torch.stack([head @ norm(x, w["model.norm.weight"]) for x in xs])


@given(config=tiny_configs(), T=st.integers(1, 7), seed=seeds)
def test_logits_equal_a_naive_computation(config, T, seed):
    model, ids = tiny_model(config, seed), tiny_tokens(config, 1, T, seed)
    close(model(ids)[0].double(), reference_logits(model, ids[0].tolist()))


@given(
    size=st.sampled_from([1, 6, 32]),
    rows=st.integers(1, 4),
    seed=seeds,
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_norm_and_its_gradients_are_those_of_the_formula(size, rows, seed, dtype):
    """Computed by hand there, by autograd in float64 here."""
    generator = torch.Generator().manual_seed(seed)
    norm, x = RMSNorm(size, 1e-6).to(dtype), torch.randn(2, rows, size, generator=generator)
    weights = torch.randn(x.shape, generator=generator).to(dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(size, generator=generator))
    x = x.to(dtype).requires_grad_()
    wide, weight = (t.detach().double().requires_grad_() for t in (x, norm.weight))
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    (expected * weights).sum().backward()
    found = norm(x)
    (found * weights).sum().backward()
    # Of a row near 0 the gradient is a difference of numbers as large as 1 / its root mean square.
    scale = float((wide.detach().square().mean(-1) + 1e-6).rsqrt().max().clamp(min=1))
    tolerance = scale * (1e-5 if dtype == torch.float32 else 0.1)
    pairs = [(found, expected), (x.grad, wide.grad), (norm.weight.grad, weight.grad)]
    for mine, exact in pairs:
        assert mine.dtype == dtype
        close(mine.double(), exact, tolerance * float(exact.detach().abs().max().clamp(min=1)))


@given(config=tiny_configs(), T=st.integers(2, 40), seed=seeds, data=st.data())
def test_a_later_token_changes_no_earlier_logit(config, T, seed, data):
    model, ids = tiny_model(config, seed), tiny_tokens(config, 2, T, seed)
    t = data.draw(st.integers(1, T - 1))
    other = ids.clone()
    other[:, t:] = (other[:, t:] + 1) % config.vocab_size
    before, after = model(ids), model(other)
    assert torch.equal(before[:, :t], after[:, :t])
    assert not torch.equal(before[:, t:], after[:, t:])


# --- the cache ------------------------------------------------------------------------------------


@given(config=tiny_configs(), seed=seeds, contiguous=st.booleans(), data=st.data())
def test_prefill_equals_chunks_equals_tokens_equals_the_full_pass(config, seed, contiguous, data):
    """Streams of different lengths, side by side, cut into chunks at any place."""
    model = tiny_model(config, seed)
    lengths = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=3), label="lengths")
    S, T = len(lengths), max(lengths)
    ids = tiny_tokens(config, S, T, seed)
    full = model(ids)
    slots = torch.randperm(5, generator=torch.Generator().manual_seed(seed))[:S]
    rows = slice(1, 1 + S) if contiguous else slots
    for chunk in (T, data.draw(st.integers(1, T), label="chunk"), 1):
        cache = KVCache(config, slots=5, capacity=T, dtype=torch.float32)
        done = torch.zeros(S, dtype=torch.long)
        while (done < torch.tensor(lengths)).any():
            # A stream that has ended leaves; the others stay in their slots.
            live = (done < torch.tensor(lengths)).nonzero().squeeze(1)
            new = (torch.tensor(lengths)[live] - done[live]).clamp(max=chunk)
            block = torch.zeros(len(live), int(new.max()), dtype=torch.long)
            for i, s in enumerate(live.tolist()):
                block[i, : new[i]] = ids[s, done[s] : done[s] + new[i]]
            if contiguous and len(live) == S:
                where = rows
            else:
                where = torch.arange(5)[rows][live]
            even = bool((new == new[0]).all())
            logits = model.extend(block, cache, where, done[live], None if even else new)
            done[live] += new
            close(logits, full[live, done[live] - 1])


def test_padding_is_not_written_and_other_slots_are_left_alone():
    config = tiny_config()
    model, cache = tiny_model(config), KVCache(config, slots=3, capacity=6, dtype=torch.float32)
    cache.keys.fill_(7.0)
    ids, lengths = tiny_tokens(config, 2, 4), torch.tensor([4, 2])
    model.extend(ids, cache, slice(0, 2), torch.tensor([0, 1]), lengths)
    written = (cache.keys != 7.0).all(-1).all(2).all(0)  # (slots, capacity)
    assert written.int().tolist() == [[1, 1, 1, 1, 0, 0], [0, 1, 1, 0, 0, 0], [0] * 6]


@given(seed=seeds, prefix=st.integers(1, 6), tail=st.integers(1, 6))
def test_a_copied_prefix_and_swapped_slots_continue_as_their_streams(seed, prefix, tail):
    config = tiny_config()
    model, ids = tiny_model(config, seed), tiny_tokens(config, 2, prefix + tail, seed)
    ids[1, :prefix] = ids[0, :prefix]
    cache = KVCache(config, slots=4, capacity=prefix + tail, dtype=torch.float32)
    zero = torch.zeros(1, dtype=torch.long)
    model.extend(ids[:1, :prefix], cache, slice(0, 1), zero)
    cache.copy(source=0, target=2, length=prefix)
    cache.swap(0, 3, cache.capacity)  # now stream 0 lives in slot 3, stream 1 in slot 2
    rows, starts = torch.tensor([3, 2]), torch.full((2,), prefix)
    logits = model.extend(ids[:, prefix:], cache, rows, starts)
    close(logits, model(ids)[:, -1])


def test_more_tokens_than_the_cache_holds_are_an_error():
    config = tiny_config()
    cache = KVCache(config, slots=1, capacity=3, dtype=torch.float32)
    with pytest.raises(ValueError, match="5 tokens do not fit a cache of 3"):
        ids, starts = tiny_tokens(config, 1, 3), torch.tensor([2])
        tiny_model(config).extend(ids, cache, slice(0, 1), starts)


# --- the head without logits ----------------------------------------------------------------------


@contextmanager
def blocks_of(*block: int):
    before, HeadLogprobs.BLOCK = HeadLogprobs.BLOCK, block
    try:
        yield
    finally:
        HeadLogprobs.BLOCK = before


def trainable(model: Qwen3, everything: bool = False) -> list[torch.Tensor]:
    """The parameters of the layers; embedding and head stay frozen, unless everything trains."""
    trained = model if everything else model.model.layers
    trained.requires_grad_(True)
    return list(trained.parameters())


def random_mask(S: int, T: int, seed: int) -> torch.Tensor:
    return torch.rand(S, T, generator=torch.Generator().manual_seed(seed)) < 0.6


@given(
    S=st.integers(1, 5),
    V=st.integers(1, 50),
    block=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=seeds,
)
def test_logits_of_a_few_rows_are_the_product_whatever_the_blocks(S, V, block, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    hidden, weight = (torch.randn(n, 8, generator=generator).to(dtype) for n in (S, V))
    with mock.patch("head.FEW_BLOCK", block):
        logits = few_logits(hidden, weight)
    assert logits.dtype == dtype
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(logits, hidden @ weight.T, atol=tolerance, rtol=tolerance)


@given(
    config=tiny_configs(),
    S=st.integers(1, 3),
    T=st.integers(2, 10),
    temperature=st.sampled_from([0.5, 1.0, 1.3]),
    block=st.sampled_from([(1, 1), (3, 4), (2, 99), (99, 3), (1024, 8192)]),
    everything=st.booleans(),
    seed=seeds,
)
def test_token_logprobs_equal_the_naive_log_softmax(
    config, S, T, temperature, block, everything, seed
):
    """In value and in every gradient; the head's own too (tied or not), where it is trained."""
    model, ids = tiny_model(config, seed), tiny_tokens(config, S, T, seed)
    parameters, mask = trainable(model, everything), random_mask(S, T - 1, seed)
    weights = torch.randn(S, T - 1, generator=torch.Generator().manual_seed(seed))
    everything = torch.log_softmax(model(ids)[:, :-1] / temperature, dim=-1)
    naive = everything.gather(-1, ids[:, 1:, None]).squeeze(-1) * mask
    naive_entropy = -(everything.exp() * everything).sum(-1) * mask
    naive_gradients = torch.autograd.grad((naive * weights).sum(), parameters)
    with blocks_of(*block):
        logprobs, entropy = model.token_logprobs(ids, mask, temperature)
    close(logprobs, naive)
    close(entropy, naive_entropy)
    assert not entropy.requires_grad
    with blocks_of(*reversed(block)):
        gradients = torch.autograd.grad((logprobs * weights).sum(), parameters)
    for gradient, expected in zip(gradients, naive_gradients, strict=True):
        close(gradient, expected, 1e-5 * float(expected.abs().max().clamp(min=1)))


@given(config=tiny_configs(), T=st.integers(2, 8), pad=st.integers(1, 6), seed=seeds)
def test_padding_changes_neither_logprobs_nor_gradients(config, T, pad, seed):
    """What is padded: not a bit. How much: rounding alone. The same for neighbours in the batch."""
    model, ids = tiny_model(config, seed), tiny_tokens(config, 2, T, seed)
    parameters, mask = trainable(model), random_mask(2, T - 1, seed)
    mask[0, 0] = True

    def score(ids, mask):
        logprobs, entropy = model.token_logprobs(ids, mask)
        return [logprobs.detach(), entropy, *torch.autograd.grad(logprobs.sum(), parameters)]

    plain = score(ids, mask)
    outcomes = []
    for content in (0, config.vocab_size - 1):
        padded = torch.cat((ids, torch.full((2, pad), content)), dim=1)
        wider = torch.cat((mask, torch.zeros(2, pad, dtype=torch.bool)), dim=1)
        logprobs, entropy, *gradients = score(padded, wider)
        assert not logprobs[:, T - 1 :].any() and not entropy[:, T - 1 :].any()
        outcomes.append([logprobs[:, : T - 1], entropy[:, : T - 1], *gradients])
    for first, second, unpadded in zip(*outcomes, plain, strict=True):
        assert torch.equal(first, second)
        close(first, unpadded, 1e-5 * float(unpadded.abs().max().clamp(min=1)))
    alone, _ = model.token_logprobs(ids[:1], mask[:1])
    close(plain[0][:1], alone.detach())


@pytest.mark.parametrize("everything", [False, True])
def test_no_tensor_with_a_row_of_logits_is_kept_for_the_backward_pass(everything):
    config = tiny_config(vocab_size=997)
    model, ids = tiny_model(config), tiny_tokens(config, 2, 9)
    trainable(model, everything)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model.token_logprobs(ids, torch.ones(2, 8))
    wide = [tensor for tensor in kept if 997 in tensor.shape]
    assert kept and len(wide) == everything  # the head itself, no copy of it
    assert all(t.data_ptr() == model.head_weight.data_ptr() for t in wide)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@given(config=tiny_configs(), seed=st.integers(0, 99))
def test_a_pass_with_gradient_and_one_without_give_the_same_bits(dtype, config, seed):
    """The policy is scored with gradient, its reference without: at B = 0 they are one model."""
    model = tiny_model(config, seed).to(dtype).requires_grad_(True)
    ids = tiny_tokens(config, 3, 7, seed)
    mask = torch.ones(3, 6, dtype=torch.bool)
    with_gradient, _ = model.token_logprobs(ids, mask)
    with_gradient.sum().backward()
    with torch.no_grad():
        without, _ = model.token_logprobs(ids, mask)
    assert torch.equal(with_gradient, without)


@pytest.mark.parametrize(("S", "T"), [(0, 5), (3, 1)])
def test_where_no_token_has_a_past_there_are_no_logprobs(S, T):
    config = tiny_config()
    logprobs, entropy = tiny_model(config).token_logprobs(
        tiny_tokens(config, S, T), torch.ones(S, T - 1, dtype=torch.bool)
    )
    assert logprobs.shape == entropy.shape == (S, T - 1)


@pytest.mark.parametrize("everything", [False, True])
def test_logits_are_made_a_block_at_a_time_forwards_and_backwards(everything):
    config = tiny_config(vocab_size=997)
    model, ids = tiny_model(config), tiny_tokens(config, 2, 9)
    trainable(model, everything)
    made = set()

    class Shapes(TorchFunctionMode):
        def __torch_function__(self, function, types, arguments=(), options=None):
            result = function(*arguments, **options or {})
            made.add(tuple(result.shape) if isinstance(result, torch.Tensor) else ())
            return result

    with blocks_of(3, 100), Shapes():
        logprobs, _ = model.token_logprobs(ids, torch.ones(2, 8))
        logprobs.sum().backward()
    # 16 tokens are five parts of three and one, 997 entries nine of 100 and one of 97.
    assert {(3, 100), (1, 100), (3, 97), (1, 97)} <= made
    wide = {shape for shape in made if math.prod(shape) > 300 and shape[-1] != 12}  # W, or of it
    assert not {size for shape in wide for size in shape} & {97, 100, 997}


def test_an_empty_mask_gives_zeros_and_zero_gradients():
    config = tiny_config()
    model, ids = tiny_model(config), tiny_tokens(config, 2, 5)
    parameters = trainable(model)
    logprobs, entropy = model.token_logprobs(ids, torch.zeros(2, 4))
    assert not logprobs.any() and not entropy.any()
    assert not any(g.any() for g in torch.autograd.grad(logprobs.sum(), parameters))


def test_token_logprobs_refuses_what_it_cannot_do():
    config = tiny_config()
    model, ids = tiny_model(config), tiny_tokens(config, 2, 5)
    with pytest.raises(ValueError, match=r"mask \(2, 5\) must be \(S, T-1\)"):
        model.token_logprobs(ids, torch.ones(2, 5))


# --- the loader -----------------------------------------------------------------------------------


@pytest.mark.parametrize("transformers", [4, 5])
@given(config=tiny_configs(), seed=seeds, shards=st.integers(1, 4))
def test_a_checkpoint_gives_its_model_back(tmp_path_factory, transformers, config, seed, shards):
    model = tiny_model(config, seed)
    directory = tmp_path_factory.mktemp("checkpoint")
    save_checkpoint(directory, config_json(config, transformers), model.state_dict(), shards)
    loaded = Qwen3.from_pretrained(directory)
    assert loaded.config == config
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    ids = tiny_tokens(config, 1, 5, seed)
    assert torch.equal(loaded(ids), model(ids))


@pytest.fixture
def checkpoint(tmp_path):
    config = tiny_config(tie_word_embeddings=True)
    return save_checkpoint(tmp_path / "model", config_json(config), tiny_model(config).state_dict())


def change(directory, **changes):
    """Rewrites model.safetensors with tensors replaced, or dropped where None."""
    tensors = load_file(directory / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, directory / "model.safetensors")


def test_a_tied_checkpoint_may_ship_its_head_if_it_is_the_embedding(checkpoint):
    embedding = load_file(checkpoint / "model.safetensors")["model.embed_tokens.weight"]
    change(checkpoint, lm_head__weight=embedding.clone())
    assert "lm_head.weight" not in Qwen3.from_pretrained(checkpoint).state_dict()
    change(checkpoint, lm_head__weight=embedding + 1)
    with pytest.raises(ValueError, match="lm_head.weight differs"):
        Qwen3.from_pretrained(checkpoint)


def test_an_untied_checkpoint_needs_its_head(tmp_path):
    config = tiny_config()
    tensors = tiny_model(config).state_dict()
    del tensors["lm_head.weight"]
    directory = save_checkpoint(tmp_path, config_json(config), tensors)
    with pytest.raises(ValueError, match="missing lm_head.weight"):
        Qwen3.from_pretrained(directory)


def test_missing_surplus_and_misshapen_tensors_are_all_listed(checkpoint):
    change(
        checkpoint,
        model__norm__weight=None,
        model__layers__0__self_attn__q_proj__weight=torch.zeros(3, 3),
        model__layers__9__mlp__up_proj__weight=torch.zeros(20, 12),
    )
    with pytest.raises(ValueError) as error:
        Qwen3.from_pretrained(checkpoint)
    message = str(error.value)
    assert str(checkpoint) in message
    assert "missing model.norm.weight" in message
    assert "surplus model.layers.9.mlp.up_proj.weight" in message
    assert "q_proj.weight has shape (3, 3), expected (24, 12)" in message


def test_integers_and_a_tensor_with_two_values_are_refused_by_name(checkpoint, tmp_path):
    change(checkpoint, model__norm__weight=torch.ones(12, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"model\.norm\.weight is torch\.int32"):
        Qwen3.from_pretrained(checkpoint)
    tensors = tiny_model().state_dict()
    directory = save_checkpoint(tmp_path / "two", config_json(tiny_config()), tensors, shards=2)
    file = directory / "model-00002-of-00002.safetensors"
    name = "model.embed_tokens.weight"  # of the first shard
    save_file(load_file(file) | {name: tensors[name].clone()}, file)
    Qwen3.from_pretrained(directory)
    save_file(load_file(file) | {name: tensors[name] + 1}, file)
    with pytest.raises(ValueError, match=f"{file.name}: an earlier file has another {name}"):
        Qwen3.from_pretrained(directory)


def test_the_dtype_is_the_checkpoints_or_the_callers(checkpoint):
    config = tiny_config(tie_word_embeddings=True, torch_dtype="bfloat16")
    tensors = {n: t.bfloat16() for n, t in tiny_model(config).state_dict().items()}
    save_checkpoint(checkpoint, config_json(config), tensors)
    assert Qwen3.from_pretrained(checkpoint).model.norm.weight.dtype == torch.bfloat16
    loaded = Qwen3.from_pretrained(checkpoint, dtype=torch.float32)
    assert all(p.dtype == torch.float32 for p in loaded.parameters())


def test_a_change_of_dtype_never_holds_two_copies(tmp_path, monkeypatch):
    model = tiny_model()
    checkpoint = save_checkpoint(tmp_path / "model", config_json(model.config), model.state_dict())
    to, before, alive = torch.Tensor.to, [], []

    def counting(tensor, *arguments, **options):
        before.append(weakref.ref(tensor))
        alive.append(sum(reference() is not None for reference in before))
        return to(tensor, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "to", counting)
        Qwen3.from_pretrained(checkpoint, dtype=torch.bfloat16)
    assert len(alive) == len(model.state_dict()) > 10
    assert max(alive) <= 3  # one under way, the one before, the embedding that the head was held to


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "rope_parameters": None}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "linear"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "llama3"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),  # beside rope_parameters
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"use_mrope": True}, "use_mrope True"),
        ({"use_sliding_window": True, "sliding_window": 16}, "use_sliding_window True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"num_key_value_heads": None}, "missing num_key_value_heads"),
        ({"rope_parameters": None}, "missing rope_theta"),
        ({"rope_scaling": {"rope_type": []}}, r"rope type .*'\[\]'"),
        ({"rope_parameters": "x"}, "rope_parameters must be dict, not 'x'"),
        ({"rope_parameters": {"rope_theta": "x"}}, "rope_theta must be float, not 'x'"),
        ({"dtype": "auto"}, "dtype 'auto' is none of"),
        ({"dtype": "int8"}, "dtype 'int8' is none of"),
        ({"vocab_size": "23"}, "vocab_size must be int, not '23'"),
        ({"num_attention_heads": 0}, "num_attention_heads must be 1 or more: 0"),
    ],
)
def test_a_config_that_is_not_computed_is_refused_by_name(checkpoint, change, named):
    file = checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=named) as error:
        Qwen3.from_pretrained(checkpoint)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("attention_bias", [True, False])
def test_qwen2_has_a_bias_on_q_k_and_v_alone_and_no_norm_of_heads(attention_bias):
    """Whatever attention_bias says: the setting is Qwen3's. A sliding window that is off is off."""
    raw = config_json(tiny_config(model_type="qwen2", attention_bias=attention_bias))
    raw |= {"sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1}
    del raw["head_dim"]
    config = Qwen3Config.from_dict(raw)
    assert config.head_dim == config.hidden_size // config.num_attention_heads
    names = {name.partition("self_attn.")[2] for name in tiny_model(config).state_dict()} - {""}
    assert names == {
        *(f"{p}_proj.weight" for p in "qkvo"),
        *(f"{p}_proj.bias" for p in "qkv"),
    }


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_a_missing_field_is_named(checkpoint, field):
    raw = json.loads((checkpoint / "config.json").read_text())
    del raw[field]
    (checkpoint / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=f"missing {field}"):
        Qwen3Config.from_pretrained(checkpoint)


def test_head_dim_may_be_left_to_the_hidden_size():
    raw = config_json(tiny_config()) | {"head_dim": None}
    assert Qwen3Config.from_dict(raw) == dataclasses.replace(tiny_config(), head_dim=12 // 4)


@pytest.mark.parametrize("content", ["{", "[]", "\xff\xfe"])
def test_broken_json_names_its_file(checkpoint, content):
    for name in ("model.safetensors.index.json", "config.json"):
        (checkpoint / name).write_bytes(content.encode("latin-1"))
        with pytest.raises(ValueError, match=f"{name}: (not valid JSON|a JSON object)"):
            Qwen3.from_pretrained(checkpoint)


def test_incomplete_directories_are_refused_by_name(checkpoint, tmp_path):
    config = tiny_config()
    tensors = tiny_model(config).state_dict()
    with pytest.raises(ValueError, match="no such directory"):
        Qwen3.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="nobody/nothing: no such directory, and the Hub gave no"):
        Qwen3.from_pretrained("nobody/nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        Qwen3.from_pretrained(tmp_path / "empty")
    sharded = save_checkpoint(tmp_path / "sharded", config_json(config), tensors, shards=2)
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors: no such file"):
        Qwen3.from_pretrained(sharded)
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="index.json: missing weight_map"):
        Qwen3.from_pretrained(sharded)
    (sharded / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1, "b": []}}')
    with pytest.raises(ValueError, match="index.json: a must be str, not 1"):
        Qwen3.from_pretrained(sharded)
    file = checkpoint / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match="model.safetensors: unreadable"):
        Qwen3.from_pretrained(checkpoint)
