"""The free reference model: the adapter switched off against a second copy of the weights.

    python -m experiments reference
    python experiments/reference.py --kl 0.1 --seed 1      a run with the copy: train.py's flags
    python experiments/reference.py --memory copy slice    weights and memory of one process

    KL to the reference needs its logprobs of every sampled token:

        adapter off   policy: W0 x + (alpha / r) B A x         reference: W0 x, the same W0
        a copy        policy: W0 x + (alpha / r) B A x         reference: W0' x, another tensor

The first is train.py as it is. The second is train.py, too, but the frozen model that `--full` has
for a reference is loaded beside the adapter's base.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402

import train  # noqa: E402
from config import Config  # noqa: E402
from experiments.runs import Run, run_all  # noqa: E402
from experiments.seeds import decide  # noqa: E402
from lora import LoRAConfig, inject_lora, lora_parameters  # noqa: E402
from model import Qwen3, Qwen3Config  # noqa: E402
from rollout import Completion, Trajectory  # noqa: E402
from update import loss_and_backward, micro_batches, optimizer_step  # noqa: E402

MINUTES = 2
SEEDS = (0, 1, 2)
KL = "0.1"
SIZE = "--steps 4 --groups 2 --group-size 4 --eval-size 4".split()
REFERENCES = ("off", "copy")
# Of what is measured in bytes: the tiny model, and four layers of Qwen3-0.6B (configs/models/) with
# a smaller vocabulary, so that all of it is built and trained for a step in seconds.
MODELS = {
    "tiny": {},
    "slice": {"num_hidden_layers": 4, "vocab_size": 16_384},
}
TIMINGS = ("seconds", "seconds_waiting", "sample_tokens_per_second", "train_tokens_per_second")


# --- runs with either reference -------------------------------------------------------------------


def run_with_a_copy(arguments: list[str]) -> None:
    """train.py, its reference being a second copy of the base."""
    load = train.load_replica

    def load_with_a_copy(config: Config) -> tuple:
        *policy, _ = load(config)
        frozen = Qwen3.from_pretrained(config.model, getattr(torch, config.dtype), config.device)
        return *policy, frozen.requires_grad_(False)

    train.load_replica = load_with_a_copy
    train.main(arguments)


def command(reference: str, kl: str, seed: int, size: list[str]) -> tuple[str, ...]:
    program = "train.py" if reference == "off" else "experiments/reference.py"
    return (program, "--kl", kl, "--seed", str(seed), *size)


def measure(quick: bool, jobs: int) -> dict:
    """Pairs of runs that differ in the reference alone, runs without KL, and memory."""
    seeds, models = (SEEDS[:1], ("tiny",)) if quick else (SEEDS, tuple(MODELS))
    size = "--steps 2 --groups 2 --group-size 4 --eval-size 8".split() if quick else SIZE
    cases = [(reference, KL, seed) for seed in seeds for reference in REFERENCES]
    cases += [("off", "0", seeds[0])]
    runs = run_all([command(*case, size) for case in cases], jobs)
    found = dict(zip(cases, runs, strict=True))
    return {
        "experiment": "reference",
        "kl": float(KL),
        "size": size,
        "rows": [
            {"seed": seed} | compared(*(found[reference, KL, seed] for reference in REFERENCES))
            for seed in seeds
        ],
        "without_kl": adapter_gap(found["off", KL, seeds[0]], found["off", "0", seeds[0]]),
        "memory": [
            {"model": model, "reference": reference} | memory_of(reference, model)
            for model in models
            for reference in REFERENCES
        ],
    }


def compared(off: Run, copy: Run) -> dict:
    """How the two runs' metrics and adapters differ, and what the figure shows."""
    keys = [key for key in off.rows[0] if key not in TIMINGS]
    pairs = zip(off.rows, copy.rows, strict=True)
    differing = [key for row, other in pairs for key in keys if row[key] != other[key]]
    return {
        "metrics": len(keys) * len(off.rows),
        "metrics_differing": len(differing),
        "adapter_gap": adapter_gap(off, copy),
        "held_out": [off.held_out, copy.held_out],
        "reference_kl": {
            name: [row["reference_kl"] for row in run.rows]
            for name, run in zip(REFERENCES, (off, copy), strict=True)
        },
    }


