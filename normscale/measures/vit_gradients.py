"""Gradients of every block of a Vision Transformer of Hugging Face, as `normscale.Monitor` records them."""

import math
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import nn

from normscale.errors import BadInput
from normscale.measures._modules import without
from normscale.monitor import Monitor
from normscale.tracking.reader import read_run

WIDTH, HEADS, IMAGE, PATCH, CLASSES = 64, 2, 32, 8, 10
BATCH, RATE = 16, 1e-3
FAINT = 0.5  # the class's pattern, in standard deviations of the noise


def measure(seed: int, norms: bool, blocks: int, steps: int = 20) -> dict[str, float]:
    """Returns log10 of the largest over the smallest gradient norm of a block, at the first and the last step.

    The model is transformers' ViTForImageClassification as its own initialisation leaves it; without `norms` every
    LayerNorm is replaced by the identity. It is trained by Adam on noise pictures whose class is a faint pattern in
    them. A range with a gradient that is zero or not finite is NaN.

    Raises:
        BadInput: transformers is not installed.
    """
    if find_spec("transformers") is None:
        raise BadInput(
            "measure vit_gradients: it needs transformers, which is not installed; pip install 'normscale[deepspeed]'"
        )
    model = _model(seed, blocks)
    if not norms:
        without(model, nn.LayerNorm)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    generator = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 3, IMAGE, IMAGE, generator=generator)
    layers = [name for name, module in model.named_modules() if type(module).__name__ == "ViTLayer"]
    with tempfile.TemporaryDirectory(prefix="normscale-vit-") as folder:
        with Monitor(model, runs=folder, every=1, blocks=layers, updates=False) as monitor:
            for _ in range(steps):
                labels = torch.randint(CLASSES, (BATCH,), generator=generator)
                noise = torch.randn(BATCH, 3, IMAGE, IMAGE, generator=generator)
                batch = {"pixel_values": noise + FAINT * patterns[labels], "labels": labels}
                with monitor.micro_batch(batch):
                    loss = model(**batch).loss
                    loss.backward()
                monitor.step(optimizer, loss)
                optimizer.zero_grad()
        rows = read_run(monitor.run_dir).profiles["grad_norm"].data
    return {"range_first": decades(rows[0].tolist()), "range_last": decades(rows[-1].tolist())}


def decades(sizes: Sequence[float]) -> float:
    """Returns log10 of the largest over the smallest."""
    if not all(map(math.isfinite, sizes)) or min(sizes) <= 0:
        return math.nan
    return math.log10(max(sizes) / min(sizes))


def _model(seed: int, blocks: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = ViTConfig(
            hidden_size=WIDTH,
            num_hidden_layers=blocks,
            num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH,
            image_size=IMAGE,
            patch_size=PATCH,
            num_labels=CLASSES,
        )
        model: nn.Module = ViTForImageClassification(config)
    return model.train()
