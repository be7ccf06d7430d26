"""Every scheme on two ranks, whole and in shards: what one process gets. Calibration and projection are part of it."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.ranks import run_two
from tests.integration.schemes_worker import SCHEMES, trained

ENGINES = ("ddp", "fsdp2")
ZERO = ("deepspeed:2", "deepspeed:3")


def check(scheme: str, one: dict[str, Any], first: dict[str, Any], second: dict[str, Any]) -> None:
    """Compares what two ranks came to with each other, to the bit, and with one process."""
    assert first["digest"] == second["digest"], scheme
    assert first["losses"] == second["losses"] == pytest.approx(one["losses"], rel=1e-6), scheme
    assert first["values"].keys() == one["values"].keys()
    for name, values in first["values"].items():
        torch.testing.assert_close(values, one["values"][name], rtol=1e-4, atol=1e-4, msg=f"{scheme}: {name}")
    if scheme == "ngpt":
        check_lengths(first["values"])


def check_lengths(values: dict[str, torch.Tensor]) -> None:
    """After a step every vector has length 1: rows of what reads the state, columns of what writes it."""
    matrices = {name: x for name, x in values.items() if x.dim() == 2}
    assert len(matrices) == 3 + 2 * 4  # token, position, logits; qkv, o, up and out of two blocks
    for name, x in matrices.items():
        writes = name.endswith(("branch.o.weight", "branch.out.weight"))
        lengths = x.norm(dim=0 if writes else 1)
        torch.testing.assert_close(lengths, torch.ones_like(lengths), msg=name)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_ranks_train_every_scheme_as_one_process_does(tmp_path: Path) -> None:
    """One test, so that the two ranks are started once."""
    zero = ZERO if find_spec("deepspeed") else ()
    run_two("schemes_worker", str(tmp_path), *ENGINES, *zero, timeout=380)
    ranks = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    for scheme in SCHEMES:
        one = trained("plain", scheme)
        for engine in (*ENGINES, *zero):
            check(scheme, one, *(seen[engine, scheme] for seen in ranks))
    if not zero:
        pytest.skip("DDP and FSDP2 agree; ZeRO needs the extra 'deepspeed'")


def test_one_process_keeps_lengths_at_1() -> None:
    check_lengths(trained("plain", "ngpt")["values"])
