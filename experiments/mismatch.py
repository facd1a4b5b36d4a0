"""Trainer against sampler: what dtype, merging and temperature do to the gap of their logprobs.

    .venv-vllm/bin/python -m experiments mismatch     four minutes on two cores

The streams are fixed once: held-out episodes, sampled in fp32 at temperature 1 under an adapter
that six steps of train.py made.

    embedded   every stream, token by token: the prompts prefilled, then a token a step against the
               cache, as TorchEngine decodes; log softmax(logits / temperature) of the token there
    vLLM       a server for each dtype and application; every turn of every stream is sampled anew
               after the same tokens before it, since vLLM gives the logprobs that count (after
               temperature) of what it samples alone
    trainer    model.token_logprobs of the same tokens in one pass, adapter unmerged

Merged: W0 + (alpha / r) B A as one matrix in the sampler's dtype; for vLLM a checkpoint of those.
Without vLLM in the environment the full form is refused, since it would put half a table in the
place of the committed one; --quick leaves vLLM's half out then, and the verdict says so.

Axes: S sequences, T tokens.
"""

import asyncio
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from importlib.util import find_spec
from pathlib import Path

import safetensors.torch
import torch
from matplotlib import pyplot
from torch import Tensor

from benchmarks.vllm_client import package_versions
from broadcast import load_adapter, read_adapter
from chat import load_tokenizer
from config import Config
from experiments.page import CannotRun
from experiments.runs import ROOT
from grpo import mismatch_metrics
from lora import adapter_disabled, inject_lora, lora_layers, merge_lora, unmerge_lora
from model import KVCache, Qwen3
from rollout import Request, TorchEngine, Trajectory, VLLMEngine, run_groups
from start import load_environments
from tools.vllm_server import VLLMServer
from update import MISMATCH_BOUND, Batch, micro_batches

MINUTES = 8
MODEL = ROOT / "assets" / "tiny-qwen3"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
ENGINES = ("embedded", "vLLM")
TEMPERATURES = (1.0, 0.7)
STREAMS, VLLM_STREAMS = 128, 32  # vLLM's turns are scored one by one, in bf16 for minutes
MAX_LENGTH, MAX_NEW_TOKENS, STEPS = 512, 64, 6


# --- what is compared -----------------------------------------------------------------------------