def adapter_gap(one: Run, other: Run) -> float:
    """Largest difference of an entry of the two trained adapters."""
    adapters = [
        safetensors.torch.load_file(run.output / "adapter" / "adapter_model.safetensors")
        for run in (one, other)
    ]
    return max((adapters[0][name] - adapters[1][name]).abs().max().item() for name in adapters[0])


# --- memory, in a process of its own --------------------------------------------------------------


def memory_of(reference: str, model: str) -> dict:
    """What `--memory` of this file prints."""
    arguments = [str(Path(__file__)), "--memory", reference, model]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [sys.executable, *arguments], env=environment, check=True, capture_output=True, text=True
    )
    return json.loads(output.stdout)


def resident(peak: bool = False) -> int:
    """Bytes of this process in memory, now or at most so far (Linux)."""
    key = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def model_of(name: str) -> Qwen3:
    """The tiny checkpoint, or random weights in the shapes of a real one."""
    if name == "tiny":
        return Qwen3.from_pretrained(Config.model)
    facts = json.loads((ROOT / "configs" / "models" / "Qwen3-0.6B.json").read_text())
    config = Qwen3Config.from_dict(facts | MODELS[name])
    model = Qwen3(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return model


def measure_memory(reference: str, name: str) -> dict:
    """Bytes of all weights held, of the process before and after they were made, and its peak over
    one KL-regularised step on S random sequences of T tokens."""
    torch.set_num_threads(1)
    model_of("tiny")  # what the first model brings in (kernels, tables) is nobody's weights
    before = resident()
    policy = model_of(name)
    alone = resident()
    frozen = model_of(name).requires_grad_(False) if reference == "copy" else None
    both = resident()
    inject_lora(policy, LoRAConfig())
    config = Config(kl=float(KL))
    optimizer = torch.optim.Adam(lora_parameters(policy).values(), lr=config.lr)
    S, T = 2, 48
    pairs = []
    for sequence, ids in enumerate(torch.randint(0, policy.config.vocab_size, (S, T)).tolist()):
        episode = Trajectory(None, None, 0, [])
        episode.add_forced(ids[:1])
        episode.add_sampled(Completion(ids[1:], [-5.0] * (T - 1), "stop"))
        pairs.append((episode, (-1.0) ** sequence))
    batches = micro_batches(pairs, config.micro_tokens, config.device)
    loss_and_backward(policy, batches, S * (T - 1), config, frozen)
    optimizer_step(policy, optimizer, 0, config)
    storages = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for model in (policy, frozen)
        if model is not None
        for parameter in model.parameters()
    }
    return {
        "weights": sum(storages.values()),
        "adapter": sum(p.nbytes for p in lora_parameters(policy).values()),
        "policy_resident": alone - before,
        "copy_resident": both - alone,
        "peak": resident(peak=True),
    }


# --- what it shows --------------------------------------------------------------------------------


def weights(result: dict, model: str, reference: str, key: str = "weights") -> int:
    """Bytes, or what else was measured of a model with a reference."""
    rows = result["memory"]
    (row,) = [row for row in rows if (row["model"], row["reference"]) == (model, reference)]
    return row[key]


def base_weights(result: dict, model: str, reference: str) -> int:
    """Without the adapter, which both ways have once."""
    return weights(result, model, reference) - weights(result, model, reference, "adapter")


def models_of(result: dict) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in result["memory"]))


