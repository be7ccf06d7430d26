"""The part that judges waits for the others."""

from pathlib import Path

import pytest

from normscale.claims import waiting
from normscale.claims.parts import Part, leased
from normscale.claims.waiting import wait_for_others
from normscale.errors import RunFailed


def test_it_waits_while_runs_are_missing_and_while_somebody_holds_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(waiting, "PAUSE_S", 0.0)
    left = iter([2, 1, 0])
    wait_for_others(tmp_path, ["depth"], "cpu", lambda: next(left))
    assert next(left, None) is None
    assert capsys.readouterr().out == "waiting for the other parts\n"

    held = leased(tmp_path, ["depth"], "cpu", Part(2, 2))
    held.__enter__()
    looks = 0

    def end_at_the_second_look(_: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            held.__exit__(None, None, None)

    monkeypatch.setattr("time.sleep", end_at_the_second_look)
    wait_for_others(tmp_path, ["depth"], "cpu", lambda: 0, patience_s=0.0)
    assert looks == 2
    assert ", part 2/2)" in capsys.readouterr().out


def test_runs_that_nobody_works_on_are_not_waited_for_for_ever(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match=r"3 runs of depth have no end, and nobody .* start the parts that are missing"):
        wait_for_others(tmp_path, ["depth"], "cpu", lambda: 3, patience_s=0.01)
