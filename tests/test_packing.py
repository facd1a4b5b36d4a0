"""packing.py: streams that begin alike are computed once, and nobody can tell from the numbers."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    close,
    randomise_adapter,
    seeds,
    tiny_configs,
    tiny_model,
    tiny_moe_config,
    tiny_moe_configs,
    tiny_tokens,
)

from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, use_adapters
from model import Qwen3
from packing import pack


@st.composite
def stream_batches(draw, vocabulary: int = 5):
    """input_ids (S, T), mask (S, T-1): streams of any lengths that branch off from one another at
    any place, or repeat one, padded with other tokens each time; any positions wanted, or none."""
    rng = random.Random(draw(seeds))
    streams = []
    for _ in range(draw(st.integers(1, 6))):
        begin = rng.choice(streams) if streams and rng.random() < 0.8 else []
        begin = begin[: rng.randint(0, len(begin))] if rng.random() < 0.8 else begin
        streams.append(begin + [rng.randrange(vocabulary) for _ in range(rng.randint(0, 6))])
    T = max(2, *(len(stream) for stream in streams))
    padded = [s + [rng.randrange(vocabulary) for _ in range(T - len(s))] for s in streams]
    share = rng.choice([0.0, 0.3, 1.0])
    mask = [[t + 1 < len(s) and rng.random() < share for t in range(T - 1)] for s in streams]
    return torch.tensor(padded), torch.tensor(mask)


def distinct(ids: torch.Tensor, mask: torch.Tensor) -> tuple[set, set, set]:
    """By definition: the beginnings that must be computed, those that the head must meet, and these
    with their next token."""
    needed, asked, pairs = set(), set(), set()
    for row, wanted in zip(ids.tolist(), mask.tolist(), strict=True):
        for t, is_wanted in enumerate(wanted):
            if is_wanted:
                needed |= {tuple(row[: n + 1]) for n in range(t + 1)}
                asked.add(tuple(row[: t + 1]))
                pairs.add(tuple(row[: t + 2]))
    return needed, asked, pairs


@given(batch=stream_batches())
def test_every_beginning_is_computed_once_and_nothing_else(batch):
    ids, mask = batch
    needed, asked, pairs = distinct(ids, mask)
    packing = pack(ids, mask)
    assert len(packing.ids) == max(1, len(needed))  # one token where nothing is wanted
    assert (len(packing.wanted), len(packing.pair_rows)) == (max(1, len(asked)), len(pairs))
    assert sum(stretch.queries for stretch in packing.every) == len(packing.ids)
    assert sum(stretch.queries for stretch in packing.asked) == len(packing.wanted)


def scores(model: Qwen3, ids, mask, weights) -> list[torch.Tensor]:
    """logprobs and entropy as the model has them, and the gradient of everything that trains."""
    trained = list(lora_parameters(model).values()) or list(model.parameters())
    logprobs, entropy = model.token_logprobs(ids, mask, 0.7)
    return [logprobs, entropy, *torch.autograd.grad((logprobs * weights).sum(), trained)]


def rounding(found: list, expected: list) -> None:
    for one, other in zip(found, expected, strict=True):
        close(one, other, 1e-5 * float(other.detach().abs().max().clamp(min=1)))


@settings(max_examples=20)
@given(
    config=st.one_of(tiny_configs(), tiny_moe_configs()),
    batch=stream_batches(),
    full=st.booleans(),
    seed=seeds,
)
def test_what_is_shared_or_packed_changes_neither_logprobs_nor_gradients(config, batch, full, seed):
    """Of an adapter, or of every weight: against each stream alone, all logits and log_softmax."""
    model, (ids, mask) = tiny_model(config, seed), batch
    full = full and not config.num_experts  # the router's choices are no function to differentiate
    if not full:
        inject_lora(model, LoRAConfig(2, 4.0))
        randomise_adapter(model, seed)
    model.requires_grad_(True) if full else None
    trained = list(lora_parameters(model).values()) or list(model.parameters())
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    rows = []
    for row, wanted in zip(ids, mask, strict=True):
        everything = (model(row[None])[0, :-1] / 0.7).log_softmax(-1)
        naive = everything.gather(1, row[1:, None]).squeeze(1) * wanted
        rows.append((naive, -(everything.exp() * everything).sum(-1) * wanted))
    logprobs, entropy = (torch.stack(column) for column in zip(*rows, strict=True))
    gradients = torch.autograd.grad((logprobs * weights).sum(), trained)
    rounding(scores(model, ids, mask, weights), [logprobs, entropy, *gradients])


@settings(max_examples=15)
@given(config=tiny_configs(), batch=stream_batches(), seed=seeds)
def test_order_and_split_of_streams_change_neither_logprobs_nor_gradients(config, batch, seed):
    model, (ids, mask) = tiny_model(config, seed), batch
    inject_lora(model, LoRAConfig(2, 4.0))
    randomise_adapter(model, seed)
    weights = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    together = scores(model, ids, mask, weights)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))
    permuted = scores(model, ids[order], mask[order], weights[order])
    assert torch.equal(permuted[0], together[0][order])  # sorted, they are the same
    rounding(permuted[2:], together[2:])
    parts = [part for part in order.tensor_split(2) if len(part)]
    apart = [scores(model, ids[part], mask[part], weights[part]) for part in parts]
    split = torch.cat([part[0] for part in apart])
    rounding([split], [together[0][order]])
    gradients = zip(*(part[2:] for part in apart), strict=True)
    rounding([sum(parts) for parts in gradients], together[2:])


@settings(max_examples=10)
@given(batch=stream_batches(), seed=seeds)
def test_what_no_wanted_token_sees_is_never_looked_at(batch, seed):
    """Nothing but the tokens up to a row's last wanted one: not a bit changes with the rest."""
    model, (ids, mask) = tiny_model(seed=seed), batch
    model.requires_grad_(True)
    other = ids.clone()
    for row, wanted in zip(other, mask, strict=True):
        end = int(wanted.nonzero().max()) + 2 if wanted.any() else 0
        row[end:] = (row[end:] + 1) % 5
    if not mask.any():
        other = ids  # then the very first token stands for all
    weights = torch.ones(mask.shape)
    for one, changed in zip(
        scores(model, ids, mask, weights), scores(model, other, mask, weights), strict=True
    ):
        assert torch.equal(one, changed)


@pytest.mark.parametrize("targets", [("q_proj",), ("experts",)])
@pytest.mark.parametrize("rows", [slice(0, 2), torch.tensor([1])])
def test_adapters_of_some_rows_are_refused(targets, rows):
    """A packed row is a token, and may belong to streams of both."""
    model, lora = tiny_model(tiny_moe_config()), LoRAConfig(2, 4.0, 0.0, targets)
    inject_lora(model, lora)
    tensors = {name: p.detach().clone() for name, p in lora_parameters(model).items()}
    add_adapter(model, "other", lora, tensors)
    with use_adapters(model, [("other", rows)]):
        model(tiny_tokens(model.config, 3, 5))
        with pytest.raises(ValueError, match="score the streams of each adapter by themselves"):
            model.token_logprobs(tiny_tokens(model.config, 3, 5), torch.ones(3, 4))
