"""What other processes call: start and end the sink, links into the UI. Imports no mlflow."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from normscale.arguments import typed
from normscale.errors import StoreError
from normscale.tracking import sink_state
from normscale.tracking.address import SERVERS, SQLITE, resolve, sync_words
from normscale.tracking.mlflow_pages import charts_path, run_path
from normscale.tracking.mlflow_store import QUIET
from normscale.tracking.spool import SPOOL
from normscale.tracking.ui_port import HERE, UI_PORT, ui_port

LOG = "sink.log"
STOPPED_S = 10.0  # what the last sync may take after a stop: whoever asked for the stop may not wait for long
_SECONDS = 10.0
_NICE = 10
_MAX_EVENT_LINKS = 3


class Sink:
    """A sink in the background and what became of it; without it only the window is missing."""

    def __init__(self, runs: Path, uri: str) -> None:
        self.runs, self.uri, self._began = Path(runs), uri, time.time()
        self.process = start_sink(self.runs, uri)

    def finish(self, timeout: float, stopped: bool = False) -> str | None:
        """Waits for the last sync; returns why MLflow does not show everything yet, None where it does.

        A sink that something ended meanwhile is noticed at once and begun again, unless the run was `stopped`, which
        leaves it a few seconds alone.
        """
        timeout = min(timeout, STOPPED_S) if stopped else timeout
        code = finish_sink(self.process, timeout)
        if code is not None and code < 0 and not stopped and self.is_behind():
            self.process = start_sink(self.runs, self.uri)
            code = finish_sink(self.process, timeout)
        mend = sync_words(self.uri, self.runs)
        if code == 0 or (code != 1 and not self.is_behind()):
            return None
        if code is None:
            return f"MLflow does not show everything yet: {timeout:.0f} s were too few; {mend} completes it"
        if code < 0:
            name = signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
            return f"the process that fills MLflow was ended by {name}; {mend} brings MLflow up to date"
        return f"MLflow is not up to date (see {self.runs / LOG}); {mend} mends it"

    def end(self) -> None:
        """Ends the sink at once."""
        _end(self.process)

    def is_behind(self) -> bool:
        """Returns whether a run or a claim was written since the start that the store is not known to hold whole."""
        from normscale.tracking.mlflow_run import is_stored

        manifests = self.runs.glob("claims/*.json")
        spools = self.runs.glob(f"*/{SPOOL}")
        if any(self._is_new(path) for path in manifests):
            return True
        return any(self._is_new(path) and not is_stored(path.parent, resolve(self.uri)) for path in spools)

    def _is_new(self, path: Path) -> bool:
        try:
            return path.stat().st_mtime >= self._began - 1
        except OSError:
            return False


def start_sink(runs: Path, uri: str, seconds: float = _SECONDS) -> "subprocess.Popen[bytes]":
    """Returns the sink as a running background process; it ends by itself when this process is gone.

    It syncs every `seconds` at low priority and says what it does in <runs>/sink.log.

    Raises:
        StoreError: the URI is no store's, or the folder of runs cannot be written.
    """
    uri = resolve(uri)
    runs = Path(runs).absolute()
    command = [sys.executable, "-m", "normscale.tracking.mlflow_sink", "--runs", str(runs), "--uri", uri]
    command += ["--follow", str(seconds), "--until-idle"]
    environment = os.environ | QUIET
    try:
        runs.mkdir(parents=True, exist_ok=True)
        with (runs / LOG).open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.PIPE,  # by which it is asked for its last sync
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # an interrupt from the keyboard is for the training, not for its records
            )
    except OSError as error:
        message = (
            f"tracking.runs: cannot write {runs} ({error.strerror}); choose another folder: tracking.runs=<folder>"
        )
        raise StoreError(message) from None


def finish_sink(process: "subprocess.Popen[bytes]", timeout: float = 60.0) -> int | None:
    """Asks the sink for its last sync and waits; returns its exit code (0: all is stored), None if it was too slow.

    A sink that was too slow is ended; what it did not store waits in the spools for the next sync. One that was ended
    before (its code is then the negative number of the signal) is not waited for.
    """
    if process.stdin is not None:
        with suppress(OSError, ValueError):  # nobody reads it any more, or it was asked before
            process.stdin.write(b"\n")  # forked children, as of a DataLoader, hold the pipe open, too
            process.stdin.close()
    try:
        return process.wait(timeout)
    except subprocess.TimeoutExpired:
        _end(process)
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def parent_gone() -> Callable[[], bool]:
    """Returns a function that says whether the process that started this one is gone, or has written to its pipe or
    closed it."""
    parent = os.getppid()
    os.nice(_NICE)

    def gone() -> bool:
        if os.getppid() != parent:
            return True
        ready, _, _ = select.select([0], [], [], 0)
        return bool(ready)  # what was written is left there: whoever asks again has the same answer

    return gone


def links(
    runs: Path, uri: str, claim_id: str, profile: str | None = None, host: str = f"{HERE}:{UI_PORT}"
) -> list[str]:
    """Returns the lines that a terminal prints for a claim: its name, its page, its charts, its first events.

    Empty when the claim is not in the store yet.
    """
    remembered = sink_state.load(Path(runs) / sink_state.CLAIMS_FILE, resolve(uri))
    base = uri.rstrip("/") if uri.startswith(SERVERS) else f"http://{host}"
    lines = []
    for key, entry in remembered.items():
        if entry.get("id") == claim_id and profile in (None, entry.get("profile")):
            experiment = str(entry["experiment"])
            lines.append(f"{claim_id}, profile {entry.get('profile')}")
            lines.append(f"claim    {base}/{run_path(experiment, str(entry['run']))}")
            lines.append(f"charts   {base}/{charts_path(experiment, key)}")
            for _, run, path in entry.get("events", [])[:_MAX_EVENT_LINKS]:
                lines.append(f"event    {base}/{run_path(experiment, run, path)}")
    return lines


def run_links(run_dir: Path, uri: str, host: str = f"{HERE}:{UI_PORT}") -> list[str]:
    """Returns the lines that a terminal prints for a run of no claim: its page, the report of its first bad event.

    Empty when the run is not in the store yet.
    """
    entry = sink_state.load(run_dir / sink_state.RUN_FILE, resolve(uri)).get("", {})
    if not {"experiment", "run"} <= entry.keys():
        return []
    base = uri.rstrip("/") if uri.startswith(SERVERS) else f"http://{host}"
    experiment, run = str(entry["experiment"]), str(entry["run"])
    lines = [f"run      {base}/{run_path(experiment, run)}"]
    return lines + ([f"event    {base}/{run_path(experiment, run, entry['event'])}"] if entry.get("event") else [])


def port_of_run(run_dir: Path, uri: str) -> int:
    """Returns the port at which the UI that knows a run of no claim is, or would be."""
    return UI_PORT if uri.startswith(SERVERS) else _port(sink_state.load(run_dir / sink_state.RUN_FILE, resolve(uri)))


def port_of_claims(runs: Path, uri: str) -> int:
    """Returns the port at which the UI that knows the claims of a folder is, or would be."""
    return UI_PORT if uri.startswith(SERVERS) else _port(sink_state.load(runs / sink_state.CLAIMS_FILE, resolve(uri)))


def _port(entries: dict[str, dict[str, Any]]) -> int:
    return ui_port(next((str(entry["run"]) for entry in entries.values() if entry.get("run")), None))


def ui_words(uri: str, default: str | None = None, port: int = UI_PORT) -> str:
    """Returns the command a person types to see a store, or the address of a server; `default` needs no --uri."""
    if uri.startswith(SERVERS):
        return uri
    if not uri.startswith(SQLITE):
        return typed("server", "--store", uri)
    options = [] if uri == default else ["--uri", uri]
    return typed("ui", *options, *(["--port", str(port)] if port != UI_PORT else []))
