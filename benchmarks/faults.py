"""Kills a run's processes with -9 at random moments, resumes it, and checks what came out.

    .venv/bin/python benchmarks/faults.py --rounds 60 --result benchmarks/faults.json

Six kinds of rounds in turn, each with its own `undisturbed` run of the same small job before:

    trainer, in turns      python train.py; bit for bit the undisturbed run
    trainer, overlapped    with --max-staleness 1
    trainer, shared        on a server that was there before and stays
    sampler                overlapped; the server that the run started is killed, the run must end
    supervisor             overlapped; what watches that server is killed, the run must end
    server                 in turns, on a server that was there before; killed and started anew

A moment is anywhere from a run's start to its end, the final evaluation and what it writes after it
included. A round counts as a kill if a process was there to be killed and the run ended with an
error; others (no server yet, or the run had ended) are in the result, and that kind is tried again.

After every kill: no process of the run is left, every published version is complete, and a server
that lives on names none that was not published. After `--resume`, beside the undisturbed run: every
step is there once, in order, with as many samples of the same questions; as many episodes were
trained on, and the others counted as dropped; no trajectory is older than the bound; the held-out
reward is the same before training, and after it the same where the run is bit for bit, else within
EVAL_BOUND (a resumed run samples some steps by newer versions, and a server's batches are others).
The newest version alone is left on disk, none on a shared server, and no process.

--result: written after every round; a benchmark that is run again goes on where it was.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from broadcast import list_published, read_adapter  # noqa: E402
from client import call  # noqa: E402
from tools.vllm_server import TorchServer, listeners  # noqa: E402

STEPS, EPISODES = 6, 8  # a step: --groups times --group-size
EVAL_BOUND = 0.25  # of eval_after: 8 of the 32 held-out questions
# With a KL, so that every episode is trained on and the samples are of one question a step.
JOB = f"""--steps {STEPS} --save-every 2 --groups 2 --group-size 4 --eval-size 32 --kl 0.001
    --threads 1""".split()
OVERLAPPED = ["--max-staleness", "1", "--sampler-threads", "1"]
KINDS = {  # what is killed -> flags of the run
    "trainer, in turns": [],
    "trainer, overlapped": OVERLAPPED,
    "trainer, shared": ["--engine", "vllm"],
    "sampler": OVERLAPPED,
    "supervisor": OVERLAPPED,
    "server": ["--engine", "vllm"],
}
MARK = "FAULTS_RUN"  # in the environment of a run and so of all that it starts
TIMES = ("seconds", "seconds_waiting", "sample_tokens_per_second", "train_tokens_per_second")
LIMIT = 300.0  # seconds for what takes ten


def is_server(command: str) -> bool:
    """Whether it is tools/serve.py itself, not what watches it."""
    return "serve.py" in command and "--supervise" not in command


def is_supervisor(command: str) -> bool:
    return "--supervise" in command


def server_process(url: str) -> int:
    """The number of the process that serves at a URL."""
    ((process,),) = listeners(int(url.rpartition(":")[2]))
    return process


class Job:
    """Processes of one run: train.py and whatever it starts, found by a mark."""

    def __init__(self, output: Path, flags: list[str]):
        self.output, self.flags = output, flags
        self.mark = f"{MARK}={os.getpid()}-{output.name}"

    def start(self, *more: str) -> subprocess.Popen:
        command = [sys.executable, str(ROOT / "train.py"), "--output", str(self.output)]
        environment = os.environ | dict([self.mark.split("=")])
        with self.output.with_suffix(".log").open("a") as log:
            return subprocess.Popen(
                [*command, *JOB, *self.flags, *more], stdout=log, stderr=log, env=environment
            )

    def finish(self, *more: str) -> None:
        code = self.start(*more).wait(LIMIT)
        if code:
            log = self.output.with_suffix(".log").read_text().splitlines()
            raise AssertionError("\n".join([f"{self.output.name}: exit code {code}", *log[-9:]]))

    def steps_done(self) -> int:
        file = self.output / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.is_file() else 0

    def wait_for(self, steps: int, process: subprocess.Popen) -> None:
        """Until so many steps are done, or the process ends."""
        while self.steps_done() < steps and process.poll() is None:
            time.sleep(0.02)

    def processes(self) -> dict[int, str]:
        """Number -> command line, of all that live; none of other users' or of ours."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if self.mark.encode() in (entry / "environ").read_bytes().split(b"\0"):
                        command = (entry / "cmdline").read_bytes().split(b"\0")
                        found[int(entry.name)] = b" ".join(command).decode()
                except (FileNotFoundError, ProcessLookupError, PermissionError):
                    continue
        return found

    def wait_until_gone(self) -> None:
        deadline = time.monotonic() + LIMIT
        while left := self.processes():
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {left}")
            time.sleep(0.1)

    def rows(self, file: str = "metrics.jsonl") -> list[dict]:
        lines = (self.output / file).read_bytes().splitlines()
        return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]

    def facts(self, file: str = "summary.json") -> dict:
        return json.loads((self.output / file).read_text())

    def published(self) -> list[Path]:
        """All versions on disk, each read and found complete."""
        attempts = sorted((self.output / "broadcasts").glob("attempt_*"))
        versions = [path for attempt in attempts for path in list_published(attempt)]
        for path in versions:
            read_adapter(path)
        return versions


