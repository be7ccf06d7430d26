"""A measurement as a run: its identity, its record, its arguments."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.claims.cost import Cost
from normscale.claims.workers import Job, Pool
from normscale.cli import main
from normscale.errors import BadInput
from normscale.measures import run as measurement
from normscale.measures.config import MeasureConfig
from normscale.measures.run import find_measure, measures, run, run_id_of
from normscale.tracking.reader import read_run


def geometry(folder: Path, **changes: Any) -> MeasureConfig:
    given = {"measure": "ln_geometry", "arguments": {"norm": "layernorm", "width": 16}, "runs": str(folder)}
    return MeasureConfig.model_validate(given | changes)


@pytest.mark.parametrize("name", measures())
def test_every_measure_has_typed_arguments_a_seed_and_says_what_it_is(name: str) -> None:
    function = find_measure(name)
    found = inspect.signature(function, eval_str=True)
    assert next(iter(found.parameters)) == "seed"
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in found.parameters.values())
    assert found.return_annotation == dict[str, float]
    assert (function.__doc__ or "").strip()


def test_it_is_recorded_once_and_read_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = geometry(tmp_path)
    first = run(config)
    record = read_run(tmp_path / first.run_id)
    assert record.finished
    assert {name.removeprefix("user/"): series.values for name, series in record.series.items()} == {
        name: [value] for name, value in first.numbers.items()
    }
    assert record.start["config"]["arguments"] == {"norm": "layernorm", "width": 16}
    assert record.start["environment"]["threads"] == torch.get_num_threads()
    monkeypatch.setattr(measurement, "_measured", lambda *_: pytest.fail("it was done already"))
    assert run(config) == first


def test_it_is_shown_by_its_numbers_and_two_differ_in_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (run(geometry(tmp_path, seed=seed)) for seed in (0, 1))
    folders = [str(tmp_path / each.run_id) for each in (first, second)]
    assert main(["show", folders[0]]) == 0
    said = capsys.readouterr().out
    assert f"unit_distance {first.numbers['unit_distance']:.4g}" in said
    assert "measure=ln_geometry, arguments.norm=layernorm, arguments.width=16" in said
    assert "another loop" not in said
    assert main(["diff", *folders]) == 0
    assert "additivity" in capsys.readouterr().out


def test_it_is_another_one_by_arguments_seed_and_sources_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = run_id_of(geometry(tmp_path))
    assert run_id_of(geometry(tmp_path / "other", name="else", seconds=9.0)) == own
    assert run_id_of(geometry(tmp_path, seed=1)) != own
    assert run_id_of(geometry(tmp_path, arguments={"norm": "rmsnorm", "width": 16})) != own
    monkeypatch.setattr(measurement, "sources_hash", lambda *more: "other sources")
    assert run_id_of(geometry(tmp_path)) != own


def test_numbers_follow_from_the_seed_whatever_was_drawn_before(tmp_path: Path) -> None:
    first = run(geometry(tmp_path / "a")).numbers
    torch.rand(7)
    assert run(geometry(tmp_path / "b")).numbers == first
    assert run(geometry(tmp_path / "b", seed=1)).numbers != first


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"measure": "ln_geometri"}, "did you mean 'ln_geometry'"),
        ({"arguments": {"norm": "layernorm"}}, "missing a required argument: 'width'"),
        ({"arguments": {"norm": "layernorm", "width": 16, "wide": 1}}, "unexpected keyword argument 'wide'"),
        ({"arguments": {"norm": "batchnorm", "width": 16}}, "norm='batchnorm': Input should be 'layernorm', "),
    ],
)
def test_arguments_that_do_not_fit_are_named(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        run(geometry(tmp_path, **changes))


def test_a_worker_measures_between_trainings(tmp_path: Path) -> None:
    config = geometry(tmp_path)
    job = Job(run_id_of(config), "a measurement", config, Cost().of(config))
    torch_threads = torch.get_num_threads()
    with Pool(1) as pool:
        pool.run([job])
    assert torch.get_num_threads() == torch_threads
    if torch_threads == 1:  # workers have one thread, which is part of what a run is
        assert job.outcome == "done", job.note
    assert len(list(tmp_path.glob("ln-geometry-s0-*"))) == 1
