"""A training step, this project and transformers + PEFT side by side on the same work.

    .venv-peers/bin/python benchmarks/training.py tiny         about four minutes on one core
    .venv-peers/bin/python benchmarks/training.py slice        about nine, and 8 GB of memory

The environment is made by benchmarks/environments.sh.

Forward, loss, backward, AdamW, with rank 8 on all seven projections, fp32, on one frozen base that
all ways share, of random weights:

    tiny    vocabulary 2,048, hidden 256, 4 layers, 4/2 heads of 64, MLP 768, tied: 3.7M parameters
    slice   4 layers in the shapes of Qwen3-0.6B, its vocabulary of 151,936, tied: 218M parameters

    rectangles   8 x 256 tokens, loss on the last 128 of each
    ragged       agent trajectories: a group of 16 on one prompt of 300 tokens, completions of 50 to
                 500, in turns of 15 sampled tokens and 35 of a tool: 30% of tokens carry loss

    ours         model.token_logprobs as train.py calls it (it also computes the entropy)
    peft         as TRL does: padded, logits at every position of the completions, of which a
                 logprob is gather minus logsumexp, row by row
    peft, lean   the same with a head by hand: logits only where a token carries loss (ragged)
    full         this project, every weight trained (rectangles)
    without ...  ours on the ragged group, one thing that makes it fast undone (--works savings)

The peer's ragged group is padded to the longest of a micro-batch of 16 (tiny) or 4 (slice, where
the logits of 16 would not fit). Ways alternate, after a first round that warms up (of the slice,
two short sequences on one prompt) and checks that loss and gradients agree; the slice's ragged
group is one sample, for the 250 seconds that it takes. Seconds are CPU time on one thread, wall
time on more. GEMM rate (2048^3) and copy bandwidth (256 MB, read + write) are of the same rounds.

    MFU = FLOPs of the matrix products that this way does / seconds / GEMM rate

where a product costs 2 mnk, attention counts its visible pairs (all pairs where it is masked), and
nothing that is computed a second time in a backward pass counts.
"""

import argparse
import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.memory import selected_logprobs  # noqa: E402
from head import HeadLogprobs  # noqa: E402
from lora import LoRAConfig, LoRALinear, inject_lora, lora_parameters  # noqa: E402
from model import Layer, Qwen3, Qwen3Config, RMSNorm  # noqa: E402
from packing import gather, pack  # noqa: E402

