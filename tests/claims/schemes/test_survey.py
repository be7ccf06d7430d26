import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from normscale.claims.claim import Cell
from normscale.claims.manifest import write_manifest
from normscale.claims.report import write_report
from normscale.claims.schemes import survey, training
from normscale.claims.schemes.chart import survey_table
from normscale.claims.schemes.rates import risen
from normscale.claims.schemes.records import places_of, runs_of, step_time
from normscale.claims.workers import Job
from normscale.config.schema import RunConfig
from normscale.errors import StoreError
from normscale.schemes import scheme_names
from normscale.train.run import run
from tests.claims.synthetic import record, write
from tests.claims.test_report import Tags

SHOWN = ("post", "pre")
SECONDS = {"post": 0.3, "pre": 0.2}


def store(
    runs: Path, schemes: Sequence[str] = SHOWN, margin: float = 0.5, depths: Sequence[int] = survey.DEPTHS
) -> None:
    """Leaves a survey as `train` does, of which the runs of these schemes and depths have ended."""
    for name, claim in survey.surveys(SHOWN).items():
        cells = [(cell, f"{name}-{cell.name}-{margin:g}".replace(" ", "-")) for cell in claim.cells("cpu")]
        write_manifest(runs / survey.FOLDER, claim, "cpu", cells, {})
        for cell, run_id in cells:
            scheme = survey.scheme_of(cell.arm)
            if scheme in schemes and cell.depth in depths:
                made = record(gap=0.2 + margin, improves=0.1, numbers={"rate_tolerated": _rate(cell)})
                assert made.end is not None
                made.end["summary"] |= {"train_seconds": 180.0, "thread_s": 180 * SECONDS[scheme]}
                made.start["identity"] = {"device": "cpu", "threads": 1}
                write(runs / survey.FOLDER, run_id, made, {})


def _rate(cell: Cell) -> float:
    return survey.TOP if cell.arm == "pre" else 1.5e-3


def test_every_scheme_is_surveyed_and_each_run_counts_for_its_scheme() -> None:
    for profile in ("cpu", "gpu"):
        for claim in survey.surveys(scheme_names()).values():
            cells = claim.cells(profile)
            places = places_of(claim, profile)
            assert [places[cell].scheme for cell in cells] == [survey.scheme_of(cell.arm) for cell in cells]
            assert {place.scheme for place in places.values()} == set(scheme_names())
            assert {place.kind for place in places.values()} == {"decoder, lm"}
            assert {cell.seed for cell in cells} == set(range(survey.SEEDS[profile]))
    trained = survey.surveys(["pre"])[survey.TRAINED]
    found = [(place.precision, cell.depth) for cell, place in places_of(trained, "cpu").items()]
    assert found == [(precision, depth) for precision in ("fp32", "bf16") for depth in (6, 24, 96)]


def test_the_rate_of_the_ramp_rises_to_its_end() -> None:
    (cell,) = survey.surveys(["pre"])[survey.RISING].cells("cpu")
    settings = cell.settings
    assert settings["train.schedule.warmup_steps"] == settings["train.steps"] == survey.RISING_STEPS
    assert (cell.lr, cell.depth) == (survey.TOP, survey.RISING_DEPTH)


def test_the_table_has_margins_rates_and_times_and_leaves_empty_what_was_not_run(tmp_path: Path) -> None:
    store(tmp_path, depths=(6, 24))
    surveyed = survey.found(tmp_path, tmp_path / "none")
    page = Tags(survey_table(surveyed, [*SHOWN, "peri"]))
    assert page.open == []
    rows = {row[0]: row[1:] for row in _rows(survey_table(surveyed, [*SHOWN, "peri"]))}
    assert rows[""] == ["fp32, 6", "fp32, 24", "bf16, 6", "bf16, 24", "largest rate", "step / pre's"]
    assert rows["post"] == [*["\N{CHECK MARK} +0.501 of 1"] * 4, "0.0015", "1.50"]
    assert rows["pre"] == [*["\N{CHECK MARK} +0.501 of 1"] * 4, "0.02 or more", "1"]
    assert rows["peri"] == [""] * 6


def _rows(html: str) -> list[list[str]]:
    cells = [[Tags(cell).text for cell in row.replace("<th>", "<td>").split("<td>")[1:]] for row in _trs(html)]
    return [[text.strip() for text in row] for row in cells]


