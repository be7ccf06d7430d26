"""The records of a monitored run: their folder, one for all ranks, and what the first of them says."""

import os
import platform
import re
import secrets
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

import normscale
from normscale.arguments import to_stderr
from normscale.errors import BadInput, StoreError
from normscale.monitor.blocks import stack_starts
from normscale.probes.names import kind_of
from normscale.tracking.record import Outcome
from normscale.tracking.spool import SpoolWriter

if TYPE_CHECKING:
    from normscale.tracking.sink_process import Sink


class Records:
    """Writes on rank 0; on every other rank it does nothing. `run_id` and `run_dir` are the same on all."""

    def __init__(self, name: str, runs: str | Path, rank: int, world: int) -> None:
        """Takes the run's name and the folder of all runs.

        Raises:
            BadInput: the name cannot be part of a folder's.
            StoreError: the folder cannot be written, on whatever rank.
        """
        clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip(".-")[:80]
        if not clean:
            raise BadInput(f"Monitor(name={name!r}): a name has letters or digits in it")
        self.run_id = f"{clean}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        self.spool: SpoolWriter | None = None
        self._sink: Sink | None = None
        self._rank, self._world = rank, world
        self.run_dir = Path(runs).absolute() / self.run_id
        self._first_does(self._open)

    def start(self, uri: str | None, **fields: Any) -> None:
        """Writes the start record; begins a process that keeps an MLflow store up to date, if there is to be one.

        Raises:
            StoreError: that cannot be done, on whatever rank.
        """
        self._first_does(partial(self._start, uri, fields))

    def _open(self) -> None:
        self.spool = SpoolWriter(self.run_dir, 1)

    def _start(self, uri: str | None, fields: Mapping[str, Any]) -> None:
        assert self.spool is not None
        self.spool.start(run_id=self.run_id, **fields)
        if uri is not None:
            from normscale.tracking.sink_process import Sink

            self._sink = Sink(self.run_dir.parent, uri)

    def _first_does(self, act: Callable[[], None]) -> None:
        """Lets rank 0 do something; all ranks come to know the run's folder, and fail together where it fails."""
        broken, failed = None, ""
        if self._rank == 0:
            try:
                act()
            except StoreError as error:
                failed = str(error).removeprefix("tracking.runs: ")
                failed = failed.replace("tracking.runs=<folder>", "Monitor(runs=<folder>)")
            except Exception as error:  # the other ranks wait to hear of it
                broken, failed = error, f"rank 0 failed: {type(error).__name__}: {error}"
        if self._world > 1:
            sent = [self.run_id, str(self.run_dir), failed]
            dist.broadcast_object_list(sent, src=0)
            self.run_id, self.run_dir, failed = sent[0], Path(sent[1]), sent[2]
        if broken is not None:
            raise broken
        if failed:
            raise StoreError(f"Monitor: {failed}")

    def metrics(self, step: int, applied: int, values: Mapping[str, float]) -> None:
        if self.spool is not None:
            self.spool.metrics(step, applied, values)

    def profile(self, step: int, name: str, data: Any) -> None:
        if self.spool is not None:
            self.spool.profile(step, name, data)

    def event(self, step: int, event: str, **fields: Any) -> None:
        if self.spool is not None:
            self.spool.event(step, event, **fields)

    def ledger(self, rows: Sequence[Mapping[str, Any]]) -> None:
        if self.spool is not None:
            self.spool.ledger(rows)

    def end(self, outcome: Outcome, exit_code: int, summary: Mapping[str, float | int | str]) -> None:
        if self.spool is not None:
            self.spool.end(outcome, exit_code, summary)
            if self.spool.gone:
                to_stderr(f"{self.run_dir}: the end of the run is not recorded ({self.spool.gone})")

    def finish(self, stopped: bool) -> None:
        """Waits for the store, if one is kept up to date, and says what it lacks; shortly where a run was stopped.

        Then it says what shows the run.
        """
        if self._sink is not None and (lacks := self._sink.finish(60.0, stopped)):
            to_stderr(lacks)
        if self.spool is not None and not self.spool.gone:
            to_stderr(f"this run is shown by: {shlex.join(['normscale', 'show', str(self.run_dir)])}")

    def close(self) -> None:
        if self.spool is not None:
            self.spool.close()


def facts(inner: nn.Module, device: torch.device, engine: str, world: int, blocks: Sequence[str]) -> dict[str, Any]:
    """Returns what the start record says of a model and of where it trains."""
    cuda = device.type == "cuda"
    parameters = list(inner.parameters())
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in parameters})
    return {
        "from_step": 0,
        "identity": {
            "device": device.type,
            "device_name": torch.cuda.get_device_name(device) if cuda else torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "world": world,
        },
        "environment": {
            "normscale": normscale.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "host": platform.node(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "model": {
            "class": kind_of(inner),
            "params": sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters),  # a shard's whole
            "sites": len(blocks),
        },
        "engine": engine,
        "precision_seen": {"params": ", ".join(dtypes)},
        "rows": list(blocks),
        "stacks": stack_starts(blocks),
        "outer_run": os.environ.get("MLFLOW_RUN_ID"),
    }


def check_ranks() -> None:
    """Raises BadInput where several ranks were started and cannot talk to each other: each would record a run."""
    asked = os.environ.get("WORLD_SIZE", "1")
    there = dist.is_available() and dist.is_initialized()
    if asked.isdigit() and int(asked) > 1 and not there:
        raise BadInput(
            f"Monitor: WORLD_SIZE is {asked}, but torch.distributed is not initialised; make the monitor after "
            "init_process_group, Accelerator() or deepspeed.initialize, so that all ranks write one run"
        )
