"""Replays of a run that go on from one another: what the next one still has to send, and what it must not repeat."""

import json
import re
import shutil

from normscale.tracking import mlflow_run
from normscale.tracking.address import resolve
from normscale.tracking.mlflow_run import is_stored
from normscale.tracking.mlflow_sink import sync
from normscale.tracking.reader import read_run
from normscale.tracking.sink_process import run_links
from normscale.tracking.spool import SpoolWriter
from tests.tracking.made import make_run
from tests.tracking.stored import client_of, files, folder_of, history

FLAG = "2-health/nonfinite"


def only(uri):
    """Returns the one run of a store."""
    (run,) = all_of(uri)
    return run


def all_of(uri):
    """Returns the runs of a store that belong to no claim; several may have one name."""
    client = client_of(uri)
    return client.search_runs([client.get_experiment_by_name("normscale-train").experiment_id])


def test_files_of_an_end_that_came_during_a_sync_are_stored_by_the_next(runs, new_store, monkeypatch):
    uri = new_store()
    with SpoolWriter(runs / "r", 1) as spool:
        spool.start(run_id="r")
        spool.metrics(1, 1, {"loss_train": 3.0})

        def read(path):
            record = read_run(path)
            spool.end("finished", 0, {"loss_train": 3.0})
            return record

        with monkeypatch.context() as patch:
            patch.setattr(mlflow_run, "read_run", read)
            assert sync(runs, uri, live=True).ok
    assert not is_stored(runs / "r", resolve(uri))
    assert sync(runs, uri).ok
    assert {"record.txt", "data/metrics.parquet"} <= set(files(only(uri)))
    assert only(uri).info.status == "FINISHED"
    assert is_stored(runs / "r", resolve(uri))


def linked(uri, run):
    """Returns the artifacts that a run's page links to or shows."""
    page = run.data.tags["mlflow.note.content"]
    return re.findall(r"/artifacts/([^?]*)\?", page) + re.findall(r"get-artifact\?path=([^&]*)&", page)


def test_a_run_that_goes_on_has_the_report_of_its_bad_event_and_a_killed_one_all_files(runs, new_store):
    uri = new_store()
    with SpoolWriter(runs / "r", 1) as spool:
        spool.start(run_id="r", rows=["a", "b"])
        spool.metrics(1, 1, {"loss_train": 3.0})
        spool.profile(1, "grad_norm", [1.0, 2.0])
        assert sync(runs, uri, live=True).ok
        assert linked(uri, only(uri)) == files(only(uri)) == []
        spool.event(2, "spike", of="loss", value=9.0)
        spool.event(2, "nonfinite", layer=1, fault="NaN")
        assert sync(runs, uri, live=True).ok
        report = "events/step-000002-nonfinite/report.html"
        assert linked(uri, only(uri)) == [report, report, "events/step-000002-nonfinite/profile.png"]
        assert set(linked(uri, only(uri))) < set(files(only(uri)))
        assert any(line.startswith("event ") and report in line for line in run_links(runs / "r", uri))
        assert only(uri).info.status == "RUNNING"
        sent = folder_of(only(uri)) / report
        first = sent.stat().st_mtime_ns
        spool.metrics(3, 2, {"loss_train": 2.0})
        assert sync(runs, uri, live=True).ok
        assert sent.stat().st_mtime_ns == first, "a report is sent once while the run goes on"
    assert sync(runs, uri).ok, "nobody writes it any more, and it has no end"
    there = files(only(uri))
    assert only(uri).info.status == "KILLED"
    assert {"record.txt", "data/metrics.parquet", "data/profiles.parquet", "figures/depth.png"} <= set(there)
    assert {"record.txt", "figures/depth.png", report} < set(linked(uri, only(uri))) <= set(there)
    assert any(name.startswith("images/3-grad~heat+step+0+") for name in there)
    assert is_stored(runs / "r", resolve(uri))
    assert sync(runs, uri).pictures == 0
    with SpoolWriter(runs / "r", 2) as spool:
        spool.start(run_id="r", from_step=2, rows=["a", "b"])
        spool.metrics(3, 2, {"loss_train": 2.0})
        spool.profile(3, "grad_norm", [3.0, 2.0])
        spool.end("finished", 0, {"loss_train": 2.0})
    assert sync(runs, uri).pictures > 0, "the end of the attempt that went on"
    assert only(uri).info.status == "FINISHED"
    assert "outcome  finished (attempt 2)" in (folder_of(only(uri)) / "record.txt").read_text()


def write_profiles(folder, attempt, begins, until, outcome):
    """Writes one attempt with a profile every 100 steps; returns the time of its end."""
    with SpoolWriter(folder, attempt) as spool:
        spool.start(run_id=folder.name, from_step=begins, rows=["a", "b"])
        for step in range(begins, until + 1, 100):
            spool.profile(step, "grad_norm", [1.0, 1.0 + step])
        spool.end(outcome, 0, {})
    return read_run(folder).end["t"]


