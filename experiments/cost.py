"""What a run costs: FLOPs, core-hours and money of the default job, measured, and of real ones,
planned, beside what Tina's authors paid.

    python -m experiments cost
    python -m experiments cost --draw --price core=0.05 --price l40s=1.2

Measured: processor seconds of `python train.py --rank 8` from start to exit, three seeds, and the
FLOPs of the tokens that it sampled and trained on, by the planner's formulas (tools/plan.py, which
tests hold against torch's own counts). Planned: hours and FLOPs that the planner gives for the
configurations in configs/, times a price. Energy, people, and the runs that failed are not in it.

A device's hour costs what PRICES says: assumptions, printed with the table; money scales with them.
"""

import json
import math
import statistics
from collections import defaultdict

import torch
from matplotlib import pyplot
from matplotlib.figure import Figure
from torch.nn.utils.rnn import pad_sequence

from config import Config, parse_config
from experiments.runs import ROOT, Run, run_all
from experiments.seeds import NOTE, decide, interval, told
from packing import pack
from tools.plan import (
    DEVICES,
    adapter_of,
    human,
    model_shapes,
    reference_flops,
    sampled_flops,
    step_flops,
    step_seconds,
    trained_flops,
)

MINUTES = 5
SEEDS = (0, 1, 2)
QUICK = "--steps 2 --groups 4 --group-size 4 --eval-size 8".split()
# Dollars an hour. Tina (arXiv 2504.15777) used L40S, of which one is planned and two were used.
PRICES = {"core": 0.05, "l40s": 1.00, "4090": 0.40, "a100": 1.80, "h200": 3.50}
# (configuration, device, how many of them are rented): moe.toml leaves one to vLLM
PLANNED = (
    ("qwen3_0.6b", "4090", 1),
    ("math", "l40s", 1),
    ("math", "a100", 1),
    ("wiki_search", "h200", 1),
    ("moe", "h200", 2),
)
TINA_PRICE = PRICES["l40s"]  # about what the authors paid an hour
TINA = {"train": 8.0, "evaluate": 1.0, "all experiments": 526.0}  # dollars
# The criterion, see the page.
CENT, FACTOR = 0.01, 3.0


# --- measured -------------------------------------------------------------------------------------


def flops_of(config: Config, run: Run) -> dict[str, float]:
    """FLOPs of a run by part, of the tokens that it had: sampled ones are counted in every row,
    lengths of episodes, and what those of a group have in common, are those in samples.jsonl.
    Evaluations: as sampling, from the questions."""
    shapes, lora = model_shapes(config.model), adapter_of(config)
    rows = [json.loads(line) for line in (run.output / "samples.jsonl").read_bytes().splitlines()]
    length = statistics.mean(len(row["token_ids"]) for row in rows)
    prompt = statistics.mean(row["loss_mask"].index(1) for row in rows)
    new, new_sampled = computed_shares(rows, config.group_size)
    each = config.groups * config.group_size
    total = dict.fromkeys(("prefill", "decode", "forward", "backward", "reference"), 0.0)

    def sample(episodes: float, sampled: float, shared: float) -> None:
        """`shared` prompts are not computed, since another episode of their group has them."""
        passing = {"context": length / 2}
        prefilled = episodes * length - sampled - shared * prompt
        prefill = sampled_flops(shapes, lora, tokens=prefilled, wanted=0, **passing)
        decode = sampled_flops(shapes, lora, tokens=sampled, wanted=sampled, **passing)
        total["prefill"] += prefill
        total["decode"] += decode

    for row in run.rows:
        sample(each, row["tokens_sampled"], each - config.groups)
        share = 1 - row["groups_skipped"] / config.groups
        counts = {"tokens": new * share * each * length}
        counts["wanted"] = new_sampled * row["tokens_trained"]
        forward, backward = trained_flops(shapes, lora, length=length, **counts)
        compared = min(1.0, config.micro_tokens / max(counts["tokens"], 1))
        total["forward"] += forward
        total["backward"] += backward
        total["reference"] += compared * reference_flops(shapes, length=length, **counts)
    a_token = statistics.mean(row["tokens_sampled"] for row in run.rows) / each
    sample(2 * config.eval_size, 2 * config.eval_size * a_token, 0)
    return total


