"""Makes assets/tiny-qwen3, a Qwen3 of 0.9M parameters, and assets/tiny-wiki, its corpus.

    python assets/make_tiny_qwen3.py              all of it: about 10 minutes on two cores
    python assets/make_tiny_qwen3.py --data-only  the wiki's files and the tokenizer: seconds

The base model is trained from scratch on demonstrations of searching the wiki (wiki.py), of which
three in five have a flaw. What it has to learn is the form, and to copy: names go from question to
query, from search results to page ids, from sections to answers. Two things make that fit in 0.9M
parameters and minutes:

- The tokenizer knows the miniature's language by heart. Each half of a name is one token, the same
  in prose, in quotes and in titles, and so is every fixed part of a tool call; other text falls
  back to characters and bytes. It is a unigram model with equal scores: fewest tokens win.
- Copying comes first. Sound demonstrations alone until whole held-out episodes come out exactly
  (teacher-forced exact match is printed; token accuracy says little), then the demonstrator's
  habits with all their flaws.

The optimizer is Muon for the matrices and AdamW for the rest. Held-out names never occur here.
"""

import asyncio
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
import tyro
from safetensors.torch import save_file
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RawTokenizer

ASSETS = Path(__file__).resolve().parent
sys.path[:0] = [str(ASSETS.parent), str(ASSETS)]

import wiki  # noqa: E402

from chat import load_tokenizer  # noqa: E402
from environments import tool_schema  # noqa: E402
from environments.wiki_search import SYSTEM_PROMPT, WikiSearch  # noqa: E402
from model import Qwen3, Qwen3Config  # noqa: E402
from rollout import TorchEngine, run_groups  # noqa: E402

