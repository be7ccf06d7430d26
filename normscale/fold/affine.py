"""Which norms' gains and biases may go into the projections that read them."""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from numbers import Number

import torch
from torch import Tensor

from normscale.fold.flow import Flow, Op
from normscale.models.projection import Projection
from normscale.models.stack import Transformer
from normscale.norms import Norm
from normscale.norms.norm import AffineNorm

SUMS = ("add", "iadd", "radd", "sub", "isub", "addcmul", "lerp")
HEAD = "logits"


@dataclass(frozen=True)
class Affine:
    """Where the gain and the bias of a norm go: the names of weights, or why they stay.

    `factor` is the constant between norm and projection. Neither `into` nor `stays`: there is no gain and no bias.
    """

    norm: str
    into: tuple[str, ...] = ()
    factor: float = 1.0
    stays: str | None = None


class Blocked(Exception):
    """Why something cannot be folded."""


def affine_of(norm: Norm) -> tuple[Tensor | None, Tensor | None]:
    """Returns what a norm multiplies by and adds at its end, None where it does not."""
    return norm.gain() if isinstance(norm, AffineNorm) else None, norm.bias


def taken_of(norm: Norm) -> tuple[Tensor | None, Tensor | None]:
    """Returns what of a norm the projections that read it may take up: all of it, where it is constant."""
    return norm.constants() or affine_of(norm)


def affine_folds(model: Transformer, flow: Flow) -> list[Affine]:
    """Returns what becomes of the gain and bias of every norm of a model, in model order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [_folded(model, flow, name, m, names) for name, m in model.named_modules() if isinstance(m, Norm)]


def _folded(model: Transformer, flow: Flow, name: str, norm: Norm, names: Mapping[int, str]) -> Affine:
    if all(part is None for part in taken_of(norm)):
        return Affine(name)
    try:
        _check_last(norm)
        found = [each for op in flow.of_norm(name) for each in _projections(flow, op.outputs[0], 1.0, name)]
        if not found:
            raise Blocked("nothing reads its output")
        factors = {factor for _, factor in found}
        weights = {id(op.call[1]): op.call[1] for op, _ in found}
        if len(factors) > 1:
            raise Blocked("what reads its output does so times more than one number")
        for weight in weights.values():
            _check_weight(model, weight, names.get(id(weight)))
        ours = {id(op) for op, _ in found}
        for weight in weights.values():
            others = [op for op in flow.readers(weight) if id(op) not in ours]
            if any(weight is not model.token or op.name == "linear" for op in others):
                raise Blocked("a weight that reads its output has other inputs, too")
        into = tuple(HEAD if weight is model.token else names[id(weight)] for weight in weights.values())
        return Affine(name, into, factors.pop())
    except Blocked as reason:
        return Affine(name, stays=str(reason))


def _check_weight(model: Transformer, weight: Tensor, name: str | None) -> None:
    """Raises Blocked unless a weight is a projection's or the head's, where there is room for a bias."""
    if weight is model.token or weight is model.logits:
        return
    if name is None or not isinstance(model.get_submodule(name.rpartition(".")[0]), Projection):
        raise Blocked(f"{name or 'a weight that is computed'} reads its output, and is no projection")


@torch.no_grad()
def _check_last(norm: Norm) -> None:
    """Raises Blocked unless a norm is the one without gain and bias, times the gain, plus the bias."""
    gain, bias = taken_of(norm)
    weight = gain if gain is not None else bias
    assert weight is not None
    x = torch.linspace(-2, 3, 3 * norm.width, dtype=weight.dtype, device=weight.device).sin().view(3, -1)
    plain = copy.deepcopy(norm)
    plain.gamma = plain.bias = None
    y = x if norm.constants() is not None else plain(x)
    y = y if gain is None else y * gain
    if not torch.allclose(y if bias is None else y + bias, norm(x), rtol=1e-9, atol=1e-12):
        raise Blocked("its gain and bias are not the last thing that it does")


def _projections(flow: Flow, x: Tensor, factor: float, norm: str) -> Iterator[tuple[Op, float]]:
    """Yields the products with a weight that read x, or x times a constant, and the constant.

    Raises:
        Blocked: something else reads it as well.
    """
    readers = flow.readers(x)
    for op in sorted(readers, key=lambda op: op.name not in SUMS):  # of several reasons, a sum is the one to name
        if op.name == "linear" and op.call[0] is x:
            yield op, factor
        elif (times := scale_of(op, x)) is not None:
            yield from _projections(flow, op.outputs[0], factor * times, norm)
        else:
            raise Blocked(_said(op, norm))


def scale_of(op: Op, x: Tensor) -> float | None:
    """Returns the one number that an operation multiplies x by, None where it does something else."""
    if op.name not in ("mul", "rmul", "div", "truediv") or len(op.call) != 2:
        return None
    other = op.call[1] if op.call[0] is x else op.call[0]
    if not (isinstance(other, Number) or (isinstance(other, Tensor) and other.ndim == 0)):
        return None
    number = float(other)  # type: ignore[arg-type]
    if op.name in ("mul", "rmul"):
        return number
    return 1 / number if op.call[0] is x and number else None


def _said(op: Op, norm: str) -> str:
    if ".qk_norm." in norm:
        return "q and k meet in a product, and rope lets only a gain pass that is equal within each pair"
    if op.norm is not None:
        return f"another norm reads its output ({op.norm})"
    if op.name in SUMS:
        return "its output is a term of the residual sum"
    return f"not only projections read its output ({op.name} does)"
