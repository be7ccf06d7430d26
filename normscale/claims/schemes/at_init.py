"""What a scheme does at initialisation, from training runs of one step: signal, gradient, update, size, by depth.

They are runs as any other (a worker process, one thread, a record, a name that holds the hash of the sources), so
that a scheme is measured as it is trained, calibration and projection included, and only once. They lie in a folder
of their own, where nothing sends them to MLflow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from normscale.claims.cost import Cost, from_finished
from normscale.claims.fit import Line, power_law
from normscale.claims.manifest import record_of
from normscale.claims.progress import time_left
from normscale.claims.protocol import MODEL, UPDATE
from normscale.claims.runner import devices
from normscale.claims.workers import Job, Pool, cores
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.errors import ConfigError, StoreError
from normscale.progress import duration
from normscale.schemes import find_scheme
from normscale.schemes.scheme import Topology
from normscale.tracking.reader import RunRecord

DEPTHS = (6, 24, 96)
BATCH = 2  # sequences
WIDTH, CONTEXT = MODEL["model.d"], MODEL["model.context"]
Optimizer = Literal["sgd", "adamw"]
OPTIMIZERS: Mapping[Optimizer, str] = {"sgd": "SGD", "adamw": "Adam"}

RATES: Mapping[Optimizer, float] = {"sgd": 1e-5, "adamw": 1e-6}
"""Small enough for an update in proportion to them (within 4 % at 96 blocks of Post-Norm, the steepest), and large
enough for one above the rounding of fp32 (at a tenth of them DeepNorm's under SGD is off by 10 to 16 %). Empirical."""

SIDES: Mapping[Topology, tuple[str, ...]] = {
    "decoder": ("model.M",),
    "encoder": ("model.N",),
    "encoder-decoder": ("model.N", "model.M"),
}

START_UP_S = 10.0  # until the workers have imported torch; empirical

Take = Callable[[Mapping[str, RunConfig]], Mapping[str, str]]
"""Brings the runs {id: configuration} to their ends; returns {id: what went wrong} for those that have none."""


@dataclass(frozen=True)
class AtInit:
    """One scheme at one depth. `update` is that of one step over its learning rate, by optimizer.

    `stream_rms` is of the first stream where a scheme has several, `other_stream_rms` the largest of the others.

    Shape: stream_rms, gradient, other_stream_rms [sites].
    """

    blocks: int
    parameters: int
    stream_rms: NDArray[np.float64]
    gradient: NDArray[np.float64]
    update: Mapping[Optimizer, float]
    other_stream_rms: NDArray[np.float64] | None = None


@dataclass(frozen=True)
class Measured:
    """What was measured of a scheme, by depth; `failed` says why a depth is not there, `lost` which runs had no end."""

    scheme: str
    topology: Topology
    at: tuple[AtInit, ...]
    failed: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()

    def update_slope(self, optimizer: Optimizer) -> Line | None:
        """Returns the log-log slope of the update over depth; None where it was not measured at two depths."""
        points = [(float(one.blocks), one.update[optimizer]) for one in self.at if optimizer in one.update]
        return power_law([depth for depth, _ in points], [update for _, update in points])


def topology_of(scheme: str) -> Topology:
    """Returns the topology a scheme is measured in: a decoder alone, where it has one."""
    has = find_scheme(scheme).topologies
    return next(topology for topology in SIDES if topology in has)


def config_of(scheme: str, blocks: int, optimizer: Optimizer, runs: Path) -> RunConfig:
    """Returns the run of one step that measures a scheme; `blocks` are all of a model's, of both sides together."""
    sides = SIDES[topology_of(scheme)]
    return revise(
        RunConfig(),
        {
            **UPDATE,
            **{side: blocks // len(sides) for side in ("model.N", "model.M") if side in sides},
            **{side: 0 for side in ("model.N", "model.M") if side not in sides},
            "name": f"{scheme}, {blocks} blocks, {OPTIMIZERS[optimizer]}",
            "model.scheme": scheme,
            "train.steps": 1,
            "train.batch": BATCH,
            "train.optim.name": optimizer,
            "train.optim.lr": RATES[optimizer],
            "probes.every": 1,
            "probes.profiles": True,
            "probes.update.steps": (1,),
            "probes.update.sequences": BATCH,
            "tracking.runs": str(runs),
            "tracking.uri": None,
        },
    )


@devices("cpu")  # a worker for each core, of which each would hold a context on the GPU
def measure(
    schemes: Sequence[str], runs: Path, depths: Sequence[int] = DEPTHS, take: Take | None = None
) -> list[Measured]:
    """Returns what there is to measure of the schemes, from records where these have it, else from runs made now.

    A scheme that cannot be built at a depth has no measurement there, and the reason.

    Raises:
        StoreError: a record lacks what its run had measured.
    """
    import torch

    from normscale.train.identity import run_id_of

    torch.set_num_threads(1)  # as the workers do: it is part of what a run is
    ids: dict[str, str] = {}
    configs: dict[tuple[str, int, Optimizer], RunConfig] = {}
    failed: dict[str, list[str]] = {scheme: [] for scheme in schemes}
    for scheme in schemes:
        for blocks in depths:
            try:
                for optimizer in OPTIMIZERS:
                    config = config_of(scheme, blocks, optimizer, runs)
                    ids[config.name], configs[scheme, blocks, optimizer] = run_id_of(config), config
            except ConfigError as error:
                failed[scheme].append(f"{blocks} blocks: {error}")
    missing = {ids[config.name]: config for config in configs.values() if not _finished(runs, ids[config.name])}
    lost = (take or in_workers)(missing) if missing else {}
    found = []
    for scheme in schemes:
        at, own_lost = [], []
        for blocks in depths:
            own = {o: configs[scheme, blocks, o] for o in OPTIMIZERS if (scheme, blocks, o) in configs}
            own_lost += [f"{config.name}: {lost[run]}" for config in own.values() if (run := ids[config.name]) in lost]
            records = {o: (folder := runs / ids[c.name], record_of(runs, folder.name)) for o, c in own.items()}
            if (one := _at_init(blocks, records)) is not None:
                at.append(one)
        found.append(Measured(scheme, topology_of(scheme), tuple(at), (*failed[scheme], *own_lost), tuple(own_lost)))
    return found


def in_workers(configs: Mapping[str, RunConfig]) -> Mapping[str, str]:
    """Makes the runs in worker processes, one a core; as `Take`."""
    claims = Path(next(iter(configs.values())).tracking.runs).parent
    cost = from_finished(claims) or Cost()
    jobs = [Job(run_id, config.name, config, cost.of(config)) for run_id, config in configs.items()]
    workers = min(cores(), len(jobs))
    about = f"about {duration(time_left(jobs, workers) + START_UP_S)} with {workers} at a time"
    print(
        f"{len(jobs)} runs of one step to do, {about} (estimated by {cost.source});"
        " Ctrl-C keeps what is measured, and the same command goes on",
        flush=True,
    )

    def tell(job: Job | None) -> None:
        if job is not None:
            ended = sum(each.outcome is not None for each in jobs)
            print(f"measured at initialisation: {ended} of {len(jobs)} ({job.name})", flush=True)

    try:
        with Pool(workers) as pool:
            pool.run(jobs, tell)
    except KeyboardInterrupt:
        done = sum(job.outcome == "done" for job in jobs)
        kept = f"{done} of {len(jobs)} are measured and kept; the same command goes on with the others"
        raise KeyboardInterrupt(kept) from None
    return {job.run_id: job.note for job in jobs if job.outcome != "done"}


def _finished(runs: Path, run_id: str) -> bool:
    record = record_of(runs, run_id)
    return record is not None and record.finished


def _at_init(blocks: int, records: Mapping[Optimizer, tuple[Path, RunRecord | None]]) -> AtInit | None:
    """Returns what the records of a depth hold, None where there are none; a step that broke off has no update."""
    have = {o: (folder, record) for o, (folder, record) in records.items() if record is not None and record.finished}
    if not have:
        return None
    folder, first = next(iter(have.values()))
    try:
        arrays = {name: profile.data[0].astype(np.float64) for name, profile in first.profiles.items()}
        stream, gradient = arrays["stream_rms"], arrays["grad_norm"]
        parameters = int(first.start["model"]["params"])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StoreError(
            f"{folder}: its record is damaged ({error} is not in it); remove the folder, and it is measured again"
        ) from None
    updates: dict[Optimizer, float] = {}
    for optimizer, (_, record) in have.items():
        if "update" in record.series and record.series["update"].values:
            updates[optimizer] = record.series["update"].values[-1] / RATES[optimizer]
    return AtInit(blocks, parameters, stream, gradient, updates, arrays.get("other_stream_rms"))