def _trs(html: str) -> list[str]:
    return [row.replace("</td>", "").replace("</th>", "").split("</tr>")[0] for row in html.split("<tr>")[1:]]


def test_without_a_record_the_table_says_how_to_get_one(tmp_path: Path) -> None:
    assert survey.found(tmp_path, tmp_path) == []
    assert "make schemes ARGS=--survey" in survey_table([], ["pre"])


def test_what_is_published_is_shown_elsewhere_and_gives_way_cell_by_cell(tmp_path: Path) -> None:
    published = tmp_path / "published"
    published.mkdir()
    store(tmp_path / "theirs")
    assert [path.name for path in survey.publish(tmp_path / "theirs", published)] == [
        "scheme-survey.json",
        "scheme-rates.json",
    ]
    theirs, elsewhere = (survey.found(tmp_path / runs, published) for runs in ("theirs", "none"))
    assert runs_of(elsewhere) == runs_of(theirs)
    assert [risen(elsewhere, scheme) for scheme in SHOWN] == [risen(theirs, scheme) for scheme in SHOWN]
    assert step_time(runs_of(elsewhere), "post") == (pytest.approx(1.5), 6)
    assert "host" not in (published / "scheme-survey.json").read_text()

    store(tmp_path / "mine", ["pre"], margin=0.9)
    assert _margins(tmp_path / "mine", published) == {("post", "0.50"), ("pre", "0.90")}
    survey.publish(tmp_path / "mine", published)
    assert _margins(tmp_path / "none", published) == {("post", "0.50"), ("pre", "0.90")}


def test_new_cells_join_what_was_published_of_others_to_the_letter(tmp_path: Path) -> None:
    store(tmp_path / "theirs", ["pre"])
    survey.publish(tmp_path / "theirs", tmp_path)
    store(tmp_path / "others", ["post"], margin=0.123456789, depths=(6,))
    before = _published(tmp_path / "others", tmp_path)
    assert before["runs"] == {"done": 8, "of": 6 * len(scheme_names())}  # of all that it would be, not of what there is
    store(tmp_path / "mine", ["post"], margin=0.9, depths=(24,))
    after = _published(tmp_path / "mine", tmp_path)
    assert after["runs"] == {"done": 10, "of": 6 * len(scheme_names())}
    assert [cell for cell in after["cells"] if cell in before["cells"]] == before["cells"]
    new = [cell for cell in after["cells"] if cell not in before["cells"]]
    assert {(cell["arm"], cell["depth"]) for cell in new} == {("post", 24), ("post bf16", 24)}


@pytest.mark.parametrize("cpu", ["a cpu", "another"])
def test_times_of_a_step_are_compared_among_runs_of_one_machine(tmp_path: Path, cpu: str) -> None:
    store(tmp_path / "theirs", ["pre"])
    survey.publish(tmp_path / "theirs", tmp_path)
    file = tmp_path / "scheme-survey.json"
    file.write_text(file.read_text().replace("a cpu", cpu))
    store(tmp_path / "mine", ["post"])
    assert step_time(runs_of(survey.found(tmp_path / "mine", tmp_path)), "post") is None
    for _ in range(2):  # what was published once is published again
        cells = _published(tmp_path / "mine", tmp_path)["cells"]
        timed = {survey.scheme_of(cell["arm"]) for cell in cells if "seconds_a_step" in cell}
        assert timed == ({"pre", "post"} if cpu == "a cpu" else {"pre"})


def _published(runs: Path, published: Path) -> dict[str, Any]:
    survey.publish(runs, published)
    told: dict[str, Any] = json.loads((published / "scheme-survey.json").read_text())
    return told


def test_a_survey_on_a_gpu_of_which_nothing_has_ended_hides_none_on_a_cpu(tmp_path: Path) -> None:
    store(tmp_path)
    for name, claim in survey.surveys(SHOWN).items():
        cells = [(cell, f"{name}-gpu-{number}") for number, cell in enumerate(claim.cells("gpu"))]
        write_manifest(tmp_path / survey.FOLDER, claim, "gpu", cells, {})
    assert [one.profile for one in survey.found(tmp_path, tmp_path / "none")] == ["cpu", "cpu"]


