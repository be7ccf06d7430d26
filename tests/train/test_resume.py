"""A run that was interrupted and went on is the run that was not."""

import builtins
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from normscale.config.schema import RunConfig
from normscale.errors import LaunchError
from normscale.schemes import Weight, registry
from normscale.tracking.reader import RunRecord, read_run
from normscale.tracking.spool import SpoolWriter
from normscale.train import checkpoint as checkpoint_module
from normscale.train.loop import Trainer
from normscale.train.run import RunResult, run
from normscale.train.session import Session
from normscale.train.worlds import check_same_world
from tests.train.test_faults import backward_fault
from tests.train.test_scheme_hooks import Guest

ROOT = Path(__file__).parents[2]
STEPS = 9
TIMES = ("tokens_s", "seconds", "thread_s", "checkpoint_s", "train_seconds", "tflops_s", "mfu", "probe_s")


def config(runs: Path, *, every: int = 2, keep: int = 2, **parts: Any) -> RunConfig:
    base: dict[str, Any] = {
        "model": {"M": 2, "d": 16, "heads": 2, "context": 16, "dropout": 0.1},
        "data": {"max_bytes": 40_000},
        "train": {"steps": STEPS, "batch": 4, "eval_every": 3, "eval_batches": 2, "on_nonfinite": "skip"},
        "probes": {"every": 2, "update": {"steps": [1, 8], "sequences": 2}, "epsilon": {"every": 3}},
        "checkpoint": {"every": every, **({"keep": keep} if every else {})},
        "tracking": {"runs": str(runs), "uri": None},
    }
    for name, part in parts.items():
        base[name] = {**base.get(name, {}), **part}
    return RunConfig.model_validate(base)


def interrupted(config: RunConfig, at: int) -> None:
    """Runs until `at` and is interrupted there."""

    def stop(step: int, steps: int, loss: float) -> None:
        if step == at:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, on_step=stop)


def resumed(config: RunConfig) -> tuple[RunResult, int | None]:
    """Runs to the end; gives the step it went on from, too."""
    seen: list[int] = []
    result = run(config, on_resume=lambda step, path: seen.append(step))
    assert read_run(result.run_dir).start["from_step"] == (seen[0] if seen else 0)
    return result, seen[0] if seen else None


def end_state(run_dir: Path, step: int = STEPS) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    folder = run_dir / "checkpoints" / f"step-{step:08d}"
    plain = json.loads((folder / "index.json").read_text())["plain"]
    plain["session"] = {name: value for name, value in plain["session"].items() if name not in TIMES}
    return load_file(folder / "rank0.safetensors"), plain


def check_same(one: Path, other: Path) -> None:
    """Checks that two runs ended in the same state, to the bit, and left the same records."""
    (tensors, plain), (others, other_plain) = end_state(one), end_state(other)
    assert tensors.keys() == others.keys()
    assert any(name.startswith("trainer/optimizer/0/") for name in tensors)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=0, atol=0, equal_nan=True, msg=name)
    assert plain == other_plain
    check_records(read_run(one), read_run(other))


def of_steps(record: RunRecord) -> list[dict[str, Any]]:
    """The events but those that say that the run went on."""
    return [event for event in record.events if event["event"] not in ("resumed", "begun_anew")]


def check_records(one: RunRecord, other: RunRecord) -> None:
    assert one.series.keys() == other.series.keys()
    for name in one.series.keys() - set(TIMES):
        series, others = one.series[name], other.series[name]
        assert (series.steps, series.applied) == (others.steps, others.applied), name
        np.testing.assert_array_equal(series.values, others.values, err_msg=name)
    assert one.profiles.keys() == other.profiles.keys()
    for name, profile in one.profiles.items():
        assert profile.steps == other.profiles[name].steps
        np.testing.assert_array_equal(profile.data, other.profiles[name].data, err_msg=name)
    told = [
        [{k: v for k, v in event.items() if k not in ("t", "attempt")} for event in of_steps(record)]
        for record in (one, other)
    ]
    assert told[0] == told[1]
    assert one.summary.keys() == other.summary.keys()
    moving = {*TIMES, "graphs", "peak_memory_bytes", "flops_per_step"}
    moving |= {name for name in one.summary if name.endswith("_probe_s")}
    assert one.ledger == other.ledger
    for name in one.summary.keys() - moving:
        np.testing.assert_array_equal(one.summary[name], other.summary[name], err_msg=name)


CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "sgd with momentum": {"train": {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}},
    "accumulated, clipped": {"train": {"accumulate": 2, "optim": {"clip": 0.5}, "schedule": {"warmup_steps": 4}}},
    "second epoch": {"data": {"max_bytes": 320, "held_out": 0.3}},
    "fp16": {
        "precision": {"compute": "fp16", "loss_scale": {"initial": 2.0**17, "growth_steps": 2}},
        "checkpoint": {"every": 5},
    },
    "bf16 parameters": {"precision": {"compute": "bf16", "params": "bf16"}},
    "encoder": {"model": {"N": 2, "M": 0}},
    "encoder-decoder": {"model": {"N": 1, "M": 1}, "data": {"task": "copy", "max_bytes": 4_000_000}},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_that_went_on_is_the_run_that_was_not_interrupted(case: str, tmp_path: Path) -> None:
    whole, parted = (config(tmp_path / name, **CASES[case]) for name in ("whole", "parted"))
    one = run(whole)
    if case == "second epoch":
        assert read_run(one.run_dir).start["data"]["steps_per_epoch"] < 5
    if case == "fp16":  # it moves before the interruption and after
        moved = [event["step"] for event in read_run(one.run_dir).events if event["event"] == "loss_scale"]
        assert min(moved) < 5 < max(moved)
        assert one.summary["skipped"] > 0
    at, went_on_from = (7, 5) if case == "fp16" else (5, 4)  # fp16: one applied step into the two before a growth
    interrupted(parted, at)
    other, from_step = resumed(parted)
    assert (other.run_id, from_step) == (one.run_id, went_on_from)
    assert read_run(other.run_dir).attempt == 2
    check_same(one.run_dir, other.run_dir)


def test_interrupted_twice_and_a_third_time_before_the_next_checkpoint(tmp_path: Path) -> None:
    one = run(config(tmp_path / "whole", every=3))
    parted = config(tmp_path / "parted", every=3)
    for at in (4, 7, 8):
        interrupted(parted, at)
    other, from_step = resumed(parted)
    assert from_step == 6
    record = read_run(other.run_dir)
    assert (record.attempt, record.first_attempt) == (4, 1)
    check_same(one.run_dir, other.run_dir)


def faulty(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """Makes some steps' gradients infinite."""
    original = Trainer.step

    def step(self, window, recorder):  # type: ignore[no-untyped-def]
        with backward_fault(self, site=2, step=self.attempted + 1 if self.attempted + 1 in steps else 0):
            return original(self, window, recorder)

    monkeypatch.setattr(Trainer, "step", step)


def test_skipped_steps_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, 1, 5, 8)  # the first: there is no optimizer state yet; the fifth: made twice
    one = run(config(tmp_path / "whole", every=3))
    parted = config(tmp_path / "parted", every=3)
    interrupted(parted, at=6)
    other, from_step = resumed(parted)
    assert from_step == 3
    assert (other.summary["skipped"], other.summary["bad_step"]) == (3, 1)
    assert [event["step"] for event in of_steps(read_run(other.run_dir))] == [1, 5, 8]
    check_same(one.run_dir, other.run_dir)


def test_a_projection_and_a_calibration_are_not_made_an_extra_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Drifting(Guest):
        """What it does to the weights, it would do again."""

        def calibrate(self, forward: Callable[[], object]) -> None:
            self.calibrated = True

        def after_step(self, weights: Sequence[Weight]) -> None:
            for weight in weights:
                weight.values.mul_(1.01)

    monkeypatch.setitem(registry.SCHEMES.classes, "guest", Drifting)
    whole, parted = (config(tmp_path / name, model={"scheme": "guest"}) for name in ("whole", "parted"))
    one = run(whole)
    interrupted(parted, at=5)
    other, from_step = resumed(parted)
    assert from_step == 4
    check_same(one.run_dir, other.run_dir)


def test_before_any_step_was_applied_there_is_no_optimizer_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, 1, 2)
    one = run(config(tmp_path / "whole"))
    parted = config(tmp_path / "parted")
    interrupted(parted, at=3)
    assert not any("optimizer" in name for name in end_state(tmp_path / "parted" / one.run_id, step=2)[0])
    other, from_step = resumed(parted)
    assert from_step == 2
    check_same(one.run_dir, other.run_dir)


