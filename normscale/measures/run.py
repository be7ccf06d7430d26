"""The life of a measurement: what it is, whether it was done, its numbers in a record beside those of training runs."""

import functools
import hashlib
import importlib
import inspect
import json
import pkgutil
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError, validate_call

import normscale.measures as package
from normscale.config.schema import RunConfig
from normscale.data.task import load_task
from normscale.errors import BadInput, RunFailed, nearest
from normscale.measures._sources import sources_of
from normscale.measures.config import MeasureConfig
from normscale.tracking.reader import next_attempt, read_run
from normscale.tracking.record import USER
from normscale.tracking.spool import SPOOL, SpoolWriter
from normscale.train.engines.ranks import device_kind
from normscale.train.identity import environment, sources_hash, version

Measure = Callable[..., dict[str, float]]
NOT_MEASURES = ("config", "run")
BESIDE = ("fold", "monitor")
"""Packages that no number of training depends on, and those of a measurement that imports them do."""


@dataclass(frozen=True)
class Measurement:
    """A measurement that has come to its end."""

    run_id: str
    numbers: dict[str, float]


def measures() -> list[str]:
    """Returns the names of all measurements."""
    found = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(name for name in found if name not in NOT_MEASURES and not name.startswith("_"))


def find_measure(name: str) -> Measure:
    """Returns the function that a name stands for.

    Raises:
        BadInput: there is none.
    """
    if name not in measures():
        known = measures()
        raise BadInput(f"measure: {name!r} is no measurement{nearest(name, known)}; one of: {', '.join(known)}")
    function: Measure = importlib.import_module(f"{package.__name__}.{name}").measure
    return function


def bound(config: MeasureConfig) -> Callable[[], dict[str, float]]:
    """Returns the measurement with its arguments checked against the types of its function.

    Raises:
        BadInput: an argument is missing, unknown or of another type; it is named.
    """
    function = find_measure(config.measure)
    given = {"seed": config.seed, **config.arguments}
    try:
        inspect.signature(function).bind(**given)
        return lambda: validate_call(function)(**given)
    except TypeError as error:
        raise BadInput(f"measure {config.measure}: {error}; its arguments are {inspect.signature(function)}") from None


def run_id_of(config: MeasureConfig) -> str:
    """Returns the name of the measurement's folder: the same numbers have the same name."""
    return f"{config.measure.replace('_', '-')}-s{config.seed}-{identity(config)['hash'][:10]}"


def identity(config: MeasureConfig) -> dict[str, Any]:
    """Returns all that the numbers depend on, with its hash: arguments, seed, sources, PyTorch, what it runs on.

    Beside the sources of training, sources are its own file and what that imports of measurements and of `BESIDE`. A
    measurement that makes a configuration depends on all defaults of one too, one that reads text on the text, and one
    of transformers' models on the version of that package.
    """
    read = sources_of(Path(inspect.getfile(find_measure(config.measure))))
    packages = [package for package in BESIDE if read.imports(f"normscale.{package}")]
    own = [sources_hash(*packages).encode(), *(path.read_bytes() for path in read.files)]
    cuda = device_kind() == "cuda"
    parts = {
        **config.numerical(),
        "defaults": RunConfig().numerical() if read.imports("normscale.config.schema") else None,
        "data_digest": _text_digest() if read.imports("normscale.data") else None,
        "transformers": version("transformers") if read.imports("transformers") else None,
        "device": device_kind(),
        "device_name": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "sources": hashlib.sha256(b"\0".join(own)).hexdigest()[:16],
        "torch": torch.__version__,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    kept = ("data_digest", "device", "device_name", "threads", "sources", "torch", "transformers")
    return {"hash": digest, **{key: parts[key] for key in kept if parts[key] is not None}}


@functools.cache
def _text_digest() -> str:
    """Returns the digest of the text that a configuration reads where nothing else is said."""
    return load_task(RunConfig()).digest


def run(config: MeasureConfig, *, on_step: Callable[[int, int, float], None] | None = None) -> Measurement:
    """Measures, records the numbers and returns them; a measurement that is there already is only read.

    Raises:
        BadInput: there is no such measurement, or its arguments do not fit; nothing was written.
        RunFailed: the records could not be written to their end.
        StoreError: the folder cannot be written, or another process measures the same.
    """
    measure, run_id = bound(config), run_id_of(config)
    folder = Path(config.runs).absolute() / run_id
    if (folder / SPOOL).exists() and (record := read_run(folder)).finished:
        found = {name.removeprefix(USER): series.values[-1] for name, series in record.series.items()}
        return Measurement(run_id, found)
    with SpoolWriter(folder, next_attempt(folder)) as spool:
        spool.start(
            run_id=run_id,
            from_step=0,
            config=config.numerical(),
            identity=identity(config),
            environment={**environment(), "threads": torch.get_num_threads()},
        )
        began = time.perf_counter()
        outcome, code, numbers = "error", 1, {}
        try:
            numbers = {name: float(value) for name, value in _measured(config, measure).items()}
            spool.metrics(0, 0, {USER + name: value for name, value in numbers.items()})
            outcome, code = "finished", 0
        finally:
            took = {"seconds": time.perf_counter() - began, "steps": 1}
            spool.end(outcome, code, numbers | took)  # type: ignore[arg-type]
        if spool.gone or spool.lost:
            raise RunFailed(f"{folder}: the numbers could not be written ({spool.gone}); make room, and start again")
    if on_step is not None:
        on_step(1, 1, 0.0)
    return Measurement(run_id, numbers)


def _measured(config: MeasureConfig, measure: Callable[[], dict[str, float]]) -> dict[str, float]:
    """Returns the numbers, drawn from the seed alone, whatever was drawn before in this process."""
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            return measure()
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        said = re.sub(r"\s+", " ", first["msg"])
        raise BadInput(f"measure {config.measure}: {key}={first['input']!r}: {said}; mend the claim's arm") from None
