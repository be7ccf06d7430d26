"""Runs a `Problem` through `normscale.ops` and measures its distance from fp64.

The bounds are those of pure output rounding with a small margin: 3e-7 in fp32 (1e-6 for sums over rows), 2.4e-4 in
fp16, and in bf16 1.9e-3 on a GPU, 4e-3 in Triton's interpreter, whose conversion to bf16 truncates.
"""

import os
from typing import Any

import torch
from torch import Tensor

from normscale.ops.add_norm import add_norm
from normscale.ops.norm import norm
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from tests.ops.oracle import Problem, reference, stream_dtype

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda"

ROUNDING = {torch.float16: 2.4e-4, torch.bfloat16: 4e-3 if INTERPRETED else 1.9e-3, torch.float32: 3e-7}
SUMMED = {**ROUNDING, torch.float32: 1e-6}
OVER_ROWS = ("dgamma", "dbias", "dalpha")


def run(problem: Problem, backend: str = "triton", **more: Any) -> dict[str, Tensor]:
    """Returns y, z and the gradients as the package computes them, on the CPU."""
    names = ("x", "residual", "alpha", "gamma", "bias")
    leaves: dict[str, Any] = {n: None if (v := getattr(problem, n)) is None else _leaf(v) for n in names}
    for name in problem.inputs:
        leaves[name].requires_grad_()
    out = call(problem, leaves, backend, **more)
    outs = dict(zip(("z", "y"), out, strict=True)) if problem.op == "add_norm" else {"y": out}
    results = {name: value.detach().cpu() for name, value in outs.items()}
    given = [(n, g) for n, g in (("y", problem.dy), ("z", problem.dz)) if g is not None and n in outs]
    ends = [(outs[n], _leaf(g)) for n, g in given if outs[n].requires_grad]
    if problem.inputs and ends:
        found = torch.autograd.grad(
            [end for end, _ in ends], [leaves[n] for n in problem.inputs], [g for _, g in ends], allow_unused=True
        )
        results |= {f"d{n}": g.cpu() for n, g in zip(problem.inputs, found, strict=True) if g is not None}
    return results


def call(problem: Problem, leaves: dict[str, Any], backend: str, **more: Any) -> Any:
    """Calls the operation a problem names; returns what it returns."""
    spec = NormSpec(problem.kind, problem.eps, problem.zero_centred)
    affine = (leaves["gamma"], leaves["bias"], spec)
    if problem.op == "norm":
        return norm(leaves["x"], *affine, backend=backend, **more)
    if problem.op == "add_norm":
        return add_norm(leaves["residual"], leaves["x"], *affine, backend=backend, **more)
    if problem.dropout:
        more |= {"dropout": problem.dropout, "seed": torch.tensor(problem.seed, device=DEVICE)}
    return residual_norm(leaves["residual"], leaves["x"], leaves["alpha"], *affine, backend=backend, **more)


def _leaf(value: Tensor) -> Tensor:
    """Returns the tensor on the device under test, detached, with the strides it has."""
    if DEVICE == "cpu":
        return value.detach()
    base = value.detach()
    extent = 1 + sum((n - 1) * s for n, s in zip(base.shape, base.stride(), strict=True)) if base.numel() else 0
    storage = base.as_strided((base.storage_offset() + extent,), (1,), 0).to(DEVICE)
    return storage.as_strided(base.shape, base.stride(), base.storage_offset())


def distance(got: Tensor, want: Tensor, scale: float = 0.0) -> float:
    """Returns the Frobenius norm of the difference, relative to that of `want` or to `scale` where that is larger."""
    size = max(float(want.norm()), scale)
    difference = float((got.double() - want).norm())
    return difference / size if size else difference


def scales(problem: Problem, want: dict[str, Tensor]) -> dict[str, float]:
    """Returns the size of a gradient before it cancels, where it cancels by construction.

    LayerNorm's dx is exactly zero for D = 1 and almost so for D = 2, RMSNorm's for D = 1; a scalar alpha's gradient is
    a sum of both signs, and so is the weights' where there are few. Errors are measured against the terms that cancel.
    """
    found: dict[str, float] = {}
    z = want["z"]
    centred = z - z.mean(-1, keepdim=True) if problem.kind == "layernorm" else z
    rstd = (centred.square().mean(-1, keepdim=True) + problem.eps).rsqrt()
    if problem.dy is not None and z.numel():
        gain = 1.0 if problem.gamma is None else problem.gamma.double() + (1 if problem.zero_centred else 0)
        terms = rstd * gain * problem.dy.double()
        alpha = 1.0 if problem.alpha is None else problem.alpha.double()
        if z.shape[-1] < 8:
            found["dx"], found["dresidual"] = float(terms.norm()), float((terms * alpha).norm())
            found["dgamma"] = float((problem.dy.double() * centred * rstd).norm())
            found["dbias"] = float(problem.dy.double().norm())
        if problem.residual is not None:
            found["dalpha"] = float((terms * problem.residual.double()).norm())
    return found


def check(
    problem: Problem, *, backend: str = "triton", round_z: bool = False, than_eager: bool = True, **more: Any
) -> dict[str, Tensor]:
    """Asserts that values and every gradient are within rounding of fp64; returns them.

    In half precision they must also be no further from fp64 than the eager definition is (its rounding in
    the interpreter's bf16 apart).
    """
    got = run(problem, backend, **more)
    want = reference(problem, round_z=round_z, z=got.get("z"))
    missing = {n for n in want if n != "z"} - set(got)
    assert not missing, f"no {missing}"
    half = any(value.dtype in (torch.float16, torch.bfloat16) for value in got.values())
    eager = run(problem, "eager", **more) if than_eager and half and backend != "eager" else {}
    scale = scales(problem, want)
    for name, value in got.items():
        if name not in want:  # no gradient arrives at what it depends on
            assert not value.any(), f"{name} is not zero"
            continue
        bounds = SUMMED if name in OVER_ROWS else ROUNDING
        assert value.shape == want[name].shape, f"{name}: shape {tuple(value.shape)}"
        # fp16 has no relative rounding below its least normal number.
        least = 2 * torch.finfo(value.dtype).tiny * value.numel() ** 0.5
        floor = max(scale.get(name, 0.0), least)
        found = distance(value, want[name], floor)
        bound = bounds[value.dtype]
        if value.dtype is not torch.float32:
            # Few rounded numbers are not an average: one alone may be off by twice. Seen: 2.5 % over, of 17 in fp16.
            bound *= 1 + 1 / max(1, value.numel()) ** 0.5
        assert found <= bound, f"{name}: {found:.2e} from fp64, bound {bound:.1e}"
        if name in eager and value.dtype in (torch.float16, torch.bfloat16):
            if INTERPRETED and value.dtype is torch.bfloat16:
                continue
            best = distance(eager[name], want[name], floor)
            # Two fp32 results that differ in their last bit are rounded apart now and then: 0.001 % at most was seen.
            assert found <= 1.001 * best + 1e-9, f"{name}: {found:.2e} from fp64, eager only {best:.2e}"
    for name in ("y", "z"):
        assert name not in got or got[name].dtype is stream_dtype(problem), f"{name} is {got[name].dtype}"
    for name in problem.inputs:
        assert got[f"d{name}"].dtype is getattr(problem, name).dtype
    return got
