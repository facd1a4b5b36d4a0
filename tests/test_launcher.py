"""tools/vllm_server.py with Python stand-ins in the place of vLLM: its flags follow from the run,
and a run that ends, in whatever way, leaves no process behind.

    run ── pipe ──► supervisor ──► stand-in for the API server ──► stand-in for its engine
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

import config
import train
from client import VLLMEngine
from config import Config, check_config
from tools import vllm_server
from tools.vllm_server import (
    RunServer,
    TorchServer,
    VLLMServer,
    server_command,
    server_environment,
)

ROOT = Path(train.__file__).parent
LIMIT = 10.0  # seconds to wait for what should take a tenth of one


# --- flags ----------------------------------------------------------------------------------------


def flags_of(command: list[str]) -> dict[str, str | bool]:
    """{"port": "8000", "enable-lora": True, ...}"""
    flags, arguments = {}, command[3:]
    while arguments:
        name = arguments.pop(0).removeprefix("--")
        valued = arguments and not arguments[0].startswith("--")
        flags[name] = arguments.pop(0) if valued else True
    return flags


def test_the_flags_follow_from_the_run():
    command = server_command(
        "some/model", port=1234, max_lora_rank=16, versions=3, dtype="bfloat16", max_length=700,
        slots=32,
    )  # fmt: skip
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    shared = {
        "enable-lora": True,
        "model": "some/model",
        "host": "127.0.0.1",
        "port": "1234",
        "dtype": "bfloat16",
        "max-model-len": "700",
        "max-num-seqs": "32",
        "max-lora-rank": "16",
        "max-loras": "3",
        "max-cpu-loras": "4",  # one more, for the version that is loaded before one is retired
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
    }
    on_a_cpu = {
        "enforce-eager": True,
        "no-enable-chunked-prefill": True,
        "max-num-batched-tokens": "4096",
    }
    assert flags_of(command) == shared | on_a_cpu
    assert flags_of(server_command("m", max_length=9000))["max-num-batched-tokens"] == "9000"
    on_a_gpu = flags_of(server_command("m", device="cuda"))
    assert not set(on_a_cpu) & set(on_a_gpu) and 0 < float(on_a_gpu["gpu-memory-utilization"]) < 1


def test_what_the_user_set_in_the_environment_wins(monkeypatch):
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", raising=False)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    environment = server_environment()
    assert environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert (
        environment["VLLM_CPU_KVCACHE_SPACE"] == "7" and environment["PATH"] == os.environ["PATH"]
    )


@pytest.mark.parametrize("port", [-1, 0, 2**16])
def test_a_port_that_is_none_is_refused(port):
    with pytest.raises(ValueError, match=f"--port must be in 1..65535, not {port}"):
        server_command("m", port=port)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed")
def test_without_vllm_one_line_says_so():
    command = [sys.executable, "tools/vllm_server.py", "m"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and done.stderr.count("\n") == 1
    assert "tools/vllm_server.py: vLLM is not installed" in done.stderr and "README" in done.stderr


@pytest.mark.parametrize("rank, rounded", [(1, 1), (3, 8), (8, 8), (9, 16), (512, 512)])
def test_a_run_starts_its_server_for_a_rank_that_vllm_takes(monkeypatch, rank, rounded):
    seen = []

    class Server:
        def __init__(self, model, log, **settings):
            seen.append((model, log, settings))

        async def __aenter__(self):
            raise InterruptedError

        async def __aexit__(self, *_):
            pass

    monkeypatch.setattr(vllm_server, "VLLMServer", Server)
    fields = Config(rank, model="m", slots=5, max_length=99, dtype="bfloat16", engine="vllm")
    trainer = SimpleNamespace(
        engine=None, config=fields, run=SimpleNamespace(directory=Path("run"))
    )
    with pytest.raises(InterruptedError):
        asyncio.run(train.connect_sampler(trainer, contextlib.AsyncExitStack()))
    settings = {"max_lora_rank": rounded, "slots": 5, "max_length": 99, "dtype": "bfloat16"}
    settings |= {"device": "cpu", "threads": 0, "versions": 2}
    assert seen == [("m", Path("run/vllm.log"), settings)]


# --- configurations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"vllm_url": ("http://x",)}, "--vllm-url names servers for --engine vllm"),
        (
            {"engine": "vllm", "rank": 513, "vllm_url": ("http://x",)},
            "513: vLLM serves ranks up to",
        ),
        ({"engine": "vllm"}, "vLLM is not installed .* --vllm-url"),
        ({"engine": "vllm", "vllm_url": ("http://x",), "vllm_timeout": 0.0}, "--vllm-timeout must"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(monkeypatch, fields, message):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=message):
        check_config(Config(**fields))


def test_configurations_that_can_work_are_not(monkeypatch):
    monkeypatch.setattr(config, "find_spec", lambda name: None)
    check_config(Config(engine="vllm", rank=512, vllm_url=("http://x",)))
    check_config(Config(rank=513))
    monkeypatch.setattr(config, "find_spec", lambda name: name)
    check_config(Config(engine="vllm"))


# --- the supervisor -------------------------------------------------------------------------------

# Starts its engine, tells both process ids in a file, then does as it is told.
API_SERVER = """
import os, signal, subprocess, sys, time
code, file = sys.argv[1:]
engine = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open(file + ".tmp", "w").write(f"{os.getpid()} {engine.pid}")
os.rename(file + ".tmp", file)
exec(code)
time.sleep(60)
"""
# A run that starts a server, tells the process id of its supervisor, then does as it is told.
RUN = """
import os, signal, subprocess, sys, time
code, *command = sys.argv[1:]
supervisor = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
print(supervisor.pid, flush=True)
sys.stdin.readline()
exec(code)
"""


def is_running(process: int) -> bool:
    """Neither gone nor a zombie that nobody has waited for yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually(condition) -> bool:
    deadline = time.monotonic() + LIMIT
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def supervised(api_server: str, file: Path, grace: float = LIMIT) -> list[str]:
    """The command of a supervisor of a stand-in, whose two process ids come to stand in `file`."""
    code = f"import sys; from tools import vllm_server as v; v.GRACE = {grace}; "
    command = [sys.executable, "-c", API_SERVER, api_server, str(file)]
    code += f"raise SystemExit(v.supervise({command!r}))"
    return [sys.executable, "-c", code]


