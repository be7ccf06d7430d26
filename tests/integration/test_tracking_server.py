"""`normscale server` for real: who may call it, one run per job, files through it, and a password that stays unseen."""

import os
import socket
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from normscale.cli import main
from normscale.tracking.mlflow_sink import sync
from tests.tracking.made import make_run
from tests.tracking.serving import ROOT, ask, children, free_port, gate, is_running, shared_server

SEARCH = "/api/2.0/mlflow/experiments/search"
SECRET = "Pass-never-to-be-seen-7391"
OPEN = "--host 0.0.0.0: for every machine that reaches it"
SMALL = ["model.M=2", "data.max_bytes=40_000", "train.steps=6", "train.eval_batches=1", "probes.every=1"]


@contextmanager
def watched() -> Iterator[set[tuple[str, str]]]:
    """Gives the (number, command line) of all processes that were seen during the block."""
    seen: set[tuple[str, str]] = set()
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.3):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                try:
                    seen.add((path.parent.name, path.read_text(errors="replace")))
                except OSError:
                    continue

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as opened:
        return opened.execute(query).fetchall()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_job_of_two_ranks_is_one_run_of_a_shared_server_and_its_password_is_nowhere(tmp_path: Path) -> None:
    place, runs, port = tmp_path / "server", tmp_path / "runs", free_port()
    place.mkdir()
    with shared_server(place, "--port", str(port)) as (process, said), gate(port, "me", SECRET) as (uri, guard):
        assert said[0].startswith(f"starting the MLflow server for {place}/server.db, files in {place}/mlartifacts")
        assert said[1:3] == [
            f"tracking.uri=http://127.0.0.1:{port}",
            f"listens on 127.0.0.1 port {port}, for this machine only ({OPEN})",
        ]
        own = children(process.pid)
        words = [str(ROOT / "configs/train/quick.yaml"), *SMALL, f"tracking.runs={runs}", f"tracking.uri={uri}"]
        secrets = {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": SECRET}
        with watched() as seen:
            done = subprocess.run(
                [sys.executable, "-m", "launch", "local", "--nproc", "2", "--device", "cpu", "--", *words],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT)} | secrets,
                capture_output=True,
                text=True,
                timeout=200,
            )
        assert (done.returncode, done.stderr) == (0, "")
        assert guard.passed > 10
        denied = sync(runs, uri)  # this process has no password
    assert len(denied.failures) == 1
    assert f"tracking server {uri} wants another password (401); set MLFLOW_TRACKING_USERNAME" in denied.failures[0]
    database = place / "server.db"
    assert rows(database, "select count(*) from runs") == [(1,)]
    (run_dir,) = (path.parent for path in runs.glob("*/spool.jsonl"))
    assert rows(database, "select value from tags where key = 'normscale.run'") == [(run_dir.name,)]
    steps = rows(database, "select step from metrics where key = '1-loss/train' order by step")
    assert steps == [(step,) for step in range(1, 7)]
    assert len(list((place / "mlartifacts").rglob("record.txt"))) == 1
    assert {path.name for path in tmp_path.iterdir()} == {"server", "runs"}
    texts = [*(line for _, line in seen), done.stdout, *said]
    texts += [path.read_bytes().decode(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    sinks = {number for number, line in seen if "mlflow_sink" in line and str(runs) in line}
    assert len(sinks) == 1  # of two ranks one writes; the watch has seen the process that knew the password
    assert not [text[:200] for text in texts if SECRET in text]
    assert process.returncode == 0
    assert len(own) >= 2
    assert not [pid for pid in own if is_running(pid)]


@pytest.fixture
def _lab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of a network, all of them this machine's."""
    look_up = socket.getaddrinfo

    def known(host: str | None, *rest: object, **options: object) -> object:
        return look_up("127.0.0.1" if host in ("node7", "node8") else host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", known)


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.usefixtures("_lab")
def test_runs_of_a_node_without_a_server_are_replayed_later_once_and_by_the_names_it_knows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    runs, uri = tmp_path / "node3", f"http://node7:{port}"
    names = [make_run(runs, scheme, 3, steps=10, every=5, end=False) for scheme in ("post", "pre")]
    words = ["sync", "--uri", uri, *(str(runs / name) for name in names)]
    assert main(words) == 1
    said = capsys.readouterr().out
    assert f"tracking server {uri} does not answer" in said
    assert f'sync ARGS="--uri {uri}"` replays' in said
    place = tmp_path / "server"
    place.mkdir()
    with shared_server(place, "--port", str(port), "--name", "node7"):
        for host, status in {
            f"node7:{port}": 200,
            f"localhost:{port}": 200,
            "localhost:1234": 200,  # the near end of a tunnel
            f"node8:{port}": 403,
            f"10.evil.example:{port}": 403,  # which mlflow's own list lets in
            "": 403,
        }.items():
            assert ask(port, SEARCH, host, "POST", '{"max_results": 1}') == status, host
        for origin, status in {
            f"http://node7:{port}": 200,
            "http://evil.example": 403,
            f"http://node8:{port}": 403,
        }.items():
            assert ask(port, SEARCH, f"node7:{port}", "POST", '{"max_results": 1}', Origin=origin) == status, origin
        refused = sync(runs, f"http://node8:{port}")
        assert len(refused.failures) == 1
        assert "does not know itself as node8; start it with normscale server --name node8" in str(refused)
        assert main(words) == 0
        counts = rows(place / "server.db", "select run_uuid, key, count(*) from metrics group by 1, 2")
        for path in runs.glob("*/sink.json"):
            path.unlink()
        assert main(["sync", "--uri", uri, str(runs)]) == 0
    assert "2 runs, 0 claims" in capsys.readouterr().out
    assert rows(place / "server.db", "select run_uuid, key, count(*) from metrics group by 1, 2") == counts
    assert {count for _, key, count in counts if key == "1-loss/train"} == {11}
    assert rows(place / "server.db", "select count(*) from runs") == [(2,)]