def _margins(runs: Path, published: Path) -> set[tuple[str, str]]:
    return {(ran.place.scheme, f"{ran.margin:.2f}") for ran in runs_of(survey.found(runs, published))}


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    store(tmp_path)
    with pytest.raises(StoreError, match=r"missing/scheme-survey\.json: cannot be written"):
        survey.publish(tmp_path, tmp_path / "missing")


def test_the_report_of_claims_shows_the_survey_that_came_with_the_code(tmp_path: Path) -> None:
    store(tmp_path / "theirs")
    (tmp_path / "published").mkdir()
    survey.publish(tmp_path / "theirs", tmp_path / "published")
    written = write_report(tmp_path / "runs", [], reports=tmp_path / "reports", published=tmp_path / "published")
    page = Tags(written.page.read_text())
    assert page.open == []
    assert "Which schemes train, at which depth and precision" in page.text
    assert "0.02 or more" in page.text
    alone = write_report(tmp_path / "runs", [], reports=tmp_path / "reports", published=tmp_path / "none")
    assert "Which schemes train" not in alone.page.read_text()


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the survey one of models of a block, and of two schemes."""
    short = {"train.steps": 4, "train.eval_every": 1, "train.eval_batches": 1, "train.schedule.warmup_steps": 1}
    monkeypatch.setattr(survey, "DEPTH", survey.DEPTH | short)
    for name, value in {"DEPTHS": (1, 2), "RISING_DEPTH": 1, "RISING_STEPS": 4, "EVERY": 1}.items():
        monkeypatch.setattr(survey, name, value)
    monkeypatch.setattr(training, "DEPTHS", (1, 2))
    monkeypatch.setattr(training, "scheme_names", lambda: list(SHOWN))


@pytest.mark.usefixtures("tiny")
def test_the_survey_trains_what_it_lacks_the_deepest_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    begun: list[str] = []

    def first_three(jobs: Sequence[Job], _workers: int, _until: float) -> None:
        for job in sorted(jobs, key=lambda job: job.rank)[:3]:
            begun.append(job.name)
            assert isinstance(job.config, RunConfig)
            job.outcome = "done" if run(job.config).run_id == job.run_id else "failed"

    assert training.train(["pre"], tmp_path, "cpu", 1e-6, lambda *_: None) == []
    assert "the time was up before 5 runs; one takes 0:00; give more --hours" in capsys.readouterr().out
    assert training.train(["pre"], tmp_path, "cpu", 1.0, first_three) == []
    said = capsys.readouterr().out
    assert "survey of schemes: 5 runs to do, 0 done already; about 0:1" in said
    assert "the time was up before 2 runs; the same command goes on with them" in said
    assert training.train(["pre"], tmp_path, "cpu", 1.0, first_three) == []
    assert "2 runs to do, 3 done already" in capsys.readouterr().out
    assert begun == [
        "scheme-survey L0001 pre s0",
        "scheme-rates L0001 pre s0",
        "scheme-survey L0001 pre bf16 s0",
        "scheme-survey L0002 pre s0",
        "scheme-survey L0002 pre bf16 s0",
    ]
    assert training.train(["pre"], tmp_path, "cpu", 1.0, first_three) == []
    assert "all 5 runs are done already" in capsys.readouterr().out
    trained, rising = survey.found(tmp_path, tmp_path)
    assert {ran.place.precision for ran in runs_of([trained])} == {"fp32", "bf16"}
    assert [one.depth for one in risen([rising], "pre")] == [1]


@pytest.mark.usefixtures("tiny")
def test_a_run_that_failed_is_named_and_an_interruption_says_what_is_kept(tmp_path: Path) -> None:
    def fails(jobs: Sequence[Job], _workers: int, _until: float) -> None:
        jobs[0].outcome, jobs[0].note = "failed", "no space left"

    def interrupted(jobs: Sequence[Job], _workers: int, _until: float) -> None:
        jobs[0].outcome = "done"
        raise KeyboardInterrupt

    lost = training.train(["post"], tmp_path, "cpu", 1.0, fails)
    assert lost == ["scheme-survey L0001 post s0: no space left"]
    with pytest.raises(KeyboardInterrupt, match=r"^1 of 5 runs are finished and kept; the same command goes on"):
        training.train(["post"], tmp_path, "cpu", 1.0, interrupted)
