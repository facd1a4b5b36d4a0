"""VLLMEngine, the client of vLLM servers: it samples what the engine behind a server samples, and
finds out a server that does not.

    test ── VLLMEngine ── HTTP ──► Recorder, in a thread with its own event loop: tools/serve.py's
                                   Server, which writes down every call and may spoil an answer

At the end, runs of train.py on such servers: honest ones, and ones that cheat.
"""

import asyncio
import dataclasses
import errno
import itertools
import json
import os
import shutil
import socket
import threading
import time
import zlib
from pathlib import Path

import aiohttp
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import randomise_adapter, seeds, tiny_config, tiny_model, tiny_tokens

import rollout
import train
from broadcast import CONFIG_FILE, TENSOR_FILE, list_published, save_adapter
from chat import load_tokenizer
from client import call
from config import Config, to_toml
from engine import Completion, Request, TorchEngine
from environments import Task
from lora import LoRAConfig, inject_lora, use_adapters
from model import Qwen3
from pipeline import cancel_others
from rollout import VLLMEngine, derive_seed, run_groups
from tools.serve import Server
from tools.serve import main as serve_main
from update import MISMATCH_BOUND

CONFIG = tiny_config()
CONTEXT = 40
ROOT = Path(train.__file__).parent
BASE, WIKI = ROOT / "assets" / "tiny-qwen3", ROOT / "assets" / "tiny-wiki"
COMPLETE, MODELS = "POST /v1/completions", "GET /v1/models"
LOAD, UNLOAD = "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"


# --- servers in a thread --------------------------------------------------------------------------


class Recorder(Server):
    """Writes down every call, then answers it as `spoil` says, or honestly where that says None."""

    def __init__(self, engine, name="base", calls=None, spoil=None):
        super().__init__(engine, name)
        self.calls = [] if calls is None else calls  # (url, route, body), as they came in
        self.spoil = spoil

    async def answer(self, route, body):
        content = json.loads(body) if body else {}
        self.calls.append((self.url, route, content))
        spoiled = await self.spoil(route, content) if self.spoil else None
        return spoiled or await super().answer(route, body)

    def bodies(self, route: str) -> list[dict]:
        return [body for _, called, body in self.calls if called == route]


@pytest.fixture(scope="module")
def home():
    """The event loop of the servers, in its thread: home(coroutine) waits for a result from it."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def wait(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(60)

    yield wait
    wait(cancel_others())
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def start(home, engine=None, **options) -> Recorder:
    server = Recorder(engine or TorchEngine(tiny_model(CONFIG), 4, CONTEXT), **options)
    home(server.start())
    return server


@pytest.fixture
def serve(home):
    """Starts servers of the tiny model, which stop listening after the test."""
    started = []

    def one(engine=None, **options) -> Recorder:
        started.append(start(home, engine, **options))
        return started[-1]

    yield one

    async def close():
        for server in started:
            server.listener.close()

    home(close())


def client_of(*servers, **options) -> VLLMEngine:
    options = {"max_length": CONTEXT, "timeout": 20.0} | options
    return VLLMEngine(tiny_model(CONFIG), [server.url for server in servers], **options)


def play(engine, requests) -> list[Completion]:
    """All requests at once; then the client's connections go, with the event loop."""

    async def everyone():
        try:
            return await asyncio.gather(*map(engine.generate, requests))
        finally:
            if isinstance(engine, VLLMEngine) and engine.session:
                await engine.session.close()

    return asyncio.run(everyone())


def unused_url() -> str:
    """Where nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def publish(directory: Path, lora: LoRAConfig, seed: int) -> Path:
    model = tiny_model(CONFIG)
    inject_lora(model, lora)
    randomise_adapter(model, seed)
    return save_adapter(model, lora, directory)


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Two adapters of different rank, scale and targets."""
    root = tmp_path_factory.mktemp("published")
    return {
        "a": publish(root / "a", LoRAConfig(rank=2, alpha=4.0), seed=1),
        "b": publish(root / "b", LoRAConfig(5, target_modules=("q_proj", "down_proj")), seed=2),
    }


@pytest.fixture
def fresh(tmp_path, published):
    """Another directory of adapter a with each call, as each version has one."""
    count = iter(range(1000))

    def copy() -> Path:
        return Path(shutil.copytree(published["a"], tmp_path / f"copy-{next(count)}"))

    return copy


# --- what is sampled ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(home, published):
    """A client with a server behind it, and an engine like the server's."""
    client, engine = client_of(start(home)), TorchEngine(tiny_model(CONFIG), 4, CONTEXT)
    for name, directory in published.items():
        client.add_adapter(name, directory)
        engine.add_adapter(name, directory)
    return client, engine


@st.composite
def requests(draw) -> Request:
    prompt = tiny_tokens(CONFIG, 1, CONTEXT, seed=draw(st.integers(0, 2)))[0].tolist()
    return Request(
        prompt_ids=prompt[: draw(st.integers(1, CONTEXT - 1))],
        max_new_tokens=draw(st.integers(1, 8)),  # beyond the context too
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0])),
        adapter=draw(st.sampled_from(["a", "b"])),
        stop_token_ids=draw(st.sampled_from([(), (3,), (3, 7, 11)])),
        seed=draw(seeds),
    )


# The same examples each time: a draw that lies on a boundary may differ with the batch.
@settings(max_examples=10, derandomize=True)
@given(st.lists(requests(), min_size=1, max_size=6))
def test_the_client_samples_what_the_engine_does(pair, asked):
    """Of all requests at once through the server, each is as if alone in the engine."""
    client, engine = pair
    for request, got in zip(asked, play(client, asked), strict=True):
        seed = derive_seed(request.seed, len(request.prompt_ids))
        (wanted,) = play(engine, [dataclasses.replace(request, seed=seed)])
        assert (got.token_ids, got.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=1e-5)


