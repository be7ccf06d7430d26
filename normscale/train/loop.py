"""The training loop: one step, on one screen."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import SCALED, RunConfig
from normscale.data.task import IGNORE, MicroBatch
from normscale.models.init import weights
from normscale.probes.probe import Array, Probe, Reading, collect
from normscale.probes.spikes import SpikeScore
from normscale.schemes import Scheme
from normscale.train.engine import Engine
from normscale.train.flat import Fault
from normscale.train.optim import build_optimizer, learning_rate
from normscale.train.scaler import Change, LossScale


class Recorder(Protocol):
    """What the loop tells of; the spool's writer fits."""

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None: ...

    def profile(self, step: int, name: str, data: Array) -> None: ...

    def event(self, step: int, event: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Step:
    """What one attempted step gave, on the host: the loss and gradient norm of the global batch.

    With `overflow` it was not applied because something was not finite, and that was put down to the loss scale.
    """

    loss: float
    norm: float
    norm_clipped: float
    lr: float
    applied: bool
    targets: int
    overflow: bool = False
    scale: float | None = None


Window = Sequence[MicroBatch]
"""The micro-batches of one rank's share of one step."""


class Trainer:
    """Trains one model: counts attempted and applied steps, and lets the probes measure some of them."""

    def __init__(self, engine: Engine, config: RunConfig, probes: Sequence[Probe]) -> None:
        self.engine, self.config, self.probes = engine, config, probes
        self.optimizer = build_optimizer(engine.flat, config.train.optim)
        precision = config.precision
        self.scale = LossScale(precision.loss_scale) if precision.compute in SCALED else None
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
        A loss scale is taken out of the gradients before anything looks at them.
        """
        engine, flat, train = self.engine, self.engine.flat, self.config.train
        self.attempted += 1
        measured = self.measures(self.attempted)
        probes = self.probes if measured else ()
        for probe in probes:
            probe.begin(self.attempted)
        count = engine.count(sum(batch.n_targets for batch in window))
        total = self._forward_backward(window, count, probes, self.rows if measured else None)
        if self.scale is not None:
            flat.grads.mul_(1 / self.scale.value)
        for probe in probes:
            probe.after_backward()

        # A step is read on the host once: without these two numbers nobody could say whether to apply it.
        loss, norm = torch.stack([engine.sum(total) / count, flat.grad_norm()]).tolist()
        finite = math.isfinite(loss) and math.isfinite(norm)
        factor = min(1.0, train.optim.clip / (norm + 1e-6)) if finite and train.optim.clip else 1.0
        lr = learning_rate(train.schedule, train.optim.lr, self.applied + 1, train.steps)
        scale = None if self.scale is None else self.scale.value
        overflow = not finite and self.scale is not None and self.scale.absorbs()
        if finite:
            self._apply(lr, factor)
        elif not overflow:
            self._note_bad_step(loss, norm, window, recorder)
        change = self.scale.update(finite) if self.scale is not None else None
        if change is not None:
            self._note_scale(change, loss, window, recorder)
        for probe in probes:
            probe.after_step(self.attempted)
        result = Step(loss, norm, norm * factor, lr, applied=finite, targets=count, overflow=overflow, scale=scale)
        self._targets += count
        if math.isfinite(loss) or not overflow:
            self.spikes.add(loss)
        if measured or not finite:
            self._record(result, probes, recorder)
        return result

    def _forward_backward(self, window: Window, count: int, probes: Sequence[Probe], rows: Tensor | None) -> Tensor:
        """Fills the gradients and returns this rank's summed loss, a 0-d tensor."""
        engine, flat = self.engine, self.engine.flat
        scale = 1.0 if self.scale is None else self.scale.value
        total = torch.zeros((), device=engine.device)
        flat.zero_grad()
        for i, batch in enumerate(window):
            batch = batch.to(engine.device)
            with engine.micro_batch(last=i == len(window) - 1):
                with engine.autocast():
                    logits = engine.model(batch.tokens_BT, rows, **batch.beside)
                loss = summed_loss(logits, batch.targets_BT)
                torch.autograd.backward(loss * (engine.world / count * scale))  # the engine averages over ranks
            total += loss.detach()
            for probe in probes:
                probe.after_micro_batch(self._positions(batch))
        if self.attempted == 1:
            flat.check()  # an engine that took the gradients elsewhere would train nothing
        return total

    def _positions(self, batch: MicroBatch) -> dict[str, int]:
        """Returns the number of positions each side's stream has in a micro-batch, padding included."""
        sides = {"encoder" if self.engine.inner.depth.topology == "encoder" else "decoder": batch.tokens_BT.numel()}
        return sides if batch.source_BS is None else {"encoder": batch.source_BS.numel(), **sides}

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

    def state_dict(self) -> dict[str, Any]:
        """Returns all that the steps to come depend on, the same on every rank; tensors are not copied."""
        return {
            "model": self.engine.inner.state_dict() | self.engine.flat.named(),
            "optimizer": {str(i): self.optimizer.state.get(leaf, {}) for i, leaf in enumerate(self._leaves())},
            "attempted": self.attempted,
            "applied": self.applied,
            "scale": None if self.scale is None else self.scale.state_dict(),
            "first_bad": self.first_bad,
            "spikes": self.spikes.state_dict(),
            "last_profiles": {name: profile.tolist() for name, profile in self.last_profiles.items()},
            "updates": list(self.updates.items()),
            "probes": {probe.name: probe.state_dict() for probe in self.probes},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave; what is loaded is not projected again."""
        for name, values in self.engine.inner.state_dict().items():
            values.copy_(state["model"][name])
        for i, leaf in enumerate(self._leaves()):
            kept = state["optimizer"][str(i)]
            self.optimizer.state[leaf] = {key: value.to(leaf.device) for key, value in kept.items()}
        self.attempted, self.applied = state["attempted"], state["applied"]
        if self.scale is not None:
            self.scale.load_state_dict(state["scale"])
        self.first_bad = None if state["first_bad"] is None else tuple(state["first_bad"])
        self.spikes.load_state_dict(state["spikes"])
        self.last_profiles = {name: np.array(profile) for name, profile in state["last_profiles"].items()}
        self.updates = dict(state["updates"])
        for probe in self.probes:
            probe.load_state_dict(state["probes"][probe.name])
        self._clock, self._targets = time.perf_counter(), 0

    def late_state(self) -> dict[str, Tensor]:
        """Returns tensors without values like those that the optimizer adds to the state at its first step, by path."""
        scalar = torch.empty((), device="meta")
        late: dict[str, Tensor] = {}
        for i, leaf in enumerate(self._leaves()):
            like = torch.empty_like(leaf, device="meta")
            tensors = {"step": scalar, "exp_avg": like, "exp_avg_sq": like, "momentum_buffer": like}
            late |= {f"optimizer/{i}/{name}": tensor for name, tensor in tensors.items()}
        return late

    def _leaves(self) -> list[Tensor]:
        return [leaf for group in self.optimizer.param_groups for leaf in group["params"]]

    def paused(self, seconds: float) -> None:
        """Leaves time that was not spent on training out of the tokens a second."""
        self._clock += seconds

    def measures(self, step: int) -> bool:
        """Tells whether `step` is measured: the first, the last, every `probes.every`, and what a probe asks for.

        Where a loss scale begins with overflows, the steps up to the first that is applied are measured.
        """
        scheduled = step in (1, self.config.train.steps) or step % self.config.probes.every == 0
        scheduled = scheduled or (self.scale is not None and not self.applied)
        return scheduled or any(probe.due(step) for probe in self.probes)

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the held-out loss in nats per target, the same on every rank."""
        total = count = 0.0
        started = time.perf_counter()
        with self.engine.aside() as model:
            for batch in batches:
                batch = batch.to(self.engine.device)
                total += float(summed_loss(model(batch.tokens_BT, **batch.beside), batch.targets_BT))
                count += batch.n_targets
        self.paused(time.perf_counter() - started)
        return total / count

    def _record(self, step: Step, probes: Sequence[Probe], recorder: Recorder) -> None:
        now = time.perf_counter()
        values = {
            "loss_train": step.loss,
            "nonfinite": float(not step.applied and not step.overflow),
            "skipped": float(self.attempted - self.applied),
            "spike": self.spikes.score,
            "grad_norm": step.norm,
            "grad_norm_clipped": step.norm_clipped,
            "lr": step.lr,
            "tokens_s": self._targets / max(now - self._clock, 1e-9),
            "applied": float(self.applied),
        }
        if step.scale is not None:
            values["loss_scale"] = step.scale
        self._clock, self._targets = now, 0
        readings = collect(probes, self.engine.sum, self.engine.max) if probes else []
        if step.overflow:  # what the scale has spoilt says nothing of the model
            readings = [_finite(reading) for reading in readings]
        for reading in readings:
            values |= reading.scalars
            self.last_profiles |= reading.profiles
        if step.overflow:
            values = {name: value for name, value in values.items() if math.isfinite(value)}
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
            **({} if self.scale is None else {"loss_scale": self.scale.value}),
            fault=_fault(loss, faults),
            layer=site,
            parameter=parameter or "",
            parameters=[
                {"name": f.parameter, "kind": f.kind, "nan": f.nan, "pos_inf": f.pos_inf, "neg_inf": f.neg_inf}
                for f in faults[:20]
            ],
            parameters_bad=len(faults),
        )

    def _note_scale(self, change: Change, loss: float, window: Window, recorder: Recorder) -> None:
        """Records a new loss scale; where the loss itself was not finite, which no scale brings about, the site too."""
        where: dict[str, Any] = {}
        if change.reason == "overflow":
            forward = not math.isfinite(loss)
            where = {"found_in": "forward", "layer": self._first_bad(loss, window, ())[0]} if forward else {}
            where = where or {"found_in": "gradient"}
        recorder.event(
            self.attempted, "loss_scale", before=change.before, after=change.after, reason=change.reason, **where
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
            for batch in window:
                batch = batch.to(self.engine.device)
                quiet(batch.tokens_BT, rows, **batch.beside)
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


def _finite(reading: Reading) -> Reading:
    """Returns the reading without what is not finite."""
    return Reading(
        {name: value for name, value in reading.scalars.items() if math.isfinite(value)},
        {name: profile for name, profile in reading.profiles.items() if np.isfinite(profile).all()},
    )


def _fault(loss: float, faults: Sequence[Fault]) -> str:
    if faults:
        return faults[0].kind
    return "loss" if not math.isfinite(loss) else "norm overflow: every gradient entry is finite, their squares are not"
