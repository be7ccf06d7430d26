import json
from pathlib import Path

import pytest

from normscale.claims.claim import Cell
from normscale.claims.compact import KeptResult, read_published, seconds_a_step
from normscale.claims.report import publish, write_report
from normscale.claims.results import Result
from normscale.errors import StoreError
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import record
from tests.claims.test_report import Tags, store
from tests.claims.test_verdict import as_expected, depth_claim

CLAIM = depth_claim()


def all_train(cell: Cell) -> RunRecord:
    return record(gap=1.0, improves=0.1)


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """Returns a folder with the record of a claim that was run elsewhere."""
    store(tmp_path / "elsewhere", CLAIM, as_expected)
    written = write_report(tmp_path / "elsewhere", [CLAIM], reports=tmp_path / "their-reports")
    publish(written, tmp_path / "published")
    return tmp_path / "published"


def test_what_is_published_is_read_as_it_was_judged(published: Path, tmp_path: Path) -> None:
    (there,) = write_report(tmp_path / "elsewhere", [CLAIM], reports=tmp_path / "reports").claims
    found = read_published(published, CLAIM)
    assert found is not None
    assert found.judgement == there.judgement
    assert [r.cell for r in found.results] == [r.cell for r in there.results]
    assert [r.state.label for r in found.results] == [r.state.label for r in there.results]
    assert [r.state.gap for r in found.results] == pytest.approx([r.state.gap for r in there.results])
    assert (found.run_ids, found.done, found.profile) == (there.run_ids, 12, "cpu")
    assert read_published(published, depth_claim(id="never-published")) is None


def test_a_report_without_runs_shows_the_published_record_and_says_so(published: Path, tmp_path: Path) -> None:
    written = write_report(tmp_path / "runs", [CLAIM], reports=tmp_path / "reports", published=published)
    (reported,) = written.claims
    assert (reported.word, reported.done, reported.profile) == ("supported", 12, "cpu")
    assert reported.figure == written.folder / "dies.png"
    assert reported.figure.read_bytes() == (published / "dies.png").read_bytes()
    page = Tags(written.page.read_text())
    assert page.open == []
    said = f"From the record of {json.loads((published / 'dies.json').read_text())['date']}"
    for told in (page.text, (written.folder / "report.md").read_text()):
        assert said in told
    date = json.loads((published / "dies.json").read_text())["date"]
    assert f"diesSUPPORTEDpublished {date}" in page.text
    assert f"| [dies](#dies) | **supported**, published {date} |" in (written.folder / "report.md").read_text()
    assert "Gap to the unigram entropy, by depth (nats)" in page.text
    assert "a cpu" in page.text  # where it ran
    assert "published" in json.loads((written.folder / "report.json").read_text())["claims"][0]
    assert "(published record of " in " ".join(str(written).split())
    assert publish(written, tmp_path / "again") == []  # it was not run here


def test_what_was_run_here_is_counted_apart_from_what_was_published(published: Path, tmp_path: Path) -> None:
    own, never = depth_claim(id="own"), [depth_claim(id=f"never-{i}") for i in (1, 2)]
    store(tmp_path / "runs", own, all_train)
    written = write_report(tmp_path / "runs", [CLAIM, own, *never], reports=tmp_path / "reports", published=published)
    said = "4 claims: run here: 1 refuted; published: 1 supported; 2 not run."
    text = (written.folder / "report.md").read_text()
    assert said in text
    assert said in Tags(written.page.read_text()).text
    assert "| [own](#own) | **refuted** |" in text
    (line,) = [line for line in text.splitlines() if "never started" in line and line.startswith(("|", "-"))]
    assert line == "- it was never started: [never-1](#never-1), [never-2](#never-2)"
    written = write_report(tmp_path / "none", [CLAIM], reports=tmp_path / "reports", published=published)
    assert "1 claim: run here: none; published: 1 supported." in (written.folder / "report.md").read_text()


def test_runs_of_ones_own_stand_before_the_record_and_smoke_runs_do_not(published: Path, tmp_path: Path) -> None:
    store(tmp_path / "smoke", CLAIM, as_expected, "smoke")
    store(tmp_path / "own", CLAIM, all_train)
    words = {}
    for folder in ("smoke", "own"):
        written = write_report(tmp_path / folder, [CLAIM], reports=tmp_path / "reports", published=published)
        words[folder] = (written.claims[0].word, written.claims[0].published is not None)
    assert words == {"smoke": ("supported", True), "own": ("refuted", False)}
    written = write_report(tmp_path / "smoke", [CLAIM], {"dies": "smoke"}, tmp_path / "reports", published)
    assert written.claims[0].word == "smoke"  # what was asked for


@pytest.mark.parametrize("text", ["{", "[]", '{"measured": []}', '{"measured": [1]}'])
def test_a_record_that_is_none_is_one_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "dies.json").write_text(text)
    with pytest.raises(StoreError, match=r"dies\.json: it is no published record .*publish it again") as caught:
        read_published(tmp_path, CLAIM)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "says"),
    [
        (("verdict",), "perhaps", "verdict: Input should be 'supported', "),
        (("headline",), None, "headline: "),
        (("profile",), "paper", "profile: the claim has no 'paper'"),
        (("measured", 0, "value"), "much", "measured.0.value: "),
        (("measured", 0, "value"), float("nan"), "a finite number"),
        (("environment",), 3, "environment: "),
        (("cells", 0, "state"), "well", "cells.0.state: "),
        (("cells", 0, "gap"), "wide", "cells.0.gap: "),
    ],
)
def test_a_record_with_a_wrong_value_names_it(
    published: Path, place: tuple[str | int, ...], value: object, says: str
) -> None:
    path = published / "dies.json"
    told = at = json.loads(path.read_text())
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    path.write_text(json.dumps(told))
    with pytest.raises(StoreError, match=r"dies\.json: it is no published record") as caught:
        read_published(published, CLAIM)
    assert says in str(caught.value)


def test_the_time_of_a_step_is_kept(tmp_path: Path) -> None:
    made = record()
    assert made.end is not None
    made.end["summary"]["train_seconds"] = 90.0
    cell = CLAIM.cells("cpu")[0]
    assert seconds_a_step(Result(cell, made)) == 0.5  # of 180 steps
    assert seconds_a_step(Result(cell, None)) is None
    assert seconds_a_step(KeptResult(cell, None, seconds_a_step=0.25)) == 0.25
