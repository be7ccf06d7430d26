import http.server
import multiprocessing
import os
import sqlite3
import threading
import time

import pytest

from normscale.errors import StoreError
from normscale.tracking.mlflow_store import bounds, check_place, ensure_store, experiment, resolve, unreachable


def test_a_relative_path_is_meant_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve(f"sqlite:///{tmp_path}/x.db") == f"sqlite:///{tmp_path}/x.db"
    assert resolve("http://127.0.0.1:5000/") == "http://127.0.0.1:5000"


NO_STORES = ["", "mlruns", "sqlite://", "sqlite:///", "sqlite:x.db", "file:///tmp/x", "http://", "foo://bar", "foo:bar"]
NO_STORES += ["http:x", "http://h:port", "http://[", "sqlite:///a\0b", "databricks://x", "mysql:x", "postgresql://"]


@pytest.mark.parametrize("uri", NO_STORES)
def test_what_is_no_store_says_what_would_be(uri):
    with pytest.raises(StoreError, match=r"tracking\.uri: .*sqlite:///<file>") as caught:
        resolve(uri)
    assert "\n" not in str(caught.value)


def test_databases_that_mlflow_knows_pass():
    for uri in ("postgresql://u:p@h/db", "mysql+pymysql://h:3306/db", "https://h/mlflow"):
        assert resolve(uri) == uri


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
