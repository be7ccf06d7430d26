"""The buffers that forward passes write are put back as the window found them, and constants cost nothing."""

import copy
import math

import pytest
import torch
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.probes import buffers
from normscale.probes.buffers import AllBuffers, WindowBuffers
from normscale.schemes.registry import scheme_names
from tests.probes.test_probes import MODEL


class Mixed(nn.Module):
    """A batch norm, a persistent constant, a cache, and a buffer that is exchanged for another with each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("constant", torch.tensor([1.0, math.nan]))
        self.inner = nn.Module()
        self.inner.register_buffer("average", torch.zeros(4))
        self.inner.register_buffer("beside", torch.ones(2))
        self.register_buffer("cache", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.average = 0.5 * self.inner.average + x.mean(dim=0)  # type: ignore[operator,assignment]
        self.cache = x[0]
        return self.norm(x)  # type: ignore[no-any-return]


def kept(window: WindowBuffers) -> list[str]:
    return [one.path for one in window._kept]


def x(value: float = 1.0) -> Tensor:
    return value * torch.arange(12.0).view(3, 4).sin()


def test_a_window_that_is_not_applied_is_undone() -> None:
    model = Mixed()
    window = WindowBuffers(model)
    for step in range(4):
        before = copy.deepcopy(model.state_dict())
        window.begin()
        model(x(step + 1))
        model(x(math.nan) if step in (0, 2) else x())
        if step in (0, 2):
            assert window.put_back() == []
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0, equal_nan=True)
        else:
            window.applied()
            assert not torch.equal(model.norm.running_mean, before["norm.running_mean"])
            assert int(model.norm.num_batches_tracked) == int(before["norm.num_batches_tracked"]) + 2


def test_only_modules_that_write_are_kept_after_the_first_window() -> None:
    model = Mixed()
    window = WindowBuffers(model)
    window.begin()
    model(x())
    window.applied()
    assert kept(window) == [
        "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "inner.average", "inner.beside"
    ]  # fmt: skip


def test_a_buffer_that_is_written_later_is_named_and_kept_from_then_on() -> None:
    model = Mixed()
    model.norm.eval()
    window = WindowBuffers(model)
    window.begin()
    model(x())
    window.applied()
    assert kept(window) == ["inner.average", "inner.beside"]
    model.norm.train()
    window.begin()
    model(x())
    assert window.put_back() == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    before = model.norm.running_mean.clone()  # type: ignore[operator]
    window.begin()
    model(x(2.0))
    assert window.put_back() == []
    assert torch.equal(model.norm.running_mean, before)


@pytest.mark.parametrize("config", [{"scheme": name} for name in scheme_names()] + [{"positions": "sinusoidal"}])
def test_our_own_models_have_nothing_to_keep(config: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(ModelConfig(**{**MODEL, **config}), 32, 0)
    assert list(model.buffers())
    window = WindowBuffers(model)

    def never(*_: object) -> None:
        raise AssertionError("a buffer is kept")

    monkeypatch.setattr(buffers, "_Copy", never)
    monkeypatch.setattr(torch, "_foreach_copy_", never)
    for _ in range(2):
        window.begin()
        window.applied()
        assert window.put_back() == []


def test_buffers_follow_a_model_that_is_exchanged_for_another_dtype() -> None:
    model = Mixed()
    window = WindowBuffers(model)
    for dtype in (torch.float32, torch.float64):
        model.to(dtype)
        window.begin()
        model(x().to(dtype))
        window.applied()
    before = model.norm.running_mean.clone()  # type: ignore[operator]
    window.begin()
    model(x(3.0).double())
    window.put_back()
    assert torch.equal(model.norm.running_mean, before)
    assert model.norm.running_mean.dtype == torch.float64


class Changing(nn.Module):
    """Its owner takes the average away, or gives it another shape or layout; `other` is written by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(2))
        self.other = nn.Module()
        self.other.register_buffer("constant", torch.zeros(2))

    def forward(self, x: float) -> None:
        if (average := self._buffers.get("average")) is not None and average.layout is torch.strided:
            average.add_(x)


CHANGES = {
    "deleted": delattr,
    "none": lambda module, name: setattr(module, name, None),
    "longer": lambda module, name: setattr(module, name, torch.full((3,), 7.0)),
    "sparse": lambda module, name: setattr(module, name, torch.eye(2).to_sparse()),
    "a parameter": lambda module, name: (delattr(module, name), setattr(module, name, nn.Parameter(torch.ones(2)))),
}


@pytest.mark.parametrize("at", [0, 1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_that_its_owner_takes_away_between_windows_is_forgotten(change: str, at: int) -> None:
    model = Changing()
    window = WindowBuffers(model)
    for step in range(4):
        if step == at:
            CHANGES[change](model, "average")
            if step:
                CHANGES[change](model.other, "constant")
        there = model._buffers.get("average")
        before = None if there is None else there.clone()
        window.begin()
        model(1.0)
        if step % 2:
            late = window.put_back()
            assert set(late) <= ({"other.constant"} if change == "longer" and at else set())
            now = model._buffers.get("average")
            assert (now is None) == (before is None)
            assert now is None or before is None or torch.equal(now.to_dense(), before.to_dense())
        else:
            window.applied()
    model.average = None if change == "a parameter" else torch.ones(2)
    window.begin()
    window.applied()


@pytest.mark.parametrize("change", CHANGES)
def test_a_buffer_that_a_pass_takes_away_is_put_back(change: str) -> None:
    model = Changing()
    for keep in (AllBuffers(model), WindowBuffers(model)):
        if isinstance(keep, WindowBuffers):
            keep.begin()
        CHANGES[change](model, "average")
        keep.put_back()
        assert torch.equal(model._buffers["average"], torch.zeros(2))
        model._parameters.clear()


def test_a_buffer_that_is_expanded_is_put_back_as_it_was() -> None:
    model = nn.Module()
    model.register_buffer("mask", torch.ones(1, 3).expand(2, 3))
    before = model.mask
    for keep in (AllBuffers(model), WindowBuffers(model)):
        if isinstance(keep, WindowBuffers):
            keep.begin()
        model.mask = model.mask + 1
        keep.put_back()
        assert model.mask is before
        assert torch.equal(before, torch.ones(2, 3))


def test_all_buffers_are_put_back_in_the_tensors_they_were_in() -> None:
    model = Mixed()
    tensors, values = dict(model.named_buffers()), copy.deepcopy(dict(model.named_buffers()))
    here = AllBuffers(model)
    model(x())
    here.put_back()
    for name, buffer in model.named_buffers():
        assert buffer is tensors[name]
        assert torch.equal(buffer.nan_to_num(), values[name].nan_to_num())


def test_buffers_that_cannot_be_compared_are_left_alone() -> None:
    class Odd(nn.Module):
        def __init__(self, persistent: bool) -> None:
            super().__init__()
            self.average = nn.BatchNorm1d(4)
            nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
            odd = {"coo": torch.eye(4).to_sparse(), "nested": nested}
            for name, value in odd.items():
                self.register_buffer(name, value, persistent)

    for persistent in (True, False):
        model = Odd(persistent)
        window, here = WindowBuffers(model), AllBuffers(model)
        window.begin()
        model.average(x())
        window.applied()
        assert kept(window) == ["average.running_mean", "average.running_var", "average.num_batches_tracked"]
        window.begin()
        model.average(x(2.0))
        assert window.put_back() == []
        assert int(model.average.num_batches_tracked) == 1
        here.put_back()
        assert int(model.average.num_batches_tracked) == 0
