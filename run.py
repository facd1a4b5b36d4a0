"""A run: its directory, its checkpoints, its picture.

    runs/wiki_search-rank8-seed0/
      config.toml      every field of the configuration, resolved      run.json     whose run it is
      metrics.jsonl    a line a step      samples.jsonl    episodes, as text and as tokens
      broadcasts/      versions of the adapter: the newest, and those that a batch under way names
      checkpoints/     the last two: adapter, optimizer, progress, random state; never the base
      adapter/         the PEFT directory to deploy      summary.json, reward.png    what came out
      reference/       the frozen copy of the adapter that it started from, if from one

With --full there are no broadcasts, a checkpoint holds all weights, and in adapter's place stands
model/, a Hugging Face checkpoint.

A directory belongs to one run, and to one process at a time, the one that holds its .lock. What is
written at an end or at a checkpoint appears whole or not at all; a resumed run cuts metrics and
samples back to its checkpoint and repeats what came after.

Left out on purpose: experiment trackers; every file here is text, safetensors or a picture.
"""

import dataclasses
import fcntl
import io
import json
import math
import os
import platform
import random
import resource
import shutil
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from broadcast import load_adapter, naming, save_adapter
from checkpoint import read_json
from config import RESUMABLE, to_toml, vllm_rank
from full import load_weights, save_model, save_weights
from lora import LoRAConfig, lora_parameters

# --- the directory --------------------------------------------------------------------------------


@dataclass
class Run:
    """A run's directory and its progress; all but what is an attempt's is saved in a checkpoint."""

    directory: Path
    run_id: str  # names its adapters, so that two runs can share a server
    attempt: int = 1  # grows with each resume, so that no name of an adapter is used twice
    step: int = 0  # optimizer steps done, which is also the version of the adapter
    episodes: int = 0  # trained on in these steps
    seconds: float = 0.0
    eval_before: dict = field(default_factory=dict)
    eval_after: dict = field(default_factory=dict)
    base_parameters: int = 0
    adapter_parameters: int = 0
    episodes_started: int = 0  # in all attempts
    lock: int = -1  # the descriptor by which this process holds the directory

    @property
    def episodes_dropped(self) -> int:
        """Episodes that an end or a kill cut short, or that no step was kept of."""
        return max(self.episodes_started - self.episodes, 0)

    def start_episodes(self, number: int) -> None:
        """Counts them before they start, so that a kill cannot hide what was lost with it."""
        self.episodes_started += number
        self.write_facts()

    def write_facts(self) -> None:
        facts = {key: getattr(self, key) for key in ("run_id", "attempt", "episodes_started")}
        # By which a copy is known, and a machine that sums otherwise.
        facts |= {"directory": str(self.directory.resolve()), "host": platform.node()}
        facts["threads"] = torch.get_num_threads()
        write_json(self.directory / "run.json", facts)

    def release(self) -> None:
        """Lets another process have the directory."""
        if self.lock >= 0:
            os.close(self.lock)
        self.lock = -1

    def eta(self, steps: int) -> float:
        """Seconds to step `steps`, at the pace so far."""
        return (steps - self.step) * self.seconds / self.step


def open_run(config, name: str) -> Run:
    """Makes config.output (or a fresh runs/<name>), or finds the run to resume.

    Raises ValueError for what is no directory or has something in it, for nothing to resume, for a
    run that is still alive, and for a resumed configuration that differs in more than a resumed run
    may be told anew.
    """
    directory = Path(config.output or f"runs/{name}")
    saved = directory / "config.toml"
    if config.resume:
        if not saved.is_file():
            raise ValueError(f"{directory}: no run to resume (no config.toml); name it by --output")
        before, now = tomllib.loads(saved.read_text()), tomllib.loads(to_toml(config))
        changed = [key for key in now if key not in RESUMABLE and now[key] != before.get(key)]
        if changed:
            was = ", ".join(f"{key} = {before.get(key)!r}" for key in changed)
            free = ", ".join(f"--{key.replace('_', '-')}" for key in RESUMABLE if key in now)
            raise ValueError(
                f"{directory}: on --resume {free} may differ; the run has {was} (without flags, "
                f"--output {directory} --resume goes on with all that it has)"
            )
        done = max(map(step_of, (directory / "checkpoints").glob("step_*")), default=0)
        if config.steps < done:
            raise ValueError(f"{directory}: has {done} steps already; --steps must be no fewer")
        lock = hold(directory)
        facts = json.loads((directory / "run.json").read_text())
        if (threads := torch.get_num_threads()) != facts["threads"]:
            print(f"{threads} threads, not {facts['threads']}: bits may differ, sums round anew")
        # One that was moved is the same run still; of a copy the original is there too, or, on
        # another machine, may be.
        recorded, elsewhere = Path(facts["directory"]), facts["host"] != platform.node()
        copied = recorded != directory.resolve() and (elsewhere or recorded.exists())
        run_id, started = new_id() if copied else facts["run_id"], facts["episodes_started"]
        run = Run(directory, run_id, facts["attempt"] + 1, episodes_started=started)
        remove_leftovers(directory)
    else:
        number = 1
        while not config.output and directory.exists():
            number += 1
            directory = Path(f"runs/{name}-{number}")
        if directory.exists() and not directory.is_dir():
            raise ValueError(f"{directory}: no directory; name another --output")
        if directory.exists() and not is_fresh(directory):
            raise ValueError(f"{directory}: not empty; add --resume or name another --output")
        directory.mkdir(parents=True, exist_ok=True)
        lock = hold(directory)
        run = Run(directory, new_id())
    run.lock = lock
    run.write_facts()
    write_whole(run.directory / "config.toml", to_toml(config))  # last: it says that there is a run
    return run


