"""The training loop: one step, on one screen."""

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.precision import SCALED
from normscale.config.schema import RunConfig, TrainConfig
from normscale.data.task import IGNORE, MicroBatch
from normscale.ops.statistics import Buffers
from normscale.probes.culprit import Culprit
from normscale.probes.guard import Guard
from normscale.probes.ledger import reason_of
from normscale.probes.probe import Probe
from normscale.train.engines.engine import Engine, guard_of
from normscale.train.optim import learning_rate
from normscale.train.provenance import Provenance
from normscale.train.recording import Recorder, Step, StepRecords
from normscale.train.scaler import LossScale

Window = Sequence[MicroBatch]
"""The micro-batches of one rank's share of one step."""


class Trainer(StepRecords):
    """Trains one model: counts attempted and applied steps, and lets the probes measure some of them.

    Attributes:
        stop_wanted: set on any rank, by a signal, say, it asks for an end.
        stop_agreed: whether any rank wanted one when the last step began; the same on every rank.
    """

    def __init__(self, engine: Engine, config: RunConfig, probes: Sequence[Probe] | Guard) -> None:
        guard = probes if isinstance(probes, Guard) else guard_of(engine, probes)
        precision = config.precision
        scale = LossScale(precision.loss_scale) if precision.compute in SCALED else None
        super().__init__(engine, config, guard, scale, Provenance(engine, self._loss_by_itself))
        self.stop_wanted = self.stop_agreed = False
        self.optimizer = engine.train_with(config.train.optim)
        self.guard.probes.append(self.ledger)
        self.guard.call("meet", self.optimizer)
        self._aside_s = sum(self.guard.seconds().values())
        filled, model = self.guard.buffers(), engine.inner
        rows = torch.zeros(len(model.sites()) * model.rows_per_site, 3, device=engine.device)  # where no probe has them
        self.buffers = Buffers(**{"rows": rows, **filled}) if filled else None
        self._checked = False
        engine.project()
        self._clock = time.perf_counter()

    def step(self, window: Window, recorder: Recorder) -> Step:
        """Attempts one optimizer step on one window, tells the recorder, and returns what came of it.

        The loss is the sum over targets divided by the number of targets in the whole global batch, so that neither
        accumulation nor ranks change it. A gradient that is not finite is looked at before clipping could smear it
        over all parameters, and is never applied. The branch on it is the same on every rank: both numbers are.
        A loss scale is taken out of the gradients before anything looks at them.
        """
        engine, train = self.engine, self.config.train
        self.attempted += 1
        self._new_aside_s = 0.0  # what was waited for since the last step is in the time of none
        mine = sum(batch.n_targets for batch in window), int(self.stop_wanted), *self.guard.votes(self.attempted)
        count, stop, *votes = engine.counts(*mine)
        self.stop_agreed = stop > 0
        measured = self.guard.agreed(votes) or self.measures(self.attempted)
        if measured:
            self.guard.call("begin", self.attempted)
            self.guard.call("scaled_by", engine.world * (1.0 if self.scale is None else self.scale.value))
        total = self._forward_backward(window, count, measured)
        if self.scale is not None:
            engine.unscale(1 / self.scale.value)
        if measured:
            self.guard.call("after_backward")

        # A step is read on the host once: without these two numbers nobody could say whether to apply it.
        loss, norm = engine.loss_and_norm(total, count)
        self.settle(recorder)
        finite = math.isfinite(loss) and math.isfinite(norm)
        factor = min(1.0, train.optim.clip / (norm + 1e-6)) if finite and train.optim.clip else 1.0
        lr = learning_rate(train.schedule, train.optim.lr, self.applied + 1, train.steps)
        scale = None if self.scale is None else self.scale.value
        overflow = not finite and self.scale is not None and self.scale.absorbs()
        reason = None if finite else reason_of(loss, engine.finite, overflow)
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
        if not finite:
            engine.discard()
        if measured:
            self.guard.call("after_step", self.attempted)
        result = Step(loss, norm, norm * factor, lr, applied=finite, targets=count, overflow=overflow, scale=scale)
        return self._close(result, reason, measured, recorder)

    def _forward_backward(self, window: Window, count: int, measured: bool) -> Tensor:
        """Fills the gradients and returns this rank's summed loss, a 0-d tensor."""
        engine, to = self.engine, self.buffers if measured else None
        scale = 1.0 if self.scale is None else self.scale.value
        total = torch.zeros((), device=engine.device)
        self.provenance.begin()
        engine.zero_grad()
        for i, batch in enumerate(window):
            self.provenance.keep(batch)
            batch = batch.to(engine.device)
            with engine.micro_batch(last=i == len(window) - 1):
                with engine.autocast():
                    logits = engine.model(batch.tokens_BT, to, **batch.beside)
                loss = summed_loss(logits, batch.targets_BT)
                if measured:
                    self.guard.call("after_forward", logits.detach(), batch.targets_BT)
                whole = differentiated(loss, logits, batch.targets_BT, self.config.train)
                engine.backward(whole * (engine.world / count * scale))  # the engine averages over ranks
            total += loss.detach()
            if measured:
                self.guard.call("after_micro_batch", self._positions(batch))
        if not self._checked:
            engine.check()
            self._checked = True
        return total

    def _positions(self, batch: MicroBatch) -> dict[str, int]:
        """Returns the number of positions each side's stream has in a micro-batch, padding included."""
        sides = {"encoder" if self.engine.inner.depth.topology == "encoder" else "decoder": batch.tokens_BT.numel()}
        return sides if batch.source_BS is None else {"encoder": batch.source_BS.numel(), **sides}

    def _apply(self, lr: float, factor: float) -> None:
        self.engine.apply(lr, factor)
        self.engine.project()
        self.applied += 1

    def state_dict(self) -> dict[str, Any]:
        """Returns all that the steps to come depend on; tensors are not copied. What is this rank's is below `own`."""
        scale = None if self.scale is None else self.scale.state_dict()
        return self.engine.state_dict() | self.records_state() | {"scale": scale, "probes": self.guard.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave; what is loaded is not projected again."""
        self.engine.load_state_dict(state)
        if self.scale is not None:
            self.scale.load_state_dict(state["scale"])
        self.load_records_state(state)
        self.guard.load_state_dict(state["probes"])

    def late_state(self) -> dict[str, Tensor]:
        """Returns tensors without values like those that the optimizer adds to the state at its first step, by path."""
        return self.engine.late_state()

    def measures(self, step: int) -> bool:
        """Tells whether `step` is measured whatever probes ask for: the first, the last, and every `probes.every`.

        Where a loss scale begins with overflows, the steps up to the first that is applied are measured.
        """
        scheduled = step in (1, self.config.train.steps) or step % self.config.probes.every == 0
        return scheduled or (self.scale is not None and not self.applied)

    def evaluate(self, batches: Sequence[MicroBatch]) -> float:
        """Returns the held-out loss in nats per target, the same on every rank.

        No pass is of more sequences than a rank's micro-batch, so that what trains in memory is evaluated in it too.
        """
        train, total, count = self.config.train, 0.0, 0
        size = max(1, train.batch // (train.accumulate * self.engine.world))
        started = time.perf_counter()
        with self.engine.aside() as model:
            for part in (part for batch in batches for part in batch.parts(size)):
                part = part.to(self.engine.device)
                total += float(summed_loss(model(part.tokens_BT, **part.beside), part.targets_BT))
                count += part.n_targets
        self.paused(time.perf_counter() - started)
        return total / count

    def _loss_by_itself(self, batch: MicroBatch) -> Tensor:
        """Returns the summed loss of one micro-batch by the model itself, as it is differentiated."""
        with self.engine.autocast():
            logits = self.engine.inner(batch.tokens_BT, **batch.beside)
        loss = summed_loss(logits, batch.targets_BT)
        return differentiated(loss, logits, batch.targets_BT, self.config.train)

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


def differentiated(loss: Tensor, logits_BTV: Tensor, targets_BT: Tensor, train: TrainConfig) -> Tensor:
    """Returns what is differentiated in place of the summed loss, over the targets that count, in fp32.

    With `train.label_smoothing` a target is the token with this share less, and every token with its part of the share.
    `train.z_loss` adds so many times the sum of log^2 Z, where Z is the sum of exp of the logits. Neither is part of
    any loss that is recorded.

    Shape: loss 0-d; logits [B, T, V]; targets [B, T] int64; result 0-d.
    Reference: Szegedy et al. 2016, arXiv:1512.00567, section 7 (0.1 there, in Vaswani et al. 2017 and in DeepNet);
        Chowdhery et al. 2022 (PaLM), arXiv:2204.02311, section 5 (1e-4 there and in Wortsman et al. 2023).
    """
    if not (train.label_smoothing or train.z_loss):
        return loss
    logits, ignored = logits_BTV.float(), targets_BT == IGNORE
    log_z = logits.logsumexp(dim=-1)
    if train.label_smoothing:
        of_all = (log_z - logits.mean(dim=-1)).masked_fill(ignored, 0.0).sum()  # the cross-entropy of an even share
        loss = (1 - train.label_smoothing) * loss + train.label_smoothing * of_all
    if train.z_loss:
        loss = loss + train.z_loss * log_z.square().masked_fill(ignored, 0.0).sum()
    return loss
