"""Trainer against sampler: what dtype, merging and temperature do to the gap of their logprobs.

    .venv-vllm/bin/python experiments/mismatch.py     four minutes on two cores, see mismatch.md

Writes experiments/mismatch.json, mismatch.png, and the table in mismatch.md. The streams are fixed
once: held-out episodes, sampled in fp32 at temperature 1 under an adapter that six steps of
train.py made.

    embedded   every stream, token by token: the prompts prefilled, then a token a step against the
               cache, as TorchEngine decodes; log softmax(logits / temperature) of the token there
    vLLM       a server for each dtype and application; every turn of every stream is sampled anew
               after the same tokens before it, since vLLM gives the logprobs that count (after
               temperature) of what it samples alone
    trainer    model.token_logprobs of the same tokens in one pass, adapter unmerged

Merged: W0 + (alpha / r) B A as one matrix in the sampler's dtype; for vLLM a checkpoint of those.
Without vLLM in the environment there is nothing to compare, and the script says so.

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

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.vllm_client import package_versions  # noqa: E402
from broadcast import load_adapter, read_adapter  # noqa: E402
from chat import load_tokenizer  # noqa: E402
from config import Config  # noqa: E402
from grpo import mismatch_metrics  # noqa: E402
from lora import adapter_disabled, inject_lora, lora_layers, merge_lora, unmerge_lora  # noqa: E402
from model import KVCache, Qwen3  # noqa: E402
from rollout import Request, TorchEngine, Trajectory, VLLMEngine, run_groups  # noqa: E402
from start import load_environments  # noqa: E402
from tools.vllm_server import VLLMServer  # noqa: E402
from update import MISMATCH_BOUND, Batch, micro_batches  # noqa: E402

HERE = Path(__file__).resolve().parent
MODEL = ROOT / "assets" / "tiny-qwen3"
SHORT = {"float32": "fp32", "bfloat16": "bf16"}
TEMPERATURES = (1.0, 0.7)
STREAMS, VLLM_STREAMS = 128, 32  # vLLM's turns are scored one by one, in bf16 for minutes
MAX_LENGTH, MAX_NEW_TOKENS, STEPS = 512, 64, 6
TABLE = ("<!-- table -->\n", "<!-- end of table -->\n")


# --- what is compared -----------------------------------------------------------------------------


def train_adapter(scratch: Path) -> Path:
    """A real adapter: B has moved by a few steps of RL."""
    command = [sys.executable, str(ROOT / "train.py"), "--rank", "8", "--steps", str(STEPS)]
    command += ["--groups", "8", "--eval-size", "8", "--output", str(scratch / "run")]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return scratch / "run" / "adapter"


def load_model(dtype: str, adapter: Path) -> Qwen3:
    """The base in this dtype with the adapter as the trainable one (fp32 masters)."""
    model = Qwen3.from_pretrained(MODEL, getattr(torch, dtype))
    inject_lora(model, read_adapter(adapter)[0])
    load_adapter(model, adapter)
    return model.eval()


async def play_streams(model: Qwen3, adapter: Path) -> list[Trajectory]:
    environment = load_environments(Config())[1]
    engine = TorchEngine(model, STREAMS, MAX_LENGTH)
    engine.add_adapter("sampler", adapter)
    groups = await run_groups(
        engine,
        load_tokenizer(str(MODEL)),
        environment,
        environment.eval[:STREAMS],
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
    """The row with its metrics and, for the figure, all differences."""
    gaps = (trainer.double() - sampler.double()).abs().sort().values
    metrics = mismatch_metrics(trainer, sampler, torch.ones_like(trainer))
    row |= {name: metrics[name] for name in ("mismatch_kl", "mismatch_mean", "mismatch_max")}
    row |= {"p99": torch.quantile(gaps, 0.99).item(), "tokens": len(gaps), "gaps": gaps}
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
    for engine in ("embedded", "vLLM"):
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


def markdown(rows: list[dict]) -> str:
    head = "engine trainer sampler application temperature mismatch_kl mean p99 max tokens".split()
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row[name] for name in ("engine", "trainer", "sampler", "application")]
        cells += [f"{row['temperature']:.1f}"]
        cells += [f"{row[n]:.1e}" for n in ("mismatch_kl", "mismatch_mean", "p99", "mismatch_max")]
        lines.append(f"| {' | '.join([*cells, format(row['tokens'], ',')])} |")
    return "\n".join(lines) + "\n"


def draw(rows: list[dict], file: Path) -> None:
    """For each engine, the share of tokens whose gap is larger than x."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), sharey=True, layout="constrained")
    colours = {"fp32": "tab:blue", "bf16": "tab:orange"}
    for axis, engine in zip(axes, ("embedded", "vLLM"), strict=True):
        for row in rows:
            if row["engine"] == engine and row["trainer"] == row["sampler"]:
                merged, cold = row["application"] == "merged", row["temperature"] < 1
                style = {"linestyle": "--" if merged else "-", "linewidth": 1 if cold else 2}
                label = f"{row['sampler']}, {row['application']}, T {row['temperature']}"
            elif row["engine"] == "-":
                style, label = {"linewidth": 1.2}, "if the base were served"
            else:
                continue
            share = torch.arange(row["tokens"], 0, -1) / row["tokens"]
            colour = colours.get(row["sampler"], "tab:gray")
            axis.plot(row["gaps"].clamp(min=1e-9), share, label=label, color=colour, **style)
        for dtype, bound in MISMATCH_BOUND.items():
            colour = colours[SHORT[dtype]]
            axis.axvline(bound, color=colour, linestyle=":", linewidth=1)
        axis.set(xscale="log", yscale="log", xlim=(1e-8, 20), title=f"{engine} sampler")
        axis.set(xlabel="|trainer - sampler| of a token's logprob, nats; dotted: the alarm")
        axis.grid(alpha=0.3)
    axes[0].set(ylabel="share of tokens with a larger gap")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(file, dpi=130)
    plt.close(figure)


