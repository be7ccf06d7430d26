import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest

from normscale.cli import main
from normscale.tracking.compare import differences, relative
from normscale.tracking.diff import as_json, diff
from normscale.tracking.draw import Look
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SpoolWriter
from tests.tracking.made import make_foreign, make_run


def written(runs: Path, name: str, losses: dict[int, float], config: object = None, **fields: object) -> str:
    """Writes a small run by hand."""
    summary = fields.pop("summary", {})
    with SpoolWriter(runs / name, 1) as spool:
        spool.start(run_id=name, config=config or {"model": {"d": 8}}, **fields)
        for step, loss in losses.items():
            spool.metrics(step, step, {"loss_train": loss})
        spool.end("finished", 0, summary)  # type: ignore[arg-type]
    return name


def shown(runs: Path, a: str, b: str, look: Look | None = None) -> str:
    lines = diff(read_run(runs / a), read_run(runs / b), look or Look())
    assert max(len(line) for line in lines) <= (look or Look()).width
    return "\n".join(lines)


def test_a_run_and_itself_or_its_copy_differ_in_nothing(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    assert shown(tmp_path, run, run).endswith("these are one run: nothing differs")
    nan = make_run(tmp_path, nan_at=17)
    shutil.copytree(tmp_path / nan, tmp_path / "copy")
    assert "nothing differs: configuration" in shown(tmp_path, nan, "copy")  # NaN is the same as NaN
    assert not any(differences(read_run(tmp_path / nan), read_run(tmp_path / "copy")).values())


def test_only_what_differs_is_said_with_dotted_keys(tmp_path: Path) -> None:
    text = shown(tmp_path, make_run(tmp_path, "post"), make_run(tmp_path, "pre", lr=3e-4))
    configuration = text[text.index("configuration") : text.index("numbers")]
    rows = [line.split() for line in configuration.splitlines()[1:] if line]
    assert rows == [["model.scheme", "post", "pre"], ["train.optim.lr", "0.001", "0.0003"]]
    assert "where it ran" not in text


def test_places_are_compared(tmp_path: Path) -> None:
    where = {"identity": {"device": "cpu", "threads": 1}, "environment": {"torch": "2.13.0", "git": "aaa"}}
    other = {"identity": {"device": "cuda", "threads": 1}, "environment": {"torch": "2.13.0", "git": "bbb+"}}
    a, b = written(tmp_path, "a", {1: 2.0}, **where), written(tmp_path, "b", {1: 2.0}, **other)  # type: ignore[arg-type]
    found = differences(read_run(tmp_path / a), read_run(tmp_path / b))
    assert found["place"] == {"identity.device": ("cpu", "cuda"), "environment.git": ("aaa", "bbb+")}
    assert "the results are the same to the last digit" in shown(tmp_path, a, b)


def test_the_first_step_and_the_largest_difference_of_the_losses(tmp_path: Path) -> None:
    ours = {step: 5.0 - step / 10 for step in range(1, 11)}
    theirs = ours | {3: ours[3] * (1 + 5e-7), 5: ours[5] * (1 + 3e-6), 8: ours[8] * 1.25, 11: 3.0}
    written(tmp_path, "a", ours)
    written(tmp_path, "b", theirs)
    found = differences(read_run(tmp_path / "a"), read_run(tmp_path / "b"))["training"]
    assert (found["common"], found["only"], found["first"], found["largest_at"]) == (10, (0, 1), 5, 8)
    assert found["largest"] == pytest.approx(0.2)
    text = shown(tmp_path, "a", "b")
    assert "differs from step 5 on (4.5 against 4.500013), most at step 8 (20 %)" in text


def test_a_loss_that_is_not_finite_on_one_side_differs_beyond_measure(tmp_path: Path) -> None:
    written(tmp_path, "a", {1: 5.0, 2: math.nan, 3: math.inf})
    written(tmp_path, "b", {1: 5.0, 2: math.nan, 3: 4.0})
    found = differences(read_run(tmp_path / "a"), read_run(tmp_path / "b"))["training"]
    assert (found["first"], found["largest"]) == (3, math.inf)
    assert "most at step 3 (beyond measure)" in shown(tmp_path, "a", "b")


def test_losses_within_the_bound_or_without_a_common_step(tmp_path: Path) -> None:
    written(tmp_path, "a", {1: 5.0, 2: 4.0})
    written(tmp_path, "b", {1: 5.0 * (1 + 1e-8), 2: 4.0})
    written(tmp_path, "c", {7: 5.0})
    assert "the same to a relative 1e-06 at all 2 common steps" in shown(tmp_path, "a", "b")
    assert "no step was recorded in both" in shown(tmp_path, "a", "c")


def test_numbers_have_their_relative_difference_and_speed_is_apart(tmp_path: Path) -> None:
    ours = {
        "gap": -0.02,
        "loss_val": 2.5,
        "bad_step": -1,
        "unigram_nats": 3.0,
        "seconds": 10.0,
        "mfu": 0.2,
        "update_probe_s": 2.0,
    }
    theirs = {
        "gap": 0.31,
        "loss_val": 2.0,
        "bad_step": 4,
        "unigram_nats": 3.0,
        "seconds": 150.0,
        "mfu": 0.2,
        "update_probe_s": 3.0,
    }
    a, b = written(tmp_path, "a", {1: 5.0}, summary=ours), written(tmp_path, "b", {1: 5.0}, summary=theirs)
    found = differences(read_run(tmp_path / a), read_run(tmp_path / b))
    assert found["numbers"] == {
        "gap": (-0.02, 0.31, None),
        "loss_val": (2.5, 2.0, pytest.approx(-0.2)),
        "bad_step": (-1, 4, None),
    }
    assert found["cost"] == {"seconds": (10, 150, pytest.approx(14)), "update_probe_s": (2, 3, pytest.approx(0.5))}
    text = shown(tmp_path, a, b)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert rows["gap"] == ["-0.02", "0.31", "+0.33"]  # no share of what lies near 0
    assert "-20 %" in text
    assert "x 15" in text


@pytest.mark.parametrize(
    ("a", "b", "share"),
    [(2, 3, 0.5), (-2, -3, -0.5), (0, 3, None), (math.nan, 3, None), ("x", 3, None), (True, 3, None)],
)
def test_relative_differences(a: object, b: object, share: float | None) -> None:
    assert relative(a, b) == share


def test_runs_of_other_depth_length_and_with_nothing_recorded(tmp_path: Path) -> None:
    deep, shallow = make_run(tmp_path, "post", 48, steps=50), make_run(tmp_path, "post", 3, steps=10, nan_at=4)
    with SpoolWriter(tmp_path / "empty", 1) as spool:
        spool.start(run_id="empty\n")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "spool.jsonl").write_bytes(b"\xff{\n")
    names = [deep, shallow, "empty", "broken"]
    for a in names:
        for b in names:
            for look in (Look(), Look(width=40), Look(unicode=False)):
                text = shown(tmp_path, a, b, look)
                assert look.unicode or text.isascii()
            json.dumps(as_json(read_run(tmp_path / a), read_run(tmp_path / b)), allow_nan=False)
    text = shown(tmp_path, deep, shallow)
    lines = text[text.index("over depth") :].splitlines()
    assert len(lines) == 1 + 2 * 2
    assert "×" in lines[-1]  # the gradient of the shallow run was not finite


