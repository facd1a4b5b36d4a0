"""The real vLLM samples what the trainer trains: every adapter, every version, through every crash.

Needs vLLM for CPUs in the environment (.ci/run makes one). A server takes half a minute to start,
so most tests share one; those that end a server have their own.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tiny import randomise_adapter

import train
from broadcast import list_published, publish, retire, save_adapter
from chat import load_tokenizer
from client import call
from environments import load_environment
from lora import LoRAConfig, adapter_disabled, inject_lora
from model import Qwen3
from rollout import Request, VLLMEngine, run_groups

pytestmark = pytest.mark.vllm
ROOT = Path(train.__file__).parent
BASE = ROOT / "assets" / "tiny-qwen3"
VERSIONS = 4  # adapters at once on the shared server
BOUND = 1e-3  # of a logprob, fp32; measured differences are about 1e-5
QUICK = "--eval-size 16 --groups 2 --group-size 4 --save-every 1 --max-new-tokens 32".split()


@contextlib.contextmanager
def serving(log: Path, change=lambda command: command, **settings):
    """A vLLM server of the launcher's."""
    from tools.vllm_server import VLLMServer

    server = VLLMServer(str(BASE), log, **settings)
    server.command = change(server.command)
    asyncio.run(server.__aenter__())
    try:
        yield server
    finally:
        asyncio.run(server.__aexit__())


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    log = tmp_path_factory.mktemp("vllm") / "vllm.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1")  # /collective_rpc, to look at the worker
        with serving(log, max_lora_rank=16, versions=VERSIONS, slots=64) as server:
            yield server


def adapted(config: LoRAConfig, seed: int = 0, size: float = 0.1) -> Qwen3:
    """The shipped checkpoint with an adapter that moves its logprobs."""
    model = Qwen3.from_pretrained(BASE)
    torch.manual_seed(seed)
    inject_lora(model, config)
    randomise_adapter(model, seed, size)
    return model


def client(server, model, **settings) -> VLLMEngine:
    return VLLMEngine(model, [server.url], 512, last_words=server.last_words, **settings)


@torch.no_grad()
def logprobs_of(model, prompt, tokens, temperature) -> torch.Tensor:
    ids = torch.tensor([[*prompt, *tokens]])
    mask = torch.arange(1, ids.shape[1])[None] >= len(prompt)
    return model.token_logprobs(ids, mask, temperature)[0][mask]


def requests(name: str, temperature: float, number: int = 4, length: int = 24) -> list[Request]:
    """Of prompts that differ in length; the longest is more than a block of vLLM's cache."""
    generator = torch.Generator().manual_seed(number)
    prompts = [torch.randint(20, 900, (7 + 23 * i,), generator=generator) for i in range(number)]
    return [
        Request(prompt.tolist(), length, temperature, name, seed=i)
        for i, prompt in enumerate(prompts)
    ]


async def sample(engine, requests: list[Request]):
    return await asyncio.gather(*(engine.generate(request) for request in requests))


# --- the same policy ------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 8, 12])
def test_every_rank_and_scaling_is_sampled_as_it_is_trained(server, rank, tmp_path):
    async def check(alpha: float, temperature: float) -> None:
        config = LoRAConfig(rank, alpha)
        model = adapted(config, seed=rank, size=0.1)
        name = f"rank{rank}-alpha{alpha}-T{temperature}"
        save_adapter(model, config, tmp_path / name)
        engine = client(server, model)
        engine.add_adapter(name, tmp_path / name)
        asked = requests(name, temperature)
        gap = base_gap = 0.0
        for request, answer in zip(asked, await sample(engine, asked), strict=True):
            sampled = torch.tensor(answer.logprobs)
            ours = logprobs_of(model, request.prompt_ids, answer.token_ids, temperature)
            gap = max(gap, (ours - sampled).abs().max().item())
            with adapter_disabled(model):
                base = logprobs_of(model, request.prompt_ids, answer.token_ids, temperature)
            base_gap = max(base_gap, (base - sampled).abs().max().item())
        await engine.close()
        assert gap <= BOUND
        assert base_gap >= 10 * max(gap, 1e-3)  # serving the base would not pass

    for alpha in {float(rank), 2.0 * rank, 32.0}:
        for temperature in (0.7, 1.0):
            asyncio.run(check(alpha, temperature))


