"""How a step grows: seconds and memory against batch, length, group, layers, rank and adapters.

    python benchmarks/growth.py          about five minutes; writes growth.json and growth.png

Forward, loss and backward in the shapes of training.py's "tiny" (hidden 256, vocabulary 2,048),
fp32, one thread, in CPU time. From 4 sequences of 256 tokens, half of them with loss, 4 layers and
rank 8, one quantity at a time moves:

    batch    1 to 32 sequences               layers   1 to 16
    length   64 to 2,048 tokens              rank     1 to 128
    group    1 to 16 samples of 128 tokens on one prompt of 512, computed once
    adapters 1 to 64 in one batch of 64 rows that decode after 256 tokens: 20 steps, no training

An exponent is the slope of the line through the logarithms of the larger half of the values, where
what is constant (calls, tables, a block of logits) weighs least: 1 is proportional. Beside it
stands the exponent of the work, counted in FLOPs and bytes by tools/plan.py, which has attention's
square in it, and logits a block at a time. Nothing may grow faster than its work: the script fails
if an exponent is more than a tenth above. Points alternate over the rounds, of which the median
counts; memory is the peak of the resident set over the loaded model, each point in a process of its
own whose allocator gives freed blocks back at once, so that none can hide in what an earlier one
left; of adapters it is what the resident set grows by: what the model holds, and the engine's copy.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402

from benchmarks.adapters import add_random_adapters  # noqa: E402
from benchmarks.memory import peak_bytes, resident_bytes  # noqa: E402
from lora import LoRAConfig, inject_lora  # noqa: E402
from model import KVCache, Qwen3, Qwen3Config  # noqa: E402
from segments import Stack, use_rows  # noqa: E402
from tools.plan import head_bytes, kept_bytes, parameters_of, trained_flops  # noqa: E402

TINY = {
    **{"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "head_dim": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 40_960},
    **{"rope_theta": 1e6, "tie_word_embeddings": True},
}
START = {"batch": 4, "length": 256, "layers": 4, "rank": 8, "group": 0, "adapters": 0}
AXES = {
    "batch": [1, 2, 4, 8, 16, 32],
    "length": [64, 128, 256, 512, 1024, 2048],
    "group": [1, 2, 4, 8, 16],
    "layers": [1, 2, 4, 8, 16],
    "rank": [1, 2, 4, 8, 16, 32, 64, 128],
    "adapters": [1, 4, 16, 64],
}
PROMPT, COMPLETION = 512, 128
DECODE_ROWS, DECODES = 64, 20
ROUNDS, SLACK = 3, 0.1
# Of glibc's malloc: blocks from 64 KiB on are the kernel's, and nothing that is free is kept.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}


def model_of(layers: int, rank: int) -> Qwen3:
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(**TINY, num_hidden_layers=layers))
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(0.02)
    inject_lora(model, LoRAConfig(rank))
    return model


def batch_of(batch: int, length: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (S, T + 1), mask (S, T): the last half of each sequence, or a group's completions."""
    if group:
        ids = torch.randint(TINY["vocab_size"], (group, PROMPT + COMPLETION + 1))
        ids[1:, :PROMPT] = ids[0, :PROMPT]
        counted = COMPLETION
    else:
        ids = torch.randint(TINY["vocab_size"], (batch, length + 1))
        counted = length // 2
    mask = torch.zeros(len(ids), ids.shape[1] - 1, dtype=torch.bool)
    mask[:, -counted:] = True
    return ids, mask


def step_of(point: dict):
    """A function that takes the step once, and so may be called again."""
    if point["adapters"]:
        model, decode = decoding(point)
        return with_adapters(model, decode, point["adapters"])
    model = model_of(point["layers"], point["rank"])
    ids, mask = batch_of(point["batch"], point["length"], point["group"])

    def step() -> None:
        logprobs, _ = model.token_logprobs(ids, mask)
        (-logprobs.sum() / mask.sum()).backward()
        model.zero_grad(set_to_none=True)

    return step


def decoding(point: dict):
    """The base, and a function that decodes a token for each row, of full caches."""
    torch.manual_seed(0)
    model = Qwen3(Qwen3Config(**TINY, num_hidden_layers=point["layers"])).requires_grad_(False)
    cache = KVCache(model.config, DECODE_ROWS, point["length"] + 1, torch.float32)
    cache.keys.normal_()
    cache.values.normal_()
    ids = torch.randint(TINY["vocab_size"], (DECODE_ROWS, 1))
    starts = torch.full((DECODE_ROWS,), point["length"])

    @torch.inference_mode()
    def decode() -> None:
        model.extend(ids, cache, slice(0, DECODE_ROWS), starts)

    return model, decode


def with_adapters(model: Qwen3, decode, count: int):
    """Gives the model its adapters; the function decodes with row i on adapter i mod count."""
    names = [f"a{i}" for i in range(count)]
    add_random_adapters(model, names)
    stack = Stack(model, torch.float32, torch.device("cpu"))
    stack.hold(names)

    def step() -> None:
        with use_rows(model, stack, [names[row % count] for row in range(DECODE_ROWS)]):
            for _ in range(DECODES):
                decode()

    return step


