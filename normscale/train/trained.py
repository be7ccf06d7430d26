"""The model of a run as its checkpoint has it, for whoever looks at it afterwards."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from normscale.arguments import to_stderr
from normscale.config.schema import RunConfig
from normscale.data.task import Task, load_task
from normscale.errors import BadInput
from normscale.models.builder import build
from normscale.tracking.reader import RunRecord, at, read_run
from normscale.train.checkpoint import FOLDER, Unusable, index_of, steps_in, wholes
from normscale.train.engines.engine import Engine
from normscale.train.engines.plain import PlainEngine
from normscale.train.engines.ranks import device_kind

SECTION = "trainer"  # where a checkpoint has the weights


@dataclass(frozen=True)
class Trained:
    """A run, and its model at a step, on what this machine has: eager, in the run's precision."""

    record: RunRecord
    config: RunConfig
    task: Task
    step: int
    engine: Engine


def trained(run_dir: Path, step: int | None = None) -> Trained:
    """Returns the model of a run's checkpoint of `step`, None for the newest.

    Raises:
        BadInput: the run has no checkpoint that can be used (one of a Monitor has none), or its text is not what it was
            trained on.
    """
    record = read_run(run_dir)
    if at(record, "config", "monitor") is not None:
        raise BadInput(
            f"{run_dir}: a run of normscale.Monitor, of which normscale has no model and no checkpoint; name a run of"
            " normscale train (normscale show lists the newest)"
        )
    config = _config(run_dir, record.start.get("config"))
    reached, weights = weights_of(run_dir, step)
    task = load_task(config)
    digest = (record.start.get("data") or {}).get("digest")
    if digest is not None and digest != task.digest:
        raise BadInput(f"data.source: {config.data.source} is no longer the text that {run_dir.name} was trained on")
    engine = PlainEngine(build(config.model, task.vocab, config.seed), config.precision, torch.device(device_kind()))
    _load(engine, weights, run_dir)
    return Trained(record, config, task, reached, engine)


def weights_of(run_dir: Path, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """Returns the step and the weights, by name, of a run's newest usable checkpoint, or of the one of `step`.

    Newer ones that cannot be used are said on stderr. Weights are taken from whichever version and number of ranks
    wrote them.

    Raises:
        BadInput: there is none, or none that can be read; the message says why.
    """
    root = run_dir / FOLDER
    there = steps_in(root)
    if not there:
        raise BadInput(
            f"{run_dir}: it has no checkpoint; train it with checkpoint.every=N (--fresh where it is finished already)"
        )
    if step is not None and step not in there:
        listed = ", ".join(str(one) for one in reversed(there))
        raise BadInput(f"{run_dir}: it has no checkpoint of step {step}; there are {listed}")
    reasons = []
    for one in there if step is None else [step]:
        path = root / f"step-{one:08d}"
        try:
            weights = wholes(path, index_of(path), SECTION)
        except (Unusable, OSError) as error:
            reasons.append(f"step {one}: {error.strerror if isinstance(error, OSError) else error}")
        except (SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reasons.append(f"step {one}: not of the format that this version reads ({type(error).__name__})")
        else:
            for reason in reasons:
                to_stderr(f"{run_dir}: {reason}; step {one} is taken instead")
            return one, weights
    raise BadInput(f"{run_dir}: no checkpoint of it can be used; {'; '.join(reasons)}")


def _config(run_dir: Path, config: Mapping[str, Any] | None) -> RunConfig:
    """Returns the configuration of a run, with norms on whatever is here and without the compiler."""
    try:
        found = RunConfig.model_validate(config)
    except ValidationError:
        raise BadInput(f"{run_dir}: its configuration is missing or of another version") from None
    return found.model_copy(update={"model": found.model.model_copy(update={"compile": False, "backend": "auto"})})


def _load(engine: Engine, weights: Mapping[str, Tensor], run_dir: Path) -> None:
    state = dict(engine.inner.state_dict())
    missing = sorted(state.keys() - weights.keys()) + sorted(weights.keys() - state.keys())
    missing += [name for name in state.keys() & weights.keys() if state[name].shape != weights[name].shape]
    if missing:
        raise BadInput(f"{run_dir}: its checkpoint is of another model than this version builds ({missing[0]} differs)")
    with torch.no_grad():
        for name, values in state.items():
            values.copy_(weights[name])
