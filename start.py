"""What a run begins with: data, policy and optimizer, its directory; all that can be wrong.

    load_environments, check_prompts ──► load_replica, on every rank ──► start_run, on the first one
    questions that fit the context       base, adapter, optimizer        directory, last checkpoint

Nothing is written before start_run, and what it writes first is a directory that nobody else has.
"""

import copy
from pathlib import Path
from typing import Any

import torch

from broadcast import load_adapter, read_adapter, save_adapter
from chat import Tokenizer
from config import ASSETS, Config, RunConfig, threads_of
from distributed import Replica, shard_base, traffic, world_size
from environments import load_environment
from environments.judge import Judge
from environments.wiki_search import SCORES
from lora import LoRAConfig, add_adapter, inject_lora, lora_parameters, target_of, trainable
from model import Qwen3, Qwen3Config
from quant import quantize_base
from run import Run, cut_back, last_result, load_checkpoint, open_run, peft_misses, run_name
from update import REFERENCE

SHIPPED_DATA = {
    "wiki_search": {
        "questions": ASSETS / "tiny-wiki" / "questions.jsonl",
        "eval_questions": ASSETS / "tiny-wiki" / "eval_questions.jsonl",
        "corpus": ASSETS / "tiny-wiki" / "corpus.jsonl",
        "eval_corpus": ASSETS / "tiny-wiki" / "eval_corpus.jsonl",
    },
    "math_qa": {"questions": ASSETS / "math_qa.jsonl"},
}


def load_environments(config: RunConfig) -> tuple[Any, Any]:
    """Where to train and where to evaluate; the same, unless held-out questions have a corpus."""
    files = dict(SHIPPED_DATA[config.environment])
    for name in ("questions", "eval_questions", "corpus", "eval_corpus"):
        if getattr(config, name):
            files[name] = getattr(config, name)
            if name != "eval_corpus":  # what is held out of other data is not in the shipped files
                files.pop("eval_corpus", None)
            if name == "questions":
                files.pop("eval_questions", None)
    eval_corpus = files.pop("eval_corpus", None)
    if config.environment == "wiki_search":
        files["results"] = config.search_results
        files["score"] = SCORES[config.score]
        if config.judge_url:
            files["judge"] = Judge(config.judge_url, config.judge_model)
    environment = load_environment(config.environment, **files)
    if not environment.eval:
        raise ValueError(f"{config.questions}: too few to hold any out; name --eval-questions")
    if not eval_corpus:
        return environment, environment
    return environment, load_environment(config.environment, **files | {"corpus": eval_corpus})


def check_model(config: RunConfig) -> None:
    """ValueError for a model that is not computed here, or not so, from its config.json alone:
    before its tokenizer is read, and before weights are downloaded."""
    shapes = Qwen3Config.from_pretrained(config.model)
    widest = max(shapes.intermediate_size, shapes.num_attention_heads * shapes.head_dim)
    if not config.full and config.rank > (most := min(shapes.hidden_size, widest)):
        raise ValueError(
            f"--rank {config.rank} is more than any matrix of {config.model} can use: an update of "
            f"rank {most} reaches all that there is"
        )
    if config.quantize != "none" and any(map(shapes.has_experts, range(shapes.num_hidden_layers))):
        raise ValueError(
            f"--quantize {config.quantize} packs linear layers, and {config.model} is a mixture of "
            "experts, whose stacked matrices would stay as they are; leave it out"
        )


def check_prompts(tokenizer: Tokenizer, environment, tasks: list, max_length: int) -> None:
    """ValueError for a question whose prompt alone fills an episode."""
    for task in tasks:
        length = len(tokenizer.prompt_ids(environment, task))
        if length >= max_length:
            raise ValueError(
                f"question {task.id}: its prompt of {length} tokens does not fit an episode of "
                f"{max_length}; raise --max-length"
            )


def load_replica(config: Config) -> Replica:
    """load_policy's, started from --init-adapter, with the frozen reference of full fine-tuning."""
    if threads := threads_of(config)[0]:
        torch.set_num_threads(threads)
    replica = load_policy(config)
    model, started_from = replica.model, Path(config.output) / "reference"
    if config.init_adapter:
        resumed = config.resume and started_from.is_dir()  # a resumed run has its own copy
        directory = started_from if resumed else Path(config.init_adapter)
        load_init_adapter(model, replica.lora, directory)
    frozen = copy.deepcopy(model).requires_grad_(False) if config.full else None
    return replica._replace(frozen=frozen)