def work_of(point: dict) -> tuple[float, float]:
    """FLOPs; bytes that autograd keeps and a block of logits, or those of the adapters."""
    shapes = Qwen3Config(**TINY, num_hidden_layers=point["layers"])
    if count := point["adapters"]:
        base, adapter = parameters_of(shapes, LoRAConfig(point["rank"]))
        width = shapes.num_hidden_layers * shapes.num_attention_heads * shapes.head_dim
        row = 2 * (base + adapter) + 4 * width * point["length"]
        return DECODES * DECODE_ROWS * row, 2 * 4 * adapter * count
    tokens, length = point["batch"] * point["length"], point["length"]
    wanted = tokens // 2
    if group := point["group"]:
        wanted, length = group * COMPLETION, PROMPT + COMPLETION
        tokens = PROMPT + wanted
    counted = {"tokens": tokens, "length": length, "wanted": wanted}
    lora = LoRAConfig(point["rank"])
    chunk = min(head_bytes(shapes, "float32"), 8 * wanted * shapes.vocab_size)
    flops = sum(trained_flops(shapes, lora, **counted))
    return flops, kept_bytes(shapes, lora, "float32", **counted) + chunk


def grown(point: dict) -> int:
    """Peak of the resident set over the loaded model, or adapters' part, in its own process."""
    command = [sys.executable, __file__, "--point", json.dumps(point)]
    environment = os.environ | GIVE_BACK
    return int(subprocess.run(command, check=True, stdout=-1, env=environment).stdout)


def measure_memory(point: dict) -> int:
    if count := point["adapters"]:
        model, decode = decoding(point)
        decode()
        before = resident_bytes()
        with_adapters(model, decode, count)()
        return resident_bytes() - before
    warm = {**START, "batch": 1, "length": 16, "layers": 1}
    step_of(warm)()  # what a first call loads
    step = step_of(point)
    before = resident_bytes()
    step()
    return peak_bytes() - before


def larger_half(values: list[float]) -> list[float]:
    return values[len(values) // 2 :]


def exponent(xs: list[float], ys: list[float]) -> float:
    """Slope of the least-squares line of log y on log x, of the larger half of the values."""
    logs = ([*map(math.log, larger_half(values))] for values in (xs, ys))
    return statistics.linear_regression(*logs).slope


def draw(rows: list[dict], file: Path) -> None:
    """Two panels an axis: seconds above, memory below, each with the line of its exponent."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, len(rows), figsize=(3 * len(rows), 5.5), sharex="col")
    for column, row in enumerate(rows):
        for line, (what, unit) in enumerate((("seconds", 1.0), ("bytes", 1e6))):
            panel, slope = panels[line][column], row[f"{what}_exponent"]
            xs, ys = row["values"], [y / unit for y in row[what]]
            panel.loglog(xs, ys, "o", base=2)
            middle = [
                math.exp(statistics.mean(map(math.log, values)))
                for values in map(larger_half, (xs, ys))
            ]
            panel.loglog(xs, [middle[1] * (x / middle[0]) ** slope for x in xs], "-", base=2)
            panel.set_title(f"exponent {slope:.2f}, its work {row[f'{what}_work']:.2f}", size=9)
            panel.set_xlabel(row["axis"] if line else "")
            panel.set_ylabel(("seconds a step", "MB over the model")[line] if not column else "")
            panel.set_xticks(xs, [str(x) for x in xs], minor=False)
            panel.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--point", type=json.loads, help=argparse.SUPPRESS)  # of a child process
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.point:
        return print(measure_memory(options.point))
    points = [(axis, {**START, axis: value}) for axis, values in AXES.items() for value in values]
    steps = [step_of(point) for _, point in points]
    times = [[] for _ in points]
    for number in range(ROUNDS + 1):
        for taken, step in zip(times, steps, strict=True):
            start = time.process_time()
            step()
            if number:  # the first round warms up
                taken.append(time.process_time() - start)
    seconds = [statistics.median(taken) for taken in times]
    grew = [grown(point) for _, point in points]
    work = [work_of(point) for _, point in points]
    rows, faster = [], []
    print(f"{'axis':<8}{'':<28}{'seconds':>9}{'FLOPs':>8}{'memory':>9}{'kept':>8}   exponents")
    for axis, values in AXES.items():
        its = [i for i, (name, _) in enumerate(points) if name == axis]
        row = {"benchmark": "growth", "axis": axis, "values": values}
        row |= {"seconds": [seconds[i] for i in its], "bytes": [grew[i] for i in its]}
        row |= {"flops": [work[i][0] for i in its], "kept": [work[i][1] for i in its]}
        for what, counted in (("seconds", "flops"), ("bytes", "kept")):
            row[f"{what}_exponent"] = exponent(values, row[what])
            row[f"{what}_work"] = exponent(values, row[counted])
            if row[f"{what}_exponent"] > row[f"{what}_work"] + SLACK:
                faster.append(f"{what} against {axis}")
        rows.append(row)
        print(
            f"{axis:<8}{', '.join(map(str, values)):<28}{row['seconds_exponent']:>9.2f}"
            f"{row['seconds_work']:>8.2f}{row['bytes_exponent']:>9.2f}{row['bytes_work']:>8.2f}"
        )
    for row in rows:
        print(json.dumps(row))
    setting = {"torch": torch.__version__, "threads": 1, "start": START, "rounds": ROUNDS}
    file = Path(__file__).with_suffix(".json")
    file.write_text(json.dumps(setting | {"rows": rows}, indent=1) + "\n")
    draw(rows, file.with_suffix(".png"))
    if faster:
        raise SystemExit(f"grows faster than its work: {', '.join(faster)}")


if __name__ == "__main__":
    main()
