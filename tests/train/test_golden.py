"""Golden losses: five steps on fixed bytes, eager fp32, one thread. One text file a model, under tests/golden.

`make golden` writes them anew; a difference in the commit that does so is a change of the numbers, to be explained.
"""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from normscale.config.schema import RunConfig
from normscale.data.batches import IGNORE
from normscale.data.task import MicroBatch
from normscale.models.builder import build
from normscale.schemes import scheme_names
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from tests.probes.test_probes import Notes
from tests.schemes.forms import fits

FOLDER = Path(__file__).parents[1] / "golden"
TEXT = (b"How deep can a Transformer go before training breaks, and why? " * 40)[: 5 * 4 * 17]
ALIKE = {"sandwich": "peri"}  # one graph that has two names
MODELS = {"": (0, 3), "encoder-": (3, 0), "encoder-decoder-": (2, 2)}


def micro_batch(batch: torch.Tensor, N: int, M: int) -> MicroBatch:
    """The next byte; every fourth byte, hidden; or the next byte of the second half, with some of the first."""
    if not N:
        return MicroBatch(batch[:, :-1], batch[:, 1:])
    if not M:
        hidden = torch.arange(16) % 4 == 1
        return MicroBatch(batch[:, :-1].masked_fill(hidden, 0), batch[:, :-1].masked_fill(~hidden, IGNORE))
    keep = torch.arange(8) < torch.tensor([[8], [5], [8], [3]])
    return MicroBatch(batch[:, 8:-1], batch[:, 9:], source_BS=batch[:, :8], source_keep_BS=keep)


def losses(scheme: str, N: int, M: int) -> list[float]:
    config = RunConfig(
        model={"N": N, "M": M, "d": 32, "heads": 4, "context": 16, "scheme": scheme},
        train={"steps": 5, "batch": 4, "optim": {"lr": 3e-3, "clip": 1.0}, "schedule": {"warmup_steps": 2}},
    )
    model, rows = build(config.model, 256, 0), torch.tensor(list(TEXT)).view(5, 4, 17)
    first = micro_batch(rows[0], N, M)
    with torch.no_grad():
        model.scheme.calibrate(lambda: model(first.tokens_BT, **first.beside))
    trainer = Trainer(PlainEngine(model, config.precision, torch.device("cpu")), config, [])
    return [trainer.step([micro_batch(batch, N, M)], Notes()).loss for batch in rows]


CASES = [
    (scheme, kind) for scheme in scheme_names() for kind, (N, M) in MODELS.items() if fits(scheme=scheme, N=N, M=M)
]


@pytest.mark.parametrize(("scheme", "kind"), CASES)
def test_losses_are_the_golden_ones(scheme: str, kind: str) -> None:
    got, path = losses(scheme, *MODELS[kind]), FOLDER / f"{kind}{scheme}.txt"
    if os.environ.get("NORMSCALE_WRITE_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{loss:.9g}\n" for loss in got))
    assert path.exists(), f"{path} is missing; `make golden` writes it"
    np.testing.assert_allclose(got, np.loadtxt(path), rtol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_golden_losses_tell_the_schemes_apart(kind: str) -> None:
    last = {scheme: round(losses(scheme, *MODELS[kind])[-1], 4) for scheme, its_kind in CASES if its_kind == kind}
    for same, other in ALIKE.items():
        assert last.pop(same, last[other]) == last[other]
    assert len(set(last.values())) == len(last)