def test_checkpoints_change_no_number(tmp_path: Path) -> None:
    without, often = (run(config(tmp_path / str(every), every=every)) for every in (0, 1))
    assert without.run_id == often.run_id
    assert not (without.run_dir / "checkpoints").exists()
    check_records(read_run(without.run_dir), read_run(often.run_dir))
    assert (without.summary["checkpoint_s"], often.summary["checkpoint_s"] > 0) == (0, True)


def test_the_last_ones_are_kept_and_a_finished_run_keeps_its_end(tmp_path: Path) -> None:
    result = run(config(tmp_path, every=2, keep=3))
    names = sorted(path.name for path in (result.run_dir / "checkpoints").iterdir())
    assert names == ["step-00000006", "step-00000008", "step-00000009"]
    assert run(config(tmp_path)).skipped_existing


def test_a_run_killed_between_its_last_checkpoint_and_its_end_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = run(config(tmp_path / "whole"))
    parted = config(tmp_path / "parted")
    with monkeypatch.context() as patch:
        patch.setattr(Session, "summary", lambda self: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(parted)
    other, from_step = resumed(parted)
    assert (from_step, other.outcome) == (STEPS, "finished")
    assert other.summary["loss_val"] == one.summary["loss_val"]
    assert other.summary["update@8"] == one.summary["update@8"]
    assert other.summary["seconds"] > 0


def test_without_checkpoints_an_interrupted_run_starts_anew(tmp_path: Path) -> None:
    interrupted(config(tmp_path, every=0), at=5)
    result, from_step = resumed(config(tmp_path, every=0))
    assert from_step is None
    assert read_run(result.run_dir).first_attempt == 2


def test_fresh_begins_anew_and_removes_what_was_there(tmp_path: Path) -> None:
    parted = config(tmp_path)
    interrupted(parted, at=7)
    seen: list[list[str]] = []
    folder = next(tmp_path.iterdir()) / "checkpoints"
    result = run(
        parted,
        fresh=True,
        on_resume=lambda step, path: pytest.fail("it went on"),
        on_step=lambda *step: seen.append(sorted(p.name for p in folder.iterdir()) if folder.exists() else []),
    )
    assert seen[0] == seen[1] == ["step-00000004", "step-00000006"]  # until there is another
    assert seen[2] == ["step-00000002"]
    assert read_run(result.run_dir).first_attempt == 2
    run(config(tmp_path, every=0), fresh=True)
    assert list(folder.iterdir()) == []


def test_another_number_of_threads_is_refused_with_both_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(ROOT / "configs/train/quick.yaml")]
    threads = torch.get_num_threads()
    interrupted(config(tmp_path), at=5)
    (folder,) = tmp_path.iterdir()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads + 2)
    says = f"left a checkpoint of step 4, and this start has {threads + 2}; set OMP_NUM_THREADS={threads} to go on"
    with pytest.raises(LaunchError, match=f"{folder}: {threads} threads? began this run and {says} with it, or give"):
        run(config(tmp_path), words=words)
    monkeypatch.setenv("RANK", "1")  # of several, whose own threads do not count
    check_same_world(config(tmp_path), tmp_path / "none")
    monkeypatch.delenv("RANK")
    assert list(tmp_path.iterdir()) == [folder]
    other = run(config(tmp_path), words=words, fresh=True)
    assert other.run_dir != folder
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert run(config(tmp_path), words=words).run_dir == folder