@pytest.mark.parametrize(
    "rank, alpha, temperature", [(1, 2.0, 1.0), (8, 32.0, 0.7), (8, 32.0, 1.0), (12, 12.0, 0.7)]
)
def test_episodes_of_several_turns_are_sampled_as_they_are_trained(
    server, rank, alpha, temperature, tmp_path
):
    config = LoRAConfig(rank, alpha)
    model = adapted(config, seed=3, size=0.02)  # small: the agent still calls its tools
    save_adapter(model, config, tmp_path / "adapter")
    wiki = ROOT / "assets" / "tiny-wiki"
    environment = load_environment(
        "wiki_search", corpus=wiki / "corpus.jsonl", questions=wiki / "questions.jsonl", results=3
    )

    async def play():
        engine, name = client(server, model), f"episodes-{rank}-{alpha}-{temperature}"
        engine.add_adapter(name, tmp_path / "adapter")
        groups = await run_groups(
            engine,
            load_tokenizer(BASE),
            environment,
            environment.train[:6],
            4,
            seed=0,
            step=0,
            adapter=name,
            version=0,
            temperature=temperature,
            max_turns=6,
            max_new_tokens=64,
        )
        await engine.close()
        return [episode for group in groups for episode in group]

    episodes = asyncio.run(play())
    assert sum(episode.turns > 2 for episode in episodes) >= 6
    batch = train.micro_batches([(e, 0.0) for e in episodes], sys.maxsize, "cpu")[0]
    with torch.no_grad():
        ours, _ = model.token_logprobs(batch.ids, batch.mask, temperature)
        with adapter_disabled(model):
            base, _ = model.token_logprobs(batch.ids, batch.mask, temperature)
    gap = (ours - batch.sampler_logprobs)[batch.mask].abs().max().item()
    base_gap = (base - batch.sampler_logprobs)[batch.mask].abs().max().item()
    assert gap <= BOUND and base_gap >= 10 * max(gap, 1e-3)


def test_greedy_takes_the_most_probable_token_at_temperature_one(server, tmp_path):
    model = adapted(LoRAConfig(rank=8))
    save_adapter(model, LoRAConfig(rank=8), tmp_path / "adapter")

    async def ask():
        engine = client(server, model)
        engine.add_adapter("greedy", tmp_path / "adapter")
        asked = requests("greedy", 0.0, number=3, length=8)
        answers = await sample(engine, asked)
        await engine.close()
        return zip(asked, answers, strict=True)

    for request, answer in asyncio.run(ask()):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt_ids + answer.token_ids]))
        best = logits[0, len(request.prompt_ids) - 1 : -1].argmax(-1)
        assert best.tolist() == answer.token_ids
        ours = logprobs_of(model, request.prompt_ids, answer.token_ids, 1.0)
        assert (ours - torch.tensor(answer.logprobs)).abs().max() <= BOUND


def test_a_mixed_batch_gives_each_request_what_it_gets_alone(server, tmp_path):
    """Several ranks and targets in one batch, also the zero adapter that stands for the base."""
    shapes = {
        "zero": (LoRAConfig(rank=8), 0.0),
        "low": (LoRAConfig(rank=1, alpha=2.0), 0.1),
        "high": (LoRAConfig(rank=12, alpha=24.0), 0.1),
        "attention": (LoRAConfig(rank=8, target_modules=("q_proj", "v_proj")), 0.2),
    }
    models = {
        name: adapted(config, i, size) for i, (name, (config, size)) in enumerate(shapes.items())
    }

    async def ask():
        engine = client(server, models["zero"])
        for name, model in models.items():
            save_adapter(model, shapes[name][0], tmp_path / name)
            engine.add_adapter(name, tmp_path / name)
        asked = [r for i in range(4) for name in models for r in requests(name, 1.0)[i : i + 1]]
        together = await sample(engine, asked)
        alone = [(await sample(engine, [request]))[0] for request in asked]
        with pytest.raises(ValueError, match="no adapter named None"):  # the bare base: vllm#48421
            await engine.generate(Request([1, 2, 3], 1))
        await engine.close()
        return asked, together, alone

    for request, mixed, single in zip(*asyncio.run(ask()), strict=True):
        assert mixed.token_ids == single.token_ids
        gap = torch.tensor(mixed.logprobs) - torch.tensor(single.logprobs)
        assert gap.abs().max() <= 1e-4
        ours = logprobs_of(models[request.adapter], request.prompt_ids, mixed.token_ids, 1.0)
        assert (ours - torch.tensor(mixed.logprobs)).abs().max() <= BOUND


# --- versions -------------------------------------------------------------------------------------


