"""What each correction rescues when sampler and trainer are made to differ on purpose.

    python -m experiments corrections                            all of it
    python experiments/corrections.py --sampler noise --loss tis   one run, with train.py's flags

    the policy pi ──► greedy answers to held-out questions: what was learned
        │
    another, mu ────► the episodes that it learns from, with mu's own logprobs, as servers send them
                      exact   mu is pi
                      noise   its logits plus independent normal noise, drawn anew for every token
                      nf4     its base in 4 bits (quant.py) with the same adapter
                      stale   the version of DELAY steps before

Samplers stand in for what goes wrong in practice: quantised or differently rounded servers, and
versions that lag behind. train.py runs as it is; only the name TorchEngine in it means another
class, and its alarms, which would rightly stop such a run, are put off.

Beside the runs the bias of each loss, without sampling: all sequences of a small vocabulary are
enumerated, so that the expected gradient under mu stands beside the exact gradient of the reward.

Axes: S sequences, T tokens, V vocabulary.
"""

import itertools
import math
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch  # noqa: E402
from matplotlib import pyplot  # noqa: E402
from torch import Tensor  # noqa: E402

import train  # noqa: E402
import update  # noqa: E402
from experiments.runs import Run, run_all  # noqa: E402
from experiments.seeds import above, decide, interval, told  # noqa: E402
from grpo import LOSSES  # noqa: E402
from model import Qwen3  # noqa: E402
from quant import quantize_base  # noqa: E402
from rollout import TorchEngine  # noqa: E402

MINUTES = 25
NOISE, DELAY = 1.5, 4  # standard deviation of a logit; steps
SEEDS = (0, 1, 2)
FEWER = ("reinforce", "grpo", "tis", "icepop")  # losses beside the noisy sampler
SMALL = "--steps 16 --groups 8 --group-size 8".split()
KLS = (0.01, 0.03, 0.1, 0.3, 0.7)  # nats a token, of the enumeration
DRAWS = 20


# --- samplers that differ -------------------------------------------------------------------------


class Noisy(TorchEngine):
    """Draws from the policy's logits plus noise, but for greedy answers."""

    def advance(self, logits: Tensor, streams: list) -> None:
        sampled = torch.tensor([float(stream.request.temperature > 0) for stream in streams])
        super().advance(logits + NOISE * sampled[:, None] * torch.randn_like(logits), streams)


class FourBit(TorchEngine):
    """Draws from a 4-bit copy of the base with the same adapters; answers greedily from its own."""

    def __init__(self, model: Qwen3, slots: int, max_length: int):
        super().__init__(model, slots, max_length)
        base = Qwen3.from_pretrained(train.Config.model)
        quantize_base(base)
        self.copy = TorchEngine(base, slots, max_length)

    async def generate(self, request):
        engine = self.copy if request.temperature > 0 else super()
        return await engine.generate(request)

    def add_adapter(self, name, directory) -> None:
        super().add_adapter(name, directory)
        self.copy.add_adapter(name, directory)

    def remove_adapter(self, name) -> None:
        super().remove_adapter(name)
        self.copy.remove_adapter(name)

    def drop_cache(self, adapter=None) -> None:
        super().drop_cache(adapter)
        self.copy.drop_cache(adapter)


class Stale(TorchEngine):
    """Draws with the version of DELAY steps before; answers greedily with the newest."""

    async def generate(self, request):
        if request.temperature > 0:
            request = replace(request, adapter=self.adapters[-1 - DELAY :][0])
        return await super().generate(request)

    def remove_adapter(self, name) -> None:
        """Versions stay: a small model's run of a few steps has room for all of them."""


SAMPLERS = {"exact": TorchEngine, "noise": Noisy, "nf4": FourBit, "stale": Stale}


def run_with(sampler: str, arguments: list[str]) -> None:
    """train.py, sampling with another engine and not stopped by it."""
    train.TorchEngine = SAMPLERS[sampler]
    update.MISMATCH_BOUND["float32"] = math.inf
    update.MISMATCH_ALARM["float32"] = ("mismatch_max", math.inf)
    train.main(arguments)


def command(sampler: str, loss: str, seed: int, size: list[str]) -> tuple[str, ...]:
    choice = ("--sampler", sampler, "--loss", loss, "--seed", str(seed))
    return ("experiments/corrections.py", *choice, *size)


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


# --- the runs -------------------------------------------------------------------------------------


def measure(quick: bool, jobs: int) -> dict:
    """Runs of every loss with the noisy sampler, of fewer with the others, and the enumeration."""
    size, seeds, fewer = SMALL, SEEDS, FEWER
    if quick:
        size, seeds = "--steps 2 --groups 2 --group-size 4 --eval-size 8".split(), SEEDS[:1]
        fewer = ("reinforce", "tis")
    cases = [("noise", loss) for loss in (fewer if quick else LOSSES)]
    cases += [("exact", "reinforce")]
    cases += [(sampler, loss) for sampler in ("nf4", "stale") for loss in fewer]
    cases = [(*case, seed) for case in cases for seed in seeds]
    runs = run_all([command(*case, size) for case in cases], jobs)
    return {
        "experiment": "corrections",
        "noise": NOISE,
        "delay": DELAY,
        "size": size,
        "seeds": list(seeds),
        "rows": [row_of(*case, run) for case, run in zip(cases, runs, strict=True)],
        "biases": enumerate_biases(4 if quick else DRAWS),
    }


def row_of(sampler: str, loss: str, seed: int, run: Run) -> dict:
    def mean(key: str) -> float:
        return sum(row[key] for row in run.rows) / len(run.rows)

    return {
        "sampler": sampler,
        "loss": loss,
        "seed": seed,
        "held_out": run.held_out,
        "k3": mean("mismatch_kl"),
        "effective_sample_size": mean("effective_sample_size"),
        "clipped": mean("clipped"),
        "rewards": [round(row["reward"], 4) for row in run.rows],
        "error": run.error,
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
    k3 = [row["k3"] for row in result["rows"] if row["sampler"] == "noise"]
    criteria = {f"1 unclipped importance sampling exact, {largest:.0e}": largest <= 1e-6}
    criteria[f"2 mean k3 of the noisy runs {sum(k3) / len(k3):.3f}, at least .05"] = (
        True if sum(k3) / len(k3) >= 0.05 else None  # the rest would be about something else
    )
    for number, loss in ((3, "tis"), (4, "icepop")):
        found = gains(result, "noise", loss)
        criteria[f"{number} {loss} above no correction by {told(found)}"] = rescued(found)
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
            for key in ("k3", "effective_sample_size", "clipped")
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
    return "\n".join(lines)


def draw(result: dict) -> pyplot.Figure:
    """Left: the enumerated bias against the KL. Right: what every run learned."""
    figure, axes = pyplot.subplots(1, 2, figsize=(11.5, 5), layout="constrained")
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
    axes[1].set(xlabel="held-out reward, greedy; a dot a seed, a bar their mean")
    axes[1].set(title="after RL on another sampler's episodes")
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    flag, sampler, *arguments = sys.argv[1:]
    if flag != "--sampler" or sampler not in SAMPLERS:
        raise SystemExit(
            f"corrections.py: first --sampler {{{','.join(SAMPLERS)}}}, then train.py's"
        )
    run_with(sampler, arguments)
