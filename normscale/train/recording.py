"""What the steps of a run leave in its records: numbers, profiles, events, the ledger."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from normscale.arguments import to_stderr
from normscale.config.schema import RunConfig
from normscale.probes.culprit import Culprit
from normscale.probes.guard import Guard, Sent
from normscale.probes.ledger import MOST_PENDING, Entry, Ledger
from normscale.probes.probe import Array, Reading
from normscale.probes.spikes import SpikeScore
from normscale.train.engines.engine import Engine
from normscale.train.optim import learning_rate
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


@dataclass(frozen=True)
class Unwritten:
    """The record of one step that waits for what its probes have sent, where they have."""

    step: int
    applied: int
    values: dict[str, float]
    overflow: bool
    sent: Sent | None


MOST_SPIKES_TOLD = 20  # of each series; after that they are only counted, and their steps recorded


class StepRecords:
    """What is known of the steps so far, beside the weights; the loop tells it of each step, and it the recorder.

    Attributes:
        attempted, applied: steps so far.
        first_bad: step, site and parameter of the first bad step.
        culprits: of the first bad step, and of the first in the last row of such.
        skipped_in_a_row, bad_in_a_row: with and without what is put down to the loss scale.
        last_profiles: the newest of each.
        updates: model updates by step, where they were asked for.
    """

    def __init__(
        self, engine: Engine, config: RunConfig, guard: Guard, scale: LossScale | None, provenance: Provenance
    ) -> None:
        self.engine, self.config, self.guard, self.scale, self.provenance = engine, config, guard, scale, provenance
        self.attempted = self.applied = 0
        self.first_bad: tuple[int, int, str | None] | None = None
        self.culprits: list[Culprit | None] = [None, None]
        self.skipped_in_a_row = self.bad_in_a_row = 0
        spikes = config.probes.spikes
        self.spikes, self.grad_spikes = (SpikeScore(spikes.sigmas, spikes.window) for _ in range(2))
        self.last_profiles: dict[str, Array] = {}
        self.updates: dict[int, float] = {}
        train = config.train
        self.ledger = Ledger(
            config.probes.stalled,
            lambda applied: learning_rate(train.schedule, train.optim.lr, applied, train.steps),
            engine.parameters(),
            engine.combined,
        )
        self._clock, self._targets = time.perf_counter(), 0
        self._aside_s = self._new_aside_s = 0.0  # what probes' own passes took so far; of that, in the step at hand
        self._unwritten: Unwritten | None = None

    def records_state(self) -> dict[str, Any]:
        """Returns what has to survive a restart, the same on every rank."""
        return {
            "attempted": self.attempted,
            "applied": self.applied,
            "first_bad": self.first_bad,
            "culprits": [None if culprit is None else culprit.fields() for culprit in self.culprits],
            "in_a_row": [self.skipped_in_a_row, self.bad_in_a_row],
            "provenance": self.provenance.state_dict(),
            "spikes": self.spikes.state_dict(),
            "grad_spikes": self.grad_spikes.state_dict(),
            "last_profiles": {name: profile.tolist() for name, profile in self.last_profiles.items()},
            "updates": list(self.updates.items()),
        }

    def load_records_state(self, state: Mapping[str, Any]) -> None:
        """Takes back what `records_state` gave."""
        self.attempted, self.applied = state["attempted"], state["applied"]
        self.first_bad = None if state["first_bad"] is None else tuple(state["first_bad"])
        self.culprits = [None if fields is None else Culprit.from_fields(fields) for fields in state["culprits"]]
        self.skipped_in_a_row, self.bad_in_a_row = state["in_a_row"]
        self.provenance.load_state_dict(state["provenance"])
        self.spikes.load_state_dict(state["spikes"])
        self.grad_spikes.load_state_dict(state["grad_spikes"])
        self.last_profiles = {name: np.array(profile) for name, profile in state["last_profiles"].items()}
        self.updates = dict(state["updates"])
        self._clock, self._targets = time.perf_counter(), 0

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
            self._set_aside()
            self._record(step, measured, recorder)
        if rows := self.ledger.flush(at_least=1 if recorded else MOST_PENDING):
            recorder.ledger(rows)
        self._tell_news(self.attempted, recorder)
        if self._new_aside_s:
            step, self._new_aside_s = replace(step, aside_s=self._new_aside_s), 0.0
        return step

    def _tell_news(self, step: int, recorder: Recorder) -> None:
        for probe, why in self.guard.news():
            recorder.event(step, "probe_off", probe=probe, reason=why)

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
            line = f"step {self.attempted}: {in_a_row} steps in a row were not applied ({reasons})"
            to_stderr(f"{line}; the weights are those of {in_a_row} steps before")

    def _set_aside(self) -> None:
        """Takes note of what the probes' own passes took since it last did; leaves it out of the tokens a second."""
        spent = sum(self.guard.seconds().values())
        new, self._aside_s = spent - self._aside_s, spent
        self._new_aside_s += new
        self.paused(new)

    def paused(self, seconds: float) -> None:
        """Leaves time that was not spent on training out of the tokens a second."""
        self._clock += seconds

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
        sent = self.guard.send(self.attempted, self.engine.sum, self.engine.max) if measured else None
        self._unwritten = Unwritten(self.attempted, self.applied, values, step.overflow, sent)
        if sent is None or sent.ready:
            self.settle(recorder)

    def settle(self, recorder: Recorder, alone: bool = False) -> None:
        """Writes the record that waits for numbers of its probes, if one does: where the host has just waited anyway.

        On a GPU that is when the next step is read, or when something is recorded, kept or ended before that. All ranks
        call it together, but one that is `alone` with an error.
        """
        waiting, self._unwritten = self._unwritten, None
        if waiting is None:
            return
        values, readings = waiting.values, [] if waiting.sent is None else self.guard.receive(waiting.sent, alone)
        if waiting.overflow:  # what the scale has spoilt says nothing of the model
            readings = [_finite(reading) for reading in readings]
        for reading in readings:
            values |= reading.scalars
            self.last_profiles |= reading.profiles
        profiles = {name: profile for reading in readings for name, profile in reading.profiles.items()}
        self.provenance.remember(waiting.step, profiles, values)
        if waiting.overflow:
            values = {name: value for name, value in values.items() if math.isfinite(value)}
        if "update" in values:
            asked = self.config.probes.update.steps
            self.updates = {at: value for at, value in self.updates.items() if at in asked}
            self.updates[waiting.step] = values["update"]
        recorder.metrics(waiting.step, waiting.applied, values)
        for reading in readings:
            for name, profile in reading.profiles.items():
                recorder.profile(waiting.step, name, profile)
            for event, fields in reading.events:
                recorder.event(waiting.step, event, **fields)
        self._set_aside()
        self._tell_news(waiting.step, recorder)

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


def _finite(reading: Reading) -> Reading:
    """Returns the reading without what is not finite."""
    return Reading(
        {name: value for name, value in reading.scalars.items() if math.isfinite(value)},
        {name: profile for name, profile in reading.profiles.items() if np.isfinite(profile).all()},
        reading.events,
    )
