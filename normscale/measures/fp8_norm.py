"""What fp8 makes of a norm: its output rounded to e4m3 or e5m2 with one scale, and what the norms around do to that."""

from typing import Literal

import torch
from torch import Tensor

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.measures._rows import NormName, normed, relative_error, rows
from normscale.models.builder import build
from normscale.norms import Norm

ROWS, WIDTH, BATCH = 256, 1024, 2
FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "bf16": torch.bfloat16}

Format = Literal["e4m3", "e5m2", "bf16"]
Where = Literal["output", "input", "statistics"]


def measure(
    seed: int,
    norm: NormName,
    format: Format,
    where: Where,
    outlier: float = 0.0,
    eps: float = 1e-5,
    scheme: str | None = None,
    blocks: int = 0,
) -> dict[str, float]:
    """Returns `error`: the root mean square error of the norm against fp64, over the truth's.

    Rounded is what the norm gives, what it takes, or all that its statistics are made of (input, squares, mean). A
    rounding has one scale for the tensor, so that the largest absolute value is the format's largest. One feature in
    1024 is `outlier` times as large as the others, as some are in trained models; 0: none. It counts for nothing in
    the error: what it does to the others does. `flushed` is the share of the entries that the rounding of input or
    output makes zero.

    With a `scheme`, rows are what the norms of its model of so many blocks take on text, at initialisation, rounded
    before them; each number is the largest of any norm.
    """
    if scheme is not None:
        taken = [x.double() for x in _taken(seed, norm, scheme, blocks)]
        coarse = [_round(x, format) for x in taken]
        return {
            "error": max(
                relative_error(normed(norm, y, eps), normed(norm, x, eps)) for x, y in zip(taken, coarse, strict=True)
            ),
            "flushed": max(float((y == 0).double().mean()) for y in coarse),
        }
    x, odd = rows(seed, ROWS, WIDTH), seed % WIDTH
    if outlier:
        x[:, odd] *= outlier
    truth = normed(norm, x, eps)
    counted = torch.ones(WIDTH, dtype=torch.bool)
    counted[odd] = not outlier

    def error(y: Tensor) -> float:
        return relative_error(y[:, counted], truth[:, counted])

    if where == "output":
        y = _round(truth, format)
        return {"error": error(y), "flushed": float((y == 0).double().mean())}
    given = _round(x, format)
    flushed = float((given == 0).double().mean())
    if where == "input":
        return {"error": error(normed(norm, given, eps)), "flushed": flushed}
    centred = given - _round(given.mean(-1, keepdim=True), format) if norm == "layernorm" else given
    power = _round(_round(centred.square(), format).mean(-1, keepdim=True), format)
    return {"error": error(centred * torch.rsqrt(power + eps)), "flushed": flushed}


def _taken(seed: int, norm: NormName, scheme: str, blocks: int) -> list[Tensor]:
    """Returns what each norm of a small model takes of a batch of text, at initialisation.

    Shape: each [tokens, D].
    """
    settings = {"model.scheme": scheme, "model.norm": norm, "model.M": blocks, "train.batch": BATCH, "seed": seed}
    config = revise(RunConfig(), settings)
    task = load_task(config)
    model = build(config.model, task.vocab, seed)
    taken: list[Tensor] = []
    norms = [module for module in model.modules() if isinstance(module, Norm)]
    for module in norms:
        module.register_forward_pre_hook(lambda _, inputs: taken.append(inputs[0].detach().flatten(0, -2)))
    batch = Batches(task.train, batch=BATCH, seed=seed).window(0)[0]
    with torch.no_grad():
        model(batch.tokens_BT, **batch.beside)
    return taken


def _round(x: Tensor, format: Format) -> Tensor:
    """Returns `x` as the format holds it, with one scale for all of it where it is an fp8."""
    if format == "bf16":
        return x.to(torch.bfloat16).to(x.dtype)
    kept = FORMATS[format]
    scale = torch.finfo(kept).max / x.abs().max().clamp_min(1e-30)
    return (x * scale).to(kept).to(x.dtype) / scale
