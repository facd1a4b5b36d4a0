"""A rehearsal: any run in miniature, by the same code, before a large machine is paid for.

    python train.py --config configs/wiki_search.toml --rehearse

                    as configured                       rehearsed
    model           Qwen/Qwen3-4B-Instruct-2507         assets/tiny-qwen3, 0.9M parameters
    data            Hub datasets                        assets/tiny-wiki (math_qa: its own)
    batch, lengths  32 x 16 episodes of 4,096 tokens    2 x 4 of 512, two steps
    engine          vLLM                                vLLM where it is installed, else embedded
    the rest        rank, targets, loss, KL, ...        as it stands

What is replaced is printed, a line a field; what the run itself would be refused for is refused. A
mixture of experts is rehearsed on one: the tiny checkpoint with each MLP copied into four experts
under a random router, which goes when the rehearsal ends. The copies are equal and their weights
sum to one, so it computes what the dense one does (sparse upcycling, arXiv 2212.05055), until an
adapter makes the experts differ.

Left out on purpose: the parts that only the real run has (its tokenizer and template, its memory,
bfloat16, CUDA); --plan tells of the memory.
"""

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import safetensors.torch
import torch

from checkpoint import read_checkpoint, read_json
from config import ASSETS, Config
from full import COMPANIONS
from tools.plan import model_shapes

TINY = ASSETS / "tiny-qwen3"
EXPERTS, CHOSEN = 4, 2
AT_MOST = {
    "steps": 2,
    "groups": 2,
    "group_size": 4,
    "max_new_tokens": 64,
    "max_length": 512,
    "eval_size": 8,
    "eval_samples": 2,
    "slots": 16,
    "search_results": 3,
    "micro_tokens": 4096,
    "warmup": 1,
}
LEAST_KL = 0.01  # so that groups of equal reward, of which there will be many, meet the loss too
# What names a machine, a server or a file of the real run.
REPLACED = {
    "questions": "",
    "eval_questions": "",
    "corpus": "",
    "eval_corpus": "",
    "init_adapter": "",
    "judge_url": "",
    "judge_model": "",
    "vllm_url": (),
    "shard_base": False,
    "device": "cpu",
    "dtype": "float32",
}


@contextmanager
def rehearsal(config: Config) -> Iterator[Config]:
    """The run in miniature; says what it replaced. Inside, its checkpoint exists."""
    small = {name: min(getattr(config, name), limit) for name, limit in AT_MOST.items()}
    small |= REPLACED | {"model": str(TINY)}
    small["kl"] = max(config.kl, LEAST_KL)
    if config.engine == "vllm" and find_spec("vllm") is None:
        small["engine"] = "torch"
    with tempfile.TemporaryDirectory() as directory:
        if has_experts(config.model):
            small["model"] = str(upcycle(TINY, Path(directory) / "tiny-mixture"))
        changed = dataclasses.replace(config, **small)
        for name, now in small.items():
            if now != (was := getattr(config, name)):
                print(f"rehearsal: {name} {show(now)} in the place of {show(was)}")
        yield changed


def show(value) -> str:
    return json.dumps(value, ensure_ascii=False) if value not in ("", ()) else "(none)"


def has_experts(model: str) -> bool:
    """Whether the run's model is a mixture, as far as its shapes are known without a download."""
    try:
        return bool(model_shapes(model).num_experts)
    except ValueError:
        return False


def upcycle(
    source: Path, directory: Path, experts: int = EXPERTS, chosen: int = CHOSEN, seed: int = 0
) -> Path:
    """Writes a mixture-of-experts checkpoint that computes what the dense one in `source` does, to
    `directory`, which must not exist; returns it.

    experts: copies of each MLP; chosen: how many of them a token visits; seed: of the routers.
    """
    if not 1 <= chosen <= experts:
        raise ValueError(f"a token visits 1 or more of the experts, not {chosen} of {experts}")
    if directory.exists():
        raise FileExistsError(f"{directory}: exists already; remove it, or name another directory")
    config = read_json(source / "config.json")
    if config.get("model_type") != "qwen3":
        raise ValueError(f"{source}: a dense qwen3 is expected, found {config.get('model_type')}")
    directory.mkdir(parents=True)
    tensors = {}
    for name, tensor in read_checkpoint(source).items():
        layer, inside, projection = name.partition(".mlp.")
        for e in range(experts) if inside else ():
            tensors[f"{layer}.mlp.experts.{e}.{projection}"] = tensor.clone()
        if not inside:
            tensors[name] = tensor
    generator, size = torch.Generator().manual_seed(seed), config["hidden_size"]
    for layer in range(config["num_hidden_layers"]):
        # Inputs are normalised, so that the router's logits are about normal, with variance 1.
        router = torch.randn(experts, size, generator=generator) / size**0.5
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = router.to(tensor.dtype)
    config |= {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": config["intermediate_size"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    safetensors.torch.save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    return directory