def test_turns_of_an_episode_draw_differently_and_unseeded_requests_too(serve):
    server = serve()
    client = client_of(server)
    play(client, [Request([1] * length, 1, seed=4) for length in (1, 2, 3)])
    play(client, [Request([1], 1), Request([1], 1)])
    assert len({body["seed"] for body in server.bodies(COMPLETE)}) == 5
    play(client, [Request([1], 1, seed=2**64 - 1), Request([1], 1, seed=-5)])
    assert all(0 <= body["seed"] < 2**63 for body in server.bodies(COMPLETE))  # what JSON holds


# --- what a request says --------------------------------------------------------------------------


@settings(max_examples=5)
@given(requests())
def test_a_request_asks_for_the_full_distribution_under_the_adapters_name(pair, request):
    client, _ = pair
    sent = []

    def post(self, url, **options):
        sent.append((url, options["json"]))
        raise TimeoutError("enough")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aiohttp.ClientSession, "post", post)
        with pytest.raises(RuntimeError, match="no answer"):
            play(client, [request])
    assert sent == [
        (
            f"{client.urls[0]}/v1/completions",
            {
                "model": request.adapter,
                "prompt": request.prompt_ids,
                "max_tokens": min(request.max_new_tokens, CONTEXT - len(request.prompt_ids)),
                "temperature": request.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "seed": derive_seed(request.seed, len(request.prompt_ids)),
                "stop_token_ids": list(request.stop_token_ids),
                "ignore_eos": True,
                "logprobs": 0,
                "return_token_ids": True,
            },
        )
    ]


def test_the_base_answers_by_its_own_name_and_only_while_no_adapter_lives(serve, fresh):
    server = serve(name="some/base")
    client = client_of(server)
    play(client, [Request([1], 1, seed=0)])
    assert server.bodies(COMPLETE)[0]["model"] == "some/base"
    client.add_adapter("v0", fresh())
    with pytest.raises(ValueError, match=r"no adapter named None; the servers hold \['v0'\]"):
        play(client, [Request([1], 1, seed=0)])
    with pytest.raises(ValueError, match="no adapter named 'v1'"):
        play(client, [Request([1], 1, adapter="v1", seed=0)])
    client.remove_adapter("v0")
    play(client, [Request([1], 1, seed=0)])
    assert [body["model"] for body in server.bodies(COMPLETE)] == ["some/base"] * 2


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"prompt_ids": []}, "prompt is empty"),
        ({"prompt_ids": [23]}, "token id 23 is outside the vocabulary"),
        ({"prompt_ids": [1] * CONTEXT}, "does not fit the context of 40"),
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ({"temperature": float("nan")}, "temperature must be"),
        ({"temperature": True}, "temperature must be a number, not True"),
        ({"max_new_tokens": 1.5}, "max_new_tokens: 1.5 is no integer"),
        ({"max_new_tokens": True}, "max_new_tokens: True is no integer"),
        ({"prompt_ids": [1.7, 2]}, "prompt_ids: 1.7 is no integer"),
        ({"stop_token_ids": (1.0,)}, "stop_token_ids: 1.0 is no integer"),
        ({"seed": 1.5}, "seed: 1.5 is no integer"),
        ({"temperature": 10**400}, "temperature must be"),
        ({"stop_token_ids": (2**70,)}, "token id 1180591620717411303424 is outside"),
    ],
)
def test_what_no_engine_serves_is_refused_as_the_embedded_one_refuses_it(pair, changes, message):
    request = Request(**{"prompt_ids": [1], "max_new_tokens": 1, "adapter": "a"} | changes)
    for engine in pair:
        with pytest.raises(ValueError, match=message):
            play(engine, [request])


# --- several servers ------------------------------------------------------------------------------


def test_a_version_is_everywhere_before_a_request_names_it(serve, fresh):
    calls = []

    async def slow(route, body):
        if route == LOAD:
            await asyncio.sleep(0.1)

    servers = [serve(calls=calls, spoil=spoil) for spoil in (None, slow, None)]
    client = client_of(*servers)
    before = None
    for version in ("v0", "v1", "v2"):
        client.add_adapter(version, fresh())
        if before:
            client.remove_adapter(before)
        play(client, [Request([1, 2], 1, adapter=version, seed=seed) for seed in range(12)])
        before = version
    everywhere = {server.url for server in servers}
    for version in ("v0", "v1", "v2"):
        when = {route: [] for route in (LOAD, COMPLETE, UNLOAD)}
        for place, (url, route, body) in enumerate(calls):
            if version in (body.get("lora_name"), body.get("model")):
                when[route].append((place, url))
        assert {url for _, url in when[LOAD]} == everywhere and len(when[LOAD]) == 3
        urls = [url for _, url in when[COMPLETE]]
        assert [urls.count(server.url) for server in servers] == [4, 4, 4]  # spread
        assert max(when[LOAD]) < min(when[COMPLETE])
        if version != "v2":
            assert {url for _, url in when[UNLOAD]} == everywhere
            assert max(when[COMPLETE]) < min(when[UNLOAD])
    # Never in place: vLLM would read the files anew on every step.
    assert all(set(body) == {"lora_name", "lora_path"} for _, r, body in calls if r == LOAD)
    assert all(list(server.directories) == ["v2"] for server in servers)


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


class Arithmetic:
    """An environment of one tool."""

    def prompt(self, task):
        return [{"role": "user", "content": task.question}]

    @property
    def tools(self):
        def add(a: int, b: int) -> str:
            """Adds two numbers."""
            return str(a + b)

        return [add]

    def reward(self, task, messages):
        return float(messages[-1]["content"] == task.answer)


