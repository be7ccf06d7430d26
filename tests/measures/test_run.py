"""A measurement as a run: its identity, its record, its arguments."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.claims.cost import Cost
from normscale.claims.workers import Job, Pool
from normscale.cli import main
from normscale.config.schema import RunConfig as Config
from normscale.errors import BadInput
from normscale.measures import run as measurement
from normscale.measures._sources import sources_of
from normscale.measures.config import MeasureConfig
from normscale.measures.run import BESIDE, find_measure, measures, run, run_id_of
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


def reads(name: str) -> tuple[set[str], str]:
    """The files a measurement is made from, and which of the packages beside training's it imports."""
    found = sources_of(Path(inspect.getfile(find_measure(name))))
    return {path.stem for path in found.files}, " ".join(p for p in BESIDE if found.imports(f"normscale.{p}"))


def test_its_sources_are_what_its_file_imports() -> None:
    assert reads("ln_geometry") == ({"ln_geometry", "_rows"}, "")
    assert reads("eps_error") == ({"eps_error", "_half", "_rows"}, "")
    assert reads("static_fold") == ({"static_fold", "_rows", "_trained"}, "fold")
    assert reads("vit_gradients") == ({"vit_gradients", "_modules"}, "monitor")


@pytest.mark.parametrize(
    "line",
    [
        "from normscale.measures._shared import x",
        "from normscale.measures import _shared",
        "import normscale.measures._shared",
        "def f():\n    from normscale.measures._shared import x",
        "from normscale.measures.between import y",
    ],
)
def test_a_file_is_found_however_it_is_imported(tmp_path: Path, line: str) -> None:
    (tmp_path / "between.py").write_text("from normscale.measures._shared import x as y\n")
    (tmp_path / "_shared.py").write_text("from normscale.monitor import Monitor\nx = 1\n")
    (tmp_path / "one.py").write_text(f"{line}\n")
    found = sources_of(tmp_path / "one.py")
    assert tmp_path / "_shared.py" in found.files
    assert found.imports("normscale.monitor")
    assert not found.imports("normscale.mon")


def test_a_measurement_is_another_one_by_defaults_and_text_where_it_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ids() -> list[str]:
        arguments = {"scheme": "pre", "norms": True, "blocks": 2}
        return [
            run_id_of(geometry(tmp_path)),
            run_id_of(geometry(tmp_path, measure="gradient_profile", arguments=arguments)),
        ]

    static, on_text = ids()
    monkeypatch.setattr(measurement, "_text_digest", lambda: "another")
    assert ids()[0] == static
    assert ids()[1] != on_text
    monkeypatch.undo()
    monkeypatch.setattr(measurement, "RunConfig", lambda: Config(model={"d": 128}))
    assert ids()[0] == static
    assert ids()[1] != on_text


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
