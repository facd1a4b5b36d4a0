"""The whole RL step against TRL's GRPOTrainer with a peft_config: same model, prompts and lengths.

    benchmarks/environments.sh trl
    python benchmarks/rl_step.py --trl .venv-trl/bin/python        about seven minutes
    ... --quick            one round of two steps, to see it work; keeps no result

A step: 8 prompts of 64 random tokens, 8 completions of exactly 64 tokens each, a reward that costs
nothing (is the first sampled token odd), advantages, loss, backward, Adam. Both train rank 8 on all
seven projections of the same checkpoint ("tiny" of benchmarks/sampling.py, random weights) in fp32,
temperature 1, no KL. Ours is the loop of train.py itself, with publishing, probe and the files that
it writes; only task, tokenizer and reward are stand-ins. TRL's is GRPOTrainer.train() as it comes,
without gradient checkpointing (its default, which would take longer). Both sample all 64 at once
and take one optimizer step on what they pass forward and back in two ways:

    as it comes        ours in passes of up to 4,096 tokens (--micro-tokens); TRL all 64 in one
    8 at a time        ours with --micro-tokens 1024, TRL with 8 gradient accumulation steps of 8

Each run is a process of its own, and the four alternate. Seconds of a step are medians over the
steps of a process after the first, CPU seconds with one thread, wall with more. Ratios are of the
two in the same way, of time the median over the rounds.
Memory is the process's peak (resident), its interpreter and imports included; that of a process
just before its first step is kept beside. benchmarks/readme.py tabulates what is kept.
"""

import argparse
import contextlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from benchmarks.memory import peak_bytes  # noqa: E402

RESULTS = Path(__file__).with_suffix(".json")
GROUPS, GROUP_SIZE, PROMPT, NEW = 8, 8, 64, 64
LR, RANK, ALPHA = 1e-4, 8, 32
# Who plays -> (whose trainer, what it takes in one pass: tokens of ours, completions of TRL's).
PLAYERS = {
    "ours": ("ours", 4096),
    "TRL": ("trl", GROUPS * GROUP_SIZE),
    "ours, 8 at a time": ("ours", 8 * (PROMPT + NEW)),
    "TRL, 8 at a time": ("trl", 8),
}
PAIRS = {"TRL": "ours", "TRL, 8 at a time": "ours, 8 at a time"}
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def reward_of(token_ids: list[int]) -> float:
    return float(token_ids[0] % 2)


def make_prompts(vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocabulary, (GROUPS, PROMPT), generator=generator).tolist()


class Clock:
    """Wall and CPU time at the end of each step, and of each part within it."""

    def __init__(self):
        self.ends: list[tuple[float, float]] = []
        self.parts: dict[str, float] = {}
        self.before = 0

    def step_ended(self) -> None:
        if not self.ends:
            self.before = peak_bytes()
        self.ends.append((time.perf_counter(), time.process_time()))

    def report(self) -> dict:
        pairs = list(zip(self.ends, self.ends[1:], strict=False))[1:]  # the first warms up
        return {
            "wall": [after[0] - before[0] for before, after in pairs],
            "cpu": [after[1] - before[1] for before, after in pairs],
            "peak_memory": peak_bytes(),
            "memory_before": self.before,
            "parts": self.parts,
        }


# --- ours -----------------------------------------------------------------------------------------


