"""Many adapters in one batch, and more adapters than memory holds: nobody notices either."""

import asyncio
import json
import shutil

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_rollout import CONFIG, CONTEXT, check, count_computed, play, publish
from tiny import (
    close,
    lora_configs,
    random_adapter,
    randomise_adapter,
    seeds,
    tiny_config,
    tiny_model,
    tiny_moe_config,
    tiny_tokens,
)

from broadcast import read_adapter
from engine import Completion, Request, TorchEngine
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, remove_adapter, use_adapters
from segments import Batch, Stack, use_rows

pytestmark = pytest.mark.filterwarnings("ignore:rank .* is larger")
ADAPTERS = {  # name -> of every rank, scaling and set of targets
    "a": LoRAConfig(rank=2, alpha=4.0),
    "b": LoRAConfig(rank=5, target_modules=("q_proj", "down_proj")),
    "c": LoRAConfig(rank=8, alpha=3.0, target_modules=("k_proj", "up_proj", "down_proj")),
    "d": LoRAConfig(rank=1, target_modules=("v_proj",)),
    "e": LoRAConfig(rank=3, alpha=6.0),
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    for seed, (name, lora) in enumerate(ADAPTERS.items()):
        publish(root / name, lora, seed)
    return {name: root / name for name in ADAPTERS}


@pytest.fixture(scope="module")
def reference(published):
    """A model that holds every adapter, for `check`."""
    model = tiny_model(CONFIG)
    for name, directory in published.items():
        add_adapter(model, name, *read_adapter(directory))
    return model


def make_engine(published, slots=4, max_adapters=None, prefill_tokens=8192) -> TorchEngine:
    engine = TorchEngine(tiny_model(CONFIG), slots, CONTEXT, prefill_tokens, max_adapters)
    for name, directory in published.items():
        engine.add_adapter(name, directory)
    return engine


def in_memory(engine) -> list[str]:
    return [name for name, adapter in engine.registered.items() if adapter.in_memory]


@st.composite
def requests(draw) -> Request:
    """Prompts of three families, of which many are the beginning of others."""
    family = tiny_tokens(CONFIG, 1, 20, seed=draw(st.integers(0, 2)))[0].tolist()
    return Request(
        prompt_ids=family[: draw(st.integers(1, 20))],
        max_new_tokens=draw(st.integers(1, 9)),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        adapter=draw(st.sampled_from([None, *ADAPTERS])),
        seed=draw(seeds),
    )


# --- rows of a batch ------------------------------------------------------------------------------

few = settings(max_examples=12)  # an engine and five adapters each
names_of_rows = st.lists(st.sampled_from([None, "v0", "v1", "v2", "v3", "v4"]), min_size=1)


@few
@given(
    config=st.sampled_from([tiny_config(), tiny_config(attention_bias=True), tiny_moe_config()]),
    loras=st.lists(lora_configs(), min_size=5, max_size=5),
    held=st.lists(st.sets(st.sampled_from(["v0", "v1", "v2", "v3", "v4"])), max_size=4),
    names=names_of_rows,
    T=st.integers(1, 4),
    seed=seeds,
)
@example(  # segments of two lengths, in one product: what comes back is not in the rows' order
    config=tiny_config(),
    loras=[LoRAConfig(rank=2)] * 5,
    held=[{"v0", "v1", "v2"}],
    names=["v0", "v2", "v1", "v2", "v0"],
    T=2,
    seed=0,
)
def test_a_mix_of_adapters_equals_each_row_alone(config, loras, held, names, T, seed):
    """Whatever the stack has held before, and whether it holds the batch's adapters at all."""
    model = tiny_model(config, seed)
    for i, lora in enumerate(loras):
        if config.num_experts:
            targets = {*lora.target_modules} - {"gate_proj", "up_proj", "down_proj"} | {"experts"}
            lora = LoRAConfig(lora.rank, lora.alpha, 0.0, tuple(sorted(targets)))
        add_adapter(model, f"v{i}", lora, random_adapter(model, lora, seed + i))
    stack = Stack(model, torch.float32, torch.device("cpu"))
    for some in held:
        stack.hold(sorted(some))
    ids = tiny_tokens(config, len(names), T, seed)
    with torch.no_grad():
        with use_rows(model, stack, names):
            mixed = model(ids)
        for row, name in enumerate(names):
            with use_adapters(model, [(name, None)] if name else []):
                close(mixed[row], model(ids[row : row + 1])[0])
        assert model.lora_selection.batch is None


def of_lengths(*lengths: int) -> list[str]:
    return [name for name, length in zip("abcdefgh", lengths, strict=False) for _ in range(length)]


def stack_of(names: str) -> Stack:
    model, lora = tiny_model(), LoRAConfig(rank=2, target_modules=("q_proj",))
    for i, name in enumerate(names):
        add_adapter(model, name, lora, random_adapter(model, lora, i))
    stack = Stack(model, torch.float32, torch.device("cpu"))
    stack.hold(names)
    return stack


@pytest.mark.parametrize(
    "lengths, computed, alone",
    [
        ((4, 4, 4, 4), 16, 0),
        ((1, 2, 3, 2), 12, 0),
        ((1, 1, 1, 9), 4, 1),  # padded to 9 it would be 36 rows for 12
        ((9, 1, 1), 4, 1),
        ((9, 9, 1, 1), 36, 0),
        ((16,), None, 0),  # the only one: its slot serves all rows as they stand
    ],
)
def test_padding_never_costs_more_than_it_saves(lengths, computed, alone):
    stack = stack_of("abcd")
    batch = Batch(stack, of_lengths(*lengths))
    assert len(batch.alone) == alone
    assert computed is None or len(batch.rows) == computed


def test_idle_slots_of_a_stack_count_as_padding():
    stack = stack_of("abcdefgh")
    names = [*"abc", "d", "d"]  # all eight slots, padded to two rows, would be 16 for 5
    assert len(Batch(stack, names).rows) == 8


def test_the_stack_changes_only_with_the_adapters_and_by_one_slot_each(monkeypatch):
    model = tiny_model()
    loras = {name: LoRAConfig(rank=2, target_modules=("q_proj",)) for name in "abcdefg"}
    loras["f"] = LoRAConfig(rank=3, target_modules=("q_proj",))
    loras["g"] = LoRAConfig(rank=2, target_modules=("k_proj",))
    for seed, (name, lora) in enumerate(loras.items()):
        add_adapter(model, name, lora, random_adapter(model, lora, seed))
    written, write = [], Stack.write
    monkeypatch.setattr(Stack, "write", lambda *them: (written.append(them[2]), write(*them)))
    stack = Stack(model, torch.float32, torch.device("cpu"))

    def writes(names: str) -> str:
        written.clear()
        stack.hold(names)
        assert set(names) <= set(stack.slots)
        return "".join(written)

    assert writes("abcd") == "abcd"
    assert writes("abcd") == writes("bcd") == writes("ab") == ""  # those that leave cost nothing
    assert writes("bcde") == "e" and "a" not in stack.slots
    assert writes("bcdf") == "bcdf"  # a larger rank: new matrices
    assert writes("bcdg") == "bcdg"  # a layer that none had
    assert writes("b") == "b" and len(stack.slots) == 1  # most slots idle: fewer
    stack.forget("b")
    remove_adapter(model, "b")
    add_adapter(model, "b", loras["b"], random_adapter(model, loras["b"], 99))
    assert writes("b") == "b"  # other weights under a name that was used before


def test_a_slot_keeps_nothing_of_the_adapter_before():
    model, ids = tiny_model(), tiny_tokens(tiny_config(), 2, 4)
    loras = {
        "large": LoRAConfig(rank=8),
        "small": LoRAConfig(rank=2, target_modules=("q_proj", "down_proj")),
        "other": LoRAConfig(rank=3),
    }
    for seed, (name, lora) in enumerate(loras.items()):
        add_adapter(model, name, lora, random_adapter(model, lora, seed))
    stack = Stack(model, torch.float32, torch.device("cpu"))
    with torch.no_grad():
        for names in (["large", "other"], ["small", "other"]):
            stack.hold(names)
            with use_rows(model, stack, names):
                mixed = model(ids)
            for row, name in enumerate(names):
                with use_adapters(model, [(name, None)]):
                    close(mixed[row], model(ids[row : row + 1])[0])
    assert stack.slots == ["small", "other"]


def test_a_mix_leaves_the_gradients_of_training_as_they_were(published):
    model, ids = tiny_model(CONFIG), tiny_tokens(CONFIG, 3, 6)
    inject_lora(model, LoRAConfig(rank=2))
    randomise_adapter(model)

    def gradients():
        model.zero_grad(set_to_none=True)
        model.token_logprobs(ids, torch.ones(3, 5))[0].sum().backward()
        return {name: parameter.grad for name, parameter in lora_parameters(model).items()}

    before = gradients()
    engine = TorchEngine(model, 4, CONTEXT, max_adapters=2)
    for name, directory in published.items():
        engine.add_adapter(name, directory)
    asked = [Request([1, 2, 3], 4, adapter=name, seed=0) for name in [None, *ADAPTERS]]
    play(engine, asked)
    after = gradients()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- more adapters than memory holds --------------------------------------------------------------


@few
@given(
    st.lists(st.tuples(requests(), st.integers(0, 12)), min_size=1, max_size=8),
    st.integers(1, 6),
    st.sampled_from([None, 1, 2, 3]),
    st.sampled_from([1, 16, 8192]),
)
def test_mixes_evictions_and_paging_change_no_sample(
    published, reference, arriving, slots, max_adapters, chunk
):
    engine = make_engine(published, slots, max_adapters, chunk)
    asked = [request for request, _ in arriving]
    step = engine.step

    def watched():
        step()
        live = {stream.request.adapter for stream in engine.live if stream} - {None}
        assert live <= set(in_memory(engine))
        assert len(in_memory(engine)) <= (max_adapters or len(ADAPTERS))

    engine.step = watched
    for delays in ([delay for _, delay in arriving], None):  # the second time with what is cached
        for request, completion in zip(asked, play(engine, asked, delays), strict=True):
            check(reference, request, completion)


def test_paging_is_bit_for_bit_and_keeps_what_is_cached(published):
    bounded, free = make_engine(published, 8, 1), make_engine(published, 8)
    counts = {engine: count_computed(engine) for engine in (bounded, free)}
    streams = {name: [*range(1, 9)] for name in ADAPTERS}
    for turn in range(3):
        for name in ADAPTERS:
            request = Request(streams[name], 3, adapter=name, seed=turn)
            answers = [play(engine, [request])[0] for engine in (bounded, free)]
            assert answers[0] == answers[1]
            assert in_memory(bounded) == [name]
            streams[name] = streams[name] + answers[0].token_ids + [5]
    assert counts[bounded] == counts[free]  # each turn computed its new tokens alone


def test_the_adapter_used_least_recently_leaves_and_one_with_live_requests_never(
    published, reference
):
    engine = make_engine({name: published[name] for name in "abc"}, max_adapters=2)
    assert in_memory(engine) == ["b", "c"]
    play(engine, [Request([1], 1, adapter="b", seed=0)])
    play(engine, [Request([1], 1, adapter="a", seed=0)])
    assert in_memory(engine) == ["a", "b"]  # c was never used
    asked = [
        Request([1, 2], length, adapter=name, seed=1)
        for name, length in (("a", 8), ("b", 20), ("c", 2), ("a", 2))
    ]
    ended = []

    async def everyone():
        async def one(number, request):
            completion = await engine.generate(request)
            ended.append(number)
            return completion

        tasks = [asyncio.create_task(one(i, request)) for i, request in enumerate(asked)]
        for _ in range(5):
            await asyncio.sleep(0)
        engine.add_adapter("d", published["d"])  # no room, so on disk for now
        assert in_memory(engine) == ["a", "b"] and engine.adapters == ["a", "b", "c", "d"]
        return await asyncio.gather(*tasks)

    for request, completion in zip(asked, asyncio.run(everyone()), strict=True):
        check(reference, request, completion)
    assert ended == [0, 2, 3, 1]  # c waited for a's end, and the newer request of a for c's
    request = Request([1], 2, adapter="d", seed=0)
    check(reference, request, play(engine, [request])[0])


@pytest.mark.parametrize("damage", ["gone", "changed", "cut off"])
def test_a_directory_that_is_no_longer_the_same_fails_its_own_requests_alone(
    published, reference, tmp_path, damage
):
    directory = shutil.copytree(published["a"], tmp_path / "a")
    engine = make_engine({"a": directory, "b": published["b"]}, max_adapters=1)
    if damage == "gone":
        shutil.rmtree(directory)
    elif damage == "changed":
        settings = json.loads((directory / "adapter_config.json").read_text())
        settings["lora_alpha"] += 1
        (directory / "adapter_config.json").write_text(json.dumps(settings))
    else:
        file = directory / "adapter_model.safetensors"
        file.write_bytes(file.read_bytes()[:-1])
    message = "has changed since" if damage == "changed" else "'a' was paged out and cannot be read"
    asked = [Request([1, 2], 5, adapter=name, seed=0) for name in ("b", "a", "b", None)]

    async def everyone():
        return await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)

    left = []
    page_out = engine.page_out
    engine.page_out = lambda name: left.append(name) or page_out(name)
    good, bad, also_good, base = asyncio.run(everyone())
    assert isinstance(bad, RuntimeError) and message in str(bad) and str(directory) in str(bad)
    for request, completion in ((asked[0], good), (asked[2], also_good), (asked[3], base)):
        check(reference, request, completion)
    assert in_memory(engine) == ["b"] and not left  # for what could not be read nobody leaves
    engine.remove_adapter("a")
    engine.add_adapter("a", published["a"])
    check(reference, asked[1], play(engine, [asked[1]])[0])


