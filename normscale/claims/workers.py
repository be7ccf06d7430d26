"""A pool of single-threaded worker processes, one per core, that trains runs from a queue, longest first.

At these sizes one thread per run is quicker than several threads on one run, and a run's numbers then depend on
neither the number of workers nor their order. Every worker has a pipe of its own: a killed worker can then hold no
lock that others wait for, and its end is seen at once.
"""

import importlib
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Literal

from normscale.config.schema import RunConfig
from normscale.errors import StoreError
from normscale.measures.config import MeasureConfig
from normscale.tracking.files import try_lock

Outcome = Literal["done", "failed", "lost"]

TRAIN = "normscale.train.run:run"
MEASURE = "normscale.measures.run:run"
PRIOR = 0.05  # the share of the work that the estimate weighs beside the speed seen so far, so that no time jumps
MESSAGE_S = 0.3  # a worker reports its step this often at most
HELD_S = 2.0  # a run that another process holds is tried again after this


@dataclass
class Job:
    """A run to be trained or measured, and what is known of it. An empty `run_id` takes whatever it turns out to be.

    Of two jobs that wait, the one with the lower `rank` begins first; of like rank, the dearer one.
    """

    run_id: str
    name: str
    config: RunConfig | MeasureConfig
    cost: float = 1.0
    rank: int = 0
    share: float = 0.0  # of its steps that are done
    outcome: Outcome | None = None
    note: str = ""
    step_s: float | None = None
    core_s: float | None = None  # of a step, those that its thread had a core
    deaths: int = 0
    not_before: float = 0.0


@dataclass
class _Worker:
    process: SpawnProcess
    pipe: Connection
    job: Job | None = None