def test_all_turns_of_an_episode_go_to_one_server(serve):
    tokenizer, calls = load_tokenizer(BASE), []

    async def scripted(route, body):
        """Two calls of the tool, whatever was asked, then the answer."""
        if route == COMPLETE:
            turns = tokenizer.decode(body["prompt"]).count("<tool_response>")
            ids = [*tokenizer.encode(CALL if turns < 2 else "3"), tokenizer.end_of_turn_id]
            choice = {"token_ids": ids, "logprobs": {"token_logprobs": [-0.5] * len(ids)}}
            return 200, {"choices": [choice | {"finish_reason": "stop"}]}

    wide = tiny_config(vocab_size=json.loads((BASE / "config.json").read_text())["vocab_size"])
    engine = TorchEngine(tiny_model(tiny_config(max_position_embeddings=1024)), 1, 1000)
    servers = [serve(engine, calls=calls, spoil=scripted) for _ in range(3)]
    client = VLLMEngine(tiny_model(wide), [server.url for server in servers], 1000)
    tasks = [Task(str(number), f"What is {number}?", "3") for number in range(4)]
    options = {"adapter": None, "version": 0, "temperature": 1.0, "seed": 0, "step": 0}
    groups = asyncio.run(
        run_groups(client, tokenizer, Arithmetic(), tasks, 4, max_new_tokens=200, **options)
    )
    assert all((e.turns, e.reward) == (3, 1.0) for group in groups for e in group)
    sent = [(url, body["prompt"]) for url, route, body in calls if route == COMPLETE]
    assert len(sent) == 3 * 16 and {url for url, _ in sent} == {server.url for server in servers}
    for group in groups:
        for episode in group:
            stream = episode.token_ids
            turns = {url: 0 for url in client.urls}
            for url, prompt in sent:
                turns[url] += prompt == stream[: len(prompt)]
            # The episodes of a group say the same here, so a server has whole multiples of three.
            assert all(count % 3 == 0 for count in turns.values()) and sum(turns.values()) == 12


def test_a_server_holds_no_more_requests_than_in_flight(serve):
    inside, most = {}, {}

    def counting(number):
        async def spoil(route, body):
            if route == COMPLETE:
                inside[number] = inside.get(number, 0) + 1
                most[number] = max(most.get(number, 0), inside[number])
                await asyncio.sleep(0.03)
                inside[number] -= 1

        return spoil

    servers = [serve(spoil=counting(number)) for number in range(2)]
    client = client_of(*servers, in_flight=3)
    play(client, [Request([1], 1, seed=seed) for seed in range(16)])
    assert most == {0: 3, 1: 3}


# --- retries --------------------------------------------------------------------------------------


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("client.RETRY_PAUSES", (0.001, 0.002, 0.003, 0.004))


def failing(times: int, how):
    """The first `times` completions are answered by how()."""
    left = iter(range(times))

    async def spoil(route, body):
        return how() if route == COMPLETE and next(left, None) is not None else None

    return spoil


def reset():
    raise ConnectionResetError


def refuses(status: int, message="no"):
    return lambda: (status, {"error": {"message": message}})


@pytest.mark.parametrize("how", [*map(refuses, (429, 502, 503, 504)), reset])
@pytest.mark.parametrize("times", [1, 4])
def test_what_may_heal_is_asked_again(serve, impatient, how, times):
    server = serve(spoil=failing(times, how))
    client = client_of(server)
    (completion,) = play(client, [Request([1, 2], 3, seed=0)])
    asked = server.bodies(COMPLETE)
    assert len(asked) == times + 1 and all(body == asked[0] for body in asked)
    seed = derive_seed(0, 2)
    (wanted,) = play(TorchEngine(tiny_model(CONFIG), 1, CONTEXT), [Request([1, 2], 3, seed=seed)])
    assert completion.token_ids == wanted.token_ids


@pytest.mark.parametrize(
    "how, times, message",
    [
        (refuses(503, "warming up"), 5, "answers 503: warming up"),
        (reset, 5, r"failed \(ServerDisconnectedError.*; its last words$"),
        (refuses(400, "bad seed"), 1, "answers 400: bad seed"),
        (refuses(404, "The model `v0` does not exist."), 1, "answers 404: The model `v0`"),
        (refuses(500, "no memory"), 1, "answers 500: no memory"),
        (lambda: (500, {"detail": "no memory"}), 1, "answers 500: .*no memory"),
    ],
)
def test_what_stays_broken_is_an_error_that_names_the_server(serve, impatient, how, times, message):
    server = serve(spoil=failing(99, how))
    client = client_of(server, last_words=lambda: "its last words")
    with pytest.raises(RuntimeError, match=message) as caught:
        play(client, [Request([1], 1, seed=0)])
    assert server.url in str(caught.value) and len(server.bodies(COMPLETE)) == times
    assert not any(client.requests.values())


def test_a_server_that_is_gone_is_an_error_that_names_it(home, serve, impatient):
    server = serve()
    client = client_of(server, last_words=lambda: "its last words")

    async def stop():
        server.listener.close()

    home(stop())
    with pytest.raises(
        RuntimeError, match="failed .ClientConnectorError.*; its last words$"
    ) as caught:
        play(client, [Request([1], 1, seed=0)])
    assert server.url in str(caught.value)


async def hang(route, body):
    if route in (COMPLETE, LOAD):
        await asyncio.sleep(30)


def test_a_server_that_hangs_is_waited_for_once(serve, impatient, fresh):
    server = serve(spoil=hang)
    client = client_of(server, timeout=0.5)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"{server.url} failed .no answer in 0.5 s, so it hangs"):
        play(client, [Request([1], 1, seed=0)])
    with pytest.raises(RuntimeError, match=f"{server.url} failed .no answer in 0.5 s, so it hangs"):
        client.add_adapter("v0", fresh())
    assert time.monotonic() - started < 10 and len(server.bodies(COMPLETE)) == 1
    assert client.adapters == []


# --- adapters -------------------------------------------------------------------------------------


def rewrite(change):
    """Damages the tensors of an adapter's directory."""

    def damage(directory: Path) -> None:
        file = directory / TENSOR_FILE
        safetensors.torch.save_file(change(safetensors.torch.load_file(file)), file)

    return damage


def configure(**fields):
    def damage(directory: Path) -> None:
        file = directory / CONFIG_FILE
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return damage


def first(tensors: dict, matrix: str) -> str:
    return next(name for name in sorted(tensors) if f".lora_{matrix}." in name)


def renamed(old: str, new: str):
    return rewrite(lambda tensors: {name.replace(old, new): t for name, t in tensors.items()})


def other_model(directory: Path) -> None:
    """A layer more than the served model has."""
    shutil.rmtree(directory)
    model = tiny_model(tiny_config(num_hidden_layers=3))
    inject_lora(model, LoRAConfig(rank=2))
    save_adapter(model, LoRAConfig(rank=2), directory)


