"""A run while it trains: its batches, probes and trainer, and the numbers they come to."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from normscale.arguments import to_stderr
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches, held_out_batches, unigram_of
from normscale.data.task import Task
from normscale.data.tasks.translation import Pairs
from normscale.errors import RunFailed
from normscale.models.attention import attention_backend
from normscale.norms import Norm
from normscale.ops.products import Rounded
from normscale.probes.activations import Activations
from normscale.probes.adam import AdamEpsilon
from normscale.probes.angles import Angles
from normscale.probes.attention import Attention
from normscale.probes.epsilon import COLUMNS, EpsilonSensitivity
from normscale.probes.gradients import Gradients, depth_slope
from normscale.probes.layers import Layers
from normscale.probes.output import OutputSoftmax
from normscale.probes.probe import Array, Probe
from normscale.probes.stream_gradients import StreamGradients
from normscale.probes.update import ModelUpdate
from normscale.probes.weights import WeightUpdates
from normscale.tracking.record import PROBE_S, Outcome
from normscale.tracking.spool import SpoolWriter
from normscale.train.checkpoint import Checkpoints, random_state, set_random_state
from normscale.train.engines.engine import Engine, guard_of
from normscale.train.engines.precision import DTYPES
from normscale.train.identity import environment, identity
from normscale.train.loop import Trainer
from normscale.train.meter import Meter
from normscale.train.observe import norms_seen, precision_seen, subject_of
from normscale.train.preempt import Asked, Preempted, asked_to_end
from normscale.train.recording import Recorder
from normscale.train.translate import score, translated

OnStep = Callable[[int, int, float], None]

LAYER_BATCHES = 2  # held-out batches that blocks are left out on: what a block is worth is a difference on one text
EPSILON_SEQUENCES = 4  # whose positions the epsilon probe samples its rows from
FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Session:
    """What lives from the start of a run to its end."""

    def __init__(self, config: RunConfig, task: Task, engine: Engine) -> None:
        self.config, self.task, self.engine = config, task, engine
        train = config.train
        self.batches = Batches(
            task.train,
            batch=train.batch,
            seed=config.seed,
            accumulate=train.accumulate,
            rank=engine.rank,
            world=engine.world,
        )
        self.held_out = held_out_batches(task, train.batch, train.eval_batches)
        self.unigram_nats = unigram_of(task, self.held_out)
        self.guard = guard_of(engine, _probes(config, task))
        self.guard.call("attach", subject_of(engine))
        self.trainer = Trainer(engine, config, self.guard)
        self.meter = Meter(config, task.vocab, engine.device, engine.world)
        self.seconds = 0.0
        self.thread_s = 0.0  # of them, those this thread had a core: all but waiting, on a CPU
        self.checkpoint_s = 0.0
        self._probe_s: dict[str, float] = {}  # of the attempts before
        self.loss_val = self.loss_train = math.nan
        self.bleu: float | None = None  # of the end, where it is asked for
        self.stopped_after = 0  # bad steps in a row that ended the run
        self._warned = False
        self.unsaved: str | None = None  # why the newest checkpoint could not be written
        self._graphs_before = _compiled_graphs()

    def facts(self, run_id: str, from_step: int) -> dict[str, Any]:
        """Returns the fields of the start record."""
        model, engine = self.engine.inner, self.engine
        one = next(self.held_out[0].parts(1))
        return {
            "run_id": run_id,
            "from_step": from_step,
            "config": self.config.model_dump(mode="json"),
            "identity": identity(self.config),
            "environment": {**environment(), "threads": torch.get_num_threads()},
            "data": {**self.task.facts(), **self.batches.facts(), "unigram_nats": self.unigram_nats},
            "model": {
                "params": sum(p.numel() for p in model.parameters()),
                "sites": len(model.sites()),
                "structures": model.structures,
                "eps": sorted({m.eps for m in model.modules() if isinstance(m, Norm)}),
            },
            "engine": engine.name,
            **engine.facts(),
            "backend": {
                "norm": norms_seen(engine, one),
                "attention": self._attention(),
            },
            "precision_seen": precision_seen(engine, one),
            "rows": [site.name for site in model.sites()],
            **self._epsilon(),
            "outer_run": os.environ.get("MLFLOW_RUN_ID"),
        }

    def _epsilon(self) -> dict[str, Any]:
        """Returns the names of the rows of the epsilon profiles, and what the compute precision makes of each eps."""
        found = [probe for probe in self.guard.active if isinstance(probe, EpsilonSensitivity)]
        if not found:
            return {}
        return {"norms": found[0].names, "profile_rows": dict.fromkeys(COLUMNS, "norms"), "eps_held": found[0].held()}

    def _attention(self) -> str:
        model, products = self.config.model, self.engine.products
        if isinstance(products, Rounded):
            return "rounded"
        if products.softmax == "compute":
            return "unfused"
        dtype = DTYPES[self.config.precision.compute]
        shape = (model.heads, model.context, model.d // model.heads)
        return attention_backend(shape, model.dropout, dtype, self.engine.device, causal=model.M > 0)

    def train(self, recorder: "SpoolWriter | Silent", checkpoints: Checkpoints, on_step: OnStep | None) -> Outcome:
        """Runs the steps to come, with the evaluations and checkpoints that are asked for, and returns the outcome.

        With checkpoints, a signal that asks for an end is heeded after a step, when the state of that step is kept.

        Raises:
            Preempted: it ended so, on every rank.
            RunFailed: the same, but that state could not be kept.
        """
        if not self.config.checkpoint.every:  # nothing to go on from: the signal ends it at once
            return self._train(recorder, checkpoints, on_step, Asked())
        with asked_to_end(self._want_stop) as asked:
            return self._train(recorder, checkpoints, on_step, asked)

    def _train(
        self, recorder: "SpoolWriter | Silent", checkpoints: Checkpoints, on_step: OnStep | None, asked: Asked
    ) -> Outcome:
        train, every = self.config.train, self.config.checkpoint.every
        started, before = time.perf_counter() - self.seconds, self.trainer.attempted
        thread_started = time.thread_time() - self.thread_s
        if before == 0:
            self.evaluate(0, recorder)
        for step in range(before + 1, train.steps + 1):
            begun = time.perf_counter()
            window = self.batches.window(step - 1)
            result = self.trainer.step(window, recorder)
            self.meter.add(time.perf_counter() - begun - result.aside_s, window, result.targets)
            self.loss_train, self.seconds = result.loss, time.perf_counter() - started
            self.thread_s = time.thread_time() - thread_started
            if on_step is not None:
                on_step(step, train.steps, result.loss)
            stop = self.trainer.stops(result)
            self.stopped_after = self.trainer.bad_in_a_row if stop else 0
            if stop or step == train.steps or (train.eval_every and step % train.eval_every == 0):
                self.evaluate(step, recorder)
                stop = stop or (train.on_nonfinite == "stop" and not math.isfinite(self.loss_val))
            if stop or step == train.steps:
                self.translate()
            if stop:
                return "nan"
            ending = self._ending(asked) and step < train.steps
            if every and (step % every == 0 or step == train.steps or ending):
                thread_started -= time.thread_time()
                started += self.save(step, recorder, checkpoints)
                thread_started += time.thread_time()
            if ending:
                self._preempted(step, recorder, asked)
        return "finished" if math.isfinite(self.loss_val) and self.trainer.applied else "nan"

    def _want_stop(self) -> None:
        self.trainer.stop_wanted = True

    def _ending(self, asked: Asked) -> bool:
        """Returns whether any rank was asked to end; all ranks answer alike."""
        return self.trainer.stop_agreed or (self.engine.world == 1 and bool(asked))

    def _preempted(self, step: int, recorder: Recorder, asked: Asked) -> NoReturn:
        """Ends a run that was asked to, and whose checkpoint of this step was written, or could not be."""
        by = "a signal" if asked.number is None else signal.Signals(asked.number).name
        ended = f"{by} ended it after step {step} of {self.config.train.steps}"
        if self.unsaved is not None:
            said = f"{ended}, and its checkpoint could not be written ({self.unsaved})"
            recorder.event(step, "preempted", says=said)
            raise RunFailed(f"{said}; free some space, then the same command goes on from the newest that is there")
        recorder.event(step, "preempted", says=f"{ended}, with a checkpoint to go on from")
        raise Preempted(step, asked.number)

    def evaluate(self, step: int, recorder: Recorder) -> None:
        """Records the held-out loss and its distance to the unigram entropy of the same batches."""
        self.trainer.settle(recorder)  # before: passes that a GPU still makes are no part of what an evaluation takes
        self.loss_val = self.trainer.evaluate(self.held_out)
        values = {"loss_val": self.loss_val, "loss_gap": self.unigram_nats - self.loss_val}
        recorder.metrics(step, self.trainer.applied, values)

    def translate(self) -> None:
        """Scores translations of held-out lines, where that is asked for; a model that is not finite has no BLEU."""
        how = self.config.probes.translation
        if how.sentences and isinstance(self.task.held_out, Pairs):
            finite = math.isfinite(self.loss_val)
            lines = translated(self.engine, self.task.held_out, how, self.config.train.batch) if finite else []
            self.bleu = score(lines).bleu if finite else 0.0

    def save(self, step: int, recorder: "SpoolWriter | Silent", checkpoints: Checkpoints) -> float:
        """Writes a checkpoint; returns the seconds it took. If it cannot be written, training goes on without it."""
        self.trainer.settle(recorder)
        begun = time.perf_counter()
        recorder.sync()  # a checkpoint must not be ahead of the records
        self.unsaved = failed = checkpoints.save(step, recorder.attempt, recorder.last, self.state_dict())
        if failed:
            recorder.event(step, "checkpoint_failed", reason=failed)
            if self.engine.rank == 0 and not self._warned:
                message = f"{checkpoints.path(step)}: the checkpoint could not be written ({failed})"
                to_stderr(f"{message}; training goes on, the checkpoints before it are kept")
            self._warned = True
        spent = time.perf_counter() - begun
        self.checkpoint_s += spent
        self.trainer.paused(spent)
        return spent

    def state_dict(self) -> dict[str, Any]:
        """Returns what a run goes on from; where the data stand follows from the step."""
        names = ("loss_val", "loss_train", "seconds", "thread_s", "checkpoint_s", "probe_s")
        numbers = {name: getattr(self, name) for name in names}
        return {"session": numbers, "trainer": self.trainer.state_dict(), "own": random_state(self.engine.device)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        for name, number in state["session"].items():
            setattr(self, name, number)
        self.trainer.load_state_dict(state["trainer"])
        set_random_state(state["own"], self.engine.device)

    @property
    def probe_s(self) -> dict[str, float]:
        """The seconds of each probe's own passes, in all attempts of the run."""
        return {name: self._probe_s.get(name, 0.0) + seconds for name, seconds in self.guard.seconds().items()}

    @probe_s.setter
    def probe_s(self, before: Mapping[str, float]) -> None:
        self._probe_s = dict(before)

    def summary(self) -> dict[str, Any]:
        """Returns the fields of the end record's summary."""
        trainer = self.trainer
        bad_step, bad_layer, bad_parameter = trainer.first_bad or (-1, -1, None)
        if bad_step < 0 and not trainer.applied:  # each was put down to the loss scale
            bad_step = 1
        gradient = trainer.last_profiles.get("grad_norm")
        return {
            "loss_val": self.loss_val,
            "loss_train": self.loss_train,
            "unigram_nats": self.unigram_nats,
            "gap": self.unigram_nats - self.loss_val,
            **({} if self.bleu is None else {"bleu": self.bleu}),
            "grad_slope": math.nan if gradient is None else depth_slope(gradient),
            "grad_min_end": math.nan if gradient is None else float(gradient.min()),
            "bad_step": trainer.attempted if bad_step < 0 and not math.isfinite(self.loss_val) else bad_step,
            "bad_layer": bad_layer,
            "bad_parameter": bad_parameter or "",
            "culprit": "" if (culprit := trainer.culprit()) is None else culprit.sentence(),
            "stopped_after": self.stopped_after,
            "spike": trainer.spikes.score,
            "spike_grad": trainer.grad_spikes.score,
            "skipped": trainer.attempted - trainer.applied,
            "steps": trainer.attempted,
            "applied": trainer.applied,
            "seconds": self.seconds,
            "thread_s": self.thread_s,
            "checkpoint_s": self.checkpoint_s,
            **{name + PROBE_S: seconds for name, seconds in self.probe_s.items()},
            **self.meter.summary(),
            "graphs": _compiled_graphs() - self._graphs_before,
            **{f"update@{step}": value for step, value in trainer.updates.items()},
        }


