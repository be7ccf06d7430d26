"""Probes that fail on one of two real ranks: no rank is held up, and training is what it would have been."""

from pathlib import Path

import pytest
import torch

from normscale.tracking.reader import read_run
from tests.integration.ranks import run_two


@pytest.mark.slow
def test_probes_that_fail_on_one_rank_are_switched_off_on_both(tmp_path: Path) -> None:
    values = []
    for name, methods in (("without", ()), ("with", ("after_step", "read"))):
        out = tmp_path / name
        out.mkdir()
        errors = run_two("probe_off_worker", str(out), *methods)
        ranks = [torch.load(out / rank) for rank in ("0", "1")]
        assert torch.equal(ranks[0]["values"], ranks[1]["values"])
        values.append(ranks[0]["values"])
        reasons = {method: f"rank 1: {method}: RuntimeError: on purpose" for method in methods}
        assert ranks[0]["off"] == ranks[1]["off"] == reasons
        (run_dir,) = (out / "runs").iterdir()
        record = read_run(run_dir)
        events = [(event["event"], event["step"], event["probe"], event["reason"]) for event in record.events]
        steps = dict(zip(methods, (4, 6), strict=False))  # of read the other rank learns the next time they meet
        assert events == [("probe_off", steps[method], method, reasons[method]) for method in methods]
        assert [error.count("is switched off") for error in errors] == [len(methods), 0]
        assert record.profiles["eps_up"].steps == [3, 6]
        assert [row["step"] for row in record.ledger] == [1, 2, 3, 4, 5, 6]
    assert torch.equal(*values)