def test_profiles_stand_on_one_scale(tmp_path: Path) -> None:
    for name, height in (("a", 1.0), ("b", 2.0)):
        with SpoolWriter(tmp_path / name, 1) as spool:
            spool.start(run_id=name)
            spool.profile(1, "grad_norm", np.full(6, height))
            spool.profile(1, "stream_rms", np.full(6, 7.0))
    text = shown(tmp_path, "a", "b")
    ours, theirs = text.splitlines()[-2:]
    assert "▁▁▁" in ours
    assert "███" in theirs
    assert theirs.startswith("1..2"), "the scale is said"
    assert "stream RMS" not in text  # it is the same


def test_runs_of_other_loops_are_compared(tmp_path: Path) -> None:
    ours, theirs = make_foreign(tmp_path, "a"), make_foreign(tmp_path, "b", blocks=3, bad_at=4)
    for pair in ((ours, theirs), (ours, make_run(tmp_path))):
        text = shown(tmp_path, *pair)
        json.dumps(as_json(read_run(tmp_path / pair[0]), read_run(tmp_path / pair[1])), allow_nan=False)
    assert "model.class" in text
    assert "config" in text


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = make_run(tmp_path, "post"), make_run(tmp_path, "pre")
    assert main(["diff", "post", "pre", "--runs", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"A  {one}\nB  {two}\n")
    assert main(["diff", "post", "pre", "--runs", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["config"] == {"model.scheme": ["post", "pre"]}
    assert main(["diff", "post", "--runs", str(tmp_path)]) == 2


def test_a_long_range_is_said_whole_and_long_texts_from_where_they_differ(tmp_path: Path) -> None:
    for name, least in (("a", 0.0331), ("b", 0.0361)):
        with SpoolWriter(tmp_path / name, 1) as spool:
            spool.start(run_id=name, data={"digest": "a" * 120 + name, "name": name})
            spool.metrics(1, 1, {"loss_train": 1.0})
            spool.profile(1, "grad_norm", [least, 0.0391])
    text = shown(tmp_path, "a", "b")
    assert "0.033..0.039 B" in text
    (line,) = (line for line in text.splitlines() if line.startswith("data.digest"))
    assert line.split()[1:] == ["...aaa", "...aab"]