@few
@given(
    st.lists(requests(), min_size=1, max_size=4),
    st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(["a", "c", "e"])), max_size=8),
    st.sampled_from([None, 2]),
)
def test_adapters_that_come_and_go_leave_requests_in_flight_as_they_are(
    published, reference, asked, changes, max_adapters
):
    """Names x, y, z are added, used and removed, again and again with other weights."""
    engine = make_engine(published, 6, max_adapters)

    async def change():
        answers = []
        for name, source in changes:
            if name in engine.adapters:
                engine.remove_adapter(name)
            engine.add_adapter(name, published[source])
            request = Request([1, 2, 3], 2, adapter=name, seed=len(answers))
            answers.append((source, await engine.generate(request)))
        return answers

    async def everyone():
        return await asyncio.gather(change(), *map(engine.generate, asked))

    others, *completions = asyncio.run(everyone())
    for request, completion in zip(asked, completions, strict=True):
        check(reference, request, completion)
    for seed, (source, completion) in enumerate(others):
        assert isinstance(completion, Completion)
        check(reference, Request([1, 2, 3], 2, adapter=source, seed=seed), completion)


def test_what_would_fail_later_is_refused_when_it_is_added(published):
    with pytest.raises(ValueError, match="max_adapters must be at least 1, not 0"):
        make_engine(published, max_adapters=0)
    engine = make_engine(published, max_adapters=1)
    for name in ("a", "e"):  # on disk, and in memory
        with pytest.raises(ValueError, match="there already"):
            engine.add_adapter(name, published[name])
    with pytest.raises(ValueError, match="cannot name"):
        engine.add_adapter("a.b", published["a"])
    other = TorchEngine(tiny_model(tiny_config(hidden_size=16)), 2, CONTEXT, max_adapters=1)
    with pytest.raises(ValueError, match="must have shape"):
        other.add_adapter("a", published["a"])
    assert other.adapters == [] and engine.adapters == list(ADAPTERS)