def play_ours(checkpoint: str, steps: int, at_a_time: int) -> dict:
    """train.py's loop on stand-ins for task, tokenizer and reward."""
    import asyncio
    from types import SimpleNamespace

    import train
    from config import Config
    from environments import Task

    prompts = make_prompts(2048)
    tasks = [Task(str(i), f"prompt {i}", "") for i in range(GROUPS)]
    environment = SimpleNamespace(
        train=tasks,
        eval=tasks[:1],
        tools=[],
        prompt=lambda task: [],
        reward=lambda task, messages: 0.0,
        outcome=lambda task, messages, reward: "",
    )
    tokenizer = SimpleNamespace(
        prompt_ids=lambda environment, task: list(prompts[int(task.id)]),
        decode=lambda ids: "",
        stop_token_ids=(),
        end_of_turn_id=-1,
    )
    clock = Clock()

    async def run_groups(*arguments, **options):
        groups = await played(*arguments, **options)
        for episode in (episode for group in groups for episode in group):
            episode.reward = reward_of(episode.token_ids[PROMPT:])
        return groups

    async def probe(trainer: train.Trainer) -> None:
        await probed(trainer)  # the last thing that a step does
        clock.step_ended()

    played, train.run_groups = train.run_groups, run_groups
    probed, train.Trainer.probe = train.Trainer.probe, probe
    train.load_environments = lambda config: (environment, environment)
    train.load_tokenizer = lambda model: tokenizer
    with tempfile.TemporaryDirectory() as directory:
        config = Config(
            model=checkpoint,
            rank=RANK,
            alpha=ALPHA,
            lr=LR,
            groups=GROUPS,
            group_size=GROUP_SIZE,
            max_new_tokens=NEW,
            max_turns=1,
            max_length=PROMPT + NEW + 1,
            slots=GROUPS * GROUP_SIZE,
            micro_tokens=at_a_time,
            steps=steps,
            profile=steps,
            save_every=steps + 1,
            eval_size=1,
            output=f"{directory}/run",
        )
        asyncio.run(train.train(config))
        for line in Path(f"{directory}/run/profile.md").read_text().splitlines()[4:]:
            name, seconds = line.split("|")[1:3]
            clock.parts[name.strip()] = float(seconds)
    return clock.report()


# --- TRL ------------------------------------------------------------------------------------------


def play_trl(checkpoint: str, steps: int, at_a_time: int) -> dict:
    """GRPOTrainer.train(), with stopwatches around what takes its time."""
    from datasets import Dataset
    from peft import LoraConfig
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    words = {f"t{i}": i for i in range(2048)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="t0", eos_token="t0", unk_token="t0"
    )
    prompts = make_prompts(2048)
    clock = Clock()

    class Look(TrainerCallback):
        def on_step_begin(self, *_, **__):
            clock.step_ended()

        def on_train_end(self, *_, **__):
            clock.step_ended()

    def reward(completion_ids, **_) -> list[float]:
        assert all(len(ids) == NEW for ids in completion_ids), "a completion of another length"
        return [reward_of(ids) for ids in completion_ids]

    with tempfile.TemporaryDirectory() as directory:
        config = GRPOConfig(
            output_dir=directory,
            per_device_train_batch_size=at_a_time,
            gradient_accumulation_steps=GROUPS * GROUP_SIZE // at_a_time,
            num_generations=GROUP_SIZE,
            max_completion_length=NEW,
            generation_kwargs={"min_new_tokens": NEW},
            max_steps=steps,
            learning_rate=LR,
            lr_scheduler_type="constant",
            beta=0.0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32"),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_list(
                [{"prompt": " ".join(f"t{i}" for i in prompt)} for prompt in prompts]
            ),
            processing_class=tokenizer,
            peft_config=LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=PROJECTIONS),
            callbacks=[Look()],
        )

        def watch(name: str, owner, attribute: str) -> None:
            function = getattr(owner, attribute)

            def wrapper(*arguments, **options):
                start = time.perf_counter()
                try:
                    return function(*arguments, **options)
                finally:
                    spent = time.perf_counter() - start
                    clock.parts[name] = clock.parts.get(name, 0.0) + spent / steps

            setattr(owner, attribute, wrapper)

        watch("sampling", trainer, "_generate")
        watch("scoring, advantages", trainer, "_generate_and_score_completions")
        watch("loss forward", trainer, "compute_loss")
        watch("backward", trainer.accelerator, "backward")
        trainer.train()
        clock.parts["scoring, advantages"] -= clock.parts["sampling"]  # it ran inside
    return clock.report()


