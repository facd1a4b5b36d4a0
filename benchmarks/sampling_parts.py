"""What each thing that the sampler does not do, or does once, is worth: the plain way beside ours.

    python benchmarks/sampling_parts.py          about two minutes; writes sampling_parts.json

Shapes of the "tiny" model of benchmarks/sampling.py, and Qwen3's vocabulary; 32 streams in a decode
step. One thread, its CPU time; the two ways take turns, medians, the ratio paired within a round.
A part's share of a whole step is what it saves against the same step of the engine (the decode step
has 28 adapted projections, 17 norms, 4 writes to the cache and 1 draw).
"""

import argparse
import asyncio
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

from benchmarks.sampling import TINY, Engine, Work, make_checkpoint, random_prompts  # noqa: E402
from engine import Request, draw  # noqa: E402
from head import few_logits  # noqa: E402
from lora import lora_layers  # noqa: E402
from model import KVCache, Normed  # noqa: E402
from segments import Batch  # noqa: E402

S, SECONDS = 32, 4.0  # of measuring each pair
RESULTS = Path(__file__).with_suffix(".json")


def running_sum(logits: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """The draw without blocks: one cumulative sum over the vocabulary."""
    logprobs = logits.log_softmax(-1)
    cumulative = logprobs.exp().cumsum(-1)
    threshold = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[1] - 1)
    return logprobs.gather(1, tokens)


def multinomial(logits: torch.Tensor) -> torch.Tensor:
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, torch.multinomial(logprobs.exp(), 1))


def cpu_seconds(work: Callable, calls: int) -> float:
    start = time.process_time()
    for _ in range(calls):
        work()
    return (time.process_time() - start) / calls


def compare(what: str, plain: Callable, ours: Callable) -> dict:
    """One row: seconds of a call of each, and how many times faster ours is."""
    calls = max(1, int(0.02 / max(cpu_seconds(plain, 1), cpu_seconds(ours, 1))))
    rounds, deadline = [], time.process_time() + SECONDS
    while time.process_time() < deadline or len(rounds) < 3:
        order = (plain, ours) if len(rounds) % 2 else (ours, plain)
        times = {work: cpu_seconds(work, calls) for work in order}
        rounds.append((times[plain], times[ours]))
    before, after = (statistics.median(column) for column in zip(*rounds, strict=True))
    faster = statistics.median(a / b for a, b in rounds)
    print(f"| {what} | {before * 1e3:,.3f} | {after * 1e3:,.3f} | {faster:.2f} |", flush=True)
    return {"part": what, "plain_ms": 1e3 * before, "ours_ms": 1e3 * after, "faster": faster}


@torch.inference_mode()
def of_a_step(player: Engine) -> list[dict]:
    """Parts of one decode step."""
    engine, model = player.engine, player.model
    ones, uniform, rows = torch.ones(S), torch.rand(S), []
    for V in (2048, 151_936):
        logits = torch.randn(S, V)
        ours = lambda logits=logits: draw(logits, ones, uniform)  # noqa: E731
        for name, plain in (
            ("torch.multinomial", lambda logits=logits: multinomial(logits)),
            ("one running sum", lambda logits=logits: running_sum(logits, uniform)),
        ):
            rows.append(compare(f"draw of {S} x {V:,}: {name} / in blocks", plain, ours))

    hidden, weight = torch.randn(S, 1024), torch.randn(151_936, 1024)
    rows.append(
        compare(
            f"head of {S} x 1,024 to 151,936: one product / in blocks",
            lambda: F.linear(hidden, weight),
            lambda: few_logits(hidden, weight),
        )
    )
    engine.stack.hold(["published"])
    batch = Batch(engine.stack, ["published"] * S)
    layer = lora_layers(model)["model.layers.0.mlp.up_proj"]
    x = torch.randn(S, 1, 256)
    y = layer.base(x)
    rows.append(
        compare(
            f"update of one adapter, {S} x 256 to 768: as lora.py defines it / in the product",
            lambda: y + layer.update("published", x),
            lambda: batch.add_updates(layer, x, y),
        )
    )
    norm = model.model.norm
    rows.append(
        compare(
            f"norm of {S} x 256: with autograd's function / without",
            lambda: Normed.apply(x, norm.weight, norm.eps),
            lambda: norm(x),
        )
    )
    cache = KVCache(model.config, S, 200, torch.float32)
    keys, new = cache.keys[0], torch.randn(S, 1, 2, 64)  # (S, K, capacity, C)
    slots, positions = torch.arange(S)[:, None], torch.randint(200, (S, 1))
    places = ((slots * 2 + torch.arange(2)) * 200 + positions).flatten()

    def by_two_indices() -> None:
        keys[slots, :, positions] = new

    rows.append(
        compare(
            f"new keys of {S} streams into the cache: by slot and position / by one place",
            by_two_indices,
            lambda: keys.view(-1, 64).index_copy_(0, places, new.reshape(-1, 64)),
        )
    )
    return rows


