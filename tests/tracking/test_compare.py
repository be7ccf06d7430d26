"""What counts as a difference between two runs: every number at every step, every array, every event."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import normscale
from normscale.tracking.compare import differences, same_results
from normscale.tracking.diff import as_json, diff
from normscale.tracking.draw import Look
from normscale.tracking.reader import RunRecord, read_run
from normscale.tracking.spool import SpoolWriter
from tests.monitor.made import adamw, batches, loss_fn, net

SAME = "the results are the same to the last digit"


def monitored(folder: Path, accuracies: dict[int, float]) -> RunRecord:
    """Trains a small model under a monitor that is told an accuracy at each step."""
    model = net()
    optimizer = adamw(model)
    monitor = normscale.Monitor(model, runs=folder, every=2)
    for step, batch in enumerate(batches(6), start=1):
        monitor.log({"accuracy": accuracies[step]})
        with monitor.micro_batch(batch):
            loss = loss_fn(model, batch)
            loss.backward()
        monitor.step(optimizer, loss.detach())
        optimizer.zero_grad()
    monitor.close()
    return read_run(Path(monitor.run_dir))


def text(a: RunRecord, b: RunRecord) -> str:
    json.dumps(as_json(a, b), allow_nan=False)
    return "\n".join(diff(a, b, Look()))


def test_two_runs_that_differ_in_a_number_of_their_own_alone(tmp_path: Path) -> None:
    ours = {step: 0.1 * step for step in range(1, 7)}
    theirs = ours | {step: ours[step] + 0.5 for step in (3, 4)}
    a, b = monitored(tmp_path / "a", ours), monitored(tmp_path / "b", theirs)
    found = differences(a, b)
    assert not same_results(found)
    (apart,) = [found["series"].pop("user/accuracy")]
    assert apart == {"first": 2, "at_first": (ours[3], theirs[3]), "last": (ours[6], ours[6])}
    assert same_results(found), "nothing else differs, whatever the two cost"
    said = text(a, b)
    assert SAME not in said
    assert "user/accuracy: first at step 2 (0.3 against 0.8), last 0.6 against 0.6" in said
    again = monitored(tmp_path / "again", ours)
    assert same_results(differences(a, again))
    assert SAME in text(a, again) or "nothing differs" in text(a, again)


def written(folder: Path, change: str = "") -> RunRecord:
    """Writes a small run with everything that a spool holds, one thing of which is changed."""
    with SpoolWriter(folder, 1) as spool:
        spool.start(run_id="run", config={}, identity={"device": "cpu"})
        for step in (1, 2, 3):
            values = {"loss_train": 5.0, "loss_val": 4.0, "grad_norm": math.nan, "tokens_s": 100.0}
            more = {key: value + 1 for key, value in values.items() if change == f"{key} {step}"}
            spool.metrics(step, step, values | more)
            spool.profile(step, "stream_rms", np.array([1.0, math.nan, 2.0 + (change == f"profile {step}")]))
        spool.event(2, "spike", of="loss", sigmas=7.0 + (change == "event"), host=folder.name)
        if change == "another event":
            spool.event(3, "stalled", in_a_row=3)
        if change == "resumed":
            spool.event(1, "resumed", from_step=1)
        reason = "norm overflow" if change == "reason" else "non-finite loss"
        norm = 2.0 if change == "ledger" else 1.0
        rows = [{"step": 1, "reason": None, "norm": norm}, {"step": 2, "reason": reason, "norm": None}]
        spool.ledger(rows if change != "applied" else [rows[0], {"step": 2, "reason": None, "norm": None}])
        spool.end("finished", 0, {"loss_train": 5.0, "seconds": 3.0})
    return read_run(folder)


@pytest.mark.parametrize(
    ("change", "section", "wanted"),
    [
        ("loss_val 2", "series", {"loss_val": {"first": 2, "at_first": (4.0, 5.0), "last": (4.0, 4.0)}}),
        ("ledger", "series", {"ledger.norm": {"first": 1, "at_first": (1.0, 2.0), "last": (1.0, 2.0)}}),
        ("profile 2", "profiles", {"stream_rms": 2}),
        ("event", "events", {"2 spike.sigmas": (7.0, 8.0)}),
        ("another event", "events", {"3 stalled": (None, "happened")}),
        ("reason", "events", {"2 not applied": ("non-finite loss", "norm overflow")}),
        ("applied", "events", {"2 not applied": ("non-finite loss", None)}),
    ],
)
def test_one_thing_that_differs_is_found(tmp_path: Path, change: str, section: str, wanted: dict[str, Any]) -> None:
    a, b = written(tmp_path / "a"), written(tmp_path / "b", change)
    found = {name: differing for name, differing in differences(a, b).items() if differing}
    assert found == {section: wanted}
    said = text(a, b)
    assert SAME not in said
    assert "nothing differs" not in said
    assert next(iter(wanted)) in said


@pytest.mark.parametrize(("change", "says"), [("tokens_s 2", "nothing differs"), ("resumed", SAME)])
def test_what_a_run_costs_and_what_befell_an_attempt_are_no_results(tmp_path: Path, change: str, says: str) -> None:
    assert says in text(written(tmp_path / "a"), written(tmp_path / "b", change))


def test_many_differences_are_counted_not_listed(tmp_path: Path) -> None:
    for name, start in (("a", 0), ("b", 1)):
        with SpoolWriter(tmp_path / name, 1) as spool:
            spool.start(run_id=name)
            for key in range(40):
                spool.metrics(key, key, {f"user/{key}": float(start)})
                spool.event(key, "spike", value=start)
    said = text(read_run(tmp_path / "a"), read_run(tmp_path / "b"))
    assert said.count("and 28 more (--json has all)") == 2


def test_a_run_that_goes_on_longer_is_the_same_as_far_as_both_go(tmp_path: Path) -> None:
    for name, steps in (("a", 3), ("b", 5)):
        with SpoolWriter(tmp_path / name, 1) as spool:
            spool.start(run_id=name)
            for step in range(steps):
                spool.metrics(step, step, {"user/x": 1.0, "user/y": float(step == 4), "user/z": step + 0.5 * steps})
    a, b = read_run(tmp_path / "a"), read_run(tmp_path / "b")
    assert differences(a, b)["series"]["user/x"] == {"first": 3, "at_first": (None, 1.0), "last": (1.0, 1.0)}
    said = text(a, b)
    assert "at some steps in one run alone, else the same: user/x, user/y" in said
    assert "user/z: first at step 0 (1.5 against 2.5)" in said


def test_values_are_told_apart_in_every_cell(tmp_path: Path) -> None:
    """Of a long value and its beginning, of numbers that are the same to six digits, and of two kinds of nothing."""
    pairs = {
        "longer": ("a" * 60, "a" * 60 + "b"),
        "number": (1.0, 1.0 + 1e-9),
        "kind": (1, "1"),
        "nothing": (None, []),
    }
    for name, side in (("a", 0), ("b", 1)):
        with SpoolWriter(tmp_path / name, 1) as spool:
            spool.start(run_id=name, config={key: pair[side] for key, pair in pairs.items()})
    for width in (40, 100):
        lines = diff(read_run(tmp_path / "a"), read_run(tmp_path / "b"), Look(width))
        rows = {line.split()[0]: line.split()[1:] for line in lines if line}
        for key in pairs:
            ours, theirs = rows[key]
            assert ours != theirs, key
