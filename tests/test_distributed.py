"""distributed.py: several ranks are one process, to rounding; a dead one ends all of them.

Ranks are forked, meet by gloo and hold tiny models. The tests at the end run torchrun as a user
does.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_train import BASE, ROOT, WIKI, checkpoints, random_pairs, rows_of
from tiny import close, randomise_adapter, tiny_config, tiny_model

import broadcast
import distributed
import sft
import train
import update
from config import Config, check_config
from distributed import LostRank, Ranks, Replica
from lora import LoRAConfig, adapter_disabled, inject_lora, lora_parameters, merge_lora
from tools.vllm_server import TorchServer


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def together(size: int, lead, directory: Path) -> tuple[object, list[int]]:
    """What lead() returns on rank 0 while the others follow, and how each rank ended."""
    port, result = free_port(), directory / f"result-{time.monotonic_ns()}.pt"

    def rank(number: int) -> None:
        os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        try:
            if number:
                distributed.follow()
            else:
                with distributed.leading():
                    torch.save(lead(), result)
        except BaseException as error:
            traceback.print_exc()
            os._exit(3 if isinstance(error, LostRank) else 1)
        os._exit(0)

    processes = [get_context("fork").Process(target=rank, args=(n,)) for n in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
        if process.is_alive():
            process.kill()
    codes = [process.exitcode for process in processes]
    return torch.load(result, weights_only=False) if result.is_file() else None, codes


# --- the same batch -------------------------------------------------------------------------------


EPS = 1e-2  # of Adam, which without it makes a difference of rounding one of the learning rate


def replica(seed: int, sharded: bool = False, kind: str = "adapter") -> Replica:
    """As start.load_replica: of a rank, whose adapter is its own until rank 0 sends one."""
    model = tiny_model(tiny_config(attention_bias=True), 0)
    if sharded:
        distributed.shard_base(model, "cpu")
    if kind == "full":
        optimizer = torch.optim.Adam(model.requires_grad_(True).parameters(), eps=EPS)
        return Replica(model, None, optimizer, 0, tiny_model(tiny_config(attention_bias=True), 0))
    lora = LoRAConfig(rank=2, alpha=4.0)
    inject_lora(model, lora)
    follows = dist.is_initialized() and dist.get_rank()
    randomise_adapter(model, seed + 1000 * follows)
    optimizer = torch.optim.Adam(lora_parameters(model).values(), eps=EPS)
    return Replica(model, lora, optimizer, 0)


@pytest.fixture(scope="module", autouse=True)
def loaded():
    """The first optimizer has torch load its compiler: once here, not in every rank."""
    replica(0)


def batches_of(seed: int, number: int) -> list:
    """`number` micro-batches of unequal sizes."""
    pairs = [pair for i in range(6) for pair in random_pairs(seed + i, 23)]
    batches = train.micro_batches(pairs, 40, "cpu")
    return batches[:number]


def state(ranks: Ranks) -> dict:
    return {name: p.detach().clone() for name, p in distributed.trainable(ranks.model).items()}


def states(ranks: Ranks, share: list) -> list:
    return [state(ranks) for _ in share]


def steps(config: Config, sharded: bool = False, kind: str = "adapter") -> dict:
    """Metrics, gradients and what is trained, of steps with 0 to 5 micro-batches."""
    model, _, optimizer, _, frozen = distributed.recruit(replica, 0, sharded, kind)
    ranks = Ranks(model, optimizer, frozen)
    ranks.lead(seed=0)
    seen = {"metrics": [], "gradients": [], "logprobs": []}
    for step, number in enumerate((3, 0, 1, 5, 2, 4)):
        batches = batches_of(step, number)
        tokens = sum(int(batch.mask.sum()) for batch in batches) or 1
        arguments = (model, batches, tokens, config, ranks.frozen, ranks)
        seen["metrics"].append(train.loss_and_backward(*arguments))
        episodes = [episode for batch in batches for episode in batch.trajectories]
        seen["logprobs"].append([episode.trainer_logprobs for episode in episodes])
        seen["gradients"].append(ranks.everywhere(step_and_show, step, config))
    seen["states"] = ranks.map(states, [None] * ranks.size)
    return seen


def step_and_show(ranks: Ranks, step: int, config: Config) -> dict:
    """step_together, but for a look at the sum of the gradients."""
    ranks.reduce_gradients()
    gradients = {
        name: None if p.grad is None else p.grad.clone()
        for name, p in distributed.trainable(ranks.model).items()
    }
    update.optimizer_step(ranks.model, ranks.optimizer, step, config)
    return gradients


def assert_as_one_process(size: int, directory: Path, config: Config, sharded=False, **more):
    expected = steps(config, **more)
    found, codes = together(size, lambda: steps(config, sharded, **more), directory)
    assert codes == [0] * size
    for one, other in zip(expected["metrics"], found["metrics"], strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert other[name] == pytest.approx(one[name], abs=1e-5), name
    for one, other in zip(expected["gradients"], found["gradients"], strict=True):
        assert one.keys() == other.keys()
        for name, gradient in one.items():
            assert (gradient is None) == (other[name] is None), name
            if gradient is not None:
                close(other[name], gradient)
    for one, other in zip(expected["logprobs"], found["logprobs"], strict=True):
        assert [len(row) for row in one] == [len(row) for row in other]
        assert sum(one, []) == pytest.approx(sum(other, []), abs=1e-5)
    assert len(found["states"]) == size
    for of_rank in found["states"]:
        for name, tensor in expected["states"][0].items():
            assert torch.equal(of_rank[name], found["states"][0][name]), name  # bit for bit
            close(of_rank[name], tensor)
    # Not a vacuous test: something was learned, and a step without any batch had no gradient.
    assert all(gradient is None for gradient in found["gradients"][1].values())
    start = {name: p.detach() for name, p in distributed.trainable(replica(0, **more)[0]).items()}
    assert any((start[name] - found["states"][0][name]).abs().max() > 0.01 for name in start)


CONFIG = {"max_grad_norm": 1e9, "lr": 0.02, "micro_tokens": 40}


@pytest.mark.parametrize("size, kl", [(2, 0.0), (3, 0.1)])
def test_ranks_compute_what_one_process_does(tmp_path, size, kl):
    """Also with fewer micro-batches than ranks, with none, and with a rest."""
    assert_as_one_process(size, tmp_path, Config(**CONFIG, kl=kl))


def test_ranks_train_every_weight_as_one_process_does(tmp_path):
    assert_as_one_process(2, tmp_path, Config(**CONFIG, kl=0.1, full=True), kind="full")


@pytest.mark.slow
@pytest.mark.parametrize("size, kl", [(2, 0.0), (3, 0.1)])
def test_ranks_with_a_part_of_the_base_compute_what_one_process_does(tmp_path, size, kl):
    assert_as_one_process(size, tmp_path, Config(**CONFIG, kl=kl), sharded=True)


def validated(sharded: bool = False) -> tuple:
    model, _, optimizer, *_ = distributed.recruit(replica, 0, sharded)
    ranks = Ranks(model, optimizer)
    ranks.lead(seed=0)
    episodes = [episode for seed in range(3) for episode, _ in random_pairs(seed, 23)]
    config = sft.SFTConfig(micro_tokens=40)
    losses = [sft.validation_loss(model, episodes, config, ranks)]
    batches = sft.in_batches(episodes, config)
    metrics = sft.pass_over(model, batches, ranks=ranks)
    gradients = ranks.everywhere(step_and_show, 0, Config(**CONFIG))
    losses.append(sft.validation_loss(model, episodes, config, ranks))
    return losses, metrics, gradients


@pytest.mark.parametrize("sharded", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_supervised_ranks_compute_what_one_process_does(tmp_path, sharded):
    losses, metrics, gradients = validated()
    (found, its_metrics, its_gradients), codes = together(2, lambda: validated(sharded), tmp_path)
    assert codes == [0, 0] and losses[0] != losses[1]
    assert found == pytest.approx(losses, abs=1e-5)
    assert its_metrics == pytest.approx(metrics, abs=1e-5)
    for name, gradient in gradients.items():
        close(its_gradients[name], gradient)


def passes_of_rank_0(sharded: bool) -> list:
    """Forward passes that the others have no part in, but for their pieces of the base."""
    model, _, optimizer, *_ = distributed.recruit(replica, 0, sharded)
    ranks = Ranks(model, optimizer)
    ranks.lead(seed=0)
    (batch,) = train.micro_batches(random_pairs(3, 23), 10**6, "cpu")
    with torch.no_grad():
        adapted, _ = model.token_logprobs(batch.ids, batch.mask)
        with adapter_disabled(model):
            base, _ = model.token_logprobs(batch.ids, batch.mask)
        ranks.everywhere(merge)
        merged, _ = model.token_logprobs(batch.ids, batch.mask)
        with adapter_disabled(model):
            again, _ = model.token_logprobs(batch.ids, batch.mask)
    piece = model.model.layers[0].mlp.up_proj.base.weight
    return [adapted, base, merged, again, sharded and piece.to_local().numel() / piece.numel()]


def merge(ranks: Ranks) -> None:
    merge_lora(ranks.model)


@pytest.mark.slow
def test_a_sharded_base_is_disabled_and_merged_as_a_whole_one(tmp_path):
    *expected, _ = passes_of_rank_0(False)
    (*found, share), codes = together(2, lambda: passes_of_rank_0(True), tmp_path)
    assert codes == [0, 0] and share == 0.5
    for one, other in zip(expected, found, strict=True):
        close(other, one)
    adapted, base, merged, again = found
    assert torch.equal(base, again) and (adapted - base).abs().max() > 0.01
    close(merged, adapted)


# --- a rank that dies -----------------------------------------------------------------------------


def die(ranks: Ranks, share: list, victim: int) -> list:
    if ranks.number == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return share


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_ends_all(tmp_path, victim):
    def lead():
        model, _, optimizer, *_ = distributed.recruit(replica, 0)
        Ranks(model, optimizer).map(die, [1, 2, 3], victim)

    start = time.monotonic()
    _, codes = together(3, lead, tmp_path)
    assert codes[victim] == -signal.SIGKILL and time.monotonic() - start < 30
    assert [code for number, code in enumerate(codes) if number != victim] == [3, 3]  # LostRank


def test_an_error_of_rank_0_sends_the_others_home(tmp_path):
    def lead():
        raise ValueError("before there is a replica")

    assert together(3, lead, tmp_path)[1] == [1, 0, 0]


def test_an_error_of_all_is_told_as_what_it_is(tmp_path):
    def lead():
        model, _, optimizer, *_ = distributed.recruit(replica, 0)
        Ranks(model, optimizer).everywhere(fail)

    assert together(3, lead, tmp_path)[1] == [1, 1, 1]  # not LostRank


def fail(ranks: Ranks) -> None:
    raise ValueError("on every rank")


def fail_alone(ranks: Ranks, share: list) -> list:
    if ranks.number == 0:
        raise ValueError("as of memory that is full")
    return share


def test_an_error_of_rank_0_alone_ends_all(tmp_path):
    """The others wait to hand in their results, and not for an order."""

    def lead():
        model, _, optimizer, *_ = distributed.recruit(replica, 0)
        Ranks(model, optimizer).map(fail_alone, [1, 2, 3])

    start = time.monotonic()
    assert together(3, lead, tmp_path)[1] == [1, 3, 3]  # as what it is; LostRank
    assert time.monotonic() - start < 30


def sleep(ranks: Ranks, share: list, seconds: float) -> list:
    time.sleep(seconds if ranks.number else 0)
    return share


@pytest.mark.slow
def test_the_others_wait_for_orders_longer_than_for_one_another(tmp_path, monkeypatch):
    monkeypatch.setattr(distributed, "PATIENCE", timedelta(seconds=3))

    def lead(sampling: float = 0, order: float = 0, share: float = 0):
        model, _, optimizer, *_ = distributed.recruit(replica, 0)
        time.sleep(sampling)
        Ranks(model, optimizer).everywhere(sleep, [], order)
        return Ranks(model, optimizer).map(sleep, [1, 2], share)

    assert together(2, partial(lead, sampling=6), tmp_path) == ([1, 2], [0, 0])
    for hanging in ({"order": 12}, {"share": 12}):
        start = time.monotonic()
        assert together(2, partial(lead, **hanging), tmp_path)[1][0] == 3  # LostRank
        assert time.monotonic() - start < 30


# --- what is said ---------------------------------------------------------------------------------


def test_a_lost_rank_is_told_without_a_time_that_nobody_waited():
    with pytest.raises(LostRank) as caught, distributed.noticing_loss():
        raise RuntimeError("[a.cpp:1] Connection closed by peer [::1]:2. More")
    assert str(caught.value).startswith("another rank died, or hangs (")


def test_the_traffic_of_qwen3_4b_is_a_244th():
    assert "66.06 MB" in distributed.traffic(16_515_072, 4_022_468_096)
    assert "16,089.87 MB (1/244)" in distributed.traffic(16_515_072, 4_022_468_096)


@pytest.mark.parametrize(
    "fields, reason",
    [
        ({}, "embedded engine samples"),
        ({"full": True}, "every weight"),
        ({"engine": "vllm", "vllm_url": ("http://x",), "quantize": "nf4"}, "one dtype"),
    ],
)
def test_a_sharded_base_is_refused_where_it_cannot_be(fields, reason):
    with pytest.raises(ValueError, match=reason):
        check_config(Config(**fields, shard_base=True))


def test_what_only_several_ranks_can_do_is_refused_and_the_other_way_round(monkeypatch):
    with pytest.raises(ValueError, match="torchrun"):
        distributed.check_ranks(Config(shard_base=True))
    distributed.check_ranks(Config(engine="vllm"))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(ValueError, match="--vllm-url"):
        distributed.check_ranks(Config(engine="vllm"))
    with pytest.raises(ValueError, match="every rank's"):
        distributed.check_ranks(Config(device="cuda:1"))
    with pytest.raises(ValueError, match="whole base that answers"):
        sft.set_up(sft.SFTConfig(shard_base=True))


# --- as a user does -------------------------------------------------------------------------------

SHORT = ["--groups", "3", "--group-size", "4", "--eval-size", "4", "--micro-tokens", "900"]


ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # another number of threads rounds otherwise


def torchrun(size: int, *arguments, program: str = "train.py", **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(size), str(ROOT / program), *map(str, arguments)]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True} | options
    return subprocess.Popen(command, env=ONE_THREAD, cwd=ROOT, **options)


def done(process: subprocess.Popen, code: int = 0) -> str:
    printed = process.communicate(timeout=300)[0]
    assert (process.returncode == 0) == (code == 0), printed
    return printed


def assert_runs_agree(one: Path, other: Path) -> None:
    """Whole runs of three steps agree within 1e-4. Of one step losses, gradients and adapter agree
    within 1e-5 (above); after it Adam's division by sqrt(v) moves an entry whose gradient is all
    but zero by a share of the learning rate, 1.5e-3, that is as large as the rounding is by chance
    (seen: 3e-5). Optimizer state that got lost would differ by 1e-3."""
    for a, b in zip(rows_of(one), rows_of(other), strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert b[name] == pytest.approx(a[name], abs=1e-4), name
    adapters = [broadcast.read_adapter(output / "adapter")[1] for output in (one, other)]
    for name, tensor in adapters[0].items():
        close(adapters[1][name], tensor, tolerance=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("program, more", [("train.py", ["--kl", "0.01", *SHORT]), ("sft.py", [])])
def test_a_run_goes_on_with_another_number_of_ranks(tmp_path, program, more):
    if program == "sft.py":
        lines = (WIKI / "demonstrations.jsonl").read_text().splitlines(keepends=True)[:40]
        (tmp_path / "data.jsonl").write_text("".join(lines))
        more = ["--data", tmp_path / "data.jsonl", "--batch-size", "5", "--micro-tokens", "900"]
        more += ["--eval-every", "2"]
    one, other = tmp_path / "one", tmp_path / "other"
    straight = [sys.executable, ROOT / program, *more, "--steps", "3", "--output", one]
    subprocess.run([*map(str, straight)], check=True, capture_output=True, env=ONE_THREAD)
    for size, steps in ((2, 1), (3, 2)):
        again = ["--resume"] if size == 3 else more
        printed = done(torchrun(size, *again, "--steps", steps, "--output", other, program=program))
        assert printed.count("parameters, frozen") == 1  # rank 0 alone prints
        assert f"{size} ranks; a step all-reduces 0.31 MB" in printed and "1/12)" in printed
    last = [ROOT / program, "--resume", "--steps", "3", "--output", other]
    command = [sys.executable, *map(str, last)]
    subprocess.run(command, check=True, capture_output=True, env=ONE_THREAD)
    assert_runs_agree(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_leaves_a_line_and_a_checkpoint(tmp_path, victim):
    output = tmp_path / "run"
    process = torchrun(2, *SHORT, "--steps", "200", "--output", output, "--save-every", "1")
    for line in process.stdout:
        if line.startswith("step   2"):
            break
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            parent = f"PPid:\t{process.pid}\n" in status.read_text()
            environment = (status.parent / "environ").read_text().split("\0") if parent else []
        except OSError:  # gone already
            continue
        if f"RANK={victim}" in environment:
            start = time.monotonic()
            os.kill(int(status.parent.name), signal.SIGKILL)
    printed = done(process, code=1)
    assert time.monotonic() - start < 45
    # Rank 0 notices by itself, or is told to end by torchrun before it does.
    assert "another rank died" in printed or "stopped after step" in printed
    assert f"rank      : {victim}" in printed  # torchrun says which one was lost
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in printed
    last = int(checkpoints(output)[-1].removeprefix("step_"))
    assert last >= 1  # of step 2 the line may be out, and the checkpoint not yet
    done(torchrun(2, "--steps", last + 1, "--output", output, "--resume"))
    assert [row["step"] for row in rows_of(output)] == list(range(1, last + 2))


@pytest.mark.slow
def test_ctrl_c_and_bad_input_are_answered_by_rank_0_alone(tmp_path):
    output = tmp_path / "run"
    printed = done(torchrun(2, "--groups", "0", "--output", output), code=1)
    assert printed.count("train.py: --groups must be") == 1 and "rank 1:" not in printed
    process = torchrun(2, *SHORT, "--steps", "200", "--output", output)
    for line in process.stdout:
        if line.startswith("step   1"):
            break
    process.send_signal(signal.SIGINT)
    printed = done(process, code=1)
    assert printed.count("go on: --output") == 1 and "another rank" not in printed
    assert checkpoints(output)


@pytest.mark.slow
def test_a_sharded_run_samples_elsewhere_and_learns_the_same(tmp_path):
    """tools/serve.py answers as vLLM does."""
    outputs = [tmp_path / "whole", tmp_path / "sharded"]

    async def both() -> str:
        async with TorchServer(str(BASE), tmp_path / "serve.log") as server:
            flags = [*SHORT, "--steps", "2", "--engine", "vllm", "--kl", "0.01"]
            flags += ["--vllm-url", server.url]
            done(torchrun(1, *flags, "--output", outputs[0]))
            more = ["--shard-base", "--gradient-checkpointing"]
            return done(torchrun(2, *flags, *more, "--output", outputs[1]))

    printed = asyncio.run(both())
    assert "changes no bit" in printed
    assert_runs_agree(*outputs)
    assert json.loads((outputs[1] / "summary.json").read_text())["eval_after"] is not None