@pytest.mark.parametrize(
    "damage, message",
    [
        (renamed("base_model.model.model.", "base_model.model."), "the model has no projection"),
        (renamed("base_model.model.", ""), "is not base_model.model.<layer>"),
        (renamed("model.layers", "model.language_model.layers"), "has no projection"),
        (renamed("layers.1", "layers.7"), "has no projection"),
        (
            rewrite(lambda t: {n: x for n, x in t.items() if n != first(t, "B")}),
            "lacks its partner",
        ),
        (configure(r=1), "rank r asks for"),
        (configure(r=4, lora_alpha=8), "rank r asks for"),
        (
            rewrite(lambda t: t | {first(t, "A"): t[first(t, "A")][:, 1:].clone()}),
            "must have shape",
        ),
        (rewrite(lambda t: t | {first(t, "B"): t[first(t, "B")][1:].clone()}), "must have shape"),
        (rewrite(lambda t: t | {first(t, "B"): t[first(t, "B")] * float("nan")}), "NaN"),
        (rewrite(lambda t: t | {first(t, "A"): t[first(t, "A")] / 0}), "infinity"),
        (renamed("q_proj", "z_proj"), "target_modules does not agree"),
        (configure(target_modules=["q_proj"]), "target_modules does not agree"),
        (configure(use_rslora=True), "use_rslora"),
        (other_model, "has no projection 'model.layers.2"),
        (lambda directory: (directory / TENSOR_FILE).unlink(), "no such file"),
        (lambda directory: (directory / TENSOR_FILE).write_bytes(b"cut"), "cut off"),
    ],
)
def test_what_vllm_would_serve_wrongly_never_reaches_a_server(
    pair, fresh, monkeypatch, damage, message
):
    client, _ = pair
    directory = fresh()
    damage(directory)
    monkeypatch.setattr(client, "call", None)
    with pytest.raises(ValueError, match=message):
        client.add_adapter("damaged", directory)
    assert client.adapters == ["a", "b"] and "damaged" not in client.used


def test_no_name_and_no_directory_serves_twice(serve, fresh, monkeypatch):
    server = serve(name="some/base")
    client = client_of(server)
    directory = fresh()
    monkeypatch.chdir(directory.parent)
    client.add_adapter("v0", directory)
    for _ in range(2):  # while it lives, and after its removal
        for again in (("v0", fresh()), ("v1", directory), ("v1", directory.name)):
            with pytest.raises(ValueError, match="used before"):
                client.add_adapter(*again)
        if client.adapters:
            client.remove_adapter("v0")
    with pytest.raises(ValueError, match="used before"):
        client.add_adapter("some/base", fresh())
    client.add_adapter("v1", fresh().name)  # a relative path, which a server would read elsewhere
    assert all(Path(body["lora_path"]).is_absolute() for body in server.bodies(LOAD))
    assert [body["lora_name"] for body in server.bodies(LOAD)] == ["v0", "v1"]


def test_half_a_load_is_no_version_and_is_cleaned_up(serve, fresh):
    async def small(route, body):
        if route == LOAD:
            return 500, {"error": {"message": "LoRA rank 2 is greater than max_lora_rank 1."}}

    servers = [serve(), serve(spoil=small)]
    client = client_of(*servers)
    with pytest.raises(RuntimeError, match="start the server with a larger --max-lora-rank") as e:
        client.add_adapter("v0", fresh())
    assert servers[1].url in str(e.value)
    assert client.adapters == [] and list(servers[0].directories) == ["v0"]
    with pytest.raises(ValueError, match="no adapter named 'v0'"):
        play(client, [Request([1], 1, adapter="v0", seed=0)])
    asyncio.run(client.close())
    assert not servers[0].directories


def test_removing_waits_for_every_request_also_those_without_room(serve, fresh):
    servers = [serve(), serve()]
    client = client_of(*servers, in_flight=1)
    client.add_adapter("v0", fresh())

    async def scenario():
        requests = [Request([1], 20, adapter="v0", seed=0) for _ in range(3)]
        tasks = [asyncio.create_task(client.generate(request)) for request in requests]
        while not servers[0].bodies(COMPLETE):
            with pytest.raises(RuntimeError, match="'v0' is in use by 3 unfinished"):
                await asyncio.sleep(0.001)
                client.remove_adapter("v0")
        tasks[1].cancel()  # waits for room
        await asyncio.gather(tasks[0], tasks[2])
        await asyncio.gather(tasks[1], return_exceptions=True)
        client.remove_adapter("v0")

    asyncio.run(scenario())
    assert client.adapters == [] and not any(server.directories for server in servers)
    with pytest.raises(ValueError, match="no adapter named 'v0'"):  # as TorchEngine says it
        client.remove_adapter("v0")
    assert all(server.bodies(UNLOAD)[1:] == [{"lora_name": "v0"}] for server in servers)


def test_a_cancelled_request_is_no_longer_in_flight(serve, fresh):
    server = serve(spoil=hang)

    async def scenario():
        tasks = [asyncio.create_task(client.generate(Request([1], 5, seed=0))) for _ in range(3)]
        while not server.bodies(COMPLETE):
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert not any(client.requests.values())
        server.spoil = None
        await client.generate(Request([1], 5, seed=0))  # there is room

    client = client_of(server, in_flight=1)
    asyncio.run(scenario())


def test_unloading_what_is_not_there_is_no_error_but_a_refusal_is(serve, fresh):
    servers = [serve(), serve()]
    client = client_of(*servers)
    client.add_adapter("v0", fresh())
    client.add_adapter("v1", fresh())
    del servers[0].directories["v0"]  # as after a restart
    client.remove_adapter("v0")
    assert [list(server.directories) for server in servers] == [["v1"], ["v1"]]

    async def refusing(route, body):
        return (500, {"error": {"message": "busy"}}) if route == UNLOAD else None

    servers[0].spoil = refusing
    with pytest.raises(RuntimeError, match=f"{servers[0].url} did not unload v1: busy"):
        client.remove_adapter("v1")


