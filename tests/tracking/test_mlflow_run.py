"""Replays of a run that go on from one another: what the next one still has to send, and what it must not repeat."""

from normscale.tracking import mlflow_run
from normscale.tracking.address import resolve
from normscale.tracking.mlflow_run import is_stored
from normscale.tracking.mlflow_sink import sync
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SpoolWriter
from tests.tracking.stored import client_of, files, folder_of


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
