import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from normscale.arguments import typed
from normscale.errors import StoreError
from normscale.tracking import sink_process, sink_state
from normscale.tracking.mlflow_sink import sync
from normscale.tracking.mlflow_store import resolve
from normscale.tracking.reader import read_run
from normscale.tracking.sink_process import (
    LOG,
    Sink,
    finish_sink,
    run_links,
    start_sink,
    ui,
    ui_command,
    wait_for_health,
)
from tests.tracking.made import make_run

STARTER = """
import sys, time
from pathlib import Path
from normscale.tracking.sink_process import start_sink
process = start_sink(Path(sys.argv[1]), sys.argv[2], seconds=0.2)
print(process.pid, flush=True)
time.sleep(100)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition, seconds=40):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.05)


def stored(uri):
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        names = database.execute("select value from tags where key = 'normscale.run'").fetchall()
    return sorted(name for (name,) in names)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_sink_follows_at_low_priority_and_finishes_with_a_last_sync(runs, new_store):
    uri = new_store()
    first = make_run(runs, "post", steps=2)
    process = start_sink(runs, uri, seconds=0.2)
    until(lambda: stored(uri) == [first])
    assert os.getpriority(os.PRIO_PROCESS, process.pid) >= 10
    second = make_run(runs, "pre", steps=2)
    assert finish_sink(process, 60) == 0
    assert stored(uri) == sorted([first, second])
    log = (runs / LOG).read_text()
    assert "2 runs" in log.splitlines()[-1]
    assert "Traceback" not in log
    assert "View run" not in log


def test_the_sink_ends_by_itself_when_its_starter_was_killed(runs, new_store):
    uri = new_store()
    first = make_run(runs, "post", steps=2)
    starter = subprocess.Popen([sys.executable, "-c", STARTER, str(runs), uri], stdout=subprocess.PIPE)
    sink = int(starter.stdout.readline())
    starter.stdout.close()
    until(lambda: stored(uri) == [first])
    second = make_run(runs, "pre", steps=2)
    starter.kill()
    starter.wait()
    until(lambda: not is_running(sink))
    assert stored(uri) == sorted([first, second])


def test_a_sink_without_a_server_ends_with_a_line_in_its_log(runs):
    make_run(runs, steps=2)
    process = start_sink(runs, "http://127.0.0.1:9", seconds=60)
    began = time.monotonic()
    assert finish_sink(process, 30) == 1
    assert time.monotonic() - began < 20
    assert "http://127.0.0.1:9 does not answer" in (runs / LOG).read_text()


def test_a_sink_that_is_too_slow_is_ended(tmp_path):
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(slow, stdin=subprocess.PIPE)
    assert finish_sink(process, 0.2) is None
    assert process.poll() == -signal.SIGTERM


def test_a_sink_that_was_killed_is_noticed_at_once(runs, new_store):
    sink = Sink(runs, new_store())
    make_run(runs, steps=2)
    sink.process.terminate()
    sink.process.wait()
    began = time.monotonic()
    said = sink.finish(60, stopped=True)
    assert time.monotonic() - began < 2
    assert said == f"the process that fills MLflow was ended by SIGTERM; {typed('sync')} brings MLflow up to date"


def test_a_sink_that_was_killed_alone_is_begun_again(runs, new_store):
    uri = new_store()
    sink = Sink(runs, uri)
    run = make_run(runs, steps=2, every=1)
    sink.process.kill()
    sink.process.wait()
    assert sink.finish(60) is None
    assert stored(uri) == [run]


def test_a_sink_that_was_killed_when_it_had_stored_everything_is_no_fault(runs, new_store):
    run = make_run(runs, steps=2)
    os.utime(runs / run / "spool.jsonl")
    sink = Sink(runs, new_store())
    until(lambda: not sink.is_behind(), 60)
    sink.process.kill()
    sink.process.wait()
    assert sink.finish(60, stopped=True) is None


def test_a_stop_leaves_the_last_sync_a_few_seconds_and_says_what_is_missing(runs, new_store, monkeypatch):
    monkeypatch.setattr(sink_process, "STOPPED_S", 0.3)
    slow = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(sink_process, "start_sink", lambda *_: subprocess.Popen(slow, stdin=subprocess.PIPE))
    sink = Sink(runs, new_store())
    make_run(runs, steps=2)
    began = time.monotonic()
    said = sink.finish(60, stopped=True)
    assert time.monotonic() - began < 10
    assert said.endswith(f"{typed('sync')} completes it")


TRAIN = """
import sys
from normscale.cli import main
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.slow
def test_a_whole_job_that_is_stopped_ends_soon(runs, new_store):
    words = ["configs/train/quick.yaml", "model.M=1", "train.steps=100000", "data.max_bytes=40_000"]
    words += ["train.eval_batches=1", f"tracking.runs={runs}", f"tracking.uri={new_store()}"]
    command = [sys.executable, "-c", TRAIN, *words]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as job:
        until(lambda: list(runs.glob("*/spool.jsonl")) and (runs / LOG).exists(), 100)
        spool = next(runs.glob("*/spool.jsonl"))
        until(lambda: '"step":20,' in spool.read_text(), 100)
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
        for pid in (*map(int, children), job.pid):  # as a scheduler does: every process of the job
            os.kill(pid, signal.SIGTERM)
        began = time.monotonic()
        assert job.wait(60) == 143
        assert time.monotonic() - began < 15
        said = job.stderr.read()
    assert "stopped by SIGTERM" in said
    assert "Traceback" not in said
    assert read_run(spool.parent).end["outcome"] == "interrupted"


