"""A server for one run, vLLM's or ours: started with the flags that the run needs, gone with it.

    train.py ── pipe ──► supervisor (this file) ── starts ──► vLLM's API server ──► its engine
                │                                             └──── one process group ────┘
                └─ closes at any death of train.py: the supervisor ends the whole group

A pipe, because a process that is killed with -9 can say nothing, but its pipes close; a group,
because vLLM's engine is a process of its own that would outlive the API server. If the supervisor
itself is killed, the kernel tells the server to end (Linux). tools/serve.py is started and ended in
the same way.

No port is held for a server before it listens, so a stranger may take it first and answer in its
place. tools/serve.py therefore chooses a port itself and says in its log which; vLLM, which cannot,
is ready once whoever listens at its port belongs to the session that the supervisor leads (Linux).

Every flag follows from the run: adapters on, room for each version that can be alive at once,
log-probabilities after temperature (vLLM's default ignores it), no sampling defaults from the
checkpoint (Qwen3's generation_config.json would set top_p and top_k).

Left out on purpose: tensor and data parallelism (start vLLM with its own flags, name it by
--vllm-url), the client, which is client.py, and a supervisor of a server that a user starts: after
a kill -9 of it its engine, VLLM::EngineCore, stays, and is to be ended too.

    python tools/vllm_server.py assets/tiny-qwen3 --port 8000       a server for several runs
"""

import asyncio
import ctypes
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from http.client import HTTPConnection, HTTPException
from importlib.util import find_spec
from pathlib import Path

import tyro
from tqdm import tqdm

PR_SET_PDEATHSIG = 1  # of prctl(2)
START_LIMIT = 1800.0  # seconds; a large model may have to be downloaded first
GRACE = 15.0  # seconds between SIGTERM and SIGKILL


def server_command(
    model: tyro.conf.Positional[str],
    *,
    port: int = 8000,
    max_lora_rank: int = 8,
    versions: int = 2,
    dtype: str = "float32",
    device: str = "cpu",
    max_length: int = 512,
    slots: int = 128,
) -> list[str]:
    """Serves a model to runs that name the server by --vllm-url; here, the command that does.

    The module, not `vllm serve`: that one asks for a distribution called vllm, and the CPU build
    has another name.

    Args:
        model: checkpoint, a directory or a Hub id.
        port: where it listens, on this machine alone.
        max_lora_rank: the largest --rank of a run, or above it one of 1, 8, 16, 32, 64, ...
        versions: adapters that requests may name at once, for each run its --max-staleness + 2.
        dtype: the run's --dtype.
        device: cpu or cuda.
        max_length: the run's --max-length.
        slots: requests in a batch.
    """
    if not 0 < port < 2**16:
        raise ValueError(f"--port must be in 1..65535, not {port}")
    settings = {
        "model": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "max-model-len": max_length,
        "max-num-seqs": slots,
        "max-lora-rank": max_lora_rank,
        "max-loras": versions,
        "max-cpu-loras": versions + 1,
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enable-lora"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    if device == "cpu":
        # A seeded request whose prompt is computed in two steps ends a server on a CPU ("CPU
        # Generator does not use offset"), so every prompt is computed in one.
        whole = ["--no-enable-chunked-prefill", "--max-num-batched-tokens"]
        return [*command, "--enforce-eager", *whole, str(max(max_length, 4096))]
    return [*command, "--gpu-memory-utilization", "0.5"]  # the trainer has the rest


def server_environment() -> dict[str, str]:
    """This process's environment, with what vLLM must find in it."""
    ours = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # else the routes that load adapters do not exist
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; CPU only
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer works on the same cores
        "VLLM_NO_USAGE_STATS": "1",
    }
    return ours | dict(os.environ)


def free_port() -> int:
    """A port that nobody listens on just now; if another takes it first, the server that was to
    have it fails, and RunServer.listens tells the two apart."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def listeners(port: int) -> list[set[int]]:
    """Of each socket that listens at an IPv4 port of this machine, the processes that hold it, of
    those that we may look into (Linux; the kernel gives a socket a number, its inode)."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    rows = [line.split() for line in lines]  # number, local address, remote, state, ..., inode
    sockets = {
        f"socket:[{row[9]}]": set()
        for row in rows
        if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port  # 0A: it listens
    }
    for process in filter(str.isdigit, os.listdir("/proc") if sockets else ()):
        with suppress(OSError):  # it has ended, or is another user's
            for descriptor in os.listdir(f"/proc/{process}/fd"):
                with suppress(FileNotFoundError):  # closed meanwhile
                    if (file := os.readlink(f"/proc/{process}/fd/{descriptor}")) in sockets:
                        sockets[file].add(int(process))
    return list(sockets.values())


