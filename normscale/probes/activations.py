"""The size of the residual stream and of the branches, site by site."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normscale.probes.gradients import depth_slope
from normscale.probes.headroom import Headroom
from normscale.probes.lengths import within
from normscale.probes.probe import Array, Hand, Probe, Reading, Subject
from normscale.probes.sending import sent


class Activations(Probe):
    """RMS, largest absolute value and non-finite count of every branch, stream and z, over the whole step.

    Of the stream also the mean of all entries against the RMS, the branch's RMS against it, and its growth: the slope
    of log RMS over log site index, on the side with the head. The model fills one row for each branch and stream as it
    runs (`ops.statistics`); micro-batches are folded here, on the device. The stream of a scheme with several is the
    first of them; of the others the largest RMS is reported, and the headroom is that of all. An RMS below 1e-22 or
    above 1e19, whose squares fp32 does not hold, is given as the least or the largest that its largest entry allows.
    """

    name = "activations"

    def attach(self, subject: Subject) -> None:
        self.sites, self.per_site, self.width = len(subject.sites), subject.rows_per_site, subject.width
        self.streams, self.has_z = subject.streams, subject.sums
        count = self.sites * self.per_site
        self.rows = torch.zeros(count, 3, dtype=torch.float32, device=subject.device)
        self.entries = torch.zeros(count, 1, dtype=torch.float32, device=subject.device)  # their sums
        self.sums = torch.zeros(count, 3, dtype=torch.float32, device=subject.device)
        self.maxima = torch.zeros(count, dtype=torch.float32, device=subject.device)
        self.sides = [site.partition(".")[0] for site in subject.sites]
        limits = [subject.largest, *[subject.largest_stream] * subject.streams, *[subject.largest_sum] * self.has_z]
        self.room = subject.largest / np.array(limits)  # what an entry of each row is to be compared as
        self.headroom = Headroom(subject.largest, self.sites)
        self.step = 0

    def buffers(self) -> Mapping[str, Tensor]:
        return {"rows": self.rows, "sums": self.entries}

    def begin(self, step: int) -> None:
        self.step = step
        self.sums.zero_()
        self.maxima.zero_()
        self.positions = dict.fromkeys(("encoder", "decoder"), 0)

    def after_micro_batch(self, positions: Mapping[str, int]) -> None:
        self.sums[:, :2] += self.rows[:, 0::2]
        self.sums[:, 2:] += self.entries
        torch.maximum(self.maxima, self.rows[:, 1], out=self.maxima)
        for side, count in positions.items():
            self.positions[side] += count

    def hand_over(self) -> Mapping[str, Hand]:
        return {
            "sums": Hand(self.sums, "sum"),
            "positions": Hand(sent([*self.positions.values()], self.sums.device), "sum"),
            "maxima": Hand(self.maxima, "max"),
            "step": Hand(sent([self.step], self.sums.device), "first"),
        }

    def read(self, values: Mapping[str, Array]) -> Reading:
        squares, nonfinite, total = values["sums"].reshape(self.sites, self.per_site, 3).transpose(2, 0, 1)
        absmax = values["maxima"].reshape(self.sites, self.per_site)
        counts = dict(zip(self.positions, values["positions"], strict=True))
        entries = np.array([[counts[side]] for side in self.sides]) * self.width
        rms = within(np.sqrt(squares / entries), squares, absmax / np.sqrt(entries), absmax)
        branch, stream = rms[:, 0], rms[:, 1]
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = branch / stream
            share = np.abs(total[:, 1] / entries[:, 0]) / stream
        scalars = {
            "stream_first": float(stream[0]),
            "stream_last": float(stream[-1]),
            "stream_max": float(absmax[:, 1].max()),
            "branch_p50": float(np.median(ratio)),
        }
        growth = depth_slope(stream[[side == self.sides[-1] for side in self.sides]])
        if np.isfinite(growth):
            scalars["stream_growth"] = growth
        profiles = {
            "stream_rms": stream,
            "stream_absmax": absmax[:, 1],
            "stream_nonfinite": nonfinite[:, 1],
            "stream_mean_share": share,
            "branch_rms": branch,
            "branch_absmax": absmax[:, 0],
            "branch_nonfinite": nonfinite[:, 0],
            "branch_ratio": ratio,
        }
        if self.streams > 1:
            profiles["other_stream_rms"] = rms[:, 2 : 1 + self.streams].max(axis=1)
        if self.has_z:
            profiles |= {"z_rms": rms[:, -1], "z_absmax": absmax[:, -1], "z_nonfinite": nonfinite[:, -1]}
        room = self.headroom.read(int(values["step"][0]), (absmax * self.room).max(axis=1))
        return Reading(scalars | room.scalars, profiles | room.profiles)

    def state_dict(self) -> dict[str, Any]:
        return self.headroom.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.headroom.load_state_dict(state)
