"""What a 4-bit base saves, what it costs, and what merging an adapter into it does to the policy.

    python benchmarks/quant.py memory        Qwen3-0.6B's shapes, bfloat16, random; 4B on paper
    python benchmarks/quant.py speed         loss and backward, and decode steps, in one process
    python benchmarks/quant.py policy RUNS   the default job, unquantised and NF4, in RUNS/none
                                             and RUNS/nf4 (made if absent): their curves, and
                                             the policy of each way to deploy their adapters

Speed is a ratio of CPU seconds of one thread, plain and quantised in turn in one process, of a
4-layer slice of Qwen3-0.6B in fp32 with a vocabulary of 1,024: the layers are compared, the head is
the same for both.
"""

import argparse
import asyncio
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import lora  # noqa: E402
from broadcast import read_adapter  # noqa: E402
from chat import load_tokenizer  # noqa: E402
from config import Config  # noqa: E402
from engine import TorchEngine  # noqa: E402
from lora import LoRAConfig, inject_lora, lora_layers, merge_lora  # noqa: E402
from model import KVCache, Qwen3, Qwen3Config  # noqa: E402
from quant import QuantizedLinear, quantize_base  # noqa: E402
from rollout import run_groups  # noqa: E402
from train import load_environments, micro_batches  # noqa: E402

FACTS = ROOT / "configs" / "models"
EPISODES = 64  # whose tokens the policies are compared on


