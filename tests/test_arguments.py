"""One line and an exit code for whatever ends a command."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from normscale.arguments import refuse_unknown, run_command
from normscale.errors import BadInput, ConfigError, NonFiniteStop, RunFailed


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


def test_the_nearest_name_is_offered():
    with pytest.raises(BadInput, match=r"'trian' is not a command; did you mean 'train'\? \(one of: train, check\)"):
        refuse_unknown("trian", ("train", "check"), "a command")


def test_a_help_text_is_no_failure():
    assert run_command(lambda: sys.exit(0)) == 0


def test_a_reader_that_leaves_is_no_error():
    code = "import normscale.arguments as a; raise SystemExit(a.run_command(lambda: print('line\\n' * 10**6) or 0))"
    command = f'{shlex.quote(sys.executable)} -c "{code}" | head -1'
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "line\n", "")
