"""Sampling: this project's engine and its peers on the same work, one after the other.

    .venv-peers/bin/python benchmarks/sampling.py      against transformers' generate + PEFT
    ... --vllm .venv-vllm/bin/python                   and vLLM, in a process of that interpreter
    ... --model slice --only rectangles adapter --batches 1 32 --prompts 64 --rounds 1
    ... --quick            one round of fewer new tokens, to see it work; keeps no result

benchmarks/environments.sh makes both environments; benchmarks/readme.py tabulates what is kept.

Work is conversations side by side, in turns of sampled and forced tokens, and that is all three:

    rectangles   S prompts of 64 or 512 tokens, one turn of 128 tokens          nothing is shared
    group        8 prompts of 512 tokens, each 16 times, one turn of 64         the prompt is shared
    turns        32 conversations, 8 turns of 32 sampled and 40 forced tokens   the history is kept
    adapter      rectangles of 32 x 64 with the adapter and without it, engine and generate

Everybody has the same random weights and the same adapter (rank 8, all seven projections), draws
from the full distribution at temperature 1 with no end token, and must first give the same greedy
tokens. Our engine returns logprobs as well, the peers none. What is cached of earlier repeats is
forgotten before each. Players take turns within a round; seconds are medians, ratios are medians of
the rounds' ratios. With one thread seconds are CPU time, so that other programs matter little; with
more, wall time (cpu_over_wall below the number of threads: others were at work).

Utilisation, against the rates of this machine: medians of calls before and after a row's rounds.

    prefill   FLOPs / (seconds x GEMM rate)     FLOPs = S (2 T n + 2 V D + 2 L H C T^2), of which
              our engine leaves out, in the last layer, all but the last token's queries, output
              projection and MLP: S (2 (T - 1) (2 D H C + 3 D I) + 2 H C T^2 - 4 H C T)
    decode    FLOPs / (seconds x GEMM rate)     FLOPs = S (2 (n + V D) + 4 L H C t) a step
              bytes / (seconds x copy rate)     bytes = 4 (n + V D) + 8 S L K C t   a step

n: parameters of all projections; D, I: hidden and MLP size; H, K: heads of queries and of keys, of
size C; L: layers; V: vocabulary; t: tokens in the cache, on average; adapters are not counted.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import safetensors.torch  # noqa: E402
import torch  # noqa: E402

from broadcast import save_adapter  # noqa: E402
from lora import LoRAConfig, inject_lora, lora_parameters  # noqa: E402
from model import Qwen3, Qwen3Config  # noqa: E402
from rollout import Request, TorchEngine  # noqa: E402

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}
SLICE = TINY | {  # Qwen3-0.6B with 4 of its 28 layers
    "vocab_size": 151_936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
MODELS = {"tiny": TINY, "slice": SLICE}
RESULTS = Path(__file__).with_suffix(".json")
RANK = 8
FIRST_IDS = 2048  # prompts use no other: both models have them


@dataclass(frozen=True)
class Work:
    """Conversations side by side: (prompt, sampled, forced, sampled, forced, ...)."""

    kind: str
    prompts: tuple[tuple[int, ...], ...]
    new: int  # sampled tokens of a turn
    turns: int = 1
    forced: int = 0  # tokens between two turns

    @property
    def sampled(self) -> int:
        return len(self.prompts) * self.turns * self.new

    @property
    def length(self) -> int:
        """Tokens of a conversation at its end."""
        return len(self.prompts[0]) + self.turns * self.new + (self.turns - 1) * self.forced

    def forced_ids(self, turn: int) -> list[int]:
        return [(turn * self.forced + i) % FIRST_IDS for i in range(self.forced)]

    def shape(self) -> dict:
        return {
            "kind": self.kind,
            "conversations": len(self.prompts),
            "prompt_tokens": len(self.prompts[0]),
            "distinct_prompts": len(set(self.prompts)),
            "turns": self.turns,
            "new_tokens": self.new,
            "forced_tokens": self.forced,
        }


def random_prompts(count: int, length: int) -> tuple[tuple[int, ...], ...]:
    generator = torch.Generator().manual_seed(length)
    rows = torch.randint(FIRST_IDS, (count, length), generator=generator).tolist()
    return tuple(map(tuple, rows))


# --- who plays -----------------------------------------------------------------------------------


class Engine:
    """TorchEngine on the checkpoint and the adapter's directory."""

    def __init__(self, checkpoint: Path, adapter: Path | None):
        self.model = Qwen3.from_pretrained(checkpoint).requires_grad_(False)
        self.directory, self.adapter, self.engine = adapter, adapter and "published", None

    def prepare(self, work: Work) -> None:
        """Slots for the work, and nothing in them."""
        wanted = len(work.prompts), work.length
        if self.engine is None or (self.engine.slots, self.engine.max_length) != wanted:
            if self.engine is not None and self.adapter:
                self.engine.remove_adapter(self.adapter)
            self.engine = None  # its memory goes before the next one's comes
            self.engine = TorchEngine(self.model, *wanted)
            if self.adapter:
                self.engine.add_adapter(self.adapter, self.directory)
        self.engine.drop_cache(self.adapter)

    def play(self, work: Work, temperature: float = 1.0) -> list[list[int]]:
        """Everybody's sampled tokens of the last turn."""

        async def converse(number: int, stream: list[int]) -> list[int]:
            for turn in range(work.turns):
                answer = await self.engine.generate(
                    Request(stream, work.new, temperature, self.adapter, seed=number)
                )
                stream = stream + answer.token_ids + work.forced_ids(turn)
            return answer.token_ids

        async def everyone() -> list[list[int]]:
            jobs = (converse(number, [*prompt]) for number, prompt in enumerate(work.prompts))
            return await asyncio.gather(*jobs)

        return asyncio.run(everyone())


