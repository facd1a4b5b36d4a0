"""QLoRA's frozen base: the weight of a linear layer in 4 bits (Dettmers et al. 2023, 2305.14314).

    W, blocks of 64 ───► one scale a block, absmax = max |w|     w / absmax ─► nearest of 16 levels
                                  │
    scales, blocks of 256 ◄───────┘  minus their mean            s / absmax ─► nearest of 256 levels

    bits a parameter:   4  +  8 / 64  +  32 / (64 * 256)  =  4.127          (16 in bfloat16)

The 16 levels (NF4, "NormalFloat") are quantiles of the normal distribution, since weights are about
normal: each is the nearest to about as many weights. Packed storage is all that is kept; a use (a
forward pass, a backward pass, a merge) makes the weight anew and forgets it. Trainer and embedded
sampler use one module, so one set of dequantised weights, bit for bit; adapters stay fp32 beside
it. Codes and dequantised weights of whole blocks, and so of every Qwen3, are those of bitsandbytes
(tests/test_quant.py, -m peers), which PEFT and vLLM load: an adapter trained here meets the very
same base there.

An adapter trained on this base belongs to this base: serve it beside the NF4 base (bitsandbytes,
nf4 with double quantization), or merge it into the *dequantised* weights (merge_lora does) and
serve those. On the unquantised base, or merged and quantised again, it is another policy: on the
default job the rewards are as good, but single logprobs are nats away, so nothing that samples for
RL may do so. Measured by

    python benchmarks/quant.py policy RUNS       KL of each way to deploy; also: memory, speed

Left out on purpose: a fused kernel (a 4-bit base saves memory here, never time), paged optimizers,
quantised embeddings, heads, norms and experts, and the peak of loading the checkpoint itself.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

BLOCK, SCALE_BLOCK = 64, 256
SKIPPED = ("lm_head",)  # it is often the embedding, and its logits are the policy itself


# --- the two data types ---------------------------------------------------------------------------


def normal_float_levels() -> Tensor:
    """(16,) fp32, ascending: the levels of NF4, from -1 to 1 with an exact zero.

    Seven quantiles of the normal distribution below zero and eight above, evenly spaced in
    probability between 1/2 and `outer`, divided by the largest (QLoRA, section 3). A symmetric set
    would have no zero or waste a code on a second one.
    """
    # 1 - (1/32 + 1/30) / 2, cut to seven digits as in the authors' code, and in fp32 as there: the
    # levels shall be theirs to the last bit.
    outer = 0.9677083
    halves = (torch.linspace(outer, 0.5, count + 1)[:-1].double() for count in (7, 8))
    negative, positive = (torch.special.ndtri(half).float() for half in halves)
    levels = torch.cat((-negative, torch.zeros(1), positive)).sort().values
    return levels / levels[-1]


def dynamic_levels() -> Tensor:
    """(256,) fp32, ascending: the 8-bit type of the scales (Dettmers 2016, arXiv 1511.04561).

    Of each sign, 2^i values evenly spaced in the decade that ends at 10^(i-6), i = 0..6: fine near
    zero, where scales minus their mean are, and coarse at the ends. Zero and one complete it.
    """
    levels = [torch.tensor([0.0, 1.0])]
    for i in range(7):
        edges = torch.linspace(0.1, 1, 2**i + 1)
        decade = 10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2
        levels += [decade, -decade]
    return torch.cat(levels).sort().values


@functools.cache
def tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """NF4 levels (16,), 8-bit levels (256,), and the NF4 pair that each packed byte stands for.

    A pair of fp32 numbers is kept as one int64, (256,): looking up 8 bytes at once is three times
    as fast as looking up two floats.
    """
    levels = normal_float_levels()
    byte = torch.arange(256)
    pairs = torch.stack((levels[byte >> 4], levels[byte & 15]), dim=1)
    whole = pairs.view(torch.int64).squeeze(1)
    return levels.to(device), dynamic_levels().to(device), whole.to(device)


# --- packing --------------------------------------------------------------------------------------


def nearest(x: Tensor, levels: Tensor) -> Tensor:
    """uint8 index of the level nearest to each x."""
    return torch.bucketize(x, (levels[:-1] + levels[1:]) / 2, out_int32=True).to(torch.uint8)


def in_blocks(x: Tensor, size: int, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Codes (blocks, size) and scales (blocks,) of a flat fp32 tensor, zeros after its end."""
    x = F.pad(x, (0, -len(x) % size)).view(-1, size)
    absmax = x.abs().amax(dim=1)
    # A block of zeros has no scale to divide by; its codes are those of zero.
    return nearest(x * (1 / absmax.clamp(min=1e-38))[:, None], levels), absmax


