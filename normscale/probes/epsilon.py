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
        table = values["norms"].reshape(len(self.names), len(COLUMNS))
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
    eps, x_RD = norm.eps, x.double()
    centred_RD = x_RD - x_RD.mean(-1, keepdim=True) if norm.spec.kind == "layernorm" else x_RD
    var_R = centred_RD.square().mean(-1)
    y_3RD = torch.stack([centred_RD * (var_R + each).rsqrt()[:, None] for each in (eps / 10, eps, eps * 10)])
    if norm.gamma is not None:
        gain = norm.gamma.detach().double()
        y_3RD = y_3RD * (1 + gain if norm.spec.zero_centred else gain)
    if norm.bias is not None:
        y_3RD = y_3RD + norm.bias.detach().double()
    down, at, up = y_3RD
    size = torch.linalg.vector_norm(at)
    change = torch.stack([torch.linalg.vector_norm(up - at), torch.linalg.vector_norm(down - at)])
    change = torch.where(change == 0, change, change / size)  # an output of nothing but zeros does not change
    shares = [torch.where(var_R.isnan(), var_R, (eps > part * var_R).double()).mean() for part in (0.01, 0.1)]
    gain_R = (var_R + eps).rsqrt()
    return torch.stack([*change, *shares, gain_R.median(), gain_R.max(), lost(var_R, eps, compute).mean()])


def lost(var: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Returns 1 where var + eps computed in `dtype` is 0 in place of more, not finite, or off by over two roundings.

    Shape: var [R] fp64; result [R] fp64, NaN where var is.
    """

    def rounded(values: Tensor) -> Tensor:
        return values.float().to(dtype).double()

    exact = var + eps
    seen = rounded(rounded(var) + rounded(torch.full_like(var, eps)))
    off = ~torch.isfinite(seen) | ((seen - exact).abs() > 2 * torch.finfo(dtype).eps * exact)
    return torch.where(var.isnan(), var, off.double())
