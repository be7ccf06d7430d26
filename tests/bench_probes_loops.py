"""The loops whose steps `bench_probes` times: the trainer's, and one written by hand, with a Monitor in it."""

import contextlib
import io
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import normscale
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches, held_out_batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.monitor.blocks import find_blocks
from normscale.monitor.drift import drift_of
from normscale.probes.update import ModelUpdate
from normscale.tracking.spool import SpoolWriter
from normscale.train.engines.make import make_engine
from normscale.train.engines.ranks import device_kind
from normscale.train.loop import Trainer, summed_loss
from normscale.train.observe import subject_of
from normscale.train.session import Session, Silent

NEVER = 10**9
UPDATES = 5  # of which the median is what a model update costs


class TrainerLoop:
    """A trainer whose steps can be taken bare, plain or measured."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        self.task, self.config = load_task(config), config
        self.engine = make_engine(build(config.model, self.task.vocab, 0), config)
        self.session = Session(config, self.task, self.engine)
        self.trainer: Trainer = self.session.trainer
        self.recorder: Any = SpoolWriter(folder, 1) if self.engine.rank == 0 else Silent()
        self.window = self.session.batches.window(0)
        self.measure = False
        self.trainer.measures = lambda step: self.measure  # type: ignore[method-assign]
        self.steps: dict[str, Callable[[], object]] = {
            "bare": self.bare,
            "always on": lambda: self.stepped(False),
            "measured": lambda: self.stepped(True),
        }

    @property
    def device(self) -> torch.device:
        return self.engine.device

    def ready(self, kind: str) -> None:
        """Gets ready for a step, which is not timed."""

    def bare(self) -> Tensor:
        """Takes a step that nothing looks at; returns its loss, which nobody has read."""
        engine = self.engine
        count = engine.count(sum(batch.n_targets for batch in self.window))
        total = torch.zeros((), device=engine.device)
        engine.zero_grad()
        for i, batch in enumerate(self.window):
            batch = batch.to(engine.device)
            with engine.micro_batch(last=i == len(self.window) - 1):
                with engine.autocast():
                    logits = engine.model(batch.tokens_BT, None, **batch.beside)
                loss = summed_loss(logits, batch.targets_BT)
                engine.backward(loss * (engine.world / count))
            total += loss.detach()
        self.trainer.optimizer.step()
        return total

    def stepped(self, measured: bool) -> None:
        """Takes a step of the trainer."""
        self.measure = measured
        self.trainer.step(self.window, self.recorder)

    def alone(self, tries: int) -> float:
        """Returns the seconds of a step's always-on code: what the trainer does beside the bare step, by itself."""
        trainer, engine = self.trainer, self.engine
        total = torch.zeros((), device=engine.device)
        begun = clock(engine.device)
        for i in range(tries):
            loss, norm = engine.loss_and_norm(total, 1)
            trainer.spikes.add(3.0 + i % 7 + loss)
            trainer.grad_spikes.add(1.0 + i % 5 + norm)
            trainer.provenance.begin()
            for batch in self.window:
                trainer.provenance.keep(batch)
        return (clock(engine.device) - begun) / tries

    def update_s(self) -> float:
        """Returns the seconds of measuring a model update, on as many sequences as a run has by default."""
        fixed = held_out_batches(self.task, self.config.probes.update.sequences, 1)[0]
        probe = ModelUpdate(fixed.inputs, steps=(1,))
        probe.attach(subject_of(self.engine))
        return seconds_of(lambda: probe.after_step(1), self.device)

    def held(self) -> int:
        """Returns the bytes that the probes hold while a measured step is applied, the run-up apart."""
        trainer, found = self.trainer, list[int]()
        holders = [self.session.guard, trainer.buffers, trainer.provenance._buffers, trainer.spikes]
        model = [self.engine.inner, trainer.optimizer, self.engine.gradients()]
        hook = trainer.optimizer.register_step_pre_hook(lambda *_: found.append(bytes_held(holders, model)))
        self.stepped(True)
        hook.remove()
        return found[0]

    def close(self) -> None:
        self.recorder.close()
        self.engine.close()


