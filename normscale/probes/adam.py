"""Where Adam's epsilon takes over from the gradient's own size."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from normscale.probes.probe import Array, Hand, Probe, Reading, Subject, due_every
from normscale.probes.segments import Run, SiteSquares
from normscale.probes.stopwatch import Stopwatch

PIECE = 2**22  # entries looked at together: what bounds the memory for intermediate results


class AdamEpsilon(Probe):
    """The share of each sublayer's entries with sqrt(v) < eps, and what eps takes away of the steps they make.

    v is Adam's second moment with its bias corrected. A step is m / (sqrt(v) + eps); what is taken away is 1 minus the
    sum of |step| over all entries over the same sum with eps = 0. Entries whose v has underflowed to 0 would make no
    finite step with eps = 0, and are in the first sum alone: where there are such, what is taken away is more than
    the number says, and the share is the one to go by. Gradients that shrink with depth show here as
    sublayers that Adam no longer makes up for. An optimizer without second moments has no such numbers.

    Measured every `every` steps and at the last, after the step; it reads the two moments of all parameters once.

    Reference: Wortsman et al. 2023, arXiv:2309.14322, section 3.4 (the gradient's size against eps, by scale).
    """

    name = "adam"
    stopwatch: Stopwatch

    def __init__(self, *, every: int, last: int) -> None:
        self.every, self.last = every, last
        self.stopwatch = Stopwatch()
        self.optimizer: torch.optim.Optimizer | None = None
        self.sums: Tensor | None = None

    def attach(self, subject: Subject) -> None:
        assert subject.parameters is not None
        self.device, self.sites = subject.device, len(subject.sites)
        self.split, self.runs = subject.parameters.split, SiteSquares(subject.parameters).runs
        self.combined = subject.combined
        taken = [sum(s[-1][1] - s[0][0] for s in both if s) for both in subject.parameters.sites]
        self.held = torch.tensor(subject.parameters.held, dtype=torch.float64, device=self.device)
        self.padding = torch.tensor(taken, dtype=torch.float64, device=self.device) - self.held  # whose moments are 0

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def due(self, step: int) -> bool:
        return due_every(step, self.every, self.last)

    def begin(self, step: int) -> None:
        self.sums = None

    def after_step(self, step: int) -> None:
        if self.due(step) and self.optimizer is not None:
            with self.stopwatch.timing(self.device), torch.no_grad():
                self.sums = self._sums(self.optimizer)

    def hand_over(self) -> Mapping[str, Hand]:
        return {} if self.sums is None else {"sums": Hand(self.sums, self.combined)}

    def read(self, values: Mapping[str, Array]) -> Reading:
        self.stopwatch.settle()
        if "sums" not in values or np.isnan(values["sums"]).all():  # no step was applied yet
            return Reading()
        return reading_of(values["sums"].reshape(self.sites, 4))

    def _sums(self, optimizer: torch.optim.Optimizer) -> Tensor:
        """Returns, for each site, the entries below eps, the two sums of steps, and all entries; NaN before any step.

        Shape: result [sites, 4] fp64.
        """
        sums = torch.full((self.sites, 4), torch.nan, dtype=torch.float64, device=self.device)
        groups = optimizer.param_groups
        states = [optimizer.state.get(group["params"][0], {}) for group in groups]
        if any("exp_avg_sq" not in state for state in states):
            return sums
        sums.zero_()
        sums[:, 0], sums[:, 3] = -self.padding, self.held
        edges = []
        for group, state in zip(groups, states, strict=True):
            correction = 1 - group["betas"][1] ** torch.as_tensor(state["step"], dtype=torch.float64)
            edges.append((group["eps"] * correction.sqrt()).float())  # of sqrt(v) as it is kept, 0-d: wherever it is
        for run in self.runs:
            for sites, start in _pieces(run, self.split):
                which = int(start >= self.split)
                place = ((len(sites), run.length), (run.stride, 1), start - which * self.split)
                first, second = (states[which][name].as_strided(*place) for name in ("exp_avg", "exp_avg_sq"))
                found = [each.sum(1).double() for each in entries_of(first, second, edges[which])]
                sums[:, :3].index_add_(0, sites, torch.stack(found, dim=1))
        return sums


def entries_of(first: Tensor, second: Tensor, edge: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns of each entry whether sqrt(v) is below eps, the size of its step, and that with eps = 0.

    `edge` is eps times the root of v's correction, so that it compares with sqrt(v) as the optimizer keeps it. All
    three lack a factor, that of m's correction, which falls out of their ratio.

    Shape: first and second moment [...]; edge as broadcasts to them; results [...].
    """
    root, size = second.float().sqrt(), first.float().abs()
    whole = (size / root).nan_to_num_(0.0, 0.0)  # where v is 0, eps alone has made the step: it is left out
    return root < edge, size / (root + edge), whole


def reading_of(sums: Array) -> Reading:
    """Returns the reading of the sums of the three by row, and of the number of entries.

    Shape: sums [rows, 4].
    """
    below, made, whole, entries = sums.T
    with np.errstate(divide="ignore", invalid="ignore"):
        share, taken = below / entries, np.where(whole > 0, 1 - made / whole, np.nan)
    return Reading(
        {"adam_eps_share": float(below.sum() / entries.sum())}, {"adam_eps_share": share, "adam_eps_taken": taken}
    )


def _pieces(run: Run, split: int) -> Iterator[tuple[Tensor, int]]:
    """Returns the sites and the start of pieces of a run, each of at most PIECE entries and in one of two tensors."""
    most, first = max(1, PIECE // run.length), 0
    while first < len(run.sites):
        start = run.start + first * run.stride
        count = min(most, len(run.sites) - first)
        if start < split:
            count = min(count, -(-(split - start) // run.stride))
        yield run.sites[first : first + count], start
        first += count
