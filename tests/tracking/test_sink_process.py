import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import normscale
from normscale.tracking import sink_process
from normscale.tracking.address import sync_words
from normscale.tracking.mlflow_sink import sync
from normscale.tracking.reader import read_run
from normscale.tracking.sink_process import LOG, Sink, finish_sink, run_links, start_sink
from tests.monitor.made import batches, net, train
from tests.tracking.made import make_run
from tests.tracking.serving import Server, is_running

STARTER = """
import sys, time
from pathlib import Path
from normscale.tracking.sink_process import start_sink
process = start_sink(Path(sys.argv[1]), sys.argv[2], seconds=0.2)
print(process.pid, flush=True)
time.sleep(100)
"""


def until(condition, seconds=40):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "too slow"
        time.sleep(0.05)


def stored(uri):
    with sqlite3.connect(uri.removeprefix("sqlite:///")) as database:
        names = database.execute("select value from tags where key = 'normscale.run'").fetchall()
    return sorted(name for (name,) in names)


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


WAITER = """
import time
from normscale.tracking.sink_process import parent_gone
gone = parent_gone()
print("ready", flush=True)
while not gone():
    time.sleep(0.02)
assert gone(), "whoever asks again has the same answer"
"""


def test_a_sink_is_asked_to_end_though_another_process_holds_its_pipe():
    """As the workers of a DataLoader do that were forked while it was open."""
    process = subprocess.Popen([sys.executable, "-c", WAITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    holder = [sys.executable, "-c", "import time; time.sleep(300)"]
    worker = subprocess.Popen(holder, pass_fds=[process.stdin.fileno()])
    try:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.2)
        assert process.poll() is None
        assert finish_sink(process, 30) == 0
        assert worker.poll() is None
    finally:
        worker.kill()
        worker.wait()
        process.stdout.close()


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
    mend = sync_words(sink.uri, runs)
    assert said == f"the process that fills MLflow was ended by SIGTERM; {mend} brings MLflow up to date"


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
    assert said.endswith(f"{sync_words(sink.uri, runs)} completes it")


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


def test_a_run_that_failed_is_linked_with_its_event_once_it_is_stored(runs, new_store):
    uri = new_store()
    run = make_run(runs, "post", 3, steps=6, nan_at=3)
    assert run_links(runs / run, uri) == []
    assert sync(runs, uri).ok
    page, event = run_links(runs / run, uri)
    assert page.startswith("run      http://127.0.0.1:5000/#/experiments/")
    assert event.endswith("/artifacts/events/step-000003-nonfinite/report.html?workflowType=machine_learning")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_is_away_while_training_goes_on_has_every_step_at_the_end(runs, new_store, tmp_path, monkeypatch):
    """PR-025 (miles#2571): it is killed at step 2 and comes back after step 4."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    database = new_store()
    server = Server(database, tmp_path)

    def points():
        with sqlite3.connect(database.removeprefix("sqlite:///")) as rows:
            return rows.execute("select step from metrics where key = '1-loss/train' order by 1").fetchall()

    model = net(1)
    try:
        server.start()
        with normscale.Monitor(model, runs=runs, every=1, uri=server.uri) as monitor:
            train(model, monitor, batches(2))
            until(points, 100)
            server.kill()
            train(model, monitor, batches(2))
            server.start()
            train(model, monitor, batches(1))
        assert sync(runs, server.uri).ok  # where the last one at the end of the run was too slow
    finally:
        server.kill()
    assert [step for (step,) in points()] == [1, 2, 3, 4, 5]
    assert read_run(monitor.run_dir).end["exit_code"] == 0


@pytest.mark.slow
def test_a_server_that_dies_in_the_middle_loses_nothing_and_doubles_nothing(runs, new_store, tmp_path, monkeypatch):
    from normscale.tracking.mlflow_requests import Store

    names = [make_run(runs, scheme, 4, steps=10, every=5) for scheme in ("post", "pre")]
    database = new_store()
    server = Server(database, tmp_path)
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
