"""One line and an exit code for whatever ends a command."""

import os
import re
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import normscale
from normscale.arguments import refuse_unknown, run_command, stoppable, to_stderr
from normscale.errors import BadInput, ConfigError, NonFiniteStop, RunFailed

NO_MEMORY = "out of memory; make the model, the batch or the context smaller"
LOST = "lost the connection to another rank; the first rank that failed says why"


def raising(error: BaseException):
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("model.N: 0 is wrong (a.yaml:3)"), 2, "model.N: 0 is wrong (a.yaml:3)"),
        (RunFailed("worker 3 ended"), 1, "worker 3 ended"),
        (NonFiniteStop("loss is NaN at step 7"), 3, "loss is NaN at step 7"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 1, NO_MEMORY),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."), 1, NO_MEMORY),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA out of memory. Tried to allocate"), 1, NO_MEMORY),
        (RuntimeError("CUDA error: out of memory"), 1, NO_MEMORY),
        (OSError(12, "Cannot allocate memory"), 1, NO_MEMORY),
        (RuntimeError("[../gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:5"), 1, LOST),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection reset by peer"), 1, LOST),
        (RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1800000ms for recv"), 1, LOST),
        (type("DistBackendError", (RuntimeError,), {})("NCCL error: remote process exited or timeout"), 1, LOST),
    ],
)
def test_code_and_line(error: BaseException, code: int, line: str):
    said: list[str] = []
    assert run_command(raising(error), said.append) == code
    assert said == [line]


def test_a_bug_keeps_its_traceback_in_the_file_it_names(capsys: pytest.CaptureFixture[str]):
    assert run_command(raising(ZeroDivisionError("by\nzero"))) == 1
    line = capsys.readouterr().err
    assert line.startswith("normscale: this is a bug in normscale: ZeroDivisionError: by zero; traceback: ")
    assert line.count("\n") == 1
    path = Path(line.rpartition("traceback: ")[2].strip())
    assert "ZeroDivisionError: by\nzero" in path.read_text()
    path.unlink()


def test_a_traceback_is_shown_only_when_asked_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    run_command(raising(BadInput("x")))
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("NORMSCALE_DEBUG", "1")
    run_command(raising(BadInput("x")))
    assert "Traceback" in capsys.readouterr().err


def test_several_mistakes_are_each_marked(capsys: pytest.CaptureFixture[str]):
    run_command(raising(ConfigError("a\nb")))
    assert capsys.readouterr().err == "normscale: a\nnormscale: b\n"


@pytest.mark.parametrize("kind", ["full", "nobody reads", "closed", "none"])
def test_what_cannot_be_said_ends_nothing(kind: str, monkeypatch: pytest.MonkeyPatch, capsys):
    if kind == "nobody reads":
        there, here = os.pipe()
        os.close(there)
        stream = os.fdopen(here, "w", buffering=1)
    else:
        stream = open("/dev/full", "w", buffering=1)  # noqa: SIM115
    if kind == "closed":
        with suppress(OSError):
            stream.close()
    monkeypatch.setattr(sys, "stderr", None if kind == "none" else stream)
    to_stderr("one\ntwo")
    monkeypatch.undo()
    with suppress(OSError):
        stream.close()
    assert capsys.readouterr().out == ""


def test_what_training_calls_says_things_in_no_other_way():
    package = Path(normscale.__file__).parent
    parts = ("monitor", "probes", "train", "models", "norms", "ops", "schemes", "data")
    files = [package / "tracking/spool.py", *(file for part in parts for file in (package / part).rglob("*.py"))]
    assert len(files) > 100
    said = re.compile(r"sys\.stderr|\bprint\(|print_exc")
    assert [str(file) for file in files if said.search(file.read_text())] == []


def test_the_nearest_name_is_offered():
    with pytest.raises(BadInput, match=r"'trian' is not a command; did you mean 'train'\? \(one of: train, check\)"):
        refuse_unknown("trian", ("train", "check"), "a command")


def test_a_help_text_is_no_failure():
    assert run_command(lambda: sys.exit(0)) == 0


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize(
    ("where", "out", "err"),
    [
        ("| head -n 1", "line\n", "on\n"),
        (">/dev/full", "", "on\nnormscale: stdout: some output was lost (No space left on device)\n"),
        (">&-", "", "on\n"),
        (">/dev/full 2>&1", "", ""),
        (">&- 2>&-", "", ""),
    ],
)
def test_a_lost_output_ends_nothing_and_the_code_is_the_command_s(where: str, out: str, err: str, code: int):
    script = f"""
import os, sys, normscale.arguments as a
def command():
    for _ in range(20):
        print('line', flush=True)
        print('line' * 10**4)
    os.close(os.open(os.devnull, os.O_RDONLY)) if os.open(os.devnull, os.O_RDONLY) > 2 else sys.exit(9)
    print('on', file=sys.stderr)
    return {code}
raise SystemExit(a.run_command(command))
"""
    command = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} {where}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_once_and_the_handlers_come_back(number: int, code: int):
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)]
    said: list[str] = []

    def command() -> int:
        with stoppable():
            try:
                signal.raise_signal(number)
            finally:
                signal.raise_signal(number)  # the ending is not disturbed
                signal.raise_signal(signal.SIGTERM)
        return 0

    assert run_command(command, said.append) == code
    assert said == [f"stopped by {signal.Signals(number).name}"]
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)] == before


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stoppable():
            signal.raise_signal(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)
