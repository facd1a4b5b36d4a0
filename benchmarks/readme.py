"""The README's table of speed, made from the result files that the benchmarks keep.

    python benchmarks/readme.py        after any of training, memory, sampling, rl_step, growth

Nothing is measured here. A test holds the README to these files. `aim` is what this project set
itself for the ratio: a floor and, after the arrow, what it would like to reach.
"""

import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
TABLE = re.compile(r"(?<=<!-- speed -->\n).*?(?=<!-- end of speed -->)", re.DOTALL)
MODELS = {"tiny": "tiny, 3.7M", "slice": "4 layers of Qwen3-0.6B"}
TRAINING = {  # (work, way) -> what it is
    ("rectangles", "peft"): "training step, 8 x 256 tokens, loss on half",
    ("ragged", "peft"): "training step, a group of 16 on a prompt of 300 tokens, ragged",
    ("ragged", "peft, lean"): "the same, logits for sampled tokens alone",
}
AIMS = {  # of the ratio, by (model, work)
    ("tiny", "rectangles"): (1.05, 1.15),
    ("slice", "rectangles"): (1.1, 1.3),
    ("tiny", "ragged"): (1.8, 3),
    ("slice", "ragged"): (1.8, 3),
    ("tiny", "rectangles", 32): (1.5, 2.5),
    ("slice", "rectangles", 32): (1.3, 1.8),
    ("tiny", "vLLM", 32): ("", 1.5),
    ("slice", "vLLM", 32): ("", 1),
    ("tiny", "group", 128): (3, 5),
    ("tiny", "turns", 32): (3, 5),
    "no adapter": (0.9, 0.95),
    "RL step": (2, 4),
    "memory": (2, 3.3),
    "full": (1.39, 1.47),
}
SAMPLING = {
    "rectangles": "sampling {conversations} x {new_tokens} after {prompt_tokens} tokens",
    "group": "sampling 8 groups of 16 on {prompt_tokens} tokens, {new_tokens} new",
    "turns": "{conversations} conversations of {turns} turns",
    "adapter": "sampling {conversations} x {new_tokens} after {prompt_tokens} tokens",
}


def results(name: str) -> list | dict:
    file = HERE / f"{name}.json"
    return json.loads(file.read_text()) if file.is_file() else []


def line(model: str, what: str, threads: int, rates: tuple, ratio: float, aim, shares="") -> str:
    ours, theirs, unit = rates
    wanted = " -> ".join(f"{value:g}" for value in aim if value != "") if aim else ""
    each = (
        f"{ours:,.3g} | {theirs:,.3g} {unit}"
        if ours < 100
        else f"{ours:,.0f} | {theirs:,.0f} {unit}"
    )
    return (
        f"| {what} | {MODELS[model]} | {threads} | {each} | **{ratio:.2f}** | {wanted} | {shares} |"
    )


def training() -> list[str]:
    rows = [row for row in results("training") if row["work"] != "savings"]
    ours = {(r["shape"], r["work"], r["threads"]): r for r in rows if r["way"] == "ours"}
    lines = []
    for row in rows:
        model, work, threads = row["shape"], row["work"], row["threads"]
        mine = ours[model, work, threads]
        rates = mine["tokens_per_second"], row["tokens_per_second"], "tok/s"
        if (work, row["way"]) in TRAINING:
            shares = f"{mine['mfu']:.0%}, {row['mfu']:.0%} of the GEMM rate"
            aim = AIMS[model, work] if row["way"] == "peft" else None
            what = f"{TRAINING[work, row['way']]}: PEFT"
            lines.append(line(model, what, threads, rates, row["ratio"], aim, shares))
        elif row["way"] == "full" and model == "slice":
            what = "the same work, LoRA: this project's full fine-tuning"
            shares = f"{1 / row['ratio']:.2f} of its time"
            lines.append(line(model, what, threads, rates, row["ratio"], AIMS["full"], shares))
    return lines


def memory() -> list[str]:
    both = results("memory")
    if not both:
        return []
    ours, theirs = (both[who]["growth"] / 1e9 for who in ("ours", "peft"))
    what = "memory that a training step of it adds: PEFT"
    shares = f"{ours / theirs:.2f} of it"
    return [line("slice", what, 1, (ours, theirs, "GB"), theirs / ours, AIMS["memory"], shares)]


def sampling() -> list[str]:
    lines = []
    for row in results("sampling"):
        model, kind, count = row["model"], row["kind"], row["conversations"]
        what, players = SAMPLING[kind].format(**row), row["players"]
        engine = players["engine"]
        for player, numbers in players.items():
            key, shares = (model, kind, count), ""
            if player == "engine" or player == "generate, no adapter":
                continue
            if player == "vLLM":
                key = (model, "vLLM", count)
            elif player == "engine, no adapter":
                key = "no adapter"
            elif kind == "adapter":
                continue  # as in rectangles; what an adapter costs generate stands in the file
            if "decode_step_ms" in engine:
                shares = (
                    f"prefill {engine['prefill_gemm_share']:.0%}, decode "
                    f"{engine['decode_gemm_share']:.0%} of the GEMM rate"
                )
            rates = engine["tokens_per_second"], numbers["tokens_per_second"], "tok/s"
            aim, ratio = AIMS.get(key), numbers["engine_is_faster_by"]
            lines.append(
                line(model, f"{what}: {player}", row["threads"], rates, ratio, aim, shares)
            )
    return lines


def rl_step() -> list[str]:
    lines = []
    for row in results("rl_step"):
        rates = row["ours"]["seconds_a_step"], row["trl"]["seconds_a_step"], "s"
        what = "RL step, 8 x 8 completions of 64 tokens: TRL"
        lines.append(line("tiny", what, row["threads"], rates, row["faster"], AIMS["RL step"]))
        rates = *(row[who]["peak_memory"] / 1e9 for who in ("ours", "trl")), "GB"
        lines.append(
            line("tiny", "its peak memory: TRL", row["threads"], rates, row["less_memory"], (2,))
        )
    return lines


def growth() -> list[str]:
    kept = results("growth")
    if not kept:
        return []
    told = [
        f"{row['axis']} {row['seconds_exponent']:.2f} ({row['seconds_work']:.2f}) and "
        f"{row['bytes_exponent']:.2f} ({row['bytes_work']:.2f})"
        for row in kept["rows"]
    ]
    return [
        "",
        "Exponents with which a training step's time and its memory grow, in brackets those of its "
        f"work ([figure](benchmarks/growth.png)): {'; '.join(told)}.",
    ]


def savings() -> list[str]:
    rows = [row for row in results("training") if row["work"] == "savings"]
    ways = [f"{row['way']} {row['ratio']:.2f}" for row in rows if row["way"] != "ours"]
    told = [f"The tiny group's step takes, of its time, {', '.join(ways)}."] if ways else []
    parts = [
        f"{part['part']} {part['faster']:.1f}"
        for part in (results("sampling_parts") or {"rows": []})["rows"]
    ]
    told += [f"Sampling, how much faster a part is: {'; '.join(parts)}."] if parts else []
    return [line for paragraph in told for line in ("", paragraph)]


def table() -> str:
    lines = [
        "| work: beside whom | model | threads | this project | the other | ratio | aim | |",
        "|---" * 8 + "|",
        *training(),
        *memory(),
        *sampling(),
        *rl_step(),
        *savings(),
        *growth(),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    README.write_text(TABLE.sub(lambda _: table(), README.read_text()))