def quantize(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packs a matrix: codes (n/2,) uint8, scale_codes (n/64,) uint8, scale_absmax (n/64/256,) fp32
    and scale_mean () fp32, of its n numbers row by row, every division rounded up.

    Two codes a byte, the first in the upper half. ValueError for numbers that are not finite.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("a weight that is not finite cannot be quantised")
    levels, scale_levels, _ = tables(weight.device)
    codes, scales = in_blocks(weight.detach().flatten().float(), BLOCK, levels)
    codes = codes.view(-1, 2)
    scale_mean = scales.mean()
    scale_codes, scale_absmax = in_blocks(scales - scale_mean, SCALE_BLOCK, scale_levels)
    scale_codes = scale_codes.flatten()[: len(scales)].clone()
    return codes[:, 0] << 4 | codes[:, 1], scale_codes, scale_absmax, scale_mean


def dequantize(
    codes: Tensor, scale_codes: Tensor, scale_absmax: Tensor, scale_mean: Tensor
) -> Tensor:
    """The flat fp32 numbers that `quantize` packed, up to a whole number of blocks."""
    _, scale_levels, pairs = tables(codes.device)
    scales = scale_levels.index_select(0, scale_codes.int())
    scales *= scale_absmax.repeat_interleave(SCALE_BLOCK)[: len(scales)]
    scales += scale_mean
    values = pairs.index_select(0, codes.int()).view(torch.float32).view(-1, BLOCK)
    return values.mul_(scales[:, None]).flatten()


# --- the layer ------------------------------------------------------------------------------------


class QuantizedLinear(nn.Linear):
    """A frozen linear layer that holds its weight packed; to everybody else, an nn.Linear.

    `weight` (out, in) is made anew at each reading, in the dtype that the layer had. Its shape is
    out_features and in_features, its place that of `codes`, without making it. The bias, if there
    is one, stays as it was. TypeError for a layer that was cast: cast first, then quantise.
    """

    def __init__(self, linear: nn.Linear):
        nn.Module.__init__(self)  # nn.Linear's own would allocate the weight
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.dtype = linear.weight.dtype
        names = ("codes", "scale_codes", "scale_absmax", "scale_mean")
        for name, tensor in zip(names, quantize(linear.weight), strict=True):
            setattr(self, name, Parameter(tensor, requires_grad=False))
        self.bias = linear.bias
        if self.bias is not None:
            self.bias.requires_grad_(False)

    @property
    def weight(self) -> Tensor:
        if self.scale_mean.dtype != torch.float32:
            raise TypeError(
                f"a packed layer was cast to {self.scale_mean.dtype}: cast before packing"
            )
        packed = (self.codes, self.scale_codes, self.scale_absmax, self.scale_mean)
        flat = dequantize(*(parameter.detach() for parameter in packed))
        size = self.out_features * self.in_features
        return flat[:size].view(self.out_features, self.in_features).to(self.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return FrozenProduct.apply(x, self)


class FrozenProduct(torch.autograd.Function):
    """x W^T + b, and its gradient in x, g W: W is dequantised for each and kept for neither.

    Left to autograd, F.linear would keep every layer's W from the forward pass to the backward
    pass, and nothing would have been saved.
    """

    @staticmethod
    def forward(ctx, x: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return F.linear(x, layer.weight, layer.bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, upstream: Tensor):
        return upstream @ ctx.layer.weight, None


def quantize_base(model: nn.Module) -> list[str]:
    """Replaces every linear layer but the output head by its 4-bit form; returns their names.

    Embedding, head and norms stay in their dtype. Call it before inject_lora. Raises ValueError if
    the model has no linear layer left to pack, holds stacked matrices (experts), which would
    silently stay as large as they are, or has a weight that is not finite.
    """
    stacked = [name for name, parameter in model.named_parameters() if parameter.dim() > 2]
    if stacked:
        raise ValueError(f"{stacked[0]}: only linear layers are quantised, not stacked experts")
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and not isinstance(module, QuantizedLinear)
        and name.rpartition(".")[2] not in SKIPPED
    ]
    if not names:
        raise ValueError("no linear layer to quantise; a base is quantised once")
    for name in names:
        parent, child = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        try:
            setattr(parent, child, QuantizedLinear(getattr(parent, child)))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    return names
