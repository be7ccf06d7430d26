"""The training loop: one step, on one screen."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import SCALED, RunConfig
from normscale.data.task import IGNORE, MicroBatch
from normscale.models.init import weights
from normscale.ops.statistics import Buffers
from normscale.probes.culprit import Culprit
from normscale.probes.guard import Guard
from normscale.probes.ledger import MOST_PENDING, Entry, Ledger, reason_of
from normscale.probes.probe import Array, Probe, Reading
from normscale.probes.spikes import SpikeScore
from normscale.schemes import Scheme
from normscale.train.engine import Engine
from normscale.train.optim import build_optimizer, learning_rate
from normscale.train.provenance import Provenance
from normscale.train.scaler import Change, LossScale


class Recorder(Protocol):
    """What the loop tells of; the spool's writer fits."""

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None: ...

    def profile(self, step: int, name: str, data: Array) -> None: ...

    def event(self, step: int, event: str, **fields: Any) -> None: ...

    def ledger(self, rows: Sequence[Mapping[str, Any]]) -> None: ...


@dataclass(frozen=True)
class Step:
    """What one attempted step gave, on the host: the loss and gradient norm of the global batch.

    With `overflow` it was not applied because something was not finite, and that was put down to the loss scale.
    `aside_s` are the seconds that probes took for passes of their own, which are no part of a training step.
    """

    loss: float
    norm: float
    norm_clipped: float
    lr: float
    applied: bool
    targets: int
    overflow: bool = False
    scale: float | None = None
    aside_s: float = 0.0


MOST_SPIKES_TOLD = 20  # of each series; after that they are only counted, and their steps recorded

Window = Sequence[MicroBatch]
"""The micro-batches of one rank's share of one step."""