COMMON = {"max_position_embeddings": 40_960, "rope_theta": 1e6, "tie_word_embeddings": True}
SHAPES = {
    "tiny": {
        **COMMON,
        **{"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
        "num_hidden_layers": 4,
    },
    "slice": {
        **COMMON,
        **{"vocab_size": 151_936, "hidden_size": 1024, "intermediate_size": 3072},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
        "num_hidden_layers": 4,
    },
}
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RESULTS = Path(__file__).with_suffix(".json")
RANK, ALPHA = 8, 32.0
MICRO = {"tiny": 16, "slice": 4}  # rows of a micro-batch of the peer on ragged work
REPEATS = {  # else 1
    **{("tiny", "rectangles"): 15, ("tiny", "ragged"): 9, ("tiny", "savings"): 9},
    ("slice", "rectangles"): 3,
}


# --- the work -------------------------------------------------------------------------------------


@dataclass
class Work:
    """ids (S, T) padded on the right; mask (S, T-1) of what carries loss; weights: what stands for
    the advantages, (S, 1); lengths of the S streams; first: of their completions."""

    name: str
    ids: Tensor
    mask: Tensor
    weights: Tensor
    lengths: list[int]
    first: int

    def rows(self, part: slice) -> "Work":
        length = max(self.lengths[part])
        ids, mask = self.ids[part, :length], self.mask[part, : length - 1]
        return Work(self.name, ids, mask, self.weights[part], self.lengths[part], self.first)


def rectangles(vocabulary: int) -> Work:
    ids = torch.randint(vocabulary, (8, 256))
    mask = torch.zeros(8, 255, dtype=torch.bool)
    mask[:, -128:] = True
    return Work("rectangles", ids, mask, torch.randn(8, 1), [256] * 8, 128)


def ragged(
    vocabulary: int, prompt: int = 300, completions: Sequence[int] = range(50, 501, 30)
) -> Work:
    """Completions of these lengths in an order of chance, each ending with its turn."""
    count = len(completions)
    lengths = [prompt + completions[n] for n in torch.randperm(count).tolist()]
    ids = torch.zeros(count, max(lengths), dtype=torch.long)
    mask = torch.zeros(ids.shape, dtype=torch.bool)
    ids[:, :prompt] = torch.randint(vocabulary, (prompt,))
    for row, length in enumerate(lengths):
        ids[row, prompt:length] = torch.randint(vocabulary, (length - prompt,))
        mask[row, prompt:length] = torch.arange(length - prompt).flip(0) % 50 < 15
    return Work("ragged", ids, mask[:, 1:], torch.randn(count, 1), lengths, prompt)


# --- the ways -------------------------------------------------------------------------------------


def loss_of_ours(model: Qwen3, work: Work) -> Tensor:
    logprobs, _ = model.token_logprobs(work.ids, work.mask)
    return -(work.weights * logprobs).sum()


def loss_of_peft(model, work: Work) -> Tensor:
    """A caller's logits_to_keep: the completions, and the token before, whose logits predict."""
    mask = work.mask[:, work.first - 1 :]
    logits = model(
        input_ids=work.ids,
        attention_mask=attention_mask(work),
        logits_to_keep=mask.shape[1] + 1,
        use_cache=False,
    ).logits[:, :-1]
    logprobs = selected_logprobs(logits, work.ids[:, work.first :])
    return -(work.weights * logprobs * mask).sum()


def loss_of_lean_peft(model, work: Work) -> Tensor:
    base = model.get_base_model()
    hidden = base.model(
        input_ids=work.ids, attention_mask=attention_mask(work), use_cache=False
    ).last_hidden_state[:, :-1][work.mask]
    logprobs = selected_logprobs(base.lm_head(hidden), work.ids[:, 1:][work.mask])
    return -(work.weights.expand_as(work.mask)[work.mask] * logprobs).sum()


def attention_mask(work: Work) -> Tensor | None:
    """None where nothing is padded, so that the peer's attention is causal and skips half."""
    if min(work.lengths) == work.ids.shape[1]:
        return None
    return (torch.arange(work.ids.shape[1]) < torch.tensor(work.lengths)[:, None]).long()


@dataclass
class Way:
    """One way to take a step; rows: of a micro-batch."""

    name: str
    model: torch.nn.Module
    parameters: dict[str, Tensor]
    loss: Callable[[torch.nn.Module, Work], Tensor]
    rows: int

    def __post_init__(self):
        self.optimizer = torch.optim.AdamW(self.parameters.values(), lr=1e-6)

    def forward_and_backward(self, work: Work) -> float:
        """Gradients are left on the parameters; returns the loss."""
        total, counted = 0.0, int(work.mask.sum())
        for start in range(0, len(work.ids), self.rows):
            loss = self.loss(self.model, work.rows(slice(start, start + self.rows))) / counted
            loss.backward()
            total += loss.item()
        return total

    def step(self, work: Work) -> None:
        self.forward_and_backward(work)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def ways_on(shape: str, full: bool) -> list[Way]:
    """All share one base, but for that of full fine-tuning; adapters start equal, B not zero."""
    import peft
    import transformers

    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPES[shape]))
    with torch.device("meta"):
        model = Qwen3(Qwen3Config(**SHAPES[shape]))
    state = theirs.state_dict()
    model.load_state_dict({name: state[name] for name in model.state_dict()}, assign=True)
    whole = copy.deepcopy(model).requires_grad_(True) if full else None
    inject_lora(model, LoRAConfig(RANK, ALPHA, 0.0, PROJECTIONS))
    config = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=list(PROJECTIONS))
    theirs = peft.get_peft_model(theirs, config)
    ours = lora_parameters(model)
    names = {name: name.replace(".weight", ".default.weight") for name in ours}
    parameters = dict(theirs.get_base_model().named_parameters())
    with torch.no_grad():
        for name, tensor in ours.items():
            if "lora_B" in name:
                tensor.normal_(std=0.02)
            parameters[names[name]].copy_(tensor)
    adapter = {name: parameters[names[name]] for name in ours}
    ways = [
        Way("ours", model, ours, loss_of_ours, 16),
        Way("peft", theirs, adapter, loss_of_peft, MICRO[shape]),
        Way("peft, lean", theirs, dict(adapter), loss_of_lean_peft, MICRO[shape]),
    ]
    if full:
        ways.append(Way("full", whole, dict(whole.named_parameters()), loss_of_ours, 16))
    return ways


