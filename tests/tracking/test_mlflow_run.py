"""Replays of a run that go on from one another: what the next one still has to send, and what it must not repeat."""

from normscale.tracking import mlflow_run
from normscale.tracking.address import resolve
from normscale.tracking.mlflow_run import is_stored
from normscale.tracking.mlflow_sink import sync
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SpoolWriter
from tests.tracking.stored import client_of, files


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