class MonitorLoop:
    """The same model in a loop of a few lines, with torch's optimizer over its parameters, and a Monitor beside it."""

    def __init__(self, config: RunConfig, folder: Path) -> None:
        task = load_task(config)
        self.device = torch.device(device_kind())
        self.model: nn.Module = build(config.model, task.vocab, 0).to(self.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.train.optim.lr, fused=True)
        batch = Batches(task.train, batch=config.train.batch, seed=0, accumulate=1, rank=0, world=1).window(0)[0]
        self.targets, self.batch = batch.n_targets, batch.to(self.device)
        self.fixed = held_out_batches(task, config.probes.update.sequences, 1)[0].to(self.device)
        self.monitor = normscale.Monitor(self.model, self.loss_of, runs=folder, every=NEVER)
        self._off: list[tuple[nn.Module, Any, Any]] = []  # modules whose hooks are put aside
        self.steps: dict[str, Callable[[], object]] = {
            "bare": self.bare,
            "always on": lambda: self.stepped(False),
            "measured": lambda: self.stepped(True),
        }

    def loss_of(self, model: Any, batch: Any) -> Tensor:
        return summed_loss(model(batch.tokens_BT, None, **batch.beside), batch.targets_BT) / self.targets

    def ready(self, kind: str) -> None:
        """Takes the monitor's hooks off the model for a bare step, and puts them on for others."""
        if kind == "bare" and not self._off:
            hooked = [m for m in self.model.modules() if m._forward_hooks or m._forward_pre_hooks]
            self._off = [(m, m._forward_hooks, m._forward_pre_hooks) for m in hooked]
            for module in hooked:
                module._forward_hooks, module._forward_pre_hooks = type(module._forward_hooks)(), {}  # type: ignore[assignment]
        elif kind != "bare":
            for module, after, before in self._off:
                module._forward_hooks, module._forward_pre_hooks = after, before
            self._off = []

    def bare(self) -> Tensor:
        """Takes a step that nothing looks at; returns its loss, which nobody has read."""
        self.optimizer.zero_grad()
        loss = self.loss_of(self.model, self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def stepped(self, measured: bool) -> None:
        """Takes a step under the monitor."""
        self.monitor.every = 1 if measured else NEVER
        self.optimizer.zero_grad()
        with self.monitor.micro_batch(self.batch):
            loss = self.loss_of(self.model, self.batch)
            loss.backward()
        self.monitor.step(self.optimizer, loss)

    def alone(self, tries: int) -> float:
        """Returns the seconds of a step's always-on code: all of the monitor but what its hooks on blocks ask."""
        self.monitor.every = NEVER
        loss, still = torch.ones((), device=self.device), Still(self.optimizer)
        begun = clock(self.device)
        for _ in range(tries):
            self.monitor.micro_batch(self.batch)
            self.monitor.step(still, loss)
        return (clock(self.device) - begun) / tries

    def update_s(self) -> float:
        """Returns the seconds of measuring a model update."""
        blocks = find_blocks(self.model, None)
        probe = drift_of(self.model, blocks, self.fixed, self.loss_of, self.device, 1, lambda: None)
        assert probe is not None
        return seconds_of(lambda: probe.after_step(1), self.device)

    def held(self) -> int:
        """Returns the bytes that the monitor holds while a measured step is applied, the run-up apart."""
        monitor, found = self.monitor, list[int]()
        holders = [monitor.guard, monitor.engine, monitor.provenance.buffers, monitor.journal]
        model = [self.model, self.optimizer]
        hook = self.optimizer.register_step_pre_hook(lambda *_: found.append(bytes_held(holders, model)))
        self.stepped(True)
        hook.remove()
        return found[0]

    def close(self) -> None:
        with contextlib.redirect_stderr(io.StringIO()):  # what shows the run, which is about to be removed
            self.monitor.close()


class Still:
    """An optimizer that makes no step."""

    def __init__(self, of: torch.optim.Optimizer) -> None:
        self.param_groups, self.state = of.param_groups, dict[Any, Any]()

    def step(self) -> None: ...


Loop = TrainerLoop | MonitorLoop


def clock(device: torch.device) -> float:
    """Returns seconds: CPU time of this process, or wall time once the device has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def seconds_of(do: Callable[[], object], device: torch.device) -> float:
    """Returns the median of the seconds that something takes."""
    do()
    taken = []
    for _ in range(UPDATES):
        begun = clock(device)
        do()
        taken.append(clock(device) - begun)
    return statistics.median(taken)


def bytes_held(holders: Iterable[Any], model: Iterable[Any]) -> int:
    """Returns the bytes of all tensors and arrays that some objects reach, but for those of the model and optimizer."""
    known = {_place(tensor) for tensor in _of_model(model)}
    found: dict[Any, int] = {}
    for one in _arrays(holders, set()):
        if isinstance(one, np.ndarray):
            found[id(one)] = one.nbytes
        elif _place(one) not in known:
            found[_place(one)] = one.untyped_storage().nbytes()
    return sum(found.values())


def _of_model(model: Iterable[Any]) -> Iterator[Tensor]:
    for one in model:
        if isinstance(one, nn.Module):
            for own in [*one.parameters(), *one.buffers()]:
                yield own
                if own.grad is not None:
                    yield own.grad
        elif isinstance(one, torch.optim.Optimizer):
            yield from (value for state in one.state.values() for value in state.values() if isinstance(value, Tensor))
            yield from (p for group in one.param_groups for p in group["params"])
        else:
            yield one


def _place(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.device), tensor.untyped_storage().data_ptr()


def _arrays(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    for value in values:
        if id(value) in seen or isinstance(value, nn.Module | torch.optim.Optimizer | type):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor | np.ndarray):
            yield value
        elif isinstance(value, Mapping):
            yield from _arrays(list(value.values()), seen)
        elif isinstance(value, list | tuple | set | frozenset | deque):
            yield from _arrays(value, seen)
        elif hasattr(value, "__dict__"):
            yield from _arrays(list(vars(value).values()), seen)