def verdict(result: dict) -> tuple[str, str]:
    rows = result["rows"]
    differing = sum(row["metrics_differing"] for row in rows)
    gap = max(row["adapter_gap"] for row in rows)
    control = result["without_kl"]
    criteria: dict[str, bool | None] = {
        f"1 equal runs: {differing} of {sum(row['metrics'] for row in rows):,} metrics differ, "
        f"adapters by {gap:.0e} at most": differing == 0 and gap == 0,
        # Without an effect of the KL there is nothing that could have differed.
        f"2 without KL the adapters differ by {control:.0e}": control > 1e-4 or None,
    }
    for model in models_of(result):
        off, copy = (base_weights(result, model, reference) for reference in REFERENCES)
        criteria[f"3 base weights in memory, {model}: {off / copy:.3f} of those with a copy"] = (
            off / copy == 0.5
        )
    if "slice" in models_of(result):  # of a tiny one the process's own noise is larger
        copy = weights(result, "slice", "copy", "copy_resident")
        policy = weights(result, "slice", "copy", "policy_resident")
        ratio = policy / (policy + copy)
        criteria[f"4 resident memory, slice: {ratio:.3f}"] = 0.45 <= ratio <= 0.55
    if len(rows) < len(SEEDS):
        criteria[f"{len(SEEDS)} seeds"] = None
    return decide(criteria)


def table(result: dict) -> str:
    """A line a seed, then a line a model."""
    lines = [
        "| seed | metrics that differ | adapter, largest difference | held out, off / copy | "
        "KL to the reference at the end, off / copy |",
        "|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        held_out = " / ".join(f"{value:.3f}" for value in row["held_out"])
        kl = " / ".join(f"{row['reference_kl'][name][-1]:.6f}" for name in REFERENCES)
        lines.append(
            f"| {row['seed']} | {row['metrics_differing']} of {row['metrics']} | "
            f"{row['adapter_gap']:.0e} | {held_out} | {kl} |"
        )
    lines += [
        "",
        "| model | reference | weights, MB | of which adapter | the copy, resident | "
        "peak of the process, one step, MB |",
        "|---|---|---|---|---|---|",
    ]
    for model in models_of(result):
        for reference in REFERENCES:
            cells = [model, "adapter off" if reference == "off" else "a second copy"]
            for key in ("weights", "adapter", "copy_resident"):
                cells.append(f"{weights(result, model, reference, key) / 1e6:.2f}")
            cells.append(f"{weights(result, model, reference, 'peak') / 1e6:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(result: dict) -> pyplot.Figure:
    """Left: KL to the reference over the steps, both ways. Right: weights in memory."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    for number, row in enumerate(result["rows"]):
        steps = range(1, len(row["reference_kl"]["off"]) + 1)
        colour = f"C{number}"
        label = f"seed {row['seed']}, adapter off"
        left.plot(steps, row["reference_kl"]["off"], color=colour, label=label)
        label = f"seed {row['seed']}, a second copy"
        left.plot(
            steps, row["reference_kl"]["copy"], "o", color=colour, mfc="none", ms=8, label=label
        )
    left.set(xlabel="step", ylabel="KL to the reference, k3, nats a token", xticks=steps)
    left.legend(fontsize=8)
    models = models_of(result)
    for place, (reference, label) in enumerate(
        zip(REFERENCES, ("adapter off", "a second copy"), strict=True)
    ):
        held = [weights(result, model, reference) for model in models]
        shares = [
            bytes_held / weights(result, model, "copy")
            for bytes_held, model in zip(held, models, strict=True)
        ]
        drawn = right.bar([n + place * 0.4 for n in range(len(models))], shares, 0.38, label=label)
        right.bar_label(drawn, [f"{bytes_held / 1e6:.1f} MB" for bytes_held in held])
    words = {"tiny": "the tiny model", "slice": "4 layers of Qwen3-0.6B"}
    right.set_xticks([n + 0.2 for n in range(len(models))], [words[model] for model in models])
    right.set(ylabel="weights in memory while training, share", ylim=(0, 1.35))
    right.legend(loc="upper left")
    left.grid(alpha=0.3)
    right.grid(alpha=0.3, axis="y")
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["--memory"]:
        print(json.dumps(measure_memory(*sys.argv[2:4])))
    else:
        run_with_a_copy(sys.argv[1:])