def test_hundreds_of_versions_are_served_fresh_and_leave_nothing_behind(server, tmp_path):
    """Each under its own name and path: no cached key or value of another (vllm#42125)."""
    config = LoRAConfig(rank=8)
    model = adapted(config)
    prompt = list(range(100, 150))  # more than a block, so that a stale cache would be used

    async def go():
        engine = client(server, model)
        for version in range(200):
            randomise_adapter(model, version, 0.1)
            path = publish(model, config, tmp_path, version)
            engine.add_adapter(f"v-{version}", path)
            if version % 10 == 0:
                answer = await engine.generate(Request(prompt, 4, 1.0, f"v-{version}", seed=0))
                ours = logprobs_of(model, prompt, answer.token_ids, 1.0)
                assert (ours - torch.tensor(answer.logprobs)).abs().max() <= BOUND
            if version:
                engine.remove_adapter(f"v-{version - 1}")
                retire(tmp_path / f"v{version - 1:06d}")
        served = call(f"{server.url}/v1/models").json()["data"]
        assert [entry["id"] for entry in served if entry["parent"]] == ["v-199"]
        rpc = {"method": "list_loras"}
        worker = call(f"{server.url}/collective_rpc", rpc).json()
        assert len(worker["results"][0]) <= VERSIONS + 1
        assert [path.name for path in list_published(tmp_path)] == ["v000199"]
        await engine.close()

    asyncio.run(go())


def test_publishing_while_requests_run_disturbs_none_of_them(server, tmp_path):
    config = LoRAConfig(rank=8)
    model = adapted(config)

    async def go():
        engine = client(server, model)
        for version in range(6):
            randomise_adapter(model, version, 0.1)
            save_adapter(model, config, tmp_path / f"{version}")
        engine.add_adapter("old", tmp_path / "0")
        asked = requests("old", 1.0, number=8, length=300)
        undisturbed = await sample(engine, asked)
        running = asyncio.create_task(sample(engine, asked))
        for version in range(1, 6):  # more than the server has slots for
            await asyncio.sleep(0.1)
            engine.add_adapter(f"new-{version}", tmp_path / f"{version}")
            with pytest.raises(RuntimeError, match="in use by"):
                engine.remove_adapter("old")
            await engine.generate(Request([5, 6, 7], 2, 1.0, f"new-{version}", seed=1))
            engine.remove_adapter(f"new-{version}")
        disturbed = await running
        await engine.close()
        return undisturbed, disturbed

    for before, after in zip(*asyncio.run(go()), strict=True):
        assert before.token_ids == after.token_ids
        gap = torch.tensor(before.logprobs) - torch.tensor(after.logprobs)
        assert gap.abs().max() <= 1e-4


# --- servers that do not fit ----------------------------------------------------------------------


def refused(*flags: str) -> str:
    """The one line with which a run that cannot begin ends."""
    with pytest.raises(SystemExit) as caught:
        train.main(["--engine", "vllm", *QUICK, *flags])
    assert isinstance(caught.value.code, str) and "Traceback" not in caught.value.code
    return caught.value.code


def test_a_server_that_does_not_fit_is_refused_with_what_mends_it(server, tmp_path):
    shared = ("--vllm-url", server.url, "--output")
    line = refused(*shared, str(tmp_path / "long"), "--max-length", "2048")
    assert server.url in line and "--max-model-len 2048" in line
    line = refused(*shared, str(tmp_path / "rank"), "--rank", "32")
    assert server.url in line and "--max-lora-rank" in line
    other = tmp_path / "other"
    other.mkdir()
    for file in BASE.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    tensors = safetensors.torch.load_file(other / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] *= 1.5
    safetensors.torch.save_file(tensors, other / "model.safetensors")
    line = refused(*shared, str(tmp_path / "model"), "--model", str(other))
    assert server.url in line and "another model" in line
    assert line.endswith(
        f"; start tools/vllm_server.py or tools/serve.py with {other} --dtype float32"
    )
    models = call(f"{server.url}/v1/models").json()["data"]
    assert len(models) == 1  # nothing stays behind


def test_a_server_that_ignores_the_temperature_is_found_out(tmp_path):
    def raw(command):
        return [word.replace("processed_logprobs", "raw_logprobs") for word in command]

    with serving(tmp_path / "vllm.log", raw) as server:
        line = refused("--vllm-url", server.url, "--output", str(tmp_path / "run"))
    assert server.url in line and "--logprobs-mode processed_logprobs" in line


