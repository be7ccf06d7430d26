"""The figure of everything over depth: it shows what is finite, what is not, and what is flat as flat."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes

from normscale.tracking import depth_figure
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SpoolWriter


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Axes]:
    """Returns the panels by profile as they are drawn from now on."""
    panels: dict[str, Axes] = {}
    real = depth_figure._panel

    def panel(axes: Axes, name: str, one: object) -> None:
        panels[name] = axes
        real(axes, name, one)  # type: ignore[arg-type]

    monkeypatch.setattr(depth_figure, "_panel", panel)
    return panels


def labels(axes: Axes) -> list[str]:
    return [str(line.get_label()) for line in axes.get_lines() if not str(line.get_label()).startswith("_")]


def stream_axis(drawn: dict[str, Axes]) -> str:
    return drawn["stream_rms"].get_xlabel()


def test_each_profile_has_a_panel_with_its_first_middle_and_last_finite_record(
    tmp_path: Path, drawn: dict[str, Axes]
) -> None:
    with SpoolWriter(tmp_path / "r", 1) as spool:
        spool.start(run_id="r")
        for step in (1, 2, 3, 4, 5, 6):
            flat = np.full(8, 1.0 + 0.001 * step)
            spool.profile(step, "stream_rms", flat if step < 6 else np.where(np.arange(8) > 3, np.nan, flat))
            spool.profile(step, "grad_norm", np.logspace(-3, 0, 8))
            spool.profile(step, "attn_logit_max", [1.0, np.nan] * 4)  # every other row has no attention
            spool.profile(step, "stream_nonfinite", np.zeros(8))
    picture = depth_figure.depth_figure(read_run(tmp_path / "r"))
    assert picture.dtype == np.uint8
    assert picture.shape == (2 * 400, 2 * 645, 3)
    assert stream_axis(drawn) == "layer / L"
    assert list(drawn) == ["stream_rms", "grad_norm", "attn_logit_max"], "counts that are all 0 say nothing"
    stream, gradient, attention = drawn.values()
    assert labels(stream) == ["step 1", "step 3", "step 5", "step 6, not finite"]
    assert stream.get_ylim()[0] == 0, "what is flat looks flat"
    marks = [line for line in stream.get_lines() if line.get_marker() == "v"]
    assert [list(line.get_xdata()) for line in marks] == [pytest.approx([4 / 7, 5 / 7, 6 / 7, 1])]
    assert gradient.get_yscale() == "log"
    assert labels(attention) == ["step 1", "step 4", "step 6"]
    assert not [line for line in attention.get_lines() if line.get_marker() == "v"]


@pytest.mark.parametrize("data", [[np.nan], [0.0], [-1.0, 1e30], [np.inf, -np.inf]])
def test_any_record_can_be_drawn(data: list[float], tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "r", 1) as spool:
        spool.profile(1, "stream_rms", data)
    assert depth_figure.depth_figure(read_run(tmp_path / "r")).size
