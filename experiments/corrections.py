"""What each correction rescues when sampler and trainer are made to differ on purpose.

    python -m experiments corrections                                           all of it
    python experiments/corrections.py --sampler noise --loss tis --output DIR   one case, all seeds

    the policy pi ──► its own answers to held-out questions: what was learned
        │
    another, mu ────► the episodes that it learns from, with mu's own logprobs, as servers send them
                      exact   mu is pi
                      noise   its logits plus independent normal noise, drawn anew for every token
                      nf4     its base in 4 bits (quant.py) with the same adapter
                      stale   the adapter of DELAY steps before

The samplers stand in for what goes wrong in practice: servers that are quantised or round otherwise
and versions that lag behind. The task is small, so that a run of thousands of episodes takes
seconds: a Qwen3 of 0.1M parameters answers four digits with the same ones reversed, after training
on demonstrations of which every digit is wrong with probability WRONG. Model, adapter, 4-bit base,
advantages and losses are this project's.

Beside the runs the bias of each loss, without sampling: all sequences of a small vocabulary are
enumerated, so that the expected gradient under mu stands beside the exact gradient of the reward.

Axes: P prompts, G samples a prompt, S sequences, T tokens, V vocabulary.
"""

import argparse
import copy
import itertools
import json
import math
import os
import sys
from collections import deque
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from torch import Tensor  # noqa: E402

from experiments.runs import RUNS, run_all  # noqa: E402
from experiments.seeds import NOTE, above, decide, interval, told  # noqa: E402
from grpo import LOSSES, group_advantages, mismatch_metrics, policy_loss  # noqa: E402
from lora import LoRAConfig, inject_lora, lora_parameters  # noqa: E402
from model import Qwen3, Qwen3Config  # noqa: E402
from quant import quantize_base  # noqa: E402

MINUTES = 12
SAMPLERS = ("exact", "noise", "nf4", "stale")
NOISE, DELAY = 0.8, 4  # standard deviation of a logit; steps
FEWER = ("reinforce", "tis")  # losses of the other samplers
SEEDS, STEPS, P, G, RATE = 3, 200, 8, 8, 3e-3
DIGITS, START, ANSWER = 4, 10, 11  # tokens: a digit is itself
HELD_OUT, WRONG = 1000, 0.23
KLS = (0.01, 0.03, 0.1, 0.3, 0.7)  # nats a token, of the enumeration
DRAWS = 20


# --- the task -------------------------------------------------------------------------------------


def questions() -> tuple[Tensor, Tensor]:
    """All (10^4, 2 + DIGITS) prompts in a fixed order: those to train on, those held out."""
    digits = torch.cartesian_prod(*[torch.arange(10)] * DIGITS)
    digits = digits[torch.randperm(len(digits), generator=torch.Generator().manual_seed(0))]
    ends = [torch.full((len(digits), 1), token) for token in (START, ANSWER)]
    prompts = torch.cat((ends[0], digits, ends[1]), 1)
    return prompts[HELD_OUT:], prompts[:HELD_OUT]


def answers(prompts: Tensor) -> Tensor:
    return prompts[:, 1 : 1 + DIGITS].flip(1)


def small_model() -> Qwen3:
    """Random weights; all in fp32."""
    model = Qwen3(
        Qwen3Config(
            vocab_size=12,
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=32,
            rope_theta=10_000.0,
            model_type="qwen3",
        )
    )
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
        else:
            torch.nn.init.ones_(parameter)
    return model


def make_base(steps: int) -> Qwen3:
    """The small model after demonstrations that are right three times in four, digit by digit."""
    model, generator = small_model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    train, _ = questions()
    for step in range(steps):
        prompts = train[torch.randint(len(train), (128,), generator=generator)]
        said = answers(prompts)
        wrong = torch.rand(said.shape, generator=generator) < WRONG
        said = torch.where(wrong, torch.randint(0, 10, said.shape, generator=generator), said)
        ids = torch.cat((prompts, said), 1)
        loss = -model.token_logprobs(ids, mask_of(ids))[0].sum() / said.numel()
        loss.backward()
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, 4 * (1 - step / steps))
        optimizer.step()
        optimizer.zero_grad()
    return model


