import json
import math
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from normscale.errors import StoreError
from normscale.tracking import spool as spool_module
from normscale.tracking.reader import is_written, next_attempt, read_run
from normscale.tracking.spool import SPOOL, SpoolWriter


def lines(run_dir):
    return (run_dir / SPOOL).read_bytes().splitlines()


def test_everything_written_is_read_back(tmp_path):
    with SpoolWriter(tmp_path / "run", 1) as spool:
        spool.start(run_id="post-L0012-s0-abc", config={"model": {"M": 6, "scheme": "post"}}, rows=["a", "b"])
        spool.metrics(1, 1, {"loss_train": 5.5, "grad_norm": np.float32(2.0)})
        spool.metrics(2, 2, {"loss_train": 5.25})
        spool.profile(2, "grad_norm", np.array([1.0, 2.5], dtype=np.float64))
        spool.event(2, "spike", loss=math.inf)
        spool.end("finished", 0, {"gap": 1.5, "steps": 2, "note": "ok"})
    record = read_run(tmp_path / "run")
    assert record.run_id == "post-L0012-s0-abc"
    assert record.attempt == 1
    assert record.torn == 0
    assert record.start["config"]["model"] == {"M": 6, "scheme": "post"}
    assert record.series["loss_train"].steps == [1, 2]
    assert record.series["loss_train"].values == [5.5, 5.25]
    assert record.series["loss_train"].applied == [1, 2]
    assert record.series["grad_norm"].values == [2.0]
    now = time.time() * 1000
    assert all(now - 60_000 < t <= now + 1 for t in record.series["loss_train"].t)
    assert record.profiles["grad_norm"].data.dtype == np.float32
    assert record.profiles["grad_norm"].data.tolist() == [[1.0, 2.5]]
    assert record.profiles["grad_norm"].steps == [2]
    assert record.events[0]["event"] == "spike"
    assert record.events[0]["loss"] == "+Inf"
    assert record.finished
    assert record.summary == {"gap": 1.5, "steps": 2, "note": "ok"}


def test_a_nan_loss_stays_visible_at_its_step_and_the_file_is_strict_json(tmp_path):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start()
        for step in range(1, 7):
            value = math.nan if step == 3 else -math.inf if step == 5 else 1.0
            spool.metrics(step, step, {"loss_train": value, "nonfinite": float(step in (3, 5))})
        spool.profile(3, "stream_rms", [1.0, math.nan, math.inf])
        spool.end("nan", 3, {"gap": math.nan})

    def refuse(word):
        raise AssertionError(f"{word} is not JSON")

    raw = [json.loads(line, parse_constant=refuse) for line in lines(tmp_path)]
    assert raw[3]["step"] == 3
    assert raw[3]["values"]["loss_train"] == "NaN"
    assert raw[5]["values"]["loss_train"] == "-Inf"
    record = read_run(tmp_path)
    loss = record.series["loss_train"]
    assert loss.steps == [1, 2, 3, 4, 5, 6]
    assert math.isnan(loss.values[2])
    assert loss.values[4] == -math.inf
    assert loss.values[5] == 1.0
    assert record.last_finite("loss_train") == 1.0
    assert record.last_finite("lr") is None
    assert np.isnan(record.profiles["stream_rms"].data[0, 1])
    assert np.isinf(record.profiles["stream_rms"].data[0, 2])
    assert math.isnan(record.summary["gap"])
    assert record.finished


def test_unregistered_names_are_mistakes(tmp_path):
    with SpoolWriter(tmp_path, 1) as spool:
        with pytest.raises(ValueError, match="'loss'"):
            spool.metrics(1, 1, {"loss": 1.0})
        with pytest.raises(ValueError, match="'grads'"):
            spool.profile(1, "grads", [1.0])
        with pytest.raises(ValueError, match="one value per row"):
            spool.profile(1, "grad_norm", [[1.0]])
    assert lines(tmp_path) == []


CHILD = """
import sys
from pathlib import Path
from normscale.tracking.spool import SpoolWriter
spool = SpoolWriter(Path(sys.argv[1]), 1)
spool.start(run_id="killed")
for step in range(1, 100_000):  # enough to be killed in the middle, and an end if nobody does
    spool.metrics(step, step, {"loss_train": float(step)})
    spool.profile(step, "grad_norm", [float(step)] * 50)
    if step == 20:
        print("going", flush=True)
"""