@torch.inference_mode()
def of_a_prefill(player: Engine) -> dict:
    """32 prompts of 64 tokens, with the last layer computed for all tokens or for the last ones."""
    model, cache = player.model, KVCache(player.model.config, S, 64, torch.float32)
    ids, starts = torch.tensor(random_prompts(S, 64)), torch.zeros(S, dtype=torch.long)
    decoder = model.model.forward

    def every_token(input_ids, positions, place):
        return decoder(input_ids, positions, dataclasses.replace(place, wanted=None))

    def extend(forward: Callable) -> None:
        model.model.forward = forward
        model.extend(ids, cache, slice(0, S), starts)

    what = f"prefill of {S} x 64, 4 layers: last layer for all tokens / for the last ones"
    row = compare(what, lambda: extend(every_token), lambda: extend(decoder))
    model.model.forward = decoder
    return row


def of_a_group(player: Engine) -> dict:
    """16 samples of a prompt of 512 tokens, one new token each."""
    (prompt,) = random_prompts(1, 512)
    shared, apart = Work("", (prompt,) * 16, 1), Work("", random_prompts(16, 512), 1)

    def play(work: Work) -> None:
        player.prepare(work)
        player.play(work)

    what = "a group's prompt, 16 x 512: each for itself / once"
    return compare(what, lambda: play(apart), lambda: play(shared))


def of_a_conversation(player: Engine) -> dict:
    """8 conversations of 8 turns, 8 sampled and 40 forced tokens each."""
    work = Work("", random_prompts(8, 64), 8, turns=8, forced=40)
    player.prepare(work)
    engine = player.engine

    def play(keep: bool) -> None:
        async def turn(streams: list[list[int]], number: int) -> list[list[int]]:
            jobs = (
                engine.generate(Request(s, work.new, 1.0, "published", seed=0)) for s in streams
            )
            answers = await asyncio.gather(*jobs)
            forced = work.forced_ids(number)
            return [s + a.token_ids + forced for s, a in zip(streams, answers, strict=True)]

        engine.drop_cache("published")
        streams = [[*prompt] for prompt in work.prompts]
        for number in range(work.turns):
            streams = asyncio.run(turn(streams, number))
            if not keep:
                engine.drop_cache("published")

    what = "a conversation's history, 8 turns: prefilled at every turn / kept"
    return compare(what, lambda: play(False), lambda: play(True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        player = Engine(*make_checkpoint(TINY, Path(directory)))
        player.prepare(Work("", random_prompts(S, 64), 8))
        print("| part: plainly / here | plainly, ms | here, ms | faster |\n|---|---|---|---|")
        rows = of_a_step(player) + [of_a_prefill(player)]
        rows += [of_a_group(player), of_a_conversation(player)]
    result = {"torch": torch.__version__, "threads": 1, "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