def check_equal(ways: list[Way], work: Work) -> dict[str, float]:
    """Largest difference of any gradient of A and B from ours, of the largest; of the loss too.

    ValueError where it is more than rounding: the ways would not do the same work.
    """
    found, gaps = {}, {}
    for way in ways:
        loss = way.forward_and_backward(work)
        found[way.name] = loss, {n: p.grad for n, p in way.parameters.items()}
        way.optimizer.zero_grad(set_to_none=True)
    loss, gradients = found["ours"]
    for name, (their_loss, theirs) in found.items():
        if name in ("ours", "full"):
            continue
        largest = max(float(g.abs().max()) for g in gradients.values())
        gap = max(float((g - theirs[n]).abs().max()) for n, g in gradients.items()) / largest
        gaps[name] = max(gap, abs(their_loss - loss) / abs(loss))
        if gaps[name] > 1e-4:
            raise ValueError(f"{name} computes something else: gradients differ by {gap:.1e}")
    return gaps


# --- one thing undone -----------------------------------------------------------------------------

layer_of_wanted_rows = Layer.forward


def whole_layer(layer, x, cos, sin, place, rows=None) -> Tensor:
    out = layer_of_wanted_rows(layer, x, cos, sin, place)
    return out if rows is None else gather(out, rows)


def plain_norm(norm: RMSNorm, x: Tensor) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    return norm.weight * normed.to(x.dtype)


def plain_update(layer: LoRALinear, name: str, x: Tensor) -> Tensor:
    narrow = torch.nn.functional.linear(x, layer.lora_A[name]) * layer.scaling[name]
    return torch.nn.functional.linear(narrow, layer.lora_B[name])


UNDONE = {
    "sharing": patch("packing.common", lambda one, other: 0),
    "a last layer of wanted rows": patch.object(Layer, "forward", whole_layer),
    "a norm's gradient by hand": patch.object(RMSNorm, "forward", plain_norm),
    "B by rank": patch.object(LoRALinear, "update", plain_update),
    "blocks of the vocabulary": patch.object(HeadLogprobs, "BLOCK", (110, 1 << 20)),
}


def ways_without(ours: Way) -> list[Way]:
    def loss_without(change) -> Callable[[Qwen3, Work], Tensor]:
        def loss(model: Qwen3, work: Work) -> Tensor:
            with change:
                return loss_of_ours(model, work)

        return loss

    return [
        Way(f"without {name}", ours.model, dict(ours.parameters), loss_without(change), 16)
        for name, change in UNDONE.items()
    ]


# --- FLOPs ----------------------------------------------------------------------------------------