def computed_shares(rows: list[dict], group_size: int) -> tuple[float, float]:
    """Shares of all tokens, and of the sampled ones, that the trainer computes: episodes of a group
    begin alike, and it computes that once (packing.py). Of the groups that samples.jsonl has whole;
    what groups of a micro-batch have in common with each other is counted once for each."""
    groups = defaultdict(list)
    for row in rows:
        groups[row["step"], row["question"]].append(row)
    tokens, computed, sampled, wanted = 0, 0, 0, 0
    for group in groups.values():
        if len(group) == group_size:
            ids, mask = (
                pad_sequence([torch.tensor(row[key]) for row in group], batch_first=True)
                for key in ("token_ids", "loss_mask")
            )
            packing = pack(ids, mask[:, 1:].bool())
            tokens += sum(len(row["token_ids"]) for row in group)
            computed += len(packing.ids)
            sampled += int(mask.sum())
            wanted += len(packing.wanted)
    return computed / tokens, wanted / sampled


def measured(run: Run, seed: int) -> dict:
    config = parse_config(["--config", str(run.output / "config.toml")])
    steps = [row["seconds"] for row in run.rows]
    sampling = [row["seconds_waiting"] for row in run.rows]
    return {
        "seed": seed,
        "cpu_seconds": run.cpu_seconds,
        "flops": flops_of(config, run),
        "share_sampling": sum(sampling) / sum(steps),
        "held_out": [run.summary["eval_before"], run.summary["eval_after"]],
        "planned_core_seconds": planned_core_seconds(config),
        "planned_flops": config.steps * sum(step_flops(config).values()),
    }


def planned_core_seconds(config: Config) -> float:
    """What the planner gives for both cores, without evaluations."""
    return 2 * config.steps * sum(step_seconds(config, DEVICES["cpu2"]).values())


# --- planned --------------------------------------------------------------------------------------


def planned(name: str, device: str, number: int) -> dict:
    config = parse_config(["--config", str(ROOT / "configs" / f"{name}.toml")])
    seconds = step_seconds(config, DEVICES[device])
    flops = {part: config.steps * value for part, value in step_flops(config).items()}
    return {
        "config": name,
        "model": config.model.rpartition("/")[2],
        "device": device,
        "number": number,
        "steps": config.steps,
        "flops": flops,
        "hours": number * config.steps * sum(seconds.values()) / 3600,  # of all devices
    }


def measure(quick: bool, jobs: int) -> dict:
    seeds = SEEDS[:1] if quick else SEEDS
    flags = QUICK if quick else []
    commands = [("train.py", "--rank", "8", "--seed", f"{s}", *flags) for s in seeds]
    runs = run_all(commands, jobs, fresh=True)  # old ones have seconds of older code
    return {
        "prices": PRICES,
        "runs": [measured(run, seed) for run, seed in zip(runs, seeds, strict=True)],
        "planned": [planned(*job) for job in PLANNED],
    }


def read_prices(given: list[str]) -> dict[str, float]:
    """Of "l40s=1.2": {"l40s": 1.2}. ValueError for an unknown device, or no price."""
    prices = {}
    for words in given:
        device, _, price = words.partition("=")
        if device not in PRICES:
            raise ValueError(f"--price {words}: {device} is none of {', '.join(PRICES)}")
        try:
            prices[device] = float(price)
        except ValueError:
            raise ValueError(f"--price {words}: is not {device}=DOLLARS") from None
        if not 0 <= prices[device] < math.inf:
            raise ValueError(f"--price {words}: is no price")
    return prices


# --- what it shows --------------------------------------------------------------------------------


def dollars(result: dict) -> list[float]:
    """Of each measured run."""
    return [run["cpu_seconds"] / 3600 * result["prices"]["core"] for run in result["runs"]]


def cost(result: dict, row: dict) -> float:
    return row["hours"] * result["prices"][row["device"]]


def criteria(result: dict) -> dict[str, bool]:
    """What must hold, and whether it does."""
    mean, half = interval(dollars(result))
    off = [run["planned_core_seconds"] / run["cpu_seconds"] for run in result["runs"]]
    (tina,) = (r for r in result["planned"] if (r["config"], r["device"]) == ("math", "l40s"))
    ours, theirs = cost(result, tina), TINA["train"]
    return {
        f"the default job costs {100 * mean:.2f} cents, {100 * (mean + half):.2f} at most": (
            mean + half < CENT
        ),
        f"its plan has {min(off):.2f} to {max(off):.2f} times its core-seconds": all(
            1 / FACTOR <= ratio <= FACTOR for ratio in off
        ),
        f"Tina's training is planned at ${ours:.1f} and took ${theirs:.0f}": (
            1 / FACTOR <= ours / theirs <= FACTOR
        ),
    }


def verdict(result: dict) -> tuple[str, str]:
    if len(result["runs"]) < 3:
        return "undecided", "Fewer than three seeds."
    return decide(criteria(result))