@contextlib.contextmanager
def running(how: str, api_server: str, tmp_path: Path, grace: float = LIMIT):
    """A run with its server; yields it and the processes that it started, which end with it."""
    command = supervised(api_server, tmp_path / "pids", grace)
    pids = []
    run = subprocess.Popen(
        [sys.executable, "-c", RUN, how, *command], cwd=ROOT, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        pids.append(int(run.stdout.readline()))
        assert eventually((tmp_path / "pids").exists)
        pids += map(int, (tmp_path / "pids").read_text().split())
        yield run, pids
    finally:
        run.kill()
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
        run.communicate()


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


@needs_proc
@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "sys.exit()"])
def test_a_run_that_ends_leaves_no_process(tmp_path, how):
    with running(how, "", tmp_path) as (run, pids):
        assert len(pids) == 3 and all(map(is_running, pids))
        group = os.getpgid(pids[1])
        assert os.getpgid(pids[2]) == group != os.getpgid(pids[0])
        run.stdin.write("\n")
        run.stdin.flush()
        assert eventually(lambda: not any(map(is_running, pids)))


@needs_proc
def test_a_server_that_ignores_the_request_to_end_is_killed(tmp_path):
    ignoring = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with running("sys.exit()", ignoring, tmp_path, grace=0.1) as (run, pids):
        run.stdin.write("\n")
        run.stdin.flush()
        assert eventually(lambda: not any(map(is_running, pids)))


@needs_proc
def test_an_engine_does_not_outlive_its_api_server(tmp_path):
    with running("", "", tmp_path) as (run, pids):
        os.kill(pids[1], signal.SIGKILL)  # as when memory runs out
        assert eventually(lambda: not any(map(is_running, pids[1:])))
        assert run.poll() is None


@needs_proc
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the kernel does not tell")
def test_a_server_does_not_outlive_a_supervisor_that_is_killed(tmp_path):
    """Nor the run's knowledge of it: its server is gone at once, not when the run ends."""
    ending = "signal.signal(signal.SIGTERM, lambda *_: (engine.kill(), sys.exit()))"
    with running("", ending, tmp_path) as (run, pids):
        os.kill(pids[0], signal.SIGKILL)
        assert eventually(lambda: not any(map(is_running, pids)))
        assert run.poll() is None


def test_the_supervisor_ends_with_the_exit_code_of_its_server(tmp_path):
    command = supervised("sys.exit(7)", tmp_path / "pids")
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        code, words = run.wait(LIMIT), run.stderr.read()
    assert (code, words) == (7, b"")  # no word of its own that would hide the server's


# --- a run's server -------------------------------------------------------------------------------


def stand_in(monkeypatch, code: str) -> None:
    """From here on a VLLMServer runs this Python code; its port is sys.argv[1]."""

    def command(model, *, port, **settings):
        return [sys.executable, "-c", code, str(port)]

    monkeypatch.setattr(vllm_server, "server_command", command)
    monkeypatch.setattr(vllm_server, "START_LIMIT", LIMIT)


ANSWERING = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


async def entered(server: VLLMServer) -> int:
    """Starts a server and ends it; returns its exit code."""
    async with server:
        assert server.process.poll() is None and server.answers()
        assert "it is still running; the end of" in server.last_words()
    return server.process.returncode


def test_a_server_is_awaited_used_and_ended(tmp_path, monkeypatch, capfd):
    stand_in(monkeypatch, ANSWERING)
    server = VLLMServer("some/model", tmp_path / "vllm.log")
    assert asyncio.run(entered(server)) != 0  # ended by a signal
    assert not server.answers()
    printed = capfd.readouterr().out
    assert f"vLLM is starting (log: {server.log})" in printed
    assert f"vLLM is ready at {server.url}" in printed
    assert "GET /health" in server.log.read_text()


