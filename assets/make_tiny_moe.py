"""Makes a tiny Qwen3-MoE of the dense base, by sparse upcycling (arXiv 2212.05055): no training.

    python assets/make_tiny_moe.py        assets/tiny-qwen3 -> runs/tiny-qwen3-moe, in seconds
    python train.py --model runs/tiny-qwen3-moe --rank 8

Each MLP is copied into every expert of its layer, beside a random router. The weights of the chosen
experts sum to 1 (norm_topk_prob), so whatever the router chooses, the mixture computes what the
dense model does and has its skill. From there on the experts part ways: each has an adapter of its
own, which learns from the tokens that come to it.

It does not ship (10 MB for 0.9 MB of information). Left out: training of the router.
"""

import sys
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from tools.rehearse import CHOSEN, EXPERTS, upcycle  # noqa: E402


def main(
    output: Path = ROOT / "runs" / "tiny-qwen3-moe",
    base: Path = ROOT / "assets" / "tiny-qwen3",
    experts: int = EXPERTS,
    experts_per_token: int = CHOSEN,
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