class Silent:
    """The recorder of every rank but the first."""

    lost = attempt = last = 0
    gone: str | None = None

    def sync(self) -> None: ...

    def start(self, **fields: Any) -> None: ...

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None: ...

    def profile(self, step: int, name: str, data: Array) -> None: ...

    def event(self, step: int, event: str, **fields: Any) -> None: ...

    def ledger(self, rows: Sequence[Mapping[str, Any]]) -> None: ...

    def end(self, outcome: Outcome, exit_code: int, summary: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


def _probes(config: RunConfig, task: Task) -> list[Probe]:
    probes: list[Probe] = []
    if config.probes.profiles:
        probes += [Activations(), StreamGradients(), Gradients(), WeightUpdates(), Angles(), OutputSoftmax()]
        probes += [Attention()] if config.probes.attention else []
    last, update, epsilon = config.train.steps, config.probes.update, config.probes.epsilon
    if update.steps or update.every:
        fixed = held_out_batches(task, update.sequences, 1, key="probes.update.sequences")[0]
        probes.append(ModelUpdate(fixed.inputs, update.steps, update.every, last))
    if epsilon.every:
        fixed = held_out_batches(task, min(EPSILON_SEQUENCES, config.train.batch), 1)[0]
        compute = (DTYPES | FP8)[config.precision.compute]
        probes.append(
            EpsilonSensitivity(fixed.inputs, every=epsilon.every, last=last, rows=epsilon.rows, compute=compute)
        )
        if config.train.optim.name == "adamw":
            probes.append(AdamEpsilon(every=epsilon.every, last=last))
    if config.probes.layers:
        batches = held_out_batches(task, config.train.batch, LAYER_BATCHES, key="probes.layers")
        probes.append(Layers([(batch.inputs, batch.targets_BT) for batch in batches], config.train.steps))
    return probes


def _compiled_graphs() -> int:
    if "torch._dynamo" not in sys.modules:  # it is slow to import, and nothing was compiled without
        return 0
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
