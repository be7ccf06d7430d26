"""Calibration, projection and small parameters on two ranks, whole and in shards: what one process gets."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.ranks import run_two
from tests.integration.schemes_worker import SCHEMES, trained

ENGINES = ("ddp", "fsdp2")
ZERO = ("deepspeed:2", "deepspeed:3")

Seen = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    return on_two_ranks(tmp_path_factory.mktemp("two"), ENGINES)


@pytest.fixture(scope="module")
def zero(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    pytest.importorskip("deepspeed")
    return on_two_ranks(tmp_path_factory.mktemp("zero"), ZERO)


def on_two_ranks(out: Path, engines: tuple[str, ...]) -> list[Seen]:
    run_two("schemes_worker", str(out), *engines, timeout=300)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


def compare(ranks: list[Seen], engine: str, scheme: str) -> None:
    one, (first, second) = trained("plain", scheme), (seen[engine, scheme] for seen in ranks)
    assert first["digest"] == second["digest"]
    assert first["losses"] == second["losses"] == pytest.approx(one["losses"], rel=1e-4)
    assert first["values"].keys() == one["values"].keys()
    for name, values in first["values"].items():
        torch.testing.assert_close(values, one["values"][name], rtol=1e-3, atol=1e-3, msg=name)
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
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("engine", ENGINES)
def test_two_ranks_train_as_one_process_does(engine: str, scheme: str, two: list[Seen]) -> None:
    compare(two, engine, scheme)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("engine", ZERO)
def test_zero_trains_as_one_process_does(engine: str, scheme: str, zero: list[Seen]) -> None:
    compare(zero, engine, scheme)


def test_one_process_keeps_lengths_at_1() -> None:
    check_lengths(trained("plain", "ngpt")["values"])
