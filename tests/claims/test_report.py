import json
import os
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from normscale.claims.claim import Cell, Claim
from normscale.claims.manifest import cells_of, write_manifest
from normscale.claims.report import Written, not_published, publish, table, writable, write_report
from normscale.errors import StoreError
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import SLOPES, by_slope, by_theory, measurement, record, write
from tests.claims.test_figures import CLAIMS, DEPTH, UPDATE
from tests.claims.test_verdict import as_expected, depth_claim

LOSSY = CLAIMS["ln-lossy"]


class Tags(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def store(runs: Path, claim: Claim, make: Any, profile: Any = "cpu") -> None:
    """Leaves a claim in the runs folder as its runner would have."""
    cells = []
    for number, cell in enumerate(claim.cells(profile)):
        run_id = f"{claim.id}-{profile}-{number}"
        cells.append((cell, run_id))
        made: RunRecord | None = make(cell)
        if made is not None:
            write(runs, run_id, made, {})
    write_manifest(runs, claim, profile, cells, {})


def test_report_json_gives_verdicts_and_values_with_intervals(tmp_path: Path) -> None:
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    store(runs, depth_claim(), as_expected)
    store(runs, UPDATE, by_slope(SLOPES))
    written = write_report(runs, [depth_claim(), UPDATE, DEPTH], reports=reports)
    told = json.loads((reports / "latest" / "report.json").read_text())
    first, second, third = told["claims"]
    assert [claim["verdict"] for claim in told["claims"]] == ["supported", "refuted", "not run"]
    assert [claim["profile"] for claim in told["claims"]] == ["cpu", "cpu", None]
    assert first["runs"] == {"done": 12, "of": 12}
    slope = {item["name"]: item for item in second["measured"]}["deepnorm-adam slope at step 10"]
    assert slope["value"] == pytest.approx(0.51, abs=0.01)
    assert slope["lo"] < slope["value"] < slope["hi"]
    assert "fourfold" in slope["paper"]
    assert [part["verdict"] for part in second["parts"]] == [
        "supported",
        "supported",
        "supported",
        "refuted",
        "supported",
        "refuted",
    ]
    assert third["headline"] == "NOT RUN - it was never started"
    assert written.page == (reports / "latest").resolve() / "report.html"


def test_the_page_is_one_file_that_tells_the_whole_story(tmp_path: Path) -> None:
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    store(runs, UPDATE, by_slope(SLOPES))
    text = write_report(runs, [UPDATE, DEPTH], reports=reports).page.read_text()
    page = Tags(text)
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert all(str(link).startswith(("data:image/png;base64,", "#")) for link in links)
    for wanted in (UPDATE.says, UPDATE.how, UPDATE.source, *UPDATE.differs, "0.51 (0.4", "fourfold"):
        assert wanted in page.text
    for wanted in ("make claim CLAIM=update-bounded PROFILE=cpu", "L0096 deepnorm-adam s0", "torch 2.13.0", "NOT RUN"):
        assert wanted in page.text


def test_the_report_says_what_was_fixed_before_the_runs_and_what_spiked_means(tmp_path: Path) -> None:
    written = write_report(tmp_path / "runs", [DEPTH], reports=tmp_path / "reports")
    page, text = Tags(written.page.read_text()).text, (written.folder / "report.md").read_text()
    for told in (page, text):
        assert "written down before the runs that judge it. Step counts and learning rates come from pilots" in told
    assert "a training loss that ends over 0.5 nats above an earlier level" in page  # 0.5 itself is not over it


def test_measurements_are_told_by_their_numbers_and_what_was_not_run_is_said(tmp_path: Path) -> None:
    runs, reports = tmp_path / "runs", tmp_path / "reports"
    kept = {
        "ln": {"mean": 0.0, "mean_share": 0.01},
        "rms": {"mean": 0.8, "mean_share": 0.9},
        "none": {"mean": 1.0, "mean_share": 0.9},
    }
    store(runs, LOSSY, lambda cell: measurement(kept[cell.arm]))
    cells = cells_of(runs, LOSSY.id, "cpu")
    write_manifest(runs, LOSSY, "cpu", cells, {}, left_out=["an hour had no room for cells: x"])
    written = write_report(runs, [LOSSY], reports=reports)
    (reported,) = written.claims
    assert reported.judgement.verdict == "supported"
    page, text = Tags(written.page.read_text()).text, (written.folder / "report.md").read_text()
    for told in (page, text):
        assert "Not run: an hour had no room for cells: x." in told
        assert LOSSY.numbers["mean"] in told
    assert "unigram entropy, by depth" not in page  # nothing was trained
    assert "rms s4" in page
    assert reported.figure is not None
    record = publish(written, tmp_path / "results")
    cell = json.loads(record[0].read_text())["cells"][0]
    assert (cell["mean"], cell["mean_share"]) == (0.0, 0.01)


def test_html_is_escaped(tmp_path: Path) -> None:
    evil = "<script>alert('x')</script> & \"more\""
    base = depth_claim()
    claim = replace(base, says=evil, how=evil, source=evil, labels={"post": evil, "deepnorm": evil}, differs=(evil,))
    claim = replace(claim, paper={"post L24 gap": evil, "never measured": evil})
    store(tmp_path / "runs", claim, as_expected)
    text = write_report(tmp_path / "runs", [claim], reports=tmp_path / "reports").page.read_text()
    page = Tags(text)
    assert "script" not in {tag for tag, _ in page.tags}
    assert evil in page.text


def test_missing_and_broken_runs_are_told_and_stop_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"

    def make(cell: Cell) -> RunRecord | None:
        if cell.arm == "deepnorm" and cell.depth == 48:
            return None
        return record(0.0, outcome="nan") if cell.role == "long" else as_expected(cell)

    store(runs, depth_claim(), make)
    with (runs / "dies-cpu-3" / "spool.jsonl").open("a") as spool:
        spool.write('{"kind": "metr')
    written = write_report(runs, [depth_claim()], reports=tmp_path / "reports")
    assert written.claims[0].judgement.verdict == "inconclusive"
    page = Tags(written.page.read_text()).text
    assert "1 of 12 runs missing" in page
    assert "not finite at step 17" in page


def test_what_is_different_here_names_no_size_that_was_not_run(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    store(runs, depth_claim(), lambda cell: as_expected(cell) if cell.depth < 48 else None)
    written = write_report(runs, [depth_claim()], reports=tmp_path / "reports")
    page, text = Tags(written.page.read_text()).text, (written.folder / "report.md").read_text()
    for told in (page, text):
        assert "run here: decoder of width 64, 2 to 24 blocks;" in told
    written = write_report(tmp_path / "none", [depth_claim()], reports=tmp_path / "reports")
    assert "run here" not in (written.folder / "report.md").read_text()


def test_the_largest_profile_is_shown_unless_another_is_asked_for(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    store(runs, depth_claim(), as_expected, "cpu")
    store(runs, depth_claim(), as_expected, "smoke")
    verdicts = {}
    for profile in (None, "smoke"):
        asked: Any = {"dies": profile} if profile else None
        written = write_report(runs, [depth_claim()], asked, tmp_path / "reports")
        verdicts[written.claims[0].profile] = written.claims[0].judgement.verdict
    assert verdicts == {"cpu": "supported", "smoke": "not run"}


@pytest.mark.parametrize("begun", [False, True])
def test_a_larger_profile_of_which_nothing_ended_hides_no_verdict(begun: bool, tmp_path: Path) -> None:
    runs, claim = tmp_path / "runs", depth_claim()
    larger = replace(claim.profiles["cpu"], expect=claim.expect[:1])
    claim = replace(claim, profiles={**claim.profiles, "paper": larger})
    store(runs, claim, as_expected)
    write_manifest(runs, claim, "paper", _unrun(claim) if begun else [], {}, left_out=[] if begun else ["no data"])
    (found,) = write_report(runs, [claim], reports=tmp_path / "reports").claims
    assert (found.profile, found.word, found.left_out) == ("cpu", "supported", ())
    assert found.claim == claim
    (asked,) = write_report(runs, [claim], {"dies": "paper"}, tmp_path / "reports").claims
    assert (asked.profile, asked.word) == ("paper", "not run")

    # Nor does it give its expectations to the record that came with the code.
    publish(write_report(runs, [claim], reports=tmp_path / "reports"), tmp_path / "published")
    (runs / "claims" / "dies-cpu.json").unlink()
    (kept,) = write_report(runs, [claim], reports=tmp_path / "reports", published=tmp_path / "published").claims
    assert (kept.profile, kept.word, kept.claim) == ("cpu", "supported", claim)


def _unrun(claim: Claim) -> list[tuple[Cell, str]]:
    return [(cell, f"never-{number}") for number, cell in enumerate(claim.cells("paper"))]


def test_latest_always_points_at_the_newest_report(tmp_path: Path) -> None:
    reports = tmp_path / "reports"
    first = write_report(tmp_path / "runs", [depth_claim()], reports=reports)
    second = write_report(tmp_path / "runs", [depth_claim()], reports=reports)
    assert first.folder != second.folder
    assert (reports / "latest").resolve() == second.folder.resolve()
    assert os.readlink(reports / "latest") == second.folder.name  # relative: the folder may be moved
    assert sorted(path.name for path in reports.iterdir()) == sorted([first.folder.name, second.folder.name, "latest"])


def test_markdown_has_verdict_figure_and_published_numbers(tmp_path: Path) -> None:
    store(tmp_path / "runs", UPDATE, by_slope(SLOPES))
    written = write_report(tmp_path / "runs", [UPDATE], reports=tmp_path / "reports")
    text = (written.folder / "report.md").read_text()
    assert "**REFUTED** - slope of the update over depth (bar 0.25): DeepNorm (Adam) 0.51, DeepNorm without" in text
    assert "![update-bounded](update-bounded.png)" in text
    assert (written.folder / "update-bounded.png").exists()
    assert "| DeepNorm (Adam), slope of the update over depth after 10 steps | 0.51 (0.4" in text


def test_published_records_hold_every_cell_and_the_figure(tmp_path: Path) -> None:
    store(tmp_path / "runs", UPDATE, by_slope(SLOPES))
    store(tmp_path / "runs", depth_claim(), as_expected, "smoke")
    written = write_report(tmp_path / "runs", [UPDATE, depth_claim(), DEPTH], reports=tmp_path / "reports")
    files = publish(written, tmp_path / "results")
    assert [path.name for path in files] == ["update-bounded.json", "update-bounded.png"]  # no smoke, no unrun claim
    told = json.loads(files[0].read_text())
    assert len(told["cells"]) == len(UPDATE.cells("cpu"))
    assert set(told["cells"][0]["update"]) == {"1", "10"}
    assert told["environment"][0]["torch"] == "2.13.0"
    assert str(tmp_path) not in files[0].read_text()


def test_a_claim_that_lacks_a_run_takes_no_published_record_s_place(tmp_path: Path) -> None:
    make = by_slope(SLOPES)
    missing = UPDATE.cells("cpu")[-1]
    store(tmp_path / "runs", UPDATE, lambda cell: None if cell == missing else make(cell))
    written = write_report(tmp_path / "runs", [UPDATE], reports=tmp_path / "reports")
    assert publish(written, tmp_path / "results") == []
    assert [line.split(";")[0] for line in not_published(written, tmp_path / "results")] == [
        f"update-bounded has {len(UPDATE.cells('cpu')) - 1} of {len(UPDATE.cells('cpu'))} runs"
    ]


def test_what_a_budget_cut_takes_no_larger_record_s_place_and_says_so(tmp_path: Path) -> None:
    runs, results, claim = tmp_path / "runs", tmp_path / "results", depth_claim()
    store(runs, claim, as_expected)
    cells = cells_of(runs, claim.id, "cpu")

    def written(count: int, why: str) -> Written:
        write_manifest(runs, claim, "cpu", cells[:count], {}, left_out=[why] if why else [])
        return write_report(runs, [claim], reports=tmp_path / "reports")

    first = written(10, "an hour had no room for cells: x")
    assert not_published(first, results) == []
    assert publish(first, results)  # there is none yet
    (shown,) = write_report(tmp_path / "none", [claim], reports=tmp_path / "reports", published=results).claims
    assert (shown.done, shown.left_out) == (10, ("an hour had no room for cells: x",))
    again = written(10, "another hour had no room for cells: x")
    assert publish(again, results)
    assert publish(written(12, ""), results)
    cut = written(10, "an hour had no room for cells: x")
    assert publish(cut, results) == []
    assert not_published(cut, results) == [
        "dies has 10 runs (an hour had no room for cells: x), and the published record has 12; finish it: make claim "
        "CLAIM=dies PROFILE=cpu, or remove "
        f"{results}/dies.json"
    ]
    (results / "dies.json").write_text("{")  # no record, which publishing mends
    assert publish(cut, results)


def test_a_smaller_profile_takes_no_larger_one_s_place(tmp_path: Path) -> None:
    results, base = tmp_path / "results", depth_claim()
    claim = replace(base, profiles={**base.profiles, "gpu": base.profiles["cpu"]})
    written = {}
    for profile in ("gpu", "cpu"):
        store(tmp_path / profile, claim, as_expected, profile)
        written[profile] = write_report(tmp_path / profile, [claim], reports=tmp_path / "reports")
    assert publish(written["cpu"], results)
    assert publish(written["gpu"], results)
    assert publish(written["cpu"], results) == []
    assert not_published(written["cpu"], results) == [
        "dies was run at profile cpu, and the published record is of profile gpu; remove "
        f"{results}/dies.json to publish it"
    ]
    assert json.loads((results / "dies.json").read_text())["profile"] == "gpu"


def test_the_terminal_table_fits(tmp_path: Path) -> None:
    store(tmp_path / "runs", UPDATE, by_slope(SLOPES))
    written = write_report(tmp_path / "runs", [UPDATE, DEPTH], reports=tmp_path / "reports")
    lines = table(written.claims, 80).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert lines[1].split()[:2] == ["update-bounded", "REFUTED"]
    assert any(line.split()[:3] == ["depth-postnorm-dies", "NOT", "RUN"] for line in lines)


def test_a_smoke_run_says_that_it_ran_and_gives_no_verdict(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    store(runs, depth_claim(), as_expected, "smoke")
    store(runs, UPDATE, by_slope(SLOPES))
    asked: Any = {"dies": "smoke"}
    written = write_report(runs, [depth_claim(), UPDATE], asked, tmp_path / "reports")
    count = len(depth_claim().cells("smoke"))
    said = written.said(["dies"])
    assert said.splitlines()[1].split() == f"dies SMOKE {count} runs ended; smoke gives no verdict".split()
    assert "NOT RUN" not in said
    assert "update-bounded" not in said
    assert "update-bounded" in str(written)
    text = (written.folder / "report.md").read_text()
    assert f"| [dies](#dies) | **smoke** | {count} runs ended; smoke gives no verdict |" in text
    assert written.claims[0].numbers()["verdict"] == "not run"


def test_a_reports_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "reports").write_text("a file")
    for act in (writable, lambda folder: write_report(tmp_path / "runs", [depth_claim()], reports=folder)):
        with pytest.raises(StoreError) as caught:
            act(tmp_path / "reports")
        assert "\n" not in str(caught.value)
    assert (tmp_path / "reports").read_text() == "a file"


@pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)
def test_every_claim_shows_all_its_numbers(claim: Claim, tmp_path: Path) -> None:
    store(tmp_path / "runs", claim, by_theory(claim))
    written = write_report(tmp_path / "runs", [claim], reports=tmp_path / "reports")
    page = Tags(written.page.read_text())
    assert page.open == []
    trained = any(claim.asks_training(arm) for arm in claim.arms)
    assert ("Gap to the unigram entropy, by depth (nats)" in page.text) == trained
    for item in written.claims[0].judgement.measured:
        if not item.name.endswith(" gap"):
            assert item.label in page.text
    for published in claim.paper.values():
        assert published in page.text
    told = json.loads(publish(written, tmp_path / "results")[0].read_text())
    recorded = {key for cell in told["cells"] for key in cell}
    assert recorded >= {*claim.quantities, *claim.profiles_judged}


def test_a_run_that_was_measured_is_not_called_stuck(tmp_path: Path) -> None:
    claim = CLAIMS["depth-ablation"]
    store(tmp_path / "runs", claim, by_theory(claim))
    page = write_report(tmp_path / "runs", [claim], reports=tmp_path / "reports").page.read_text()
    row = next(row for row in page.split("<tr>") if "L0006 neither-sgd s0" in row)
    assert ">ended<" in row
    row = next(row for row in page.split("<tr>") if "L0024 neither s0<" in row)
    assert ">stuck<" in row
