"""What a run can be told: a dataclass, filled by defaults, then a TOML file, then flags.

    python train.py --config my.toml --steps 50      every field is a key there and a flag here

prime-rl's tables [trainer.model] (for SFT [model]), with the model's name, and [trainer.model.lora]
([model.lora]) are read as they stand. A resumed run starts from the configuration that it wrote. An
unknown key or a value that fits no run is an error before any work starts.
"""

import argparse
import dataclasses
import json
import math
import os
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import torch
import tyro

from environments import ENVIRONMENTS
from grpo import LOSSES
from lora import TARGETS

ASSETS = Path(__file__).resolve().parent / "assets"
VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # what --max-lora-rank accepts (vllm#2847)
# What a resumed run may be told anew.
RESUMABLE = (
    "steps",
    "vllm_url",
    "vllm_timeout",
    "judge_url",
    "shard_base",
    "gradient_checkpointing",
    "threads",
    "sampler_threads",
)
# Of no run's file:
PLAN = ("plan", "plan_device", "plan_length")
COMMANDS = ("eval_only", *PLAN, "profile", "rehearse", "output", "resume")
LORA_TABLE = ("rank", "alpha", "dropout", "target_modules")  # what prime-rl's may hold


def vllm_rank(rank: int) -> int:
    """The smallest --max-lora-rank that takes adapters of a rank (none does beyond 512)."""
    return next((size for size in VLLM_RANKS if size >= rank), rank)


@dataclass(frozen=True)
class RunConfig:
    """What both runs can be told, reinforcement learning (Config) and supervised (sft.py)."""

    rank: int = 8
    """Rank of the adapter on every target."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapter's input; leave it at 0 in reinforcement learning, where it makes
    trainer and sampler differ."""
    target_modules: tuple[str, ...] = TARGETS
    """Names of the adapted projections."""
    full: bool = False
    """Train every weight instead of an adapter, for comparison. It wants a smaller learning rate
    than an adapter (experiments/learning_rate.md)."""

    model: str = str(ASSETS / "tiny-qwen3")
    """Qwen3 checkpoint: a directory or a Hub id."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the frozen base; the adapter and the optimizer are always fp32."""
    quantize: Literal["none", "nf4"] = "none"
    """nf4 keeps the frozen base's projections in 4 bits (QLoRA): less memory, more time."""
    device: str = "cpu"
    """Where to compute, e.g. cpu or cuda."""
    shard_base: bool = False
    """Each rank of torchrun holds a part of the frozen base only (FSDP2); for a base that does not
    fit one device. No rank samples from it then: train.py needs --engine vllm, sft.py answers no
    questions."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input for the backward pass and compute the layer again: less memory,
    about a third more time, the same gradients."""
    micro_tokens: int = 4096
    """Tokens of a forward and backward pass; a batch is split to fit, which changes no result."""

    steps: int = 24
    """Optimizer steps, one for each batch."""
    lr: float = 1.5e-3
    """Learning rate of Adam, constant after the warm-up."""
    warmup: int = 3
    """Steps of linear warm-up."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    max_length: int = 512
    """Tokens of an episode, prompt included."""

    environment: Literal[tuple(ENVIRONMENTS)] = "wiki_search"
    """The task, a file in environments/. Its own small data is used where none is named below."""
    eval_questions: str = ""
    """Held-out questions; without them the last quarter of --questions is held out."""
    corpus: str = ""
    """wiki_search: pages to search (id, title, content)."""
    search_results: int = 3
    """wiki_search: pages that one search shows."""
    eval_size: int = 264
    """Held-out questions answered before and after training."""
    max_turns: int = 10
    """Turns of an episode; one that still calls a tool then has reward 0."""
    max_new_tokens: int = 64
    """Tokens of a turn."""
    slots: int = 128
    """Episodes of a batch that the engine, or each server, samples at once."""

    seed: int = 0
    """A seed repeats its run exactly on the same machine."""
    eval_every: int = 0
    """Also evaluate every so many steps; 0 for never."""
    save_every: int = 10
    """Steps between checkpoints."""
    output: str = ""
    """Directory of the run; by default a new one under runs/."""
    resume: bool = False
    """Go on with the run in --output; only --steps, --shard-base, --gradient-checkpointing, threads
    and servers may differ."""


@dataclass(frozen=True)
class Config(RunConfig):
    """Trains a LoRA adapter by reinforcement learning and writes it as a PEFT directory."""

    init_adapter: str = ""
    """Adapter directory to start from (of sft.py or another run), whose frozen copy is then the
    reference; without one B is 0 and the base is the reference."""

    questions: str = ""
    """Training questions (question, answer): JSONL, parquet, or a Hub dataset."""
    eval_corpus: str = ""
    """wiki_search: pages that held-out questions are about, if they are others."""
    score: Literal["exact", "overlap"] = "exact"
    """wiki_search: reward by the rule for the final answer, see environments/wiki_search.py."""
    judge_url: str = ""
    """wiki_search: reward by a language model instead, behind this OpenAI-compatible URL; its key
    is read from JUDGE_API_KEY."""
    judge_model: str = ""
    """The judge's name at --judge-url."""

    groups: int = 16
    """Questions per step (P)."""
    group_size: int = 8
    """Episodes per question (G)."""
    temperature: float = 1.0
    """Sampling temperature, the same in the trainer's logprobs."""
    loss: Literal[tuple(LOSSES)] = "grpo"
    """Policy loss, see grpo.py."""
    advantage_scale: Literal["none", "std"] = "none"
    """std divides advantages by the group's standard deviation (GRPO); none does not (Dr. GRPO)."""
    kl: float = 0.0
    """Weight of the KL to the reference: the base with the adapter off (--full: a copy of it), or
    --init-adapter."""
    eval_samples: int = 1
    """Episodes of each held-out question: one is greedy, more are sampled at --temperature."""

    engine: Literal["torch", "vllm"] = "torch"
    """What samples: torch, embedded; vllm, a server that the run starts and ends."""
    vllm_url: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """vLLM server that is there already (repeatable); it must see --output's broadcasts."""
    vllm_timeout: float = 600.0
    """Seconds for an answer; a server that takes longer hangs."""
    max_staleness: int = 0
    """Steps that a batch's version may be behind the one it trains. 0: sample, then train; 1 or
    more: at the same time, the sampler in a process of its own (pipeline.py)."""
    threads: int = 0
    """Threads of the trainer's torch; 0 leaves it to torch and OMP_NUM_THREADS; where a server of
    the run's own samples meanwhile on the same CPU, each gets half of the cores."""
    sampler_threads: int = 0
    """The same of a server that the run starts."""

    eval_only: bool = False
    """Only answer the held-out questions, by the base or --init-adapter, and stop."""
    plan: bool = False
    """Only print what the run will need, from the shapes alone: memory, FLOPs, bytes, hours."""
    plan_device: Literal["h200", "a100", "l40s", "4090", "cpu2"] = "h200"
    """Device that --plan estimates for."""
    plan_length: int = 0
    """Tokens of a mean episode, as --plan assumes; 0 for half of --max-length."""
    profile: int = 0
    """Time the first so many steps; where it went is printed and kept as profile.md (timing.py)."""
    rehearse: bool = False
    """Only try the run out: the same code for two steps on the tiny checkpoint and its data."""


