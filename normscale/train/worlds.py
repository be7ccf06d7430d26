"""A run that was interrupted on another number of ranks: to begin it anew without a word is what nobody wants."""

from contextlib import suppress
from pathlib import Path

from normscale.config.schema import RunConfig
from normscale.errors import LaunchError, StoreError
from normscale.tracking.reader import RunRecord, at, read_run
from normscale.tracking.spool import SPOOL
from normscale.train.checkpoint import FOLDER, steps_in
from normscale.train.engines.ranks import world_size
from normscale.train.identity import named_before_hash, run_id_of


def check_same_world(config: RunConfig, run_dir: Path) -> None:
    """Refuses to begin a run of which there is an unfinished one with checkpoints, but for its number of ranks.

    Which rank trains on what, its dropout and the order of sums depend on that number, so that it is another run.

    Raises:
        LaunchError: it names both numbers.
    """
    if (run_dir / SPOOL).exists():
        return
    here = world_size()
    for folder in sorted(run_dir.parent.glob(f"{named_before_hash(config)}-*")):
        steps = steps_in(folder / FOLDER)
        record = _unfinished(folder) if steps else None
        if record is None:
            continue
        there, threads = at(record, "identity", "world"), at(record, "identity", "threads")
        if not isinstance(there, int) or there == here or run_id_of(config, there, threads) != folder.name:
            continue
        raise LaunchError(
            f"{folder}: {_ranks(there)} began this run and left a checkpoint of step {steps[0]}, and this start has"
            f" {_ranks(here)}; start {there} to go on with it, or give --fresh to train anew with {here}"
        )


def _unfinished(folder: Path) -> RunRecord | None:
    with suppress(StoreError):
        record = read_run(folder)
        return None if record.finished else record
    return None


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count != 1)}"