def test_a_killed_writer_loses_nothing_that_was_complete_and_a_new_one_continues(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"going\n"
    with pytest.raises(StoreError, match="another process is writing this run"):
        SpoolWriter(tmp_path, 2)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    before = read_run(tmp_path)
    assert before.torn == 0
    assert before.end is None
    assert not before.finished
    steps = before.series["loss_train"].steps
    assert len(steps) >= 20
    assert steps == list(range(1, len(steps) + 1))
    assert before.series["loss_train"].values == [float(step) for step in steps]
    assert len(before.profiles["grad_norm"].steps) >= len(steps) - 1

    with (tmp_path / SPOOL).open("ab") as file:  # a line that the kill cut in two
        file.write(b'{"kind":"metrics","t":1,"attempt":1,"step":999999999,"val')
    assert read_run(tmp_path).torn == 1
    assert next_attempt(tmp_path) == 2
    with SpoolWriter(tmp_path, 2) as spool:  # the lock went with the process
        spool.start(run_id="killed", from_step=len(steps))
        spool.metrics(len(steps) + 1, len(steps) + 1, {"loss_train": 0.5})
    after = read_run(tmp_path)
    assert after.torn == 1
    assert after.attempt == 2
    assert after.first_attempt == 1
    assert after.series["loss_train"].steps == [*steps, len(steps) + 1]
    assert after.series["loss_train"].values[-1] == 0.5


def attempt(run_dir, number, from_step, points, end=None):
    with SpoolWriter(run_dir, number) as spool:
        spool.start(from_step=from_step)
        for step, value in points.items():
            spool.metrics(step, step, {"loss_train": value})
            spool.profile(step, "grad_norm", [value])
            spool.event(step, "seen")
        if end:
            spool.end(end, 0, {"gap": 1.0})


def test_the_newest_attempt_that_has_a_step_wins(tmp_path):
    attempt(tmp_path, 1, 0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, "interrupted")
    attempt(tmp_path, 2, 2, {3: 30.0})
    record = read_run(tmp_path)
    assert record.series["loss_train"].steps == [1, 2, 3, 4]
    assert record.series["loss_train"].values == [1.0, 2.0, 30.0, 4.0]
    assert record.profiles["grad_norm"].data.ravel().tolist() == [1.0, 2.0, 30.0, 4.0]
    assert record.end is None, "the end of an older attempt is not this run's end"
    assert record.start["attempt"] == 2


def test_what_is_told_of_a_step_that_was_made_again_is_told_once(tmp_path):
    attempt(tmp_path, 1, 0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, "interrupted")
    attempt(tmp_path, 2, 2, {3: 3.0})
    events = read_run(tmp_path).events
    assert [(event["event"], event["step"], event["attempt"]) for event in events] == [
        ("seen", 1, 1),
        ("seen", 2, 1),
        ("seen", 4, 1),
        ("seen", 3, 2),
    ]


def test_what_a_newer_attempt_made_well_and_did_not_measure_is_told_no_more(tmp_path):
    attempt(tmp_path, 1, 0, {10: 1.0, 20: 1.0, 25: math.nan, 30: 1.0, 35: math.nan}, "interrupted")
    attempt(tmp_path, 2, 20, {30: 1.0})
    steps = [10, 20, 30, 35]  # 25 was made again, 35 not yet
    record = read_run(tmp_path)
    assert record.series["loss_train"].steps == steps
    assert record.profiles["grad_norm"].steps == steps
    assert sorted(event["step"] for event in record.events) == steps
    attempt(tmp_path, 3, 30, {40: 1.0})
    record = read_run(tmp_path)
    assert record.series["loss_train"].steps == [10, 20, 30, 40]
    assert [(event["step"], event["attempt"]) for event in record.events] == [(10, 1), (20, 1), (30, 2), (40, 3)]


def test_a_scalar_that_comes_late_in_a_step_is_not_missed_before_it_is_there(tmp_path):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start()
        spool.metrics(4, 4, {"loss_train": 2.0})
        spool.metrics(4, 4, {"loss_val": 3.0})
        spool.event(5, "pass_broken")
        spool.metrics(5, 5, {"loss_train": 2.0})
    with SpoolWriter(tmp_path, 2) as spool:
        spool.start(from_step=2)
        spool.metrics(5, 5, {"loss_train": 2.0})
        record = read_run(tmp_path)
        assert (record.series["loss_train"].steps, record.series["loss_val"].values) == ([5], [3.0])
        spool.metrics(6, 6, {"loss_val": 1.0})
    record = read_run(tmp_path)
    assert (record.series["loss_val"].steps, [event["event"] for event in record.events]) == ([6], ["pass_broken"])


def test_other_numbers_in_a_step_that_was_made_again_are_an_event(tmp_path):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start()
        for step in range(1, 6):
            spool.metrics(step, step, {"loss_train": float(step), "grad_norm": math.nan, "tokens_s": 100.0})
    with SpoolWriter(tmp_path, 2) as spool:
        spool.start(from_step=2)
        spool.metrics(3, 3, {"loss_train": 3.0, "grad_norm": math.nan, "tokens_s": 7.0})
        spool.metrics(4, 4, {"loss_train": 4.5, "grad_norm": 1.0, "tokens_s": 7.0})
        spool.metrics(5, 5, {"loss_train": 5.5, "grad_norm": math.nan, "tokens_s": 7.0})
        spool.metrics(6, 6, {"loss_train": 6.0})
    (event,) = read_run(tmp_path).events
    assert (event["event"], event["step"], event["attempt"], event["values"]) == ("rerun_differs", 4, 2, 3)
    assert event["key"] == "grad_norm"
    assert math.isnan(event["before"])
    assert event["now"] == 1.0


def test_a_restart_from_the_beginning_drops_older_attempts_whole(tmp_path):
    attempt(tmp_path, 1, 0, {1: 1.0, 2: 2.0, 3: 3.0}, "finished")
    attempt(tmp_path, 2, 0, {1: 10.0})
    attempt(tmp_path, 3, 1, {2: 20.0}, "finished")
    record = read_run(tmp_path)
    assert record.series["loss_train"].values == [10.0, 20.0]
    assert record.profiles["grad_norm"].steps == [1, 2]
    assert [event["attempt"] for event in record.events] == [2, 3]
    assert record.first_attempt == 2
    assert record.attempt == 3
    assert record.finished


def test_an_event_keeps_its_kind_whatever_its_fields_are_called(tmp_path):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.event(3, "nonfinite", kind="NaN", parameters=[{"name": "w", "nan": 2}])
    (event,) = read_run(tmp_path).events
    assert (event["event"], event["step"], event["kind_"]) == ("nonfinite", 3, "NaN")
    assert event["parameters"] == [{"name": "w", "nan": 2}]


def test_whether_a_run_is_being_written_is_known_without_disturbing_its_writer(tmp_path):
    assert not is_written(tmp_path)
    with SpoolWriter(tmp_path, 1):
        assert is_written(tmp_path)
    assert not is_written(tmp_path)
    SpoolWriter(tmp_path, 2).close()


def test_a_second_writer_is_refused_until_the_first_closes(tmp_path):
    first = SpoolWriter(tmp_path, 1)
    with pytest.raises(StoreError) as caught:
        SpoolWriter(tmp_path, 2)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)
    first.start()
    first.close()
    SpoolWriter(tmp_path, 2).close()
    assert len(lines(tmp_path)) == 1


