"""Many adapters on one base: whole episodes, batched against swapped, and what they hold in memory.

    python -m experiments many_adapters

    batched      one engine, all adapters in memory: every decode step has the rows of all episodes
    swapped      the same engine with room for one: adapter after adapter, each read from disk, then
                 its episodes in a batch of their own
    copies       (memory alone) every adapter merged into a checkpoint of its own, as one would
                 deploy them to servers that know no adapters

The same held-out questions of wiki-search, the same seeds, episode i with adapter i mod N; 7 turns
or so with their tools, through TorchEngine in this process. benchmarks/adapters.py times one decode
step; here everything counts: prompts (which adapters cannot share), tools, streams that end early.

Adapters: rank 8, all projections, B random and so small that each plays about as the base does.
Times are processor time of one thread, ratios are paired within a seed. Memory is resident growth
of a process that loads N of them.
"""

import asyncio
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from matplotlib import pyplot
from matplotlib.figure import Figure

from broadcast import save_adapter
from chat import load_tokenizer
from config import Config
from experiments.runs import ROOT
from experiments.seeds import NOTE, decide, told, within
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters
from model import Qwen3
from rollout import TorchEngine, Trajectory, derive_seed, run_episode
from segments import Stack
from start import load_environments
from tools.plan import BYTES, model_shapes, parameters_of

MINUTES = 3
MODEL = ROOT / "assets" / "tiny-qwen3"
LORA = LoRAConfig(rank=8)
COUNTS, EPISODES, SEEDS = (1, 4, 16, 64), 64, (0, 1, 2)
QUICK_COUNTS, QUICK_EPISODES, QUICK_SEEDS = (1, 8), 16, (0,)
# The criterion, see the page.
FASTER = {16: 2.5, 64: 5.0}
FLAT, SAME, SMALLER = 1.5, 0.95, 0.25


# --- episodes -------------------------------------------------------------------------------------


