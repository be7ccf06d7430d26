"""The rows of the ledger in the spool, there and back."""

import json
import math
from pathlib import Path
from typing import Any

from normscale.tracking.reader import read_run
from normscale.tracking.spool import SPOOL, SpoolWriter


def row(step: int, reason: str | None = None, **fields: Any) -> dict[str, Any]:
    made = {"lr": 1e-3, "norm": 0.5, "norm_clipped": 0.5, "scale_before": None, "scale_after": None}
    return {"step": step, "reason": reason, **made, **fields}


def test_rows_come_back(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start(run_id="r")
        spool.ledger([row(1), row(2, "non-finite loss", norm=math.nan, norm_clipped=None)])
        spool.ledger([row(3, norm=1 / 3)])
    record = read_run(tmp_path)
    assert record.torn == 0
    assert [(r["step"], r["applied"], r["reason"]) for r in record.ledger] == [
        (1, True, None),
        (2, False, "non-finite loss"),
        (3, True, None),
    ]
    assert math.isnan(record.ledger[1]["norm"])
    assert record.ledger[1]["norm_clipped"] is None
    assert record.ledger[2]["norm"] == 0.3333333
    assert "scale_before" not in record.ledger[0]


def test_of_a_step_that_was_made_again_the_newest_attempt_counts(tmp_path: Path) -> None:
    for attempt, norms in ((1, {4: 1.0, 5: 1.0, 6: 1.0}), (2, {5: 2.0, 6: 2.0})):
        with SpoolWriter(tmp_path, attempt) as spool:
            spool.start(run_id="r", from_step=4 * (attempt - 1))
            spool.ledger([row(step, norm=norm) for step, norm in norms.items()])
    assert [(r["step"], r["norm"]) for r in read_run(tmp_path).ledger] == [(4, 1.0), (5, 2.0), (6, 2.0)]


def test_what_no_writer_made_is_left_out(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start(run_id="r")
        spool.ledger([row(1), row(2)])
    good = json.loads((tmp_path / SPOOL).read_text().splitlines()[-1])
    bad = [
        good | {"first": 2},
        good | {"columns": {"lr": [1, "x"]}},
        good | {"columns": [1]},
        good | {"not_applied": {"1": 3}},
        {key: value for key, value in good.items() if key != "first"},
    ]
    with (tmp_path / SPOOL).open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in bad)
    record = read_run(tmp_path)
    assert (record.torn, len(record.ledger)) == (len(bad), 2)


def test_a_thousand_steps_are_one_record_of_moderate_size(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path, 1) as spool:
        spool.ledger([row(step, norm=1 / (step + 1), norm_clipped=1 / (step + 1)) for step in range(1, 1001)])
    (line,) = (tmp_path / SPOOL).read_text().splitlines()
    assert len(line) < 50_000