def bytes_of(model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


# --- memory ---------------------------------------------------------------------------------------


def resident() -> int:
    """Resident bytes, with what the allocator holds of freed tensors handed back first."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def memory() -> dict:
    start = resident()
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3(Qwen3Config.from_pretrained(FACTS / "Qwen3-0.6B.json"))
    torch.set_default_dtype(torch.float32)
    before, before_bytes = resident() - start, bytes_of(model)
    seconds = time.process_time()
    names = quantize_base(model)
    seconds = time.process_time() - seconds
    after, after_bytes = resident() - start, bytes_of(model)
    packed = [model.get_submodule(name) for name in names]
    count = sum(layer.out_features * layer.in_features for layer in packed)
    print(
        f"Qwen3-0.6B's shapes, bfloat16: resident {before / 1e6:,.0f} MB -> {after / 1e6:,.0f} MB "
        f"(tensors {before_bytes / 1e6:,.0f} -> {after_bytes / 1e6:,.0f}), packed in "
        f"{seconds:.0f} s; {8 * sum(map(bytes_of, packed)) / count:.3f} bits a packed parameter"
    )
    with torch.device("meta"):
        paper = Qwen3(Qwen3Config.from_pretrained(FACTS / "Qwen3-4B.json"))
    total = sum(parameter.numel() for parameter in paper.parameters())
    linear = sum(m.weight.numel() for m in paper.modules() if isinstance(m, torch.nn.Linear))
    on_paper = 2 * (total - linear) + linear * (4 + 8 / 64 + 32 / 64 / 256) / 8
    print(f"Qwen3-4B on paper: {2 * total / 1e9:.2f} GB -> {on_paper / 1e9:.2f} GB")
    return {
        "resident": [before, after],
        "tensors": [before_bytes, after_bytes],
        "paper_4b": [2 * total, round(on_paper)],
    }


# --- speed ----------------------------------------------------------------------------------------


def speed() -> dict:
    torch.set_num_threads(1)
    shapes = json.loads((FACTS / "Qwen3-0.6B.json").read_text())
    shapes |= {"num_hidden_layers": 4, "vocab_size": 1024, "torch_dtype": "float32"}
    models = {name: Qwen3(Qwen3Config.from_dict(shapes)) for name in ("plain", "nf4")}
    quantize_base(models["nf4"])
    for model in models.values():
        inject_lora(model, LoRAConfig(rank=8))

    def step(model, ids, mask):
        logprobs, _ = model.token_logprobs(ids, mask)
        (-logprobs.mean()).backward()

    def decode(model, cache, ids):
        model.extend(ids, cache, slice(0, len(ids)), torch.full((len(ids),), 100))

    jobs = {}
    for S, T in ((1, 256), (8, 256)):
        arguments = (torch.randint(1024, (S, T)), torch.ones(S, T - 1))
        jobs[f"forward and backward, {S * T} tokens"] = (step, arguments, 2)
    for S in (1, 32, 128):
        cache = KVCache(models["plain"].config, S, 128, torch.float32)
        jobs[f"decode, {S} streams"] = (decode, (cache, torch.randint(1024, (S, 1))), 10)
    results = {}
    for title, (job, arguments, repeats) in jobs.items():
        seconds = {name: [] for name in models}
        for _ in range(repeats + 1):  # the first is not counted
            for name, model in models.items():
                start = time.process_time()
                job(model, *arguments)
                seconds[name].append(time.process_time() - start)
        plain, nf4 = (min(seconds[name][1:]) for name in ("plain", "nf4"))
        results[title] = round(nf4 / plain, 2)
        print(f"{title:<36}{plain * 1e3:9.1f} ms{nf4 * 1e3:9.1f} ms  x {nf4 / plain:.2f}")
    return results


# --- the policy -----------------------------------------------------------------------------------


def finished_run(directory: Path, quantize: str) -> list[dict]:
    """The metrics of the default run in `directory`, which is made if it is not there."""
    if not (directory / "summary.json").is_file():
        flags = ["--quantize", quantize, "--output", str(directory)]
        subprocess.run([sys.executable, str(ROOT / "train.py"), *flags], check=True)
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def base(nf4: bool) -> Qwen3:
    model = Qwen3.from_pretrained(Config().model)
    if nf4:
        quantize_base(model)
    return model


def served(model: Qwen3, adapter: Path | None = None) -> TorchEngine:
    """An engine on `model`, with an adapter named "agent" or none."""
    engine = TorchEngine(model, Config().slots, Config().max_length)
    if adapter:
        engine.add_adapter("agent", adapter)
    return engine


def merged(adapter: Path, nf4: bool, into=lambda weight: weight) -> TorchEngine:
    """The base with the adapter in its weights, which then pass through `into`."""
    model = base(nf4)
    config, tensors = read_adapter(adapter)
    inject_lora(model, config)
    for name, parameter in lora.lora_parameters(model).items():
        parameter.data.copy_(tensors[name])
    merge_lora(model)
    plain = base(nf4=False)
    for name, layer in lora_layers(model).items():
        plain.get_submodule(name).weight.data.copy_(into(layer.merged))
    return served(plain)


def requantised(weight):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight
    return QuantizedLinear(linear).weight


def play(engine: TorchEngine, held_out, tasks, temperature: float):
    config = Config()
    groups = run_groups(
        engine,
        load_tokenizer(config.model),
        held_out,
        tasks,
        1,
        seed=0,
        step=0,
        adapter="agent" if engine.adapters else None,
        version=0,
        temperature=temperature,
        max_turns=config.max_turns,
        max_new_tokens=config.max_new_tokens,
    )
    return [group[0] for group in asyncio.run(groups)]


@torch.no_grad()
def next_token_logprobs(engine: TorchEngine, batch):
    """(sampled tokens, V)."""
    segments = [(name, None) for name in engine.adapters]
    with lora.use_adapters(engine.model, segments):
        return engine.model(batch.ids)[:, :-1][batch.mask].log_softmax(-1)


def policy(runs: Path) -> dict:
    curves = {kind: finished_run(runs / kind, kind) for kind in ("none", "nf4")}
    for kind, rows in curves.items():
        summary = json.loads((runs / kind / "summary.json").read_text())
        rewards = " ".join(f"{row['reward']:.2f}" for row in rows)
        print(
            f"--quantize {kind}: held out {summary['eval_before']:.3f} -> "
            f"{summary['eval_after']:.3f}; training reward {rewards}"
        )
    nf4, none = runs / "nf4" / "adapter", runs / "none" / "adapter"
    ways = {
        "trained on NF4": [
            ("beside the NF4 base", served(base(True), nf4)),
            ("merged into the dequantised weights, fp32", merged(nf4, True)),
            (
                "the same, rounded to bfloat16",
                merged(nf4, True, lambda weight: weight.bfloat16().float()),
            ),
            ("merged, then quantised again", merged(nf4, True, requantised)),
            ("beside the unquantised base", served(base(False), nf4)),
            ("no adapter: the NF4 base", served(base(True))),
        ],
        "trained unquantised": [
            ("beside the unquantised base", served(base(False), none)),
            ("beside the NF4 base", served(base(True), none)),
            ("merged, then quantised", merged(none, False, requantised)),
            ("no adapter: the unquantised base", served(base(False))),
        ],
    }
    _, held_out = load_environments(Config())
    tasks = held_out.eval[: Config().eval_size]
    results = {}
    for title, variants in ways.items():
        print(f"\n{title:<46}{'KL':>10}{'largest':>10}{'held out':>10}")
        reference = variants[0][1]
        episodes = play(reference, held_out, tasks[:EPISODES], 1.0)
        batch = micro_batches([(episode, 0.0) for episode in episodes], sys.maxsize, "cpu")[0]
        sampled = batch.ids[:, 1:][batch.mask][:, None]
        expected = next_token_logprobs(reference, batch)
        for name, engine in variants:
            found = next_token_logprobs(engine, batch)
            kl = (expected.exp() * (expected - found)).sum(-1).mean().item()
            largest = (expected - found).gather(1, sampled).abs().max().item()
            greedy = play(engine, held_out, tasks, 0.0)
            reward = sum(episode.reward for episode in greedy) / len(greedy)
            results[f"{title}: {name}"] = {"kl": kl, "largest": largest, "held_out": reward}
            print(f"  {name:<44}{kl:10.1e}{largest:10.1e}{reward:10.3f}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["memory", "speed", "policy"], help="is measured")
    parser.add_argument("runs", nargs="?", type=Path, help="directory of policy's two runs")
    options = parser.parse_args()
    if (options.what == "policy") != (options.runs is not None):
        parser.error("policy takes the directory of its runs, memory and speed take none")
    if options.what == "policy":
        results = policy(options.runs)
    else:
        results = {"memory": memory, "speed": speed}[options.what]()
    print(json.dumps({"benchmark": f"quant {options.what}", **results}))


if __name__ == "__main__":
    main()