def flops(shape: str, way: Way, work: Work) -> float:
    """Of the matrix products of one step: forward, and backward to what is trained."""
    rows = pairs = last_rows = last_pairs = head = 0
    for start in range(0, len(work.ids), way.rows):
        part = work.rows(slice(start, start + way.rows))
        S, T = part.ids.shape
        if isinstance(way.model, Qwen3):
            packing = pack(part.ids, part.mask)
            rows, last_rows = rows + len(packing.ids), last_rows + len(packing.wanted)
            pairs += visible_pairs(packing.every, packing.lengths)
            last_pairs += visible_pairs(packing.asked, packing.lengths)
            head += len(packing.pair_rows)
            continue
        rows, last_rows = rows + S * T, last_rows + S * T
        some = S * T * T if attention_mask(part) is not None else S * T * (T + 1) // 2
        pairs, last_pairs = pairs + some, last_pairs + some
        head += int(part.mask.sum()) if way.loss is loss_of_lean_peft else S * (T - part.first + 1)
    facts = SHAPES[shape]
    D, inner, layers = (facts[n] for n in ("hidden_size", "intermediate_size", "num_hidden_layers"))
    q = facts["num_attention_heads"] * facts["head_dim"]
    kv = 2 * facts["num_key_value_heads"] * facts["head_dim"]
    full = way.name == "full"
    # Forward, to the input and, where the matrix itself is trained, to it; through A and B always.
    base = 2 * (3 if full else 2)
    adapter = 0 if full else 2 * 3 * RANK

    def linear(asking: float, inside: int, outside: int, count: int = 1) -> float:
        return count * asking * (base * inside * outside + adapter * (inside + outside))

    total = 0.0
    for layer in range(layers):
        asking, seen = (last_rows, last_pairs) if layer == layers - 1 else (rows, pairs)
        total += linear(rows, D, kv // 2, 2) + linear(asking, D, q) + linear(asking, q, D)
        total += linear(asking, D, inner, 2) + linear(asking, inner, D) + 3 * 4 * q * seen
    if not full:  # nothing is trained before the first layer's projections
        total -= rows * 2 * D * (q + kv)
    # The head: logits and the way back; trained, the matrix itself too.
    return total + head * (6 if full else 4) * D * facts["vocab_size"]


def visible_pairs(stretches: list, lengths: list[int]) -> int:
    """Pairs of a query and a key that attention computes: half of them where it is causal."""
    pairs = 0
    for stretch, length in zip(stretches, lengths, strict=True):
        n = stretch.queries
        pairs += n * length if stretch.visible is not None else n * (n + 1) // 2
    return pairs


# --- the machine ----------------------------------------------------------------------------------


def clock() -> float:
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def seconds(function: Callable[[], object]) -> float:
    start = clock()
    function()
    return clock() - start


class Machine:
    """GEMM rate and copy bandwidth, measured again in every round."""

    def __init__(self):
        self.a, self.b = torch.randn(2, 2048, 2048).unbind()
        self.source = torch.randn(1 << 26)
        self.target = self.source.clone()
        self.gemm, self.copy = [], []
        self.measure()
        self.gemm, self.copy = [], []

    def measure(self) -> None:
        out = torch.empty_like(self.a)
        for _ in range(2):
            self.gemm.append(2 * 2048**3 / seconds(lambda: torch.mm(self.a, self.b, out=out)))
            took = seconds(lambda: self.target.copy_(self.source))
            self.copy.append(2 * self.source.nbytes / took)


# --- the comparison -------------------------------------------------------------------------------


def compare(shape: str, work: Work, ways: list[Way], repeats: int) -> list[dict]:
    """Rows of the table: each way's median seconds, rates, and ratio to ours, round by round."""
    small = shape == "tiny"
    warm = work if small else ragged(SHAPES[shape]["vocab_size"], 24, (16, 40))
    gaps = check_equal(ways, warm)
    machine, times = Machine(), {way.name: [] for way in ways}
    for number in range(repeats):
        for way in ways if number % 2 == 0 else reversed(ways):
            times[way.name].append(seconds(lambda way=way: way.step(work)))
        machine.measure()
    gemm, bandwidth = statistics.median(machine.gemm), statistics.median(machine.copy)
    rows, tokens = [], sum(work.lengths)
    for way in ways:
        median = statistics.median(times[way.name])
        ratios = [their / our for their, our in zip(times[way.name], times["ours"], strict=True)]
        done = flops(shape, way, work)
        row = {
            "benchmark": "training",
            "shape": shape,
            "work": work.name,
            "way": way.name,
            "seconds": median,
            "tokens": tokens,
            "tokens_with_loss": int(work.mask.sum()),
            "tokens_per_second": tokens / median,
            "ratio": statistics.median(ratios),
            "ratios": sorted(ratios),
            "gflop": done / 1e9,
            "gflop_per_second": done / median / 1e9,
            "mfu": done / median / gemm,
            "gemm_gflop_per_second": gemm / 1e9,
            "copy_gb_per_second": bandwidth / 1e9,
            "gap": gaps.get(way.name),
            "repeats": repeats,
        }
        if way.name.startswith("without"):  # counted as ours, which it is not
            row |= dict.fromkeys(("gflop", "gflop_per_second", "mfu"))
        rows.append(row)
    return rows


def print_table(rows: list[dict]) -> None:
    print(
        "| shape | work | way | s a step | tok/s | ours is faster by | GFLOP | GFLOP/s | MFU |"
        "\n|---|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        counted = "| | | |"
        if row["mfu"] is not None:
            counted = f"| {row['gflop']:,.0f} | {row['gflop_per_second']:.1f} | {row['mfu']:.0%} |"
        print(
            f"| {row['shape']} | {row['work']} | {row['way']} | {row['seconds']:.3f} "
            f"| {row['tokens_per_second']:,.0f} | {row['ratio']:.2f} {counted}"
        )
    for work in dict.fromkeys(row["work"] for row in rows):
        first = next(row for row in rows if row["work"] == work)
        print(
            f"{work}: GEMM {first['gemm_gflop_per_second']:.1f} GFLOP/s, copy "
            f"{first['copy_gb_per_second']:.1f} GB/s in the same rounds"
        )


def main() -> None:
    """Prints a JSON line and a table row for each way, and keeps them in a file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ["rectangles", "ragged", "savings"]
    parser.add_argument("shape", choices=SHAPES, help="of the model")
    parser.add_argument("--works", nargs="+", default=kinds[:2], choices=kinds, help="which work")
    parser.add_argument("--threads", type=int, default=1, help="of torch; one is in CPU time")
    parser.add_argument("--repeats", type=int, help="rounds; by default what the time above allows")
    parser.add_argument(
        "--output", type=Path, default=RESULTS, help="same work and threads are replaced in it"
    )
    options = parser.parse_args()
    shape, works, output = options.shape, options.works, options.output
    torch.set_num_threads(options.threads)
    setting = {
        "threads": options.threads,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "peft": version("peft"),
        "rank": RANK,
        "dtype": "float32",
        "load_before": os.getloadavg()[0],
    }
    rows = []
    ways = ways_on(shape, full="rectangles" in works)
    for name in works:
        torch.manual_seed(1)
        work = (rectangles if name == "rectangles" else ragged)(SHAPES[shape]["vocab_size"])
        other = {"rectangles": "peft, lean", "ragged": "full"}.get(name)
        several = [way for way in ways if way.name != other]
        if name == "savings":
            several = [ways[0], *ways_without(ways[0])]
        count = options.repeats or REPEATS.get((shape, name), 1)
        rows += [setting | row | {"work": name} for row in compare(shape, work, several, count)]
        ways = [way for way in ways if way.name != "full"]  # its memory is needed now
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k != "ratios"}), flush=True)
    print_table(rows)
    kept = json.loads(output.read_text()) if output.is_file() else []
    new = {(row["shape"], row["work"], row["threads"]) for row in rows}
    kept = [row for row in kept if (row["shape"], row["work"], row["threads"]) not in new]
    output.write_text(json.dumps(kept + rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