def test_a_place_that_cannot_be_written_is_one_line_at_the_start(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"tracking\.runs") as caught:
        SpoolWriter(tmp_path / "file" / "run", 1)
    assert "\n" not in str(caught.value)
    assert str(tmp_path / "file" / "run") in str(caught.value)
    assert caught.value.exit_code == 2
    with pytest.raises(StoreError, match="cannot be read"):
        read_run(tmp_path / "nowhere")


BAD = [
    {"kind": "start", "attempt": "x"},
    {"kind": "start", "attempt": None},
    {"kind": "start", "attempt": 1e308},
    {"kind": "start", "attempt": True},
    {"kind": "start", "attempt": -1},
    {"kind": "start", "t": "now"},
    {"kind": "start", "config": []},
    {"kind": "start", "config": {"train": {"optim": 3}}},
    {"kind": "start", "rows": [1]},
    {"kind": "start", "run_id": 7},
    {"kind": "start", "from_step": "a"},
    {"kind": ["start"]},
    {"kind": "metrics", "applied": 1, "values": {"loss_train": 1.0}},
    {"kind": "metrics", "step": 1, "values": {"loss_train": 1.0}},
    {"kind": "metrics", "step": "1", "applied": 1, "values": {"loss_train": 1.0}},
    {"kind": "metrics", "step": 1, "applied": 1, "values": [1.0]},
    {"kind": "metrics", "step": 1, "applied": 1, "values": {"loss_train": "low"}},
    {"kind": "metrics", "step": 1, "applied": 1, "values": {"loss_train": 10**400}},
    {"kind": "profile", "step": 1, "name": "grad_norm", "data": {"shape": [1], "f32": "AAAA"}},
    {"kind": "profile", "step": 1, "name": "grad_norm", "data": {"shape": [2], "f32": "AAAAAA=="}},
    {"kind": "profile", "step": 1, "name": "grad_norm", "data": {"shape": [1], "f32": "A"}},
    {"kind": "profile", "step": 1, "name": "grad_norm", "data": [1.0]},
    {"kind": "profile", "step": 1, "name": ["x"], "data": {"shape": [1], "f32": "AAAAAA=="}},
    {"kind": "profile", "step": 1, "name": "grad_norm", "data": {"shape": [1]}},
    {"kind": "event", "event": "spike"},
    {"kind": "event", "step": 1, "event": 5},
    {"kind": "end", "outcome": "finished", "summary": {}},
    {"kind": "end", "outcome": "finished", "exit_code": "0", "summary": {}},
    {"kind": "end", "outcome": "well", "exit_code": 0, "summary": {}},
    {"kind": "end", "outcome": ["finished"], "exit_code": 0, "summary": {}},
    {"kind": "end", "outcome": "finished", "exit_code": 0, "summary": []},
    {"kind": "end", "outcome": "finished", "exit_code": 0, "summary": None},
    {"kind": "end", "outcome": "finished", "exit_code": 0, "summary": {"loss_val": "low"}},
    {"kind": "end", "outcome": "finished", "exit_code": 0, "summary": {"update@5": None}},
    {"kind": "end", "outcome": "finished", "exit_code": 0, "summary": {"note": {}}},
]
RAW = [b"[" * 200_000, b"null", b"3", b'"x"', b"[]", b"\xff\xfe", b"9" * 5000]
BAD_LINES = [json.dumps({"t": 1, "attempt": 1} | record).encode() for record in BAD] + RAW


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:60].decode("latin-1"))
def test_a_line_that_no_writer_makes_counts_as_torn(tmp_path, line):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start()
        spool.metrics(2, 2, {"loss_train": 2.0})
    with (tmp_path / SPOOL).open("ab") as file:
        file.write(line + b"\n")
    record = read_run(tmp_path)
    assert record.torn == 1
    assert record.series["loss_train"].values == [2.0]
    assert (record.end, record.profiles, record.events, record.attempt) == (None, {}, [], 1)
    assert next_attempt(tmp_path) == 2


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_a_spool_that_is_no_file_is_refused_in_one_line(tmp_path, kind):
    path = tmp_path / SPOOL
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "folder": path.mkdir,
    }[kind]()
    for read in (read_run, next_attempt):
        with pytest.raises(StoreError, match=r"not a regular file|Is a directory") as caught:
            read(tmp_path)
        assert "\n" not in str(caught.value)