def table(result: dict) -> str:
    """A line a job."""
    runs, prices = result["runs"], result["prices"]
    hours = [run["cpu_seconds"] / 3600 for run in runs]
    total = statistics.mean(sum(run["flops"].values()) for run in runs)
    lines = [
        "| job | device | FLOPs | device-hours | dollars |",
        "|---|---|---|---|---|",
        f"| `python train.py --rank 8`, measured | one core | {human(total, 'FLOP')} "
        f"| {told(hours, '.4f')} | {told(dollars(result), '.4f')} |",
    ]
    for row in result["planned"]:
        total = f"{sum(row['flops'].values()) / 1e15:,.0f} PFLOP"
        lines.append(
            f"| `configs/{row['config']}.toml` ({row['model']}), {row['steps']} steps, planned "
            f"| {row['number']} x {row['device']} | {total} | {row['hours']:.1f} "
            f"| {cost(result, row):.1f} |"
        )
    for what, price in TINA.items():
        hours = price / TINA_PRICE
        lines.append(f"| Tina, as published: {what} | 2 x l40s | | {hours:.0f} | {price:.0f} |")
    rates = [sum(run["flops"].values()) / run["cpu_seconds"] / 1e9 for run in runs]
    plans = statistics.mean(run["planned_core_seconds"] for run in runs)
    cpu = [run["cpu_seconds"] for run in runs]
    sampling = [100 * run["share_sampling"] for run in runs]
    before, after = zip(*(run["held_out"] for run in runs), strict=True)
    named = ", ".join(f"{name} {price:.2f}" for name, price in prices.items())
    lines += [
        "",
        f"Assumed prices, dollars an hour: {named}; Tina's hours are its dollars at one dollar a "
        "GPU and hour, and its planned ones are one GPU's work, which two would share. "
        f"{len(runs)} seed{'s' * (len(runs) > 1)}. {NOTE}",
        "",
        f"The default job went from {statistics.mean(before):.3f} to {told(list(after), '.3f')} "
        f"held out in {told(cpu, '.0f')} core-seconds; planned, without evaluations and start, "
        f"were {plans:.0f} and {human(runs[0]['planned_flops'], 'FLOP')}. A core that reaches 77 "
        f"GFLOP/s in large products had {told(rates, '.1f')}; {told(sampling, '.0f')} % of a "
        "step's seconds were sampling.",
    ]
    return "\n".join(lines)


def draw(result: dict) -> Figure:
    """Left: dollars; right: which part of a run its FLOPs are."""
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(12, 4), layout="constrained", width_ratios=(1.2, 1)
    )
    mean, half = interval(dollars(result))
    bars = [("default job, one core", mean, "tab:green", "measured")]
    flops = [("default job", [run["flops"] for run in result["runs"]])]
    for row in result["planned"]:
        words = f"{row['config']}, {row['number']} x {row['device']}"
        bars.append((words, cost(result, row), "tab:blue", "planned"))
        if row["config"] not in [words for words, _ in flops]:
            flops.append((row["config"], [row["flops"]]))
    for what, price in TINA.items():
        bars.append((f"Tina: {what}", price, "tab:orange", "published"))
    seen = set()
    for place, (_, price, colour, label) in enumerate(bars):
        left.barh(place, price, color=colour, label=None if label in seen else label)
        seen.add(label)
        digits = 4 if price < CENT else 2 if price < 1 else 1 if price < 100 else 0
        words = f"${price:.{digits}f}"
        left.annotate(words, (price, place), (4, 0), textcoords="offset points", va="center")
    if math.isfinite(half):
        left.errorbar(mean, 0, xerr=min(half, 0.9 * mean), color="black", capsize=3)
    left.set_yticks(range(len(bars)), [words for words, *_ in bars])
    left.invert_yaxis()
    left.set(xscale="log", xlabel="dollars a run", xlim=(3e-4, 3e3))
    left.axvline(9, color="grey", linestyle=":", label="Tina's nine dollars")
    left.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.4, 1.0), fontsize=8)
    bottom = [0.0] * len(flops)
    for part in ("prefill", "decode", "forward", "backward", "reference"):
        shares = [
            statistics.mean(run[part] / sum(run.values()) for run in of_job) for _, of_job in flops
        ]
        right.barh(range(len(flops)), shares, left=bottom, label=part)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    right.set_yticks(range(len(flops)), [words for words, _ in flops])
    right.invert_yaxis()
    right.set_xlabel("share of the FLOPs")
    right.set_xlim(0, 1)
    right.legend(ncols=5, loc="lower center", bbox_to_anchor=(0.5, 1.0), fontsize=8)
    return figure