def parse_config(arguments: list[str], kind: type = Config):
    """Flags over the file of --config over the defaults of the dataclass `kind`; a resumed run
    starts from its own file.

    Raises ValueError for an unknown key, SystemExit for an unknown flag.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE.toml")
    file, arguments = parser.parse_known_args(arguments)
    # Each --vllm-url is appended to the default's: where there is one, the file's are replaced.
    flags = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    anew = {"vllm_url": ()} if "--vllm-url" in flags else {}
    defaults = kind(**read_toml(Path(file.config), kind) | anew) if file.config else kind()
    description = f"{kind.__doc__} --config FILE.toml sets any of these fields first."
    config = tyro.cli(kind, default=defaults, args=arguments, description=description)
    saved = Path(config.output) / "config.toml"
    if config.resume and not file.config and saved.is_file():
        config = tyro.cli(kind, default=kind(**read_toml(saved, kind) | anew), args=arguments)
    return config


def check_config(config: RunConfig, here: bool = True) -> None:
    """ValueError for what would fail or mislead later; of the fields that the dataclass has. here:
    also for what this machine lacks."""
    positive = """steps groups group_size batch_size max_turns max_new_tokens slots search_results
        eval_size eval_samples save_every micro_tokens lr temperature max_grad_norm
        vllm_timeout""".split()
    fields = vars(config).keys() & {
        *(*positive, "kl", "warmup", "eval_every", "seed", "profile"),
        *("max_staleness", "threads", "sampler_threads", "plan_length"),
    }
    for name in sorted(fields):
        value, wanted = getattr(config, name), "positive" if name in positive else "0 or more"
        if not (math.isfinite(value) and (value > 0 or value == 0 and name not in positive)):
            raise ValueError(f"--{name.replace('_', '-')} must be {wanted}, not {value}")
    if getattr(config, "temperature", 1.0) < 0.01:
        raise ValueError(
            f"--temperature must be at least 0.01, not {config.temperature}: vLLM samples no colder"
        )
    if getattr(config, "group_size", 2) == 1 and not (config.kl or config.eval_only):
        raise ValueError(
            "--group-size 1 has no other sample to compare with, so every advantage is 0 and "
            "nothing is learned; take at least 2"
        )
    if config.seed >= 2**63:
        raise ValueError(f"--seed must be below 2**63, not {config.seed}")
    if config.search_results >= 2**31:
        raise ValueError(f"--search-results must be below 2**31, not {config.search_results}")
    if config.full:
        check_full(config)
    if config.shard_base and config.quantize != "none":
        raise ValueError(
            "--shard-base gathers matrices of one dtype, and --quantize nf4 has packed bytes and "
            "fp32 scales; leave one of the two out"
        )
    if isinstance(config, Config):
        check_modes(config)
    if here and not config.plan:  # which is for another machine
        check_machine(config)


def check_machine(config: RunConfig) -> None:
    """ValueError for what this machine lacks."""
    if config.device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"--device {config.device}: this torch sees no such device; use cpu")
    if config.engine == "vllm" and not config.vllm_url and find_spec("vllm") is None:
        raise ValueError(
            "vLLM is not installed in this environment (the README says how), so --engine vllm "
            "needs servers that are there, each named by --vllm-url"
        )
    for name in ("threads", "sampler_threads"):  # so many that none can be started end the process
        if getattr(config, name, 0) > (cores := available_cores()):
            flag = f"--{name.replace('_', '-')} {getattr(config, name)}"
            raise ValueError(f"{flag}: this process may use {cores} cores")


def available_cores() -> int:
    """Of this process: a container or taskset may leave it fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of(config: Config) -> tuple[int, int]:
    """Of trainer and sampler, 0: torch's choice. Where both are at work on the same cores and
    nothing is said, half for each: threads that wait for one another make steps far slower."""
    said = config.threads, config.sampler_threads
    apart = config.vllm_url or config.device != "cpu"
    if any(said) or apart or not config.max_staleness or "OMP_NUM_THREADS" in os.environ:
        return said
    half = max(1, available_cores() // 2)
    return half, half


def check_full(config: RunConfig) -> None:
    """ValueError for what means nothing, or fails, where every weight is trained."""
    for name in ("rank", "alpha", "dropout", "target_modules"):
        if getattr(config, name) != getattr(type(config), name):
            raise ValueError(
                f"--{name.replace('_', '-')} shapes an adapter, and --full trains none: it trains "
                "every weight; leave one of the two out"
            )
    if config.dtype != "float32":
        raise ValueError(
            f"--full needs --dtype float32: in {config.dtype} an update below 1/256 of a weight is "
            "rounded away; an adapter trains in fp32 beside a base of either"
        )
    if config.quantize != "none":
        raise ValueError("--full trains every weight, and --quantize nf4 freezes them in 4 bits")
    if config.shard_base:
        raise ValueError("--full trains every weight, and --shard-base shares out frozen ones")


def check_modes(config: Config) -> None:
    """ValueError for what does not go together, with the reason."""
    if config.plan and config.plan_length > config.max_length:
        raise ValueError(
            f"--plan-length {config.plan_length}: no episode is longer than --max-length "
            f"{config.max_length}"
        )
    if config.full and config.init_adapter:
        raise ValueError("--full trains no adapter; merge --init-adapter into a --model first")
    if config.full and config.engine == "vllm":
        raise ValueError(
            "--full ships no adapter, and vLLM would sample from the untrained base; use --engine "
            "torch"
        )
    if config.engine == "vllm" and config.quantize != "none":
        raise ValueError(
            "--quantize nf4 trains on 4-bit weights, and vLLM would sample from others: two "
            "policies; use --engine torch"
        )
    if config.shard_base and config.engine == "torch":
        raise ValueError(
            "--shard-base leaves no rank the whole base that the embedded engine samples from; use "
            "--engine vllm"
        )
    if config.full and config.max_staleness:
        raise ValueError(
            "--full samples the weights that it trains, so no version older than they are is left "
            "for --max-staleness"
        )
    if config.max_staleness and config.quantize != "none":
        raise ValueError(
            "--quantize nf4 trains on 4-bit weights, and --max-staleness samples from others, in a "
            "server: two policies; leave one of the two out"
        )
    if config.sampler_threads and (
        config.vllm_url or (config.engine, config.max_staleness) == ("torch", 0)
    ):
        raise ValueError("--sampler-threads is for a server that the run starts; there is none")
    if config.vllm_url and config.engine != "vllm":
        raise ValueError("--vllm-url names servers for --engine vllm; add that")
    if config.engine == "vllm" and config.rank > VLLM_RANKS[-1]:
        raise ValueError(f"--rank {config.rank}: vLLM serves ranks up to {VLLM_RANKS[-1]}")
    if config.judge_url and config.environment != "wiki_search":
        raise ValueError(f"--judge-url: {config.environment} compares answers itself; leave it out")
    if bool(config.judge_url) != bool(config.judge_model):
        raise ValueError("--judge-url and --judge-model go together: where a judge is, and which")
    if (
        sum((config.eval_only, config.plan, config.rehearse)) > 1
        or config.resume
        and (config.eval_only or config.plan or config.rehearse)
    ):
        raise ValueError("--eval-only, --plan, --rehearse and --resume are four things to do")


def eval_draws(config: RunConfig) -> tuple[int, float]:
    """Samples of a held-out question and their temperature: one is greedy, several must differ."""
    return config.eval_samples, config.temperature if config.eval_samples > 1 else 0.0


# --- files ---------------------------------------------------------------------------------------


def read_toml(file: Path, kind: type) -> dict:
    """Fields of the dataclass `kind` from a TOML file; prime-rl's tables of the model and its LoRA
    are read as they stand.

    Raises ValueError for a file that cannot be read, an unknown key, a value of another type.
    """
    try:
        raw = tomllib.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{file}: {error.strerror}") from error
    except ValueError as error:  # of the TOML or of its encoding
        raise ValueError(f"{file}: not valid TOML ({error})") from error
    for first in ("trainer", "model"):  # prime-rl's, for RL and for SFT
        if isinstance(raw.get(first), dict):
            fields = model_table(file, raw.pop(first), first)
            if twice := sorted(set(fields) & set(raw)):
                raise ValueError(f"{file}: [{first}] sets {', '.join(twice)} a second time")
            raw |= fields
    known = [f.name for f in dataclasses.fields(kind)]
    hints = get_type_hints(kind)
    for key, value in raw.items():
        if key not in known:
            raise ValueError(f"{file}: unknown key {key!r}; known: {', '.join(known)}")
        default = getattr(kind, key)
        if isinstance(value, list):
            value = tuple(value)
        elif isinstance(default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            wanted = "a list" if isinstance(default, tuple) else type(default).__name__
            raise ValueError(f"{file}: {key} must be {wanted}, not {value!r}")
        if isinstance(value, tuple) and not all(isinstance(item, str) for item in value):
            raise ValueError(f"{file}: {key} must be a list of texts, not {list(value)}")
        if get_origin(hints[key]) is Literal and value not in get_args(hints[key]):
            wanted = ", ".join(get_args(hints[key]))
            raise ValueError(f"{file}: {key} must be one of {wanted}, not {value!r}")
        raw[key] = value
    return raw


def model_table(file: Path, table: dict, name: str) -> dict:
    """Fields that prime-rl's table `name` sets: of [trainer.model] or [model], the model's name and
    the LoRA table within."""
    if name == "trainer":
        if set(table) != {"model"} or not isinstance(table["model"], dict):
            raise ValueError(f"{file}: [trainer] may hold [trainer.model] alone")
        table, name = table["model"], "trainer.model"
    lora = table.get("lora", {})
    if not (set(table) <= {"name", "lora"} and isinstance(lora, dict)):
        raise ValueError(f"{file}: [{name}] may hold name and [{name}.lora] alone")
    if unknown := sorted(set(lora) - set(LORA_TABLE)):
        known = ", ".join(LORA_TABLE)
        raise ValueError(f"{file}: [{name}.lora] has no {unknown[0]!r}; known: {known}")
    return lora | ({"model": table["name"]} if "name" in table else {})


def to_toml(config: RunConfig) -> str:
    """The resolved configuration; strings and lists as JSON, which TOML reads alike."""
    return "".join(
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n"
        for key, value in dataclasses.asdict(config).items()
        if key not in COMMANDS
    )
