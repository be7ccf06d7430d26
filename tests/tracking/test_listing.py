"""The table of the newest runs."""

import os
from pathlib import Path

import pytest

from normscale.tracking.draw import Look
from normscale.tracking.listing import NEWEST, as_json, listing
from normscale.tracking.reader import read_run
from normscale.tracking.show import show
from tests.tracking.made import make_run


def test_the_newest_runs_are_listed_with_what_became_of_them(tmp_path: Path) -> None:
    assert listing(tmp_path, Look()) == [f"there are no runs in {tmp_path} yet"]
    good, bad = make_run(tmp_path, "deepnorm", 12, steps=20), make_run(tmp_path, "post", 6, steps=20, nan_at=4)
    os.utime(tmp_path / good / "spool.jsonl", (1, 1))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "spool.jsonl").write_bytes(b"\xff{\n")
    os.utime(tmp_path / "broken" / "spool.jsonl", (2, 2))
    lines = listing(tmp_path, Look(width=200))
    assert lines[0].split() == ["run", "name", "scheme", "depth", "steps", "outcome", "gap", "written"]
    assert [line.split()[0] for line in lines[1:]] == [bad, "broken", good]
    assert lines[1].split()[2:6] == ["post", "M=6", "4", "nan"]
    assert lines[3].split()[2:6] == ["deepnorm", "M=12", "20", "trained"]
    assert [row["run"] for row in as_json(tmp_path)] == [bad, "broken", good]


@pytest.mark.parametrize(("steps", "said"), [(4, "too few steps"), (300, "plateau")])
def test_a_few_steps_are_no_plateau(steps: int, said: str, tmp_path: Path) -> None:
    name = make_run(tmp_path, "post", 6, steps=steps, every=2, trains=False)
    (line,) = listing(tmp_path, Look(width=200))[1:]
    assert said in line
    (row,) = as_json(tmp_path)
    assert row["outcome"] == "plateau"  # the word for programs stays
    head, *_ = show(read_run(tmp_path / name), False, Look())
    assert head.endswith("no better than token frequencies" + ": too few steps" * (steps == 4))


def test_no_more_than_a_screen_of_them(tmp_path: Path) -> None:
    for number in range(NEWEST + 3):
        (tmp_path / f"run-{number}").mkdir()
        (tmp_path / f"run-{number}" / "spool.jsonl").write_text("")
    lines = listing(tmp_path, Look())
    assert len(lines) == 1 + NEWEST + 1
    assert lines[-1] == f"and 3 older ones in {tmp_path}"