def test_a_server_that_was_killed_is_not_called_alive(tmp_path, monkeypatch):
    """The first call that fails may come before its supervisor has ended."""
    kill = "os.kill(os.getpid(), 9) if self.path == '/die' else "
    dying = ANSWERING.replace("200 if", f"{kill}200 if").replace("import sys", "import os, sys")
    stand_in(monkeypatch, dying)

    async def scenario():
        async with VLLMServer("some/model", tmp_path / "vllm.log") as server:
            client = object.__new__(VLLMEngine)  # its connection alone
            client.timeout, client.last_words = LIMIT, server.last_words
            with pytest.raises(RuntimeError, match="it ended with exit code"):
                client.call(server.url, "/die")

    asyncio.run(scenario())


def test_a_server_that_fails_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch):
    code = 'import sys\nfor n in range(20): print("line", n, file=sys.stderr)\nsys.exit(3)'
    stand_in(monkeypatch, code)
    with pytest.raises(RuntimeError, match="did not start: it ended with exit code 3") as caught:
        asyncio.run(entered(VLLMServer("some/model", tmp_path / "vllm.log")))
    message = str(caught.value)
    assert "line 19" in message and "line 12" in message and "line 11" not in message
    assert str(tmp_path / "vllm.log") in message


def test_a_server_that_never_answers_is_ended(tmp_path, monkeypatch):
    stand_in(monkeypatch, "import time; print('loading', flush=True); time.sleep(60)")
    monkeypatch.setattr(vllm_server, "START_LIMIT", 0.1)
    server = VLLMServer("some/model", tmp_path / "vllm.log")
    with pytest.raises(RuntimeError, match="does not answer: it is still running"):
        asyncio.run(entered(server))
    assert server.process.returncode is not None


def test_a_cancelled_start_leaves_no_process(tmp_path, monkeypatch):
    stand_in(monkeypatch, "import time; time.sleep(60)")
    server = VLLMServer("some/model", tmp_path / "vllm.log")

    async def cancelled():
        task = asyncio.create_task(entered(server))
        await asyncio.sleep(0.1)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancelled())
    assert server.process.returncode is not None


class Healthy(BaseHTTPRequestHandler):
    """Another server, which would pass for ours."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


def test_a_port_in_use_is_reported_and_nobody_else_is_taken_for_our_server(tmp_path, monkeypatch):
    stand_in(monkeypatch, "import time; time.sleep(60)")
    other = HTTPServer(("127.0.0.1", 0), Healthy)
    threading.Thread(target=other.serve_forever, daemon=True).start()
    try:
        server = VLLMServer("some/model", tmp_path / "vllm.log", port=other.server_port)
        with pytest.raises(RuntimeError, match=f"port {other.server_port} is in use"):
            asyncio.run(entered(server))
    finally:
        other.shutdown()
        other.server_close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells whose a port is")
def test_who_takes_the_port_during_the_start_and_answers_is_not_taken_for_our_server(
    tmp_path, monkeypatch
):
    stand_in(monkeypatch, "import sys; sys.stdin.read(); import time; time.sleep(0.5)")
    server = VLLMServer("some/model", tmp_path / "vllm.log")
    others = []

    def take_port(*_):  # between the look at the port and the start of what should have it
        others.append(HTTPServer(("127.0.0.1", server.port), Healthy))
        threading.Thread(target=others[0].serve_forever, daemon=True).start()
        return "a server's command"

    monkeypatch.setattr(vllm_server.shlex, "join", take_port)
    try:
        with pytest.raises(RuntimeError, match="did not start: it ended with exit code 0"):
            asyncio.run(entered(server))
        assert vllm_server.listeners(server.port) == [{os.getpid()}]
    finally:
        others[0].shutdown()
        others[0].server_close()


CHOOSING = ANSWERING.replace("HTTPServer((", "server = HTTPServer((").replace(
    ".serve_forever()", "\nprint('serving at http://127.0.0.1:%d' % server.server_port, flush=True)"
    "\nserver.serve_forever()",
)  # fmt: skip


def test_a_server_that_chooses_its_port_is_found_where_it_says(tmp_path):
    """In what it says itself: the log may hold what a server before it said."""
    log = tmp_path / "serve.log"
    log.write_text("serving at http://127.0.0.1:1\n")
    server = RunServer("some server", [sys.executable, "-c", CHOOSING, "0"], 0, log)
    asyncio.run(entered(server))
    assert f"serving at {server.url}\n" in log.read_text()
    assert "--port 0" in " ".join(TorchServer("some/model", log, slots=3).command)


def test_a_port_that_is_taken_during_the_start_is_reported(tmp_path, monkeypatch):
    stand_in(monkeypatch, ANSWERING)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, but nobody listens yet
        server = VLLMServer("some/model", tmp_path / "vllm.log", port=taken.getsockname()[1])
        with pytest.raises(RuntimeError, match="exit code 1;(.|\n)*Address already in use"):
            asyncio.run(entered(server))
