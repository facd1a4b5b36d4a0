"""From the optimizer's step to the first token of the new version, and the bytes that are shipped.

    .venv-vllm/bin/python benchmarks/publish.py     five minutes on two cores; writes publish.json

Without vLLM in the environment, the embedded engine alone is measured. What Trainer.publish does,
in its order, with the clock started when the optimizer has stepped:

    write     publish: serialise, write, fsync, read back, compare, rename
    load      add_adapter: read and checked by us, then by the engine, which has it when this ends
    retire    the version before: unloaded, its directory emptied
    token     one request of 16 tokens under the new name, for one token
    (again)   a like request once the version is known: what `token` costs without a publish
    (disk)    as many zero bytes written and fsynced to the same disk: the part of `write` that is
              the machine's

The weights of Qwen3-0.6B are random, its shapes those of configs/models/. What full weights cost is
measured on it as well: all tensors written, fsynced, renamed, then read into a model's parameters;
what a server adds to that (fused layouts, other processes) is not counted. Of Qwen3-4B the adapter
is written and loaded for real, beside a base of one number per tensor, seen as the whole tensor
(stride 0); its full weights are computed from the 0.6B's measured bytes a second.
"""

import argparse
import asyncio
import gc
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from torch import nn  # noqa: E402

from benchmarks.vllm_client import package_versions  # noqa: E402
from broadcast import publish, read_adapter, retire  # noqa: E402
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, remove_adapter  # noqa: E402
from model import Qwen3, Qwen3Config, read_checkpoint  # noqa: E402
from rollout import Request, TorchEngine, VLLMEngine  # noqa: E402
from tools.vllm_server import VLLMServer  # noqa: E402

TINY = ROOT / "assets" / "tiny-qwen3"
FACTS = ROOT / "configs" / "models"
REPEATS, WARM_UPS, FULL_REPEATS = 9, 2, 3
PROMPT_TOKENS, MAX_LENGTH = 16, 64
STAGES = ("write", "load", "retire", "token", "again", "disk")
TEN_MILLION, AIM = 10_000_000, 0.25  # parameters, seconds


# --- models ---------------------------------------------------------------------------------------