def test_forget_unloads_the_names_of_a_run_on_every_server(serve, fresh):
    servers = [serve(), serve(), serve()]
    for number, names in enumerate((["ab-1-0", "ab-1-1", "abc-1-0"], ["ab-1-0"], ["c-ab-1"])):
        for name in names:
            client_of(servers[number]).add_adapter(name, fresh())
    client = client_of(*servers)
    assert client.forget("ab-") == ["ab-1-0", "ab-1-1"]
    assert [list(server.directories) for server in servers] == [["abc-1-0"], [], ["c-ab-1"]]
    assert client.forget("ab-") == []
    servers[1].spoil = says(MODELS, 200, {"object": "list"})
    with pytest.raises(RuntimeError, match=f"{servers[1].url} answers 200, but not as vLLM does"):
        client.forget("ab-")


def test_closing_leaves_nothing_on_the_servers_and_never_fails(home, serve, fresh, capsys):
    async def reject(route, body):
        return (500, {"error": {"message": "busy"}}) if route == UNLOAD else None

    servers = [serve() for _ in range(4)]
    client = client_of(*servers, timeout=5.0)
    client.add_adapter("v0", fresh())
    client.add_adapter("v1", fresh())
    client_of(servers[3]).add_adapter("somebody-else's", fresh())
    servers[1].spoil = reject

    async def stop():
        servers[0].listener.close()

    home(stop())

    async def scenario():
        await client.generate(Request([1], 1, adapter="v0", seed=3))
        await client.close()

    asyncio.run(scenario())
    assert list(servers[2].directories) == [] and list(servers[3].directories) == [
        "somebody-else's"
    ]
    # Also what a server refused, or one that is gone could not be asked, is tried to the last.
    assert [body["lora_name"] for body in servers[1].bodies(UNLOAD)[1:]] == ["v0", "v1"]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 4
    for line, (name, server) in zip(
        said, itertools.product(("v0", "v1"), servers[:2]), strict=True
    ):
        assert line.startswith(f"{name} may stay at {server.url}: ")
    assert all("did not unload" in line and "busy" in line for line in said[1::2])


# --- servers that are none ------------------------------------------------------------------------


def says(route_of_interest: str, status: int, content):
    async def spoil(route, body):
        return (status, content) if route == route_of_interest else None

    return spoil


@pytest.mark.parametrize(
    "spoil, message",
    [
        (says(MODELS, 404, {"detail": "Not Found"}), "answers 404, but not as vLLM does"),
        (says(MODELS, 200, {"models": []}), "answers 200, but not as vLLM does"),
        (says(MODELS, 200, {"data": []}), "not as vLLM does"),
        (says(MODELS, 200, {"data": ["a"]}), "not as vLLM does"),
        (says(MODELS, 200, {"data": [{"id": "gpt"}]}), "not as vLLM does"),
        (says(MODELS, 200, {"data": [{"id": "x", "max_model_len": None}]}), "not as vLLM does"),
        (says(MODELS, 200, {"data": [{"id": "x", "max_model_len": 9}] * 2}), "not as vLLM does"),
        (says(MODELS, 200, [1]), "not as vLLM does"),
        (says(MODELS, 200, "<html>"), "not as vLLM does"),
        (says(UNLOAD, 404, {"detail": "Not Found"}), "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"),
    ],
)
def test_what_is_no_server_for_a_run_is_found_at_once(serve, spoil, message):
    server = serve(spoil=spoil)
    with pytest.raises(RuntimeError, match=message) as caught:
        client_of(serve(), server)
    assert server.url in str(caught.value) and "\n" not in str(caught.value)


def test_a_web_page_is_no_server(home):
    async def converse(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        page = b"<html>hello</html>"
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(page), page))
        await writer.drain()
        writer.close()

    listener = home(asyncio.start_server(converse, "127.0.0.1", 0))
    url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    with pytest.raises(RuntimeError, match=f"{url} answers 200, but not as vLLM does"):
        VLLMEngine(tiny_model(CONFIG), [url], CONTEXT)


def test_a_server_whose_context_is_too_short_is_found_at_once(serve):
    server = serve()
    with pytest.raises(RuntimeError, match="holds 40 tokens, an episode may have 41.*--max-model"):
        client_of(server, max_length=CONTEXT + 1)
    assert client_of(server).max_length == CONTEXT


@pytest.mark.parametrize(
    "url",
    ["localhost:8000", "http://", "ftp://x", "http://[::1", "", "x", "http://127.0.0.1:99999"],
)
def test_what_is_no_url_is_a_value_error(url):
    with pytest.raises(ValueError, match="is no URL of a server"):
        VLLMEngine(tiny_model(CONFIG), [url])


def test_urls_and_their_number(serve):
    url = unused_url()
    with pytest.raises(RuntimeError, match=f"{url} failed .ConnectionRefusedError.*see its log"):
        VLLMEngine(tiny_model(CONFIG), [url])
    with pytest.raises(ValueError, match="no server"):
        VLLMEngine(tiny_model(CONFIG), [])
    server = serve()
    urls = [f"{server.url}{end}" for end in ("", "/", "/v1", "/v1/")]
    for written in urls:
        assert VLLMEngine(tiny_model(CONFIG), [written], CONTEXT).urls == [server.url]
        # It would be asked to load everything twice, and refuse.
        with pytest.raises(ValueError, match=f"named twice: {server.url}, {server.url}"):
            VLLMEngine(tiny_model(CONFIG), [urls[0], written], CONTEXT)


@pytest.mark.parametrize("port", [-1, 2**16])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ValueError, match=f"--port must be in 0..65535, not {port}"):
        serve_main("some/model", port=port)


HEALTH = b"GET /health HTTP/1.1\r\n"


@pytest.mark.parametrize(
    "sent, status",
    [
        (HEALTH + b"Content-Length: -5\r\n\r\n", 400),
        (HEALTH + b"Content-Length: abc\r\n\r\n", 400),
        (HEALTH + b"X: " + b"x" * 100_000 + b"\r\n\r\n", 431),
        (HEALTH + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n", 411),
        (HEALTH + b"content-length:2\r\n\r\n{}", 200),
    ],
)
def test_a_request_has_one_answer_even_if_its_end_cannot_be_told(serve, sent, status):
    server = serve()
    with socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) as visitor:
        visitor.settimeout(20)
        visitor.sendall(sent)
        if status == 200:  # and the connection serves another
            visitor.shutdown(socket.SHUT_WR)
        answers = b"".join(iter(lambda: visitor.recv(4096), b""))
    assert answers.startswith(f"HTTP/1.1 {status} ".encode()) and answers.count(b"HTTP/1.1") == 1
    assert len(server.calls) == (status == 200)


