"""What each block of a trained run is worth, from a checkpoint: the held-out loss without it, and how far it turns."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from torch import Tensor

from normscale.config.schema import RunConfig
from normscale.data.batches import held_out_batches
from normscale.data.task import load_task
from normscale.errors import BadInput, StoreError
from normscale.models.builder import build
from normscale.probes.layers import Layers, spread_over
from normscale.probes.probe import collect
from normscale.tracking.files import write_whole
from normscale.tracking.reader import read_run
from normscale.tracking.spool import strict
from normscale.train.checkpoint import FOLDER, Unusable, index_of, steps_in, wholes
from normscale.train.engines.engine import Engine
from normscale.train.engines.plain import PlainEngine
from normscale.train.engines.ranks import device_kind
from normscale.train.observe import subject_of

SECTION = "trainer"  # where a checkpoint has the weights


@dataclass(frozen=True)
class Block:
    """What one block is worth: `removal` is by how much the loss rises without it, in nats; None if not tried."""

    name: str
    angle: float
    removal: float | None


@dataclass(frozen=True)
class Removal:
    """What the blocks of a run are worth at a step; `loss` is the held-out loss of the whole model, in nats."""

    run: str
    step: int
    loss: float
    sequences: int
    blocks: list[Block]
    run_sequences: int  # that the run's own held-out loss is of

    def as_json(self) -> dict[str, Any]:
        """Returns it as strict JSON can hold it."""
        blocks = [{"block": block.name, "angle": block.angle, "removal": block.removal} for block in self.blocks]
        said = {"run": self.run, "step": self.step, "loss": self.loss, "sequences": self.sequences}
        said |= {"run_sequences": self.run_sequences, "blocks": blocks}
        found: dict[str, Any] = strict(said)
        return found


def removal(run_dir: Path, blocks: int, batches: int, step: int | None = None) -> tuple[Removal, Path]:
    """Leaves out blocks of a run's checkpoint in turn; returns what came of it, and the file it was written to.

    The model runs eagerly on what this machine has, in the run's precision. `step` is the checkpoint's, None the
    newest.

    Raises:
        BadInput: the run has no checkpoint that can be used, or its text is not what it was trained on.
    """
    record = read_run(run_dir)
    config = _config(run_dir, record.start.get("config"))
    at, weights = weights_of(run_dir, step)
    task = load_task(config)
    digest = (record.start.get("data") or {}).get("digest")
    if digest is not None and digest != task.digest:
        raise BadInput(f"data.source: {config.data.source} is no longer the text that {run_dir.name} was trained on")
    model = build(config.model, task.vocab, config.seed)
    engine = PlainEngine(model, config.precision, torch.device(device_kind()))
    _load(engine, weights, run_dir)
    held_out = held_out_batches(task, config.train.batch, batches)
    probe = Layers([(batch.inputs, batch.targets_BT) for batch in held_out], at, blocks)
    probe.attach(subject_of(engine))
    probe.after_step(at)
    (reading,) = collect([probe], engine.sum, engine.max)
    angles, rises = (reading.profiles[name].tolist() for name in ("angle", "removal"))
    tried = set(spread_over(len(angles), blocks))
    names = list(dict.fromkeys(site.name.rpartition(".")[0] for site in model.sites()))
    found = [
        Block(name, angle, rise if i in tried else None)
        for i, (name, angle, rise) in enumerate(zip(names, angles, rises, strict=True))
    ]
    sequences = config.train.batch * len(held_out)
    own = config.train.batch * config.train.eval_batches
    measured = Removal(record.run_id, at, float(probe.whole), sequences, found, own)
    path = run_dir / f"removal-{at:08d}.json"
    try:
        write_whole(path, json.dumps(measured.as_json(), allow_nan=False, indent=1) + "\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
    return measured, path


def weights_of(run_dir: Path, step: int | None = None) -> tuple[int, dict[str, Tensor]]:
    """Returns the step and the weights, by name, of a run's newest usable checkpoint, or of the one of `step`.

    They are taken from whichever version and number of ranks wrote them.

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
