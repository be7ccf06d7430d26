"""What epsilon does in the norms of anyone's model: LayerNorm and RMSNorm, and what puts out what one of them does."""

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from normscale.monitor.gathered import Gathered, rows_of
from normscale.monitor.hooks import Hook, HookedProbe
from normscale.monitor.outputs import main_tensor
from normscale.monitor.pieces import is_dtensor
from normscale.probes.epsilon import COLUMNS, reading_of, shadow
from normscale.probes.names import plain_name
from normscale.probes.probe import Array, Hand, Reading

ROWS = 32  # of each norm that are looked at

SAME = 0.05  # relative difference to what a norm puts out, under which a formula is taken for its own (empirical)

_LIKE = re.compile(r"(layer|rms)_?norm", re.IGNORECASE)

_LARGEST = COLUMNS.index("eps_gain_max")


class NormShadows(HookedProbe):
    """The numbers of `probes.epsilon` of each norm of a model, of rows of the first micro-batch, averaged over ranks.

    A norm is a module without others in it whose class has "LayerNorm" or "RMSNorm" in its name, with an eps. Which of
    the formulas it computes, centred or not, with the gain w or 1 + w, is told by what it puts out: the nearest, and
    where that is not near either (eps outside of the root, say), its row is NaN. So is that of a norm that was not
    called, such as one in a compiled block, where a hook would part the graph, or whose weight is not here as a whole.
    `compute` is the dtype of a norm's input. Rows are norms, in the order of the model.
    """

    name = "epsilon"

    def __init__(self, inner: nn.Module, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.norms = {plain_name(name): module for name, module in inner.named_modules() if is_norm(module)}
        self.gathered = Gathered(self._work)
        self.seen: set[int] = set()
        self.silent = False  # whether no norm was seen on the last measured step
        see = self.safely(self._see)
        hooks = (Hook(self, see, index, inside=True) for index in range(len(self.norms)))
        self._handles = [
            norm.register_forward_hook(hook) for norm, hook in zip(self.norms.values(), hooks, strict=True)
        ]
        self.begin(0)

    def begin(self, step: int) -> None:
        self.failed, self.done = None, False
        self._forget()

    def open(self) -> None:
        self.on = not self.done

    def drop(self) -> None:
        super().drop()
        if not self.done:
            self._forget()

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        self.shut()
        self.gathered.flush()
        self.done = True

    def hand_over(self) -> Mapping[str, Hand]:
        there = ~self.found.isnan()
        sums = torch.cat([self.found.nan_to_num(0.0, torch.inf, -torch.inf), there])
        return {"sums": Hand(sums, "sum"), "largest": Hand(self.largest, "max")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        sums, ranks = values["sums"].reshape(2, len(self.norms), len(COLUMNS))
        self.silent = not ranks.any()
        if self.silent:
            return Reading()
        with np.errstate(divide="ignore", invalid="ignore"):
            table = sums / ranks
        largest = values["largest"]
        table[:, _LARGEST] = np.where(largest >= 0, largest, np.nan)
        return reading_of(table)

    def _see(self, index: int, module: nn.Module, args: Any, output: Any) -> None:
        x, y = main_tensor(args), main_tensor(output)
        if index in self.seen or x is None or y is None or x.shape != y.shape or x.dim() < 2 or not x.numel():
            return
        eps, none = eps_of(module, x), torch.zeros(x.shape[-1], dtype=torch.float64, device=x.device)
        gain, whole = _held(module, ("weight", "gamma", "scale"), x)
        bias, also = _held(module, ("bias",), x)
        if eps is None or not (whole and also):
            return
        self.seen.add(index)
        held = (none if gain is None else gain, none if bias is None else bias, none[:1] + eps)
        self.gathered.add(index, (x.dtype, gain is not None), (rows_of(x, ROWS), rows_of(y, ROWS), *held))

    def _work(self, indices: Sequence[int], common: Any, tensors: Sequence[Tensor]) -> None:
        dtype, weighed = common
        x_NRD, y_NRD, gain_ND, bias_ND, eps_N1 = tensors
        bias_N1D = bias_ND.unsqueeze(1)
        inputs = [x_NRD - x_NRD.mean(-1, keepdim=True), x_NRD]
        gains = [gain_ND.unsqueeze(1), 1 + gain_ND.unsqueeze(1)] if weighed else [torch.ones_like(bias_N1D)]
        pairs = [(own, gain) for own in inputs for gain in gains]
        errors = torch.stack([_difference(y_NRD, own, gain, bias_N1D, eps_N1) for own, gain in pairs])
        least_N, which_N = errors.min(0)  # the host does not wait to learn which
        own_NRD, gain_N1D = pairs[0]
        for i, (own, gain) in enumerate(pairs[1:], start=1):
            chosen = (which_N == i)[:, None, None]
            own_NRD, gain_N1D = torch.where(chosen, own, own_NRD), torch.where(chosen, gain, gain_N1D)
        table = shadow(own_NRD, eps_N1, gain_N1D, bias_N1D, dtype)
        table = torch.where((least_N < SAME).unsqueeze(-1), table, torch.nan).to(self.found.device)
        for index, row in zip(indices, table, strict=True):
            self.found[index] = row
            self.largest[index] = row[_LARGEST].nan_to_num(-1.0, torch.inf)

    def _forget(self) -> None:
        self.gathered.clear()
        self.seen.clear()
        self.found = torch.full((len(self.norms), len(COLUMNS)), torch.nan, dtype=torch.float64, device=self.device)
        self.largest = torch.full((len(self.norms),), -1.0, dtype=torch.float64, device=self.device)


def is_norm(module: nn.Module) -> bool:
    """Returns whether a module looks like a norm over the last dimension that has an eps."""
    named = any(_LIKE.search(kind.__name__) for kind in type(module).__mro__)
    over_last = len(getattr(module, "normalized_shape", (0,))) == 1
    return (
        named and over_last and not module._modules and eps_of(module, torch.zeros(1, dtype=torch.float32)) is not None
    )


def eps_of(module: nn.Module, x: Tensor) -> float | Tensor | None:
    """Returns the eps of a norm with an input, as a number or a 0-d tensor where that is; None without one."""
    for name in ("eps", "variance_epsilon", "epsilon"):
        eps = getattr(module, name, None)
        if isinstance(eps, float | int):
            return float(eps)
    if not isinstance(module, nn.RMSNorm):
        return None
    weight = None if module.weight is None else module.weight.dtype
    return _default_eps(x.dtype, weight, x.device, torch.is_autocast_enabled(x.device.type))


@cache
def _default_eps(
    dtype: torch.dtype, weight: torch.dtype | None, device: torch.device, autocast: bool
) -> float | Tensor:
    """Returns what torch's RMSNorm adds where its eps is None: the machine epsilon of a dtype, fp32's or that of x.

    Versions of torch, and ways to compute it, differ in which one that is for half precision. So it is asked for by
    an input whose square is far below both; the host does not wait for the answer.

    Shape: result 0-d fp64.
    """
    own, wide = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    if own == wide:
        return own
    x = torch.full((2,), 2.0**-14, dtype=dtype, device=device)
    gain = None if weight is None else torch.ones(2, dtype=weight, device=device)
    y = nn.functional.rms_norm(x, (2,), gain, None)
    found = (x.double() / y.double()).square()[0]
    return torch.where(found < (own * wide) ** 0.5, wide, own).double()


def _held(module: nn.Module, names: Sequence[str], x: Tensor) -> tuple[Tensor | None, bool]:
    """Returns a copy of the first parameter of these names, and whether it is with x as a whole, or not there at all.

    Shape: x [..., D]; result [D] fp64.
    """
    found = next((each for name in names if isinstance(each := getattr(module, name, None), Tensor)), None)
    if found is None:
        return None, True
    if is_dtensor(found) or found.shape != x.shape[-1:] or found.device != x.device:
        return None, False
    return found.detach().to(torch.float64, copy=True), True


def _difference(y_NRD: Tensor, own_NRD: Tensor, gain: Tensor, bias: Tensor, eps_N1: Tensor) -> Tensor:
    """Returns how far what a norm puts out is from what a formula says, over its size.

    Shape: result [N].
    """
    scale_NR = (own_NRD.square().mean(-1) + eps_N1).rsqrt()
    off_N = torch.linalg.vector_norm(own_NRD * scale_NR.unsqueeze(-1) * gain + bias - y_NRD, dim=(-2, -1))
    return torch.where(off_N == 0, off_N, off_N / torch.linalg.vector_norm(y_NRD, dim=(-2, -1)))