def test_records_that_were_deleted_or_could_not_be_ended_are_known_at_the_end(tmp_path, monkeypatch):
    with SpoolWriter(tmp_path / "kept", 1) as spool:
        spool.start()
        spool.end("finished", 0, {})
        assert (spool.gone, spool.lost) == (None, 0)
    with SpoolWriter(tmp_path / "deleted", 1) as spool:
        spool.start()
        (tmp_path / "deleted" / SPOOL).unlink()
        spool.end("finished", 0, {})
        assert (spool.gone, spool.lost) == ("it was deleted during the run", 1)
    with SpoolWriter(tmp_path / "full", 1) as spool:
        spool.start()
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        spool.end("finished", 0, {})
        assert (spool.gone, spool.lost) == ("No space left on device", 1)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_at_the_start_is_an_error(tmp_path):
    (tmp_path / SPOOL).symlink_to("/dev/full")
    with SpoolWriter(tmp_path, 1) as spool, pytest.raises(StoreError, match="No space left"):
        spool.start()


def test_a_disk_that_fills_up_later_is_said_once_counted_and_tried_again(tmp_path, monkeypatch, capsys):
    real = os.write
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start()

        def half(descriptor, data):  # a nearly full disk takes a part of the line
            return real(descriptor, data[:20])

        monkeypatch.setattr(os, "write", half)
        spool.metrics(1, 1, {"loss_train": 1.0})
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        spool.metrics(2, 2, {"loss_train": 2.0})
        monkeypatch.setattr(os, "write", real)
        spool.metrics(3, 3, {"loss_train": 3.0})
        spool.end("finished", 0, {})
        assert spool.lost == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert "No space left" in message
    assert str(tmp_path) in message
    record = read_run(tmp_path)
    assert record.series["loss_train"].steps == [3]
    assert record.torn == 1
    assert record.finished
    (event,) = record.events  # told as soon as there was room again
    assert (event["event"], event["lost"], event["step"], event["reason"]) == (
        "records_lost",
        2,
        2,
        "No space left on device",
    )
    assert record.end["lost"] == 2