@pytest.mark.parametrize(
    "route, body, message",
    [
        (COMPLETE, [], "the body must be a JSON object"),
        (COMPLETE, {}, "'model' is missing"),
        (COMPLETE, {"model": 3}, "model must be a string"),
        (COMPLETE, {"model": "base", "prompt": [1], "max_tokens": 1, "n": 2}, "n 1"),
        (LOAD, {"lora_name": "a"}, "'lora_path' is missing"),
        (LOAD, {"lora_name": 3, "lora_path": 4}, "lora_name must be a string"),
        (UNLOAD, {"lora_name": []}, "lora_name must be a string"),
    ],
)
def test_a_body_that_asks_for_nothing_is_refused_by_its_field(serve, route, body, message):
    answer = call(f"{serve().url}{route.removeprefix('POST ')}", body)
    assert answer.status == 400 and message in answer.json()["error"]["message"]


def test_a_server_by_two_spellings_is_guessed_when_it_refuses_the_second(serve, fresh):
    server = serve()
    other = server.url.replace("127.0.0.1", "localhost")
    client = VLLMEngine(tiny_model(CONFIG), [server.url, other], CONTEXT)
    with pytest.raises(RuntimeError, match="already been loaded.*; is one server named twice"):
        client.add_adapter("v0", fresh())


def test_of_a_dead_server_of_its_own_a_run_says_nothing_at_the_end(serve, home, fresh, capsys):
    async def gone(route, body):
        if route == UNLOAD and body["lora_name"] != "never-loaded":
            return 500, {"error": {"message": "gone"}}

    server = serve(spoil=gone)
    client = client_of(server, last_words=lambda: "it ended with exit code -9")
    client.add_adapter("v0", fresh())
    asyncio.run(client.close())
    assert "may stay" not in capsys.readouterr().out


# --- answers that are none ------------------------------------------------------------------------


def answered(**fields):
    """A choice of three tokens, but for `fields`."""
    choice = {
        "token_ids": [1, 2, 4],
        "logprobs": {"token_logprobs": [-1.0, -2.0, -0.5]},
        "finish_reason": "length",
    }
    return {"choices": [choice | fields]}


def logprobs(*values):
    return {"token_logprobs": list(values)}


NAN = float("nan")


@pytest.mark.parametrize(
    "status, content, kind, message",
    [
        (400, {"error": {"message": "Out of range float values are not JSON compliant: nan"}},
         FloatingPointError, "asked for 'v0', http.* answers 400: Out of range float values"),
        (200, answered(logprobs=logprobs(-1.0, NAN, -1.0)), FloatingPointError, "'v0' gives NaN"),
        (200, answered(logprobs=logprobs(-1.0, -float("inf"), -1.0)), FloatingPointError, "inf"),
        (200, answered(token_ids=[1, 2], logprobs=logprobs(-1.0, -1.0)), RuntimeError, "2 tokens"),
        (200, answered(token_ids=[1] * 4, logprobs=logprobs(*[-1] * 4)), RuntimeError, "4 tokens"),
        (200, answered(token_ids=[], logprobs=logprobs(), finish_reason="stop"), RuntimeError,
         "no token ids with their logprobs"),
        (200, answered(token_ids=None), RuntimeError, "no token ids with their logprobs"),
        (200, answered(token_ids=[1, 2, 23]), RuntimeError, "tokens that the trainer's model"),
        (200, answered(logprobs=logprobs(-1.0, -1.0)), RuntimeError, "with 2 logprobs"),
        (200, answered(logprobs=logprobs(-1.0, None, -1.0)), RuntimeError, "no token ids with"),
        (200, answered(logprobs=None), RuntimeError, "no token ids with their logprobs"),
        (200, answered(finish_reason="abort"), RuntimeError, "finish reason 'abort'"),
        (200, answered(finish_reason="stop"), RuntimeError, "finish reason 'stop'"),
        (200, answered(finish_reason=None), RuntimeError, "finish reason None"),
        (200, {"choices": []}, RuntimeError, "no token ids with their logprobs"),
        (200, {"object": "text"}, RuntimeError, "no token ids with their logprobs"),
        (200, "text", RuntimeError, "no token ids with their logprobs"),
    ],
)  # fmt: skip
def test_an_answer_that_was_not_asked_for_is_an_error(serve, fresh, status, content, kind, message):
    server = serve(spoil=says(COMPLETE, status, content))
    client = client_of(server)
    client.add_adapter("v0", fresh())
    with pytest.raises(kind, match=message) as caught:
        play(client, [Request([1], 3, adapter="v0", seed=0)])
    assert len(server.bodies(COMPLETE)) == 1
    assert kind is FloatingPointError or server.url in str(caught.value)


def test_the_answer_of_these_tests_is_one_where_it_was_asked_for(serve):
    client = client_of(serve(spoil=says(COMPLETE, 200, answered(finish_reason="stop"))))
    for limit in (3, 9):
        request = Request([1], limit, stop_token_ids=(4,), seed=0)
        assert play(client, [request])[0].token_ids == [1, 2, 4]
    with pytest.raises(RuntimeError, match="3 tokens of at most 2"):
        play(client, [dataclasses.replace(request, max_new_tokens=2)])


def test_a_model_that_overflows_is_told_as_vllm_tells_it(serve):
    model = tiny_model(CONFIG)
    model.model.embed_tokens.weight.fill_(NAN)
    client = client_of(serve(TorchEngine(model, 1, CONTEXT)))
    with pytest.raises(FloatingPointError, match="adapter None gives logits that are not finite"):
        play(client, [Request([1], 3, seed=0)])


