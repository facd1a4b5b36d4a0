"""A client of vLLM servers, over HTTP, with the interface of the embedded engine.

    trainer                                               vLLM server
    publish ──► broadcasts/v000018 ──► add_adapter ─────► POST /v1/load_lora_adapter
    run_episode ──► generate, by the adapter's name ────► POST /v1/completions, token ids
    retire  ──► remove_adapter, then delete ────────────► POST /v1/unload_lora_adapter

tools/serve.py answers the same routes with the embedded engine, so that a sampler in another
process is always a server.

Left out on purpose: starting servers (tools/vllm_server.py), streaming, text in any direction.
"""

import asyncio
import http.client
import json
import math
import random
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

import lora
from broadcast import read_adapter
from engine import Completion, Request, check_request, derive_seed
from model import Qwen3

RETRY_PAUSES = (0.5, 1.0, 2.0, 4.0)  # seconds; a connection or a busy server may heal, no other may
BUSY = (429, 502, 503, 504)
# The proxies of the environment know nothing of servers on this machine.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Answer:
    """A server's."""

    status: int
    text: str

    def json(self):
        """Raises ValueError for what is none."""
        return json.loads(self.text)


def call(url: str, body: dict | None = None, timeout: float = 600.0) -> Answer:
    """GET, or POST of a body as JSON; blocks. Any status is an answer; ValueError for what is no
    URL, OSError or HTTPException for a server that gives none."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    _ = urlsplit(url).port  # a ValueError if it is none; a socket would take it modulo 65536
    try:
        with DIRECT.open(request, timeout=timeout) as answer:
            return Answer(answer.status, answer.read().decode(errors="replace"))
    except urllib.error.HTTPError as answer:
        with answer:
            return Answer(answer.code, answer.read().decode(errors="replace"))
    except urllib.error.URLError as error:  # what it wraps says more: refused, timed out
        raise error.reason if isinstance(error.reason, OSError) else error from None


def no_log() -> str:
    """What can be said of a server that somebody else started."""
    return "see its log"


class VLLMEngine:
    """A client of one or more vLLM servers, with the interface of TorchEngine.

    Token ids go in, token ids and the sampled tokens' logprobs come out. An adapter is loaded by
    every server under a name and from a directory never used before, so that no cache can mistake
    one version for another, and it is never loaded in place (vLLM then reads the file anew on
    every decode step, vllm#33791). All turns of an episode share a seed and so a server, which has
    their tokens in its cache.

    model: the trainer's own, of which shapes are read alone: what does not fit never leaves here.
    in_flight: requests that a server holds at once. timeout: seconds for an answer; a server that
    exceeds it hangs. last_words: of a server that fails, for the error.

    Every failure is a RuntimeError that names the server, or what TorchEngine raises.
    """

    def __init__(
        self,
        model: Qwen3,
        urls: Sequence[str],
        max_length: int = 1024,
        in_flight: int = 128,
        timeout: float = 600.0,
        last_words: Callable[[], str] = no_log,
    ):
        if not urls:
            raise ValueError("no server: name at least one URL")
        self.model, self.max_length, self.last_words = model, max_length, last_words
        self.urls = [url.rstrip("/").removesuffix("/v1") for url in urls]
        if len(set(self.urls)) < len(self.urls):
            raise ValueError(f"a server is named twice: {', '.join(self.urls)}")
        self.directories: dict[str, Path] = {}  # adapter -> where the servers read it
        self.used: set[str] = set()  # names and directories, also of adapters long gone
        self.sent: set[str] = set()  # names that a server may hold, also after half a failure
        self.requests: Counter[str] = Counter()  # adapter -> requests in flight
        self.timeout = timeout
        self.room = {url: asyncio.Semaphore(in_flight) for url in self.urls}
        self.session: aiohttp.ClientSession | None = None  # of the event loop that samples
        self.base_names = {url: self.check(url) for url in self.urls}  # what each calls its base

    @property
    def adapters(self) -> list[str]:
        """Names of the adapters that a request may name."""
        return list(self.directories)

    @property
    def servers(self) -> int:
        """How many there are; a request with seed s goes to number s mod servers."""
        return len(self.urls)

    def name_of(self, server: int) -> str:
        return self.urls[server]

    # Loading: blocking calls, since nothing can be sampled meanwhile under the new name anyway.

    def call(self, url: str, route: str, body: dict | None = None) -> Answer:
        """A server's answer, whatever it is; ValueError for what is no URL of one."""
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url} is no URL of a server; write http://host:port")
        try:
            return call(url + route, body, self.timeout)
        except (ValueError, http.client.InvalidURL) as error:
            raise ValueError(f"{url} is no URL of a server ({error})") from error
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, ConnectionError):
                time.sleep(0.5)  # the supervisor of a server that was killed ends a moment later
            raise RuntimeError(self.failure(url, error)) from error

    def served(self, url: str) -> tuple[list[str], str, int]:
        """Names of a server's adapters, the name of its base, and the tokens that it holds."""
        answer = self.call(url, "/v1/models")
        try:
            entries = answer.json()["data"]
            (base,) = [entry for entry in entries if entry.get("parent") is None]
            adapters = [entry["id"] for entry in entries if entry is not base]
            return adapters, base["id"], int(base["max_model_len"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RuntimeError(f"{url} answers {answer.status}, but not as vLLM does") from None

    def check(self, url: str) -> str:
        """The name under which a server serves its base model. RuntimeError for a server that is
        none, that holds fewer tokens than an episode, or that loads no adapters at run time."""
        _, name, length = self.served(url)
        if length < self.max_length:
            raise RuntimeError(
                f"{url} holds {length} tokens, an episode may have {self.max_length}; start it "
                f"with --max-model-len {self.max_length} or lower --max-length"
            )
        route = self.call(url, "/v1/unload_lora_adapter", {"lora_name": "never-loaded"})
        if route.status == 404 and "never-loaded" not in route.text:
            raise RuntimeError(
                f"{url} cannot load adapters at run time: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment"
            )
        return name

    def add_adapter(self, name: str, directory: str | Path) -> None:
        """Loads a published PEFT directory on all servers; when it returns, requests may name it.

        What vLLM would take without a word and serve wrongly (a foreign prefix, a rank that is not
        the tensors', fewer columns, NaN) is refused here, before a server sees it.
        """
        directory = Path(directory).absolute()
        taken = self.used | set(self.base_names.values())
        for key in (name, str(directory)):
            if key in taken:
                raise ValueError(f"{key}: used before; a server may answer from its old cache")
        lora.check_adapter(self.model, name, *read_adapter(directory))
        body = {"lora_name": name, "lora_path": str(directory)}
        self.used |= {name, str(directory)}
        self.sent.add(name)
        with ThreadPoolExecutor() as pool:
            answers = pool.map(lambda url: self.call(url, "/v1/load_lora_adapter", body), self.urls)
            for url, answer in zip(self.urls, answers, strict=True):
                if answer.status != 200:
                    raise RuntimeError(f"{url} did not load {directory}: {refusal(answer)}")
        self.directories[name] = directory

    def remove_adapter(self, name: str) -> None:
        """Unloads an adapter everywhere; refused while a request in flight names it. Only then may
        its directory go: a server that looks for it in vain dies."""
        if name not in self.directories:
            raise ValueError(f"no adapter named {name!r}; the servers hold {self.adapters}")
        if self.requests[name]:
            raise RuntimeError(
                f"adapter {name!r} is in use by {self.requests[name]} unfinished requests"
            )
        del self.directories[name]
        for url in self.urls:
            self.unload(url, name)
        self.sent.remove(name)

    def unload(self, url: str, name: str) -> None:
        answer = self.call(url, "/v1/unload_lora_adapter", {"lora_name": name})
        if answer.status not in (200, 404):  # 404: not there, which is what is wanted
            raise RuntimeError(f"{url} did not unload {name}: {refusal(answer)}")

    def forget(self, prefix: str) -> list[str]:
        """Unloads what a dead attempt of a run left on the servers: names that start so."""
        held = [
            (url, name)
            for url in self.urls
            for name in self.served(url)[0]
            if name.startswith(prefix)
        ]
        for url, name in held:
            self.unload(url, name)
        return sorted({name for _, name in held})

    def drop_cache(self, adapter: str | None = None) -> None:
        """Nothing: a server's cache goes with the adapter's name."""

    async def close(self) -> None:
        """Leaves the servers as they were found, or says what may be left on them; what is still
        in flight is aborted."""
        if self.session:
            await self.session.close()
        self.timeout = min(self.timeout, 5.0)  # a server that hangs has been waited for enough
        for name in sorted(self.sent):
            for url in self.urls:
                try:
                    self.unload(url, name)
                except RuntimeError as error:  # its first line: what a log says was told before
                    if self.last_words is not no_log:
                        return  # a server of the run's own, which ends with it
                    print(f"{name} may stay at {url}: {str(error).partition(chr(10))[0]}")

    # Sampling.

    async def generate(self, request: Request) -> Completion:
        """Samples one request. Raises ValueError, before any work, for one that cannot be served;
        the bare base too, once adapters live: on a CPU vLLM then answers with one of them
        (vllm#48421)."""
        check_request(request, self.model.config.vocab_size, self.max_length)
        name, position = request.adapter, len(request.prompt_ids)
        if name not in self.directories and (name is not None or self.directories):
            raise ValueError(f"no adapter named {name!r}; the servers hold {self.adapters}")
        limit = min(request.max_new_tokens, self.max_length - position)
        seed = random.getrandbits(63) if request.seed is None else request.seed
        url = self.urls[seed % len(self.urls)]
        body = {
            "model": self.base_names[url] if name is None else name,
            "prompt": list(request.prompt_ids),
            "max_tokens": limit,
            # The full distribution: what a checkpoint's or a server's defaults cut off, the
            # trainer's ratio would have to know.
            "temperature": request.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            # vLLM's draws depend on the seed and on the number of the new token alone: with one
            # seed for all turns, each would repeat the draws of the one before.
            "seed": derive_seed(seed, position),
            "stop_token_ids": list(request.stop_token_ids),
            "ignore_eos": True,  # stop_token_ids name all ends
            "logprobs": 0,  # of the sampled token alone
            "return_token_ids": True,
        }
        self.requests[name] += 1  # also while it waits for room
        try:
            async with self.room[url]:
                answer = await self.post(url, body)
        finally:
            self.requests[name] -= 1
        return self.read(url, answer, request, limit)

    def read(self, url: str, answer: Answer, request: Request, limit: int) -> Completion:
        """What a server sampled; RuntimeError unless it is what was asked for."""
        try:
            choice = answer.json()["choices"][0]
            token_ids, reason = choice["token_ids"], choice["finish_reason"]
            logprobs = choice["logprobs"]["token_logprobs"]
            stopped = reason == "stop" and token_ids[-1] in request.stop_token_ids
            whole = stopped or (reason == "length" and len(token_ids) == limit)
            whole = whole and 0 < len(token_ids) == len(logprobs) and len(token_ids) <= limit
            known = all(0 <= token < self.model.config.vocab_size for token in token_ids)
            finite = all(map(math.isfinite, logprobs))
        except (ValueError, LookupError, TypeError):
            raise RuntimeError(
                f"{url}: no token ids with their logprobs in its answer: {answer.text[:500]}"
            ) from None
        if not whole:
            raise RuntimeError(
                f"{url}: {len(token_ids)} tokens of at most {limit} with {len(logprobs)} logprobs, "
                f"finish reason {reason!r}: not what was asked for"
            )
        if not known:
            raise RuntimeError(f"{url}: tokens that the trainer's model has not: {token_ids}")
        if not finite:
            raise FloatingPointError(f"adapter {request.adapter!r} gives NaN or infinity")
        return Completion(token_ids, logprobs, reason)

    def connect(self) -> aiohttp.ClientSession:
        """The connections to all servers: as many as there are requests, which `room` bounds.

        aiohttp, since a request costs the trainer's core 0.3 ms with it and 1.3 to 2.1 with httpx
        (benchmarks/vllm_client.py), which at 600 requests a step is a third of a tiny step.
        """
        if self.session is None or self.session.closed:
            # vLLM closes a connection that was idle for 5 seconds: ours are closed before that.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
            timeout = aiohttp.ClientTimeout(total=self.timeout)
            self.session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        return self.session

    async def post(self, url: str, body: dict) -> Answer:
        """The answer to a completion request; a draw is repeatable, so asking again is safe."""
        for pause in (*RETRY_PAUSES, None):
            try:
                async with self.connect().post(f"{url}/v1/completions", json=body) as reply:
                    answer = Answer(reply.status, (await reply.read()).decode(errors="replace"))
            except TimeoutError as error:
                raise RuntimeError(self.failure(url, error)) from error
            except aiohttp.ClientError as error:
                problem = self.failure(url, error)
            else:
                if answer.status == 200:
                    return answer
                problem = f"{url} answers {answer.status}: {refusal(answer)}"
                if "not JSON compliant" in problem:  # as vLLM says that a logprob is NaN
                    raise FloatingPointError(f"asked for {body['model']!r}, {problem}")
                if answer.status not in BUSY:
                    raise RuntimeError(problem)
            if pause is not None:
                await asyncio.sleep(pause)
        raise RuntimeError(problem)

    def failure(self, url: str, error: Exception) -> str:
        """Why a server gave no answer, and what it said last."""
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        if isinstance(error, TimeoutError):
            what = f"no answer in {self.timeout:g} s, so it hangs or is overloaded"
        return f"the server {url} failed ({what}); {self.last_words()}"


def refusal(answer: Answer) -> str:
    """The message in a server's error, with the flag that mends it where one does."""
    try:
        message = answer.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = answer.text[:500]
    if "max_lora_rank" in message:
        message += "; start the server with a larger --max-lora-rank"
    if "already been loaded" in message:  # names of adapters are one run's alone
        message += "; is one server named twice, by two spellings of its URL?"
    return message
