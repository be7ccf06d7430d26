"""The command line as a person meets it: codes, one line on stderr, no traceback, nothing left behind."""

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from normscale.arguments import typed
from normscale.claims.discover import list_claims
from normscale.cli import main
from normscale.schemes import Depth
from normscale.tracking.reader import read_run

ROOT = Path(__file__).parents[1]
QUICK = str(ROOT / "configs" / "train" / "quick.yaml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["trian"], "did you mean 'train'?"),
        (["claim", "lst"], "did you mean 'list'?"),
        (["train"], "no configuration"),
        (["train", "seed=1"], "no configuration"),
        (["train", "nowhere.yaml"], "nowhere.yaml"),
        (["train", QUICK, "model.M=x"], "model.M"),
        (["train", QUICK, "model.scheme=deepnrom"], "did you mean 'deepnorm'?"),
        (["train", QUICK, "model.scheme_options.x=1"], "override model.scheme_options.x=1"),
        (["check", QUICK, "model.heads=3"], "heads"),
        (["train", QUICK, "--frsh"], "--frsh"),
        (["claim", "run"], "no claim"),
        (["claim", "run", "--all", "--hours", "0"], "--hours: 0 pays for nothing"),
        (["claim", "run", "--all", "--hours", "long"], "--hours"),
        (["claim", "run", "x", "--profile", "huge"], "--profile"),
        (["claim", "run", "update-bounded", "--uri", "foo://x"], "--uri: 'foo://x' is not the address"),
        (["ui", "--uri", "foo://x"], "--uri: 'foo://x' is not the address"),
        (["show", "a", "b"], "b: one word too many for normscale show"),
        (["train", QUICK, "data.source=nowhere.txt"], "(override data.source=nowhere.txt)"),
        (["ui", "--port", "80x"], "--port: '80x' is not a port; give a number, e.g. 5000 (see"),
        (["show"], "--runs: runs is not a folder of runs"),
        (["train", QUICK, "model.depth=6"], "write model.N (encoder blocks) or model.M (decoder blocks)"),
        (["train", QUICK, "train.learning_rate=1"], "write train.optim.lr"),
        (["train", QUICK, "name=two", "ranks"], "put both into quotes: 'name=two ranks'"),
        ([], "train|check|explain|plan|show|diff|removal|translate|fold|claim|sync|ui"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert err.startswith("normscale: ")
    assert err.count("\n") == 1
    assert says in err
    assert not out
    assert not list(tmp_path.iterdir())


LONG = "x" * 300
PROBED = ["tracking.uri=null", "probes.update.steps=[1]"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["claim", "report", "--runs", "nowhere"], "--runs: nowhere is not a folder of runs"),
        (["sync", "--runs", "nowhere"], "--runs: nowhere is not a folder of runs"),
        (["sync", "--runs", QUICK], "is not a folder of runs"),
        (["claim", "report", "--runs", QUICK], "is not a folder of runs"),
        (["claim", "schemes", "pots", "--runs", "some"], "'pots' is not a scheme; did you mean 'post'?"),
        (["claim", "schemes", "--survey", "--hours", "0", "--runs", "some"], "--hours: 0 pays for nothing"),
        (["claim", "schemes", "--hours", "1", "--runs", "some"], "--hours and --profile: they are of the survey"),
        (["sync", "--runs", LONG], "File name too long"),
        (["claim", "run", "core", "--runs", LONG], "File name too long"),
        (["train", f"{LONG}=1"], "no configuration"),
        (["train", QUICK, f"tracking.runs={LONG}"], "tracking.runs: xxx"),
        (["train", QUICK, "tracking.uri=foo://bar"], "tracking.uri: 'foo://bar' is not the address"),
        (["train", QUICK, "tracking.uri=sqlite:////proc/x/m.db"], "cannot write /proc/x/m.db"),
        (["train", QUICK, *PROBED, "probes.update.sequences=90000"], "probes.update.sequences: 90000 is too many; "),
    ],
)
def test_places_that_cannot_be_are_bad_input(
    words: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    test_bad_input_is_one_line_and_code_2(words, says, tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("text", ["{", "[" * 200_000, "[]", '{"id": 1, "profile": 2, "cells": [{"run": 3}]}', "\xff"])
def test_a_broken_manifest_is_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "claims").mkdir()
    (tmp_path / "claims" / "depth-postnorm-dies-cpu.json").write_text(text, encoding="latin-1")
    assert main(["claim", "report", "--runs", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "depth-postnorm-dies-cpu.json: is not a claim manifest" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("sqlite:///mlflow.db", "MLflow: make ui"),
        ("sqlite:///a b.db", "MLflow: make ui ARGS=\"--uri 'sqlite:///a b.db'\""),
        ("http://127.0.0.1:5000", "MLflow: http://127.0.0.1:5000"),
        ("postgresql://h/db", 'MLflow: make server ARGS="--store postgresql://h/db"'),
    ],
)
def test_the_command_that_shows_a_run_is_said(
    uri: str, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from normscale.commands.training import _say_result
    from normscale.train.run import RunResult

    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("normscale.tracking.ui_port.is_free", lambda _: True)
    _say_result(RunResult("r", Path("r"), "finished", 0, {}), uri)
    assert capsys.readouterr().out.splitlines()[-1] == says


def test_the_end_of_a_run_says_what_its_loss_means_and_where_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from normscale.commands.training import _say_result
    from normscale.tracking import sink_state
    from normscale.tracking.address import resolve
    from normscale.train.run import RunResult

    uri = "sqlite:///mlflow.db"
    entry = {"experiment": "3", "run": "r", "event": "events/step-000002-nonfinite/report.html"}
    sink_state.save(tmp_path / sink_state.RUN_FILE, resolve(uri), {"": entry})
    monkeypatch.setattr("normscale.tracking.ui_port.is_free", lambda port: port > 5000)
    monkeypatch.setattr("normscale.tracking.ui_port._knows", lambda *asked: asked == (5000, "r"))
    for loss, means in ((2.9, "0.300 below"), (3.7, "no better than"), (math.nan, "not finite (")):
        _say_result(RunResult("r", tmp_path, "finished", 0, {"loss_val": loss, "unigram_nats": 3.2}), uri)
        first, _, run, event, last = capsys.readouterr().out.splitlines()
        assert means in first
        assert run.startswith("run      http://127.0.0.1:5000/#/experiments/3/runs/r?workflowType=machine_learning")
        assert "/r/artifacts/events/step-000002-nonfinite/report.html?workflowType=machine_learning" in event
        assert last.startswith("MLflow: ")


def test_outside_the_checkout_the_command_itself_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from normscale.arguments import typed

    monkeypatch.chdir(tmp_path)
    assert (typed("sync"), typed("ui", "--uri", "sqlite:///a b.db")) == (
        "normscale sync",
        "normscale ui --uri 'sqlite:///a b.db'",
    )
    monkeypatch.chdir(ROOT)
    words = typed("ui", "--uri", 'it"s $HOME')
    given = f"set -- {words}; eval printf '%s,' \"${{3#ARGS=}}\""  # as make hands ARGS on
    shown = subprocess.run(["sh", "-c", given], capture_output=True, text=True)
    assert shown.stdout == '--uri,it"s $HOME,'


@pytest.mark.parametrize(("N", "M", "sublayers"), [(0, 5, 10), (4, 0, 8), (4, 5, 23)])
def test_check_counts_sublayers_as_they_are(N: int, M: int, sublayers: int, capsys: pytest.CaptureFixture[str]):
    assert main(["check", QUICK, f"model.N={N}", f"model.M={M}"]) == 0
    assert f"N={N} M={M}, {sublayers} sublayers" in capsys.readouterr().out
    assert len(Depth(N, M).sites()) == sublayers


SMALL = ["tracking.uri=null", "train.eval_batches=1", "model.M=2", "data.max_bytes=40_000"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_leaves_an_end_and_a_status(
    number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    stop = lambda self, step, steps, loss: signal.raise_signal(number) if step == 2 else None  # noqa: E731
    monkeypatch.setattr("normscale.progress.Progress.__call__", stop)
    assert main(["train", QUICK, *SMALL, f"tracking.runs={tmp_path}", "train.steps=9"]) == code
    (run_dir,) = tmp_path.iterdir()
    end = read_run(run_dir).end
    assert end is not None
    assert (end["outcome"], end["exit_code"]) == ("interrupted", code)
    assert json.loads((run_dir / "rank0.status").read_text()) == {"exit_code": code, "outcome": "interrupted"}
    assert capsys.readouterr().err == f"normscale: stopped by {signal.Signals(number).name}\n"


def test_a_run_that_goes_on_says_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    words = ["train", QUICK, *SMALL, f"tracking.runs={tmp_path}", "train.steps=5", "checkpoint.every=2"]
    with monkeypatch.context() as patch:
        stop = lambda self, step, steps, loss: signal.raise_signal(signal.SIGTERM) if step == 3 else None  # noqa: E731
        patch.setattr("normscale.progress.Progress.__call__", stop)
        assert main(words) == 143
    said = capsys.readouterr()
    assert "went on" not in said.out
    assert said.err == "normscale: stopped by SIGTERM after step 3, with a checkpoint to go on from\n"
    (run_dir,) = tmp_path.iterdir()
    assert main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == f"went on from step 3 ({run_dir / 'checkpoints' / 'step-00000003'})"
    assert out[-2].startswith("finished")


def test_records_that_are_gone_are_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    delete = lambda self, step, steps, loss: shutil.rmtree(next(tmp_path.iterdir())) if step == 2 else None  # noqa: E731
    monkeypatch.setattr("normscale.progress.Progress.__call__", delete)
    assert main(["train", QUICK, *SMALL, f"tracking.runs={tmp_path}", "train.steps=4"]) == 1
    err = capsys.readouterr().err
    assert "it was deleted during the run" in err
    assert err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_records_no_writer_made_do_not_stop_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["train", QUICK, *SMALL, f"tracking.runs={tmp_path}", "train.steps=2"]
    assert main(words) == 0
    (spool,) = tmp_path.glob("*/spool.jsonl")
    with spool.open("a") as file:
        for record in ({"kind": "end", "t": 1, "attempt": 9, "outcome": "finished"}, {"kind": "start", "attempt": "x"}):
            file.write(json.dumps(record) + "\n")
    assert main(words) == 0
    assert "finished before" in capsys.readouterr().out
    assert main([*words, "--fresh"]) == 0


@pytest.mark.slow
def test_training_outlives_the_reader_of_its_output(tmp_path: Path):
    words = [QUICK, *SMALL, f"tracking.runs={tmp_path}", "train.steps=4"]
    train = shlex.join([sys.executable, "-m", "normscale", "train", *words])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-o", "pipefail", "-c", f"{train} | true"], env=environment, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    (run_dir,) = tmp_path.iterdir()
    assert read_run(run_dir).finished


def test_check_says_depth_and_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    assert main(["check", QUICK, "model.M=3"]) == 0
    out = capsys.readouterr().out
    from normscale.config.load import load
    from normscale.models.builder import build

    model = build(load(Path(QUICK), ["model.M=3"]).model, 256, 0)
    assert "# depth       N=0 M=3, 6 sublayers" in out
    assert f"# parameters  {sum(p.numel() for p in model.parameters()):,}" in out
    assert "# a step      512 tokens, 176 MFLOP forward and backward" in out
    assert out.count("\n") <= 6  # what one looks for; ninety lines of YAML only if asked for
    assert "not known: no run of 50 steps has finished in runs on this machine" in out
    assert main(["check", QUICK, "model.M=3", "--yaml"]) == 0
    out = capsys.readouterr().out
    assert out.index("# a step") < out.index("model:")
    assert yaml.safe_load(out)["model"]["M"] == 3
    assert main(["check", QUICK, "model.M=3", "model.N=1", "model.context=32"]) == 0
    assert "# a step      256 tokens beside 256 of the source, " in capsys.readouterr().out


def test_words_may_follow_an_option(monkeypatch: pytest.MonkeyPatch):
    seen = []
    taken = lambda options: seen.append((options.words, options.fresh)) or 0  # noqa: E731
    monkeypatch.setattr("normscale.commands.training.train", taken)
    assert main(["train", "c.yaml", "--fresh", "a=1", "b=-2"]) == 0
    assert seen == [(["c.yaml", "a=1", "b=-2"], True)]


def test_a_rank_leaves_its_status_for_the_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("NORMSCALE_STATUS_DIR", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "nowhere.yaml"]) == 2
    status = json.loads((tmp_path / "rank1.status").read_text())
    assert (status["rank"], status["exit_code"]) == (1, 2)
    assert "nowhere.yaml" in status["error"]
    assert capsys.readouterr().err == ""


def test_training_and_stopping_on_non_finite_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [f"tracking.runs={tmp_path}/runs", "tracking.uri=null", "train.steps=3", "train.eval_batches=1"]
    assert main(["train", QUICK, *runs]) == 0
    out = capsys.readouterr().out
    assert "step 3/3" in out
    assert f"run folder: {tmp_path}/runs/" in out
    assert main(["train", QUICK, *runs]) == 0
    assert "finished before" in capsys.readouterr().out
    assert main(["train", QUICK, *runs, "train.optim.lr=1e30"]) == 3
    err = capsys.readouterr().err
    assert err.startswith("normscale: stopped at step 2: the loss or the gradient was not finite")
    assert err.count("\n") == 1
    assert main(["train", QUICK, *runs, "train.optim.lr=1e30", "train.on_nonfinite=skip"]) == 3
    err = capsys.readouterr().err
    assert "the loss or the gradient was not finite first at step 2" in err
    assert err.endswith("; it went on to step 3\n")
    assert main(["train", QUICK, *runs, "precision.compute=fp16", f"precision.loss_scale.initial={2**24}"]) == 3
    err = capsys.readouterr().err
    assert "none of 3 steps was applied" in err


def test_a_claim_can_be_run_without_a_store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from normscale.claims import runner

    given: list[str | None] = []
    monkeypatch.setattr(runner, "run_claims", lambda *args, uri, **kwargs: given.append(uri) or 0)
    monkeypatch.delenv("DRY_RUN", raising=False)
    for uri in ("null", "sqlite:///other.db"):
        assert main(["claim", "run", "update-bounded", "--runs", str(tmp_path / "runs"), "--uri", uri]) == 0
    assert given == [None, "sqlite:///other.db"]


def test_training_does_not_need_a_tracking_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = tmp_path / "runs"
    words = [QUICK, *SMALL[1:], f"tracking.runs={runs}", "tracking.uri=http://127.0.0.1:9", "train.steps=5"]
    begun = time.monotonic()
    assert main(["train", *words, "probes.every=1"]) == 0
    assert time.monotonic() - begun < 30
    (run_dir,) = [path.parent for path in runs.glob("*/spool.jsonl")]
    record = read_run(run_dir)
    assert record.finished
    assert record.series["loss_train"].steps == [1, 2, 3, 4, 5]
    captured = capsys.readouterr()
    mend = typed("sync", "--uri", "http://127.0.0.1:9", "--runs", str(runs))
    assert captured.err == f"normscale: MLflow is not up to date (see {runs / 'sink.log'}); {mend} mends it\n"
    assert captured.out.splitlines()[-1] == "MLflow: http://127.0.0.1:9"


def test_help_names_the_codes_of_signals(capsys: pytest.CaptureFixture[str]):
    assert main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "130 interrupted (Ctrl-C), 143 stopped by SIGTERM" in said


def test_a_fresh_checkout_reports_the_records_that_came_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["claim", "report"]) == 0
    out = capsys.readouterr().out
    assert "depth-postnorm-dies" in out
    assert "(published record of " in " ".join(out.split())
    assert (tmp_path / "reports" / "latest" / "depth-postnorm-dies.png").exists()


def test_the_claims_are_listed_within_a_terminals_width(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["claim", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    claims = {claim.id: claim.says for claim in list_claims()}
    assert [line.split()[0] for line in lines if not line.startswith(" ")] == list(claims)
    indent = max(map(len, claims)) + 2
    assert " ".join(line[indent:] for line in lines) == " ".join(claims.values())


@pytest.mark.parametrize(("words", "variable"), [(["--dry-run"], ""), ([], "1")])
def test_a_dry_run_of_a_claim_says_what_is_to_do_and_starts_none(
    words: list[str],
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    from normscale.claims import runner

    monkeypatch.setenv("DRY_RUN", variable)
    monkeypatch.setattr(runner, "run_claims", lambda *args, **kwargs: pytest.fail("it was started"))
    assert (
        main(["claim", "run", "update-bounded", "--profile", "smoke", "--runs", str(tmp_path / "runs"), *words, "-v"])
        == 0
    )
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "update-bounded, profile smoke: finding runs done and to do"
    assert lines[0].startswith("update-bounded: L0002 post-sgd s0: scheme=post M=2 sgd lr=1e-06")
    runs = [line for line in lines if line.startswith("update-bounded: ")]
    assert lines[-1] == f"{len(runs)} runs in profile smoke; nothing was started"
    assert lines[len(runs)].startswith(f"{len(runs)} runs to do, 0 done already; about 0:")
    assert " core-hours (estimated by the speed of another machine, as no run of 50 steps" in lines[len(runs)]
    assert lines[len(runs) + 1].split()[:4] == ["update-bounded", str(len(runs)), "of", str(len(runs))]
    assert not (tmp_path / "runs").exists()
