"""TorchEngine behind the few routes of vLLM that VLLMEngine calls: a sampler in its own process.

    run a ──┐
    run b ──┴── HTTP ──► one event loop ──► TorchEngine: one model, one cache, adapters by name,
                                            a batch of whatever waits, of all runs

    GET  /health                     200
    GET  /v1/models                  the base and the adapters that a request may name
    POST /v1/completions             token ids in, token ids and their logprobs out
    POST /v1/load_lora_adapter       a published directory, under a name never used before
    POST /v1/unload_lora_adapter     forgets the name at once, the adapter after its last request

So one protocol serves both engines. The checkpoint is memory-mapped: processes that load the same
one share its pages, and a frozen base is never written, so they stay shared; not what loading must
copy, the experts (they are stacked) and a base in another --dtype than its file's.

Left out on purpose: text (ids go in, ids come out), streaming, more than one completion a request,
other addresses than 127.0.0.1, and aborting a request whose client has gone: it runs to its end.

    python tools/serve.py assets/tiny-qwen3 --port 8000      for train.py --vllm-url
"""

import asyncio
import json
import re
import signal
import sys
from http import HTTPStatus
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402
import tyro  # noqa: E402

from engine import Request, TorchEngine  # noqa: E402
from model import Qwen3  # noqa: E402


