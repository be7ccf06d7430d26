"""The fold of a run from its checkpoint: what is written, what is read back, what is said."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml

from normscale.cli import main
from normscale.config.schema import RunConfig
from normscale.data.batches import held_out_batches
from normscale.data.task import load_task
from normscale.errors import BadInput, StoreError
from normscale.fold.run import fold_run
from normscale.fold.saved import in_place_of, load
from normscale.norms import Norm
from normscale.train.run import run
from normscale.train.trained import trained


def config(runs: Path, **parts: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"M": 2, "d": 16, "heads": 2, "context": 16, "dropout": 0.1, "scheme": "pre"},
        "data": {"max_bytes": 40_000},
        "train": {"steps": 6, "batch": 4, "eval_batches": 2, "optim": {"lr": 3e-2}},
        "checkpoint": {"every": 4},
        "tracking": {"runs": str(runs), "uri": None},
    }
    return RunConfig.model_validate(base | parts)


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config(tmp_path_factory.mktemp("runs"))).run_dir


@pytest.fixture
def run_dir(whole_run: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole_run, tmp_path / "runs" / whole_run.name)


def test_what_was_written_is_the_run_without_its_norms_weights(run_dir: Path) -> None:
    found, folder = fold_run(run_dir, batches=2, int8=True)
    model, folded = load(folder)
    assert folder == run_dir / "folded-00000006"
    assert (folded.run, folded.step, folded.vocab) == (run_dir.name, 6, model.token.shape[0])
    assert [(m.name, m.gamma, m.bias) for m in model.modules() if isinstance(m, Norm)] == [("rmsnorm", None, None)] * 5
    assert not list(run_dir.glob("*.part"))

    old = trained(run_dir).engine.inner.eval()
    batches = held_out_batches(load_task(config(run_dir.parent)), 4, 2)
    with torch.no_grad():
        pairs = [(old(batch.tokens_BT), model(batch.tokens_BT)) for batch in batches]
    apart = torch.cat([(a - b).abs() for a, b in pairs])
    losses = [
        F.cross_entropy(a.flatten(0, 1), x.targets_BT.flatten()) for (a, _), x in zip(pairs, batches, strict=True)
    ]
    fp64, fp32, bf16 = found.differences
    assert float(apart.max()) < 1e-5
    # What is compared is rounding: where a product's operands lie in memory moves it by a few percent.
    assert fp32.largest == pytest.approx(float(apart.max()), rel=0.2)
    assert fp32.mean == pytest.approx(float(apart.mean()), rel=0.1)
    assert fp32.loss == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    assert fp64.largest < 1e-12 * fp64.size < 1e-9 < fp32.largest
    assert abs(fp64.loss - fp64.loss_folded) < 1e-12
    assert 10 * fp32.mean < bf16.mean < 5 * bf16.rounding  # bf16's own rounding is as large
    assert found.int8.keys() == {"unfolded", "folded"}
    assert found.int8["folded"].loss == pytest.approx(fp32.loss_folded, rel=1e-9)
    assert 0 < abs(found.int8["unfolded"].loss_int8 - fp32.loss) < 0.05
    assert json.loads((folder / "fold.json").read_text()) == found.as_json()


def test_the_command_tells_of_each_norm_and_each_precision(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["fold", run_dir.name[:12], "--runs", str(run_dir.parent), "--checkpoint", "4", "--batches", "1"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{run_dir.name}, step 4: 5 of 5 norms folded whole"
    assert [line.split()[0] for line in lines if line.startswith(("fp", "bf"))] == ["fp64", "fp32", "bf16"]
    assert "blocks.*.ffn.norm (2)" in lines
    assert lines[-1] == f"written to {run_dir / 'folded-00000004'}"
    assert max(map(len, lines[:-1])) <= 100
    assert main([*words, "--json", "--int8"]) == 0
    assert json.loads(capsys.readouterr().out)["int8"].keys() == {"unfolded", "folded"}


def test_commands_say_of_a_folded_model_what_can_be_done_with_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = fold_run(run_dir, batches=1)
    asked = [[command, str(folder)] for command in ("show", "translate", "removal", "fold", "train", "check")]
    asked += [["diff", str(run_dir), f"{folder}/"], ["check", str(folder / "model.yaml")], ["sync", str(folder)]]
    monkeypatch.chdir(run_dir)
    for words in (*asked, ["show", folder.name]):
        assert main(words) == 2, words
        err = capsys.readouterr().err
        assert f"{folder.name}" in err
        assert "a folded model, which no command goes on with; name its run" in err, words
        assert f"({run_dir.name}), or load it in Python with normscale.fold.saved.load" in err
        assert err.count("\n") == 1
    assert main(["show", str(run_dir)]) == 0


def test_what_is_being_done_is_said(run_dir: Path) -> None:
    said: list[str] = []
    fold_run(run_dir, 2, say=said.append)
    measured = [f"measuring in {name}: batch {i} of 2" for name in ("fp64", "fp32", "bf16") for i in (1, 2)]
    assert said == ["reading the checkpoint and the text", "folding", *measured]


def test_what_cannot_be_folded_is_said_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = {"M": 2, "d": 16, "heads": 2, "context": 16, "scheme": "deepnorm"}
    run_dir = run(config(tmp_path, model=model)).run_dir
    assert main(["fold", str(run_dir)]) == 2
    err = capsys.readouterr().err
    assert err.startswith("normscale: model.scheme: deepnorm cannot be folded: blocks.0.sublayers.self.own.norm: ")
    assert err.count("\n") == 1
    assert main(["fold", str(run_dir), "--batches", "0"]) == 2
    assert "--batches: 0 leaves nothing to measure" in capsys.readouterr().err
    assert not list(run_dir.glob("folded*"))


def test_a_run_with_batch_norms_is_written_without_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = {"M": 2, "d": 16, "heads": 2, "context": 16, "scheme": "pre", "norm": "batchnorm"}
    run_dir = run(config(tmp_path, model=model)).run_dir
    assert main(["fold", str(run_dir), "--batches", "1", "--int8"]) == 0
    out = capsys.readouterr().out
    assert "5 of 5 norms folded whole" in out
    assert "statistics, gain and bias, all of it: into blocks.*.ffn.up.weight" in out
    new, _ = load(run_dir / "folded-00000006")
    assert not [name for name in new.state_dict() if "norm" in name]
    batch = held_out_batches(load_task(config(run_dir.parent)), 4, 1)[0]
    with torch.no_grad():
        old = trained(run_dir).engine.inner.eval()(batch.tokens_BT)
        torch.testing.assert_close(new(batch.tokens_BT), old, rtol=1e-4, atol=1e-4)


def test_a_bf16_encoder_and_decoder_fold_too(tmp_path: Path) -> None:
    model = {"N": 1, "M": 1, "d": 16, "heads": 2, "context": 16, "scheme": "pre", "positions": "sinusoidal"}
    precision = {"compute": "bf16", "params": "bf16"}
    result = run(config(tmp_path, precision=precision, model=model, data={"task": "copy"}))
    found, folder = fold_run(result.run_dir, 1)
    model_, folded = load(folder)
    assert folded.config.positions == "learned"
    assert model_.source_position is not None
    assert found.folding.whole
    assert found.differences[0].largest < 1e-12 * found.differences[0].size


def test_a_fold_that_fails_on_the_way_leaves_the_one_before(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = fold_run(run_dir, 1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.keys() == {"model.yaml", "weights.safetensors", "fold.json"}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("normscale.fold.run._difference", full)
    with pytest.raises(StoreError, match=r"folded-00000006: cannot be written \(No space left on device\); make room"):
        fold_run(run_dir, 1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not list(run_dir.glob("*.part"))


def test_a_damaged_checkpoint_is_passed_over_and_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run_dir / "checkpoints" / "step-00000006" / "rank0.safetensors").write_bytes(b"half")
    assert fold_run(run_dir, 1)[1].name == "folded-00000004"
    said = capsys.readouterr().err
    assert "step 6: rank0.safetensors has 4 bytes" in said
    assert said.endswith("; step 4 is taken instead\n")


def test_two_processes_do_not_fold_one_checkpoint_at_once(run_dir: Path) -> None:
    with in_place_of(run_dir / "folded-00000006") as part:
        with pytest.raises(BadInput, match=r"folded-00000006: another process is writing it; start again when"):
            fold_run(run_dir, 1)
        assert part.is_dir()
    assert fold_run(run_dir, 1)[1] == run_dir / "folded-00000006"


def test_what_is_no_folded_model_is_said(run_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no folded model can be read \(No such file or directory\)"):
        load(tmp_path)
    _, folder = fold_run(run_dir, 1)
    said = yaml.safe_load((folder / "model.yaml").read_text())
    for wrong in (
        {"format": 2},
        {"form": {"plain": ["no.such.norm"]}},
        {"vocab": 3},
        {"model": {"scheme": "none-such"}},
    ):
        (folder / "model.yaml").write_text(yaml.safe_dump(said | wrong))
        with pytest.raises(BadInput, match="not of the format that this version reads"):
            load(folder)
    (folder / "weights.safetensors").write_bytes(b"")
    with pytest.raises(BadInput, match="not a folded model"):
        load(folder)
    (run_dir / "folded-00000006.part").write_text("in the way")
    with pytest.raises(StoreError, match="folded-00000006: cannot be written"):
        fold_run(run_dir, 1)
