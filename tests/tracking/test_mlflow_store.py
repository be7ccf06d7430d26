import http.server
import multiprocessing
import os
import sqlite3
import threading
import time
from types import SimpleNamespace

import pytest

from normscale.errors import StoreError
from normscale.tracking.mlflow_store import (
    bounds,
    check_place,
    ensure_store,
    experiment,
    refused,
    unreachable,
)


class Refusing:
    """A store that has one experiment, whose files are somewhere."""

    def __init__(self, place):
        self.found = SimpleNamespace(artifact_location=place, lifecycle_stage="active", experiment_id="7")
        if place is None:
            self.found = None

    def get_experiment_by_name(self, name):
        return self.found

    def create_experiment(self, name, **_):
        return "8"


def test_files_that_readers_would_not_see_are_not_written():
    served, here = "http://elsewhere:5000", "http://127.0.0.1:5000"
    assert experiment(Refusing("mlflow-artifacts:/7"), served, "x") == "7"
    assert experiment(Refusing("s3://bucket/7"), served, "x") == "7"
    assert experiment(Refusing("file:///a/x"), here, "x") == "7"
    assert experiment(Refusing(None), served, "x") == "8"
    assert experiment(Refusing("s3://bucket/7"), "postgresql://h/db", "x") == "7"
    with pytest.raises(StoreError, match=r"keeps its files in a folder of that machine .*; serve a store of its own"):
        experiment(Refusing("file:///a/x"), served, "x")
    for uri in ("sqlite:////a/m.db", "postgresql://h/db"):
        with pytest.raises(StoreError, match="files with its tracking server; give the address of its server"):
            experiment(Refusing("mlflow-artifacts:/7"), uri, "x")
    with pytest.raises(StoreError, match="whatever machine is first; give the address of its server"):
        experiment(Refusing(None), "postgresql://h/db", "x")


TURNED_AWAY = "API request to endpoint /api/x failed with error code {} != 200. Response body: '{}'"


def test_a_server_that_turns_everything_away_is_told_with_the_mend(monkeypatch):
    monkeypatch.chdir("/")
    uri, again = "http://node8:5000", "then `normscale sync --uri http://node8:5000`"
    said = refused(
        uri, Exception(TURNED_AWAY.format(403, "Invalid Host header - possible DNS rebinding attack detected"))
    )
    assert said == (
        f"tracking server {uri} does not know itself as node8; start it with normscale server --name node8"
        f" (mlflow server: --allowed-hosts), {again}"
    )
    said = refused(uri, Exception(TURNED_AWAY.format(401, "who are you?")))
    assert said.startswith(f"tracking server {uri} wants another password (401); set MLFLOW_TRACKING_USERNAME and")
    assert said.endswith(again)
    assert refused(uri, Exception(TURNED_AWAY.format(500, "no"))) is None


def test_a_place_that_cannot_take_a_database_is_one_line_and_a_good_one_is_left_as_it_was(tmp_path):
    (tmp_path / "file").write_text("not a database")
    (tmp_path / "old.db").write_bytes(b"SQLite format 3\0 and more")
    (tmp_path / "new.db").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe.db")
    before = sorted(tmp_path.rglob("*"))
    for good in ("old.db", "new.db", "a/b/c.db", "m.db"):
        check_place(f"sqlite:///{tmp_path}/{good}")
    check_place("http://127.0.0.1:9")
    for place in ("/proc/x/m.db", f"{tmp_path}/file", f"{tmp_path}/file/m.db", f"{tmp_path}/pipe.db", f"{tmp_path}"):
        with pytest.raises(StoreError, match=r"tracking\.uri: .*sqlite:///<file>") as caught:
            check_place(f"sqlite:///{place}")
        assert place in str(caught.value)
        assert "\n" not in str(caught.value)
    with pytest.raises(StoreError, match="File name too long"):
        check_place(f"sqlite:///{tmp_path}/{'x' * 300}/m.db")
    assert sorted(tmp_path.rglob("*")) == before


def create(uri, barrier, results):
    barrier.wait()
    try:
        client = ensure_store(uri)
        results.put([one.name for one in client.search_experiments()])
    except BaseException as error:
        results.put(repr(error))


def test_four_processes_create_one_database(tmp_path, empty_database):
    context = multiprocessing.get_context("fork")  # mlflow is imported by now, so that all four race
    barrier, results = context.Barrier(4), context.Queue()
    uri = f"sqlite:///{tmp_path / 'new' / 'mlflow.db'}"
    processes = [context.Process(target=create, args=(uri, barrier, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert found == [["Default"]] * 4
    with sqlite3.connect(tmp_path / "new" / "mlflow.db") as database:
        assert len(database.execute("select * from alembic_version").fetchall()) == 1


def test_an_experiment_keeps_its_files_beside_the_database_and_comes_back_when_deleted(new_store):
    uri = new_store()
    client = ensure_store(uri)
    name = experiment(client, uri, "normscale-depth")
    place = client.get_experiment(name).artifact_location
    assert place.startswith("file://")
    assert place.endswith("store%201/mlartifacts/normscale-depth")
    client.delete_experiment(name)
    assert experiment(client, uri, "normscale-depth") == name
    assert client.get_experiment(name).lifecycle_stage == "active"


def test_limits_are_those_of_the_installed_mlflow(monkeypatch):
    monkeypatch.setattr("mlflow.utils.validation.MAX_METRICS_PER_BATCH", 7)
    assert bounds().metrics == 7
    assert bounds().tag_chars >= 5000


class Silent(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.server.hangs:
            time.sleep(4)
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.mark.parametrize("hangs", [True, False])
def test_a_server_that_hangs_is_unreachable_and_one_that_refuses_is_there(hangs):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        server.hangs, server.daemon_threads, server.block_on_close = hangs, True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        uri = f"http://127.0.0.1:{server.server_port}"
        began = time.monotonic()
        answer = unreachable(uri)
        assert time.monotonic() - began < 3.5
        server.shutdown()
    assert (answer is not None) == hangs
    if hangs:
        assert uri in answer
        assert "timed out" in answer
    assert unreachable("sqlite:////nowhere/m.db") is None