def test_an_adapter_that_cannot_be_read_is_an_answer_and_no_lost_connection(serve, fresh):
    server = serve()

    def unreadable(name, directory):
        raise PermissionError(13, "Permission denied", str(directory))

    server.engine.add_adapter = unreadable
    client, directory = client_of(server), fresh()
    with pytest.raises(RuntimeError, match=f"did not load {directory}.*Permission denied"):
        client.add_adapter("v0", directory)


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fields(tmp_path_factory):
    """A run of two steps on the shipped base, but for its servers and its output."""
    directory = tmp_path_factory.mktemp("questions")
    for name, lines in (("questions", 6), ("eval_questions", 2)):
        text = (WIKI / f"{name}.jsonl").read_text().splitlines(keepends=True)[:lines]
        (directory / f"{name}.jsonl").write_text("".join(text))
    return {
        "questions": str(directory / "questions.jsonl"),
        "eval_questions": str(directory / "eval_questions.jsonl"),
        "eval_corpus": str(WIKI / "eval_corpus.jsonl"),
        "groups": 1,
        "group_size": 4,
        "temperature": 1.3,
        "max_turns": 2,
        "max_new_tokens": 8,
        "eval_size": 2,
        "slots": 8,
        "steps": 2,
    }


@pytest.fixture
def quick(monkeypatch):
    """No waiting for the disk or for matplotlib; rewards in which nearly every two episodes differ,
    so that every step moves the adapter."""

    async def run_groups(*arguments, **options):
        groups = await rollout.run_groups(*arguments, **options)
        for episode in [episode for group in groups for episode in group]:
            episode.reward = zlib.crc32(repr(episode.token_ids).encode()) / 2**32
        return groups

    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr("run.plot", lambda run, *_: (run.directory / "reward.png").touch())
    monkeypatch.setattr(train, "run_groups", run_groups)


def base_engine(dtype=torch.float32) -> TorchEngine:
    return TorchEngine(Qwen3.from_pretrained(BASE, dtype).requires_grad_(False), 8, 512)


def other_engine() -> TorchEngine:
    """Of another checkpoint: one norm is a twentieth larger."""
    engine = base_engine()
    engine.model.model.norm.weight.mul_(1.05)
    return engine