def test_a_server_without_runtime_loading_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "0")
    with serving(tmp_path / "vllm.log") as server:
        line = refused("--vllm-url", server.url, "--output", str(tmp_path / "run"))
    assert server.url in line and "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in line


def test_a_port_in_use_is_named(server, tmp_path):
    port = int(server.url.rpartition(":")[2])
    with pytest.raises(RuntimeError, match=f"port {port} is in use"):
        with serving(tmp_path / "vllm.log", port=port):
            pass


def test_a_server_that_hangs_stops_the_wait(server, tmp_path):
    import psutil

    model = adapted(LoRAConfig(rank=8))
    save_adapter(model, LoRAConfig(rank=8), tmp_path / "adapter")
    (api,) = psutil.Process(server.process.pid).children()

    async def ask():
        engine = client(server, model, timeout=3.0)
        engine.add_adapter("hanging", tmp_path / "adapter")
        api.suspend()
        try:
            with pytest.raises(RuntimeError, match="no answer in 3 s"):
                await engine.generate(Request([1, 2, 3], 2, adapter="hanging"))
        finally:
            api.resume()
        await engine.close()

    asyncio.run(ask())


def test_a_server_and_its_engine_do_not_outlive_a_supervisor_that_is_killed(tmp_path):
    import psutil

    with serving(tmp_path / "vllm.log") as server:
        supervisor = psutil.Process(server.process.pid)
        others = supervisor.children(recursive=True)
        assert len(others) >= 2  # the API server and its engine
        supervisor.kill()
        assert psutil.wait_procs(others, timeout=60)[1] == []


# --- whole runs -----------------------------------------------------------------------------------


def rows(output: Path) -> list[dict]:
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def start(output: Path, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "train.py", "--engine", "vllm", "--output", str(output), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait_for(condition, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.2)


def test_the_default_task_is_learned_through_vllm(tmp_path):
    """And every sampled token compared: a KL, however small, also scores groups of equal reward,
    and compares each micro-batch with the reference."""
    flags = "--steps 8 --groups 12 --eval-size 96 --kl 1e-4".split()
    run = start(tmp_path / "run", *flags)
    printed, errors = run.communicate(timeout=1200)
    assert run.returncode == 0, errors
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["eval_after"] >= summary["eval_before"] + 0.15
    assert "vLLM is ready" in printed
    steps = rows(tmp_path / "run")
    assert len(steps) == 8
    for row in steps:
        assert row["tokens_trained"] == row["tokens_sampled"] > 0
        assert row["mismatch_max"] <= BOUND
        if row["step"] > 1:  # B has moved
            assert row["reference_max"] >= 10 * max(row["mismatch_max"], 1e-3)
    attempt = tmp_path / "run" / "broadcasts" / "attempt_1"
    assert [path.name for path in list_published(attempt)] == ["v000008"]


def test_killed_servers_and_killed_runs_lose_nothing_and_leave_nothing(tmp_path):
    import psutil

    output = tmp_path / "run"
    flags = [*QUICK, "--steps", "40"]

    def family(run) -> list:
        return psutil.Process(run.pid).children(recursive=True)

    # The server dies under the run: one clear line, a checkpoint.
    run = start(output, *flags)
    wait_for(lambda: rows(output) or run.poll() is not None)
    others = family(run)
    (api,) = [p for p in others if "api_server" in " ".join(p.cmdline()[:3])]
    api.kill()
    _, errors = run.communicate(timeout=120)
    assert run.returncode == 1 and "Traceback" not in errors
    assert "the server http://127.0.0.1" in errors and "vllm.log" in errors
    assert psutil.wait_procs(others, timeout=30)[1] == []
    done = len(rows(output))
    saved = max(int(p.name[5:]) for p in (output / "checkpoints").glob("step_*"))
    assert saved >= done >= 1

    # The run dies: its server goes with it.
    run = start(output, *flags, "--resume")
    wait_for(lambda: len(rows(output)) > done or run.poll() is not None)
    others = family(run)
    assert any("api_server" in " ".join(p.cmdline()) for p in others)
    run.send_signal(signal.SIGKILL)
    run.communicate(timeout=60)
    assert psutil.wait_procs(others, timeout=60)[1] == []

    # And the third attempt ends, with each step once.
    total = len(rows(output)) + 2
    run = start(output, *QUICK, "--steps", str(total), "--resume")
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    assert [row["step"] for row in rows(output)] == list(range(1, total + 1))
    for attempt in (1, 2):
        assert list_published(output / "broadcasts" / f"attempt_{attempt}") == []