# --- the run --------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", metavar="PYTHON", help="interpreter that can import trl")
    parser.add_argument("--rounds", type=int, default=3, help="a process of each way")
    parser.add_argument("--steps", type=int, default=4, help="of a process; the first warms up")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--quick", action="store_true", help="one round, no result")
    parser.add_argument("--play", choices=PLAYERS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        return play(options)
    if not options.trl:
        raise SystemExit("rl_step.py: --trl PYTHON, an environment as the docstring makes it")
    if options.quick:
        options.rounds, options.steps = 1, 2
    from benchmarks.sampling import TINY, machine, make_checkpoint, medians, package_versions

    pythons = {"ours": sys.executable, "trl": options.trl}
    reports = {who: [] for who in PLAYERS}
    before = machine(options.threads)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, _ = make_checkpoint(TINY, Path(directory))
        for number in range(options.rounds):
            for who in list(reports)[:: 1 if number % 2 else -1]:
                command = [
                    pythons[PLAYERS[who][0]],
                    __file__,
                    "--play",
                    who,
                    "--checkpoint",
                    str(checkpoint),
                ]
                command += ["--steps", str(options.steps), "--threads", str(options.threads)]
                environment = os.environ | {"OMP_NUM_THREADS": str(options.threads)}
                done = subprocess.run(command, env=environment, capture_output=True, text=True)
                if done.returncode:
                    raise SystemExit(f"rl_step.py: {who} failed:\n{done.stderr[-3000:]}")
                reports[who].append(json.loads(done.stdout.splitlines()[-1]))
                print(f"round {number + 1}, {who}: {json.dumps(reports[who][-1])}", flush=True)
    row = summary(reports, options) | medians(before, machine(options.threads))
    row |= {
        "cores": os.cpu_count(),
        "versions": {
            "ours": package_versions(sys.executable),
            "trl": package_versions(options.trl),
        },
    }
    print(json.dumps(row))
    print(table(row))
    if not options.quick:
        rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
        rows = [other for other in rows if other["threads"] != row["threads"]] + [row]
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")


def play(options: argparse.Namespace) -> None:
    """One process of one round; its report is the last line that it prints."""
    import torch

    torch.set_num_threads(options.threads)
    with contextlib.redirect_stdout(io.StringIO()):
        whose, at_a_time = PLAYERS[options.play]
        step_of = {"ours": play_ours, "trl": play_trl}[whose]
        report = step_of(options.checkpoint, options.steps, at_a_time)
    print(json.dumps(report))


def summary(reports: dict[str, list[dict]], options: argparse.Namespace) -> dict:
    clock = "cpu" if options.threads == 1 else "wall"
    row = {"threads": options.threads, "clock": clock, "rounds": options.rounds}
    row |= {"steps": options.steps, "players": {}}
    for who, runs in reports.items():
        seconds = [statistics.median(run[clock]) for run in runs]
        row["players"][who] = {
            "seconds_a_step": statistics.median(seconds),
            "cpu_over_wall": sum(sum(r["cpu"]) for r in runs) / sum(sum(r["wall"]) for r in runs),
            "peak_memory": max(run["peak_memory"] for run in runs),
            "memory_before": max(run["memory_before"] for run in runs),
            "parts": {
                name: statistics.median(run["parts"].get(name, 0.0) for run in runs)
                for name in runs[0]["parts"]
            },
        }
    players = row["players"]
    row["faster"], row["less_memory"] = {}, {}
    for trl, ours in PAIRS.items():
        rounds = zip(reports[trl], reports[ours], strict=True)
        row["faster"][trl] = statistics.median(
            statistics.median(theirs[clock]) / statistics.median(mine[clock])
            for theirs, mine in rounds
        )
        row["less_memory"][trl] = players[trl]["peak_memory"] / players[ours]["peak_memory"]
    return row


def table(row: dict) -> str:
    """A line a player, with where its time goes (wall seconds of a step), and the two ratios."""
    lines = [
        f"{who}: {its['seconds_a_step']:.2f} s a step ({row['clock']}), peak "
        f"{its['peak_memory'] / 1e9:.2f} GB, of it {its['memory_before'] / 1e9:.2f} before the "
        f"first step; " + ", ".join(f"{name} {part:.2f}" for name, part in its["parts"].items())
        for who, its in row["players"].items()
    ]
    lines += [
        f"{ours} is {row['faster'][trl]:.2f} times as fast as {trl} and takes "
        f"{1 / row['less_memory'][trl]:.2f} of its memory"
        for trl, ours in PAIRS.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
