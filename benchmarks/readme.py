"""The README's tables of benchmarks, made from the result files that these keep.

    python benchmarks/readme.py     after training, memory, full, sampling, sampling_parts, rl_step,
                                    growth, overlap, modes or adapters

A part of the README stands between <!-- its name --> and <!-- end of its name -->. Nothing is
measured here, and a part whose result file is missing stays as it is. A test holds the README to
these files.

Of the speed: a ratio says how many times as fast this project is, or how many times less memory it
takes: above 1 is better. An aim is what the project set itself for that ratio, a floor and, after
the arrow, what it would like to reach. Those that were set as shares stand here as their inverses:
a step's memory at most 0.5 of PEFT's, better 0.3: 2 -> 3.3; LoRA at most 0.72 of full fine-tuning's
time, better 0.68: 1.39 -> 1.47, and 0.6 of its memory: 1.67. Aims for sampling 32 conversations are
for prompts of 64 tokens alone.
"""

import argparse
import json
import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
MODELS = {"tiny": "tiny, 3.7M", "slice": "4 layers of Qwen3-0.6B"}
TRAINING = {  # (work, way) -> what it is
    ("rectangles", "peft"): "training step, 8 x 256 tokens, loss on half",
    ("ragged", "peft"): "training step, a group of 16 on a prompt of 300 tokens, ragged",
    ("ragged", "peft, lean"): "the same, logits for sampled tokens alone",
}
AIMS = {  # of the ratio, by (model, work); of sampling by (.., conversations, prompt, player) too
    ("tiny", "rectangles"): (1.05, 1.15),
    ("slice", "rectangles"): (1.1, 1.3),
    ("tiny", "ragged"): (1.8, 3),
    ("slice", "ragged"): (1.8, 3),
    ("tiny", "rectangles", 32, 64, "generate + PEFT"): (1.5, 2.5),
    ("slice", "rectangles", 32, 64, "generate + PEFT"): (1.3, 1.8),
    ("tiny", "rectangles", 32, 64, "vLLM"): ("", 1.5),
    ("slice", "rectangles", 32, 64, "vLLM"): ("", 1),
    ("tiny", "group", 128, 512, "generate + PEFT"): (3, 5),
    ("tiny", "turns", 32, 64, "generate + PEFT"): (3, 5),
    ("tiny", "adapter", 32, 64, "engine, no adapter"): (0.9, 0.95),
    ("slice", "adapter", 32, 64, "engine, no adapter"): (0.9, 0.95),
    "RL step": (2, 4),
    "RL step's memory": (2,),
    "memory": (2, 3.3),
    "full": (1.39, 1.47),
    "full's memory": (1.67,),
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


def line(
    model: str, what: str, threads: int, rates: tuple, ratio: float, aim=None, notes=""
) -> str:
    """rates: ours, the other's, their unit; an arrow after it says that less is better."""
    ours, theirs, unit = rates
    each = " | ".join(f"{x:,.2f}" if x < 10 else f"{x:,.0f}" for x in (ours, theirs))
    wanted = " -> ".join(f"{value:g}" for value in aim or () if value != "")
    return (
        f"| {what} | {MODELS[model]} | {threads} | {each} | {unit} | **{ratio:.2f}** | {wanted} | "
        f"{notes} |"
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
    kept = results("memory")
    lines = []
    for who in ("peft", "peft, lean") if kept else ():
        ours, theirs = (kept[way]["growth"] / 1e9 for way in ("ours", who))
        what = "memory that its loss and backward add: " + who.replace("peft", "PEFT")
        aim = AIMS["memory"] if who == "peft" else None
        rates, notes = (ours, theirs, "GB ↓"), f"{ours / theirs:.2f} of it"
        lines.append(line("slice", what, kept["threads"], rates, theirs / ours, aim, notes))
    return lines


def full() -> list[str]:
    kept = results("full")
    if not kept:
        return []
    step = "memory of a LoRA step, 8 x 256 tokens"
    lines = []
    for what, key, way, aim in (
        (step, "peak", "full, no reference", AIMS["full's memory"]),
        (step, "peak", "full", None),
        ("its optimizer's state", "optimizer", "full", None),
    ):
        ours, theirs = (kept[name][key] / 1e6 for name in ("lora", way))
        rates, notes, what = (ours, theirs, "MB ↓"), f"{ours / theirs:.2g} of it", f"{what}: {way}"
        lines.append(line("slice", what, kept["threads"], rates, theirs / ours, aim, notes))
    return lines


def sampling() -> list[str]:
    lines = []
    for row in results("sampling"):
        model, kind, engine = row["model"], row["kind"], row["players"]["engine"]
        for player, numbers in row["players"].items():
            # With an adapter generate is as in rectangles; what that costs it stands in the file.
            if player == "engine" or (kind == "adapter" and player != "engine, no adapter"):
                continue
            notes = ""
            if "decode_step_ms" in engine:
                notes = (
                    f"prefill {engine['prefill_gemm_share']:.0%}, decode "
                    f"{engine['decode_gemm_share']:.0%} of the GEMM rate"
                )
            ours = numbers.get("engine_tokens_per_second", engine["tokens_per_second"])
            rates = ours, numbers["tokens_per_second"], "tok/s"
            aim = AIMS.get((model, kind, row["conversations"], row["prompt_tokens"], player))
            what = f"{SAMPLING[kind].format(**row)}: {player}"
            ratio = numbers["engine_is_faster_by"]
            lines.append(line(model, what, row["threads"], rates, ratio, aim, notes))
    return lines


def rl_step() -> list[str]:
    """In each way of splitting the pass; aims are for TRL as it comes."""
    lines = []
    for row in results("rl_step"):
        for trl in row["faster"]:
            ours, theirs = (row["players"][who] for who in (trl.replace("TRL", "ours"), trl))
            rates = ours["seconds_a_step"], theirs["seconds_a_step"], "s ↓"
            what = f"RL step, 8 x 8 completions of 64 tokens: {trl}"
            aims = (AIMS["RL step"], AIMS["RL step's memory"]) if trl == "TRL" else (None, None)
            lines.append(line("tiny", what, row["threads"], rates, row["faster"][trl], aims[0]))
            rates = *(its["peak_memory"] / 1e9 for its in (ours, theirs)), "GB ↓"
            what, ratio = f"its peak memory: {trl}", row["less_memory"][trl]
            lines.append(line("tiny", what, row["threads"], rates, ratio, aims[1]))
    return lines


def rl_parts() -> list[str]:
    rows = [row for row in results("rl_step") if row["threads"] == 1]
    told = []
    for who, its in rows[0]["players"].items() if rows else ():
        whole = sum(its["parts"].values())
        shares = {name: seconds / whole for name, seconds in its["parts"].items()}
        told += [f"{who}: " + ", ".join(f"{n} {x:.0%}" for n, x in shares.items() if x >= 0.01)]
    what = "Where the wall time of an RL step goes, parts of 1% or more of what was timed"
    return ["", f"{what}: {'; '.join(told)}."] if told else []


def rates() -> list[str]:
    """What the shares are of."""
    alone = [row for row in (*results("training"), *results("sampling")) if row["threads"] == 1]
    if not alone:
        return []
    gemm = [row.get("gemm_gflops", row.get("gemm_gflop_per_second")) for row in alone]
    copy = [row.get("copy_gb_s", row.get("copy_gb_per_second")) for row in alone]
    return [
        "",
        f"The machine beside them, one thread: {min(gemm):.0f} to {max(gemm):.0f} GFLOP/s in GEMM "
        f"(2048^3, fp32), {min(copy):.0f} to {max(copy):.0f} GB/s in copying (256 MB, read and "
        "written).",
    ]


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
        "Exponents with which a step's time and its memory grow, in brackets those of its "
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


def speed() -> list[str]:
    return [
        "| work: beside whom | model | threads | this project | the other | unit | ratio | aim | "
        "of this project, and the other |",
        "|---" * 9 + "|",
        *training(),
        *memory(),
        *full(),
        *sampling(),
        *rl_step(),
        *rates(),
        *rl_parts(),
        *savings(),
        *growth(),
    ]


def table(heads: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    """Of cells; nothing where there are no rows."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:]] if rows else []


def overlap() -> list[str]:
    names = {
        "embedded": "embedded, two threads, in turns",
        "served": "through a server, one thread each, in turns",
        "overlapped": "through a server, one thread each, overlapped",
    }
    ways, rows = dict(results("overlap")).get("ways", {}), []
    for way, its in ways.items():
        ratio = ""
        if way != "overlapped" and its["ratio"]:
            ratio = "{:.2f} ({:.2f} to {:.2f})".format(its["ratio"], *its["ratio_range"])
        after = "{:.3f} ({:.3f} to {:.3f})".format(its["eval_after"], *its["eval_after_range"])
        seconds, before = f"{its['seconds_a_step']:.2f}", f"{its['eval_before']:.3f}"
        rows.append((names[way], seconds, ratio, before, after))
    seeds = max((its["seeds"] for its in ways.values()), default=0)
    job = f"the default job on two cores, {seeds} seeds (`python benchmarks/overlap.py`)"
    times = "times the overlapped one's (range)"
    return table((job, "s a step", times, "held out before", "after, mean (range)"), rows)


def modes() -> list[str]:
    rows = [
        (
            row["mode"],
            f"{row['trained']:,}",
            f"{row['seconds_a_step']:.2f}",
            f"{row['peak_memory_bytes'] / 1e9:.2f}",
            f"`{row['command'].replace('{mixture}', 'runs/tiny-qwen3-moe')}`",
        )
        for row in dict(results("modes")).get("rows", [])
    ]
    return table(("mode", "trained", "s a step", "peak, GB", "command"), rows)


def adapters() -> list[str]:
    kept = results("adapters")
    if not kept:
        return []
    counts = [n for n in kept["tiny"]["adapters"] if n != "1"]
    lines = [
        f"| 64 decode rows, rank 8 (`python benchmarks/adapters.py`) | {counts[0]} adapters | "
        + " | ".join(counts[1:])
        + " |",
        "|---" * (1 + len(counts)) + "|",
    ]
    for model, name in (
        ("tiny", "tiny checkpoint: time over that of one adapter"),
        ("qwen3_06b", "Qwen3-0.6B's shapes (2 layers, no head): over one adapter"),
    ):
        rows, one = kept[model]["adapters"], kept[model]["adapters"]["1"]["together_ms"]
        for what, told in (
            (name, lambda r, one=one: f"{r['over_one'] - 1:+.0%}, {r['together_ms'] - one:.1f} ms"),
            ("against one adapter after another", lambda r: f"{r['faster']:.1f} x"),
            (
                "what small batches alone allow: the base's passes; its matrix products",
                lambda r: f"{r['bound_passes']:.1f} x; {r['bound_products']:.1f} x",
            ),
        ):
            lines.append(f"| {what} | " + " | ".join(told(rows[n]) for n in counts) + " |")
    return lines


PARTS = {"speed": speed, "overlap": overlap, "modes": modes, "adapters": adapters}


def renewed(text: str) -> str:
    """The README with its parts made anew; ValueError if it lacks the marks of one."""
    for name, make in PARTS.items():
        marks = re.compile(rf"(?<=<!-- {name} -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)
        old = marks.findall(text)
        if len(old) != 1:
            raise ValueError(f"README.md has {len(old)} parts <!-- {name} -->, and not one")
        new = "".join(f"{line}\n" for line in make()) or old[0]
        text = marks.sub(lambda _, new=new: new, text)
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    README.write_text(renewed(README.read_text()))


if __name__ == "__main__":
    main()