def test_the_command_of_the_ui(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command, environment = ui_command("sqlite:///mlflow.db", None, 5123)
    store, files = f"sqlite:///{tmp_path}/mlflow.db", f"{tmp_path}/mlartifacts"
    assert command == [
        *[sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", "5123", "--workers", "1"],
        *["--backend-store-uri", store, "--artifacts-destination", files],
        *["--uvicorn-opts", "--log-level warning"],
    ]
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    with pytest.raises(StoreError, match="server already"):
        ui_command("http://127.0.0.1:5000", None, 5123)


def test_the_ui_names_finished_claims_first_then_the_newest_runs_with_their_events(tmp_path):
    uri, runs = resolve("sqlite:///mlflow.db"), tmp_path
    claim = {"profile": "cpu", "experiment": "7", "events": []}
    claims = {
        "a-cpu": claim | {"id": "a", "run": "ra", "verdict": "pending"},
        "b-cpu": claim | {"id": "b", "run": "rb", "verdict": "supported"},
    }
    sink_state.save(runs / sink_state.CLAIMS_FILE, uri, claims)
    others = {"old": {"": {"experiment": 1, "run": "r1"}}, "of-claim": {"a-cpu": {}}}
    for age, (name, entry) in enumerate(others.items()):
        (runs / name).mkdir()
        (runs / name / "spool.jsonl").write_text("")
        os.utime(runs / name / "spool.jsonl", (age, age))
        sink_state.save(runs / name / sink_state.RUN_FILE, uri, entry)
    new = {"": {"experiment": 1, "run": "r2", "event": "events/x/report.html"}}
    (runs / "new").mkdir()
    (runs / "new" / "spool.jsonl").write_text("")
    sink_state.save(runs / "new" / sink_state.RUN_FILE, uri, new)
    lines = sink_process._greeting(uri, 80, runs)
    end = "?workflowType=machine_learning"
    assert [line.split()[0].rstrip(",") for line in lines[:3]] == ["b", "claim", "charts"]
    assert lines[3] == f"not finished: a, profile cpu  http://127.0.0.1:80/#/experiments/7/runs/ra{end}"
    assert lines[4:9] == [
        "new",
        f"run      http://127.0.0.1:80/#/experiments/1/runs/r2{end}",
        f"event    http://127.0.0.1:80/#/experiments/1/runs/r2/artifacts/events/x/report.html{end}",
        "old",
        f"run      http://127.0.0.1:80/#/experiments/1/runs/r1{end}",
    ]
    assert run_links(runs / "of-claim", uri) == []
    assert run_links(runs / "old", uri)[0].startswith("run      http://127.0.0.1:5000/#/")


def test_a_run_that_failed_is_linked_with_its_event_once_it_is_stored(runs, new_store):
    uri = new_store()
    run = make_run(runs, "post", 3, steps=6, nan_at=3)
    assert run_links(runs / run, uri) == []
    assert sync(runs, uri).ok
    page, event = run_links(runs / run, uri)
    assert page.startswith("run      http://127.0.0.1:5000/#/experiments/")
    assert event.endswith("/artifacts/events/step-000003-nonfinite/report.html?workflowType=machine_learning")


def test_a_ui_that_cannot_start_says_why(tmp_path):
    with pytest.raises(StoreError, match="is not there yet"):
        ui(f"sqlite:///{tmp_path}/mlflow.db", 5123)
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StoreError, match="choose another with --port"):
            ui(f"sqlite:///{tmp_path}/mlflow.db", taken.getsockname()[1])
    assert not wait_for_health(free_port(), 0.3)


class Server:
    """A real tracking server on one database, that can be killed and started again on its port."""

    def __init__(self, uri, log):
        self.uri, self.log, self.port = uri, log, free_port()
        self.process = None

    def start(self):
        command, environment = ui_command(self.uri, None, self.port)
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        assert wait_for_health(self.port, 90, lambda: self.process.poll() is None), self.log.read_text()

    def kill(self):
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_loses_nothing_and_doubles_nothing(runs, new_store, tmp_path, monkeypatch):
    from normscale.tracking.mlflow_requests import Store

    names = [make_run(runs, scheme, 4, steps=10, every=5) for scheme in ("post", "pre")]
    database = new_store()
    server = Server(database, tmp_path / "server.log")
    uri = f"http://127.0.0.1:{server.port}"
    monkeypatch.setattr("mlflow.utils.validation.MAX_METRICS_PER_BATCH", 40)
    sent = Store.send_points

    def half(self, what, run, points):
        sent(self, what, run, points[:60])
        server.kill()
        return sent(self, what, run, points)

    try:
        server.start()
        with monkeypatch.context() as patch:
            patch.setattr(Store, "send_points", half)
            report = sync(runs, uri)
        assert len(report.failures) == 1
        assert "does not answer" in report.failures[0]
        assert report.points == 60
        assert sync(runs, uri).seconds < 5
        server.start()
        assert sync(runs, uri).failures == []
        assert sync(runs, uri).points == 0
    finally:
        server.kill()
    with sqlite3.connect(database.removeprefix("sqlite:///")) as rows:
        assert stored(database) == sorted(names)
        steps = rows.execute("select run_uuid, step from metrics where key = '1-loss/train' order by 1, 2").fetchall()
        doubled = rows.execute("select 1 from metrics group by run_uuid, key, step having count(*) > 1").fetchall()
    assert [step for _, step in steps] == [*range(11), *range(11)]
    assert doubled == []
    artifacts = Path(database.removeprefix("sqlite:///")).with_name("mlartifacts")
    assert len(list(artifacts.rglob("record.txt"))) == 2


UI = """
import subprocess, sys, time
from pathlib import Path
from normscale.tracking import sink_process
server = "import os, sys, time; print('noise', flush=True); open(sys.argv[1], 'w').write(str(os.getpid()));"
server += sys.argv[4]
sink_process.ui_command = lambda *args: ([sys.executable, "-c", server, sys.argv[3]], None)
def healthy(port, timeout, alive):
    while alive() and not (Path(sys.argv[3]).exists() and Path(sys.argv[3]).read_text()):
        time.sleep(0.05)
    return alive()
sink_process.wait_for_health = healthy
sys.exit(sink_process.ui(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_ui_takes_its_server_with_it(tmp_path, number):
    (tmp_path / "mlflow.db").touch()
    port, words = free_port(), [sys.executable, "-c", UI, f"sqlite:///{tmp_path}/mlflow.db"]
    words += [str(port), str(tmp_path / "pid"), "time.sleep(60)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [process.stdout.readline() for _ in range(3)]
        assert said[0].startswith("starting the MLflow server")
        assert said[1] == f"MLflow UI: http://127.0.0.1:{port}/#/experiments?workflowType=machine_learning\n"
        assert "Ctrl-C here stops the server" in said[2]
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.stdout.read() == "", "what the server says is for nobody while it serves"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_server_that_fails_is_heard(tmp_path):
    (tmp_path / "mlflow.db").touch()
    words = [sys.executable, "-c", UI, f"sqlite:///{tmp_path}/mlflow.db", str(free_port()), str(tmp_path / "pid")]
    done = subprocess.run([*words, "sys.exit('the disk is full')"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ended with exit code 1\nnoise\nthe disk is full\n" in done.stderr