def train_adapter(scratch: Path, steps: int) -> Path:
    """A real adapter: B has moved by a few steps of RL."""
    command = [sys.executable, str(ROOT / "train.py"), "--rank", "8", "--steps", str(steps)]
    command += ["--groups", "8", "--eval-size", "8", "--output", str(scratch / "run")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return scratch / "run" / "adapter"


def load_model(dtype: str, adapter: Path) -> Qwen3:
    """The base in this dtype with the adapter as the trainable one (fp32 masters)."""
    model = Qwen3.from_pretrained(MODEL, getattr(torch, dtype))
    inject_lora(model, read_adapter(adapter)[0])
    load_adapter(model, adapter)
    return model.eval()


async def play_streams(model: Qwen3, adapter: Path, streams: int) -> list[Trajectory]:
    environment = load_environments(Config())[1]
    engine = TorchEngine(model, streams, MAX_LENGTH)
    engine.add_adapter("sampler", adapter)
    groups = await run_groups(
        engine,
        load_tokenizer(str(MODEL)),
        environment,
        environment.eval[:streams],
        1,
        seed=0,
        step=0,
        adapter="sampler",
        version=0,
        temperature=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
    )
    engine.remove_adapter("sampler")
    return [episode for group in groups for episode in group]


def batches_of(streams: list[Trajectory], tokens: int = 4096) -> list[Batch]:
    """As train.py splits them, by length."""
    return micro_batches([(stream, 0.0) for stream in streams], tokens, "cpu")


@torch.no_grad()
def trainer_logprobs(model: Qwen3, batches: list[Batch], temperature: float) -> Tensor:
    """Of all sampled tokens, in one row."""
    parts = [
        model.token_logprobs(batch.ids, batch.mask, temperature)[0][batch.mask] for batch in batches
    ]
    return torch.cat(parts)


@torch.no_grad()
def decode_logprobs(model: Qwen3, batch: Batch) -> dict[float, Tensor]:
    """temperature -> the sampled tokens' logprobs, in one row, by prefill and decode."""
    S, T = batch.ids.shape
    weight = model.model.embed_tokens.weight
    cache = KVCache(model.config, S, T, weight.dtype)
    logprobs = {temperature: torch.zeros(S, T - 1) for temperature in TEMPERATURES}
    start, end = 0, int(batch.mask.int().argmax(1).min()) + 1  # prompts that all streams have
    while end < T:
        starts = torch.full((S,), start)
        logits = model.extend(batch.ids[:, start:end], cache, slice(0, S), starts).float()
        for temperature, found in logprobs.items():
            wide = torch.log_softmax(logits / temperature, -1)
            found[:, end - 1] = wide.gather(1, batch.ids[:, end : end + 1]).squeeze(1)
        start, end = end, end + 1
    return {temperature: found[batch.mask] for temperature, found in logprobs.items()}


# --- vLLM -----------------------------------------------------------------------------------------


def merged_checkpoint(model: Qwen3, dtype: str, directory: Path) -> Path:
    """A checkpoint whose projections are the merged matrices, in the model's dtype."""
    shutil.copytree(MODEL, directory)
    merge_lora(model)
    tensors = dict(Qwen3.from_pretrained(MODEL, getattr(torch, dtype)).state_dict())
    for name, layer in lora_layers(model).items():
        tensors[f"{name}.weight"] = layer.merged
    unmerge_lora(model)
    safetensors.torch.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((directory / "config.json").read_text()) | {"torch_dtype": dtype}
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


async def sample_turns(
    engine: VLLMEngine, streams: list[Trajectory], stop: tuple[int, ...], temperature: float
) -> list[Trajectory]:
    """Every turn of every stream, sampled anew after the tokens that stand before it."""
    prefixes = [
        stream.token_ids[:place]
        for stream in streams
        for place in range(1, len(stream.token_ids))
        if stream.loss_mask[place] > stream.loss_mask[place - 1]
    ]
    adapter = engine.adapters[0] if engine.adapters else None  # none: the server's base is merged

    async def turn(number: int, prefix: list[int]) -> Trajectory:
        request = Request(prefix, MAX_NEW_TOKENS, temperature, adapter, stop, number)
        sampled = Trajectory(None, adapter, 0, [])
        sampled.add_forced(prefix)
        sampled.add_sampled(await engine.generate(request))
        return sampled

    return await asyncio.gather(*(turn(*pair) for pair in enumerate(prefixes)))


async def sample_with_servers(
    models: dict[str, Qwen3], streams: list[Trajectory], adapter: Path, scratch: Path
) -> dict[tuple, list[Batch]]:
    """(dtype, application, temperature) -> what vLLM sampled, with its logprobs."""
    stop, sampled = load_tokenizer(str(MODEL)).stop_token_ids, {}
    for dtype, model in models.items():
        checkpoints = {
            "unmerged": MODEL,
            "merged": merged_checkpoint(model, dtype, scratch / f"merged-{dtype}"),
        }
        servers = {
            application: VLLMServer(
                str(path),
                scratch / f"{dtype}-{application}.log",
                dtype=dtype,
                max_length=MAX_LENGTH,
            )
            for application, path in checkpoints.items()
        }
        async with AsyncExitStack() as stack:
            await asyncio.gather(*map(stack.enter_async_context, servers.values()))
            for application, server in servers.items():
                engine = VLLMEngine(model, [server.url], MAX_LENGTH)
                stack.push_async_callback(engine.close)
                if application == "unmerged":
                    engine.add_adapter("sampler", adapter)
                for temperature in TEMPERATURES:
                    turns = await sample_turns(engine, streams, stop, temperature)
                    sampled[dtype, application, temperature] = batches_of(turns)
    return sampled


# --- the comparison -------------------------------------------------------------------------------


def compare(row: dict, trainer: Tensor, sampler: Tensor) -> dict:
    """The row with its metrics."""
    gaps = (trainer.double() - sampler.double()).abs().sort().values
    metrics = mismatch_metrics(trainer, sampler, torch.ones_like(trainer))
    row |= {name: metrics[name] for name in ("mismatch_kl", "mismatch_mean", "mismatch_max")}
    row |= {"p99": torch.quantile(gaps, 0.99).item(), "tokens": len(gaps)}
    print(
        f"{row['engine']:<9}{row['trainer']:<9}{row['sampler']:<9}{row['application']:<9}"
        f"{row['temperature']:>4}{row['mismatch_kl']:>10.1e}{row['mismatch_mean']:>10.1e}"
        f"{row['p99']:>10.1e}{row['mismatch_max']:>10.1e}{row['tokens']:>8,}",
        flush=True,
    )
    return row


def pairs() -> list[tuple[str, str, str, float]]:
    """(trainer's dtype, sampler's dtype, application, temperature)."""
    dtypes = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
    return [
        (*both, application, temperature)
        for both in dtypes
        for application in ("unmerged", "merged")
        for temperature in TEMPERATURES
    ]


def embedded_rows(models: dict[str, Qwen3], batch: Batch) -> list[dict]:
    sampler = {}
    for dtype, model in models.items():
        sampler[dtype, "unmerged"] = decode_logprobs(model, batch)
        merge_lora(model)
        sampler[dtype, "merged"] = decode_logprobs(model, batch)
        unmerge_lora(model)
    rows = []
    for ours, theirs, application, temperature in pairs():
        row = named_row("embedded", ours, theirs, application, temperature)
        trainer = trainer_logprobs(models[ours], [batch], temperature)
        rows.append(compare(row, trainer, sampler[theirs, application][temperature]))
    return rows


def vllm_rows(models: dict[str, Qwen3], sampled: dict[tuple, list[Batch]]) -> list[dict]:
    rows = []
    for ours, theirs, application, temperature in pairs():
        row = named_row("vLLM", ours, theirs, application, temperature)
        batches = sampled[theirs, application, temperature]
        trainer = trainer_logprobs(models[ours], batches, temperature)
        sampler = torch.cat([batch.sampler_logprobs[batch.mask] for batch in batches])
        rows.append(compare(row, trainer, sampler))
    return rows


def named_row(engine: str, ours: str, theirs: str, application: str, temperature: float) -> dict:
    return {
        "engine": engine,
        "trainer": SHORT[ours],
        "sampler": SHORT.get(theirs, theirs),
        "application": application,
        "temperature": temperature,
    }


def base_row(model: Qwen3, batch: Batch) -> dict:
    """The yardstick: the gap if the sampler served the base instead of the adapter."""
    row = named_row("-", "float32", "base", "-", 1.0)
    with adapter_disabled(model):
        base = trainer_logprobs(model, [batch], 1.0)
    return compare(row, trainer_logprobs(model, [batch], 1.0), base)


# --- what it shows --------------------------------------------------------------------------------


def criteria(rows: list[dict]) -> dict[str, bool]:
    """The criteria that mismatch.md states, each with whether it holds."""
    by_key = {tuple(list(row.values())[:5]): row for row in rows}

    def row(engine, dtype, application="unmerged", temperature=1.0):
        return by_key[engine, dtype, dtype, application, temperature]

    held = {}
    for engine in engines_of(rows):
        exact = [r for r in rows if r["engine"] == engine and r["trainer"] == r["sampler"]]
        fp32 = [r["mismatch_max"] for r in exact if r["sampler"] == "fp32"]
        bf16 = [r["mismatch_max"] for r in exact if r["sampler"] == "bf16"]
        means = row(engine, "bf16")["mismatch_mean"] / row(engine, "fp32")["mismatch_mean"]
        merging = {
            dtype: row(engine, dtype, "merged")["mismatch_kl"] / row(engine, dtype)["mismatch_kl"]
            for dtype in ("fp32", "bf16")
        }
        colder = {
            dtype: row(engine, dtype, temperature=0.7)["mismatch_mean"]
            / row(engine, dtype)["mismatch_mean"]
            for dtype in ("fp32", "bf16")
        }
        held |= {
            f"1 {engine}: fp32 below 1e-4, largest {max(fp32):.1e}": max(fp32) < 1e-4,
            f"2 {engine}: bf16 below 0.5, largest {max(bf16):.2g}": max(bf16) < 0.5,
            f"2 {engine}: bf16's mean gap 1,000 times fp32's or more: {means:,.0f}": means >= 1e3,
            f"3 {engine}: merged bf16 has twice the KL or more: {merging['bf16']:.2f}": (
                merging["bf16"] >= 2
            ),
            f"3 {engine}: merged fp32 within a factor 3: {merging['fp32']:.2f}": (
                1 / 3 < merging["fp32"] < 3
            ),
            f"4 {engine}: the colder mean gap 1.2 to 1.7 times: fp32 {colder['fp32']:.2f}, "
            f"bf16 {colder['bf16']:.2f}": all(1.2 < ratio < 1.7 for ratio in colder.values()),
        }
    return held


def engines_of(rows: list[dict]) -> list[str]:
    return [engine for engine in ENGINES if engine in {row["engine"] for row in rows}]


def verdict(result: dict) -> tuple[str, str]:
    held = criteria(result["rows"])
    failing = [statement for statement, holds in held.items() if not holds]
    if "vLLM" not in engines_of(result["rows"]):
        return "undecided", "vLLM, half of the comparison, was not measured."
    why = f"{len(held) - len(failing)} of {len(held)} statements hold"
    return ("disagrees", f"{why}; not: {'; '.join(failing)}.") if failing else ("agrees", why)


def table(result: dict) -> str:
    """A line a comparison."""
    head = "engine trainer sampler application temperature mismatch_kl mean p99 max tokens".split()
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in result["rows"]:
        cells = [row[name] for name in ("engine", "trainer", "sampler", "application")]
        cells += [f"{row['temperature']:.1f}"]
        cells += [f"{row[n]:.1e}" for n in ("mismatch_kl", "mismatch_mean", "p99", "mismatch_max")]
        lines.append(f"| {' | '.join([*cells, format(row['tokens'], ',')])} |")
    return "\n".join(lines)


def draw(result: dict) -> pyplot.Figure:
    """For each engine and comparison the mean, the 99th percentile and the largest of the gaps."""
    engines = engines_of(result["rows"])
    size = (5.8 * len(engines), 4.8)
    figure, axes = pyplot.subplots(
        1, len(engines), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    colours = {"fp32": "tab:blue", "bf16": "tab:orange", "base": "tab:gray"}
    for axis, engine in zip(axes[0], engines, strict=True):
        rows = [row for row in result["rows"] if row["engine"] in (engine, "-")]
        labels = []
        for place, row in enumerate(reversed(rows)):
            colour = colours[row["sampler"]]
            ends = [row["mismatch_mean"], row["p99"], row["mismatch_max"]]
            axis.plot([ends[0], ends[-1]], [place, place], color=colour, alpha=0.5)
            for value, marker in zip(ends, "o|>", strict=True):
                axis.plot(value, place, marker, color=colour, ms=9 if marker == "|" else 6)
            labels.append(
                f"{row['trainer']} : {row['sampler']} {row['application']}, T {row['temperature']}"
                if row["engine"] == engine
                else "fp32 : the base instead"
            )
        for dtype, bound in result["bounds"].items():
            axis.axvline(bound, color=colours[SHORT[dtype]], linestyle=":", linewidth=1)
        axis.set_yticks(range(len(rows)), labels, fontsize=8)
        axis.set(xscale="log", xlim=(1e-7, 20), title=f"trainer : {engine} sampler")
        axis.set(xlabel="gap of a token's logprob, nats: ● mean, | 99%, ▸ max")
        axis.grid(alpha=0.3)
    return figure


def measure(quick: bool, jobs: int) -> dict:
    """Both engines; in its quick form the embedded one alone where vLLM is not installed.
    CannotRun in the full form then. It takes its time for itself, so `jobs` is of no use."""
    with_vllm = find_spec("vllm") is not None
    if not with_vllm and not quick:
        raise CannotRun(
            "it needs vLLM, which this environment lacks: "
            ".venv-vllm/bin/python -m experiments mismatch (the README says how to make that one)"
        )
    steps, number = (2, 16) if quick else (STEPS, STREAMS)
    result = {
        "experiment": "mismatch",
        "versions": package_versions(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "streams": number,
        "training_steps": steps,
        "bounds": MISMATCH_BOUND,
    }
    print(json.dumps(result))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        return result | {"rows": asyncio.run(rows_of(scratch, steps, number, with_vllm))}


async def rows_of(scratch: Path, steps: int, number: int, with_vllm: bool) -> list[dict]:
    adapter = train_adapter(scratch, steps)
    models = {dtype: load_model(dtype, adapter) for dtype in SHORT}
    streams = await play_streams(models["float32"], adapter, number)
    print(
        f"{'engine':<9}{'trainer':<9}{'sampler':<9}{'applied':<9}{'T':>4}{'kl':>10}"
        f"{'mean':>10}{'p99':>10}{'max':>10}{'tokens':>8}"
    )
    (batch,) = batches_of(streams, sys.maxsize)
    rows = [base_row(models["float32"], batch), *embedded_rows(models, batch)]
    if with_vllm:
        sampled = await sample_with_servers(models, streams[:VLLM_STREAMS], adapter, scratch)
        rows += vllm_rows(models, sampled)
    return rows