def list_names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def rows_of(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def test_a_run_through_servers_is_a_run(tmp_path, fields, serve, quick):
    held, on_disk = [], []

    async def watch(route, body):
        held.append(max(len(server.directories) for server in servers))
        on_disk.append(sum(len(list_published(p)) for p in tmp_path.glob("http/broadcasts/*")))

    servers = [serve(base_engine(), spoil=watch) for _ in range(2)]
    urls = tuple(server.url for server in servers)
    for name, more in (("torch", {}), ("http", {"engine": "vllm", "vllm_url": urls})):
        asyncio.run(train.train(Config(**fields, **more, output=str(tmp_path / name))))
    one, other = tmp_path / "torch", tmp_path / "http"
    assert list_names(one) == list_names(other)
    for expected, row in zip(rows_of(one), rows_of(other), strict=True):
        assert expected.keys() == row.keys()
        assert (row["step"], row["version"]) == (expected["step"], expected["version"])
        assert row["mismatch_max"] < 1e-4 and row["grad_norm"] > 0 and row["staleness_max"] == 0
    summaries = [json.loads((output / "summary.json").read_text()) for output in (one, other)]
    # Greedily and by the same untrained version: the servers must say what the engine says.
    assert summaries[0]["outcomes_before"] == summaries[1]["outcomes_before"]
    assert summaries[0]["eval_before"] == summaries[1]["eval_before"]
    assert summaries[1]["steps"] == 2 and summaries[1]["eval_after"] is not None
    names = [body["lora_name"] for body in servers[0].bodies(LOAD)]
    assert len(set(names)) == 3 and max(held) == 2 and max(on_disk) == 2
    asked = {body["model"] for server in servers for body in server.bodies(COMPLETE)}
    assert asked == set(names)
    assert not any(server.directories for server in servers)
    assert all(set(body) == {"lora_name", "lora_path"} for body in servers[0].bodies(LOAD))


class Cheat(Recorder):
    """Answers every completion by another version of the model than was asked for."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.loaded = []
        self.spoil = self.cheat

    async def cheat(self, route, body):
        if route == LOAD:
            self.loaded.append(body["lora_name"])
        if route == UNLOAD and body["lora_name"] in self.loaded:
            return 200, {}  # and keeps it
        if route == COMPLETE:
            return await Server.answer(self, route, json.dumps(body | self.instead(body)).encode())

    def instead(self, body) -> dict:
        return {}


class Late(Cheat):
    def instead(self, body):
        return {"model": self.loaded[-2:][0]}


class Bare(Cheat):
    def instead(self, body):
        return {"model": self.name}


class Raw(Cheat):
    """Samples at the temperature, but tells the logprobs before it, as vLLM does by default."""

    async def cheat(self, route, body):
        if route != COMPLETE:
            return None
        status, answer = await Server.answer(self, route, json.dumps(body).encode())
        choice, model = answer["choices"][0], self.engine.model
        tokens, start = torch.tensor(choice["token_ids"]), len(body["prompt"])
        with torch.no_grad(), use_adapters(model, [(body["model"], None)]):
            logits = model(torch.tensor([body["prompt"] + choice["token_ids"]]))[0, start - 1 : -1]
        logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0].tolist()
        return status, {"choices": [choice | {"logprobs": {"token_logprobs": logprobs}}]}


class Wide(Cheat):
    """Serves a model of another vocabulary."""

    async def cheat(self, route, body):
        if route == COMPLETE:
            n = body["max_tokens"]
            return 200, answered(token_ids=[960] * n, logprobs=logprobs(*[-1.0] * n))


ANOTHER = (
    "it serves another model or dtype, or another adapter under this name; start "
    f"tools/vllm_server.py or tools/serve.py with {BASE} --dtype float32$"
)


@pytest.mark.parametrize(
    "make, step, problem, resumed",
    [
        (lambda: Late(base_engine()), 1, "version 1 .* it still serves version 0, or", True),
        (lambda: Bare(base_engine()), 1, "version 1 .* it still serves version 0, or", False),
        (lambda: Raw(base_engine()), 0, "version 0 .* it ignores the temperature; --log", True),
        (lambda: Recorder(other_engine()), 0, f"version 0 .* {ANOTHER}", False),
        (lambda: Recorder(base_engine(torch.bfloat16)), 0, f"version 0 .* {ANOTHER}", False),
        (lambda: Wide(base_engine()), 0, "tokens that the trainer's model has not", False),
    ],
    ids=["late", "bare", "raw", "other", "bfloat16", "wide"],
)
def test_a_server_that_cheats_is_found_out_before_anything_is_trained_on_it(
    tmp_path, fields, home, serve, quick, make, step, problem, resumed
):
    cheat, output = make(), tmp_path / "run"
    home(cheat.start())
    config = Config(**fields | {"steps": 1}, output=str(output), engine="vllm")
    with pytest.raises(RuntimeError, match=problem) as caught:
        asyncio.run(train.train(dataclasses.replace(config, vllm_url=(cheat.url,))))
    message = str(caught.value)
    assert message.startswith(f"{output}, step {step}: {cheat.url}") and "\n" not in message
    assert list_names(output / "checkpoints") == [f"step_00000{step}"]
    if not resumed:
        return
    good = serve(base_engine())
    asyncio.run(train.train(dataclasses.replace(config, vllm_url=(good.url,), resume=True)))
    assert [row["step"] for row in rows_of(output)] == [1]
    summary = json.loads((output / "summary.json").read_text())
    assert summary["steps"] == 1 and summary["eval_after"] is not None
    assert not good.directories


def test_a_server_that_stays_behind_is_found_also_where_a_step_moves_little(
    tmp_path, fields, home, quick
):
    """Not in one step, since no step moves a logprob by what rounding might."""
    cheat, output = Bare(base_engine()), tmp_path / "run"
    home(cheat.start())
    config = Config(**fields | {"steps": 9, "lr": 1e-5}, output=str(output), engine="vllm")
    with pytest.raises(
        RuntimeError, match="it still serves version 0, or one soon after"
    ) as caught:
        asyncio.run(train.train(dataclasses.replace(config, vllm_url=(cheat.url,))))
    last = rows_of(output)[-1]
    assert 1 < last["step"] < 9 and last["mismatch_max"] < MISMATCH_BOUND["float32"]
    assert f"version {last['step']} " in str(caught.value)


def refusal(config: Config, file: Path) -> str:
    """The one line with which a run from its file ends."""
    file.write_text(to_toml(config))
    with pytest.raises(SystemExit) as caught:
        train.main(["--config", str(file), "--output", config.output])
    assert isinstance(caught.value.code, str) and "\n" not in caught.value.code
    return caught.value.code


@pytest.mark.parametrize("route, version", [(LOAD, 2), (UNLOAD, 1)])
def test_a_server_that_is_lost_costs_the_run_and_not_the_step(
    tmp_path, fields, serve, quick, route, version
):
    """While version 2 is shipped: loaded, or its forerunner unloaded. Steps between checkpoints."""

    async def lost(called, body):
        if called == route and body["lora_name"].endswith(f"-1-{version}"):
            return 500, {"error": {"message": "gone"}}

    server, output = serve(base_engine(), spoil=lost), tmp_path / "run"
    config = Config(**fields | {"steps": 3}, output=str(output), engine="vllm")
    config = dataclasses.replace(config, vllm_url=(server.url,))
    with pytest.raises(RuntimeError, match=f"step 2: {server.url} did not .*: gone"):
        asyncio.run(train.train(config))
    assert [row["step"] for row in rows_of(output)] == [1, 2]
    assert list_names(output / "checkpoints") == ["step_000002"]
    assert json.loads((output / "summary.json").read_text())["steps"] == 2
    server.spoil = None
    asyncio.run(train.train(dataclasses.replace(config, resume=True)))
    assert [row["step"] for row in rows_of(output)] == [1, 2, 3] and not server.directories


def test_a_server_that_hangs_costs_the_run_and_not_the_step(tmp_path, fields, serve, quick):
    """While step 2 is sampled, after the probe of version 1. Steps between checkpoints."""

    async def hang_in_step_2(route, body):
        sampled = route == COMPLETE and body["temperature"] == fields["temperature"]
        if sampled and body["model"].endswith("-1-1"):
            await asyncio.sleep(30)

    server, output = serve(base_engine(), spoil=hang_in_step_2), tmp_path / "run"
    config = Config(**fields, output=str(output), engine="vllm")
    config = dataclasses.replace(config, vllm_url=(server.url,), vllm_timeout=2.0)
    message = refusal(config, tmp_path / "run.toml")
    assert f"step 2: the server {server.url} failed (no answer in 2 s, so it hangs" in message
    assert [row["step"] for row in rows_of(output)] == [1]
    assert list_names(output / "checkpoints") == ["step_000001"] and not server.directories
    server.spoil = None
    asyncio.run(train.train(dataclasses.replace(config, resume=True)))
    assert [row["step"] for row in rows_of(output)] == [1, 2] and not server.directories


def test_a_full_disk_costs_a_run_with_a_server_no_checkpoint(
    tmp_path, fields, serve, quick, monkeypatch
):
    """It fills while version 2 is published; the server is left as it was found."""
    server, output, write, failures = serve(base_engine()), tmp_path / "run", Path.write_bytes, []

    def full(path, data):
        if output in path.parents and (failures or path.match(".v000002.tmp-*/*")):
            failures.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, data)

    config = Config(**fields | {"steps": 3, "save_every": 1}, output=str(output), engine="vllm")
    config = dataclasses.replace(config, vllm_url=(server.url,))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        message = refusal(config, tmp_path / "run.toml")
    assert failures and "No space left on device" in message and "make room" in message
    assert list_names(output / "checkpoints") == ["step_000001"] and not server.directories
    asyncio.run(train.train(dataclasses.replace(config, resume=True)))
    assert [row["step"] for row in rows_of(output)] == [1, 2, 3] and not server.directories
    assert not [path for path in output.rglob("*") if ".tmp" in path.name]
