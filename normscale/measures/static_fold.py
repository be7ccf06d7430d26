"""What folding the norms of a trained model costs: exactly, with statistics held fixed, and with norms in int8."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from normscale.data.batches import Batches, held_out_batches, unigram_of
from normscale.data.task import MicroBatch
from normscale.fold.affine import affine_of
from normscale.fold.folding import unfolded
from normscale.fold.run import fold_run
from normscale.measures._rows import NormName
from normscale.measures._trained import config_of, loss_of
from normscale.models.stack import Transformer
from normscale.norms import Norm
from normscale.train.run import run
from normscale.train.trained import trained

BATCHES, CALIBRATION = 16, 16

Fixed = Literal["token", "channel"]
Statistics = dict[Norm, tuple[Tensor, Tensor]]


def measure(seed: int, norm: NormName, blocks: int = 6, steps: int = 300) -> dict[str, float]:
    """Trains a Pre-Norm decoder on text and returns, of its held-out loss in nats:

    - `learned`: by how much it is below the unigram entropy;
    - `exact`: by how much it moves, in fp64, when gains, biases and means go into the weights (`normscale.fold`), and
      `exact_bf16`: the same in bf16 products;
    - `static_token`, `static_channel`: by how much it rises when every norm divides by one number for the whole norm,
      or one for each channel, fixed on training text, so that nothing of it is left at inference: the mean and the
      variance of rows, averaged, or the mean and the variance of channels (of an RMSNorm, mean squares about 0). The
      smaller of the two is `static`;
    - `int8`, `int8_folded`: by how much it rises with int8 norms, before and after the exact fold.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(seed, steps, folder, scheme="pre", norm=norm, M=blocks)
        run_dir = run(config).run_dir
        fold, _ = fold_run(run_dir, BATCHES, int8=True)
        found = trained(run_dir)
    held_out = held_out_batches(found.task, config.train.batch, BATCHES)
    batches = Batches(found.task.train, batch=config.train.batch, seed=seed)
    calibration = [batches.window(i)[0] for i in range(CALIBRATION)]
    model = unfolded(found.engine.inner.cpu())
    loss = loss_of(model, held_out)
    rises = {}
    for fixed in get_args(Fixed):
        with _static(_statistics(model, calibration, fixed)):
            rises[f"static_{fixed}"] = loss_of(model, held_out) - loss
    exact, _, bf16 = fold.differences
    return {
        "learned": unigram_of(found.task, held_out) - loss,
        "exact": abs(exact.loss_folded - exact.loss),
        "exact_bf16": abs(bf16.loss_folded - bf16.loss),
        **rises,
        "static": min(rises.values()),
        "int8": fold.int8["unfolded"].loss_int8 - fold.int8["unfolded"].loss,
        "int8_folded": fold.int8["folded"].loss_int8 - fold.int8["folded"].loss,
    }


@torch.no_grad()
def _statistics(model: Transformer, batches: list[MicroBatch], fixed: Fixed) -> Statistics:
    """Returns the mean and the variance that each norm is to have for good, over the rows of some batches.

    Shape: each 0-d (`token`) or [D] (`channel`).
    """
    rows: dict[Norm, list[Tensor]] = {module: [] for module in model.modules() if isinstance(module, Norm)}
    hooks = [norm.register_forward_pre_hook(_keep(rows[norm])) for norm in rows]
    for batch in batches:
        model(**batch.inputs)
    for hook in hooks:
        hook.remove()
    found: Statistics = {}
    for norm, parts in rows.items():
        x = torch.cat(parts)
        along = -1 if fixed == "token" else 0
        mean = x.mean(along, keepdim=True) if norm.name == "layernorm" else x.new_zeros(())
        variance = (x - mean).square().mean(along)
        found[norm] = (mean.mean(), variance.mean()) if fixed == "token" else (mean.squeeze(0), variance)
    return found


def _keep(rows: list[Tensor]) -> Any:
    return lambda module, inputs: rows.append(inputs[0].flatten(0, -2))


@contextmanager
def _static(statistics: Statistics) -> Iterator[None]:
    """Lets the norms of a model work with these statistics in the block: then each is W diag(g) and a bias, no more."""

    def hook(module: torch.nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        norm = cast(Norm, module)
        (mean, variance), (gain, bias) = statistics[norm], affine_of(norm)
        y = (inputs[0] - mean) * torch.rsqrt(variance + norm.eps)
        y = y if gain is None else y * gain
        return y if bias is None else y + bias

    hooks = [norm.register_forward_hook(hook) for norm in statistics]
    try:
        yield
    finally:
        for each in hooks:
            each.remove()