class Refused(Exception):
    """An answer other than 200: (status, message)."""


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Route and body of the next request; Refused for one whose end cannot be told."""
    try:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    except asyncio.LimitOverrunError as error:
        raise Refused(431, f"headers of a request: {error}") from error
    fields = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields[name.lower()] = value.strip()
    if "transfer-encoding" in fields:
        raise Refused(411, "send the body with a Content-Length; in chunks it is not read")
    length = fields.get("content-length", "0")
    if not re.fullmatch("[0-9]{1,15}", length):
        raise Refused(400, f"Content-Length: {length!r:.40} is no number of bytes")
    return first.rpartition(" ")[0], await reader.readexactly(int(length))


class Server:
    """Serves an engine under `name` from the running event loop, which is the engine's too: between
    two of its steps the loop reads what has come in and answers what is done."""

    def __init__(self, engine: TorchEngine, name: str):
        self.engine, self.name = engine, name
        self.directories: dict[str, str] = {}  # adapter -> where it was loaded from
        self.routes = {
            "GET /health": self.health,
            "GET /v1/models": self.models,
            "POST /v1/completions": self.complete,
            "POST /v1/load_lora_adapter": self.load,
            "POST /v1/unload_lora_adapter": self.unload,
        }

    async def start(self, port: int = 0) -> str:
        """Listens on 127.0.0.1 (port 0: on a free one); returns the URL."""
        self.listener = await asyncio.start_server(self.converse, "127.0.0.1", port, backlog=1024)
        self.url = f"http://127.0.0.1:{self.listener.sockets[0].getsockname()[1]}"
        return self.url

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: request after request until the client closes it."""
        try:
            while True:
                whole = True
                try:
                    status, content = await self.answer(*await read_request(reader))
                except Refused as refused:
                    status, message = refused.args
                    whole, content = False, {"error": {"message": message}}
                data = json.dumps(content).encode()
                writer.write(
                    f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
                    "Content-Type: application/json\r\n"
                    f"Content-Length: {len(data)}\r\n\r\n".encode()
                )
                writer.write(data)
                await writer.drain()
                if not whole:  # where the next request begins is unknown
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return  # the client has gone, or the server ends
        finally:
            writer.close()

    async def answer(self, route: str, body: bytes) -> tuple[int, dict]:
        """Status and content, in the form of vLLM's errors; whatever a request brings about, the
        server goes on."""
        try:
            if route not in self.routes:
                raise Refused(404, f"no route {route}")
            content = json.loads(body) if body else {}
            if not isinstance(content, dict):
                raise Refused(400, "the body must be a JSON object")
            for field in ("model", "lora_name", "lora_path"):
                if not isinstance(content.get(field, ""), str):
                    raise Refused(400, f"{field} must be a string")
            return 200, await self.routes[route](content)
        except Refused as refused:
            status, message = refused.args
        except FloatingPointError as error:  # in the words of vLLM, by which a client knows it
            status, message = 400, f"Out of range float values are not JSON compliant: {error}"
        except KeyError as error:
            status, message = 400, f"{error} is missing"
        except (TypeError, ValueError, OSError) as error:  # the request's fault
            status, message = 400, f"{type(error).__name__}: {error}"
        except (ArithmeticError, LookupError, RuntimeError) as error:
            status, message = 500, f"{type(error).__name__}: {error}"
        return status, {"error": {"message": message}}

    async def health(self, body: dict) -> dict:
        return {}

    async def models(self, body: dict) -> dict:
        base = {"id": self.name, "parent": None, "max_model_len": self.engine.max_length}
        adapters = [
            {"id": name, "parent": self.name, "root": root}
            for name, root in self.directories.items()
        ]
        return {"object": "list", "data": [base, *adapters]}

    async def complete(self, body: dict) -> dict:
        """One completion of one prompt of token ids, in the fields that VLLMEngine reads."""
        if body["model"] not in (self.name, *self.directories):
            raise Refused(404, f"The model `{body['model']}` does not exist.")
        if (body.get("top_p", 1), body.get("top_k", 0), body.get("min_p", 0)) != (1, 0, 0):
            raise Refused(400, "only the full distribution is sampled: top_p 1, top_k 0, min_p 0")
        if body.get("n", 1) != 1:
            raise Refused(400, "one completion is sampled: n 1")
        request = Request(
            prompt_ids=body["prompt"],
            max_new_tokens=body["max_tokens"],
            temperature=body.get("temperature", 1.0),
            adapter=None if body["model"] == self.name else body["model"],
            stop_token_ids=tuple(body.get("stop_token_ids") or ()),
            seed=body.get("seed"),
        )
        completion = await self.engine.generate(request)
        choice = {
            "index": 0,
            "token_ids": completion.token_ids,
            "logprobs": {"token_logprobs": completion.logprobs},
            "finish_reason": completion.finish_reason,
        }
        return {"choices": [choice]}

    async def load(self, body: dict) -> dict:
        name, directory = body["lora_name"], body["lora_path"]
        if name in (self.name, *self.directories):
            raise Refused(400, f"The lora adapter '{name}' has already been loaded.")
        self.engine.add_adapter(name, directory)
        self.directories[name] = directory
        return {"loaded": name}

    async def unload(self, body: dict) -> dict:
        name = body["lora_name"]
        if name not in self.directories:
            raise Refused(404, f"The lora adapter '{name}' cannot be found.")
        del self.directories[name]
        # What is in flight goes on to its end, also where the client was killed meanwhile.
        while any(stream.request.adapter == name for stream in self.engine.unfinished()):
            await asyncio.sleep(0.02)
        self.engine.remove_adapter(name)
        return {"unloaded": name}


def main(
    model: tyro.conf.Positional[str],
    port: int = 0,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str = "cpu",
    max_length: int = 512,
    slots: int = 128,
    max_adapters: int | None = None,
) -> None:
    """Serves a model and its adapters to runs that name the server by --vllm-url.

    Args:
        model: checkpoint, a directory or a Hub id.
        port: where it listens, on this machine alone; 0 is a free one, which is printed.
        dtype: the run's --dtype.
        device: where to compute, cpu or cuda.
        max_length: tokens of an episode.
        slots: requests in a batch.
        max_adapters: how many are in memory at once; the rest stays on disk.
    """
    if not 0 <= port < 2**16:
        raise ValueError(f"--port must be in 0..65535, not {port}")
    base = Qwen3.from_pretrained(model, getattr(torch, dtype), device).requires_grad_(False)
    engine = TorchEngine(base, slots, max_length, max_adapters=max_adapters)

    async def serve() -> None:
        url = await Server(engine, model).start(port)
        print(f"serving {model} at {url}", flush=True)
        await asyncio.Event().wait()  # until a signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        asyncio.run(serve())
    except KeyboardInterrupt:
        print("ended", flush=True)


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, RuntimeError, OSError) as error:
        raise SystemExit(f"tools/serve.py: {error}") from None
