"""Trainer against sampler: what dtype, merging, temperature, 4 bits and staleness do to their gap.

    .venv-vllm/bin/python -m experiments mismatch     a quarter of an hour on two cores

Of each seed: an adapter that six steps of train.py made, and held-out episodes sampled under it in
fp32 at temperature 1, whose streams are fixed then.

    embedded   every stream, token by token: the prompts prefilled, then a token a step against the
               cache, as TorchEngine decodes; log softmax(logits / temperature) of the token there
    vLLM       a server for each dtype and application; every turn of every stream is sampled anew
               after the same tokens before it, since vLLM gives the logprobs that count (after
               temperature) of what it samples alone
    trainer    model.token_logprobs of the same tokens in one pass, adapter unmerged

Merged: W0 + (alpha / r) B A as one matrix in the sampler's dtype; for vLLM a checkpoint of those.
NF4 and staleness: TorchEngine plays episodes of its own, on the 4-bit base with the same adapter or
with the adapter of some steps before.

Without vLLM in the environment the full form is refused, since it would put half a table in the
place of the committed one; --quick leaves vLLM's half out then, and the verdict says so.

Axes: S sequences, T tokens.
"""

import asyncio
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
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
from experiments.seeds import above, decide, every, interval, times, within
from experiments.sweep import SEEDS
from grpo import mismatch_metrics
from lora import adapter_disabled, inject_lora, lora_layers, merge_lora, unmerge_lora
from model import KVCache, Qwen3
from quant import quantize_base
from rollout import Request, TorchEngine, Trajectory, VLLMEngine, run_groups
from start import load_environments
from tools.vllm_server import VLLMServer
from update import MISMATCH_BOUND, Batch, micro_batches

MINUTES = 15
MODEL = ROOT / "assets" / "tiny-qwen3"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
ENGINES = ("embedded", "vLLM")
TEMPERATURES = (1.0, 0.7)
STALE = {"1 step before": 1, "4 steps before": 4}
STREAMS, VLLM_STREAMS = 128, 16  # vLLM's turns are scored one by one, in bf16 for minutes
MAX_LENGTH, MAX_NEW_TOKENS, STEPS = 512, 64, 6


# --- what is compared -----------------------------------------------------------------------------


def train_adapters(scratch: Path, steps: int, seed: int) -> dict[int, Path]:
    """Steps before the last -> the adapter of then, for 0 and for those of STALE: B has moved by a
    few steps of RL."""
    adapters = {}
    for before in sorted({0, *STALE.values()}, reverse=True):
        if before < steps:
            command = [sys.executable, str(ROOT / "train.py"), "--rank", "8", "--seed", str(seed)]
            command += ["--groups", "8", "--eval-size", "8", "--output", str(scratch / "run")]
            command += ["--steps", str(steps - before), *(["--resume"] if adapters else [])]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            adapters[before] = scratch / f"adapter-{before}"
            shutil.copytree(scratch / "run" / "adapter", adapters[before])
    return adapters


def load_model(dtype: str, adapter: Path, nf4: bool = False) -> Qwen3:
    """The base in this dtype or in 4 bits, with the adapter as the trainable one (fp32 masters)."""
    model = Qwen3.from_pretrained(MODEL, getattr(torch, dtype))
    if nf4:
        quantize_base(model)
    inject_lora(model, read_adapter(adapter)[0])
    load_adapter(model, adapter)
    return model.eval()


async def play_streams(model: Qwen3, adapter: Path, streams: int, seed: int) -> list[Trajectory]:
    """Held-out episodes by the embedded engine, with the logprobs that it sampled with."""
    environment = load_environments(Config())[1]
    engine = TorchEngine(model, streams, MAX_LENGTH)
    engine.add_adapter("sampler", adapter)
    groups = await run_groups(
        engine,
        load_tokenizer(str(MODEL)),
        environment,
        environment.eval[:streams],
        1,
        seed=seed,
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
    engine: VLLMEngine, streams: list[Trajectory], adapter: str | None, temperature: float
) -> list[Trajectory]:
    """Every turn of every stream, sampled anew after the tokens that stand before it.
    adapter None: the server's base is merged."""
    stop = load_tokenizer(str(MODEL)).stop_token_ids
    prefixes = [
        stream.token_ids[:place]
        for stream in streams
        for place in range(1, len(stream.token_ids))
        if stream.loss_mask[place] > stream.loss_mask[place - 1]
    ]

    async def turn(number: int, prefix: list[int]) -> Trajectory:
        request = Request(prefix, MAX_NEW_TOKENS, temperature, adapter, stop, number)
        sampled = Trajectory(None, adapter, 0, [])
        sampled.add_forced(prefix)
        sampled.add_sampled(await engine.generate(request))
        return sampled

    return await asyncio.gather(*(turn(*pair) for pair in enumerate(prefixes)))


