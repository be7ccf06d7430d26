"""What training costs: time of the steps alone, FLOP/s, MFU and peak memory, for the summary of a run."""

import re
import resource
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normscale.config.schema import RunConfig
from normscale.data.task import MicroBatch
from normscale.train.flops import Lengths, flops_per_sequence, peak_of

WARM_UP = 2  # steps that compile and allocate: the first measured one and the first plain one


class Meter:
    """Times the training steps of one attempt of a run; evaluations and checkpoints stay outside.

    The first steps are left out of the rates as soon as there are further ones. What an attempt did before it was
    interrupted is not in the numbers of the next.
    """

    def __init__(self, config: RunConfig, vocab: int, device: torch.device, world: int) -> None:
        precision = config.precision
        self._config, self._vocab, self._device, self._world = config, vocab, device, world
        self.peak = peak_of(device, precision.compute, precision.tf32)
        self._warm_up, self._counted = _Sums(), _Sums()
        self._memory_source = _reset_peak(device)

    def add(self, seconds: float, window: Sequence[MicroBatch], targets: int) -> None:
        """Counts one training step: this rank's micro-batches, and the targets of all ranks."""
        flops = sum(
            batch.tokens_BT.shape[0] * flops_per_sequence(self._config.model, self._vocab, lengths_seen(batch))
            for batch in window
        )
        sums = self._warm_up if self._warm_up.steps < WARM_UP else self._counted
        sums.steps += 1
        sums.seconds += seconds
        sums.targets += targets
        sums.flops += flops * self._world  # every rank has as many sequences, of the same lengths

    def summary(self) -> dict[str, Any]:
        """Returns the fields for the end record; the rates are missing before the first step."""
        memory = {"peak_memory_bytes": _peak_memory(self._device), "peak_memory_source": self._memory_source}
        sums = self._counted if self._counted.steps else self._warm_up
        if not sums.steps:
            return memory
        seconds = max(sums.seconds, 1e-9)
        return {
            "train_seconds": self._warm_up.seconds + self._counted.seconds,
            "tokens_s": sums.targets / seconds,
            "flops_per_step": sums.flops / sums.steps,
            "tflops_s": sums.flops / seconds / 1e12,
            "mfu": sums.flops / seconds / (self.peak.flops_s * self._world),
            "peak_flops": self.peak.flops_s * self._world,
            "peak_source": self.peak.source,
            **memory,
        }


@dataclass
class _Sums:
    steps: int = 0
    seconds: float = 0.0
    targets: int = 0
    flops: int = 0


def lengths_seen(batch: MicroBatch) -> Lengths:
    """Returns the lengths of the sequences of a micro-batch."""
    return Lengths(batch.tokens_BT.shape[1], 0 if batch.source_BS is None else batch.source_BS.shape[1])


def _reset_peak(device: torch.device) -> str:
    """Starts the peak of memory anew for this run where that is possible, and returns what will be read."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return "allocated on the device"
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # VmHWM falls to what is resident now
        return "resident, during the run"
    except OSError:
        return "resident, during the process"


def _peak_memory(device: torch.device) -> int:
    """Returns the largest memory in bytes: what torch allocated on a GPU, else what the process had resident."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    except OSError:
        found = None
    if found:
        return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
