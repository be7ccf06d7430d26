"""The command line as a person meets it: codes, one line on stderr, no traceback, nothing left behind."""

import json
from pathlib import Path

import pytest

from normscale.cli import main

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
        (["claim", "run", "x", "--profile", "huge"], "--profile"),
        (["ui", "--port", "x"], "--port"),
        ([], "train|check|claim|sync|ui"),
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


def test_check_says_depth_and_parameters(capsys: pytest.CaptureFixture[str]):
    assert main(["check", QUICK, "model.M=3"]) == 0
    out = capsys.readouterr().out
    from normscale.config.load import load
    from normscale.models.builder import build

    model = build(load(Path(QUICK), ["model.M=3"]).model, 256, 0)
    assert "# depth       N=0 M=3, 6 sublayers" in out
    assert f"# parameters  {sum(p.numel() for p in model.parameters()):,}" in out


def test_words_may_follow_an_option(monkeypatch: pytest.MonkeyPatch):
    seen = []
    monkeypatch.setattr("normscale.cli._train", lambda options: seen.append((options.words, options.fresh)) or 0)
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
