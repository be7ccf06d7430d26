"""What blocks are worth, from a checkpoint on disk, against a plain computation with the weights in it."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from normscale.cli import main
from normscale.config.schema import RunConfig
from normscale.data.batches import held_out_batches
from normscale.data.task import load_task
from normscale.errors import BadInput
from normscale.models.builder import build
from normscale.train.removal import removal
from normscale.train.run import run
from normscale.train.trained import weights_of
from tests.tracking.made import make_foreign


def config(runs: Path, **parts: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"M": 4, "d": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "data": {"max_bytes": 40_000},
        "train": {"steps": 6, "batch": 4, "eval_batches": 2, "optim": {"lr": 1e-2}},
        "checkpoint": {"every": 4},
        "tracking": {"runs": str(runs), "uri": None},
    }
    return RunConfig.model_validate(base | parts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(config(tmp_path_factory.mktemp("runs"))).run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "runs" / trained.name)


@pytest.mark.parametrize("step", [None, 4])
def test_it_is_that_of_the_checkpoints_weights(run_dir: Path, step: int | None) -> None:
    found, path = removal(run_dir, blocks=3, batches=2, step=step)
    at = step or 6
    settings = config(run_dir.parent)
    task = load_task(settings)
    model = build(settings.model, task.vocab, 1).eval()
    tensors = load_file(run_dir / "checkpoints" / f"step-{at:08d}" / "rank0.safetensors")
    model.load_state_dict({k.removeprefix("trainer/model/"): v for k, v in tensors.items() if "trainer/model" in k})
    batches = held_out_batches(task, 4, 2)

    def loss(skip: int | None) -> float:
        with torch.no_grad():
            logits = [model(batch.tokens_BT, skip=skip).flatten(0, 1) for batch in batches]
        losses = [F.cross_entropy(x, batch.targets_BT.flatten()) for x, batch in zip(logits, batches, strict=True)]
        return float(torch.stack(losses).double().mean())

    assert (found.step, found.sequences, found.run) == (at, 8, run_dir.name)
    assert found.loss == pytest.approx(loss(None), rel=1e-6)
    assert [block.name for block in found.blocks] == [f"decoder.{i:04d}" for i in range(4)]
    wanted = [loss(0) - loss(None), None, loss(2) - loss(None), loss(3) - loss(None)]
    assert [block.removal for block in found.blocks] == [x if x is None else pytest.approx(x, abs=2e-6) for x in wanted]
    assert all(0 < block.angle < 1 for block in found.blocks)
    assert path == run_dir / f"removal-{at:08d}.json"
    assert json.loads(path.read_text()) == found.as_json()
    assert max(abs(x) for x in wanted if x is not None) > 1e-4


def test_the_command_prints_a_table_and_the_place(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["removal", run_dir.name[:12], "--runs", str(run_dir.parent)]
    assert main([*words, "--blocks", "2", "--batches", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"{run_dir.name}, step 6: held-out loss ")
    below = next(i for i, line in enumerate(lines) if line.startswith("without"))
    assert [line.split()[0] for line in lines[below + 1 : below + 3]] == ["decoder.0000", "decoder.0003"]
    assert lines[-2].startswith("angle of all 4 blocks")
    assert lines[-1] == f"written to {run_dir / 'removal-00000006.json'}"
    assert max(map(len, lines[:-1])) <= 100
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["blocks"]) == 4


def test_the_run_may_be_of_another_world_and_of_other_sources(run_dir: Path) -> None:
    folder = run_dir / "checkpoints" / "step-00000006"
    index = json.loads((folder / "index.json").read_text())
    text = json.dumps(index | {"world": 2, "identity": "of another version"}).encode()
    (folder / "index.json").write_bytes(text)
    import hashlib

    (folder / "complete").write_text(hashlib.sha256(text).hexdigest())
    assert weights_of(run_dir)[0] == 6


def said(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.count("\n") == 1
    return err


def test_a_run_without_a_checkpoint_says_how_to_get_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = run(config(tmp_path, checkpoint={"every": 0}))
    err = said(["removal", str(result.run_dir)], capsys)
    assert "it has no checkpoint; train it with checkpoint.every=N" in err


@pytest.mark.parametrize("command", ["removal", "fold", "translate"])
def test_a_run_of_a_monitor_has_no_checkpoint_of_ours(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_foreign(tmp_path, "theirs")
    err = said([command, "latest", "--runs", str(tmp_path)], capsys)
    assert "theirs: a run of normscale.Monitor" in err
    assert "name a run of normscale train" in err


def test_what_cannot_be_used_is_said(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["removal", str(run_dir)]
    assert "no checkpoint of step 5; there are 4, 6" in said([*words, "--checkpoint", "5"], capsys)
    assert "--blocks: 0 leaves nothing" in said([*words, "--blocks", "0"], capsys)
    assert "no run in" in said(["removal", "nothing-such", "--runs", str(run_dir.parent)], capsys)
    newest = run_dir / "checkpoints" / "step-00000006"
    (newest / "complete").unlink()
    assert weights_of(run_dir)[0] == 4  # the newest that can be used
    assert "step 6: it was not written to its end; step 4 is taken instead" in capsys.readouterr().err
    (run_dir / "checkpoints" / "step-00000004" / "rank0.safetensors").write_bytes(b"")
    err = said(words, capsys)
    assert "step 6: it was not written to its end; step 4: rank0.safetensors has 0 bytes" in err


def test_weights_of_another_model_and_another_text_are_refused(run_dir: Path) -> None:
    spool = run_dir / "spool.jsonl"
    text = spool.read_text()
    spool.write_text(text.replace('"M":4', '"M":3'))
    with pytest.raises(BadInput, match=r"of another model than this version builds \(blocks\.3"):
        removal(run_dir, 2, 1)
    digest = json.loads(text.splitlines()[0])["data"]["digest"]
    spool.write_text(text.replace(digest, digest[::-1]))
    with pytest.raises(BadInput, match="no longer the text"):
        removal(run_dir, 2, 1)
    spool.write_text(text.replace('"scheme":', '"schema":'))
    with pytest.raises(BadInput, match="missing or of another version"):
        removal(run_dir, 2, 1)


def test_a_bf16_encoder_and_decoder_are_measured_too(tmp_path: Path) -> None:
    model = {"N": 2, "M": 1, "d": 16, "heads": 2, "context": 16}
    precision = {"compute": "bf16", "params": "bf16"}
    result = run(config(tmp_path, precision=precision, model=model, data={"task": "copy"}))
    found, _ = removal(result.run_dir, 16, 1)
    assert [block.name for block in found.blocks] == ["encoder.0000", "encoder.0001", "decoder.0000"]
    assert np.isfinite([block.removal for block in found.blocks]).all()  # type: ignore[arg-type]
