"""The output head: log-probabilities without logits, their entropy and gradient; or logits alone.

    logprob = log softmax(W h / temperature)[target]
    d logprob / d h = (W[target] - softmax(W h / temperature) W) / temperature

This gradient does not depend on what comes from above, so the forward pass computes it and keeps
(N, D) numbers. Logits for all tokens (V = 151,936 in Qwen3: 1.2 GB for 2,048 tokens in fp32) never
exist: they are made a block at a time, of some rows and some entries of the vocabulary, the shapes
in which a matrix product is fast. From block to block the softmax of a row goes on as in flash
attention (arXiv 2205.14135), shrinking what it has when a larger logit comes along:

    W (V, D)    block 1 ──► logits ──► top, sums of e = exp(logit - top), e logit, e W
                block 2 ──► logits ──► larger top? all sums times exp(old top - new); add
                ...                    at the end: log Z = top + log sum e, and all else from it

With a frozen head the backward pass is one product. A head that is trained (full fine-tuning) has a
gradient of its own, a sum over tokens in which each one counts by what comes from above,

    d loss / d W = sum_n  upstream_n (onehot(target_n) - softmax_n) h_n / temperature

so its backward pass makes the logits again, block by block.

A sampler needs all logits, of a few rows: few_logits.

Axes: N tokens that carry loss, D hidden, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


class HeadLogprobs(torch.autograd.Function):
    """hidden (N, D), weight (V, D), targets (N,), temperature -> logprobs, entropy (N,) in fp32.

    logprobs carry gradient, entropy none.
    """

    BLOCK = (1024, 8192)  # rows, entries of the vocabulary: 32 MB of fp32 logits at a time

    @staticmethod
    def blocks(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float):
        """For one block of the vocabulary after the other: where it is (a slice), its logits (rows,
        entries), and where among these the rows' targets are (two indices)."""
        for start in range(0, len(weight), HeadLogprobs.BLOCK[1]):
            block = slice(start, min(start + HeadLogprobs.BLOCK[1], len(weight)))
            rows = ((targets >= start) & (targets < block.stop)).nonzero().squeeze(1)
            logits = F.linear(hidden, weight[block]).float().div_(temperature)
            yield block, logits, (rows, targets[rows] - start)

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float):
        logprobs = hidden.new_empty(len(hidden), dtype=torch.float32)
        entropy, normalizers = torch.empty_like(logprobs), torch.empty_like(logprobs)
        gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), HeadLogprobs.BLOCK[0]):
            part = slice(start, start + HeadLogprobs.BLOCK[0])
            h, y = hidden[part], targets[part]
            top = torch.full_like(logprobs[part], float("-inf"))
            # Sums over the vocabulary of e = exp(logit - top), of e * logit, and of e * W.
            Z, e_logit = torch.zeros_like(top), torch.zeros_like(top)
            e_W = torch.zeros_like(h, dtype=torch.float32)
            for block, logits, targets_here in HeadLogprobs.blocks(h, weight, y, temperature):
                rows, _ = targets_here
                logprobs[part][rows] = logits[targets_here]
                before, top = top, torch.maximum(top, logits.amax(-1))
                shrink = (before - top).exp()
                e = logits.sub(top[:, None]).exp_()
                Z = Z * shrink + e.sum(-1)
                e_logit = e_logit * shrink + torch.einsum("nv,nv->n", e, logits)
                if gradient is not None:
                    e_W.mul_(shrink[:, None]).add_(e.to(weight.dtype) @ weight[block])
            normalizers[part] = normalizer = top + Z.log()
            logprobs[part] -= normalizer
            entropy[part] = normalizer - e_logit / Z  # H = -sum p log p = log Z - sum p * logit
            if gradient is not None:
                gradient[part] = (weight[y] - e_W / Z[:, None]) / temperature
        trained = (hidden, weight, targets, normalizers) if ctx.needs_input_grad[1] else ()
        ctx.save_for_backward(gradient, *trained)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, upstream: Tensor, _):
        gradient, *trained = ctx.saved_tensors
        if gradient is not None:
            gradient = upstream[:, None].to(gradient.dtype) * gradient
        if not trained:
            return gradient, None, None, None
        hidden, weight, targets, normalizers = trained
        upstream = upstream / ctx.temperature
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), HeadLogprobs.BLOCK[0]):
            part = slice(start, start + HeadLogprobs.BLOCK[0])
            blocks = HeadLogprobs.blocks(hidden[part], weight, targets[part], ctx.temperature)
            for block, logits, targets_here in blocks:
                rows, _ = targets_here
                # From here on, in place: d loss / d logits * temperature.
                logits.sub_(normalizers[part, None]).exp_().mul_(-upstream[part, None])
                logits[targets_here] += upstream[part][rows]
                weight_gradient[block].addmm_(logits.T, hidden[part].float())
        return gradient, weight_gradient.to(weight.dtype), None, None


FEW_BLOCK = 512  # entries of the vocabulary


def few_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (S, D) of a few rows, weight (V, D) -> logits (S, V), without gradient.

    On a CPU a product of few rows with a large matrix spends its time on bringing that matrix into
    the order in which the kernel reads it. In blocks that stay in the cache 8 to 128 rows of
    Qwen3's vocabulary take 0.7 of the time (benchmarks/sampling_parts.py), to the same bits.
    """
    if weight.device.type != "cpu" or len(weight) < 16 * FEW_BLOCK:
        return F.linear(hidden, weight)
    logits = hidden.new_empty(len(hidden), len(weight))
    for start in range(0, len(weight), FEW_BLOCK):
        block = slice(start, start + FEW_BLOCK)
        torch.mm(hidden, weight[block].T, out=logits[:, block])
    return logits