def served(url: str) -> dict[str, Path]:
    """Adapter -> directory, as a server tells."""
    entries = call(f"{url}/v1/models").json()["data"]
    return {entry["id"]: Path(entry["root"]) for entry in entries if entry["parent"]}


def check(job: Job, reference: Job, bit_for_bit: bool, staleness: int) -> None:
    """AssertionError unless the resumed run ended as the undisturbed one did."""
    rows = job.rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1)), rows
    ages = [row["step"] - 1 - row["version"] for row in rows]
    assert [row["staleness_max"] for row in rows] == ages and max(ages) <= staleness, ages
    assert all(row["tokens_sampled"] > 0 and row["tokens_trained"] > 0 for row in rows), rows
    questions, theirs = (
        [(row["step"], row["question"]) for row in each.rows("samples.jsonl")]
        for each in (job, reference)
    )
    assert questions == theirs, (questions, theirs)
    summary, expected = job.facts(), reference.facts()
    assert summary["steps"] == STEPS
    assert summary["eval_before"] == expected["eval_before"]
    evaluations = summary["eval_after"], expected["eval_after"]
    assert abs(evaluations[0] - evaluations[1]) <= EVAL_BOUND, evaluations
    started, dropped = job.facts("run.json")["episodes_started"], summary["episodes_dropped"]
    assert started - dropped == STEPS * EPISODES, (started, dropped)
    assert [path.name for path in job.published()] == [f"v{STEPS:06d}"]
    job.wait_until_gone()
    if bit_for_bit:
        assert rows == reference.rows()
        assert evaluations[0] == evaluations[1]
        for name in ("adapter/adapter_model.safetensors", "samples.jsonl"):
            ours, theirs = (path / name for path in (job.output, reference.output))
            assert ours.read_bytes() == theirs.read_bytes(), name


async def round_of(kind: str, job: Job, reference: Job, moment: float) -> dict:
    """One kill and its repair. moment 2.4: after two steps and 0.4 of the time that the undisturbed
    run took for its third, whatever else the machine does meanwhile; 6.4: in what follows the last
    step."""
    shared, command = None, []
    if "vllm" in job.flags:
        shared = TorchServer(MODEL, job.output.with_suffix(".server.log"), threads=1)
        await shared.__aenter__()
        command = ["--vllm-url", shared.url]
    try:
        process = job.start(*command)
        job.wait_for(int(moment), process)
        time.sleep(moment % 1 * reference.seconds[int(moment)])
        victims = [process.pid] if kind.startswith("trainer") else []
        if kind in ("sampler", "supervisor"):
            wanted = is_server if kind == "sampler" else is_supervisor
            victims = [number for number, line in job.processes().items() if wanted(line)]
        if kind == "server":
            victims = [server_process(shared.url)]
        struck = 0
        for victim in victims:
            with contextlib.suppress(ProcessLookupError):  # it had ended
                os.kill(victim, signal.SIGKILL)
                struck += 1
        code = process.wait(LIMIT)
        job.wait_until_gone()
        rows = job.steps_done()
        assert code or rows == STEPS, f"{kind}: ended well after {rows} steps"
        versions = job.published() if job.output.exists() else []
        if kind == "trainer, shared":
            assert set(served(shared.url).values()) <= set(versions)
        if kind == "server":
            await shared.__aexit__()
            shared = TorchServer(MODEL, shared.log, threads=1)
            await shared.__aenter__()
            command = ["--vllm-url", shared.url]
        begun = (job.output / "config.toml").is_file()
        job.finish(*command, *(["--resume"] if begun else []))
        if shared:
            assert served(shared.url) == {}
    finally:
        if shared:
            await shared.__aexit__()
    check(job, reference, kind == "trainer, in turns", 1 if OVERLAPPED[0] in job.flags else 0)
    entry = {"kind": kind, "moment": moment, "victims": struck, "exit_code": code}
    return entry | {"steps_done": rows, "eval_after": job.facts()["eval_after"]}


