"""What each block of a trained run is worth, from a checkpoint: the held-out loss without it, and how far it turns."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normscale.data.batches import held_out_batches
from normscale.errors import StoreError
from normscale.probes.layers import Layers, spread_over
from normscale.probes.probe import collect
from normscale.progress import Say, quiet
from normscale.tracking.files import write_whole
from normscale.tracking.spool import strict
from normscale.train.observe import subject_of
from normscale.train.trained import trained


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


def removal(
    run_dir: Path, blocks: int, batches: int, step: int | None = None, say: Say = quiet
) -> tuple[Removal, Path]:
    """Leaves out blocks of a run's checkpoint in turn; returns what came of it, and the file it was written to.

    The model runs eagerly on what this machine has, in the run's precision. `step` is the checkpoint's, None the
    newest; `say` is told what is being done.

    Raises:
        BadInput: the run has no checkpoint that can be used, or its text is not what it was trained on.
    """
    say("reading the checkpoint and the text")
    found = trained(run_dir, step)
    config, engine, at = found.config, found.engine, found.step
    held_out = held_out_batches(found.task, config.train.batch, batches)
    say(f"measuring without each of {min(blocks, config.model.N + config.model.M)} blocks")
    probe = Layers([(batch.inputs, batch.targets_BT) for batch in held_out], at, blocks)
    probe.attach(subject_of(engine))
    probe.after_step(at)
    (reading,) = collect([probe], engine.sum, engine.max)
    angles, rises = (reading.profiles[name].tolist() for name in ("angle", "removal"))
    tried = set(spread_over(len(angles), blocks))
    names = list(dict.fromkeys(site.name.rpartition(".")[0] for site in engine.inner.sites()))
    worth = [
        Block(name, angle, rise if i in tried else None)
        for i, (name, angle, rise) in enumerate(zip(names, angles, rises, strict=True))
    ]
    sequences = config.train.batch * len(held_out)
    own = config.train.batch * config.train.eval_batches
    measured = Removal(found.record.run_id, at, float(probe.whole), sequences, worth, own)
    path = run_dir / f"removal-{at:08d}.json"
    try:
        write_whole(path, json.dumps(measured.as_json(), allow_nan=False, indent=1) + "\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
    return measured, path
