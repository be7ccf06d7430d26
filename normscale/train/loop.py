"""The training loop: one step, on one screen."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import RunConfig
from normscale.data.batches import IGNORE
from normscale.models.init import weights
from normscale.probes.probe import Array, Probe, collect
from normscale.probes.spikes import SpikeScore
from normscale.schemes import Scheme
from normscale.train.engine import Engine
from normscale.train.flat import Fault
from normscale.train.optim import build_optimizer, learning_rate


class Recorder(Protocol):
    """What the loop tells of; the spool's writer fits."""

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None: ...

    def profile(self, step: int, name: str, data: Array) -> None: ...

    def event(self, step: int, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Step:
    """What one attempted step gave, on the host: the loss and gradient norm of the global batch."""

    loss: float
    norm: float
    norm_clipped: float
    lr: float
    applied: bool


Window = Sequence[tuple[Tensor, Tensor]]
"""The micro-batches of one rank's share of one step: tokens and targets, each [B, T] int64."""


class Trainer:
    """Trains one model: counts attempted and applied steps, and lets the probes measure some of them."""

    def __init__(self, engine: Engine, config: RunConfig, probes: Sequence[Probe]) -> None:
        self.engine, self.config, self.probes = engine, config, probes
        self.optimizer = build_optimizer(engine.flat, config.train.optim)
        self.attempted = self.applied = 0
        self.first_bad: tuple[int, int, str | None] | None = None
        self.spikes = SpikeScore()
        self.last_profiles: dict[str, Array] = {}
        self.updates: dict[int, float] = {}
        buffers = [rows for probe in probes if (rows := probe.forward_rows()) is not None]
        assert len(buffers) <= 1, "the model fills one buffer; let the probes share it"
        self.rows = buffers[0] if buffers else None
        self.weights = (
            list(weights(engine.inner)) if type(engine.inner.scheme).after_step is not Scheme.after_step else []
        )
        self.project()
        self._clock, self._targets = time.perf_counter(), 0

    def step(self, window: Window, recorder: Recorder) -> Step:
        """Attempts one optimizer step on one window, tells the recorder, and returns what came of it.

        The loss is the sum over targets divided by the number of targets in the whole global batch, so that neither
        accumulation nor ranks change it. A gradient that is not finite is looked at before clipping could smear it
        over all parameters, and is never applied. The branch on it is the same on every rank: both numbers are.
        """
        engine, flat, train = self.engine, self.engine.flat, self.config.train
        self.attempted += 1
        measured = self.measures(self.attempted)
        probes = self.probes if measured else ()
        for probe in probes:
            probe.begin(self.attempted)
        count = engine.count(sum(int((targets != IGNORE).sum()) for _, targets in window))
        total = self._forward_backward(window, count, probes, self.rows if measured else None)
        for probe in probes:
            probe.after_backward()

        # A step is read on the host once: without these two numbers nobody could say whether to apply it.
        loss, norm = torch.stack([engine.sum(total) / count, flat.grad_norm()]).tolist()
        finite = math.isfinite(loss) and math.isfinite(norm)
        factor = min(1.0, train.optim.clip / (norm + 1e-6)) if finite and train.optim.clip else 1.0
        lr = learning_rate(train.schedule, train.optim.lr, self.applied + 1, train.steps)
        if finite:
            self._apply(lr, factor)
        else:
            self._note_bad_step(loss, norm, window, recorder)
        for probe in probes:
            probe.after_step(self.attempted)
        result = Step(loss, norm, norm * factor, lr, applied=finite)
        self._targets += count
        self.spikes.add(loss)
        if measured or not finite:
            self._record(result, probes, recorder)
        return result

    def _forward_backward(self, window: Window, count: int, probes: Sequence[Probe], rows: Tensor | None) -> Tensor:
        """Fills the gradients and returns this rank's summed loss, a 0-d tensor."""
        engine, flat = self.engine, self.engine.flat
        total = torch.zeros((), device=engine.device)
        flat.zero_grad()
        for i, (tokens, targets) in enumerate(window):
            with engine.micro_batch(last=i == len(window) - 1):
                with engine.autocast():
                    logits = engine.model(tokens.to(engine.device), rows)
                loss = summed_loss(logits, targets.to(engine.device))
                torch.autograd.backward(loss * (engine.world / count))  # the engine averages over ranks
            total += loss.detach()
            for probe in probes:
                probe.after_micro_batch(targets.numel())
        if self.attempted == 1:
            flat.check()  # an engine that took the gradients elsewhere would train nothing
        return total

    def _apply(self, lr: float, factor: float) -> None:
        if factor < 1.0:
            self.engine.flat.grads.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.project()
        self.applied += 1

    def project(self) -> None:
        """Lets the scheme project the weights, where it does."""
        with torch.no_grad():
            self.engine.inner.scheme.after_step(self.weights)

    def measures(self, step: int) -> bool:
        """Tells whether `step` is measured: the first, the last, every `probes.every`, and what a probe asks for."""
        scheduled = step in (1, self.config.train.steps) or step % self.config.probes.every == 0
        return scheduled or any(probe.due(step) for probe in self.probes)

    def evaluate(self, batches: Sequence[tuple[Tensor, Tensor]]) -> float:
        """Returns the held-out loss in nats per target, the same on every rank."""
        total = count = 0.0
        started = time.perf_counter()
        with self.engine.aside() as model:
            for tokens, targets in batches:
                targets = targets.to(self.engine.device)
                total += float(summed_loss(model(tokens.to(self.engine.device)), targets))
                count += float((targets != IGNORE).sum())
        self._clock += time.perf_counter() - started  # tokens a second are those of training
        return total / count

    def _record(self, step: Step, probes: Sequence[Probe], recorder: Recorder) -> None:
        now = time.perf_counter()
        values = {
            "loss_train": step.loss,
            "nonfinite": float(not step.applied),
            "skipped": float(self.attempted - self.applied),
            "spike": self.spikes.score,
            "grad_norm": step.norm,
            "grad_norm_clipped": step.norm_clipped,
            "lr": step.lr,
            "tokens_s": self._targets / max(now - self._clock, 1e-9),
            "applied": float(self.applied),
        }
        self._clock, self._targets = now, 0
        readings = collect(probes, self.engine.sum, self.engine.max) if probes else []
        for reading in readings:
            values |= reading.scalars
            self.last_profiles |= reading.profiles
        if "update" in values:
            self.updates[self.attempted] = values["update"]
        recorder.metrics(self.attempted, self.applied, values)
        for reading in readings:
            for name, profile in reading.profiles.items():
                recorder.profile(self.attempted, name, profile)

    def _note_bad_step(self, loss: float, norm: float, window: Window, recorder: Recorder) -> None:
        """Records which gradients were not finite, before anything touches them."""
        faults = self.engine.flat.faults()
        site, parameter = self._first_bad(loss, window, faults)
        if self.first_bad is None:
            self.first_bad = (self.attempted, site, parameter)
        recorder.event(
            self.attempted,
            "nonfinite",
            loss=loss,
            grad_norm=norm,
            fault=_fault(loss, faults),
            layer=site,
            parameter=parameter or "",
            parameters=[
                {"name": f.parameter, "kind": f.kind, "nan": f.nan, "pos_inf": f.pos_inf, "neg_inf": f.neg_inf}
                for f in faults[:20]
            ],
            parameters_bad=len(faults),
        )

    def _first_bad(self, loss: float, window: Window, faults: Sequence[Fault]) -> tuple[int, str | None]:
        """Returns the site where the step first went wrong (-1: unknown, or an end), and the parameter if known.

        A loss that is not finite went wrong on the way forward: the window runs once more, measured, and the first
        site with a non-finite branch or stream on any rank is it (without dropout, so that a fault that only a mask
        brought about stays unknown). Otherwise it went wrong backward, which starts at the last site, so that the last
        faulty parameter in model order is the first.
        """
        model = self.engine.inner
        if math.isfinite(loss):
            bad = [fault.parameter for fault in faults if model.site_of(fault.parameter) >= 0]
            parameter = bad[-1] if bad else faults[0].parameter if faults else None
            return model.site_of(parameter), parameter
        sites, per_site = len(model.sites()), 1 + model.stream_count
        rows, first = torch.zeros(sites * per_site, 3, device=self.engine.device), sites
        with self.engine.aside() as quiet:
            for tokens, _ in window:
                quiet(tokens.to(self.engine.device), rows)
                found = rows[:, 2].reshape(-1, per_site).sum(dim=1).nonzero()
                if found.numel():
                    first = int(found[0])
                    break
        # Only the rank that held the bad sample has found it; all ranks are here, since they share the loss.
        first = -int(self.engine.max(torch.tensor(-first, device=self.engine.device)))
        return (first if first < sites else -1), None


def summed_loss(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Returns the cross-entropy summed over the targets that count, in fp32.

    Shape: logits [B, T, V], targets [B, T] int64; result 0-d.
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten(), ignore_index=IGNORE, reduction="sum")


def _fault(loss: float, faults: Sequence[Fault]) -> str:
    if faults:
        return faults[0].kind
    return "loss" if not math.isfinite(loss) else "norm overflow: every gradient entry is finite, their squares are not"