async def main() -> None:
    if find_spec("vllm") is None:
        raise SystemExit("mismatch.py compares with vLLM: run it where vllm is installed")
    setting = {
        "experiment": "mismatch",
        "versions": package_versions(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "streams": STREAMS,
        "training_steps": STEPS,
    }
    print(json.dumps(setting))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        adapter = train_adapter(scratch)
        models = {dtype: load_model(dtype, adapter) for dtype in SHORT}
        streams = await play_streams(models["float32"], adapter)
        print(
            f"{'engine':<9}{'trainer':<9}{'sampler':<9}{'applied':<9}{'T':>4}{'kl':>10}"
            f"{'mean':>10}{'p99':>10}{'max':>10}{'tokens':>8}"
        )
        (batch,) = batches_of(streams, sys.maxsize)
        rows = [base_row(models["float32"], batch), *embedded_rows(models, batch)]
        sampled = await sample_with_servers(models, streams[:VLLM_STREAMS], adapter, scratch)
        rows += vllm_rows(models, sampled)
    held = criteria(rows)
    for criterion, holds in held.items():
        print(f"{'holds' if holds else 'FAILS'}  {criterion}")
    draw(rows, HERE / "mismatch.png")
    plain = [{key: value for key, value in row.items() if key != "gaps"} for row in rows]
    result = setting | {"bounds": MISMATCH_BOUND, "rows": plain, "criteria": held}
    (HERE / "mismatch.json").write_text(json.dumps(result, indent=1) + "\n")
    page = HERE / "mismatch.md"
    before, _, rest = page.read_text().partition(TABLE[0])
    after = rest.partition(TABLE[1])[2]
    page.write_text(before + TABLE[0] + markdown(rows) + TABLE[1] + after)


if __name__ == "__main__":
    asyncio.run(main())
