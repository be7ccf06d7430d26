"""What epsilon does in each norm: an fp64 shadow of every norm on sampled rows of a fixed batch."""

from collections.abc import Mapping
from functools import cache

import numpy as np
import torch
from torch import Tensor

from normscale.norms import Norm
from normscale.probes.probe import Array, Hand, Probe, Reading, Subject, due_every
from normscale.probes.stopwatch import Stopwatch

SEED = 0  # of the choice of rows, which is the same in every run

COLUMNS = ("eps_up", "eps_down", "eps_share_1", "eps_share_10", "eps_gain_p50", "eps_gain_max", "eps_lost")
"""The profiles, whose rows are norms in the order they run (`EpsilonSensitivity.names`)."""


class EpsilonSensitivity(Probe):
    """How much the output of each norm hangs on its epsilon, by depth.

    Of sampled rows of each norm's input, in fp64, with var the variance (the mean square for RMSNorm):

    - the change of the output for ten times and for a tenth of eps, ||y(10 eps) - y(eps)|| / ||y(eps)||, gain and bias
      included;
    - the share of rows where eps is more than 1 % and 10 % of var;
    - the median and the largest 1 / sqrt(var + eps), by which gradients are multiplied on their way back;
    - the share of rows where var + eps, if it were computed in `compute`, would not be what it is: 0, Inf, or off by
      more than two roundings. (Norms here keep their statistics in fp32 whatever the precision.)

    It is measured every `every` steps and at the last, and costs a forward pass over the batch, eager even where the
    model is compiled, and some twenty small operations a norm.
    """

    name = "epsilon"
    passes = True
    stopwatch: Stopwatch

    def __init__(
        self, inputs: Mapping[str, Tensor], *, every: int, last: int, rows: int = 64, compute: torch.dtype
    ) -> None:
        self.inputs, self.every, self.last, self.rows, self.compute = inputs, every, last, rows, compute
        self.stopwatch = Stopwatch()
        self.names: list[str] = []
        self.values: list[float] = []  # of eps
        self.found: Tensor | None = None

    def attach(self, subject: Subject) -> None:
        assert subject.see_norms is not None
        self.see, self.device = subject.see_norms, subject.device
        self.inputs = {name: value.to(subject.device) for name, value in self.inputs.items()}
        names: dict[str, float] = {}

        def see(name: str, norm: Norm, x: Tensor) -> None:
            names.setdefault(name, norm.eps)

        with self.stopwatch.timing(self.device):
            self.see(self.inputs, see)
        self.names = list(names)
        self.values = sorted(set(names.values()))

    def held(self) -> dict[str, float]:
        """Returns each eps of the model, as text, and what `compute` makes of it: 1e-8 is 0 in fp16."""
        return {f"{eps:g}": float(torch.tensor(eps, dtype=torch.float32).to(self.compute)) for eps in self.values}

    def due(self, step: int) -> bool:
        return due_every(step, self.every, self.last)

    def begin(self, step: int) -> None:
        self.found = None

    def after_step(self, step: int) -> None:
        if not self.due(step) or not self.names:
            return
        found: dict[str, Tensor] = {}

        def see(name: str, norm: Norm, x: Tensor) -> None:
            if name not in found:
                found[name] = sensitivity(sampled(x, self.rows), norm, self.compute)

        with self.stopwatch.timing(self.device):
            self.see(self.inputs, see)
            self.found = torch.stack([found[name] for name in self.names])

    def hand_over(self) -> Mapping[str, Hand]:
        return {} if self.found is None else {"norms": Hand(self.found, "first")}

    def read(self, values: Mapping[str, Array]) -> Reading:
        self.stopwatch.settle()
        if "norms" not in values:
            return Reading()
        return reading_of(values["norms"].reshape(len(self.names), len(COLUMNS)))


