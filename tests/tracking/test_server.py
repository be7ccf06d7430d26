import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from normscale.cli import main
from normscale.errors import StoreError
from normscale.tracking import server, sink_state
from normscale.tracking.address import resolve
from normscale.tracking.server import server_command, ui, wait_for_health
from normscale.tracking.sink_process import run_links
from tests.tracking.serving import free_port, is_running


def test_the_command_of_a_server(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE", "true")
    store = "postgresql://u:secret@h/db"
    command, environment = server_command(store, tmp_path, 5123, "10.0.0.7", ["node7", "p.lab"], ["p.lab"])
    own = "localhost,127.0.0.1,[::1],localhost:*,127.0.0.1:*,[[]::1]:*"
    assert command == [
        *[sys.executable, "-m", "mlflow", "server", "--host", "10.0.0.7", "--port", "5123", "--workers", "1"],
        *["--serve-artifacts", "--artifacts-destination", str(tmp_path)],
        *["--allowed-hosts", f"{own},node7,node7:5123,p.lab,p.lab:5123"],
        *["--cors-allowed-origins", "http://node7:5123,http://p.lab:5123,http://p.lab,https://p.lab"],
        *["--uvicorn-opts", "--log-level warning"],
    ]
    assert environment["MLFLOW_BACKEND_STORE_URI"] == "postgresql+psycopg2://u:secret@h/db"
    assert environment["MLFLOW_DISABLE_TELEMETRY"] == "true"
    assert environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert "MLFLOW_SERVER_DISABLE_SECURITY_MIDDLEWARE" not in environment
    alone, _ = server_command(store, tmp_path, 5123)
    assert alone[alone.index("--host") + 1] == "127.0.0.1"
    assert alone[alone.index("--allowed-hosts") + 1] == own
    assert "--cors-allowed-origins" not in alone


PLACES = {
    "127.0.0.1": ("http://127.0.0.1:80", "for this machine only (--host 0.0.0.0: for every machine that reaches it)"),
    "10.0.0.7": (
        "http://10.0.0.7:80",
        "for every machine that reaches it; it asks for no password, does not encrypt",
    ),
}


@pytest.mark.parametrize("host", PLACES)
def test_a_server_says_its_address_and_who_can_reach_it(host):
    served = [] if host == "127.0.0.1" else ["10.0.0.7", "node7", "p.lab:8443"]
    address, who = PLACES[host]
    said = server._server_greeting(host, host, 80, served)
    assert said[0] == f"tracking.uri={address}"
    assert said[1:-3] == (["also called http://node7:80"] if served else [])
    assert said[-3] == f"listens on {host} port 80, {who}"
    assert said[-2] == f"in a browser: {address}/#/experiments?workflowType=machine_learning"


def test_a_name_that_is_loopback_here_is_said_to_lead_no_further():
    said = server._server_greeting("127.0.0.2", "127.0.1.1", 80, [])
    assert said[1].startswith(
        "listens on 127.0.1.1 port 80, for this machine only (127.0.0.2 leads no further here; --host"
    )


def test_a_server_that_cannot_start_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server, "_serve", lambda *_: pytest.fail("it was started"))
    (tmp_path / "text").write_text("no database")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, says in {
            ("--port", port): f"port {port}: cannot be used (Address already in use); choose another with --port",
            ("--port", "99999"): "port 99999: cannot be used",
            ("--port", "x"): "'x' is not a port",
            ("--host", "192.0.2.77"): "--host: 192.0.2.77 is not an address of this machine; it has 127.0.0.1",
            ("--host", "no such"): "--host: 'no such' is no name or address of this machine",
            ("--name", "*"): "--name: '*' is not the name of a machine",
            (
                "--store",
                "text",
            ): "--store: 'text' is not the address of a tracking store; write sqlite:///<file> or post",
            ("--store", f"sqlite:///{tmp_path}/text"): f"--store: {tmp_path}/text is not an SQLite database",
            ("--store", "sqlite:////proc/x/y.db"): "--store: cannot write /proc/x/y.db",
            ("--store", "http://h:1"): "--store: http://h:1 is a server already",
            ("--store", "postgresql://u:hidden@h/d"): "'postgresql://u:***@h/d' holds a secret",
            ("--artifacts", str(tmp_path / "text")): f"--artifacts: cannot write {tmp_path}/text",
            ("--hots", "x"): "--hots: normscale server has no such option",
        }.items():
            free = () if "--port" in words else ("--port", str(free_port()))
            assert main(["server", *words, *free]) == 2
            said = capsys.readouterr()
            assert says in said.err
            assert (said.out, said.err.count("\n")) == ("", 1)
            assert "hidden" not in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


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
    lines = server._ui_greeting(uri, 80, runs)
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


