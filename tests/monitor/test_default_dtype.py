"""A loop that has made another dtype or device the default: the monitor's numbers are those it has otherwise."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import normscale
from normscale.probes import sending
from normscale.probes.activations import Activations
from normscale.probes.angles import Angles
from normscale.probes.attention import Attention
from normscale.probes.output import OutputSoftmax
from normscale.probes.probe import Probe, Subject
from normscale.probes.stream_gradients import StreamGradients
from normscale.tracking.reader import RunRecord
from tests.monitor.made import Poison, adamw, batches, events, loss_fn, marked, net, record, train


@pytest.fixture
def default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)


def trained(
    dtype: torch.dtype, folder: Path, device: str | None = None
) -> tuple[list["normscale.StepReport"], RunRecord]:
    torch.set_default_dtype(torch.float32)
    model, data, fixed = net(2), batches(6), batches(1, seed=9)[0]
    Poison(model, "blocks.1.proj")
    data[2] = marked(data[2])
    optimizer = adamw(model)
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    monitor = normscale.Monitor(model, loss_fn, runs=folder, every=2, clip=0.05, logits="head", update_batch=fixed)
    reports = train(model, monitor, data, optimizer=optimizer)
    torch.set_default_device(None)
    return reports, record(monitor)


def same(found: RunRecord, expected: RunRecord) -> None:
    assert set(found.series) == set(expected.series)
    for name, series in expected.series.items():
        np.testing.assert_array_equal(found.series[name].steps, series.steps, err_msg=name)
        if name not in ("update_s", "seconds"):
            np.testing.assert_allclose(found.series[name].values, series.values, rtol=1e-12, err_msg=name)
    for name, profile in expected.profiles.items():
        np.testing.assert_allclose(found.profiles[name].data, profile.data, rtol=1e-12, err_msg=name)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_no_number_hangs_on_the_default_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    plain, expected = trained(torch.float32, tmp_path / "plain")
    reports, found = trained(dtype, tmp_path / "other")
    assert [report.applied for report in reports] == [True, True, False, True, True, True]
    assert [report.grad_norm for report in reports if report.applied] == [r.grad_norm for r in plain if r.applied]
    assert reports[2].culprit is not None
    assert (reports[2].culprit.module, reports[2].culprit.phase) == ("blocks.1.proj", "forward")
    assert events(found, "probe_off") == []
    same(found, expected)
    assert math.isfinite(found.series["logz_mean"].values[0])


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("late", [True, False])
def test_nor_on_the_default_device(late: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host makes lies on the host: else it could not be pinned, nor read without a wait."""
    if late:
        monkeypatch.setitem(sending.COPIED, "cpu", lambda device: lambda: None)
    _, expected = trained(torch.float32, tmp_path / "plain")
    reports, found = trained(torch.float32, tmp_path / "other", "meta")
    assert [report.applied for report in reports] == [True, True, False, True, True, True]
    assert events(found, "probe_off") == []
    same(found, expected)


@pytest.mark.usefixtures("default")
@pytest.mark.parametrize("probe", [Activations(), StreamGradients(), Angles(), Attention(), OutputSoftmax()])
def test_what_the_models_own_kernels_fill_is_in_fp32(probe: Probe) -> None:
    torch.set_default_dtype(torch.bfloat16)
    sites = ("decoder.0.self", "decoder.0.ffn")
    probe.attach(Subject(sites, 1, 8, torch.device("cpu"), lambda _: torch.empty(0), lambda: torch.empty(0)))
    kept = [value for value in vars(probe).values() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    assert kept
    assert {value.dtype for value in kept} <= {torch.float32, torch.float64}
