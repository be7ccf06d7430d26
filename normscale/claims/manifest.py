"""The manifest of a claim: which runs of the runs folder are its cells, and the verdict once there is one.

Runs know nothing of claims, so that one run can serve several; `<runs>/claims/<id>-<profile>.json` links them.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from normscale.arguments import to_stderr
from normscale.claims.claim import Cell, Claim, ProfileName, Role
from normscale.claims.results import Result
from normscale.claims.verdict import Judgement
from normscale.errors import StoreError
from normscale.tracking.files import write_whole
from normscale.tracking.manifest import read_manifest
from normscale.tracking.reader import RunRecord, read_run
from normscale.tracking.spool import SPOOL

_SAID: set[Path] = set()  # folders of runs whose records cannot be read


def manifest_path(runs: Path, claim_id: str, profile: str) -> Path:
    return runs / "claims" / f"{claim_id}-{profile}.json"


def write_manifest(
    runs: Path,
    claim: Claim,
    profile: ProfileName,
    cells: Sequence[tuple[Cell, str]],
    outcomes: Mapping[str, str],
    judgement: Judgement | None = None,
    figures: Sequence[Path] = (),
    report: Path | None = None,
    left_out: Sequence[str] = (),
) -> None:
    """Writes the manifest of (cell, run id) pairs whole; a reader sees the old one or the new one.

    `outcomes` {run id: word} is what the judge calls a finished run; `left_out` says what was not run, and why.

    Raises:
        StoreError: the runs folder cannot be written.
    """
    rows = [
        {"run": run_id, "arm": cell.arm, "cell": cell.group, "depth": cell.depth, "seed": cell.seed, "lr": cell.lr}
        | {"role": cell.role, "name": cell.name, "outcome": outcomes.get(run_id)}
        for cell, run_id in cells
    ]
    manifest = {
        "id": claim.id,
        "profile": profile,
        "family": claim.family,
        "says": claim.says,
        "source": claim.source,
        "t": time.time_ns() // 1_000_000,
        "cells": rows,
        "verdict": judgement.as_dict() if judgement else None,
        "figures": [str(path) for path in figures],
        "report": str(report) if report else None,
        "left_out": list(left_out),
    }
    path = manifest_path(runs, claim.id, profile)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(manifest, indent=1, allow_nan=False))
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); choose another folder for the runs") from None


def cells_of(runs: Path, claim_id: str, profile: str) -> list[tuple[Cell, str]]:
    """Returns the (cell, run id) pairs of a claim's manifest; empty where it was never started.

    Raises:
        StoreError: the file is there and is not a manifest.
    """
    path = manifest_path(runs, claim_id, profile)
    if not path.exists():
        return []
    rows = read_manifest(path).cells
    return [(Cell(row.arm, row.depth, row.seed, row.lr, cast(Role, row.role)), row.run) for row in rows]


def left_out_of(runs: Path, claim_id: str, profile: str) -> tuple[str, ...]:
    """Returns what was left out when a claim was last run, and why, as sentences.

    Raises:
        StoreError: the file is there and is not a manifest.
    """
    path = manifest_path(runs, claim_id, profile)
    return read_manifest(path).left_out if path.exists() else ()


def results_of(runs: Path, cells: Sequence[tuple[Cell, str]]) -> list[Result]:
    """Returns the cells with what their runs left so far."""
    return [Result(cell, record_of(runs, run_id)) for cell, run_id in cells]


def outcomes_of(claim: Claim, results: Sequence[Result], cells: Sequence[tuple[Cell, str]]) -> dict[str, str]:
    """Returns {run id: trained | plateau | diverged | nan | undecided} for the runs that have ended.

    Of an arm that is measured over depth nobody asks whether its short runs train: they are `measured`.
    """
    words = {}
    for result, (_, run_id) in zip(results, cells, strict=True):
        state = result.state
        if state.label == "missing" or result.record is None:
            continue
        not_finite = (result.record.end or {}).get("outcome") == "nan"
        word = {"stuck": "plateau"}.get(state.label, state.label)
        word = word if claim.asks_training(result.cell.arm) else "measured"
        words[run_id] = "nan" if not_finite else word
    return words


def record_of(runs: Path, run_id: str) -> RunRecord | None:
    """Returns the record of a run, or None where it never started or cannot be read; the latter is said once."""
    folder = runs / run_id
    try:
        return read_run(folder) if os.path.lexists(folder / SPOOL) else None
    except StoreError as error:
        if folder not in _SAID:
            to_stderr(f"{error}; it counts as missing")
        _SAID.add(folder)
        return None
