"""Norms of what fp32 cannot square: gradients that a deep model has made small, and a stream that grows too large."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from normscale.config.schema import RunConfig
from normscale.models.builder import build
from normscale.monitor.gradients import Gradients
from normscale.monitor.outputs import block_statistics
from normscale.ops.statistics import PIECE
from normscale.probes.activations import Activations
from normscale.probes.lengths import LONG, length, lengths
from normscale.probes.stream_gradients import StreamGradients
from normscale.tracking.reader import read_run
from normscale.train.engines.plain import PlainEngine
from normscale.train.observe import subject_of
from tests.monitor.made import batches, net
from tests.probes.test_probes import MODEL

SIZES = [1e-42, 1e-30, 1e-24, 3e-20, 1e-12, 1.0, 1e18, 3e19, 1e30]


def drawn(size: float, n: int = 1000) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(0)) * size


@pytest.mark.parametrize("size", SIZES)
def test_norms_of_any_size_are_those_of_fp64(size: float) -> None:
    rows = torch.stack([drawn(size), drawn(1.0), drawn(size).flip(0)])
    exact = rows.double().square().sum(dim=1).sqrt()
    np.testing.assert_allclose(lengths(rows), exact, rtol=1e-6)
    assert float(length(rows[::2].T)) == pytest.approx(float(exact[::2].square().sum().sqrt()), rel=1e-6)
    assert float(block_statistics(rows[0])[0]) == pytest.approx(float(exact[0]), rel=1e-6)


@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e25])
@pytest.mark.parametrize("count", [LONG, LONG + PIECE + 7])
def test_norms_of_long_rows_are_too(size: float, count: int) -> None:
    rows = torch.stack([drawn(size, count), drawn(1.0, count)])
    np.testing.assert_allclose(lengths(rows), rows.double().norm(dim=1), rtol=1e-6)
    rows[0, -1], rows[1, 0] = math.nan, math.inf
    assert [math.isnan(lengths(rows)[0]), float(lengths(rows)[1])] == [True, math.inf]


def test_what_has_no_size() -> None:
    nan, inf = drawn(1.0), drawn(1e-30)
    nan[3], inf[5] = math.nan, -math.inf
    found = lengths(torch.stack([nan, inf, torch.zeros(1000)])).tolist()
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, 0.0]
    assert lengths(torch.empty(2, 0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_millions_of_entries_are_those_of_fp64(dtype: torch.dtype) -> None:
    x = drawn(1e-3, 5_000_000).to(dtype)  # one sum in fp32 is off by 1e-4
    exact = pytest.approx(float(x.double().norm()), rel=1e-5)
    assert [float(lengths(x[None])[0]), float(length(x.view(1000, -1)))] == [exact, exact]


@pytest.mark.parametrize("size", [1e-30, 1e-24])
def test_the_gradient_norms_of_a_step_whose_squares_vanish(size: float) -> None:
    config = RunConfig(model=MODEL)
    engine = PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu"))
    for start, stop in engine.flat.spans.values():
        engine.flat.grads[start:stop] = drawn(size, stop - start)
    exact = engine.flat.grads.double()
    _, norm = engine.loss_and_norm(torch.zeros(()), 1)
    assert norm == pytest.approx(float(exact.norm()), rel=1e-6)
    squares = subject_of(engine).gradient_squares()
    for square, names in zip(squares.tolist(), engine.inner.site_parameters(), strict=True):
        own = sum(float(exact[slice(*engine.flat.spans[name])].square().sum()) for name in names)
        assert square == pytest.approx(own, rel=1e-6)


def test_rows_whose_squares_fp32_has_lost_are_bounded_by_their_largest_entry() -> None:
    config = RunConfig(model=MODEL)
    subject = subject_of(PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu")))
    backward, forward = StreamGradients(), Activations()
    for probe in (backward, forward):
        probe.attach(subject)
        probe.begin(1)
    backward.scaled_by(2.0)
    backward.rows[:, 1] = 4e-24  # the sums of squares stay 0
    backward.after_micro_batch({})
    hands = {name: hand.values.flatten().numpy() for name, hand in backward.hand_over().items()}
    assert set(backward.read(hands).profiles["stream_grad_norm"]) == {np.float32(4e-24) / 2}
    forward.rows[:, 0], forward.rows[:, 1] = torch.inf, 1e25
    forward.after_micro_batch({"decoder": 8})
    hands = {name: hand.values.double().flatten().numpy() for name, hand in forward.hand_over().items()}
    profiles = forward.read(hands).profiles
    assert set(profiles["stream_rms"]) == set(profiles["branch_rms"]) == {float(np.float32(1e25))}


def test_a_monitor_has_the_norms_of_blocks_whose_squares_vanish(tmp_path: Path) -> None:
    import normscale

    model = net(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = normscale.Monitor(model, runs=tmp_path)
    with monitor.micro_batch():
        loss = model(batches(1)[0]).square().mean()
        (loss * 1e-25).backward()
    own = [[p.grad.double() for p in block.parameters() if p.grad is not None] for block in model.blocks]
    exact = [math.sqrt(sum(float(grad.square().sum()) for grad in grads)) for grads in own]
    whole = Gradients(list(model.parameters()))
    monitor.step(optimizer, loss)
    monitor.close()
    record = read_run(next(tmp_path.iterdir()))
    np.testing.assert_allclose(record.profiles["grad_norm"].data[0], exact, rtol=1e-6)
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    assert whole.fresh()
    assert float(whole.squares().sum()) == pytest.approx(squares, rel=1e-6)
    assert record.series["grad_norm"].values[0] == pytest.approx(math.sqrt(squares), rel=1e-6)