def test_a_ui_that_cannot_start_says_why(tmp_path):
    with pytest.raises(StoreError, match="server already"):
        ui("http://127.0.0.1:5000", 5123)
    with pytest.raises(StoreError, match=r"is not a file here; .*server"):
        ui("postgresql://h/db", 5123)
    with pytest.raises(StoreError, match="is not there yet"):
        ui(f"sqlite:///{tmp_path}/mlflow.db", 5123)
    (tmp_path / "mlflow.db").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StoreError, match="choose another with --port"):
            ui(f"sqlite:///{tmp_path}/mlflow.db", taken.getsockname()[1])
    assert not wait_for_health(free_port(), 0.3)


UI = """
import subprocess, sys, time
from pathlib import Path
from normscale.tracking import server as serving
server = "import os, sys, time; print('noise', flush=True); open(sys.argv[1], 'w').write(str(os.getpid()));"
server += sys.argv[4]
serving.server_command = lambda *args: ([sys.executable, "-c", server, sys.argv[3]], None)
def healthy(port, timeout, alive, address):
    while alive() and not (Path(sys.argv[3]).exists() and Path(sys.argv[3]).read_text()):
        time.sleep(0.05)
    return alive()
serving.wait_for_health = healthy
sys.exit(serving.ui(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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
        assert process.stdout.read() == "the MLflow server has stopped\n", (
            "what the server says is for nobody while it serves"
        )
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_server_that_fails_is_heard(tmp_path):
    (tmp_path / "mlflow.db").touch()
    words = [sys.executable, "-c", UI, f"sqlite:///{tmp_path}/mlflow.db", str(free_port()), str(tmp_path / "pid")]
    done = subprocess.run([*words, "sys.exit('the disk is full')"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "ended with exit code 1\nnoise\nthe disk is full\n" in done.stderr


def test_a_store_of_another_version_is_one_line_with_the_mend(tmp_path):
    (tmp_path / "mlflow.db").touch()
    words = [sys.executable, "-c", UI, f"sqlite:///{tmp_path}/mlflow.db", str(free_port()), str(tmp_path / "pid")]
    old = "sys.exit('mlflow.exceptions.MlflowException: Detected out-of-date database schema (found version 1)')"
    done = subprocess.run([*words, old], capture_output=True, text=True)
    assert "StoreError: tracking.uri: the store was made by another version of MLflow; copy the database" in done.stderr


STUBBORN = """import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, '-c', 'import signal, time; signal.signal(15, 1); time.sleep(60)'])
open(sys.argv[1] + '.child', 'w').write(str(child.pid))
time.sleep(60)"""


def test_a_server_that_will_not_end_is_killed_with_its_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(server, "_END_S", 0.3)
    process = subprocess.Popen([sys.executable, "-c", STUBBORN, str(tmp_path / "pid")], start_new_session=True)
    worker = tmp_path / "pid.child"
    while not (worker.exists() and worker.read_text()):
        assert process.poll() is None
    server._end(process)
    assert process.returncode == -signal.SIGKILL
    given_up = time.monotonic() + 20  # a signal was sent to it, too; when it gets there is the kernel's to say
    while is_running(int(worker.read_text())):
        assert time.monotonic() < given_up
        time.sleep(0.05)
