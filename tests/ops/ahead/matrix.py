"""What is compiled ahead of time: operations, widths, dtypes and targets, and the byte table they are held to."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from normscale.ops.launch import (
    Call,
    Gradients,
    Inputs,
    Wanted,
    backward_calls,
    backward_plan,
    forward_call,
    forward_demand,
    reduce_call,
)
from normscale.ops.spec import NormSpec
from normscale.ops.tiling import WIDEST_ALPHA, WIDEST_PLAIN, forward_tiling

Form = Literal["norm", "add_norm", "residual_norm", "handle", "dropout", "statistics", "admin", "add_norm measured"]
MEASURED = ("statistics", "add_norm measured")  # of a sum with alpha, and of Pre-Norm's
ADDS = ("add_norm", "add_norm measured")

WIDTHS = (64, 128, 256, 512, 768, 1024, 2048, 4096, 5120, 8192, 12288, 16384)
ELSEWHERE = (128, 1024, 8192)  # on the targets that are not tuned for
UNEVEN = (4104, 4100, 4095)  # divisible by 8, by 4, by nothing
TARGETS = ("sm_90", "sm_80", "sm_100", "gfx942")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
KINDS = ("layernorm", "rmsnorm")
ROWS = 8192

# Passes over the activation in units of M * D elements, by pointer argument: loads positive, stores negative. The
# sums are the table of the design: DeepNorm 3 forward and 5 backward, also with a handle, whose gradient is one tensor
# for both inputs; Pre-Norm's sum 4 and 4; a plain norm 2 and 3.
FORWARD: dict[str, dict[str, int]] = {
    "norm": {"x_ptr": 1, "y_ptr": -1},
    "add_norm": {"x_ptr": 1, "residual_ptr": 1, "y_ptr": -1, "z_ptr": -1},
    "residual_norm": {"x_ptr": 1, "residual_ptr": 1, "y_ptr": -1},
}
BACKWARD: dict[str, dict[str, int]] = {
    "norm": {"dy_ptr": 1, "x_ptr": 1, "dx_ptr": -1},
    "add_norm": {"dy_ptr": 1, "x_ptr": 1, "dz_ptr": 1, "dx_ptr": -1},
    "residual_norm": {"dy_ptr": 1, "x_ptr": 1, "residual_ptr": 1, "dx_ptr": -1, "dresidual_ptr": -1},
    "handle": {"dy_ptr": 1, "dhandle_ptr": 1, "x_ptr": 1, "residual_ptr": 1, "dx_ptr": -1},
}
READ_AGAIN = ("dy_ptr", "dhandle_ptr", "x_ptr", "residual_ptr")
ACTIVATIONS = (*READ_AGAIN, "dz_ptr", "y_ptr", "z_ptr", "dx_ptr", "dresidual_ptr")


@dataclass(frozen=True)
class Case:
    """One operation to compile for one target: a forward and a backward pass, of one or two kernels."""

    target: str
    form: Form
    kind: Literal["layernorm", "rmsnorm"]
    dtype: str
    width: int

    def __str__(self) -> str:
        return f"{self.target} {self.form} {self.kind} {self.dtype} {self.width}"

    def calls(self) -> Iterator[tuple[str, Call, dict[str, int]]]:
        """Yields the name, the call and the byte table of each kernel, on tensors without memory."""
        forward = FORWARD[self._sum if self._sum in FORWARD else "residual_norm"]
        yield "forward", self._forward(), forward
        backward = dict(BACKWARD[self._sum if self._sum in BACKWARD else "residual_norm"])
        if self.folded:
            del backward["dhandle_ptr"]
        for call in self._backward():
            if call.kernel.__name__ == "weights_backward":
                yield "weights", call, {n: 1 for n in backward if n in READ_AGAIN}
            else:
                again = 2 if call.arguments["REREAD"] else 1
                yield "backward", call, {n: again * v if n in READ_AGAIN else v for n, v in backward.items()}
        if self.form in MEASURED:
            rows, index = _meta((8, 3), torch.float32), _meta((1,), torch.int64)
            yield "reduce", reduce_call(_meta((132, 4), torch.float32), rows, index), {}

    @property
    def _sum(self) -> str:
        """The form without what is measured of it."""
        return self.form.removesuffix(" measured")

    @property
    def folded(self) -> bool:
        """Whether the gradient of a handle is added to dy before the kernel (see `ops.tiling.is_folded`)."""
        return self.form == "handle" and self.dtype == "fp32" and self.width > WIDEST_PLAIN

    def _inputs(self) -> Inputs:
        summed = self.form not in ("norm", *ADDS)
        alpha = _meta((self.width,) if self.form == "admin" else (), torch.float32) if summed else None
        return Inputs(
            x=self._activation(),
            residual=self._activation() if self.form != "norm" else None,
            alpha=alpha,
            gamma=self._weight(),
            seed=_meta((), torch.int64) if self.form == "dropout" else None,
            dropout=0.1 if self.form == "dropout" else 0.0,
            spec=NormSpec(self.kind, 1e-5),
        )

    def _forward(self) -> Call:
        inputs, partials = self._inputs(), None
        if self.form in MEASURED:
            store_z = self.form in ADDS
            demand = forward_demand(inputs.x, inputs.residual, inputs.alpha, self.kind, store_z, measured=True)
            partials = _meta((forward_tiling(ROWS, self.width, inputs.x.device, demand).programs, 4), torch.float32)
        z = self._activation() if self.form in ADDS else None
        of_y = None if self.form in ADDS else partials  # Pre-Norm measures its stream, and not what is seen of it
        bias = self._weight() if self.kind == "layernorm" else None
        return forward_call(inputs, bias, self._activation(), z, self._moments(), partials, of_y)

    def _backward(self) -> Iterator[Call]:
        inputs = self._inputs()
        handle = self.form == "handle"
        arrives = handle and not self.folded
        if self.form in ADDS:  # the stream is saved, and the norm of it differentiated
            inputs = Inputs(inputs.x, None, None, inputs.gamma, None, 0.0, inputs.spec)
        gradients = Gradients(
            self._activation(),
            self._activation() if arrives else None,
            _meta((), torch.float32) if arrives else None,
            self._activation() if self.form in ADDS else None,
        )
        measured, want_alpha = self.form in MEASURED, self.form == "admin" and self.width <= WIDEST_ALPHA
        plan = backward_plan(inputs, gradients, measured=measured, want_affine=True, want_alpha=want_alpha)
        sums = _meta((plan.partial_rows, self.width), torch.float32)
        wanted = Wanted(
            dx=self._activation(),
            dresidual=self._activation() if self.form in ("residual_norm", "dropout", "statistics", "admin") else None,
            dgamma=sums,
            dbias=sums if self.kind == "layernorm" else None,
            dalpha=sums if want_alpha else None,
            dz_partials=_meta((plan.tiling.programs, 4), torch.float32) if measured else None,
            scale_residual=not handle,
        )
        return backward_calls(inputs, gradients, self._moments(), wanted, plan)

    def _activation(self) -> Tensor:
        return _meta((ROWS, self.width), DTYPES[self.dtype])

    def _weight(self) -> Tensor:
        return _meta((self.width,), torch.float32)

    def _moments(self) -> Tensor:
        return _meta((3 if self.kind == "layernorm" else 1, ROWS), torch.float32)


def _meta(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    return torch.empty(shape, dtype=dtype, device="meta")


def usual() -> Iterator[Case]:
    """Yields what `make test` compiles: every width on sm_90, three elsewhere, each form at least at one width."""
    for kind in KINDS:
        for width in WIDTHS:
            yield Case("sm_90", "residual_norm", kind, "bf16", width)  # type: ignore[arg-type]
        for width in (64, 1024, 4096, 12288):
            yield Case("sm_90", "norm", kind, "bf16", width)  # type: ignore[arg-type]
            yield Case("sm_90", "add_norm", kind, "bf16", width)  # type: ignore[arg-type]
            yield Case("sm_90", "handle", kind, "bf16", width)  # type: ignore[arg-type]
        for width in (1024, 8192, 12288, 16384):
            yield Case("sm_90", "residual_norm", kind, "fp32", width)  # type: ignore[arg-type]
        for target in TARGETS[1:]:
            for width in ELSEWHERE:
                yield Case(target, "residual_norm", kind, "bf16", width)  # type: ignore[arg-type]
    for form in ("dropout", "statistics", "admin"):
        yield Case("sm_90", form, "layernorm", "bf16", 1024)  # type: ignore[arg-type]
        yield Case("sm_90", form, "rmsnorm", "bf16", 8192)  # type: ignore[arg-type]
    for kind in KINDS:
        for dtype in ("bf16", "fp32"):
            yield Case("sm_90", "add_norm measured", kind, dtype, 16384)  # type: ignore[arg-type]
    for width in UNEVEN:
        yield Case("sm_90", "residual_norm", "layernorm", "bf16", width)
    yield Case("sm_90", "residual_norm", "layernorm", "fp32", 4100)
    yield Case("sm_90", "residual_norm", "layernorm", "fp16", 4096)


def full() -> Iterator[Case]:
    """Yields all of it: every form, width and dtype on every target."""
    seen = set()
    for case in usual():
        seen.add(case)
        yield case
    forms: tuple[Form, ...] = get_args(Form)
    for target in TARGETS:
        for form in forms:
            for kind in KINDS:
                for dtype in ("bf16", "fp32"):
                    for width in WIDTHS if target == "sm_90" else ELSEWHERE:
                        case = Case(target, form, kind, dtype, width)  # type: ignore[arg-type]
                        if case not in seen:
                            yield case