async def sample_with_servers(cases: list["Case"], dtype: str, scratch: Path) -> None:
    """Puts into every case what vLLM sampled in this dtype: one server for the adapters of all
    seeds, and one for each seed's merged checkpoint."""
    servers = {
        "unmerged": VLLMServer(
            str(MODEL),
            scratch / f"{dtype}.log",
            dtype=dtype,
            max_length=MAX_LENGTH,
            versions=len(cases),
        )
    }
    for case in cases:
        where = scratch / f"merged-{dtype}-{case.seed}"
        merged = merged_checkpoint(case.models[dtype], dtype, where)
        log = where.with_suffix(".log")
        servers[case.seed] = VLLMServer(str(merged), log, dtype=dtype, max_length=MAX_LENGTH)
    async with AsyncExitStack() as stack:
        await asyncio.gather(*map(stack.enter_async_context, servers.values()))
        for case in cases:
            for application in ("unmerged", "merged"):
                server = servers["unmerged" if application == "unmerged" else case.seed]
                engine = VLLMEngine(case.models[dtype], [server.url], MAX_LENGTH)
                stack.push_async_callback(engine.close)
                name = f"seed{case.seed}" if application == "unmerged" else None
                if name:
                    engine.add_adapter(name, case.adapters[0])
                for temperature in TEMPERATURES:
                    turns = await sample_turns(
                        engine, case.streams[:VLLM_STREAMS], name, temperature
                    )
                    case.by_vllm[dtype, application, temperature] = batches_of(turns)


# --- the comparison -------------------------------------------------------------------------------


@dataclass
class Case:
    """A seed: its adapters (by steps before the last), the model in each dtype, its streams, and
    what vLLM sampled, by (dtype, application, temperature)."""

    seed: int
    adapters: dict[int, Path]
    models: dict[str, Qwen3]
    streams: list[Trajectory]
    by_vllm: dict[tuple, list[Batch]] = field(default_factory=dict)


async def make_case(seed: int, steps: int, streams: int, scratch: Path) -> Case:
    adapters = train_adapters(scratch, steps, seed)
    models = {dtype: load_model(dtype, adapters[0]) for dtype in SHORT}
    played = await play_streams(models["float32"], adapters[0], streams, seed)
    return Case(seed, adapters, models, played)


