"""From tensors to kernel calls. A `Call` can be launched, or compiled ahead of time for a target without a GPU.

Triton is imported when a call is built, never before.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from normscale.ops.philox import keep_scale, threshold
from normscale.ops.spec import Kind, NormSpec
from normscale.ops.tiling import (
    WIDEST_ALPHA,
    Demand,
    Tiling,
    backward_tiling,
    forward_tiling,
    is_folded,
    is_scaled_after,
    is_split,
    weights_tiling,
)

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
}


@dataclass(frozen=True)
class Call:
    """One launch of one kernel: its arguments by name, its grid and its warps."""

    kernel: Any
    arguments: dict[str, Any]
    grid: tuple[int, ...]
    num_warps: int
    registers: int | None = None

    def launch(self) -> None:
        """Runs the kernel on the device that holds its tensors; a grid with nothing in it is not launched."""
        if prod(self.grid) == 0:
            return
        with torch.cuda.device_of(self.anchor()):  # type: ignore[no-untyped-call]
            self.kernel[self.grid](**self.arguments, **self.options(64 if torch.version.hip else 32))

    def anchor(self) -> Tensor:
        """Returns a tensor on the device of the call."""
        return next(value for value in self.arguments.values() if isinstance(value, Tensor))

    def source(self, target: Any) -> tuple[Any, dict[str, int]]:
        """Returns what `triton.compile` takes as source and as options, to compile what `launch` would on `target`.

        Tensors without memory (meta, fake) count as aligned to 16 bytes.
        """
        from triton.compiler import ASTSource

        signature, constants, attributes = {}, {}, {}
        for i, parameter in enumerate(self.kernel.params):
            value = self.arguments[parameter.name]
            kind, divisible = _described(value, parameter.is_constexpr, not parameter.do_not_specialize)
            signature[parameter.name] = kind
            if kind == "constexpr":
                constants[(i,)] = value
            elif divisible:
                attributes[(i,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes), self.options(target.warp_size)

    def options(self, warp_size: int) -> dict[str, int]:
        """Returns the compiler's options; what a thread holds does not depend on the threads of a warp."""
        options = {"num_warps": max(1, self.num_warps * 32 // warp_size), "num_stages": 1}
        if self.registers is not None and warp_size == 32:  # AMD's backend has no such option
            options["maxnreg"] = self.registers
        return options


def _described(value: Any, constant: bool, specialised: bool) -> tuple[str, bool]:
    """Returns Triton's name for the type of an argument, and whether it is a multiple of 16, as a launch finds them."""
    if constant or value is None or (specialised and isinstance(value, int) and value == 1):
        return "constexpr", False
    if isinstance(value, Tensor):
        return _POINTERS[value.dtype], value.is_meta or _address(value) % 16 == 0
    if isinstance(value, int):
        return ("i32" if -(2**31) <= value < 2**31 else "i64"), specialised and value % 16 == 0
    return "fp32", False


def _address(x: Tensor) -> int:
    try:
        return x.data_ptr()
    except RuntimeError:  # a fake tensor has none
        return 0


def as_rows(x: Tensor) -> Tensor:
    """Returns `x` as a matrix of rows whose neighbours are neighbours in memory.

    Rows at one distance are taken as they lie, padded ones and slices of columns too. Anything else is copied, a whole
    pass: columns with a stride, and leading dimensions that are not one stride. Among the latter is QK-norm's
    [B, H, T, K] out of the product of q, k and v, which lies at three distances; at two in the order of memory,
    [B, T, H, K], in which results and gradients would have to be laid out as well.

    Shape: x [..., D]; result [M, D] with stride 1 in D.
    """
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _strides(**tensors: Tensor | None) -> dict[str, Any]:
    """Returns DENSE and the row strides by name: 0 for all where rows follow each other, for the kernel knows D."""
    dense = all(x is None or x.shape[0] <= 1 or x.stride(0) == x.shape[1] for x in tensors.values())
    strides = {f"{name}_row_stride": 0 if dense or x is None else x.stride(0) for name, x in tensors.items()}
    return {"DENSE": dense, **strides}


@dataclass(frozen=True)
class Inputs:
    """What forward and backward pass share. Shape: x, residual [M, D] (see `as_rows`); alpha 0-d or [D]; seed 0-d."""

    x: Tensor
    residual: Tensor | None
    alpha: Tensor | None
    gamma: Tensor | None
    seed: Tensor | None
    dropout: float
    spec: NormSpec

    def constants(self, tiling: Tiling) -> dict[str, Any]:
        return {
            "n_rows": self.x.shape[0],
            "N": self.x.shape[1],
            "BLOCK": tiling.block,
            "ROWS": tiling.rows,
            "LAYERNORM": self.spec.kind == "layernorm",
            "ALPHA_VECTOR": _is_vector(self.alpha),
            "DROP_BELOW": threshold(self.dropout),
            "KEEP_SCALE": keep_scale(self.dropout),
        }

    def pointers(self) -> dict[str, Tensor | None]:
        seed = self.seed if self.dropout else None
        return {"x_ptr": self.x, "residual_ptr": self.residual, "alpha_ptr": self.alpha, "seed_ptr": seed}


def forward_call(
    inputs: Inputs,
    bias: Tensor | None,
    y: Tensor,
    z: Tensor | None,
    moments: Tensor,
    z_partials: Tensor | None,
    y_partials: Tensor | None,
) -> Call:
    """Returns the forward call; see `kernels.forward`. What is None is not wanted.

    Shape: bias [D]; y, z [M, D] contiguous; moments [3, M] (RMSNorm [1, M]) fp32; partials [programs, 4] fp32.
    """
    from normscale.ops.kernels.forward import norm_forward

    measured = z_partials is not None or y_partials is not None
    demand = forward_demand(inputs.x, inputs.residual, inputs.alpha, inputs.spec.kind, z is not None, measured)
    n_rows, width = inputs.x.shape
    tiling = forward_tiling(n_rows, width, inputs.x.device, demand)
    for partials in (z_partials, y_partials):
        assert partials is None or partials.shape[0] == tiling.programs, "a program writes a row of its own"
    arguments = {
        **inputs.pointers(),
        "gamma_ptr": inputs.gamma,
        "bias_ptr": bias,
        "y_ptr": y,
        "z_ptr": z,
        "moments_ptr": moments,
        "z_partials_ptr": z_partials,
        "y_partials_ptr": y_partials,
        "eps": inputs.spec.eps,
        "ZERO_CENTRED": inputs.spec.zero_centred,
        **inputs.constants(tiling),
        **_strides(x=inputs.x, residual=inputs.residual),
    }
    return Call(norm_forward, arguments, (tiling.programs,), tiling.warps, tiling.registers)


@dataclass(frozen=True)
class Gradients:
    """What comes in: dy [M, D]; dhandle [M, D], to be multiplied by next_alpha; dz [M, D], the stream's own."""

    dy: Tensor
    dhandle: Tensor | None = None
    next_alpha: Tensor | None = None
    dz: Tensor | None = None


def forward_demand(
    x: Tensor, residual: Tensor | None, alpha: Tensor | None, kind: Kind, store_z: bool, measured: bool
) -> Demand:
    """Returns what decides the tiling of a forward pass; tensors of any shape."""
    return Demand(kind, _itemsize(x, residual), stream=store_z, vector=_is_vector(alpha), measured=measured)


@dataclass(frozen=True)
class Plan:
    """How a backward pass is run, decided once, before anything is allocated.

    `folded`: the handle's gradient is added to dy before the kernel, which then sees none. `weights`: the tiling of
    the weights' own kernel, where they have one. `apart`: dalpha is summed in PyTorch. `scaled_after`: what the kernel
    gives for the residual is still to be multiplied by alpha.
    """

    tiling: Tiling
    weights: Tiling | None
    folded: bool
    apart: bool
    scaled_after: bool

    @property
    def partial_rows(self) -> int:
        """The rows of the partial sums of gamma, bias and alpha."""
        return self.tiling.programs if self.weights is None else self.weights.programs


def backward_plan(
    inputs: Inputs, gradients: Gradients, *, measured: bool, want_affine: bool, want_alpha: bool = False
) -> Plan:
    """Returns the plan of a backward pass; tensors of any shape. `want_affine`: gradients of gamma or bias.

    A gradient of alpha above WIDEST_ALPHA is summed in PyTorch, from a dz formed anew (`apart`): passes over fp32
    copies of the activation, which only a trained alpha in so wide a model pays.
    """
    n_rows, width, device = prod(inputs.x.shape[:-1]), inputs.x.shape[-1], inputs.x.device
    apart = want_alpha and width > WIDEST_ALPHA
    demand = Demand(
        inputs.spec.kind,
        _itemsize(inputs.x, inputs.residual, gradients.dy, gradients.dhandle, gradients.dz),
        stream=gradients.dz is not None,
        vector=_is_vector(inputs.alpha) or _is_vector(gradients.next_alpha),
        dropout=inputs.dropout > 0,
        handle=gradients.dhandle is not None,
        measured=measured,
    )
    folded = is_folded(width, demand)
    if folded:
        demand = replace(demand, handle=False, vector=_is_vector(inputs.alpha))
    tiling = backward_tiling(n_rows, width, device, demand, want_affine or (want_alpha and not apart))
    weights = weights_tiling(n_rows, width, device) if is_split(width, demand) else None
    return Plan(tiling, weights, folded, apart, _is_vector(inputs.alpha) and is_scaled_after(width, demand))


def _itemsize(*tensors: Tensor | None) -> int:
    return max(x.element_size() for x in tensors if x is not None)


@dataclass(frozen=True)
class Wanted:
    """What goes out; None is not wanted. Shape: dx, dresidual [M, D]; the partial sums [programs, D] fp32 and
    `dz_partials` [programs, 4] fp32, a row a program (see `ops.tiling`).

    With `scale_residual` off the residual's gradient is dz itself (see `residual_norm.Handle`).
    """

    dx: Tensor | None = None
    dresidual: Tensor | None = None
    dgamma: Tensor | None = None
    dbias: Tensor | None = None
    dalpha: Tensor | None = None
    dz_partials: Tensor | None = None
    scale_residual: bool = True


def backward_calls(inputs: Inputs, gradients: Gradients, moments: Tensor, wanted: Wanted, plan: Plan) -> Iterator[Call]:
    """Yields one call, or two where the weights' gradients have their own kernel.

    `plan` is what `wanted` was allocated by; where it says so, the handle is folded into dy already.
    """
    from normscale.ops.kernels.backward import norm_backward

    tiling, split = plan.tiling, plan.weights is not None
    assert not (plan.folded and gradients.dhandle is not None), "the kernel has no room for this handle"
    assert wanted.dz_partials is None or wanted.dz_partials.shape[0] == tiling.programs, "each program writes its row"
    for partials in (wanted.dgamma, wanted.dbias):
        assert partials is None or partials.shape[0] == plan.partial_rows, "each program writes its row"
    assert wanted.dalpha is None or wanted.dalpha.shape[0] == tiling.programs, "each program writes its row"
    arriving = {
        "dy_ptr": gradients.dy,
        "dhandle_ptr": gradients.dhandle,
        "next_alpha_ptr": gradients.next_alpha,
        "moments_ptr": moments,
        "NEXT_ALPHA_VECTOR": _is_vector(gradients.next_alpha),
    }
    arguments = {
        **inputs.pointers(),
        **arriving,
        "gamma_ptr": inputs.gamma,
        "dz_ptr": gradients.dz,
        "dx_ptr": wanted.dx,
        "dresidual_ptr": wanted.dresidual,
        "dgamma_ptr": None if split else wanted.dgamma,
        "dbias_ptr": None if split else wanted.dbias,
        "dalpha_ptr": wanted.dalpha,
        "dz_partials_ptr": wanted.dz_partials,
        "ZERO_CENTRED": inputs.spec.zero_centred,
        "SCALE_RESIDUAL": wanted.scale_residual and inputs.alpha is not None and not plan.scaled_after,
        "REREAD": tiling.reread,
        **inputs.constants(tiling),
        **_strides(x=inputs.x, residual=inputs.residual, dy=gradients.dy, dhandle=gradients.dhandle, dz=gradients.dz),
    }
    yield Call(norm_backward, arguments, (tiling.programs,), tiling.warps, tiling.registers)
    if plan.weights is None or (wanted.dgamma is None and wanted.dbias is None):
        return
    from normscale.ops.kernels.weights import weights_backward

    tiling = plan.weights
    arguments = {
        **inputs.pointers(),
        **arriving,
        "dgamma_ptr": wanted.dgamma,
        "dbias_ptr": wanted.dbias,
        **inputs.constants(tiling),
        **_strides(x=inputs.x, residual=inputs.residual, dy=gradients.dy, dhandle=gradients.dhandle),
    }
    yield Call(weights_backward, arguments, (-(-inputs.x.shape[1] // tiling.block), tiling.programs), tiling.warps)


def reduce_call(partials: Tensor, rows: Tensor, index: Tensor) -> Call:
    """Returns the call that makes row `index` of `rows` of partial statistics.

    Shape: partials [programs, 4]; rows [R, 3] fp32 contiguous; index [1] int64.
    """
    from normscale.ops.kernels.statistics import reduce_partials

    arguments = {
        "partials_ptr": partials,
        "rows_ptr": rows,
        "index_ptr": index,
        "n_programs": partials.shape[0],
        "BLOCK": 1024,
    }
    return Call(reduce_partials, arguments, (1,), 4)


def _is_vector(alpha: Tensor | None) -> bool:
    return alpha is not None and alpha.dim() == 1
