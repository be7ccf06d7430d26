"""What goes into the records of a monitored run, step by step."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from normscale.arguments import to_stderr
from normscale.monitor.engines import Engine, Result
from normscale.monitor.parameters import BlockParameters
from normscale.monitor.records import Records
from normscale.monitor.rows import BlockRows
from normscale.probes.ledger import MOST_PENDING, Entry, Ledger, Tally, disagreements
from normscale.probes.probe import Reading
from normscale.probes.sending import Fetched
from normscale.probes.spikes import SpikeScore
from normscale.tracking.record import PROBE_S, Outcome

MOST_SPIKES_TOLD = 20


@dataclass(frozen=True)
class Page:
    """What is known of a step at once, and what its record will begin with; numbers that are not known are None.

    `late_lr` is the learning rate where it is still on its way to the host.
    """

    entry: Entry
    applied: int
    values: Mapping[str, float | None]
    overflow: bool
    late_lr: Fetched | None = None

    def complete(self) -> "Page":
        """Returns the same with the learning rate; the host waits if that has not come yet."""
        if self.late_lr is None:
            return self
        lr = float(self.late_lr.arrived())
        return replace(self, entry=replace(self.entry, lr=lr), values={**self.values, "lr": lr}, late_lr=None)


class Journal:
    """Keeps the ledger and the spike scores, and writes metrics, profiles and events.

    The score of the gradient norm is over steps whose norm is known, which may be the measured ones alone.
    """

    def __init__(self, records: Records, stalled: int, sigmas: float, window: int) -> None:
        self.records = records
        self.ledger = Ledger(stalled)
        self.spikes, self.grad_spikes = SpikeScore(sigmas, window), SpikeScore(sigmas, window)
        self.first_bad: tuple[int, int, str] | None = None
        self.loss = math.nan
        self._begun = time.perf_counter()
        self._said: set[str] = set()

    def add(self, step: int, applied: int, result: Result, lr: float | Fetched | None, measured: bool) -> Page:
        """Takes in a step; writes it if it was not applied or stands out. One that was `measured` waits for `write`."""
        late_lr = lr if isinstance(lr, Fetched) else None
        entry = Entry(
            step,
            None if result.applied else result.reason,
            None if isinstance(lr, Fetched) else lr,
            result.norm,
            result.clipped,
            result.scale,
            result.scale_after,
        )
        for event, fields in self.ledger.add(entry, {"lr": late_lr, "scale_after": result.scale_late}):
            self.records.event(step, event, **fields)
            in_a_row, reasons = fields["in_a_row"], fields["reasons"]
            self._say(
                f"step {step}: {in_a_row} steps in a row were not applied ({reasons}); the weights are those of "
                f"{in_a_row} steps before"
            )
        stands_out = self._spiked(step, result) or result.bad or not result.applied
        values, overflow = self._values(entry, applied, result), result.reason == "loss scale overflow"
        page = Page(entry, applied, values, overflow, late_lr)
        if stands_out and not measured:
            self._write(page.complete(), ())
        if not measured:
            self._write_ledger(at_least=MOST_PENDING if result.applied else 1)
        return page

    def write(self, page: Page, counts: Tally, readings: Sequence[Reading]) -> None:
        """Writes a measured step, of which the readings have come."""
        page = page.complete()
        self._write(page, readings)
        if said := disagreements(page.entry, counts):
            self.records.event(page.entry.step, "ledger", says="; ".join(said))
        self.ledger.complete()
        self._write_ledger()

    def bad(self, step: int, result: Result, found: Mapping[str, Any], policy: str, in_a_row: int) -> None:
        """Writes the event of a step that was not finite."""
        if self.first_bad is None:
            self.first_bad = (step, int(found["layer"]), str(found["parameter"]))
        norm = {} if result.norm is None else {"grad_norm": result.norm}
        scale = {} if result.scale is None else {"loss_scale": result.scale}
        said = {"reason": result.reason, "policy": policy, "in_a_row": in_a_row}
        self.records.event(step, "nonfinite", loss=result.loss, **norm, **scale, **found, **said)

    def warn(self, step: int, says: str, in_a_row: int) -> None:
        """Says on standard error that a step was not applied."""
        again = f" ({in_a_row} in a row)" if in_a_row > 1 else ""
        self._say(f"step {step} was not applied{again}: {says}")

    def once(self, step: int, event: str, warn: bool = False, **fields: Any) -> None:
        """Writes an event the first time it is called for it, and says it on standard error, where asked."""
        if (key := f"{event} {fields.get('what', '')}") in self._said:
            return
        self._said.add(key)
        self.records.event(step, event, **fields)
        if warn:
            self._say(fields["says"])

    def missing(self, step: int, engine: Engine, rows: BlockRows | None, parameters: BlockParameters | None) -> None:
        """Says once of each what the profiles of a measured step lack, or are of."""
        if rows is not None and rows.silent:
            self.once(step, "blocks_silent", blocks=rows.silent[:20], says="these blocks report nothing")
        if rows is not None and engine.world > 1 and not engine.averages:
            says = f"stream_grad_norm is of {engine.world} ranks' own losses together: how they are joined is not known"
            self.once(step, "unavailable", what="stream_grad_norm", says=says)
        if parameters is not None and parameters.lacks:
            says = parameters.lacks.format(engine=engine.name)
            self.once(step, "unavailable", what="grad_norm", says=says, warn=True)
        if parameters is not None and parameters.unlike:
            says = "grad_norm= is less than the norm of the gradients, so not theirs before clipping: none by block"
            self.once(step, "unavailable", what="grad_norm", says=says, warn=True)

    def end(self, outcome: Outcome, exit_code: int, steps: int, applied: int, probe_s: Mapping[str, float]) -> None:
        """Writes the end; `probe_s` are the seconds of each probe's own passes."""
        with suppress(RuntimeError):  # of a device that has failed
            self.ledger.complete()
        self._write_ledger()
        bad_step, bad_layer, bad_parameter = self.first_bad or (-1, -1, "")
        summary: dict[str, float | int | str] = {
            "loss_train": self.loss,
            "steps": steps,
            "applied": applied,
            "skipped": steps - applied,
            "spike": self.spikes.score,
            "bad_step": bad_step,
            "bad_layer": bad_layer,
            "bad_parameter": bad_parameter,
            "seconds": time.perf_counter() - self._begun,
            **{name + PROBE_S: seconds for name, seconds in probe_s.items()},
        }
        self.records.end(outcome, exit_code, summary)

    def _say(self, says: str) -> None:
        """Says something on standard error, once for all ranks."""
        if self.records.spool is not None:
            to_stderr(says)

    def _spiked(self, step: int, result: Result) -> bool:
        """Returns whether the loss or the gradient norm has spiked; what a loss scale has spoilt does not count."""
        self.loss = result.loss
        if result.reason == "loss scale overflow":
            return False
        spiked = False
        for of, score, value in (("loss", self.spikes, result.loss), ("grad_norm", self.grad_spikes, result.norm)):
            if value is not None and score.add(value):
                spiked = True
                if math.isfinite(value) and score.spikes <= MOST_SPIKES_TOLD:
                    self.records.event(step, "spike", of=of, value=value, sigmas=score.distance)
        return spiked

    def _values(self, entry: Entry, applied: int, result: Result) -> dict[str, float | None]:
        return {
            "loss_train": math.nan if result.reason == "non-finite loss" else result.loss,
            "nonfinite": float(result.bad),
            "skipped": float(entry.step - applied),
            "spike": self.spikes.score,
            "spike_grad": self.grad_spikes.score if self.grad_spikes.count else None,
            "grad_norm": result.norm,
            "grad_norm_clipped": result.clipped,
            "lr": entry.lr,
            "loss_scale": result.scale,
            "applied": float(applied),
        }

    def _write(self, page: Page, readings: Sequence[Reading]) -> None:
        step, values = page.entry.step, dict(page.values)
        for reading in readings:
            values |= reading.scalars
        if not page.entry.applied:
            values["grad_norm_clipped"] = None
        known = {name: value for name, value in values.items() if value is not None}
        if page.overflow:  # what the scale has spoilt says nothing of the model
            known = {name: value for name, value in known.items() if math.isfinite(value)}
        self.records.metrics(step, page.applied, known)
        for reading in readings:
            for name, profile in reading.profiles.items():
                if not page.overflow:
                    self.records.profile(step, name, profile)
            for event, fields in reading.events:
                self.records.event(step, event, **fields)

    def _write_ledger(self, at_least: int = 1) -> None:
        if rows := self.ledger.flush(at_least):
            self.records.ledger(rows)
