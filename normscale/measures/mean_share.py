"""How much of a row's energy is in its mean, which LayerNorm takes out and RMSNorm leaves, in a trained model."""

import tempfile

import numpy as np
import torch

from normscale.data.batches import held_out_batches, unigram_of
from normscale.measures._trained import config_of, loss_of
from normscale.norms import Norm
from normscale.train.run import run
from normscale.train.trained import trained

BATCHES = 4


def measure(seed: int, scheme: str, blocks: int = 6, steps: int = 300) -> dict[str, float]:
    """Trains a decoder with LayerNorm on text and returns mean^2 / mean square of the rows that its norms take.

    Of each norm the mean over rows of held-out text: `share_first` of the first, `share_last` of the last, `share_mean`
    over all, `share_largest` of the norm that has most. 1 / width is that of rows of independent numbers. `learned` is
    by how much the loss is below the unigram entropy.
    """
    with tempfile.TemporaryDirectory() as folder:
        config = config_of(seed, steps, folder, scheme=scheme, norm="layernorm", M=blocks)
        found = trained(run(config).run_dir)
    model, held_out = found.engine.inner.cpu().float(), held_out_batches(found.task, config.train.batch, BATCHES)
    shares: dict[torch.nn.Module, list[torch.Tensor]] = {m: [] for m in model.modules() if isinstance(m, Norm)}

    def look(norm: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].double().flatten(0, -2)
        shares[norm].append(x.mean(-1).square() / x.square().mean(-1).clamp_min(1e-300))

    hooks = [norm.register_forward_pre_hook(look) for norm in shares]
    loss = loss_of(model, held_out)
    for hook in hooks:
        hook.remove()
    by_layer = np.array([float(torch.cat(parts).mean()) for parts in shares.values() if parts])
    return {
        "share_first": float(by_layer[0]),
        "share_last": float(by_layer[-1]),
        "share_mean": float(by_layer.mean()),
        "share_largest": float(by_layer.max()),
        "learned": unigram_of(found.task, held_out) - loss,
    }