def test_a_disk_that_stays_full_costs_one_line_and_every_record_is_counted(tmp_path, monkeypatch, capsys):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start()
        monkeypatch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
        for step in range(1, 101):
            spool.metrics(step, step, {"loss_train": 1.0})
            spool.profile(step, "stream_rms", [1.0])
            spool.event(step, "spike", of="loss")
        spool.end("finished", 0, {})
        assert (spool.lost, spool.gone) == (301, "No space left on device")
    assert capsys.readouterr().err.count("\n") == 1
    assert read_run(tmp_path).end is None


def test_scalars_of_another_loop_are_kept_under_names_of_their_own(tmp_path):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.metrics(1, 1, {"user/val acc@1": 0.5, "loss_train": 1.0})
        with pytest.raises(ValueError, match="'val' is not a registered quantity"):
            spool.metrics(2, 2, {"val": 0.5})
    assert read_run(tmp_path).series["user/val acc@1"].values == [0.5]


def test_text_that_is_no_unicode_ends_no_training_and_comes_back_as_text_that_can_be_written(tmp_path):
    half = "caf\udce9"  # as from a file's name in Latin-1
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start(config={"name": half})
        spool.metrics(1, 1, {f"user/{half}": 0.5, "user/caf\udce8": 0.25})
        spool.event(1, "probe_off", reason=half, said=OSError(half))
        spool.end("error", 1, {"note": half})
    (tmp_path / SPOOL).read_text("utf-8")
    record, told = read_run(tmp_path), r"caf\udce9"
    assert {name: series.values for name, series in record.series.items()} == {
        rf"user/{told}": [0.5],
        r"user/caf\udce8": [0.25],
    }
    (event,) = record.events
    assert {record.start["config"]["name"], event["reason"], event["said"], record.summary["note"]} == {told}
    assert spool_module.strict({"é": "日"}) == {"é": "日"}


def test_a_thousand_layers_are_read_quickly(tmp_path):
    names = ["stream_rms", "stream_absmax", "branch_rms", "branch_absmax", "stream_nonfinite", "branch_nonfinite"]
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start(rows=[f"decoder.{row:04d}.self" for row in range(2000)])
        for step in range(0, 300, 10):
            spool.metrics(step, step, {"loss_train": 1.0, "grad_norm": 2.0})
            for name in [*names, "grad_norm"]:
                spool.profile(step, name, np.random.default_rng(step).random(2000))
    began = time.perf_counter()
    record = read_run(tmp_path)
    took = time.perf_counter() - began
    assert record.profiles["grad_norm"].data.shape == (30, 2000)
    assert len(record.profiles) == 7
    assert took < 0.5


def test_an_array_over_a_thousand_layers_is_one_write_and_as_much_work_as_over_one(tmp_path, monkeypatch):
    """It is to be appended within a millisecond; `make bench-probes` times it."""
    write, strict, done = os.write, spool_module.strict, []
    monkeypatch.setattr(os, "write", lambda fd, line: done.append("write") or write(fd, line))
    monkeypatch.setattr(spool_module, "strict", lambda value: done.append("value") or strict(value))
    monkeypatch.setattr(os, "fsync", lambda fd: done.append("wait for the disk"))
    with SpoolWriter(tmp_path, 1) as spool:
        spool.profile(1, "stream_rms", np.zeros(1))
        one, done[:] = list(done), []
        spool.profile(2, "stream_rms", np.random.default_rng(0).random(2000))
    assert done == one
    assert (done.count("write"), done.count("value") > 1, "wait for the disk" in done) == (1, True, False)


def test_the_records_can_be_waited_for(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start()
        spool.sync()
        assert synced == [str(tmp_path / SPOOL)]
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
        spool.sync()
