from pathlib import Path

import pytest

from normscale.claims.cost import BUILD_S, START_S, Cost, fitted, from_finished, steps_of
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from tests.claims.synthetic import record, write


def config(layers: int, **changes: object) -> RunConfig:
    return revise(RunConfig(), {"model.M": layers, "train.steps": 100, **changes})


def test_a_cost_is_linear_in_steps_and_layers() -> None:
    cost = Cost(0.01, 0.002)
    deeper = cost.of(config(20)) - cost.of(config(10))
    assert deeper == pytest.approx(steps_of(config(10)) * 10 * 0.002 + 10 * BUILD_S)
    longer = cost.of(config(10, **{"train.steps": 200})) - cost.of(config(10))
    assert longer == pytest.approx(100 * 0.03)


def test_evaluations_count_as_forward_passes() -> None:
    every = config(10, **{"train.eval_every": 10, "train.eval_batches": 6})
    assert steps_of(every) == pytest.approx(100 + 11 * 6 / 3)


def test_two_depths_give_a_cost_and_one_does_not() -> None:
    cost = fitted([(2, 0.014), (12, 0.034), (48, 0.106)])
    assert cost is not None
    assert (cost.base, cost.per_layer) == (pytest.approx(0.01), pytest.approx(0.002))
    assert fitted([(2, 0.014), (2, 0.015)]) is None


def test_finished_runs_of_this_machine_are_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "host")
    cost = Cost(0.01, 0.002)
    for layers in (2, 12, 48):
        made, own = record(), config(layers)
        assert made.end is not None
        made.end["summary"]["seconds"] = cost.of(own) - START_S - BUILD_S * layers
        write(tmp_path, f"run-{layers}", made, own.model_dump(mode="json"))
    found = from_finished(tmp_path)
    assert found is not None
    assert found.of(config(100)) == pytest.approx(cost.of(config(100)), rel=1e-3)
    monkeypatch.setattr("platform.node", lambda: "another machine")
    assert from_finished(tmp_path) is None
    assert from_finished(tmp_path / "nowhere") is None
