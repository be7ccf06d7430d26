"""Two real processes: what must differ between them, what must agree, and how often they talk."""

from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.tracking.reader import read_run
from tests.integration.ranks import run_two


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("ranks")
    run_two("worker", str(out))
    return out


@pytest.fixture(scope="module")
def ranks(ended: Path) -> list[dict[str, Any]]:
    return [torch.load(ended / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.slow
def test_ranks_drop_other_units_of_other_samples_and_end_with_the_same_weights(ranks: list[dict[str, Any]]) -> None:
    one, other = ranks
    assert len(one["masks"]) == len(other["masks"]) == 3 * 2
    for masks in zip(one["masks"], other["masks"], strict=True):
        assert not torch.equal(*masks)
        assert abs(float((masks[0] == masks[1]).float().mean()) - 0.5) < 0.1  # as two independent masks would
    assert not any(torch.equal(*batches) for batches in zip(one["batches"], other["batches"], strict=True))
    assert torch.equal(one["grads"], other["grads"])
    assert torch.equal(one["values"], other["values"])


@pytest.mark.slow
def test_the_replay_of_a_bad_step_drops_the_same_units(ranks: list[dict[str, Any]]) -> None:
    one, other = (rank["again"] for rank in ranks)
    assert (len(one), len(other)) == (2, 2)  # the second rank runs its first micro-batch again, with the fault mended
    for again, first, second in ((one, *ranks[0]["masks"][4:]), (other, *[ranks[1]["masks"][4]] * 2)):
        assert torch.equal(again[0], first)
        assert torch.equal(again[1], second)


@pytest.mark.slow
def test_gradients_travel_once_a_step_however_many_micro_batches(ranks: list[dict[str, Any]]) -> None:
    assert [rank["reductions"] for rank in ranks] == [[1, 1, 1], [1, 1, 1]]


@pytest.mark.slow
def test_a_fault_on_the_second_rank_alone_is_named_by_the_first(ended: Path) -> None:
    (folder,) = (ended / "runs").glob("deepnorm-*")
    (event,) = read_run(folder).events
    assert (event["step"], event["layer"]) == (3, 3)
    assert (event["culprit"]["rank"], event["culprit"]["module"]) == (1, "blocks.1.sublayers.ffn.branch")
