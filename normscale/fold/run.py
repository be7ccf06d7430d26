"""The norms of a trained run folded into its weights: written as a model of its own, and measured against the run."""

import copy
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.data.batches import held_out_batches
from normscale.data.task import IGNORE, MicroBatch
from normscale.fold import Folding, fold
from normscale.fold.folding import unfolded
from normscale.fold.int8 import Int8Norms
from normscale.fold.saved import Folded, in_place_of, load, save
from normscale.models.stack import Transformer
from normscale.norms import set_backend
from normscale.progress import Say, quiet
from normscale.tracking.find import FOLD
from normscale.tracking.spool import strict
from normscale.train.trained import trained

Autocast = AbstractContextManager[Any]


@dataclass(frozen=True)
class Difference:
    """How far the folded model is from the unfolded one in a precision.

    `largest` and `mean` are of the absolute difference of logits, `size` is the root mean square of the logits,
    `rounding` the mean absolute difference of the unfolded model's to its own in fp64. Losses are held-out, in nats.
    """

    precision: str
    largest: float
    mean: float
    size: float
    rounding: float
    loss: float
    loss_folded: float


@dataclass(frozen=True)
class Int8:
    """What int8 norms do to a model: the error of each norm's output by itself, and the loss with all norms in int8."""

    errors: dict[str, float]
    loss: float
    loss_int8: float


@dataclass(frozen=True)
class Fold:
    """What became of the norms of a run at a step, what that changed, and int8 norms before and after ("folded")."""

    run: str
    step: int
    sequences: int
    folding: Folding
    differences: list[Difference]
    int8: dict[str, Int8]

    def as_json(self) -> dict[str, Any]:
        """Returns it as strict JSON can hold it."""
        said = {"run": self.run, "step": self.step, "sequences": self.sequences, "whole": self.folding.whole}
        said |= {"untied": self.folding.untied, "positions_learned": self.folding.positions}
        said |= {"norms": [asdict(norm) for norm in self.folding.norms]}
        said |= {"differences": [asdict(one) for one in self.differences]}
        said |= {"int8": {name: asdict(one) for name, one in self.int8.items()}}
        found: dict[str, Any] = strict(said)
        return found


def fold_run(
    run_dir: Path, batches: int, step: int | None = None, int8: bool = False, say: Say = quiet
) -> tuple[Fold, Path]:
    """Folds a run's checkpoint of `step`, None the newest; returns what came of it, and the folder it was written to.

    In fp64 the fold itself is measured; in fp32, and in bf16 products, what was written (in fp32), read back. `say` is
    told what is being done.

    Raises:
        BadInput: nothing of the model can be folded, the run has no checkpoint that can be used, or another process
            folds it.
        RunFailed: the folded model does not compute what the model does; nothing was written.
        StoreError: the folder of the run cannot be written.
    """
    say("reading the checkpoint and the text")
    found = trained(run_dir, step)
    engine, config = found.engine, found.config
    held_out = [batch.to(engine.device) for batch in held_out_batches(found.task, config.train.batch, batches)]
    say("folding")
    exact, folding = fold(engine.inner, held_out[0].inputs)
    folder = run_dir / f"folded-{found.step:08d}"
    model = Folded(found.record.run_id, found.step, found.task.vocab, folding.config(config.model), folding.form)
    whole = unfolded(engine.inner)
    old = copy.deepcopy(whole).float()
    narrow = torch.autocast(engine.device.type, dtype=torch.bfloat16)
    with in_place_of(folder) as part:
        save(part, model, exact)
        new = load(part)[0].to(engine.device)
        set_backend(new, "eager")
        differences = [
            _difference("fp64", whole, exact, whole, held_out, nullcontext(), say),
            _difference("fp32", old, new, whole, held_out, nullcontext(), say),
            _difference("bf16", old, new, whole, held_out, narrow, say),
        ]
        models = {"unfolded": old, "folded": new} if int8 else {}
        measured = {name: _int8(name, each, held_out, say) for name, each in models.items()}
        sequences = config.train.batch * len(held_out)
        result = Fold(found.record.run_id, found.step, sequences, folding, differences, measured)
        (part / FOLD).write_text(json.dumps(result.as_json(), allow_nan=False, indent=1) + "\n", "utf-8")
    return result, folder


@torch.no_grad()
def _difference(
    precision: str,
    old: Transformer,
    new: Transformer,
    truth: Transformer,
    batches: Sequence[MicroBatch],
    cast: Autocast,
    say: Say,
) -> Difference:
    largest, sums, count, losses = 0.0, torch.zeros(3, dtype=torch.float64), 0, [0.0, 0.0]
    for number, batch in enumerate(batches, 1):
        say(f"measuring in {precision}: batch {number} of {len(batches)}")
        with cast:
            before, after = old(**batch.inputs), new(**batch.inputs)
        for i, logits in enumerate((before, after)):
            losses[i] += _summed(logits, batch)
        before, after = before.double(), after.double()
        largest = max(largest, float((after - before).abs().max()))
        parts = ((after - before).abs(), before.square(), (before - truth(**batch.inputs)).abs())
        sums += torch.stack([part.sum() for part in parts]).cpu()
        count += before.numel()
    mean, square, rounding = (sums / count).tolist()
    targets = sum(batch.n_targets for batch in batches)
    return Difference(precision, largest, mean, square**0.5, rounding, losses[0] / targets, losses[1] / targets)


@torch.no_grad()
def _int8(name: str, model: Transformer, batches: Sequence[MicroBatch], say: Say) -> Int8:
    norms, losses = Int8Norms(model), [0.0, 0.0]
    for number, batch in enumerate(batches, 1):
        say(f"measuring int8 norms, {name}: batch {number} of {len(batches)}")
        with norms.watched():
            losses[0] += _summed(model(**batch.inputs), batch)
        with norms.on():
            losses[1] += _summed(model(**batch.inputs), batch)
    targets = sum(batch.n_targets for batch in batches)
    return Int8(norms.errors(), losses[0] / targets, losses[1] / targets)


def _summed(logits_BTV: Tensor, batch: MicroBatch) -> float:
    """Returns the cross-entropy summed over the targets, in fp64: training sums in fp32, which would hide the fold."""
    logits, targets = logits_BTV.double().flatten(0, 1), batch.targets_BT.flatten()
    return float(F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum"))
