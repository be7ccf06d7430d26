"""Fixed statistics where algebra says what they do, and the whole measurement on a model of one block."""

import pytest
import torch

from normscale.data.task import MicroBatch
from normscale.measures import static_fold
from normscale.measures._rows import NormName
from tests.fold.test_folding import TOKENS, model_of, unfolded


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@torch.no_grad()
def test_the_statistics_of_one_row_are_right_for_that_row_alone(norm: str) -> None:
    model = unfolded(model_of(norm=norm)[0])
    one, other = (MicroBatch(tokens, tokens) for tokens in (TOKENS[:1, :1], TOKENS[1:, :1]))
    clean = [model(**batch.inputs) for batch in (one, other)]
    with static_fold._static(static_fold._statistics(model, [one], "token")):
        fixed = [model(**batch.inputs) for batch in (one, other)]
    assert torch.allclose(fixed[0], clean[0], rtol=1e-12, atol=1e-12)
    assert float((fixed[1] - clean[1]).abs().max()) > 0.01
    assert torch.equal(model(**one.inputs), clean[0])


@torch.no_grad()
def test_a_channels_statistics_are_over_rows() -> None:
    model = unfolded(model_of()[0])
    batch = MicroBatch(TOKENS, TOKENS)
    mean, variance = static_fold._statistics(model, [batch], "channel")[model.get_submodule("ends.norm")]  # type: ignore[index]
    rows: list[torch.Tensor] = []
    model.get_submodule("ends.norm").register_forward_pre_hook(lambda module, inputs: rows.append(inputs[0]))
    model(**batch.inputs)
    assert torch.allclose(mean, rows[0].mean((0, 1)))
    assert torch.allclose(variance, rows[0].var((0, 1), correction=0))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_it_measures_a_model_that_it_trains(norm: NormName) -> None:
    found = static_fold.measure(0, norm, blocks=1, steps=2)
    assert found["exact"] < 1e-12
    assert 0 < found["exact_bf16"] < 0.01
    assert found["static"] == min(found["static_token"], found["static_channel"])
    assert found["static"] > 100 * found["exact_bf16"]
    assert 0 < abs(found["int8"]) < 0.05
    assert found["learned"] < 0  # after 2 steps