class Generate:
    """transformers' generate, with a PEFT adapter or without; a turn is a call."""

    def __init__(self, checkpoint: Path, adapter: Path | None):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        if adapter:
            from peft import PeftModel

            self.model = PeftModel.from_pretrained(self.model, adapter)
        self.model.eval()

    def prepare(self, work: Work) -> None:
        pass  # it keeps nothing between calls

    def play(self, work: Work, temperature: float = 1.0) -> list[list[int]]:
        sampling = {"do_sample": False}
        if temperature:
            sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        ids = torch.tensor(work.prompts)
        for turn in range(work.turns):
            if turn:
                forced = torch.tensor(work.forced_ids(turn - 1)).expand(len(ids), -1)
                ids = torch.cat((ids, forced), dim=1)
            ids = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                min_new_tokens=work.new,
                max_new_tokens=work.new,
                pad_token_id=0,
                eos_token_id=None,
                **sampling,
            )
        return ids[:, -work.new :].tolist()


class VLLM:
    """vLLM in a process of its own (benchmarks/vllm_player.py), one line a request."""

    def __init__(self, python: str, checkpoint: Path, adapter: Path, threads: int, slots: int):
        here = Path(__file__).resolve().parent
        command = [python, str(here / "vllm_player.py"), str(checkpoint), str(adapter), str(slots)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.log = tempfile.TemporaryFile("w+")
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self.log, text=True, env=environment
        )
        self.version = self.ask({})["version"]

    def ask(self, line: dict) -> dict:
        print(json.dumps(line), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        if not answer:
            self.log.seek(0)
            raise RuntimeError(f"vLLM died: {self.log.read()[-2000:]}")
        return json.loads(answer)

    def prepare(self, work: Work) -> None:
        pass  # the player forgets before each work

    def play(self, work: Work, temperature: float = 1.0) -> tuple[list[list[int]], float, float]:
        forced = [work.forced_ids(turn) for turn in range(work.turns)]
        answer = self.ask(
            {"prompts": work.prompts, "new": work.new, "forced": forced, "temperature": temperature}
        )
        return answer["token_ids"], answer["wall"], answer["cpu"]

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def timed(player, work: Work) -> tuple[float, float]:
    """Wall and CPU seconds; what a process of its own took it measures itself."""
    player.prepare(work)
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = player.play(work)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    if isinstance(player, VLLM):
        tokens, wall, cpu = tokens
    assert all(len(row) == work.new for row in tokens)
    return wall, cpu


def agree(players: dict, work: Work) -> None:
    """Before anything is timed: everybody's greedy tokens are the same, so the policies are."""
    sample = Work("", work.prompts[:2], 4)
    answers = {}
    for name, player in players.items():
        player.prepare(sample)
        tokens = player.play(sample, temperature=0.0)
        answers[name] = tokens[0] if isinstance(player, VLLM) else tokens
    if any(tokens != answers["engine"] for tokens in answers.values()):
        raise RuntimeError(f"the players are different policies: {answers}")


# --- what is measured -----------------------------------------------------------------------------


def machine(threads: int) -> dict[str, list[float]]:
    """Seven times each: rates of fp32 GEMM (2048^3) and copy (256 MB, read and written).

    GFLOP/s and GB/s, of CPU seconds with one thread, as everywhere here.
    """
    clock = time.process_time if threads == 1 else time.perf_counter
    a, b, out = (torch.randn(2048, 2048) for _ in range(3))
    source, target = torch.zeros(1 << 26), torch.zeros(1 << 26)

    def seven(work: float, function: Callable[[], object]) -> list[float]:
        rates = []
        function()
        for _ in range(7):
            start = clock()
            function()
            rates.append(work / (clock() - start) / 1e9)
        return rates

    return {
        "gemm_gflops": seven(2 * 2048**3, lambda: torch.mm(a, b, out=out)),
        "copy_gb_s": seven(2 * source.nbytes, lambda: target.copy_(source)),
    }


def medians(*measured: dict[str, list[float]]) -> dict[str, float]:
    """Of what `machine` measured before and after the rounds, taken together."""
    return {
        name: statistics.median(rate for rates in measured for rate in rates[name])
        for name in measured[0]
    }


def utilisation(
    config: dict, work: Work, prefill: float, decode: float, rates: dict, last_alone: bool
) -> dict:
    """By the formulas above; seconds of the prefill, and of all decode steps together.

    last_alone: the last layer of the prefill is computed for the last token alone.
    """
    L, D, V = config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]
    mlp = 3 * D * config["intermediate_size"]
    H, K, C = (config[f] for f in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    n = L * (2 * D * H * C + 2 * D * K * C + mlp)
    S, T, steps = len(work.prompts), len(work.prompts[0]), work.new - 1
    t = T + work.new / 2
    prefill_flops = S * (2 * T * n + 2 * V * D + 2 * L * H * C * T**2)
    if last_alone:
        left_out = 2 * (T - 1) * (2 * D * H * C + mlp) + 2 * H * C * T**2 - 4 * H * C * T
        prefill_flops -= S * left_out
    step_flops = S * (2 * (n + V * D) + 4 * L * H * C * t)
    step_bytes = 4 * (n + V * D) + 8 * S * L * K * C * t
    gemm, copy = rates["gemm_gflops"] * 1e9, rates["copy_gb_s"] * 1e9
    return {
        "prefill_gemm_share": prefill_flops / prefill / gemm,
        "decode_gemm_share": step_flops * steps / decode / gemm,
        "decode_copy_share": step_bytes * steps / decode / copy,
        "decode_step_ms": 1e3 * decode / steps,
    }


def measure(name: str, work: Work, players: dict, rounds: int, threads: int) -> dict:
    """One row: every player in every round, in alternating order."""
    warm_up = Work(work.kind, work.prompts, min(work.new, 2))
    for player in players.values():
        timed(player, warm_up)
    before, times = machine(threads), {player: [] for player in players}
    for number in range(rounds):
        for player in list(players)[:: 1 if number % 2 else -1]:
            times[player].append(timed(players[player], work))
    rates = medians(before, machine(threads))
    clock = 1 if threads == 1 else 0
    seconds = {player: [pair[clock] for pair in pairs] for player, pairs in times.items()}
    first = Work(work.kind, work.prompts, 1)
    row = {"model": name, **work.shape(), "threads": threads, "rounds": rounds}
    row |= {"clock": ("wall", "cpu")[clock], **rates}
    row["players"] = {}
    row["cpu_over_wall"] = min(sum(c for _, c in p) / sum(w for w, _ in p) for p in times.values())
    for player in players:
        middle = statistics.median(seconds[player])
        pairs = zip(seconds[player], seconds["engine"], strict=True)
        numbers = {
            "seconds": middle,
            "tokens_per_second": work.sampled / middle,
            "engine_tokens_per_second": work.sampled / statistics.median(seconds["engine"]),
            "engine_is_faster_by": statistics.median(theirs / ours for theirs, ours in pairs),
        }
        if work.kind == "rectangles":
            prefill = statistics.median(timed(players[player], first)[clock] for _ in range(2))
            last_alone = isinstance(players[player], Engine)
            numbers |= {"prefill_seconds": prefill} | utilisation(
                MODELS[name], work, prefill, middle - prefill, rates, last_alone
            )
        row["players"][player] = numbers
    return row


def show(row: dict) -> str:
    """A row of the tables, for each player beside our engine."""
    S, T = row["conversations"], row["prompt_tokens"]
    what = f"{row['kind']} {S} x {T} + {row['turns']} x {row['new_tokens']}"
    lines = []
    for player, numbers in row["players"].items():
        shares = " | "
        if "decode_step_ms" in numbers:
            shares = (
                f"{numbers['prefill_gemm_share']:.0%} | {numbers['decode_step_ms']:.2f} ms, "
                f"{numbers['decode_gemm_share']:.0%} / {numbers['decode_copy_share']:.0%}"
            )
        lines.append(
            f"| {row['model']} | {what} | {row['threads']} | {player} | "
            f"{numbers['tokens_per_second']:,.0f} | {numbers['engine_is_faster_by']:.2f} | "
            f"{shares} |"
        )
    return "\n".join(lines)


HEADER = (
    "| model | work | threads | who | tokens/s | engine against it | prefill, of GEMM rate | "
    "decode step, of GEMM / copy rate |\n" + "|---" * 8 + "|"
)


# --- the run --------------------------------------------------------------------------------------


def make_checkpoint(config: dict, directory: Path) -> tuple[Path, Path]:
    """Random weights and a random adapter, as the directories that everybody loads."""
    torch.manual_seed(0)
    shapes = Qwen3Config.from_dict(config)
    model = Qwen3(shapes).requires_grad_(False)
    for name, parameter in model.named_parameters():
        if not name.endswith("norm.weight"):
            parameter.normal_(std=0.02)
    checkpoint, adapter = directory / "model", directory / "adapter"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(
        model.state_dict(), checkpoint / "model.safetensors", metadata={"format": "pt"}
    )
    lora = LoRAConfig(RANK)
    inject_lora(model, lora)
    with torch.no_grad():
        for parameter in lora_parameters(model).values():
            parameter.normal_(std=0.02)
    save_adapter(model, lora, adapter)
    return checkpoint, adapter


def package_versions(python: str, names=("torch", "transformers", "peft", "trl")) -> dict[str, str]:
    """Of the packages that an interpreter's environment has."""
    code = (
        "import importlib.metadata as m, json, sys\n"
        "have = {d.metadata['Name'] for d in m.distributions()}\n"
        "print(json.dumps({n: m.version(n) for n in sys.argv[1:] if n in have}))"
    )
    command = [python, "-c", code, *names]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def works(options: argparse.Namespace) -> list[Work]:
    """The rows of this run."""
    new, chosen = options.new_tokens, []
    if "rectangles" in options.only:
        for T in options.prompts:
            chosen += [Work("rectangles", random_prompts(S, T), new) for S in options.batches]
    if "group" in options.only:
        prompts = random_prompts(8, 512)
        repeated = tuple(prompt for prompt in prompts for _ in range(16))
        chosen.append(Work("group", repeated, min(new, 64)))
    if "turns" in options.only:
        chosen.append(Work("turns", random_prompts(32, 64), 32, turns=8, forced=40))
    if "adapter" in options.only:
        chosen.append(Work("adapter", random_prompts(32, 64), new))
    return chosen


def record(row: dict) -> None:
    """Into the file, in the place of an earlier row of the same work.

    Players of that row that this run did not seat stay: each has beside it the rate that our engine
    had in its rounds.
    """
    keys = ("model", "kind", "conversations", "prompt_tokens", "new_tokens", "threads")
    rows = json.loads(RESULTS.read_text()) if RESULTS.is_file() else []
    for earlier in (other for other in rows if all(other[key] == row[key] for key in keys)):
        row = row | {
            "players": {
                **row["players"],
                **{n: its for n, its in earlier["players"].items() if n not in row["players"]},
            },
            "versions": earlier["versions"] | row["versions"],
        }
    rows = [other for other in rows if any(other[key] != row[key] for key in keys)]
    RESULTS.write_text("[\n" + ",\n".join(json.dumps(r) for r in [*rows, row]) + "\n]\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds, sizes, lengths = ["rectangles", "group", "turns", "adapter"], [1, 32, 128], [64, 512]
    parser.add_argument("--model", choices=MODELS, default="tiny", help="its shapes")
    parser.add_argument("--only", nargs="+", default=kinds, choices=kinds, help="by default all")
    parser.add_argument("--batches", nargs="+", type=int, default=sizes, help="of rectangles")
    parser.add_argument("--prompts", nargs="+", type=int, default=lengths, help="of rectangles")
    parser.add_argument("--new-tokens", type=int, default=128, help="of rectangles")
    parser.add_argument("--rounds", type=int, default=3, help="in which all players take turns")
    parser.add_argument("--threads", type=int, default=1, help="of each player")
    parser.add_argument("--vllm", metavar="PYTHON", help="interpreter that can import vllm")
    parser.add_argument("--quick", action="store_true", help="few tokens, no result")
    options = parser.parse_args()
    if options.quick:
        options.new_tokens, options.rounds = min(options.new_tokens, 16), 1
    torch.set_num_threads(options.threads)
    versions = package_versions(sys.executable)
    with tempfile.TemporaryDirectory() as directory:
        checkpoint, adapter = make_checkpoint(MODELS[options.model], Path(directory))
        players = {
            "engine": Engine(checkpoint, adapter),
            "generate + PEFT": Generate(checkpoint, adapter),
        }
        chosen = works(options)
        if options.vllm:
            slots = max(len(work.prompts) for work in chosen)
            players["vLLM"] = VLLM(options.vllm, checkpoint, adapter, options.threads, slots)
            versions["vllm"] = players["vLLM"].version
        facts = {"versions": versions, "cores": os.cpu_count()}
        print(json.dumps(facts))
        agree(players, chosen[0])
        print(HEADER)
        for work in chosen:
            seated = dict(players)
            if work.kind == "adapter":
                seated.pop("vLLM", None)
                seated["engine, no adapter"] = Engine(checkpoint, None)
                seated["generate, no adapter"] = Generate(checkpoint, None)
            row = measure(options.model, work, seated, options.rounds, options.threads)
            row |= facts
            print(json.dumps(row))
            print(show(row), flush=True)
            if not options.quick:
                record(row)
        if options.vllm:
            players["vLLM"].close()


if __name__ == "__main__":
    main()