def is_kill(entry: dict) -> bool:
    """Whether somebody was killed, and the run ended of it: by the signal, or with its error."""
    ended = -signal.SIGKILL if entry["kind"].startswith("trainer") else 1
    return entry["victims"] > 0 and entry["exit_code"] == ended


MODEL = str(ROOT / "assets" / "tiny-qwen3")


async def undisturbed(kind: str, job: Job) -> Job:
    """Runs it; job.seconds: to the end of the first step, from there to that of the second, ...,
    and from that of the last to the end of the run."""
    async with contextlib.AsyncExitStack() as stack:
        flags = []
        if "vllm" in job.flags:
            log = job.output.with_suffix(".server.log")
            server = await stack.enter_async_context(TorchServer(MODEL, log, threads=1))
            flags = ["--vllm-url", server.url]
        clock, process = [time.monotonic()], job.start(*flags)
        for step in range(1, STEPS + 1):
            job.wait_for(step, process)
            clock.append(time.monotonic())
        code = process.wait(LIMIT)
        clock.append(time.monotonic())
        assert not code, f"{kind}: exit code {code}"
    job.seconds = [after - before for before, after in itertools.pairwise(clock)]
    job.published()
    assert sum(row["tokens_trained"] > 0 for row in job.rows()) > STEPS // 2, "a job that learns"
    return job


async def run(options) -> None:
    result = Path(options.result) if options.result else None
    rounds = json.loads(result.read_text())["rounds"] if result and result.is_file() else []
    started, references = time.monotonic(), {}
    with tempfile.TemporaryDirectory(prefix="faults-") as directory:
        while (kills := sum(map(is_kill, rounds))) < options.rounds:
            number, kind = len(rounds), list(KINDS)[kills % len(KINDS)]
            if number >= 10 and not any(map(is_kill, rounds[-10:])):
                raise AssertionError(f"{kind}: ten rounds without a kill")
            if kind not in references:
                job = Job(Path(directory) / f"undisturbed-{len(references)}", KINDS[kind])
                references[kind] = await undisturbed(kind, job)
            moment = random.Random(options.seed + number).uniform(0, STEPS + 1)
            job = Job(Path(directory) / f"round-{number}", KINDS[kind])
            rounds.append(await round_of(kind, job, references[kind], moment))
            print(json.dumps({"round": number + 1, **rounds[-1]}), flush=True)
            if result:
                text = json.dumps({"benchmark": "faults", "seed": options.seed, "rounds": rounds})
                result.write_text(text + "\n")
    killed = [entry for entry in rounds if is_kill(entry)]
    print(f"{time.monotonic() - started:.0f} s, {len(rounds) - len(killed)} rounds without a kill")
    print("killed, and the run ended as an undisturbed one:")
    for kind, times in Counter(entry["kind"] for entry in killed).items():
        done = [entry["steps_done"] for entry in killed if entry["kind"] == kind]
        print(f"  {kind:20} {times:3} times, after {min(done)} to {max(done)} of {STEPS} steps")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=len(KINDS), help="kills in all")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--result", help="a JSON file, from which an earlier start goes on")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
