"""What an operation can run on: its eager definition, our Triton kernels, or another project's where it is installed.

`auto` takes the kernels for GPU tensors that they serve and the definition for all others; the record of a run says
which. A backend that is named and cannot run is an error, never a silent change.

An operation asks `choose` once a call, with the tensors at hand: plain branches, which Dynamo can trace. What a run as
a whole would use is known before it begins (`would_run`).
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from normscale.errors import BackendError

if TYPE_CHECKING:
    from normscale.ops.spec import NormSpec

Backend = Literal["auto", "eager", "triton", "apex", "liger"]
Op = Literal["norm", "add_norm", "residual_norm"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)
CAPABILITY = (8, 0)  # before it there is no bf16, and Triton's support ends
WIDEST = 16_384  # wider rows spill registers in every form of the backward kernel
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# Looked up once, at import: neither the search nor the environment can be read inside a compiled graph.
TRITON, LIGER = _found("triton"), _found("liger_kernel")
APEX = _found("apex") and _found("fused_layer_norm_cuda")  # another package on PyPI has the name apex, without kernels
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


@dataclass(frozen=True)
class Case:
    """What a backend is asked to do.

    `weights` are the dtypes of gamma and bias, `missing` those that are not there; `index` is which device of its kind
    (None: the current one).
    """

    op: Op
    spec: "NormSpec"
    width: int
    dtype: torch.dtype
    device: str
    weights: tuple[torch.dtype, ...]
    missing: tuple[str, ...]
    index: int | None = None


@cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


def _lacking(index: int | None) -> str | None:
    """Returns what a CUDA device (None: the current one) lacks for Triton; None if nothing, or if none is here to ask.

    A compiled graph takes the answer as it is when the graph is made, and does not ask again.
    """
    here = torch.cuda.is_initialized() or torch.cuda.is_available()  # type: ignore[no-untyped-call]
    if torch.version.hip is not None or not here:
        return None
    has = _capability(torch.cuda.current_device() if index is None else index)
    if has >= CAPABILITY:
        return None
    return "its kernels need compute capability {}.{}, and this GPU has {}.{}".format(*CAPABILITY, *has)


# What torch.compiler.assume_constant_result does, which would import the compiler: as long again as torch itself.
_lacking._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _needs_gpu(case: Case, missing: str = "") -> str:
    """Returns why another device cannot run the kernels; a package that is not there either would not help."""
    return f"its kernels run on a GPU, and this is {_device(case.device)}" + (f"; also {missing}" if missing else "")


def _triton(case: Case) -> str | None:
    if case.device != "cuda" and not (INTERPRETED and case.device == "cpu"):
        return _needs_gpu(case)
    if not TRITON:
        return "the package triton is not installed (pip install triton)"
    lacking: str | None = _lacking(case.index) if case.device == "cuda" else None
    if lacking is not None:
        return lacking
    if case.dtype not in DTYPES:
        return f"{_name(case.dtype)} has no kernel (float32, bfloat16 and float16 have)"
    if case.width > WIDEST:
        return f"width {case.width} > {WIDEST}"
    return None


def _liger(case: Case) -> str | None:
    missing = "" if LIGER else "the package liger-kernel is not installed (pip install liger-kernel)"
    if case.device != "cuda":  # nor does Triton interpret them: they cast eps, which is a Python number there
        return _needs_gpu(case, missing)
    if missing:
        return missing
    if case.op != "norm":
        return f"it has no {case.op}"
    if case.missing:
        return f"it is offered for norms with {' and '.join(case.missing)} only"
    if case.dtype not in DTYPES:
        return f"{_name(case.dtype)} has no kernel (float32, bfloat16 and float16 have)"
    if case.width > 65_536:
        return f"width {case.width} > 65536"
    return None


def _apex(case: Case) -> str | None:
    missing = "" if APEX else "the package apex is not installed with its extension fused_layer_norm_cuda"
    missing += " (build it from github.com/NVIDIA/apex with --cuda_ext)" if missing else ""
    if case.device != "cuda":
        return _needs_gpu(case, missing)
    if missing:
        return missing
    if case.op != "norm":
        return f"it has no {case.op}"
    if case.spec.zero_centred:
        return "it has no zero-centred gain"
    if case.missing:
        return f"it is offered for norms with {' and '.join(case.missing)} only"
    if any(dtype is not case.dtype for dtype in case.weights):
        # Its mixed-dtype classes return the dtype of the weights, which would change that of the stream.
        return (
            f"weights in {_name(case.weights[0])} beside activations in {_name(case.dtype)} change the stream's dtype"
        )
    return None


REASONS: dict[str, Callable[[Case], str | None]] = {"triton": _triton, "liger": _liger, "apex": _apex}
"""By backend: why it cannot run a case, None where it can."""

_NOTES: set[str] | None = None
_COUNTED_AS: str | None = None


def choose(
    backend: str,
    op: Op,
    spec: "NormSpec | None",
    x: Tensor,
    gamma: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None = None,
) -> str:
    """Returns what runs `op` on `x`: "eager", "triton", "apex" or "liger". `spec` is None for a norm without kernels.

    Beside a residual the dtype that counts is the wider of the two.

    Shape: x, residual [..., D]; gamma, bias [D] or None.

    Raises:
        BackendError: the named backend cannot run it.
    """
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    device, index = _COUNTED_AS or x.device.type, x.device.index
    chosen, reason = would_run(backend, op, spec, x.shape[-1], dtype, device, gamma, bias, index)
    if _NOTES is not None:
        _NOTES.add(described(chosen, reason))
    return chosen


def would_run(
    backend: str,
    op: Op,
    spec: "NormSpec | None",
    width: int,
    dtype: torch.dtype,
    device: str,
    gamma: Tensor | None,
    bias: Tensor | None,
    index: int | None = None,
) -> tuple[str, str]:
    """Returns what `choose` would for such a tensor and, where `auto` does without kernels on a GPU, the reason.

    `index` says which device of its kind; None is the current one.

    Raises:
        BackendError: as `choose`.
    """
    if backend == "eager" or (backend == "auto" and device != "cuda"):
        return "eager", ""
    if backend not in BACKENDS:
        raise BackendError(f"model.backend: {backend!r} is not a backend (allowed: {', '.join(BACKENDS)})")
    name = "triton" if backend == "auto" else backend
    if spec is None:
        reason: str | None = "this norm has no kernel"
    else:
        weights = tuple(w.dtype for w in (gamma, bias) if w is not None)
        wanted = (("gamma", gamma), ("bias", bias)) if spec.kind == "layernorm" else (("gamma", gamma),)
        missing = tuple(part for part, w in wanted if w is None)
        reason = REASONS[name](Case(op, spec, width, dtype, device, weights, missing, index))
    if reason is None:
        return name, ""
    if backend == "auto":
        return "eager", reason
    raise BackendError(refusal(backend, reason))


def described(chosen: str, reason: str) -> str:
    """Returns what a record says of a choice: "triton", or "eager (width 20000 > 16384)"."""
    return f"{chosen} ({reason})" if reason else chosen


def joined(notes: "set[str]") -> str:
    """Returns one line for what the norms of a model run on; mostly they all run on the same."""
    return "; ".join(sorted(notes, reverse=True)) or "eager"


def refusal(backend: str, reason: str) -> str:
    """Returns the one line that says why `backend` cannot run, and what to do."""
    return f"model.backend: {backend} cannot run here: {reason}; set model.backend=auto, or eager"


@contextmanager
def noted() -> Iterator[set[str]]:
    """Collects what `choose` decides meanwhile, each with the reason where there is one. Eager mode only."""
    global _NOTES
    notes: set[str] = set()
    before, _NOTES = _NOTES, notes
    try:
        yield notes
    finally:
        _NOTES = before


@contextmanager
def counted_as(device: str) -> Iterator[None]:
    """Lets `choose` take every tensor for one on a device of this kind: for passes on tensors without values."""
    global _COUNTED_AS
    before, _COUNTED_AS = _COUNTED_AS, device
    try:
        yield
    finally:
        _COUNTED_AS = before


def _device(device: str) -> str:
    return "a CPU" if device == "cpu" else device


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