class Trainer:
    """Trains one model: counts attempted and applied steps, and lets the probes measure some of them."""

    def __init__(self, engine: Engine, config: RunConfig, probes: Sequence[Probe] | Guard) -> None:
        self.engine, self.config = engine, config
        self.guard = probes if isinstance(probes, Guard) else Guard(probes, engine.device, engine.rank, engine.world)
        self.optimizer = build_optimizer(engine.flat, config.train.optim)
        precision = config.precision
        self.scale = LossScale(precision.loss_scale) if precision.compute in SCALED else None
        self.attempted = self.applied = 0
        self.first_bad: tuple[int, int, str | None] | None = None
        self.culprits: list[Culprit | None] = [None, None]  # of the first bad step, and of the first in the last row
        self.skipped_in_a_row = self.bad_in_a_row = 0  # with and without what is put down to the loss scale
        self.provenance = Provenance(engine, self._loss_by_itself)
        spikes = config.probes.spikes
        self.spikes, self.grad_spikes = (SpikeScore(spikes.sigmas, spikes.window) for _ in range(2))
        self.last_profiles: dict[str, Array] = {}
        self.updates: dict[int, float] = {}
        train, flat = config.train, engine.flat
        self.ledger = Ledger(
            config.probes.stalled,
            lambda applied: learning_rate(train.schedule, train.optim.lr, applied, train.steps),
            flat.values,
            list(flat.spans.values()),
        )
        self.guard.probes.append(self.ledger)
        self.guard.call("meet", self.optimizer)
        self._aside_s = sum(self.guard.seconds().values())
        filled, model = self.guard.buffers(), engine.inner
        rows = torch.zeros(len(model.sites()) * model.rows_per_site, 3, device=engine.device)  # where no probe has them
        self.buffers = Buffers(**{"rows": rows, **filled}) if filled else None
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
        if measured:
            self.guard.call("begin", self.attempted)
            self.guard.call("scaled_by", engine.world * (1.0 if self.scale is None else self.scale.value))
        count = engine.count(sum(batch.n_targets for batch in window))
        total = self._forward_backward(window, count, measured)
        if self.scale is not None:
            flat.grads.mul_(1 / self.scale.value)
        if measured:
            self.guard.call("after_backward")

        # A step is read on the host once: without these two numbers nobody could say whether to apply it.
        loss, norm = torch.stack([engine.sum(total) / count, flat.grad_norm()]).tolist()
        finite = math.isfinite(loss) and math.isfinite(norm)
        factor = min(1.0, train.optim.clip / (norm + 1e-6)) if finite and train.optim.clip else 1.0
        lr = learning_rate(train.schedule, train.optim.lr, self.applied + 1, train.steps)
        scale = None if self.scale is None else self.scale.value
        overflow = not finite and self.scale is not None and self.scale.absorbs()
        reason = None if finite else reason_of(loss, flat.finite, overflow)
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        self.bad_in_a_row = 0 if finite else self.bad_in_a_row + (not overflow)
        self.provenance.end(applied=finite)
        if finite:
            self._apply(lr, factor)
        elif not overflow:
            self._note_bad_step(loss, norm, count, recorder)
        change = self.scale.update(finite) if self.scale is not None else None
        if change is not None:
            self._note_scale(change, loss, count, recorder)
        if measured:
            self.guard.call("after_step", self.attempted)
        result = Step(loss, norm, norm * factor, lr, applied=finite, targets=count, overflow=overflow, scale=scale)
        return self._close(result, reason, measured, recorder)

    def _forward_backward(self, window: Window, count: int, measured: bool) -> Tensor:
        """Fills the gradients and returns this rank's summed loss, a 0-d tensor."""
        engine, flat, to = self.engine, self.engine.flat, self.buffers if measured else None
        scale = 1.0 if self.scale is None else self.scale.value
        total = torch.zeros((), device=engine.device)
        self.provenance.begin()
        flat.zero_grad()
        for i, batch in enumerate(window):
            self.provenance.keep(batch)
            batch = batch.to(engine.device)
            with engine.micro_batch(last=i == len(window) - 1):
                with engine.autocast():
                    logits = engine.model(batch.tokens_BT, to, **batch.beside)
                loss = summed_loss(logits, batch.targets_BT)
                if measured:
                    self.guard.call("after_forward", logits.detach(), batch.targets_BT)
                torch.autograd.backward(loss * (engine.world / count * scale))  # the engine averages over ranks
            total += loss.detach()
            if measured:
                self.guard.call("after_micro_batch", self._positions(batch))
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

    def _close(self, step: Step, reason: str | None, measured: bool, recorder: Recorder) -> Step:
        """Enters a step into the ledger and the spike scores, and records it if it is measured or stands out."""
        norm = step.norm_clipped if step.applied else None
        scale = None if self.scale is None else self.scale.value
        entry = Entry(self.attempted, reason, step.lr, step.norm, norm, step.scale, scale)
        for event, fields in self.ledger.add(entry):
            recorder.event(self.attempted, event, **fields)
            self._say_stalled(**fields)
        self._targets += step.targets
        recorded = self._note_spikes(step, recorder) or measured or not step.applied
        if recorded:
            aside_s = self._set_aside()
            self._record(step, measured, recorder)
            step = replace(step, aside_s=aside_s + self._set_aside())
        if rows := self.ledger.flush(at_least=1 if recorded else MOST_PENDING):
            recorder.ledger(rows)
        for probe, why in self.guard.news():
            recorder.event(self.attempted, "probe_off", probe=probe, reason=why)
        return step

    def _note_spikes(self, step: Step, recorder: Recorder) -> bool:
        """Returns whether the loss or the gradient norm has spiked; what a loss scale has spoilt does not count."""
        spiked = False
        for of, score, value in (("loss", self.spikes, step.loss), ("grad_norm", self.grad_spikes, step.norm)):
            if step.overflow and not math.isfinite(value):
                continue
            spike = score.add(value)
            spiked |= spike
            if spike and math.isfinite(value) and score.spikes <= MOST_SPIKES_TOLD:
                recorder.event(self.attempted, "spike", of=of, value=value, sigmas=score.distance)
        return spiked

    def _say_stalled(self, in_a_row: int, reasons: str) -> None:
        if self.engine.rank == 0:
            line = f"normscale: step {self.attempted}: {in_a_row} steps in a row were not applied ({reasons})"
            print(f"{line}; the weights are those of {in_a_row} steps before", file=sys.stderr, flush=True)

    def _set_aside(self) -> float:
        """Returns what the probes' own passes took since it was last asked; leaves it out of the tokens a second."""
        spent = sum(self.guard.seconds().values())
        new, self._aside_s = spent - self._aside_s, spent
        self.paused(new)
        return new

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
            "culprits": [None if culprit is None else culprit.fields() for culprit in self.culprits],
            "in_a_row": [self.skipped_in_a_row, self.bad_in_a_row],
            "provenance": self.provenance.state_dict(),
            "spikes": self.spikes.state_dict(),
            "grad_spikes": self.grad_spikes.state_dict(),
            "last_profiles": {name: profile.tolist() for name, profile in self.last_profiles.items()},
            "updates": list(self.updates.items()),
            "probes": self.guard.state_dict(),
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
        self.culprits = [None if fields is None else Culprit.from_fields(fields) for fields in state["culprits"]]
        self.skipped_in_a_row, self.bad_in_a_row = state["in_a_row"]
        self.provenance.load_state_dict(state["provenance"])
        self.spikes.load_state_dict(state["spikes"])
        self.grad_spikes.load_state_dict(state["grad_spikes"])
        self.last_profiles = {name: np.array(profile) for name, profile in state["last_profiles"].items()}
        self.updates = dict(state["updates"])
        self.guard.load_state_dict(state["probes"])
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
        return self.guard.due(step) or scheduled

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

    def _record(self, step: Step, measured: bool, recorder: Recorder) -> None:
        now = time.perf_counter()
        values = {
            "loss_train": step.loss,
            "nonfinite": float(not step.applied and not step.overflow),
            "skipped": float(self.attempted - self.applied),
            "spike": self.spikes.score,
            "spike_grad": self.grad_spikes.score,
            "grad_norm": step.norm,
            "grad_norm_clipped": step.norm_clipped,
            "lr": step.lr,
            "tokens_s": self._targets / max(now - self._clock, 1e-9),
            "applied": float(self.applied),
        }
        if step.scale is not None:
            values["loss_scale"] = step.scale
        self._clock, self._targets = now, 0
        readings = self.guard.collect(self.attempted, self.engine.sum, self.engine.max) if measured else []
        if step.overflow:  # what the scale has spoilt says nothing of the model
            readings = [_finite(reading) for reading in readings]
        for reading in readings:
            values |= reading.scalars
            self.last_profiles |= reading.profiles
        self.provenance.remember(self.attempted, {n: p for reading in readings for n, p in reading.profiles.items()})
        if step.overflow:
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        if "update" in values:
            asked = self.config.probes.update.steps
            self.updates = {at: value for at, value in self.updates.items() if at in asked}
            self.updates[self.attempted] = values["update"]
        recorder.metrics(self.attempted, self.applied, values)
        for reading in readings:
            for name, profile in reading.profiles.items():
                recorder.profile(self.attempted, name, profile)
            for event, fields in reading.events:
                recorder.event(self.attempted, event, **fields)

    def _loss_by_itself(self, batch: MicroBatch) -> Tensor:
        """Returns the summed loss of one micro-batch by the model itself, without the engine around it."""
        with self.engine.autocast():
            logits = self.engine.inner(batch.tokens_BT, **batch.beside)
        return summed_loss(logits, batch.targets_BT)

    def _note_bad_step(self, loss: float, norm: float, count: int, recorder: Recorder) -> None:
        """Records where the step went wrong and which gradients are not finite, before anything touches them."""
        scale = 1.0 if self.scale is None else self.scale.value
        begun = time.perf_counter()
        found = self.provenance.seek(loss, self.engine.world / count * scale)
        self.paused(time.perf_counter() - begun)
        if self.first_bad is None:
            self.first_bad, self.culprits[0] = (self.attempted, found.site, found.parameter), found.culprit
        if self.bad_in_a_row == 1:
            self.culprits[1] = found.culprit
        train = self.config.train
        after = train.on_nonfinite == "skip" and train.stop_after is not None
        recorder.event(
            self.attempted,
            "nonfinite",
            loss=loss,
            grad_norm=norm,
            **({} if self.scale is None else {"loss_scale": scale}),
            **found.fields(loss),
            policy=f"stop after {train.stop_after}" if after else train.on_nonfinite,
            in_a_row=self.bad_in_a_row,
        )

    def _note_scale(self, change: Change, loss: float, count: int, recorder: Recorder) -> None:
        """Records a new loss scale; where the loss itself was not finite, which no scale brings about, the site too.

        Where so many steps in a row were not applied that a run without a scale would end, their culprit is sought.
        """
        where: dict[str, Any] = {}
        if change.reason == "overflow":
            where["found_in"] = "gradient" if math.isfinite(loss) else "forward"
            after = self.config.train.stop_after
            if after is not None and self.skipped_in_a_row % after == 0:
                found = self.provenance.seek(loss, self.engine.world / count * change.before)
                where |= {name: value for name, value in found.fields(loss).items() if name in ("layer", "culprit")}
            elif where["found_in"] == "forward":
                where["layer"] = self.provenance.site_by_rows()
        recorder.event(
            self.attempted, "loss_scale", before=change.before, after=change.after, reason=change.reason, **where
        )

    def stops(self, step: Step) -> bool:
        """Tells whether the run ends with this step, by `train.on_nonfinite` and `train.stop_after`; ranks agree."""
        if step.applied or step.overflow:
            return False
        train = self.config.train
        return train.on_nonfinite == "stop" or (train.stop_after is not None and self.bad_in_a_row >= train.stop_after)

    def culprit(self) -> Culprit | None:
        """Returns what a run that ended not finite should name: of the bad steps that ended it, else of the first."""
        after = self.config.train.stop_after
        return self.culprits[1 if after is not None and self.bad_in_a_row >= after else 0]


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
        reading.events,
    )
