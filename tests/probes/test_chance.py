"""Generators beside the default one: a replay draws what the step drew, and training goes on as if nothing had."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normscale
from normscale.probes.chance import RandomState, Sources
from tests.monitor.made import batches, loss_fn, train


class Noise(nn.Module):
    """Adds noise from a generator of its own; where it draws little there is NaN."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.generator = nn.Linear(4, 4), torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(x.shape, generator=self.generator)
        return self.proj(x) + noise.masked_fill(noise < 0.01, math.nan)


def test_a_replay_draws_from_a_models_own_generators_what_the_step_drew(tmp_path: Path) -> None:
    ends = []
    for monitored in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(Noise(), Noise())
        assert Sources.of(model).own == (model[0].generator, model[1].generator)
        if not monitored:
            for batch in batches(12):
                model(batch)
        else:
            monitor = normscale.Monitor(model, loss_fn, runs=tmp_path, update_batch=batches(1)[0])
            reports = train(model, monitor, batches(12))
            monitor.close()
            bad = [report for report in reports if not report.applied]
            assert 0 < len(bad) < 12
            for report in bad:
                assert report.culprit is not None
                assert (report.culprit.phase, report.culprit.reproduced) == ("forward", True)
        ends.append(torch.rand(3, generator=model[1].generator))
    assert torch.equal(*ends)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, int]:
    """Two GPUs, as far as their generators go."""
    states = {torch.device("cuda", 0): 5, torch.device("cuda", 1): 6}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: torch.tensor(states[device]))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: int(state)}))
    return states


def test_the_generators_of_all_devices_of_a_model_are_put_back(cuda: dict[torch.device, int]) -> None:
    first, second = cuda
    on: Any = [SimpleNamespace(device=device) for device in (first, torch.device("cpu"), second, first)]
    model: Any = SimpleNamespace(modules=list, parameters=lambda: on[:2], buffers=lambda: on[2:])
    sources = Sources.of(model)
    assert sources.devices == (first, second)
    before = RandomState.capture(sources)
    cuda.update({first: 7, second: 8})
    before.restore()
    assert cuda == {first: 5, second: 6}
    assert Sources.at(second).devices == (second,)
    assert Sources.at(torch.device("cpu")).devices == ()