def small_adapter(model: Qwen3, seed: int) -> None:
    """Makes the trainable adapter another one that changes little."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in lora_parameters(model).items():
            if name.endswith("lora_B.weight"):
                parameter.normal_(std=2e-3, generator=generator)


def save_adapters(folder: Path, count: int) -> list[Path]:
    torch.manual_seed(0)
    model = Qwen3.from_pretrained(MODEL)
    inject_lora(model, LORA)
    directories = []
    for number in range(count):
        small_adapter(model, number)
        directories.append(save_adapter(model, LORA, folder / f"a{number}"))
    return directories


async def play(
    model: Qwen3, environment, tasks: list, directories: list[Path], seed: int, batched: bool
) -> tuple[float, list[Trajectory]]:
    """An episode a task, task i with adapter i mod N; and the processor seconds of all, once the
    adapters are registered."""
    config, tokenizer, count = Config(), load_tokenizer(MODEL), len(directories)
    room = None if batched else 1
    engine = TorchEngine(model, len(tasks), config.max_length, max_adapters=room)
    for number, directory in enumerate(directories):
        engine.add_adapter(f"a{number}", directory)

    async def episodes(places) -> list[Trajectory]:
        played = (
            run_episode(
                engine,
                tokenizer,
                environment,
                tasks[place],
                adapter=f"a{place % count}",
                version=0,
                temperature=1.0,
                seed=derive_seed(seed, place),
                max_turns=config.max_turns,
                max_new_tokens=config.max_new_tokens,
            )
            for place in places
        )
        return await asyncio.gather(*played)

    begun = time.process_time()
    if batched:
        found = await episodes(range(len(tasks)))
    else:
        parts = [await episodes(range(first, len(tasks), count)) for first in range(count)]
        found = [parts[place % count][place // count] for place in range(len(tasks))]
    seconds = time.process_time() - begun
    for name in engine.adapters:
        engine.remove_adapter(name)
    return seconds, found


def time_both(model: Qwen3, environment, tasks: list, directories: list[Path], seed: int) -> dict:
    """Processor seconds and sampled tokens of both ways, and how many episodes are the same."""
    row, played = {"seed": seed, "adapters": len(directories)}, {}
    for way in ("batched", "swapped"):
        arguments = (model, environment, tasks, directories, seed, way == "batched")
        seconds, played[way] = asyncio.run(play(*arguments))
        tokens = sum(sum(episode.loss_mask) for episode in played[way])
        row[way] = {"cpu_seconds": seconds, "tokens": tokens}
    pairs = zip(*played.values(), strict=True)
    return row | {"same": sum(one.token_ids == other.token_ids for one, other in pairs)}


# --- memory ---------------------------------------------------------------------------------------


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def hold(kind: str, counts: list[int]) -> list[int]:
    """Bytes that this process has grown by when it has loaded so many adapters, or copies."""

    def touched() -> Qwen3:
        """The base with tensors of its own: nothing is left in a file that others share."""
        model = Qwen3.from_pretrained(MODEL)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        return model

    warm = touched()  # pages of torch itself come with the first
    inject_lora(warm, LORA)
    before, grown = resident_bytes(), []
    if kind == "copies":
        models = []
        for count in counts:
            models += [touched() for _ in range(count - len(models))]
            grown.append(resident_bytes() - before)
        return grown
    model, names = touched(), []
    stack = Stack(model, torch.float32, torch.device("cpu"))
    for count in counts:
        for number in range(len(names), count):
            small_adapter(warm, number)
            tensors = {key: p.detach().clone() for key, p in lora_parameters(warm).items()}
            names.append(f"a{number}")
            add_adapter(model, names[-1], LORA, tensors)
        if count > 1:
            stack.hold(names)  # those that act together are side by side, too
        grown.append(resident_bytes() - before)
    return grown


def resident(kind: str, counts: tuple[int, ...]) -> list[int]:
    """hold, in a process of its own."""
    command = [sys.executable, "-m", "experiments.many_adapters", kind, *map(str, counts)]
    return json.loads(subprocess.run(command, check=True, stdout=-1, cwd=ROOT).stdout)


# --- the experiment -------------------------------------------------------------------------------


def measure(quick: bool, jobs: int) -> dict:
    """`jobs` does not matter: one thread at a time, since time is what is measured."""
    counts, episodes = (QUICK_COUNTS, QUICK_EPISODES) if quick else (COUNTS, EPISODES)
    torch.set_num_threads(1)
    environment = load_environments(Config())[1]
    tasks = environment.eval[:episodes]
    model, rounds = Qwen3.from_pretrained(MODEL).requires_grad_(False), []
    with tempfile.TemporaryDirectory() as scratch:
        directories = save_adapters(Path(scratch), max(counts))
        asyncio.run(play(model, environment, tasks[:8], directories[:1], 0, True))  # warm
        for seed in QUICK_SEEDS if quick else SEEDS:
            for count in counts:
                rounds.append(time_both(model, environment, tasks, directories[:count], seed))
                print(json.dumps(rounds[-1]), flush=True)
    grown = {kind: resident(kind, counts) for kind in ("one base", "copies")}
    memory = [
        {"adapters": count} | {kind: sizes[place] for kind, sizes in grown.items()}
        for place, count in enumerate(counts)
    ]
    return {"episodes": episodes, "rounds": rounds, "memory": memory}


def ratios(result: dict) -> dict[int, dict[str, list[float]]]:
    """Of each number of adapters, a value a seed."""
    found, one = {}, {r["seed"]: r for r in result["rounds"] if r["adapters"] == 1}
    for row in result["rounds"]:
        rate = {w: row[w]["tokens"] / row[w]["cpu_seconds"] for w in ("batched", "swapped")}
        alone = one[row["seed"]]["batched"]
        values = {
            **rate,
            "faster": rate["batched"] / rate["swapped"],
            "over one": alone["tokens"] / alone["cpu_seconds"] / rate["batched"],
            "same": row["same"] / result["episodes"],
        }
        for name, value in values.items():
            found.setdefault(row["adapters"], {}).setdefault(name, []).append(value)
    return found


def criteria(result: dict) -> dict[str, bool | None]:
    """What must hold, of a time over one adapter's by the interval, else in the worst seed."""
    found, held = ratios(result), {}
    worst = min(value for row in found.values() for value in row["same"])
    held[f"in the worst seed {worst:.0%} of the episodes are token for token the same"] = (
        worst >= SAME
    )
    for count, least in FASTER.items():
        value = min(found[count]["faster"])
        held[f"{count} adapters: batched at least {value:.1f} times as fast, asked {least}"] = (
            value >= least
        )
    last = max(found)
    longer = found[last]["over one"]
    words = f"{last} adapters take {told(longer, '.2f')} times as long as one, allowed {FLAT}"
    held[words] = within(longer, high=FLAT)
    row = result["memory"][-1]
    share = row["one base"] / row["copies"]
    held[f"{last} of them hold {share:.2f} of the copies' memory, allowed {SMALLER}"] = (
        share <= SMALLER
    )
    return held