def random_checkpoint(facts: Path, directory: Path) -> list[tuple[float, float]]:
    """Writes a checkpoint of these shapes as a publish of full weights would, FULL_REPEATS times;
    (seconds of write + fsync + rename, seconds of reading into parameters) of each."""
    directory.mkdir()
    shutil.copy(facts, directory / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):  # vLLM asks for one
        shutil.copy(TINY / name, directory)
    model = Qwen3(Qwen3Config.from_pretrained(facts)).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            nn.init.normal_(parameter, std=0.02)
    times = []
    for _ in range(FULL_REPEATS):
        start = time.perf_counter()
        beside = directory / ".beside"
        safetensors.torch.save_file(model.state_dict(), beside, metadata={"format": "pt"})
        descriptor = os.open(beside, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        os.rename(beside, directory / "model.safetensors")
        written = time.perf_counter()
        for name, tensor in read_checkpoint(directory).items():
            model.get_parameter(name).copy_(tensor)
        times.append((written - start, time.perf_counter() - written))
    return times


def shapes_alone(config: Qwen3Config) -> Qwen3:
    """A model whose every tensor is one number, seen in the tensor's shape; nothing computes it."""
    with torch.device("meta"):
        model = Qwen3(config)
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        flat = torch.zeros(()).expand(parameter.shape)
        setattr(module, name.rpartition(".")[2], nn.Parameter(flat, requires_grad=False))
    return model


def write_zeros(file: Path, size: int) -> float:
    """Seconds that the disk takes for so many bytes."""
    data, start = bytes(size), time.perf_counter()
    with file.open("wb") as stream:
        stream.write(data)
        os.fsync(stream.fileno())
    seconds = time.perf_counter() - start
    file.unlink()
    return seconds


def bytes_of(directory: Path) -> int:
    return sum(file.stat().st_size for file in directory.iterdir())


def pretend_step(model: Qwen3) -> None:
    """Moves every B, as an optimizer's step would."""
    with torch.no_grad():
        for name, parameter in lora_parameters(model).items():
            if name.endswith("lora_B.weight"):
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


# --- measuring ------------------------------------------------------------------------------------


async def time_versions(engine, model: Qwen3, lora: LoRAConfig, root: Path) -> list[dict]:
    """Publishes version after version; the seconds of each stage of each."""
    draw, vocabulary, before, times = random.Random(0), model.config.vocab_size, None, []
    for version in range(WARM_UPS + REPEATS):
        pretend_step(model)
        prompts = [[draw.randrange(vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
        name, clock = f"r{lora.rank}-v{version}", [time.perf_counter()]
        path = publish(model, lora, root, version)
        clock.append(time.perf_counter())
        engine.add_adapter(name, path)
        clock.append(time.perf_counter())
        if before:
            engine.remove_adapter(before[0])
            retire(before[1])
        clock.append(time.perf_counter())
        for prompt in prompts:
            await engine.generate(Request(prompt, 1, adapter=name, seed=version))
            clock.append(time.perf_counter())
        before = (name, path)
        stages = [after - earlier for earlier, after in zip(clock, clock[1:], strict=False)]
        stages.append(write_zeros(root / ".zeros", bytes_of(path)))
        times.append(dict(zip(STAGES, stages, strict=True)))
    engine.remove_adapter(before[0])
    return times[WARM_UPS:]


def time_files(model: Qwen3, lora: LoRAConfig, root: Path) -> list[dict]:
    """As time_versions, without sampling: written, and loaded as the embedded engine does."""
    times, before = [], None
    for version in range(WARM_UPS + REPEATS):
        pretend_step(model)
        clock = [time.perf_counter()]
        path = publish(model, lora, root, version)
        clock.append(time.perf_counter())
        add_adapter(model, f"v{version}", *read_adapter(path))
        clock.append(time.perf_counter())
        if before:
            remove_adapter(model, before[0])
            retire(before[1])
        clock.append(time.perf_counter())
        before = (f"v{version}", path)
        stages = [after - earlier for earlier, after in zip(clock, clock[1:], strict=False)]
        row = dict(zip(STAGES, stages, strict=False))
        times.append(row | {"disk": write_zeros(root / ".zeros", bytes_of(path))})
    return times[WARM_UPS:]


class Table:
    """Rows that are printed as they come."""

    def __init__(self):
        self.rows = []
        columns = "".join(f"{stage:>9}" for stage in ("write", "load", "retire", "token", "total"))
        print(
            f"{'model':<11}{'ships':<15}{'parameters':>14}{'MB':>10} {'through':<9}{columns}"
            f"{'(again)':>9}{'(disk)':>9}   median seconds"
        )

    def add(self, model: str, ships: str, parameters: int, size: int, through: str, times) -> None:
        stages = {stage: statistics.median(row[stage] for row in times) for stage in times[0]}
        totals = [sum(row[stage] for stage in STAGES[:4] if stage in row) for row in times]
        row = {
            "model": model,
            "ships": ships,
            "parameters": parameters,
            "bytes": size,
            "through": through,
            "seconds": stages,
            "total": statistics.median(totals),
            "total_range": [min(totals), max(totals)],
            "repeats": len(times),
        }
        self.rows.append(row)
        cells = [stages.get(stage) for stage in STAGES]
        cells.insert(4, row["total"])
        printed = "".join(f"{'-':>9}" if cell is None else f"{cell:>9.3f}" for cell in cells)
        print(
            f"{model:<11}{ships:<15}{parameters:>14,}{size / 1e6:>10,.1f} {through:<9}{printed}",
            flush=True,
        )


async def time_engines(
    table: Table, name: str, checkpoint: Path, ranks: tuple[int, ...], scratch: Path
) -> None:
    """Adapters of these ranks, through the embedded engine and through a vLLM of this model."""

    async def rows(through: str, url: str = "") -> None:
        for rank in ranks:
            torch.manual_seed(0)
            lora, model = LoRAConfig(rank), Qwen3.from_pretrained(checkpoint, torch.float32)
            inject_lora(model, lora)
            engine = VLLMEngine(model, [url], MAX_LENGTH) if url else None
            engine = engine or TorchEngine(model, slots=4, max_length=MAX_LENGTH)
            root = scratch / f"{name}-{through}-{rank}"
            times = await time_versions(engine, model, lora, root)
            size = bytes_of(next(root.glob("v*")))
            parameters = sum(p.numel() for p in lora_parameters(model).values())
            table.add(name, f"adapter, r {rank}", parameters, size, through, times)
            if url:
                await engine.close()
            del engine, model
            gc.collect()

    await rows("embedded")
    if find_spec("vllm"):
        settings = {"max_lora_rank": max(ranks), "max_length": MAX_LENGTH, "slots": 8}
        async with VLLMServer(str(checkpoint), scratch / f"{name}.log", **settings) as server:
            await rows("vLLM", server.url)


async def run() -> None:
    setting = {
        "benchmark": "publish",
        "versions": package_versions(),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "load_before": os.getloadavg()[0],
        "dtype": "float32",
    }
    print(json.dumps(setting))
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        table = Table()
        await time_engines(table, "tiny-qwen3", TINY, (8,), scratch)

        checkpoint = scratch / "Qwen3-0.6B"
        times = random_checkpoint(FACTS / "Qwen3-0.6B.json", checkpoint)
        gc.collect()
        size = (checkpoint / "model.safetensors").stat().st_size
        full = [dict(zip(STAGES, pair, strict=False)) for pair in times]
        table.add("Qwen3-0.6B", "full weights", size // 4, size, "files", full)
        await time_engines(table, "Qwen3-0.6B", checkpoint, (8, 16), scratch)

        model, lora = shapes_alone(Qwen3Config.from_pretrained(FACTS / "Qwen3-4B.json")), None
        larger = sum(parameter.numel() for parameter in model.parameters())
        scaled = [{stage: row[stage] * larger * 4 / size for stage in row} for row in full]
        table.add("Qwen3-4B", "full, scaled", larger, larger * 4, "files", scaled)
        lora = LoRAConfig(8)
        inject_lora(model, lora)
        times = time_files(model, lora, scratch / "Qwen3-4B")
        parameters = sum(p.numel() for p in lora_parameters(model).values())
        size = bytes_of(next((scratch / "Qwen3-4B").glob("v*")))
        table.add("Qwen3-4B", "adapter, r 8", parameters, size, "files", times)
    for row in table.rows:
        if row["parameters"] >= TEN_MILLION and row["ships"].startswith("adapter"):
            token = row["seconds"].get("token")
            loaded = row["total"] - (token or 0.0)
            first = "" if token is None else f", {row['total']:.3f} s to the first token"
            print(
                f"{row['model']}, {row['parameters'] / 1e6:.1f}M parameters, {row['through']}: "
                f"{loaded:.3f} s to loaded{first} (aim: under {AIM} s for 10M)"
            )
    result = setting | {"rows": table.rows}
    Path(__file__).with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    asyncio.run(run())


if __name__ == "__main__":
    main()
