"""The fused norms in fp64, written anew from their formulas: what every backend is compared with.

Inputs are rounded to the dtype under test first; everything after that is fp64, gradients by autograd. Nothing here
calls `normscale.ops`, so that a fault of the eager definition shows too.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

Op = Literal["norm", "add_norm", "residual_norm"]


@dataclass
class Problem:
    """One call of an operation and the gradients that come back to it.

    `alpha` and `residual` are None for `norm`, `alpha` for `add_norm`. `dz` is the gradient of `add_norm`'s stream.
    `wants` names the inputs whose gradients are asked for; None is all there are.
    """

    op: Op
    kind: Literal["layernorm", "rmsnorm"]
    x: Tensor
    dy: Tensor | None
    residual: Tensor | None = None
    alpha: Tensor | None = None
    gamma: Tensor | None = None
    bias: Tensor | None = None
    dz: Tensor | None = None
    eps: float = 1e-5
    zero_centred: bool = False
    dropout: float = 0.0
    seed: int = 0
    wants: tuple[str, ...] | None = None
    inputs: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        names = ("x", "residual", "alpha", "gamma", "bias")
        there = tuple(name for name in names if getattr(self, name) is not None)
        self.inputs = there if self.wants is None else tuple(name for name in there if name in self.wants)


def stream_dtype(problem: Problem) -> torch.dtype:
    """Returns the dtype of y and z: the wider one of x and residual."""
    return problem.x.dtype if problem.residual is None else torch.promote_types(problem.x.dtype, problem.residual.dtype)


def reference(problem: Problem, *, round_z: bool = False, z: Tensor | None = None) -> dict[str, Tensor]:
    """Returns y, z and the gradients dx, dresidual, dalpha, dgamma, dbias of `problem`, in fp64.

    `add_norm` normalises the stream it hands on, which is rounded to its dtype: `z` as it was handed on, if given.
    With `round_z` the sum of `residual_norm` is rounded to fp32: at a mean of 1e5 standard deviations that rounding
    alone is 4e-6 of the result, and a kernel computing in fp32 is compared with what it was given.
    """
    handed_on = z
    names = ("x", "residual", "alpha", "gamma", "bias")
    leaves = {n: v.detach().double() for n in names if (v := getattr(problem, n)) is not None}
    for name in problem.inputs:
        leaves[name].requires_grad_()
    z = leaves["x"]
    if problem.dropout:
        kept = torch.from_numpy(kept_elements(problem.seed, tuple(z.shape), problem.dropout))
        z = torch.where(kept, z / (1 - problem.dropout), 0.0)
    if "residual" in leaves:
        z = leaves.get("alpha", torch.ones((), dtype=torch.float64)) * leaves["residual"] + z
    exact = z.detach()
    if problem.op == "add_norm":
        rounded = exact.to(stream_dtype(problem)) if handed_on is None else handed_on
        z = z + (rounded.double() - exact)
    elif round_z:
        z = z + (exact.float().double() - exact)
    y = _normalised(z, problem)
    if "gamma" in leaves:
        y = y * (leaves["gamma"] + (1 if problem.zero_centred else 0))
    if "bias" in leaves:
        y = y + leaves["bias"]
    results = {"y": y.detach(), "z": exact}
    ends = [(o, g.double()) for o, g in ((y, problem.dy), (z, problem.dz)) if g is not None and o.requires_grad]
    if problem.inputs and ends:
        outs, grads = zip(*ends, strict=True)
        found = torch.autograd.grad(outs, [leaves[n] for n in problem.inputs], grads, allow_unused=True)
        results |= {f"d{n}": g for n, g in zip(problem.inputs, found, strict=True) if g is not None}
    return results


def _normalised(z: Tensor, problem: Problem) -> Tensor:
    if problem.kind == "layernorm":
        z = z - z.mean(-1, keepdim=True)
    return z / (z.square().mean(-1, keepdim=True) + problem.eps).sqrt()


Words = np.ndarray[Any, np.dtype[Any]]


def philox(seed: int, counters: Words) -> list[Words]:
    """Returns the four words of Philox4x32-10 at 64-bit counters, under a 64-bit key.

    Reference: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3", Section 3.3.
    """
    mask, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c = [counters & mask, counters >> half, np.zeros_like(counters), np.zeros_like(counters)]
    key = [np.uint64(seed & 0xFFFFFFFF), np.uint64((seed >> 32) & 0xFFFFFFFF)]
    for _ in range(10):
        first, second = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [(second >> half) ^ c[1] ^ key[0], second & mask, (first >> half) ^ c[3] ^ key[1], first & mask]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return c


def kept_elements(seed: int, shape: tuple[int, ...], p: float) -> Words:
    """Returns which elements of [..., D] dropout keeps: those whose word is at least p * 2^32.

    Word j of counter row * ceil(D / 4) + i belongs to column 4 i + j.
    """
    rows, width = int(np.prod(shape[:-1])), shape[-1]
    groups = -(-width // 4)
    words = np.stack(philox(seed, np.arange(rows * groups, dtype=np.uint64)), -1)
    return (words.reshape(rows, 4 * groups)[:, :width] >= round(p * 2**32)).reshape(shape)
