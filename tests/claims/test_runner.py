import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.claims import runner
from normscale.claims.manifest import manifest_path
from normscale.claims.runner import run_claims
from normscale.claims.workers import Job
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.errors import BadInput, StoreError
from normscale.tracking.manifest import read_manifest
from normscale.tracking.reader import read_run
from normscale.train.engines.ranks import device_kind
from tests.claims.synthetic import record, write

ROOT = Path(__file__).parents[2]
TINY = """
from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Slope, Trains

CLAIM = Claim(
    id="{id}", says="It trains.", source="nowhere", family="depth",
    base={{"model.N": 0, "model.d": 16, "model.heads": 2, "model.context": 16, "data.max_bytes": 100000,
          "train.optim.lr": 1e-3, "train.steps": 4, "train.batch": 2, "train.eval_batches": 1}},
    arms={{"pre": {{"model.scheme": "pre"}}}}, labels={{"pre": "Pre-Norm"}},
    profiles={{"cpu": Profile({{"pre": {depths}}}, floor={floor}), "smoke": Profile({{"pre": {{1: 1}}}})}},
    control=(), expect=(Trains("pre", at_least=1),), figure="gap", how="Briefly.", differs=("all of it",),
)
"""


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Returns a checkout with two claims that share a run, as the current directory."""
    (tmp_path / "normscale" / "claims").mkdir(parents=True)
    (tmp_path / "experiments").mkdir()
    for name, depths in (("one", "{1: 2}"), ("two", "{1: 1, 2: 1}")):
        (tmp_path / "experiments" / f"{name}.py").write_text(TINY.format(id=name, depths=depths, floor=None))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)


def run(*ids: str, profile: Any = "cpu", workers: int | None = 1) -> int:
    return run_claims(ids, profile, runs=Path("runs"), uri=None, workers=workers)


@pytest.mark.slow
def test_claims_are_run_judged_and_reported_and_a_second_start_does_nothing(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("core") == 0
    said = capsys.readouterr().out
    assert "3 runs to do, 0 done already; about 0:" in said  # two claims of two runs that share one
    assert "one    REFUTED" in said or "one    INCONCLUSIVE" in said
    report = json.loads((checkout / "reports" / "latest" / "report.json").read_text())
    assert [claim["runs"] for claim in report["claims"]] == [{"done": 2, "of": 2}] * 2
    manifest = read_manifest(manifest_path(checkout / "runs", "two", "cpu"))
    assert manifest.verdict is not None
    assert manifest.report is not None
    assert Path(manifest.report).exists()
    assert all(Path(figure).exists() for figure in manifest.figures)
    records = {name: read_run(checkout / "runs" / name) for name in manifest.runs}
    assert all(record.finished and record.start["environment"]["threads"] == 1 for record in records.values())

    # Half of the work is lost, a claim is asked for alone, and the sink of nobody is started: only the gap is filled.
    lost = next(cell.run for cell in manifest.cells if cell.depth == 2)
    before = records[lost].series["loss_val"].values
    shutil.rmtree(checkout / "runs" / lost)
    assert run("two", workers=2) == 0
    said = capsys.readouterr().out
    assert "1 runs to do, 1 done already" in said
    assert "\none " not in said  # nobody asked for it now, but the report keeps it
    assert "one" in (checkout / "reports" / "latest" / "report.md").read_text()
    assert read_run(checkout / "runs" / lost).series["loss_val"].values == before  # bit for bit, on another worker

    monkeypatch.setattr(runner.Pool, "run", lambda *_: pytest.fail("everything is done"))
    assert run("one", "two") == 0
    assert "all 3 runs are done already" in capsys.readouterr().out


def test_an_interrupt_says_what_is_kept_and_what_begins_again() -> None:
    jobs = [Job(str(number), "", RunConfig()) for number in range(4)]
    jobs[0].outcome = "done"
    assert runner._kept(jobs, 3, jobs[1:2]) == (
        "4 of 7 runs are finished and kept; the same command goes on with the others;"
        " the 1 that was running begins again"
    )
    assert runner._kept(jobs, 0, jobs[1:3]).endswith("; the 2 that were running begin again")
    assert "running" not in runner._kept(jobs, 0, [Job("", "trial 2", RunConfig())])


def test_an_interrupt_keeps_what_is_done_and_ends_the_workers(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int | None] = []

    def interrupted(self: Any, jobs: Any, tell: Any = None, until: Any = None) -> None:
        pids.extend(self.pids)
        raise KeyboardInterrupt

    monkeypatch.setattr(runner.Pool, "run", interrupted)
    with pytest.raises(
        KeyboardInterrupt, match=r"^0 of 2 runs are finished and kept; the same command goes on with the"
    ):
        run("two")
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)
    manifest = read_manifest(manifest_path(checkout / "runs", "two", "cpu"))
    assert (len(manifest.cells), manifest.verdict) == (2, None)
    assert not (checkout / "reports" / "latest").exists()


def test_a_run_without_a_result_is_named_and_the_exit_code_says_so(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(self: Any, jobs: Any, tell: Any = lambda job: None, until: Any = None) -> None:
        for job in jobs:
            job.outcome, job.note = "lost", "its worker died (exit status -9)"
            tell(job)

    monkeypatch.setattr(runner.Pool, "run", lose)
    assert run("two") == 1
    captured = capsys.readouterr()
    assert "no result: L0002 pre s0: its worker died (exit status -9)" in captured.err
    assert "two    NOT RUN" in captured.out


def test_bad_input_starts_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "Pool", lambda *_: pytest.fail("a worker was started"))
    with pytest.raises(BadInput, match="no such claim"):
        run("three")
    with pytest.raises(BadInput, match="no profile 'gpu'"):
        run("one", profile="gpu")
    with pytest.raises(BadInput, match="--workers: 0"):
        run("one", workers=0)
    (checkout / "experiments" / "results").mkdir()
    (checkout / "experiments" / "results" / "two.json").write_text("{")  # which the report at the end would show
    with pytest.raises(StoreError, match=r"two\.json: it is no published record"):
        run("one")
    shutil.rmtree(checkout / "experiments" / "results")
    shutil.rmtree(checkout / "reports")
    (checkout / "reports").write_text("a file")
    with pytest.raises(BadInput, match="reports cannot be written"):
        run("one")
    with pytest.raises(BadInput, match=r"tracking\.uri"):
        run_claims(["one"], "cpu", runs=Path("runs"), uri="nonsense", reports=Path("other"))
    assert not (checkout / "runs").exists()


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("sqlite:///mlflow.db", ["", "link", "`make ui` serves them; Ctrl-C there stops it"]),
        (
            "sqlite:///other.db",
            ["", "link", '`make ui ARGS="--uri sqlite:///other.db"` serves them; Ctrl-C there stops it'],
        ),
        ("http://h:5000", ["", "link", "MLflow: http://h:5000"]),
        (None, []),
    ],
)
def test_the_last_line_names_the_command_that_opens_the_store(
    uri: str | None, says: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "links", lambda *_: ["link"])
    monkeypatch.setattr("normscale.tracking.ui_port.is_free", lambda _: True)
    claim = next(claim for claim in runner.list_claims() if claim.id == "update-bounded")
    monkeypatch.chdir(ROOT)
    assert runner._Sink(Path("runs"), uri).links([claim], "cpu") == says


def test_gpus_are_hidden_from_the_cpu_profile_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as this process was told before
    with runner.devices("cpu"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
        assert device_kind() == "cpu"
    with runner.devices("gpu"):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"
        assert device_kind() == "cuda"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_cost_is_said_in_all_and_for_each_claim_before_anything_starts(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "Pool", lambda *_: pytest.fail("a worker was started"))
    lines = runner.planned(["one", "two"], "cpu", Path("runs"), workers=1, verbose=True)
    runs, price = lines[:4], lines[4:-1]
    assert [line.split(":")[0] for line in runs] == ["one", "one", "two", "two"]
    assert re.match(r"3 runs to do, 0 done already; about 0:[12]\d ", price[0])  # one is shared; 15 s are of start-up
    assert "core-hours (estimated by the speed of another machine, as no run of 50 steps" in price[0]
    assert [line.split()[:4] for line in price[1:3]] == [["one", "2", "of", "2"], ["two", "2", "of", "2"]]
    assert "counted once" in price[3]
    assert lines[-1] == "4 runs in profile cpu; nothing was started"
    short = runner.planned(["one", "two"], "cpu", Path("runs"), workers=1)
    assert short == [*price, lines[-1], "--verbose lists the runs (make: ARGS=-v)"]
    assert not (checkout / "runs").exists()


@pytest.mark.parametrize(("device", "widths"), [("cuda", [32, 32, 128, 128]), ("cpu", [64, 64])])
def test_a_trial_on_a_gpu_is_of_the_smallest_and_of_the_largest(device: Any, widths: list[int]) -> None:
    class Measured:
        """A pool whose runs take a step as long as their cost says."""

        def run(self, jobs: Any) -> None:
            for job in jobs:
                tried.append(job.config.model.d)
                job.step_s = job.core_s = true.step(job.config)

    tried: list[int] = []
    true = runner.Cost(0.004, 0.0006, 8e-12, 2e-14, device="cuda")
    configs = [revise(RunConfig(), {"model.d": d, "model.heads": 2}) for d in (64, 128, 32)]
    jobs = [Job("", "", config) for config in configs]
    found = runner._trial(Measured(), jobs, device)  # type: ignore[arg-type]
    assert tried == widths
    assert found is not None
    if device == "cuda":
        assert found.step(configs[0]) == pytest.approx(true.step(configs[0]), rel=0.1)


def test_a_gpu_that_nothing_ran_on_has_no_price(checkout: Path) -> None:
    plan = runner.Plan(runner.select(["one"], runner.list_claims())[0])
    job = runner.Job("a", "a", runner.RunConfig())
    plan.configs["a"] = job.config
    unknown = runner._price([plan], [job], 0, None, 1)
    assert "not known" in unknown[0]
    assert unknown[1].split() == ["one", "1", "of", "1", "runs", "to", "do"]
    known = runner._price([plan], [job], 0, runner.Cost(device="cuda", source="x"), 1)
    assert known[0].endswith("GPU-hours (estimated by x)")
    assert runner._price([plan], [], 7, None, 1) == ["all 7 runs are done already"]


def test_a_budget_says_what_runs_in_which_order_and_what_does_not(checkout: Path) -> None:
    def lines(hours: float) -> list[str]:
        return runner.planned(["all"], "cpu", Path("runs"), workers=1, hours=hours)[:-1]

    assert [line.strip() for line in lines(1)[-4:-1]] == [
        "within a budget of 1 hours, what tells most a minute first:",
        "1 one: 2 of 2 runs; all of it",
        "2 two: 2 of 2 runs; all of it",
    ]
    none = lines(1e-6)
    assert "nothing to do, 0 done already" in none
    assert none[-2].strip() == (
        "2 two: 0 of 2 runs; its floor takes about 0 core-minutes, for which a budget of 1e-06 hours had no room"
        " (2 runs in all)"
    )
    assert none[-1].startswith("0 runs in profile cpu")


def test_a_claim_that_the_budget_has_no_room_for_is_reported_as_such_and_takes_nothing_away(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Pool, "run", lambda *_: None)  # the trial alone
    assert run_claims(["two"], "cpu", runs=Path("runs"), uri=None, workers=1, hours=1e-6) == 0
    assert "NOT RUN       its floor takes about 0 core-minutes" in capsys.readouterr().out
    report = json.loads((checkout / "reports" / "latest" / "report.json").read_text())
    found = next(claim for claim in report["claims"] if claim["id"] == "two")
    assert (found["verdict"], found["runs"]["of"]) == ("not run", 0)
    assert "had no room" in found["runs"]["left_out"][0]
    assert not read_manifest(manifest_path(checkout / "runs", "two", "cpu")).cells

    # Once there are runs of it, a later budget without room leaves them in the report.
    claim = next(claim for claim in runner.list_claims() if claim.id == "two")
    plan = runner.Plan(claim, [(cell, cell.name) for cell in claim.cells("cpu")])
    runner._note(plan, "cpu", checkout / "runs")
    run_claims(["two"], "cpu", runs=Path("runs"), uri=None, workers=1, hours=1e-6)
    assert len(read_manifest(manifest_path(checkout / "runs", "two", "cpu")).cells) == 2


def test_runs_that_the_time_was_up_for_are_no_lost_ones(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.Pool, "run", lambda *_: None)  # nothing begins any more
    assert run_claims(["two"], "cpu", runs=Path("runs"), uri=None, workers=1, hours=1) == 0
    said = capsys.readouterr()
    assert "no result" not in said.err
    manifest = read_manifest(manifest_path(checkout / "runs", "two", "cpu"))
    assert len(manifest.cells) == 2  # of its floor, so they are missing and not forgotten
    assert manifest.left_out == ("the time was up before 2 runs (L0001 pre s0 among them)",)


def test_runs_outside_the_floor_that_the_time_was_up_for_are_left_out(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = TINY.format(id="three", depths="{1: 1, 2: 1}", floor='{"pre": {1: 1}}')
    (checkout / "experiments" / "three.py").write_text(tiny)
    monkeypatch.setattr(runner.Pool, "run", lambda *_: None)  # nothing begins any more
    assert run_claims(["three"], "cpu", runs=Path("runs"), uri=None, workers=1, hours=1) == 0
    manifest = read_manifest(manifest_path(checkout / "runs", "three", "cpu"))
    assert [cell.name for cell in manifest.cells] == ["L0001 pre s0"]
    report = json.loads((checkout / "reports" / "latest" / "report.json").read_text())
    found = next(claim for claim in report["claims"] if claim["id"] == "three")
    late = "the time was up before 2 runs (L0001 pre s0 among them)"
    assert found["runs"] == {"done": 0, "of": 1, "left_out": [late]}


@pytest.mark.parametrize("noted", [False, True])
def test_hours_with_nothing_left_to_do_judge_all_that_is_done(
    noted: bool, checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = next(claim for claim in runner.list_claims() if claim.id == "two")
    cells = claim.cells("cpu")
    (plan,) = runner.plans_of([(claim, [(cell, runner.work_config(claim, cell, "runs", None)) for cell in cells])])
    for _, run_id in plan.cells:
        write(checkout / "runs", run_id, record(), {})
    if noted:  # as a smaller budget left it, before another claim had the run done
        runner._note(runner.Plan(claim, plan.cells[:1], left_out=("no room",)), "cpu", checkout / "runs")
    monkeypatch.setattr(runner.Pool, "run", lambda *_: pytest.fail("everything is done"))
    assert run_claims(["two"], "cpu", runs=Path("runs"), uri=None, workers=1, hours=1) == 0
    manifest = read_manifest(manifest_path(checkout / "runs", "two", "cpu"))
    assert ([cell.outcome for cell in manifest.cells], manifest.left_out) == (["trained"] * 2, ())
    report = json.loads((checkout / "reports" / "latest" / "report.json").read_text())
    assert {"done": 2, "of": 2} in [claim["runs"] for claim in report["claims"]]


def test_hours_that_cannot_be_divided_are_said_and_kept(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    untils: list[float | None] = []
    monkeypatch.setattr(runner, "_trial", lambda *_: None)  # as where it failed on a GPU
    monkeypatch.setattr(runner.Pool, "run", lambda _pool, _jobs, _tell, until: untils.append(until))
    assert run_claims(["two"], "cpu", runs=Path("runs"), uri=None, workers=1, hours=1) == 0
    assert untils != [None]
    said = capsys.readouterr().out
    assert "1 hours cannot be divided among the claims, as what their runs cost here is not known" in said
    manifest = read_manifest(manifest_path(checkout / "runs", "two", "cpu"))
    assert manifest.left_out == ("the time was up before 2 runs (L0001 pre s0 among them)",)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"hours": 0}, "--hours: 0 pays for nothing; give more"),
        ({"hours": -1}, "--hours: -1 pays for nothing; give more"),
        ({"hours": float("nan")}, "--hours: nan is no time; give a number of hours"),
        ({"hours": float("inf")}, "--hours: inf is no time; give a number of hours"),
        ({"hours": 1, "part": runner.Part(1, 2)}, "give one of --hours and --part"),
        ({"workers": 0}, "--workers: 0 cannot train anything; give 1 or more"),
    ],
)
def test_what_cannot_be_run_cannot_be_planned_either(checkout: Path, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        run_claims(["one"], "cpu", runs=Path("runs"), uri=None, **asked)
    with pytest.raises(BadInput, match=says):
        runner.planned(["one"], "cpu", **asked)
    assert not (checkout / "runs").exists()
