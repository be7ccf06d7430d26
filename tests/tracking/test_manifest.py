import pytest

from normscale.errors import StoreError
from normscale.tracking.manifest import read_manifest
from tests.tracking.made import VERDICT, cell, make_manifest


def test_reads_what_the_runner_writes(runs):
    cells = [cell("a"), cell("b", "pre", 48, 1, "long", 3e-4), cell("a", role="control")]
    cells[1]["outcome"] = "diverged"
    cells[1]["later"] = "a field of a newer version"
    manifest = read_manifest(make_manifest(runs, cells, verdict=VERDICT))
    assert manifest.key == "depth-postnorm-dies-cpu"
    assert manifest.runs == ["a", "b"]
    assert manifest.cell_of("b").outcome == "diverged"
    assert manifest.cell_of("b").lr == 3e-4
    assert manifest.cell_of("a").role == "main", "the first cell of a run is its place"
    assert manifest.verdict["verdict"] == "supported"


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"id": "x", "profile": "cpu", "cells": [{"arm": "post"}]}', "\x00"])
def test_what_is_not_a_manifest_is_one_line(tmp_path, text):
    path = tmp_path / "x-cpu.json"
    path.write_text(text)
    with pytest.raises(StoreError, match="not a claim manifest") as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