MODEL, WIKI = ASSETS / "tiny-qwen3", ASSETS / "tiny-wiki"
RESULTS = 3  # pages that a search shows
EVAL_PER_KIND = 22  # held-out questions of each of the twelve kinds
DEMONSTRATIONS_PER_KIND = 20  # for supervised fine-tuning

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Qwen3's own template with a shorter preamble: the tools' signatures instead of their JSON schemas.
CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}
        {{- '\\n' + tool.function.name }}
        {{- '(' + tool.function.parameters.properties | join(', ') + ')' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if not loop.first or message.content %}
                {{- '\\n' }}
            {%- endif %}
            {%- set call = tool_call.function or tool_call %}
            {{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
            {{- call.arguments if call.arguments is string else call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


# --- the wiki's files -----------------------------------------------------------------------------


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def questions(world: wiki.World, prefix: str, rng: random.Random, per_kind=None) -> list[dict]:
    """Question rows of a world, shuffled: all of them, or `per_kind` of each kind."""
    rows = []
    for kind in wiki.KINDS:
        subjects = world.subjects(kind)
        for subject in rng.sample(subjects, per_kind or len(subjects)):
            question = kind.wording.format(subject)
            rows.append({"question": question, "answer": world.answer(subject, kind)})
    rng.shuffle(rows)
    return [{"id": f"{prefix}-{i}"} | row for i, row in enumerate(rows)]


def write_wiki(seed: int) -> None:
    """Two worlds that share no name: one to train on, one to be evaluated in; questions about each,
    and sound demonstrations of how to answer some of them."""
    rng = random.Random(f"wiki {seed}")
    train, held_out = wiki.make_world(rng, False), wiki.make_world(rng, True)
    WIKI.mkdir(parents=True, exist_ok=True)
    write_rows(WIKI / "corpus.jsonl", train.corpus_rows())
    write_rows(WIKI / "eval_corpus.jsonl", held_out.corpus_rows())
    write_rows(WIKI / "questions.jsonl", questions(train, "train", rng))
    write_rows(WIKI / "eval_questions.jsonl", questions(held_out, "eval", rng, EVAL_PER_KIND))
    write_rows(WIKI / "demonstrations.jsonl", sound_rows(train, rng, DEMONSTRATIONS_PER_KIND))
    write_rows(WIKI / "eval_demonstrations.jsonl", sound_rows(held_out, rng, 4))


def sound_rows(world: wiki.World, rng: random.Random, per_kind: int) -> list[dict]:
    """Sound demonstrations in chat format, shuffled, `per_kind` of each kind: what sft.py reads."""
    environment, rows = world_environment(world), []
    tools = [tool_schema(tool) for tool in environment.tools]
    for kind in wiki.KINDS:
        for subject in rng.sample(world.subjects(kind), per_kind):
            turns = wiki.demonstrate(world, subject, kind, "sound", rng)
            messages = wiki.as_messages(environment, kind.wording.format(subject), turns)
            rows.append({"messages": messages, "tools": tools})
    rng.shuffle(rows)
    return rows


# --- tokenizer ------------------------------------------------------------------------------------


def pieces() -> list[str]:
    """Everything that is one token, but for the special tokens and the bytes."""
    words = ["\n"] + [chr(code) for code in range(32, 127)]
    for heads, tails in wiki.NAMES.values():
        words += heads + [head.lower() for head in heads]
        words += [f" {tail}" for tail in tails] + [f"_{tail.lower()}" for tail in tails]
    for name, (_, _, sentence) in wiki.SECTIONS.items():
        words += [name, f":{name.lower().replace(' ', '_')}", f"# {name}\n", sentence[2:-3]]
    for kind in wiki.KINDS:
        words += [part for part in kind.wording.split("{}") if part]
    words += [wiki.GAVE_UP, SYSTEM_PROMPT, "\n\n# Tools\n\n"]
    for name, argument in wiki.TOOLS.items():
        words += [f"{name}({argument})\n", f"{name}({argument})"]
        words.append(wiki.tool_call(name, argument, "").removesuffix('"}}\n</tool_call>'))
    words += ['"}}\n</tool_call>', '"}\n</tool_call>']
    words += ['[{"page_id": "', '", "title": "', '"}, {"page_id": "', '"}]']
    words += ['[{"section_id": "', '", "section_name": "', '"}, {"section_id": "']
    words += ["system\n", "user\n", "assistant\n"]
    words += ["user\n<tool_response>\n", "\n</tool_response>", "error: malformed tool call: "]
    return list(dict.fromkeys(words))


def write_tokenizer() -> int:
    """Writes the tokenizer and the template; returns the vocabulary's size, a multiple of 64."""
    vocabulary = [("<unk>", 0.0)] + [(piece, -1.0) for piece in pieces()]
    vocabulary += [(f"<0x{byte:02X}>", -2.0) for byte in range(256)]
    unused = -(len(vocabulary) + len(SPECIAL_TOKENS)) % 64
    vocabulary += [(f"<|unused_{i}|>", -100.0) for i in range(unused)]
    tokenizer = RawTokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    special = [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    tokenizer.add_special_tokens(special)
    MODEL.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(MODEL / "tokenizer.json"))
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
    (MODEL / "tokenizer_config.json").write_text(json.dumps(facts, indent=2) + "\n")
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    generation = {"eos_token_id": ends, "pad_token_id": ends[1]}
    (MODEL / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    return tokenizer.get_vocab_size()


# --- demonstrations as tokens ---------------------------------------------------------------------


def world_environment(world: wiki.World) -> WikiSearch:
    """The real environment over a world, so that a demonstration sees what an agent will see."""
    with tempfile.TemporaryDirectory() as directory:
        corpus, rows = Path(directory) / "corpus.jsonl", Path(directory) / "questions.jsonl"
        write_rows(corpus, world.corpus_rows())
        write_rows(rows, [{"question": "?", "answer": "?"}])
        return WikiSearch(corpus, rows, results=RESULTS)


def demonstrations(tokenizer, count: int, held_out: bool, sound_only: bool, rng: random.Random):
    """(token ids, mask of the assistant's tokens) of `count` demonstrations in fresh worlds."""
    made = []
    while len(made) < count:
        world = wiki.make_world(rng, held_out)
        environment = world_environment(world)
        for _ in range(min(500, count - len(made))):
            kind = rng.choice(wiki.KINDS)
            behaviour = "sound" if sound_only else wiki.choose_behaviour(kind, rng)
            subject = rng.choice(world.subjects(kind))
            turns = wiki.demonstrate(world, subject, kind, behaviour, rng)
            made.append(wiki.as_tokens(tokenizer, environment, kind.wording.format(subject), turns))
    return made


def pad(demos: list[tuple[list[int], list[int]]]) -> tuple[torch.Tensor, torch.Tensor]:
    """ids (S, T) and weights (S, T-1): 1 on what the assistant says, OTHER_WEIGHT on the rest."""
    length = max(len(ids) for ids, _ in demos)
    ids_S_T = torch.zeros(len(demos), length, dtype=torch.long)
    weights = torch.zeros(len(demos), length)
    for row, (ids, mask) in enumerate(demos):
        ids_S_T[row, : len(ids)] = torch.tensor(ids)
        weights[row, : len(ids)] = torch.tensor(mask).float().clamp(min=OTHER_WEIGHT)
    return ids_S_T, weights[:, 1:]


# --- training from scratch ------------------------------------------------------------------------

OTHER_WEIGHT = 0.3  # predicting the tools' answers teaches copying too
BATCH, MICRO_BATCH = 32, 16
MUON_RATE, ADAM_RATE, WARMUP = 0.02, 3e-3, 50


def initialise(model: Qwen3) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 0.05 if name.endswith("embed_tokens.weight") else 0.02
            torch.nn.init.normal_(parameter, std=std)


def exact_match(model: Qwen3, demos) -> float:
    """Share of demonstrations whose every assistant token is the model's first choice."""
    with torch.no_grad():
        ids, weights = pad(demos)
        right = model(ids)[:, :-1].argmax(-1) == ids[:, 1:]
        return (right | (weights < 1)).all(1).float().mean().item()


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps (Jordan et al., 2024).

    torch.optim.Muon does the same in bfloat16, which most CPUs emulate: three times slower here.
    """

    def __init__(self, parameters, lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                buffer = state.setdefault("momentum", torch.zeros_like(parameter))
                buffer.lerp_(parameter.grad, 1 - group["momentum"])
                update = parameter.grad.lerp(buffer, group["momentum"])
                rows, columns = update.shape
                wide = update if rows <= columns else update.T
                wide = wide / (wide.norm() + 1e-7)
                for _ in range(5):
                    square = wide @ wide.T
                    inner = -4.7750 * square + 2.0315 * square @ square
                    wide = 3.4445 * wide + inner @ wide
                update = wide if rows <= columns else wide.T
                parameter.add_(update, alpha=-group["lr"] * max(1, rows / columns) ** 0.5)


def train(model: Qwen3, phases: list[tuple[int, list]], held_out: list, rng: random.Random) -> None:
    """phases: (steps, demonstrations) in order; the learning rate falls to zero over all."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    optimizers = [
        Muon(matrices, lr=MUON_RATE),
        torch.optim.AdamW(others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    rates = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    schedule = [demos for steps, demos in phases for _ in range(steps)]
    start = time.monotonic()
    for step, demos in enumerate(schedule):
        factor = min(1.0, (step + 1) / WARMUP) * (1 - step / len(schedule))
        for optimizer, rate in zip(optimizers, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate * factor
            optimizer.zero_grad()
        batch = sorted(rng.sample(demos, BATCH), key=lambda demo: len(demo[0]))
        parts = [pad(batch[i : i + MICRO_BATCH]) for i in range(0, BATCH, MICRO_BATCH)]
        total_weight = sum(weights.sum() for _, weights in parts)
        total_loss = 0.0
        for ids, weights in parts:
            wanted = weights > 0
            hidden = model.model(ids[:, :-1], torch.arange(ids.shape[1] - 1))[wanted]
            logits, targets = F.linear(hidden, model.head_weight), ids[:, 1:][wanted]
            losses = F.cross_entropy(logits, targets, reduction="none")
            loss = (losses * weights[wanted]).sum() / total_weight
            loss.backward()
            total_loss += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        if (step + 1) % 50 == 0:
            exact = exact_match(model, held_out)
            print(
                f"step {step + 1:4}/{len(schedule)}  loss {total_loss:.4f}  "
                f"held-out sound episodes exact {exact:.3f}  {time.monotonic() - start:.0f} s",
                flush=True,
            )


def held_out_world() -> WikiSearch:
    names = ("eval_corpus.jsonl", "questions.jsonl", "eval_questions.jsonl")
    return WikiSearch(*(WIKI / name for name in names), results=RESULTS)


def play_held_out(model: Qwen3, tokenizer, environment: WikiSearch, temperature: float) -> list:
    """One episode of each held-out question by the base model."""
    engine = TorchEngine(model, slots=128, max_length=512)
    episodes = run_groups(
        engine,
        tokenizer,
        environment,
        environment.eval,
        1,
        adapter=None,
        version=0,
        temperature=temperature,
        seed=0,
        step=0,
        max_new_tokens=64,
    )
    return [group[0] for group in asyncio.run(episodes)]


def report(model: Qwen3) -> None:
    """Accuracy on the held-out questions, greedy and sampled, and what the failures look like."""
    environment, tokenizer = held_out_world(), load_tokenizer(MODEL)
    for temperature in (0.0, 1.0):
        episodes = play_held_out(model, tokenizer, environment, temperature)
        accuracy = sum(e.reward for e in episodes) / len(episodes)
        outcomes = Counter(environment.outcome(e.task, e.messages, e.reward) for e in episodes)
        lengths = sum(len(e.token_ids) for e in episodes) / len(episodes)
        print(f"temperature {temperature}: accuracy {accuracy:.3f}, {dict(outcomes.most_common())}")
        turns = sum(e.turns for e in episodes) / len(episodes)
        print(f"  {lengths:.0f} tokens and {turns:.1f} turns an episode")


def main(seed: int = 0, copy_steps: int = 300, habit_steps: int = 250, data_only: bool = False):
    """Writes assets/tiny-wiki and assets/tiny-qwen3.

    Args:
        seed: of the worlds, the demonstrations and the initial weights.
        copy_steps: steps on sound demonstrations alone.
        habit_steps: steps on the demonstrator's habits after that.
        data_only: stop before training; the checkpoint stays as it is.
    """
    write_wiki(seed)
    vocabulary = write_tokenizer()
    if data_only:
        return
    facts = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "torch_dtype": "float32",
    }
    tokenizer = load_tokenizer(MODEL)
    rng = random.Random(f"demonstrations {seed}")
    sound = demonstrations(tokenizer, 20_000, False, True, rng)
    habits = demonstrations(tokenizer, 20_000, False, False, rng)
    held_out = demonstrations(tokenizer, 256, True, True, rng)
    mean = sum(len(ids) for ids, _ in habits) / len(habits)
    print(f"{len(sound) + len(habits)} demonstrations, {mean:.0f} tokens on average")

    torch.manual_seed(seed)
    model = Qwen3(Qwen3Config.from_dict(facts))
    initialise(model)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, vocabulary {vocabulary}")
    train(model, [(copy_steps, sound), (habit_steps, habits)], held_out, rng)
    (MODEL / "config.json").write_text(json.dumps(facts, indent=2) + "\n")
    tensors = {name: p.detach().contiguous() for name, p in model.state_dict().items()}
    save_file(tensors, MODEL / "model.safetensors", metadata={"format": "pt"})
    report(model)


if __name__ == "__main__":
    tyro.cli(main)