def new_id() -> str:
    return f"{random.SystemRandom().getrandbits(32):08x}"


def remove_leftovers(directory: Path) -> None:
    """Removes what a killed process of the run had half written, but for its broadcasts."""
    for leftover in (*directory.glob(".*.tmp*"), *directory.glob("checkpoints/.*.tmp*")):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()


def is_fresh(directory: Path) -> bool:
    """Whether no run has begun in it; one that was killed while it opened it leaves these files."""
    begun = {".lock", "run.json", ".run.json.tmp", ".config.toml.tmp"}
    return {path.name for path in directory.iterdir()} <= begun


def hold(directory: Path) -> int:
    """Takes a run's directory for this process: the descriptor that holds it.

    Raises ValueError, with the number of the process, if another has it. The kernel ends a lock at
    any death of its process, so a killed run leaves none behind.
    """
    descriptor = os.open(directory / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        process = os.read(descriptor, 20).decode()
        os.close(descriptor)
        raise ValueError(f"{directory}: in use by process {process}, a run that is alive") from None
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


def write_whole(file: Path, text: str) -> None:
    """Beside, then renamed: after a kill there is the old file or the new one."""
    beside = file.with_name(f".{file.name}.tmp")
    with naming(file):
        beside.write_text(text)
        beside.replace(file)


def write_json(file: Path, content: dict) -> None:
    write_whole(file, json.dumps(content, indent=2) + "\n")


def append_row(file: Path, row: dict) -> None:
    with naming(file), file.open("a") as stream:
        stream.write(json.dumps(row, ensure_ascii=False) + "\n")


def cut_back(file: Path, step: int) -> None:
    """Keeps the rows of a JSONL file up to `step`, dropping what a kill left half-written; itself
    killed, it leaves the file as it was."""
    # Bytes, which end a line at \n; text ends one at U+2028 too, which JSON may hold as it is.
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    try:
        kept = [line for line in lines if line.endswith(b"\n") and json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: damaged, remove its bad lines ({error})") from error
    beside = file.with_name(f".{file.name}.tmp")
    beside.write_bytes(b"".join(kept))
    beside.replace(file)


# --- checkpoints ----------------------------------------------------------------------------------

# Of a Run, in no checkpoint.
OF_AN_ATTEMPT = ("directory", "run_id", "attempt", "episodes_started", "lock")


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def save_checkpoint(run: Run, model, lora: LoRAConfig | None, optimizer, keep: int = 2) -> None:
    """checkpoints/step_000010, whole or not at all; the last `keep` stay. lora None: no adapter,
    every weight."""
    final = run.directory / "checkpoints" / f"step_{run.step:06d}"
    if final.exists():
        return  # a step has one outcome
    beside = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    progress = {key: value for key, value in vars(run).items() if key not in OF_AN_ATTEMPT}
    state = {"optimizer": optimizer.state_dict(), "run": progress, **random_state(model)}
    torch.save(state, data := io.BytesIO())
    try:
        with naming(final):
            beside.mkdir(parents=True)
            if lora:
                save_adapter(model, lora, beside / "adapter")
            else:
                save_weights(model, beside / "model")
            with (beside / "state.pt").open("wb") as file:
                file.write(data.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            beside.rename(final)
    finally:
        shutil.rmtree(beside, ignore_errors=True)  # gone already if all went well
    for old in sorted(final.parent.glob("step_*"))[:-keep]:
        shutil.rmtree(old)


def random_state(model) -> dict:
    """Of the generators that dropout draws from: the CPU's, and the GPU's of a model on one."""
    device, state = next(model.parameters()).device, {"torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(model, state: dict) -> None:
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], next(model.parameters()).device)


def load_checkpoint(run: Run, model, optimizer) -> Run:
    """The run as its last checkpoint left it; one without a checkpoint starts anew."""
    checkpoints = sorted((run.directory / "checkpoints").glob("step_*"))
    if not checkpoints:
        return run
    try:
        if lora_parameters(model):
            load_adapter(model, checkpoints[-1] / "adapter")
        else:
            load_weights(model, checkpoints[-1] / "model")
        state = torch.load(checkpoints[-1] / "state.pt", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
    except Exception as error:  # torch.load raises whatever its bytes bring about
        where = f"{checkpoints[-1]}: unreadable; remove it to go on from the one before"
        raise ValueError(f"{where} ({error})") from error
    set_random_state(model, state)
    # eval_after was the result of fewer steps, if this run is made longer; else see last_result.
    return dataclasses.replace(run, **state["run"] | {"eval_after": {}})


def last_result(run: Run) -> dict:
    """The eval_after that summary.json has of this very step, or {}: a finished run that is resumed
    and interrupted before it has evaluated once more still has its result."""
    file = run.directory / "summary.json"
    summary = read_json(file) if file.is_file() else {}
    if summary.get("steps") != run.step:
        return {}
    places = {"reward": "eval_after", "loss": "loss_after"}
    places |= {key: f"{key}_after" for key in ("interval", "outcomes")}
    return {key: summary[name] for key, name in places.items() if summary.get(name) is not None}


# --- what came out --------------------------------------------------------------------------------

PANELS = {
    "reward": "reward",
    "reference_kl": "KL to the reference",
    "entropy": "entropy",
    "mismatch_max": "largest |trainer - sampler| logprob",
}
# Not `vllm serve`, which the CPU build of 0.32 lacks: it asks for a distribution called vllm.
VLLM = "python -m vllm.entrypoints.openai.api_server"
RESULTS = {"loss": "validation loss", "reward": "held out"}  # what eval_before and eval_after hold


def peft_misses(model) -> list[str]:
    """Adapted tensors that PEFT 0.21 leaves out without a word, so that it computes another policy:
    those of dense MLPs in a mixture of experts. It takes their names for the experts' own, in
    whatever form target_modules lists them."""
    if model.config.model_type != "qwen3_moe":
        return []
    return [n for n in lora_parameters(model) if ".mlp." in n and ".experts." not in n]


def run_name(config, job: str) -> str:
    kind = "full" if config.full else f"rank{config.rank}"
    rehearsal = "rehearsal-" if getattr(config, "rehearse", False) else ""
    return f"{rehearsal}{job}-{kind}-seed{config.seed}"


def step_line(row: dict, run: Run, config) -> str:
    """A step in one line, the same on a terminal and in a file."""
    held_out = "" if row["eval_reward"] is None else f"held out {row['eval_reward']:.3f}  "
    return (
        f"step {row['step']:3}/{config.steps}  reward {row['reward']:.3f}  {held_out}"
        f"turns {row['turns']:.1f}  kl {row['reference_kl']:.4f}  "
        f"mismatch {row['mismatch_max']:.0e}  entropy {row['entropy']:.3f}  "
        f"sample {row['sample_tokens_per_second']:,.0f} tok/s  "
        f"train {row['train_tokens_per_second']:,.0f} tok/s  {row['seconds']:.1f} s  "
        f"ETA {run.eta(config.steps):.0f} s"
    )


def shows_group(step: int) -> bool:
    """Whether samples.jsonl gets a whole group of the step: by its number alone, so that a run
    resumed or made longer writes the same file."""
    return step == 1 or step % 4 == 0


def sample_row(run: Run, episode, advantage: float, outcome: str) -> dict:
    """One trajectory for samples.jsonl: as text for people, as tokens for tools.

    log_ratios: trainer minus sampler logprob of each token; empty if it was not trained on.
    """
    pairs = zip(episode.trainer_logprobs, episode.logprobs, strict=bool(episode.trainer_logprobs))
    return {
        "step": run.step,
        "version": episode.version,
        "question": episode.task.question,
        "answer": episode.task.answer,
        "reward": episode.reward,
        "advantage": advantage,
        "outcome": outcome,
        "finish_reason": episode.finish_reason,
        "messages": episode.messages,
        "token_ids": episode.token_ids,
        "loss_mask": episode.loss_mask,
        "logprobs": [round(logprob, 4) for logprob in episode.logprobs],
        "log_ratios": [round(trainer - sampler, 6) for trainer, sampler in pairs],
    }


Z = 1.959964  # two-sided 95% quantile of the normal distribution


def student(freedom: int) -> float:
    """That of Student's t, for 1 or more degrees of freedom: from 3 on within 1%, by an expansion
    in their inverse (Abramowitz and Stegun 26.7.5)."""
    if freedom < 3:
        return (12.706, 4.303)[freedom - 1]
    terms = (
        (Z**3 + Z) / 4,
        (5 * Z**5 + 16 * Z**3 + 3 * Z) / 96,
        (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / 384,
    )
    return Z + sum(term / freedom**power for power, term in enumerate(terms, start=1))


def wilson(rewards: list[list[float]]) -> list[float]:
    """95% interval [low, high] of the mean of rewards in [0, 1], samples of each question a list.

    Wilson's (1927), which stays within [0, 1] and is not empty where all rewards are equal. Samples
    of one question are no independent draws, so the number of draws n is what the spread between
    the means of questions says, n = p (1 - p) / Var(p): at least the questions, at most the
    samples. Few questions hardly know that spread: n shrinks by (Z / t)^2, t Student's quantile
    (Korn and Graubard 1998).
    """
    means = [sum(of_one) / len(of_one) for of_one in rewards]
    questions, samples = len(means), sum(map(len, rewards))
    p, n = sum(means) / questions, questions
    if questions > 1 and 0 < p < 1:
        variance = sum((mean - p) ** 2 for mean in means) / (questions - 1) / questions
        n = samples  # also where every question has the same mean
        if variance * samples > p * (1 - p):
            n = p * (1 - p) / variance
        n = max(questions, n * (Z / student(questions - 1)) ** 2)
    middle, share = p + Z**2 / (2 * n), 1 + Z**2 / n
    half = Z * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return [max(0.0, (middle - half) / share), min(1.0, (middle + half) / share)]


def finish_evaluation(run: Run, result: dict, config, samples: int, seconds: float) -> None:
    """summary.json and the last line of a run that trains nothing."""
    low, high = result["interval"]
    summary = {
        "reward": result["reward"],
        "interval": result["interval"],
        "outcomes": result["outcomes"],
        "questions": samples // config.eval_samples,
        "eval_samples": config.eval_samples,
        "temperature": 0.0 if config.eval_samples == 1 else config.temperature,
        "model": config.model,
        "init_adapter": config.init_adapter,
        "seconds": seconds,
        "peak_memory_bytes": peak_memory(),
    }
    write_json(run.directory / "summary.json", summary)
    print(
        f"\nmean reward {result['reward']:.3f} (95% {low:.3f} to {high:.3f}): "
        f"{summary['questions']} held-out questions, {config.eval_samples} "
        f"{'greedy answer' if config.eval_samples == 1 else 'samples'} each; pass@1, where rewards "
        f"are 0 or 1\n{result['outcomes']} in {seconds:.0f} s; see {run.directory}"
    )


def peak_memory() -> int:
    """Bytes of this process's largest resident set so far."""
    status = Path("/proc/self/status")
    if status.is_file():  # Linux, where getrusage's begins with that of the starting process
        lines = status.read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in KiB, on macOS in bytes
    return peak * (1 if sys.platform == "darwin" else 1024)


def finish(
    run: Run,
    model,
    lora: LoRAConfig | None,
    optimizer,
    config,
    seconds: float,
    panels: dict[str, str],
) -> None:
    """Checkpoint, adapter or model, summary, picture, and the commands that load what was made."""
    save_checkpoint(run, model, lora, optimizer)
    trained = run.directory / ("adapter" if lora else "model")
    beside = run.directory / f".{trained.name}.tmp"
    shutil.rmtree(beside, ignore_errors=True)
    if lora:
        save_adapter(model, lora, beside, config.model)
    else:
        with naming(trained):
            save_model(model, beside, config.model)
    shutil.rmtree(trained, ignore_errors=True)
    beside.rename(trained)
    trained_bytes = (trained / f"{'adapter_' if lora else ''}model.safetensors").stat().st_size
    before, after = run.eval_before, run.eval_after
    results = {"before": before, "after": after}
    summary = {
        "eval_before": before.get("reward"),
        "eval_after": after.get("reward"),
        "interval_before": before.get("interval"),
        "interval_after": after.get("interval"),
        "outcomes_before": before.get("outcomes"),
        "outcomes_after": after.get("outcomes"),
        **{f"loss_{when}": result["loss"] for when, result in results.items() if "loss" in result},
        "seconds": seconds,
        "steps": run.step,
        "adapter_parameters": run.adapter_parameters,
        "base_parameters": run.base_parameters,
        "adapter_bytes": trained_bytes if lora else 0,
        "peak_memory_bytes": peak_memory(),
    }
    if run.episodes_started:
        summary["episodes_dropped"] = run.episodes_dropped
    if not lora:
        summary["model_bytes"] = trained_bytes
    write_json(run.directory / "summary.json", summary)
    plot(run, run.directory.name, panels)
    to_view = f"its episodes    python tools/viewer.py {run.directory}"
    if not after:
        dropped = f", {run.episodes_dropped} episodes dropped" if run.episodes_dropped else ""
        print(f"\nstopped after step {run.step}{dropped}; go on: --output {run.directory} --resume")
        if (run.directory / "samples.jsonl").is_file() and not getattr(config, "rehearse", False):
            print(f"  {to_view}", flush=True)
        return
    changes = ", ".join(
        f"{words} {before[key]:.3f} -> {after[key]:.3f}"
        for key, words in RESULTS.items()
        if key in before
    )
    to_read, rehearsed = ", samples.jsonl", getattr(config, "rehearse", False)
    if "reward" in panels and not rehearsed:
        to_read = f", and\n  {to_view}"
    print(
        f"\n{changes} in {seconds:.0f} s"
        f"{f' (attempt {run.attempt} alone)' if run.attempt > 1 else ''}, "
        f"{summary['peak_memory_bytes'] / 1e9:.2f} GB; "
        f"see {run.directory}/{picture(panels)}{to_read}"
    )
    if rehearsed:
        return  # its base may go with it, and nobody deploys what two steps made
    if lora:
        max_rank = vllm_rank(lora.rank)
        nf4 = config.quantize == "nf4"  # the adapter belongs to the base that it was trained on
        four_bits = (
            ", quantization_config=BitsAndBytesConfig(load_in_4bit=True, "
            'bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)'
        )
        peft = (
            "PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained("
            f'"{config.model}"{four_bits if nf4 else ""}), "{trained}")'
        )
        if peft_misses(model):
            peft = "(leaves out the dense layers of a mixture: another policy; merge_lora instead)"
        print(
            f"  ask it          python tools/viewer.py --chat {trained}\n"
            f"the adapter is a PEFT directory of {trained_bytes / 1e6:.2f} MB:\n"
            f"  PEFT   {peft}\n"
            f"  vLLM   {'(unquantised: another policy, see quant.py) ' if nf4 else ''}"
            f"{VLLM} --model {config.model} --enable-lora --max-lora-rank {max_rank} "
            f"--lora-modules agent={trained.resolve()}",
            flush=True,
        )
    else:
        print(
            f"the model is a Hugging Face checkpoint of {trained_bytes / 1e6:.2f} MB:\n"
            f'  transformers   AutoModelForCausalLM.from_pretrained("{trained}")\n'
            f"  vLLM           {VLLM} --model {trained}",
            flush=True,
        )


def picture(panels: dict[str, str]) -> str:
    return f"{next(iter(panels))}.png"


def plot(run: Run, title: str, panels: dict[str, str]) -> None:
    """Named after the first of up to four panels (key -> title), which also shows the results
    before and after: metrics over the steps, where a step has them."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    figure, axes = pyplot.subplots(2, 2, figsize=(9, 6), sharex=True, layout="constrained")
    for axis, (key, name) in zip(axes.flat, panels.items(), strict=False):
        shown = [row for row in rows if row[key] is not None]
        axis.plot([row["step"] for row in shown], [row[key] for row in shown], marker=".")
        axis.set_title(name)
        if key == "mismatch_max" and any(row[key] > 0 for row in rows):
            axis.set_yscale("log")
        axis.grid(alpha=0.3)
    key = next(iter(panels))
    for place, result, side in ((0, run.eval_before, "left"), (run.step, run.eval_after, "right")):
        if result:
            axes[0, 0].plot(place, result[key], "o", color="tab:red")
            label = f"{RESULTS[key]} {result[key]:.3f}"
            axes[0, 0].annotate(
                label, (place, result[key]), (0, -14), textcoords="offset points", ha=side
            )
    axes[0, 0].set_ylim(0, 1.1 if key == "reward" else None)
    for axis in axes[1]:
        axis.set_xlabel("step")
    figure.suptitle(title)
    figure.savefig(run.directory / picture(panels), dpi=120)
    pyplot.close(figure)
