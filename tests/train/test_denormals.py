"""Flushing denormals: all threads or none, and never by mistake."""

import os
import subprocess
import sys

import pytest
import torch

from normscale.errors import ConfigError
from normscale.train.denormals import denormals, flushed


def small() -> int:
    """The number of 4 denormal products that are not 0."""
    return int((torch.full((4,), 1e-20) * torch.full((4,), 1e-20)).view(torch.int32).count_nonzero())


def test_one_thread_can_flush_run_by_run() -> None:
    assert torch.get_num_threads() == 1
    for flush in (True, False, True, False):
        with denormals(flush):
            assert flushed() == ("all" if flush else "none")
            assert small() == (0 if flush else 4)
        assert flushed() == "none"


def test_it_is_taken_back_when_a_run_fails() -> None:
    with pytest.raises(RuntimeError), denormals(True):
        raise RuntimeError
    assert flushed() == "none"


HEAD = """
import torch
from normscale.errors import ConfigError
from normscale.train.denormals import denormals, flushed
"""
EARLY = """
with denormals(True):
    x = torch.full((1000, 1000), 1e-20)
    print(flushed(), int((x * x).view(torch.int32).count_nonzero()))
"""
LATE = """
torch.ones(1000, 1000) * 2
try:
    with denormals(True):
        print("too late, and not seen")
except ConfigError as error:
    print(error)
"""
MIXED = """
with denormals(True):
    pass
try:
    with denormals(False):
        print("workers flush, and not seen")
except ConfigError as error:
    print(error)
"""
REFUSED = "start a fresh process, or set OMP_NUM_THREADS=1"


@pytest.mark.parametrize(("script", "said"), [(EARLY, "all 0"), (LATE, REFUSED), (MIXED, REFUSED)])
def test_several_threads_flush_from_the_start_or_never(script: str, said: str) -> None:
    environ = os.environ | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", HEAD + script], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip().endswith(said)


def test_a_processor_without_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_flush_denormal", lambda on: False)
    with pytest.raises(ConfigError, match="true, but this processor has no such flag"), denormals(True):
        pass
    with denormals(False):
        pass
