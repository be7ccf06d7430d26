"""One process against two, in fp32: the same gradients and losses, for every topology."""

from typing import Any

import pytest
import torch

from tests.integration.agreement_worker import MODELS, trajectory
from tests.integration.ranks import run_two

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[tuple[str, str], Any]]:
    out = tmp_path_factory.mktemp("ranks")
    run_two("agreement_worker", str(out), timeout=200)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("model", MODELS)
def test_first_gradients_and_losses_agree(model: str, two: list[dict[tuple[str, str], Any]]) -> None:
    for optimizer, tolerance in (("sgd", 1e-5), ("adam", 1e-3)):
        one, others = trajectory(model, optimizer), [rank[model, optimizer] for rank in two]
        assert (one["world"], [other["world"] for other in others]) == (1, [2, 2])
        assert torch.equal(others[0]["grads"], others[1]["grads"])
        assert torch.equal(others[0]["losses"], others[1]["losses"])
        apart = (one["grads"] - others[0]["grads"]).norm() / one["grads"].norm()
        assert apart <= 1e-5
        torch.testing.assert_close(others[0]["losses"], one["losses"], rtol=tolerance, atol=0.0)
    assert one["losses"][-1] < one["losses"][0] - 0.5  # a model that trains