class Pool:
    """Workers that live until `close`; use it as a context.

    `entry` names the training function as "module:function"; it is called with a RunConfig and `on_step`. A job that
    is a measurement is measured.
    """

    def __init__(self, workers: int, entry: str = TRAIN):
        self._entry = entry
        self._context = multiprocessing.get_context("spawn")
        self._workers = [self._start() for _ in range(workers)]

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def pids(self) -> list[int | None]:
        return [worker.process.pid for worker in self._workers]

    @property
    def running(self) -> list[Job]:
        return [worker.job for worker in self._workers if worker.job]

    def run(
        self,
        jobs: Sequence[Job],
        tell: Callable[[Job | None], None] = lambda job: None,
        until: float | None = None,
    ) -> None:
        """Runs all jobs; `tell` is called with every job that ended, and with None a few times a second.

        None begins that would not end by `until` (of time.monotonic), as its cost and the speed so far have it: those
        have no outcome. One that takes longer than that is let end.
        """
        waiting, began = sorted(jobs, key=_turn), time.monotonic()
        while waiting or self.running:
            most = math.inf
            if until is not None:
                now = time.monotonic()
                # No run is trusted to be shorter than its estimate because others broke off, which looks like speed.
                most = (until - now) * min(1.0, speed_of(jobs, self.size, now - began))
            for worker in self._workers:
                if worker.job is None and (job := _next(waiting, most)):
                    waiting.remove(job)
                    self._give(worker, job)
            if not self.running and all(job.cost > most for job in waiting):
                return
            for worker in self._ready():
                job = worker.job
                if self._hear(worker, waiting) and job:
                    tell(job)
            tell(None)

    def close(self) -> None:
        """Ends all workers at once, whatever they are doing."""
        for worker in self._workers:
            worker.process.terminate()
        deadline = time.monotonic() + 2
        for worker in self._workers:
            worker.process.join(max(0.0, deadline - time.monotonic()))
            if worker.process.is_alive():
                worker.process.kill()
                worker.process.join()
            worker.pipe.close()
        self._workers = []

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> _Worker:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_work, args=(theirs, self._entry), daemon=True)
        with environment(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1"):
            process.start()
        theirs.close()
        return _Worker(process, ours)

    def _give(self, worker: _Worker, job: Job) -> None:
        worker.job, job.share = job, 0.0
        with suppress(OSError):  # where it is dead, its pipe says so next
            worker.pipe.send(job.config.model_dump(mode="json"))

    def _ready(self) -> Iterator[_Worker]:
        pipes = {worker.pipe: worker for worker in self._workers if worker.job}
        if not pipes:
            time.sleep(0.1)
        for pipe in wait(list(pipes), timeout=0.25) if pipes else []:
            yield pipes[pipe]  # type: ignore[index]

    def _hear(self, worker: _Worker, waiting: list[Job]) -> bool:
        """Takes one message; returns whether the worker's job has ended."""
        job = worker.job
        if job is None:
            return False
        try:
            kind, value = worker.pipe.recv()
        except (EOFError, OSError):
            return self._bury(worker, job, waiting)
        if kind == "step":
            job.share = value
            return False
        worker.job = None
        if kind == "held":
            job.note, job.not_before, job.share = value, time.monotonic() + HELD_S, 0.0
            waiting.append(job)
            return False
        job.outcome, job.share = kind, 1.0
        if kind == "done":
            run_id, job.step_s, job.core_s = value
            job.note = ""
            if job.run_id not in ("", run_id):
                job.outcome, job.note = "failed", f"the sources changed meanwhile: it ran as {run_id}; start again"
        else:
            job.note = value
        return True

    def _bury(self, worker: _Worker, job: Job, waiting: list[Job]) -> bool:
        """Replaces a dead worker; its job is tried once more. Returns whether the job is lost."""
        worker.process.join(1)
        code = worker.process.exitcode
        worker.pipe.close()
        self._workers[self._workers.index(worker)] = self._start()
        job.deaths, job.share = job.deaths + 1, 0.0
        job.note = f"its worker died (exit status {code})"
        if job.deaths < 2:
            waiting.append(job)
            waiting.sort(key=_turn)
            return False
        job.outcome = "lost"
        return True


def cores() -> int:
    """Returns the number of cores this process may use."""
    return len(os.sched_getaffinity(0))


def speed_of(jobs: Sequence[Job], workers: int, elapsed: float) -> float:
    """Returns the estimated seconds of work that one worker has done in a real one, after `elapsed` of them."""
    prior = PRIOR * sum(job.cost for job in jobs) or 1.0
    return (prior + sum(job.cost * job.share for job in jobs)) / (prior + elapsed * min(workers, len(jobs)))


def _turn(job: Job) -> tuple[int, float]:
    return job.rank, -job.cost


def _next(waiting: list[Job], most: float) -> Job | None:
    """Returns the first that may begin now and costs `most` at the most."""
    now = time.monotonic()
    return next((job for job in waiting if job.not_before <= now and job.cost <= most), None)


def _work(pipe: Connection, entry: str) -> None:
    """The life of a worker: take a configuration, train it, say how it went."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if entry == TRAIN:
        import torch

        torch.set_num_threads(1)
        torch.set_num_interop_threads(1)
    train = _function(entry)
    while True:
        try:
            given = pipe.recv()
        except EOFError:
            return  # the parent is gone
        if "measure" in given:
            pipe.send(_train(_function(MEASURE), MeasureConfig.model_validate(given), pipe))
        else:
            pipe.send(_train(train, RunConfig.model_validate(given), pipe))


def _function(entry: str) -> Callable[..., Any]:
    module, function = entry.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def _train(train: Callable[..., Any], config: RunConfig | MeasureConfig, pipe: Connection) -> tuple[str, Any]:
    first = last = first_core = last_core = 0.0
    steps = 0
    told = time.monotonic()

    def on_step(step: int, total: int, _loss: float) -> None:
        nonlocal first, last, first_core, last_core, steps, told
        last, last_core = time.monotonic(), time.thread_time()
        if not steps:
            first, first_core = last, last_core
        steps += 1
        if last - told > MESSAGE_S:
            told = last
            pipe.send(("step", step / max(1, total)))  # fails, and so ends the worker, when the parent is gone

    try:
        run_id = train(config, on_step=on_step).run_id
    except BrokenPipeError:
        os._exit(1)
    except StoreError as error:
        return ("held" if _held(config, str(error)) else "failed"), str(error)
    except Exception as error:  # one broken run must not stop the others; its line goes into the report
        return "failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    if steps < 2:
        return "done", (run_id, None, None)
    return "done", (run_id, (last - first) / (steps - 1), (last_core - first_core) / (steps - 1))


def _held(config: RunConfig | MeasureConfig, message: str) -> bool:
    """Returns whether the error names a run folder that another process holds right now."""
    folder = Path(message.split(":", 1)[0])
    runs = config.runs if isinstance(config, MeasureConfig) else config.tracking.runs
    if folder.parent != Path(runs).absolute() or not (folder / ".lock").exists():
        return False
    descriptor = try_lock(folder / ".lock")
    if descriptor is not None:
        os.close(descriptor)
    return descriptor is None or "another process" in message


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables of the environment for the block."""
    before = {key: os.environ.get(key) for key in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None) if value is None else os.environ.__setitem__(key, value)