def reading_of(table: Array) -> Reading:
    """Returns the reading of the numbers of all norms.

    Shape: table [norms, len(COLUMNS)].
    """
    profiles = dict(zip(COLUMNS, table.T, strict=True))
    largest = {"eps_change_max": profiles["eps_up"], "eps_share_max": profiles["eps_share_1"]}
    finite = {name: column[np.isfinite(column)] for name, column in largest.items()}
    return Reading({name: float(column.max()) for name, column in finite.items() if column.size}, profiles)


def sampled(x: Tensor, rows: int) -> Tensor:
    """Returns `rows` rows of `x`, mixed but always the same ones, or all if there are no more.

    Shape: x [..., D]; result [rows, D].
    """
    flat = x.detach().reshape(-1, x.shape[-1])
    return flat if len(flat) <= rows else flat[_chosen(len(flat), rows, x.device)]


@cache
def _chosen(n: int, rows: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(SEED)  # an own one: training's is not drawn from
    return torch.randperm(n, generator=generator)[:rows].sort().values.to(device)


def sensitivity(x: Tensor, norm: Norm, compute: torch.dtype) -> Tensor:
    """Returns the numbers of one norm, as in `COLUMNS`.

    Shape: x [R, D]; result [len(COLUMNS)] fp64.
    """
    assert norm.spec is not None, "norms without a spec have no eps"
    x_RD = x.double()
    centred_RD = x_RD - x_RD.mean(-1, keepdim=True) if norm.spec.kind == "layernorm" else x_RD
    gain = None if norm.gamma is None else norm.gamma.detach().double()
    if gain is not None and norm.spec.zero_centred:
        gain = 1 + gain
    bias = None if norm.bias is None else norm.bias.detach().double()
    eps = torch.full((1, 1), norm.eps, dtype=torch.float64, device=x.device)
    return shadow(centred_RD[None], eps, gain, bias, compute)[0]


def shadow(x_NRD: Tensor, eps_N1: Tensor, gain: Tensor | None, bias: Tensor | None, compute: torch.dtype) -> Tensor:
    """Returns the numbers of several norms, of what is left of their inputs where a norm has taken the mean away.

    Shape: all fp64; gain, bias as broadcasts to [N, R, D]; result [N, len(COLUMNS)].
    """
    var_NR = x_NRD.square().mean(-1)
    y_3NRD = torch.stack([x_NRD * (var_NR + each).rsqrt().unsqueeze(-1) for each in (eps_N1 / 10, eps_N1, eps_N1 * 10)])
    if gain is not None:
        y_3NRD = y_3NRD * gain
    if bias is not None:
        y_3NRD = y_3NRD + bias
    down, at, up = y_3NRD
    size_N = _size(at)
    changes = [_size(up - at), _size(down - at)]
    changes = [torch.where(each == 0, each, each / size_N) for each in changes]  # nothing but zeros does not change
    over = [torch.where(var_NR.isnan(), var_NR, (eps_N1 > part * var_NR).double()).mean(-1) for part in (0.01, 0.1)]
    gain_NR = (var_NR + eps_N1).rsqrt()
    gains = [gain_NR.median(-1).values, gain_NR.amax(-1)]
    return torch.stack([*changes, *over, *gains, lost(var_NR, eps_N1, compute).mean(-1)], dim=-1)


def _size(x_NRD: Tensor) -> Tensor:
    size: Tensor = torch.linalg.vector_norm(x_NRD, dim=(-2, -1))
    return size


def lost(var: Tensor, eps: float | Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 1 where var + eps computed in `dtype` is 0 in place of more, not finite, or off by over two roundings.

    Shape: var [..., R] fp64, eps a number or as broadcasts to it; result [..., R] fp64, NaN where var is.
    """

    def rounded(values: Tensor) -> Tensor:
        return values.float().to(dtype).double()

    exact = var + eps
    seen = rounded(rounded(var) + rounded(torch.zeros_like(var) + eps))
    off = ~torch.isfinite(seen) | ((seen - exact).abs() > 2 * torch.finfo(dtype).eps * exact)
    return torch.where(var.isnan(), var, off.double())