def mask_of(ids: Tensor) -> Tensor:
    """(S, T-1): whether token t + 1 is of the answer."""
    return (torch.arange(1, ids.shape[1]) >= 2 + DIGITS).expand(len(ids), -1)


@torch.no_grad()
def sample(
    model: Qwen3, prompts: Tensor, generator: torch.Generator, noise: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Prompts with an answer each (S, T), and the logprobs (S, T-1) of what was drawn from."""
    ids, logprobs = prompts, torch.zeros(len(prompts), prompts.shape[1] - 1)
    for _ in range(DIGITS):
        logits = model(ids)[:, -1]
        if noise:
            logits = logits + noise * torch.randn(logits.shape, generator=generator)
        wide = torch.log_softmax(logits, -1)
        tokens = torch.multinomial(wide.exp(), 1, generator=generator)
        ids = torch.cat((ids, tokens), 1)
        logprobs = torch.cat((logprobs, wide.gather(1, tokens)), 1)
    return ids, logprobs


def rewards_of(ids: Tensor, prompts: Tensor) -> Tensor:
    return (ids[:, -DIGITS:] == answers(prompts)).all(1).float()


# --- a run ----------------------------------------------------------------------------------------


class Sampler:
    """What episodes are drawn from: a copy of the policy with its adapter, or nearly."""

    def __init__(self, kind: str, base: Qwen3):
        self.model = copy.deepcopy(base)
        if kind == "nf4":
            quantize_base(self.model)
        inject_lora(self.model, LoRAConfig())
        self.noise = NOISE if kind == "noise" else 0.0
        self.versions: deque = deque(maxlen=DELAY + 1 if kind == "stale" else 1)

    def publish(self, policy: Qwen3) -> None:
        """Takes the policy's adapter; draws with the oldest one that it keeps."""
        self.versions.append([p.detach().clone() for p in lora_parameters(policy).values()])
        for ours, its in zip(lora_parameters(self.model).values(), self.versions[0], strict=True):
            ours.data.copy_(its)


def run(kind: str, loss_kind: str, seed: int, steps: int, base: Qwen3) -> dict:
    """RL of a rank-8 adapter with another sampler; held_out: sampled from the policy itself."""
    torch.manual_seed(seed)
    policy, generator = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    inject_lora(policy, LoRAConfig())
    optimizer = torch.optim.Adam(lora_parameters(policy).values(), lr=RATE, betas=(0.9, 0.95))
    sampler, (train, held_out) = Sampler(kind, base), questions()
    seen = {key: [] for key in ("reward", "mismatch_kl", "effective_sample_size", "clipped")}
    for _ in range(steps):
        sampler.publish(policy)
        prompts = train[torch.randint(len(train), (P,), generator=generator)].repeat_interleave(
            G, 0
        )
        ids, sampler_logprobs = sample(sampler.model, prompts, generator, sampler.noise)
        rewards, mask = rewards_of(ids, prompts), mask_of(ids)
        advantages = group_advantages(rewards.view(P, G)).flatten()
        logprobs, _ = policy.token_logprobs(ids, mask)
        tokens = int(mask.sum())
        loss, counts = policy_loss(loss_kind, logprobs, sampler_logprobs, advantages, mask, tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lora_parameters(policy).values(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        metrics = mismatch_metrics(logprobs, sampler_logprobs, mask) | {
            "reward": rewards.mean().item(),
            "clipped": (counts["clipped_low"] + counts["clipped_high"]) / tokens,
        }
        for key, values in seen.items():
            values.append(metrics[key])
    answered, _ = sample(policy, held_out, torch.Generator().manual_seed(0))
    return {
        "sampler": kind,
        "loss": loss_kind,
        "seed": seed,
        "held_out": rewards_of(answered, held_out).mean().item(),
        **{key: fmean(seen[key]) for key in seen if key != "reward"},
        "reward": fmean(seen["reward"][-10:]),
    }


def base_file(quick: bool) -> Path:
    return RUNS / f"corrections-base{'-quick' if quick else ''}.pt"


def command(sampler: str, loss: str, quick: bool) -> tuple[str, ...]:
    """One case: a process, and in it all its seeds."""
    size = ("--steps", "3", "--seeds", "1") if quick else ("--steps", STEPS, "--seeds", SEEDS)
    file = os.path.relpath(base_file(quick), ROOT)
    return (
        "experiments/corrections.py",
        "--sampler",
        sampler,
        "--loss",
        loss,
        "--base",
        file,
        *size,
    )


def main() -> None:
    """The program that `measure` starts: a line a seed in metrics.jsonl."""
    parser = argparse.ArgumentParser("corrections.py")
    parser.add_argument("--sampler", choices=SAMPLERS, required=True)
    parser.add_argument("--loss", choices=LOSSES, required=True)
    parser.add_argument("--base", type=Path, required=True, help="weights of the small model")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    base = small_model()
    base.load_state_dict(torch.load(options.base))
    options.output.mkdir(parents=True)
    with (options.output / "metrics.jsonl").open("w") as file:
        for seed in range(options.seeds):
            row = run(options.sampler, options.loss, seed, options.steps, base)
            print(json.dumps(row), file=file, flush=True)
    (options.output / "summary.json").write_text(json.dumps({"seeds": options.seeds}))


# --- the bias, enumerated -------------------------------------------------------------------------


def policies(V: int, T: int, kl: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Logits (prefixes, V) of a policy and of a sampler whose KL from it is `kl` nats a token.

    A row for each of the 1 + V + ... + V^(T-1) prefixes. The sampler's logits are the policy's plus
    normal noise whose size is found by bisection.
    """
    rows = sum(V**t for t in range(T))
    policy, noise = (
        torch.randn(rows, V, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    low, high = 0.0, 50.0
    for _ in range(60):
        size = (low + high) / 2
        mu, pi = (torch.log_softmax(x, -1) for x in (policy + size * noise, policy))
        if (mu.exp() * (mu - pi)).sum(-1).mean() < kl:
            low = size
        else:
            high = size
    return policy, policy + low * noise


def sequence_logprobs(logits: Tensor, V: int, T: int) -> Tensor:
    """(V^T, T): the tokens' logprobs of every sequence, by the row of the prefix before each."""
    logprobs, sequences = torch.log_softmax(logits, -1), torch.cartesian_prod
    tokens = sequences(*[torch.arange(V)] * T).view(-1, T)
    prefix, first, columns = torch.zeros(len(tokens), dtype=torch.long), 0, []
    for t in range(T):
        columns.append(logprobs[first + prefix, tokens[:, t]])
        prefix, first = prefix * V + tokens[:, t], first + V**t
    return torch.stack(columns, 1)


def bias(kind: str, V: int, T: int, kl: float, seed: int) -> float:
    """|expected gradient of a loss under mu - gradient of the expected reward| / the latter's norm.

    kind: a loss of grpo.py with its defaults; "unclipped" is tis without a cap; "sequence" weighs
    every token with the ratio of the whole sequence.
    """
    generator = torch.Generator().manual_seed(seed)
    policy, sampler = policies(V, T, kl, generator)
    policy.requires_grad_(True)
    logprobs = sequence_logprobs(policy, V, T)
    sampler_logprobs = sequence_logprobs(sampler, V, T)
    rewards = torch.randint(0, 2, (V**T,), generator=generator).double()
    rewards[:2] = torch.tensor([0.0, 1.0])  # all equal, there would be no gradient to compare with
    pi, mu = (rows.detach().sum(1).exp() for rows in (logprobs, sampler_logprobs))
    advantages = (rewards - (mu * rewards).sum())[:, None].expand(-1, T)
    exact = torch.autograd.grad(
        (pi[:, None] * advantages * logprobs).sum(), policy, retain_graph=True
    )[0]
    if kind == "sequence":
        kind, advantages = "reinforce", advantages * (pi / mu)[:, None]
    settings = {"cap": math.inf} if kind == "unclipped" else {}
    loss_of = LOSSES["tis" if kind == "unclipped" else kind]
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    loss, _, _ = loss_of(logprobs, sampler_logprobs, advantages, mask, **settings)
    found = torch.autograd.grad(-(mu[:, None] * loss).sum(), policy)[0]
    return ((found - exact).norm() / exact.norm()).item()


def enumerate_biases(draws: int) -> list[dict]:
    """Mean over `draws` random policies, for one token of six and for three tokens of four."""
    rows = []
    for (V, T), kl in itertools.product(((6, 1), (4, 3)), KLS):
        for kind in (*LOSSES, "unclipped", "sequence"):
            found = [bias(kind, V, T, kl, seed) for seed in range(draws)]
            rows.append({"tokens": T, "kl": kl, "loss": kind, "bias": sum(found) / draws})
    return rows


# --- all of it ------------------------------------------------------------------------------------


def measure(quick: bool, jobs: int) -> dict:
    """Runs of every loss with the noisy sampler, of fewer with the others, and the enumeration."""
    file = base_file(quick)
    if not file.is_file():
        base = make_base(60 if quick else 400)
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(base.state_dict(), file)
    base = small_model()
    base.load_state_dict(torch.load(file))
    _, held_out = questions()
    answered, _ = sample(base, held_out, torch.Generator().manual_seed(0))
    cases = [("exact", "reinforce")]
    cases += [("noise", loss) for loss in (("reinforce", "tis", "icepop") if quick else LOSSES)]
    cases += [(sampler, loss) for sampler in ("nf4", "stale") for loss in FEWER]
    runs = run_all([command(*case, quick) for case in cases], jobs)
    return {
        "experiment": "corrections",
        "parameters": sum(parameter.numel() for parameter in base.parameters()),
        "before": rewards_of(answered, held_out).mean().item(),
        "rows": [row for run in runs for row in run.rows],
        "biases": enumerate_biases(4 if quick else DRAWS),
    }


def of(result: dict, sampler: str, loss: str, key: str = "held_out") -> list[float]:
    """A number of each seed, in order."""
    rows = [r for r in result["rows"] if (r["sampler"], r["loss"]) == (sampler, loss)]
    return [row[key] for row in sorted(rows, key=lambda row: row["seed"])]


def gains(result: dict, sampler: str, loss: str) -> list[float]:
    """Held-out reward above that of no correction (reinforce), seed by seed."""
    pairs = zip(of(result, sampler, loss), of(result, sampler, "reinforce"), strict=True)
    return [ours - plain for ours, plain in pairs]


def rescued(values: list[float]) -> bool | None:
    """The criterion of a gain: at least .05 in the mean, and its interval above 0."""
    middle, half = interval(values)
    if middle >= 0.05 and above(values, 0):
        return True
    return False if middle + half < 0.05 else None


def verdict(result: dict) -> tuple[str, str]:
    largest = max(
        row["bias"]
        for row in result["biases"]
        if row["tokens"] == 1 and row["loss"] in ("unclipped", "sequence")
    )
    k3 = [row["mismatch_kl"] for row in result["rows"] if row["sampler"] == "noise"]
    criteria = {f"1 unclipped importance sampling exact, {largest:.0e}": largest <= 1e-6}
    large = sum(k3) / len(k3) >= 0.05 or None  # if not, the rest would be about something else
    criteria[f"2 mean k3 of the noisy runs {sum(k3) / len(k3):.3f}, at least .05"] = large
    for number, loss in ((3, "tis"), (4, "icepop")):
        found = gains(result, "noise", loss)
        criteria[f"{number} {loss} above no correction by {told(found)}"] = large and rescued(found)
    return decide(criteria)


def cases_of(result: dict) -> list[tuple[str, str]]:
    return list(dict.fromkeys((row["sampler"], row["loss"]) for row in result["rows"]))


def table(result: dict) -> str:
    """A line a sampler and loss, then the enumeration."""
    lines = [
        "| sampler | loss | k3, nats a token | effective sample size | bound at work | held out | "
        "above no correction |",
        "|---|---|---|---|---|---|---|",
    ]
    for sampler, loss in cases_of(result):
        k3, size, clipped = (
            interval(of(result, sampler, loss, key))[0]
            for key in ("mismatch_kl", "effective_sample_size", "clipped")
        )
        gain = "" if loss == "reinforce" else told(gains(result, sampler, loss))
        held_out = told(of(result, sampler, loss))
        lines.append(
            f"| {sampler} | {loss} | {k3:.2g} | {size:.2f} | {clipped:.1%} | {held_out} | {gain} |"
        )
    lines += [
        "",
        "| bias of the expected gradient | " + " | ".join(f"KL {kl:g}" for kl in KLS) + " |",
        "|---|" + "---|" * len(KLS),
    ]
    for tokens, kind in dict.fromkeys((row["tokens"], row["loss"]) for row in result["biases"]):
        if (tokens, kind) == (1, "sequence"):
            continue  # of one token it is the same as unclipped
        found = [
            row["bias"]
            for row in result["biases"]
            if (row["tokens"], row["loss"]) == (tokens, kind)
        ]
        cells = [f"{value:.0e}" if value < 1e-6 else f"{value:.1%}" for value in found]
        words = f"{kind}, {tokens} token{'s' * (tokens > 1)}"
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", NOTE])


def draw(result: dict) -> Figure:
    """Left: the enumerated bias against the KL. Right: what every run learned."""
    figure = Figure(figsize=(11.5, 5), layout="constrained")
    axes = figure.subplots(1, 2)
    for kind in (*LOSSES, "unclipped"):
        rows = [row for row in result["biases"] if (row["tokens"], row["loss"]) == (1, kind)]
        label = {"reinforce": "reinforce (no correction)", "unclipped": "unclipped: 0"}
        axes[0].plot(
            [row["kl"] for row in rows],
            [row["bias"] for row in rows],
            marker="o",
            linestyle="--" if kind in ("reinforce", "unclipped") else "-",
            label=label.get(kind, kind),
        )
    axes[0].set(xscale="log", xlabel="KL of the sampler from the policy, nats a token")
    axes[0].set(ylabel="bias of the gradient / its norm", title="one token, enumerated")
    axes[0].set_ylim(-0.03, 1.3)
    axes[0].legend(fontsize=8, ncols=2, loc="upper left")
    colours = dict(zip(SAMPLERS, ("tab:gray", "tab:red", "tab:blue", "tab:green"), strict=True))
    cases = sorted(cases_of(result), key=lambda case: list(SAMPLERS).index(case[0]))
    for place, (sampler, loss) in enumerate(reversed(cases)):
        found = of(result, sampler, loss)
        axes[1].plot(found, [place] * len(found), "o", color=colours[sampler], alpha=0.5)
        axes[1].plot(sum(found) / len(found), place, "|", color=colours[sampler], ms=18, mew=3)
    axes[1].set_yticks(range(len(cases)), [f"{loss}, {sampler}" for sampler, loss in cases[::-1]])
    axes[1].set(xlabel="held-out reward; a dot a seed, a bar their mean")
    axes[1].set(title="after RL on another sampler's episodes")
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    main()
