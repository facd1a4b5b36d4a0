"""Makes a tiny Qwen3-MoE of the dense base, by sparse upcycling (arXiv 2212.05055): no training.

    python assets/make_tiny_moe.py        assets/tiny-qwen3 -> runs/tiny-qwen3-moe, in seconds
    python train.py --model runs/tiny-qwen3-moe --rank 8

Each MLP is copied into every expert of its layer, beside a random router. The weights of the chosen
experts sum to 1 (norm_topk_prob), so whatever the router chooses, the mixture computes what the
dense model does and has its skill. From there on the experts part ways: each has an adapter of its
own, which learns from the tokens that come to it.

It does not ship (10 MB for 0.9 MB of information). Left out: training of the router.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
import tyro
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent


def upcycle(base: Path, output: Path, experts: int, experts_per_token: int, seed: int) -> Path:
    """Writes the mixture's checkpoint to `output`, which must not exist, and returns it.

    base: a dense Qwen3 checkpoint, one safetensors file.
    """
    raw = json.loads((base / "config.json").read_text())
    if raw["model_type"] != "qwen3":
        raise ValueError(f"{base}: a dense qwen3 is expected, found {raw['model_type']}")
    shutil.copytree(base, output, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, tensor in load_file(base / "model.safetensors").items():
        before, mlp, projection = name.partition(".mlp.")
        if not mlp:
            tensors[name] = tensor
            continue
        for e in range(experts):
            tensors[f"{before}.mlp.experts.{e}.{projection}"] = tensor.clone()
    for layer in range(raw["num_hidden_layers"]):
        # Inputs are normalised, so that the router's logits are about normal, with variance 1.
        router = torch.randn(experts, raw["hidden_size"], generator=generator)
        router = router / raw["hidden_size"] ** 0.5
        tensors[f"model.layers.{layer}.mlp.gate.weight"] = router.to(tensor.dtype)
    raw |= {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": raw["intermediate_size"],
        "num_experts": experts,
        "num_experts_per_tok": experts_per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    (output / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    return output


def main(
    output: Path = ROOT / "runs" / "tiny-qwen3-moe",
    base: Path = ROOT / "assets" / "tiny-qwen3",
    experts: int = 4,
    experts_per_token: int = 2,
    seed: int = 0,
) -> None:
    """Makes a mixture-of-experts checkpoint of a dense one.

    Args:
        output: directory to make.
        base: dense Qwen3 checkpoint, a directory with one model.safetensors.
        experts: copies of each MLP.
        experts_per_token: how many of them a token visits.
        seed: of the routers.
    """
    print(upcycle(base, output, experts, experts_per_token, seed))


if __name__ == "__main__":
    try:
        tyro.cli(main)
    except (ValueError, FileExistsError) as error:
        sys.exit(f"make_tiny_moe.py: {error}")