def test_a_launch_begins_a_run_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that queues its job again, and an agent that starts its ranks again, still say --fresh."""
    interrupted(config(tmp_path), at=7)  # by a launch before, whose checkpoints do not count
    monkeypatch.setenv("NORMSCALE_FRESH_SINCE", str(time.time_ns() // 1_000_000 + 1))
    time.sleep(0.01)
    starts: list[int] = []

    def stop(step: int, steps: int, loss: float) -> None:
        starts.append(step)
        if len(starts) in (1, 5):
            raise KeyboardInterrupt

    for _ in range(2):  # the first time before there is a checkpoint of its own
        with pytest.raises(KeyboardInterrupt):
            run(config(tmp_path), fresh=True, on_step=stop)
    run(config(tmp_path), fresh=True, on_step=stop)
    assert starts == [1, 1, 2, 3, 4, *range(3, STEPS + 1)]
    monkeypatch.setenv("NORMSCALE_FRESH_SINCE", str(time.time_ns() // 1_000_000 + 1))  # another launch
    time.sleep(0.01)
    assert not run(config(tmp_path), fresh=True, on_resume=lambda *_: pytest.fail("it went on")).skipped_existing


def test_records_that_are_gone_are_not_gone_on_from(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    interrupted(config(tmp_path), at=5)
    (folder,) = tmp_path.iterdir()
    (folder / "spool.jsonl").unlink()
    _, from_step = resumed(config(tmp_path))
    assert from_step is None
    assert "the records of the steps before it are gone" in capfd.readouterr().err


def cut(path: Path) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    steps = [json.loads(line).get("step", 0) for line in lines]
    path.write_bytes(b"".join(line for line, step in zip(lines, steps, strict=True) if step < 4))


def headless(path: Path) -> None:
    path.write_bytes(path.read_bytes().partition(b"\n")[2])


GONE: dict[str, Callable[[Path], object]] = {
    "emptied": lambda path: path.write_bytes(b""),
    "garbage": lambda path: path.write_bytes(b"\0" * 4000),
    "cut": cut,
    "without its start": headless,
}


@pytest.mark.parametrize("case", GONE)
def test_records_that_do_not_reach_a_checkpoint_are_not_gone_on_from(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupted(config(tmp_path, keep=1), at=5)
    (folder,) = tmp_path.iterdir()
    GONE[case](folder / "spool.jsonl")
    result, from_step = resumed(config(tmp_path))
    assert from_step is None
    assert "step-00000004: passed over: the records of the steps before it are gone" in capfd.readouterr().err
    assert read_run(result.run_dir).series["loss_val"].steps == [0, 3, 6, 9]


def test_records_of_an_earlier_attempt_count_too(tmp_path: Path) -> None:
    for at in (5, 7):
        interrupted(config(tmp_path, keep=1), at=at)
    (folder,) = tmp_path.iterdir()
    lines = (folder / "spool.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "spool.jsonl").write_bytes(b"".join(line for line in lines if json.loads(line)["attempt"] == 2))
    assert resumed(config(tmp_path))[1] is None


def test_steps_between_measurements_are_gone_on_from(tmp_path: Path) -> None:
    seldom = config(tmp_path, every=5, probes={"every": 100}, train={"eval_every": 0})
    interrupted(seldom, at=6)
    assert resumed(seldom)[1] == 5


def test_nothing_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(config(tmp_path), at=5)
    opened: list[str] = []
    real_open = builtins.open
    for module, name in ((torch, "load"), (torch, "save"), (pickle, "load"), (pickle, "loads"), (pickle, "Unpickler")):
        monkeypatch.setattr(module, name, lambda *a, **k: pytest.fail("something was unpickled"))
    monkeypatch.setattr(builtins, "open", lambda path, *a, **k: opened.append(str(path)) or real_open(path, *a, **k))
    assert resumed(config(tmp_path))[1] == 4
    assert "pickle" not in Path(checkpoint_module.__file__).read_text().replace("unpickled", "")


def test_only_torchs_generators_are_drawn_from(tmp_path: Path) -> None:
    def states() -> list[str]:
        return [repr(random.getstate()), pickle.dumps(np.random.get_state()).hex()]  # noqa: NPY002

    before = states()
    run(config(tmp_path, model={"N": 1, "M": 1}))
    run(config(tmp_path, model={"N": 1, "M": 0}))
    assert states() == before


# What is found and cannot be used.


def truncated(folder: Path) -> None:
    with (folder / "rank0.safetensors").open("r+b") as file:
        file.truncate(2000)


def flipped(folder: Path) -> None:
    with (folder / "rank0.safetensors").open("r+b") as file:
        file.seek(-40, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-40, os.SEEK_END)
        file.write(bytes([byte ^ 1]))


def flipped_index(folder: Path) -> None:
    text = (folder / "index.json").read_text()
    assert '"attempted":6' in text
    (folder / "index.json").write_text(text.replace('"attempted":6', '"attempted":7'))


def edited(**changes: Any) -> Callable[[Path], None]:
    """Changes the index and makes the hash fit it."""

    def edit(folder: Path) -> None:
        index = json.loads((folder / "index.json").read_text()) | changes
        sealed(folder, json.dumps(index).encode())

    return edit


def sealed(folder: Path, text: bytes) -> None:
    (folder / "index.json").write_bytes(text)
    (folder / "complete").write_text(checkpoint_module.hashlib.sha256(text).hexdigest())


def reshaped(folder: Path) -> None:
    """Another model's weights, whose hashes are right."""
    tensors = load_file(folder / "rank0.safetensors")
    tensors["trainer/model/token"] = tensors["trainer/model/token"][:-1].clone()
    rewritten(folder, tensors)