class RunServer:
    """One server of one run: `async with` starts it, waits until it answers, and ends it.

    name: of what is started, for messages. port: where the command listens; 0: on a free port, and
    its log has a line that ends in "at http://127.0.0.1:PORT". log: file that takes what it prints.
    threads: of its matrix products; 0 leaves them to the environment. Raises RuntimeError, with the
    end of the log, if the server dies or does not answer.
    """

    def __init__(self, name: str, command: list[str], port: int, log: Path, threads: int = 0):
        self.name, self.command, self.port, self.log = name, command, port, log
        self.url = f"http://127.0.0.1:{port}" if port else ""  # "": not known yet
        self.environment = server_environment()
        if threads:
            self.environment["OMP_NUM_THREADS"] = str(threads)

    async def __aenter__(self) -> "RunServer":
        if self.url:
            with socket.socket() as visitor:
                if visitor.connect_ex(("127.0.0.1", self.port)) == 0:
                    raise RuntimeError(
                        f"port {self.port} is in use; {self.name} cannot listen at {self.url}"
                    )
        with self.log.open("a") as stream:
            print(shlex.join(self.command), file=stream, flush=True)
            self.begin = stream.tell()  # what stands before is of servers before
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--supervise", *self.command],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env=self.environment,
                start_new_session=True,  # Ctrl-C is for the run, which then ends its server
            )
        started = time.monotonic()
        starting = f"{self.name} is starting"
        print(f"{starting} (log: {self.log})", flush=True)
        try:
            with tqdm(
                desc=starting, bar_format="{desc} {elapsed}", leave=False, disable=None
            ) as bar:
                while not self.answers():
                    bar.refresh()
                    if self.process.poll() is not None:
                        raise RuntimeError(f"{self.name} did not start: {self.last_words()}")
                    if time.monotonic() - started > START_LIMIT:
                        raise RuntimeError(f"{self.name} does not answer: {self.last_words()}")
                    await asyncio.sleep(0.2)
        except BaseException:
            await self.__aexit__()
            raise
        seconds = time.monotonic() - started
        print(f"{self.name} is ready at {self.url} after {seconds:.0f} s", flush=True)
        return self

    async def __aexit__(self, *_) -> None:
        self.process.stdin.close()  # the supervisor reads the end of its input, and ends the group
        self.process.wait()

    def answers(self) -> bool:
        """Whether the server answers, and not somebody else at its port."""
        self.url = self.url or self.url_in_log()
        if not self.url or self.process.poll() is not None:
            return False
        try:
            with closing(HTTPConnection(self.url.removeprefix("http://"), timeout=5)) as connection:
                connection.request("GET", "/health")
                return connection.getresponse().status == 200 and self.listens()
        except (OSError, HTTPException):
            return False

    def url_in_log(self) -> str:
        """What a server that chose its port has printed, or ""."""
        with self.log.open("rb") as stream:
            stream.seek(self.begin)
            found = re.search(rb" at (http://127\.0\.0\.1:\d+)\n", stream.read())
        return found[1].decode() if found else ""

    def listens(self) -> bool:
        """Whether every socket that listens at the server's port is held by it, or by a process
        that it started."""
        if not self.port or sys.platform != "linux":
            return True
        sockets = listeners(self.port)
        ours = [any(os.getsid(number) == self.process.pid for number in held) for held in sockets]
        return bool(ours) and all(ours)

    def last_words(self, lines: int = 8) -> str:
        """Whether it lives, and the end of its log."""
        code = self.process.poll()
        state = "it is still running" if code is None else f"it ended with exit code {code}"
        tail = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n  ".join([f"{state}; the end of {self.log}:", *tail])


class VLLMServer(RunServer):
    """A vLLM server; settings: as for server_command."""

    def __init__(self, model: str, log: Path, threads: int = 0, **settings):
        settings.setdefault("port", free_port())
        command = server_command(model, **settings)
        super().__init__("vLLM", command, settings["port"], log, threads)


class TorchServer(RunServer):
    """tools/serve.py, the embedded engine in a process of its own; settings: its flags but --port,
    which is a free one."""

    def __init__(self, model: str, log: Path, threads: int = 0, **settings):
        command = [sys.executable, str(Path(__file__).resolve().parent / "serve.py"), model]
        for name, value in dict(port=0, **settings).items():
            command += [f"--{name.replace('_', '-')}", str(value)]
        super().__init__("tools/serve.py", command, 0, log, threads)


def end_with_parent() -> None:
    """In a child: SIGTERM to it at any death of its parent, which can say nothing either."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def supervise(command: list[str]) -> int:
    """Runs `command` in a process group of its own until it ends, or until our input does."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=end_with_parent
    )

    def end_group(number: int) -> None:
        try:
            os.killpg(child.pid, number)
        except ProcessLookupError:
            return  # nobody of it is left

    def wait_for_run() -> None:
        # Returns when the run closes its end, alive or dead. Not sys.stdin, whose lock this thread
        # would hold when the interpreter ends, which is then fatal.
        os.read(0, 1)
        end_group(signal.SIGTERM)
        time.sleep(GRACE)
        end_group(signal.SIGKILL)

    threading.Thread(target=wait_for_run, daemon=True).start()
    code = child.wait()
    end_group(signal.SIGKILL)  # the engine must not outlive its API server
    return code


if __name__ == "__main__":
    if sys.argv[1:2] == ["--supervise"]:
        raise SystemExit(supervise(sys.argv[2:]))
    try:
        command = tyro.cli(server_command)
        if find_spec("vllm") is None:
            raise ValueError("vLLM is not installed in this environment (the README says how)")
    except ValueError as error:
        raise SystemExit(f"tools/vllm_server.py: {error}") from None
    print(shlex.join(command), flush=True)
    os.execve(command[0], command, server_environment())