def test_pictures_of_the_end_are_those_of_the_newest_end(runs, new_store):
    uri, folder = new_store(), runs / "r"
    ended = [write_profiles(folder, 1, 0, 500, "interrupted")]
    assert sync(runs, uri).pictures == 3, "heat map, first and last profile"
    figure = (folder_of(only(uri)) / "figures" / "depth.png").read_bytes()
    ended.append(write_profiles(folder, 2, 500, 900, "finished"))
    assert sync(runs, uri).pictures == 3
    there = [name for name in files(only(uri)) if name.startswith("images/") and name.endswith(".png")]
    # of two pictures at one step the UI shows the last of the listing, which is sorted by name
    heats = [name for name in there if "3-grad~heat+step+0+" in name]
    assert [f"+timestamp+{t}+" in name for name, t in zip(heats, ended, strict=True)] == [True, True]
    assert any("3-grad~profile+step+900+" in name for name in there)
    assert (folder_of(only(uri)) / "figures" / "depth.png").read_bytes() != figure
    assert sync(runs, uri).pictures == 0
    (folder / "sink.json").unlink()
    assert sync(runs, uri).pictures == 0


def test_a_step_is_flagged_once_it_is_over(runs, new_store):
    uri = new_store()
    with SpoolWriter(runs / "r", 1) as spool:
        spool.start(run_id="r")
        spool.metrics(1, 1, {"loss_train": 3.0, "user/a": 1.0})
        assert sync(runs, uri, live=True).points == 1, "the loss"
        spool.metrics(1, 1, {"loss_val": float("nan"), "user/a": 2.0})
        sync(runs, uri, live=True)
        spool.metrics(2, 2, {"loss_train": 2.0})
        sync(runs, uri, live=True)
        there = history(uri, only(uri))
        assert [point[:2] for point in there[FLAG]] == [(1, 1.0)]
        assert [point[:2] for point in there["user/a"]] == [(1, 2.0)]
    sync(runs, uri)
    there = history(uri, only(uri))
    assert [point[:2] for point in there[FLAG]] == [(1, 1.0), (2, 0.0)]
    (runs / "r" / "sink.json").unlink()
    assert sync(runs, uri).points == 5
    assert history(uri, only(uri)) == there


def test_a_flag_that_was_sent_too_early_is_not_sent_again(runs, new_store):
    uri = new_store()
    with SpoolWriter(runs / "r", 1) as spool:
        spool.start(run_id="r")
        spool.metrics(1, 1, {"loss_train": 3.0})
        sync(runs, uri, live=True)
        path = runs / "r" / "sink.json"
        known = json.loads(path.read_text())
        known[resolve(uri)][""]["last"][FLAG] = 1  # as the sink did before it waited for a step to be over
        path.write_text(json.dumps(known))
        client_of(uri).log_metric(only(uri).info.run_id, FLAG, 0.0, timestamp=1, step=1)
        for step in (1, 2, 3):
            spool.metrics(step, step, {"loss_val": 3.0})
            sync(runs, uri, live=True)
    assert [point[:2] for point in history(uri, only(uri))[FLAG]] == [(1, 0.0), (2, 0.0)]


def test_two_trainings_of_one_name_are_two_runs_and_a_copy_is_none(runs, new_store, tmp_path):
    uri, other, copy = new_store(), tmp_path / "other", tmp_path / "copy"
    make_run(runs, run_id="r", steps=4, every=2)
    make_run(other, run_id="r", steps=4, every=2)
    copy.mkdir()
    shutil.copytree(runs / "r", copy / "r")
    for folder in (runs, other, copy, runs, other):
        assert sync(folder, uri).ok
    found = all_of(uri)
    assert len(found) == 2
    for run in found:
        assert [step for step, *_ in history(uri, run)["1-loss/train"]] == [0, 1, 2, 3, 4]


def test_a_run_from_before_its_beginning_was_a_tag_is_found(runs, new_store, tmp_path):
    uri, other = new_store(), tmp_path / "other"
    make_run(runs, run_id="r", steps=4, every=2)
    sync(runs, uri)
    before = only(uri)
    client_of(uri).delete_tag(before.info.run_id, "normscale.began")
    (runs / "r" / "sink.json").unlink()
    make_run(other, run_id="r", steps=4, every=2)
    sync(other, uri)
    make_run(runs, run_id="r", steps=6, every=2, attempt=2, from_step=4)
    sync(runs, uri)
    after, _ = sorted(all_of(uri), key=lambda run: run.info.start_time)
    assert after.info.run_id == before.info.run_id
    assert after.data.tags["normscale.began"] == before.data.tags["normscale.began"]
    assert [step for step, *_ in history(uri, after)["1-loss/train"]] == [0, 1, 2, 3, 4, 5, 6]
