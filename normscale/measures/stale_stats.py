"""What it does to a norm's output when its statistics are those of another micro-batch."""

from typing import Literal

import torch

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.measures._rows import NormName, relative_error
from normscale.models.builder import build

EPS = 1e-5
BLOCKS, BATCH = 4, 8

Reuse = Literal["recompute", "before", "average"]


def measure(seed: int, norm: NormName, reuse: Reuse) -> dict[str, float]:
    """Returns, over the inputs of all norms of a small Pre-Norm model on text, of one micro-batch after another:

    - `output_error`: the root mean square change of the norms' output, over its size, when the mean and the mean
      square of each position are those that this position (sequence and token) had in the micro-batch before
      (`before`), or their mean over all positions there (`average`), instead of its own. `recompute` is `before` where
      the micro-batch before is this very one: what the way of taking statistics over costs by itself;
    - `scatter`: the standard deviation over positions of the root of the statistics, over its mean.
    """
    settings = {"model.scheme": "pre", "model.norm": norm, "model.M": BLOCKS, "train.batch": BATCH, "seed": seed}
    config = revise(RunConfig(), settings)
    task = load_task(config)
    model = build(config.model, task.vocab, seed)
    seen: list[list[torch.Tensor]] = []

    def look(module: torch.nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        seen[-1].append(given[0].detach().double().flatten(0, -2))

    hooks = [module.register_forward_pre_hook(look) for module in model.modules() if hasattr(module, "eps_tensor")]
    batches = Batches(task.train, batch=BATCH, seed=seed)
    with torch.no_grad():
        for window in (1, 1) if reuse == "recompute" else (0, 1):
            seen.append([])
            batch = batches.window(window)[0]
            model(batch.tokens_BT, **batch.beside)
    for hook in hooks:
        hook.remove()
    errors, scatters = [], []
    for before, x in zip(*seen, strict=True):
        mean, power = _statistics(norm, x)
        truth = (x - mean) * torch.rsqrt(power + EPS)
        old_mean, old_power = _statistics(norm, before)
        if reuse == "average":
            old_mean, old_power = old_mean.mean(), old_power.mean()
        errors.append(relative_error((x - old_mean) * torch.rsqrt(old_power + EPS), truth))
        scatters.append(float(power.sqrt().std() / power.sqrt().mean()))
    return {"output_error": sum(errors) / len(errors), "scatter": sum(scatters) / len(scatters)}


def _statistics(norm: NormName, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean (0 for RMSNorm) and the mean square about it of each row.

    Shape: x [rows, width]; results [rows, 1].
    """
    mean = x.mean(-1, keepdim=True) if norm == "layernorm" else torch.zeros_like(x[:, :1])
    return mean, (x - mean).square().mean(-1, keepdim=True)
