"""The life of a measurement: what it is, whether it was done, its numbers in a record beside those of training runs."""

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
from normscale.errors import BadInput, RunFailed, nearest
from normscale.measures.config import MeasureConfig
from normscale.tracking.reader import next_attempt, read_run
from normscale.tracking.record import USER
from normscale.tracking.spool import SPOOL, SpoolWriter
from normscale.train.engines.ranks import device_kind
from normscale.train.identity import environment, sources_hash

Measure = Callable[..., dict[str, float]]
NOT_MEASURES = ("config", "run")


@dataclass(frozen=True)
class Measured:
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
    """Returns all that the numbers depend on, with its hash: arguments, seed, sources, PyTorch, what it runs on."""
    file = Path(inspect.getfile(find_measure(config.measure)))
    own = [path.read_bytes() for path in (file, *sorted(file.parent.glob("_[!_]*.py")))]
    cuda = device_kind() == "cuda"
    parts = {
        **config.numerical(),
        "device": device_kind(),
        "device_name": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "sources": hashlib.sha256(b"\0".join([sources_hash("fold").encode(), *own])).hexdigest()[:16],
        "torch": torch.__version__,
    }
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    kept = ("device", "device_name", "threads", "sources", "torch")
    return {"hash": digest, **{key: parts[key] for key in kept}}


def run(config: MeasureConfig, *, on_step: Callable[[int, int, float], None] | None = None) -> Measured:
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
        return Measured(run_id, found)
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
    return Measured(run_id, numbers)


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
