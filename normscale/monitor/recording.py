"""From a step to its record: at once, or when the numbers that its probes have sent are on the host."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

from normscale.monitor.counts import Difference, OptimizerCount, scheduler_steps
from normscale.monitor.depth import Depth
from normscale.monitor.engines import Engine, Result
from normscale.monitor.journal import Journal, Page
from normscale.monitor.losses import Losses
from normscale.monitor.provenance import Provenance
from normscale.probes.epsilon import COLUMNS
from normscale.probes.guard import Guard, Sent
from normscale.probes.ledger import Tally


class Unwritten(NamedTuple):
    """A measured step whose numbers are on their way, and what will be asked of them."""

    page: Page
    counts: Tally
    sent: Sent
    engine: Engine
    optimizer: Any


class Recording:
    """Takes in each step, asks the probes of measured ones, and has the journal write what is known."""

    def __init__(
        self,
        guard: Guard,
        journal: Journal,
        depth: Depth,
        losses: Losses,
        count: OptimizerCount,
        provenance: Provenance,
    ) -> None:
        self.guard, self.journal, self.depth, self.provenance = guard, journal, depth, provenance
        self.losses, self.count = losses, count
        self.scheduled = Difference()
        self._unwritten: Unwritten | None = None

    def add(
        self, step: int, applied: int, result: Result, engine: Engine, optimizer: Any, scheduler: Any, measured: bool
    ) -> None:
        """Takes in a step that was made; `applied` are the steps so far that were. All ranks call it together."""
        scale = 1.0 if result.scale is None else result.scale
        if self.depth.rows is not None:
            self.depth.rows.unscaled = 1.0 / (scale * (engine.world if engine.averages else 1))
        self.losses.add(step, result.loss, result.reason == "applied" and not math.isfinite(result.loss))
        counts = Tally(
            applied,
            self.count.since(optimizer, applied, measured),
            scheduler=self._followed(engine, scheduler, applied - result.applied, measured),
        )
        page = self.journal.add(step, applied, result, engine.learning_rate(optimizer), measured)
        if measured:
            sent = self.guard.send(step, engine.sum, engine.max)
            self._unwritten = Unwritten(page, counts, sent, engine, optimizer)
            if sent.ready:
                self.settle()
        self._tell_news(step)

    def settle(self, alone: bool = False) -> None:
        """Writes the record of a measured step that waits for its numbers, if one does.

        On a GPU that is when the host has waited for the next step anyway, or at the end. All ranks call it together,
        but one that is `alone`.
        """
        waiting, self._unwritten = self._unwritten, None
        if waiting is None:
            return
        guard, depth, step = self.guard, self.depth, waiting.page.entry.step
        readings = guard.receive(waiting.sent, alone)
        if readings:
            profiles = {
                name: row for reading in readings for name, row in reading.profiles.items() if name not in COLUMNS
            }
            values = dict(waiting.page.values)
            for reading in readings:
                values |= reading.scalars
            self.provenance.remember(step, profiles, values)
        counts = waiting.counts
        far = self.count.received(waiting.optimizer, counts.applied)
        changed = None if depth.parameters is None else depth.parameters.changed
        counts = replace(counts, changed=changed, optimizer=counts.optimizer if far is None else far)
        self.journal.write(waiting.page, counts, readings)
        self._tell_news(step)
        rows = depth.rows if depth.rows is not None and guard.works(depth.rows) else None
        parameters = depth.parameters if depth.parameters is not None and guard.works(depth.parameters) else None
        self.journal.missing(step, waiting.engine, rows, parameters)
        for what, says in depth.lacks(guard.active):
            self.journal.once(step, "unavailable", what=what, says=says)

    def _followed(self, engine: Engine, scheduler: Any, applied: int, measured: bool) -> float | None:
        """Returns how many steps a scheduler has followed since it was first given; None: not to be compared."""
        if scheduler is None:
            return None
        self.scheduled.meet(scheduler)
        return self.scheduled.since(scheduler_steps(scheduler, engine.world), applied, measured)

    def _tell_news(self, step: int) -> None:
        for probe, reason in self.guard.news():
            self.journal.records.event(step, "probe_off", probe=probe, reason=reason)