def verdict(result: dict) -> tuple[str, str]:
    found = ratios(result)
    if not set(FASTER) <= set(found) or len(found[1]["same"]) < 3:
        return "undecided", "Too few adapters or seeds for the criterion."
    return decide(criteria(result))


def spread(values: list[float], form: str) -> str:
    if len(values) == 1:
        return f"{values[0]:{form}}"
    return f"{statistics.mean(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(result: dict) -> str:
    """A line a number of adapters: means over seeds, lowest to highest in brackets."""
    seeds = len({row["seed"] for row in result["rounds"]})
    lines = [
        "| adapters | batched, tokens a second | swapped | batched over swapped | time over that "
        "of one adapter | same episodes | adapters on one base, MB | copies, MB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (count, row), memory in zip(ratios(result).items(), result["memory"], strict=True):
        cells = [f"{count}", spread(row["batched"], ",.0f"), spread(row["swapped"], ",.0f")]
        cells += [spread(row["faster"], ".2f"), spread(row["over one"], ".2f")]
        cells += [f"{statistics.mean(row['same']):.1%}"]
        cells += [f"{memory[kind] / 1e6:,.0f}" for kind in ("one base", "copies")]
        lines.append(f"| {' | '.join(cells)} |")
    note = (
        f"{result['episodes']} held-out episodes a cell, {seeds} seeds: mean (lowest to highest). "
        "Sampled tokens per second of processor time, one thread. MB: resident growth of a "
        f"process. {NOTE}"
    )
    return "\n".join([*lines, "", note, "", on_paper()])


def on_paper() -> str:
    """The same memory for a real base, from its shapes."""
    base, adapter = parameters_of(model_shapes("Qwen/Qwen3-4B"), LORA)
    whole = BYTES["bfloat16"] * base
    each = (BYTES["float32"] + BYTES["bfloat16"]) * adapter  # the master, and its slot of the stack
    return (
        f"On paper, Qwen3-4B in bfloat16 with 64 adapters of rank 8: "
        f"{(whole + 64 * each) / 1e9:.1f} GB on one base, {64 * whole / 1e9:.0f} GB as copies."
    )


def draw(result: dict) -> Figure:
    """Left: throughput; right: memory; both against the number of adapters."""
    found, counts = ratios(result), [row["adapters"] for row in result["memory"]]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    styles = (("batched", "tab:blue", "o-"), ("swapped", "tab:orange", "s--"))
    for way, colour, style in styles:
        values = [found[count][way] for count in counts]
        middle = [statistics.mean(v) for v in values]
        label = f"{way} ({counts[-1]}: {middle[-1] / middle[0]:.0%} of one's)"
        left.plot(counts, middle, style, color=colour, label=label)
        low, high = [min(v) for v in values], [max(v) for v in values]
        left.fill_between(counts, low, high, color=colour, alpha=0.25, linewidth=0)
    left.set_ylabel("sampled tokens a second of processor time")
    left.set_title(f"{result['episodes']} episodes of wiki-search: mean, lowest to highest seed")
    left.set_ylim(bottom=0)
    for kind, colour, style in (("one base", "tab:blue", "o-"), ("copies", "tab:grey", "s--")):
        sizes = [row[kind] / 1e6 for row in result["memory"]]
        label = {"one base": "adapters on one base", "copies": "merged copies"}[kind]
        right.plot(counts, sizes, style, color=colour, label=label)
        words = f"{sizes[-1]:,.0f} MB"
        right.annotate(
            words, (counts[-1], sizes[-1]), (-4, 6), textcoords="offset points", ha="right"
        )
    right.set_ylabel("resident, MB")
    right.set_title("tiny base, rank 8, fp32")
    right.set_yscale("log")
    for axis in (left, right):
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, counts)
        axis.set_xlabel("adapters")
        axis.margins(y=0.12)
        axis.grid(alpha=0.3)
        axis.legend()
    return figure


if __name__ == "__main__":  # the child of `resident`
    print(hold(sys.argv[1], [int(count) for count in sys.argv[2:]]))
