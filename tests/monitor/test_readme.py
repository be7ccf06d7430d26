"""The README's example, as it stands there."""

import math
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from normscale.cli import main
from normscale.tracking.reader import read_run

ROOT = Path(__file__).parents[2]


def example() -> str:
    """Returns the code of the section on monitoring."""
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Monitoring your own loop")[2]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found[1]


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers (the extra 'deepspeed')")
def test_the_example_runs_and_its_run_can_be_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = example()
    assert len(code.splitlines()) < 30
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert done.stderr.splitlines()[-1] == f"normscale: this run is shown by: normscale show {run}"
    found = read_run(run)
    assert found.start["model"]["class"] == "GPT2LMHeadModel"
    assert found.start["rows"] == [f"transformer.h.{i}" for i in range(4)]
    assert found.summary["applied"] == found.summary["steps"] == 40
    losses = found.series["loss_train"].values
    assert losses[-1] < losses[0]
    assert found.start["norms"] == [f"transformer.h.{i}.ln_{j}" for i in range(4) for j in (1, 2)] + [
        "transformer.ln_f"
    ]
    measured = ("stream_rms", "stream_grad_norm", "grad_norm", "update_rel", "branch_ratio", "angle_online", "eps_up")
    for name in measured:
        assert (found.profiles[name].data > 0).all(), name
    assert min(found.series["logz_mean"].values) > math.log(256) - 1
    assert not [event for event in found.events if event["event"] in ("unavailable", "probe_off")]
    assert main(["show", "latest", "--runs", str(tmp_path / "runs")]) == 0
    shown = capsys.readouterr().out
    assert "GPT2LMHeadModel" in shown
    assert "stream RMS" in shown
