"""Eight sinks that write into one store at the same moment: every point is there once, on SQLite and on PostgreSQL."""

import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from normscale.tracking.mlflow_sink import sync
from tests.tracking.made import make_run
from tests.tracking.postgres import postgres
from tests.tracking.serving import children, free_port, is_running, shared_server
from tests.tracking.writers import ROWS, check_rows, forget, make_folders, write_at_once


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscale.tracking.mlflow_sink.draw_run", lambda *_: None)  # they take longer than all else


@pytest.mark.slow
def test_eight_sinks_write_one_sqlite_database(new_store, tmp_path: Path) -> None:
    folders, uri = make_folders(tmp_path), new_store()
    for _ in range(2):
        reports, _ = write_at_once(folders, uri)
        assert [failure for report in reports for failure in report.failures] == []
        with closing(sqlite3.connect(uri.removeprefix("sqlite:///"))) as database:
            check_rows(database.execute(ROWS).fetchall(), reports)
        forget(folders)


def test_a_database_that_somebody_holds_is_waited_for_and_nothing_is_lost(runs, new_store) -> None:
    make_run(runs, steps=4, every=2, end=False)
    uri = new_store()
    path = uri.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path, check_same_thread=False, isolation_level=None)) as holder:
        holder.execute("begin exclusive")
        release = threading.Timer(2.0, holder.execute, ("rollback",))
        release.start()
        began = time.monotonic()
        report = sync(runs, uri)
        release.join()
    assert report.failures == []
    assert time.monotonic() - began > 1.5
    assert report.points > 20


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_eight_sinks_write_into_postgresql_through_a_server(tmp_path: Path) -> None:
    with postgres() as (uri, password):
        import psycopg2

        folders = make_folders(tmp_path)
        kept = uri.replace("@", f":{password}@")
        options = ("--port", str(free_port()))
        with shared_server(tmp_path, *options, MLFLOW_BACKEND_STORE_URI=kept) as (process, said):
            assert uri.replace("@", ":***@") in said[0]
            address = said[1].removeprefix("tracking.uri=")
            own = [process.pid, *children(process.pid)]
            words = [Path(f"/proc/{pid}/cmdline").read_bytes().decode() for pid in own]
            for _ in range(2):
                reports, seconds = write_at_once(folders, address)
                assert [failure for report in reports for failure in report.failures] == []
                with closing(psycopg2.connect(uri, password=password)) as database, database.cursor() as cursor:
                    cursor.execute(ROWS)
                    check_rows(cursor.fetchall(), reports)
                forget(folders)
        files = list((tmp_path / "mlartifacts").rglob("record.txt"))
        assert len(files) == len(folders)
        assert len(words) >= 3  # ours, mlflow's, uvicorn's
        assert not any(password in line for line in words)
        assert process.returncode == 0
        assert not [pid for pid in own if is_running(pid)]
        assert (tmp_path / "server.err").read_text() == ""
        print(f"8 runs, {sum(report.points for report in reports)} points in {seconds:.1f} s")