def renamed(folder: Path) -> None:
    tensors = load_file(folder / "rank0.safetensors")
    tensors["trainer/model/tokens"] = tensors.pop("trainer/model/token")
    rewritten(folder, tensors)


def rewritten(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    checkpoint_module.save_file(dict(tensors), folder / "rank0.safetensors")
    described = checkpoint_module._described(folder / "rank0.safetensors")
    edited(files={"rank0.safetensors": described})(folder)


def emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def half_written(folder: Path) -> None:
    (folder / "complete").unlink()
    folder.rename(folder.with_name(folder.name + ".part"))


def piped(folder: Path) -> None:
    (folder / "rank0.safetensors").unlink()
    os.mkfifo(folder / "rank0.safetensors")


SPOILT: dict[str, tuple[Callable[[Path], object], str]] = {
    "no marker": (lambda folder: (folder / "complete").unlink(), "not written to its end"),
    "half-written": (half_written, "not written to its end"),
    "empty folder": (emptied, "not written to its end"),
    "truncated file": (truncated, "rank0.safetensors has 2,000 bytes"),
    "flipped byte": (flipped, "rank0.safetensors is not what was written"),
    "missing file": (lambda folder: (folder / "rank0.safetensors").unlink(), "rank0.safetensors is missing"),
    "a pipe": (piped, "rank0.safetensors is missing"),
    "index without a file": (lambda folder: (folder / "index.json").unlink(), "index.json cannot be read"),
    "flipped index": (flipped_index, "index.json is not what was written"),
    "no JSON": (lambda folder: sealed(folder, b"{"), "not of the format"),
    "deep JSON": (lambda folder: sealed(folder, b"[" * 100_000), "not of the format"),
    "another kind of JSON": (lambda folder: sealed(folder, b"[]"), "not of the format"),
    "no keys": (lambda folder: sealed(folder, b'{"format": 2}'), "not of the format"),
    "no values": (edited(plain=None), "not of the format"),
    "no session": (edited(plain={"trainer": {"model": {}}}), "not of the format"),
    "a later format": (edited(format=3), "its format has the number 3, this version reads 2"),
    "an earlier format": (edited(format=1), "its format has the number 1, this version reads 2"),
    "another run": (edited(identity="0" * 64, run="post-L0002-s1-00"), r"it is of another run \(post-L0002-s1-00\)"),
    "another world": (edited(world=2), r"2 rank\(s\) wrote it and this run has 1"),
    "another step": (edited(step=4), "it was made after step 4"),
    "another shape": (reshaped, r"trainer/model/token is float32 \[255, 16\] there and float32 \[256, 16\] here"),
    "another name": (renamed, "it lacks trainer/model/token"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_what_cannot_be_used_is_passed_over_and_said_once(
    case: str, tmp_path: Path, ended: Path, begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    spoil, reason = SPOILT[case]
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    spoil(folder / "checkpoints" / "step-00000006")
    result, from_step = resumed(config(tmp_path))
    assert from_step == 4
    error = capfd.readouterr().err
    assert error.count("passed over") == error.count("\n") == 1
    assert str(folder / "checkpoints" / "step-00000006") in error
    record = read_run(result.run_dir)
    (event,) = [event for event in record.events if event["event"] == "checkpoint_passed_over"]
    assert event["step"] == 4
    assert re.search(reason, error), error
    assert re.search(reason, event["reason"])
    record.events.remove(event)
    check_records(read_run(ended), record)
    names = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert names == ["step-00000008", "step-00000009"]
    check_states(ended, folder)


def check_states(one: Path, other: Path) -> None:
    (tensors, plain), (others, other_plain) = end_state(one), end_state(other)
    assert plain == other_plain
    assert all(torch.equal(tensors[name], others[name]) for name in tensors.keys() | others.keys())


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not interrupted."""
    return run(config(tmp_path_factory.mktemp("ended"))).run_dir


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs, with one that was interrupted after its checkpoints 4 and 6."""
    runs = tmp_path_factory.mktemp("begun")
    interrupted(config(runs), at=7)
    return runs


def test_what_does_not_belong_there_does_not_matter(tmp_path: Path, begun: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    (folder / "checkpoints" / "step-00000006" / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "notes.txt").write_text("mine")
    (folder / "checkpoints" / "step-best").mkdir()
    (folder / "checkpoints" / "step-00000000").mkdir()
    assert resumed(config(tmp_path))[1] == 6
    assert (folder / "checkpoints" / "notes.txt").exists()


def piped_name(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("ending", ["", ".part"])
@pytest.mark.parametrize(
    "make", [piped_name, lambda path: path.write_text("mine"), lambda path: path.symlink_to("nowhere")]
)
def test_what_is_no_folder_is_not_opened_and_makes_room(
    make: Callable[[Path], object], ending: str, tmp_path: Path, ended: Path
) -> None:
    folder = tmp_path / ended.name / "checkpoints"
    folder.mkdir(parents=True)
    for step in (2, 6):
        make(folder / f"step-{step:08d}{ending}")
    old = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it waits for the pipe"))
    signal.alarm(60)
    try:
        result, from_step = resumed(config(tmp_path))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, old)
    assert from_step is None
    assert not [event for event in read_run(result.run_dir).events if event["event"] == "checkpoint_failed"]
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000008", "step-00000009"]


def test_where_none_can_be_used_training_starts_at_step_0_and_says_so(
    tmp_path: Path, ended: Path, begun: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    flipped(folder / "checkpoints" / "step-00000006")
    truncated(folder / "checkpoints" / "step-00000004")
    _, from_step = resumed(config(tmp_path))
    assert from_step is None
    error = capfd.readouterr().err
    assert error.count("passed over") == 2
    assert error.splitlines()[-1].endswith("no checkpoint can be used; training starts at step 0")
    check_states(ended, folder)


def test_what_was_passed_over_makes_no_room_for_what_is_good(tmp_path: Path, begun: Path) -> None:
    """A spoilt checkpoint is not one of those that are kept."""
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    flipped(folder / "checkpoints" / "step-00000006")
    interrupted(config(tmp_path, every=7), at=8)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000007"]


# Disks.


def full(monkeypatch: pytest.MonkeyPatch, name: str, steps: tuple[int, ...]) -> None:
    """Makes one way of writing fail in the checkpoints of some steps."""
    module = os if name == "replace" else checkpoint_module
    real = getattr(module, name)

    def fail(*args: Any) -> Any:
        if any(f"step-{step:08d}" in str(args) for step in steps):
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("name", ["save_file", "_sync", "_described", "replace"])
def test_a_full_disk_stops_nothing_and_costs_no_checkpoint(
    name: str, tmp_path: Path, ended: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    full(monkeypatch, name, steps=(4, 6))
    seen: dict[int, list[str]] = {}
    parted, folder = config(tmp_path), tmp_path / ended.name / "checkpoints"
    result = run(parted, on_step=lambda step, *_: seen.update({step: sorted(p.name for p in folder.glob("*"))}))
    assert seen[7] == ["step-00000002"]
    error = capfd.readouterr().err
    assert error.count("No space left on device") == error.count("\n") == 1
    assert str(folder / "step-00000004") in error
    record = read_run(result.run_dir)
    assert [(e["event"], e["step"]) for e in record.events] == [("checkpoint_failed", 4), ("checkpoint_failed", 6)]
    record.events.clear()
    check_records(read_run(ended), record)


def test_a_folder_that_cannot_be_made_stops_nothing(
    tmp_path: Path, ended: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ended.name).mkdir()
    (tmp_path / ended.name / "checkpoints").write_text("in the way")
    result, from_step = resumed(config(tmp_path))
    assert (from_step, result.outcome) == (None, "finished")
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert f"({tmp_path / ended.name / 'checkpoints'} is not a folder; move it away)" in error


class Together:
    """An engine of two ranks that are threads of this process."""

    name, world = "ddp", 2

    def __init__(self, rank: int, counted: list[int], barrier: threading.Barrier) -> None:
        self.rank, self.counted, self.barrier = rank, counted, barrier

    def count(self, number: int) -> int:
        self.counted[self.rank] = number
        self.barrier.wait(30)
        total = sum(self.counted)
        self.barrier.wait(30)
        return total


def test_each_rank_looks_at_its_own_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others would wait for rank 0 to read all that they have written."""
    counted, barrier, real = [0, 0], threading.Barrier(2), checkpoint_module._hash
    looked: set[tuple[str, str]] = set()

    def noted(path: Path) -> str:
        looked.add((threading.current_thread().name, path.name))
        return real(path)

    monkeypatch.setattr(checkpoint_module, "_hash", noted)
    ranks = [
        checkpoint_module.Checkpoints(tmp_path, "i", cast("Any", Together(rank, counted, barrier)), 1)
        for rank in range(2)
    ]
    state = {"w": torch.ones(3), "own": {"r": torch.zeros(2)}}
    threads = [
        threading.Thread(target=ranks[rank].save, args=(2, 1, 2, state), name=f"rank{rank}") for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert looked == {("rank0", "rank0.safetensors"), ("rank1", "rank1.safetensors")}
    step = tmp_path / "checkpoints" / "step-00000002"
    assert sorted(p.name for p in step.iterdir()) == [
        "complete",
        "index.json",
        "rank0.safetensors",
        "rank1.safetensors",
    ]
    index = checkpoint_module.index_of(step)
    assert [sorted(checkpoint_module.tensors_of(step, index, rank)) for rank in range(2)] == [["own/r", "w"], ["own/r"]]


@pytest.mark.parametrize("name", ["save_file", "_sync", "_described", "replace"])
def test_interrupted_while_writing(name: str, tmp_path: Path, ended: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parted = config(tmp_path)
    with monkeypatch.context() as patch:
        module = os if name == "replace" else checkpoint_module
        real = getattr(module, name)

        def stop(*args: Any) -> Any:
            if "step-00000006" in str(args):
                raise KeyboardInterrupt
            return real(*args)

        patch.setattr(module, name, stop)
        with pytest.raises(KeyboardInterrupt):
            run(parted)
    result, from_step = resumed(parted)
    assert from_step == 4
    check_states(ended, result.run_dir)


CHILD = """
import sys, time
from pathlib import Path
from normscale.train import checkpoint
from normscale.train.run import run
from tests.train.test_resume import config

real = checkpoint._described

def described(path):
    if "step-00000006" in str(path):
        print("writing", flush=True)
        time.sleep(100)
    return real(path)

checkpoint._described = described
run(config(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_process_killed_while_writing_goes_on(tmp_path: Path, ended: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"writing\n"
    child.kill()
    assert child.wait() == -signal.SIGKILL
    child.stdout.close()
    part = tmp_path / ended.name / "checkpoints" / "step-00000006.part"
    assert (part / "rank0.safetensors").exists()
    result, from_step = resumed(config(tmp_path))
    assert (result.run_id, from_step) == (ended.name, 4)
    assert f"{part}: passed over: it was not written to its end" in capfd.readouterr().err
    assert not part.exists()
    record = read_run(result.run_dir)
    assert record.events.pop()["event"] == "checkpoint_passed_over"
    check_records(read_run(ended), record)
    check_states(ended, result.run_dir)


def test_a_run_that_is_being_written_is_left_alone(tmp_path: Path, begun: Path) -> None:
    shutil.copytree(begun, tmp_path, dirs_exist_ok=True)
    (folder,) = tmp_path.iterdir()
    before = sorted(path.name for path in (folder / "checkpoints").iterdir())
    with SpoolWriter(folder, 2), pytest.raises(Exception, match="another process"):
        run(config(tmp_path), fresh=True)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == before


def test_time_spent_on_checkpoints_is_not_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checkpoint_module.Checkpoints.save

    def slow(self: Any, *args: Any) -> str | None:
        time.sleep(0.5)
        return real(self, *args)

    monkeypatch.setattr(checkpoint_module.Checkpoints, "save", slow)
    result = run(config(tmp_path, every=3))
    assert result.summary["checkpoint_s"] >= 3 * 0.5 > result.summary["seconds"] > result.summary["thread_s"] > 0
    rates = read_run(result.run_dir).series["tokens_s"]
    assert rates.values[rates.steps.index(4)] > 2 * 4 * 16 / 0.5  # the third step, its checkpoint, the fourth step
