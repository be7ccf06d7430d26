"""A run that was interrupted with other ranks or threads: to begin it anew without a word is what nobody wants."""

import os
from contextlib import suppress
from pathlib import Path

import torch

from normscale.config.schema import RunConfig
from normscale.errors import LaunchError, StoreError
from normscale.tracking.reader import RunRecord, at, read_run
from normscale.tracking.spool import SPOOL
from normscale.train.checkpoint import FOLDER, steps_in
from normscale.train.engines.ranks import world_size
from normscale.train.identity import named_before_hash, run_id_of


def check_same_world(config: RunConfig, run_dir: Path) -> None:
    """Refuses to begin a run of which there is an unfinished one with checkpoints, but for its ranks or threads.

    Which rank trains on what, its dropout and the order of sums depend on how many there are, so that it is another
    run. The threads that count are rank 0's.

    Raises:
        LaunchError: it names both numbers.
    """
    if (run_dir / SPOOL).exists():
        return
    here, own = world_size(), torch.get_num_threads()
    for folder in sorted(run_dir.parent.glob(f"{named_before_hash(config)}-*")):
        steps = steps_in(folder / FOLDER)
        record = _unfinished(folder) if steps else None
        if record is None:
            continue
        there, threads = at(record, "identity", "world"), at(record, "identity", "threads")
        if not isinstance(there, int) or run_id_of(config, there, threads) != folder.name:
            continue
        left = f"began this run and left a checkpoint of step {steps[0]}, and this start has"
        anew = "to go on with it, or give --fresh to train anew with"
        if there != here:
            ranks = f"{_many(there, 'rank')} {left} {_many(here, 'rank')}"
            raise LaunchError(f"{folder}: {ranks}; start {there} {anew} {here}")
        if isinstance(threads, int) and threads != own and os.environ.get("RANK", "0") == "0":
            began = f"{_many(threads, 'thread')}{' a rank' * (here > 1)}"
            raise LaunchError(f"{folder}: {began} {left} {own}; set OMP_NUM_THREADS={threads} {anew} {own}")


def _unfinished(folder: Path) -> RunRecord | None:
    with suppress(StoreError):
        record = read_run(folder)
        return None if record.finished else record
    return None


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