def load_policy(config: RunConfig) -> Replica:
    """The frozen base with a fresh adapter in it (--full: neither), and the optimizer of what is
    trained."""
    device = "cpu" if config.shard_base else config.device  # whole on the host at first
    model = Qwen3.from_pretrained(config.model, getattr(torch, config.dtype), device)
    base_parameters = sum(parameter.numel() for parameter in model.parameters())
    model.model.gradient_checkpointing = config.gradient_checkpointing
    if config.shard_base:
        shard_base(model, config.device)
    if config.quantize == "nf4":
        quantize_base(model)
    torch.manual_seed(config.seed)
    lora = None
    if not config.full:
        lora = LoRAConfig(config.rank, config.alpha, config.dropout, tuple(config.target_modules))
        inject_lora(model, lora)
    # After the injection, from the adapter's parameters: an optimizer made earlier holds others.
    parameters = trainable(model)
    optimizer = torch.optim.Adam(parameters.values(), lr=config.lr, betas=(0.9, 0.95))
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if trained != {id(p) for p in model.parameters() if p.requires_grad}:
        raise RuntimeError("the optimizer's parameters are not those that require gradients")
    return Replica(model, lora, optimizer, base_parameters)


def load_init_adapter(model, lora: LoRAConfig, directory: Path) -> None:
    """Loads an adapter into the trainable one, and a frozen copy of it beside: the reference.

    Raises ValueError, in the command line's words, unless rank, alpha and targets are the run's.
    """
    found, tensors = read_adapter(directory)
    targets = {target_of(name.rpartition(".lora_")[0]) for name in lora_parameters(model)}
    for flag, ours, its in (
        ("--rank", lora.rank, found.rank),
        ("--alpha", lora.alpha, found.alpha),
        ("--target-modules", " ".join(sorted(targets)), " ".join(sorted(found.target_modules))),
    ):
        if ours != its:
            raise ValueError(f"{directory}: an adapter with {flag} {its}, not {ours}; set {flag}")
    load_adapter(model, directory)
    add_adapter(model, REFERENCE, found, tensors)


def start_run(config: RunConfig, job: str, replica: Replica, heading: str) -> Run:
    """The run's directory and what its last checkpoint holds; prints the heading and the sizes.

    job: what the directory is named after, if the configuration names none.
    """
    run = open_run(config, run_name(config, job))
    try:
        return fill_run(config, run, replica, heading)
    except BaseException:
        run.release()
        raise


def fill_run(config: RunConfig, run: Run, replica: Replica, heading: str) -> Run:
    """The rest of start_run, with the directory in hand."""
    model, lora, optimizer, base_parameters, _ = replica
    reference = run.directory / "reference"
    if config.init_adapter and not reference.is_dir():
        save_adapter(model, lora, reference, config.model)  # nothing is lost if the original goes
    run = load_checkpoint(run, model, optimizer)
    if config.resume and run.step == config.steps:
        run.eval_after = last_result(run)
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_back(run.directory / name, run.step)
    adapter = lora_parameters(model)
    run.base_parameters = base_parameters
    run.adapter_parameters = sum(p.numel() for p in adapter.values())
    trained = "all trained"
    if not config.full:
        trained = (
            f"frozen{', projections in 4 bits' if config.quantize == 'nf4' else ''}; "
            f"{run.adapter_parameters:,} ({run.adapter_parameters / base_parameters:.1%}) in "
            f"{len(adapter) // 2} adapters of rank {config.rank}"
        )
    notice = ""
    if peft_misses(model):
        notice = (
            "\nPEFT will not load this adapter right: it leaves out the dense MLPs of a mixture; "
            "--target-modules experts q_proj k_proj v_proj o_proj adapts none of them"
        )
    sent = ""
    if world_size() > 1:
        trained_parameters = sum(p.numel() for p in trainable(model).values())
        sent = f"\n{traffic(trained_parameters, base_parameters, config.shard_base)}"
    print(
        f"{heading}\n"
        f"{config.model}: {base_parameters:,} parameters, {trained}\n"
        f"{run.directory}{f', resumed after step {run.step}' if run.step else ''}"
        f"{f'; {run.episodes_dropped} episodes were dropped' if run.episodes_dropped else ''}"
        f"{sent}{notice}",
        flush=True,
    )
    return run