def compare(row: dict, trainer: Tensor, sampler: Tensor) -> dict:
    """The row with its metrics."""
    gaps = (trainer.double() - sampler.double()).abs().sort().values
    metrics = mismatch_metrics(trainer, sampler, torch.ones_like(trainer))
    row |= {name: metrics[name] for name in ("mismatch_kl", "mismatch_mean", "mismatch_max")}
    row |= {"p99": torch.quantile(gaps, 0.99).item(), "tokens": len(gaps)}
    print(
        f"{row['engine']:<9}{row['trainer']:<9}{row['sampler']:<15}{row['application']:<9}"
        f"{row['temperature']:>4}{row['seed']:>5}{row['mismatch_kl']:>10.1e}"
        f"{row['mismatch_mean']:>10.1e}{row['p99']:>10.1e}{row['mismatch_max']:>10.1e}"
        f"{row['tokens']:>8,}",
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


def named_row(
    seed: int, engine: str, ours: str, theirs: str, application="unmerged", temperature=1.0
) -> dict:
    return {
        "engine": engine,
        "trainer": SHORT.get(ours, ours),
        "sampler": SHORT.get(theirs, theirs),
        "application": application,
        "temperature": temperature,
        "seed": seed,
    }


def base_row(case: Case, batch: Batch) -> dict:
    """The yardstick: the gap if the sampler served the base instead of the adapter."""
    model, row = case.models["float32"], named_row(case.seed, "-", "float32", "base", "-")
    with adapter_disabled(model):
        base = trainer_logprobs(model, [batch], 1.0)
    return compare(row, trainer_logprobs(model, [batch], 1.0), base)


def embedded_rows(case: Case, batch: Batch) -> list[dict]:
    sampler = {}
    for dtype, model in case.models.items():
        sampler[dtype, "unmerged"] = decode_logprobs(model, batch)
        merge_lora(model)
        sampler[dtype, "merged"] = decode_logprobs(model, batch)
        unmerge_lora(model)
    rows = []
    for ours, theirs, application, temperature in pairs():
        row = named_row(case.seed, "embedded", ours, theirs, application, temperature)
        trainer = trainer_logprobs(case.models[ours], [batch], temperature)
        rows.append(compare(row, trainer, sampler[theirs, application][temperature]))
    return rows


def row_of_batches(row: dict, trainer: Qwen3, batches: list[Batch]) -> dict:
    """From the logprobs that came with what was sampled."""
    sampler = torch.cat([batch.sampler_logprobs[batch.mask] for batch in batches])
    return compare(row, trainer_logprobs(trainer, batches, row["temperature"]), sampler)


async def played_rows(case: Case) -> list[dict]:
    """Episodes that another policy played: the 4-bit base with the same adapter, before an fp32
    trainer and before one on that base too, and the adapter of some steps before."""
    exact, number = case.models["float32"], len(case.streams)
    nf4 = load_model("float32", case.adapters[0], nf4=True)
    streams = batches_of(await play_streams(nf4, case.adapters[0], number, case.seed))
    rows = [
        row_of_batches(named_row(case.seed, "embedded", ours, "NF4"), model, streams)
        for ours, model in (("NF4", nf4), ("float32", exact))
    ]
    for words, before in STALE.items():
        if before in case.adapters:
            older = await play_streams(exact, case.adapters[before], number, case.seed)
            row = named_row(case.seed, "embedded", "float32", words)
            rows.append(row_of_batches(row, exact, batches_of(older)))
    return rows


def vllm_rows(case: Case) -> list[dict]:
    return [
        row_of_batches(
            named_row(case.seed, "vLLM", ours, theirs, application, temperature),
            case.models[ours],
            case.by_vllm[theirs, application, temperature],
        )
        for ours, theirs, application, temperature in pairs()
    ]


# --- what it shows --------------------------------------------------------------------------------


def by_comparison(rows: list[dict]) -> dict[tuple, list[dict]]:
    """(engine, trainer, sampler, application, temperature) -> a row for each seed."""
    found = {}
    for row in rows:
        found.setdefault(tuple(list(row.values())[:5]), []).append(row)
    return found


def logs(rows: list[dict], key: str) -> list[float]:
    return [math.log10(row[key]) for row in rows]


def engines_of(rows: list[dict]) -> list[str]:
    return [engine for engine in ENGINES if engine in {row["engine"] for row in rows}]


def criteria(rows: list[dict]) -> dict[str, bool | None]:
    """The criteria that mismatch.md states, each with whether it holds."""
    found = by_comparison(rows)

    def ratio(key: str, one: tuple, other: tuple) -> list[float]:
        """Log10 of one comparison's number over another's, in each seed."""
        seeds = zip(logs(found[one], key), logs(found[other], key), strict=True)
        return [over - under for over, under in seeds]

    held = {}
    for engine in engines_of(rows):
        plain = {d: (engine, d, d, "unmerged", 1.0) for d in SHORT.values()}
        merged = {d: (engine, d, d, "merged", 1.0) for d in SHORT.values()}
        cold = {d: (engine, d, d, "unmerged", 0.7) for d in SHORT.values()}
        largest = {
            dtype: max(
                row["mismatch_max"]
                for row in rows
                if (row["engine"], row["trainer"], row["sampler"]) == (engine, dtype, dtype)
            )
            for dtype in SHORT.values()
        }
        means = ratio("mismatch_mean", plain["bf16"], plain["fp32"])
        merging = {d: ratio("mismatch_kl", merged[d], plain[d]) for d in plain}
        colder = {d: ratio("mismatch_mean", cold[d], plain[d]) for d in plain}
        held |= {
            f"1 {engine}: fp32 below 1e-4, largest {largest['fp32']:.1e}": largest["fp32"] < 1e-4,
            f"2 {engine}: bf16 below 0.5, largest {largest['bf16']:.2g}": largest["bf16"] < 0.5,
            f"2 {engine}: bf16's mean gap over 1,000 times fp32's: {times(means, ',.0f')}": (
                above(means, 3)
            ),
            f"3 {engine}: merged bf16 has over twice the KL: {times(merging['bf16'])}": (
                above(merging["bf16"], math.log10(2))
            ),
            f"3 {engine}: merged fp32 within a factor 3: {times(merging['fp32'])}": (
                within(merging["fp32"], -math.log10(3), math.log10(3))
            ),
            f"4 {engine}: the colder mean gap 1.2 to 1.7 times: fp32 "
            f"{times(colder['fp32'], '.2f')}, bf16 {times(colder['bf16'], '.2f')}": every(
                [within(of, math.log10(1.2), math.log10(1.7)) for of in colder.values()]
            ),
        }
    for sampler in ("NF4", "1 step before"):
        played, rounding = (
            ("embedded", *both, "unmerged", 1.0) for both in (("fp32", sampler), ("bf16", "bf16"))
        )
        larger = ratio("mismatch_kl", played, rounding)
        words = f"5 {sampler} has over ten times the KL of bf16's rounding: {times(larger, '.0f')}"
        held[words] = above(larger, 1)
    return held


def verdict(result: dict) -> tuple[str, str]:
    if "vLLM" not in engines_of(result["rows"]):
        return "undecided", "vLLM, half of the comparison, was not measured."
    return decide(criteria(result["rows"]))


def table(result: dict) -> str:
    """A line a comparison, over its seeds."""
    head = "engine trainer sampler application temperature mismatch_kl mean p99 max tokens".split()
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for key, rows in by_comparison(result["rows"]).items():
        *cells, temperature = key
        cells += [f"{temperature:.1f}", times(logs(rows, "mismatch_kl"), ".1e")]
        cells += [f"{10 ** interval(logs(rows, n))[0]:.1e}" for n in ("mismatch_mean", "p99")]
        cells += [f"{max(row['mismatch_max'] for row in rows):.1e}"]
        lines.append(f"| {' | '.join(cells)} | {sum(row['tokens'] for row in rows):,} |")
    note = "Means over seeds are geometric, in brackets their 95% intervals (Student's t); max and "
    return "\n".join([*lines, "", f"{note}tokens are of all seeds."])


def draw(result: dict) -> pyplot.Figure:
    """For each engine and comparison the mean, the 99th percentile and the largest of the gaps."""
    engines, found = engines_of(result["rows"]), by_comparison(result["rows"])
    size = (6.2 * len(engines), 5.2)
    figure, axes = pyplot.subplots(
        1, len(engines), figsize=size, squeeze=False, layout="constrained"
    )
    colours = {"fp32": "tab:blue", "bf16": "tab:orange", "base": "tab:gray", "NF4": "tab:red"}
    for axis, engine in zip(axes[0], engines, strict=True):
        shown = {key: rows for key, rows in found.items() if key[0] in (engine, "-")}
        labels = []
        for place, (key, rows) in enumerate(reversed(shown.items())):
            colour = colours.get(key[2], "tab:green")
            middle = [10 ** interval(logs(rows, n))[0] for n in ("mismatch_mean", "p99")]
            ends = [*middle, max(row["mismatch_max"] for row in rows)]
            axis.plot([ends[0], ends[-1]], [place, place], color=colour, alpha=0.5)
            for value, marker in zip(ends, "o|>", strict=True):
                axis.plot(value, place, marker, color=colour, ms=9 if marker == "|" else 6)
            _, trainer, sampler, application, temperature = key
            labels.append(
                f"{trainer} : {sampler} {application}, T {temperature}"
                if application != "-"
                else "fp32 : the base instead"
            )
        for dtype, bound in result["bounds"].items():
            axis.axvline(bound, color=colours[SHORT[dtype]], linestyle=":", linewidth=1)
        axis.set_yticks(range(len(shown)), labels, fontsize=8)
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
    steps, number, seeds = (2, 16, SEEDS[:1]) if quick else (STEPS, STREAMS, SEEDS)
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
        rows = asyncio.run(rows_of(Path(name), steps, number, seeds, with_vllm))
    return result | {"rows": rows}


async def rows_of(
    scratch: Path, steps: int, number: int, seeds: tuple[int, ...], with_vllm: bool
) -> list[dict]:
    print(
        f"{'engine':<9}{'trainer':<9}{'sampler':<15}{'applied':<9}{'T':>4}{'seed':>5}{'kl':>10}"
        f"{'mean':>10}{'p99':>10}{'max':>10}{'tokens':>8}"
    )
    cases, rows = [], []
    for seed in seeds:
        case = await make_case(seed, steps, number, scratch / f"seed{seed}")
        (batch,) = batches_of(case.streams, sys.maxsize)
        rows += [base_row(case, batch), *embedded_rows(case, batch), *await played_rows(case)]
        cases.append(case)
    if with_vllm:
        for dtype in SHORT:
            await sample_with_servers(cases, dtype, scratch)
        for case in cases:
            rows += vllm_rows(case)
    return rows
