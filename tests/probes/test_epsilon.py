"""What epsilon does in the norms, against plain numpy on the norms' inputs."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from normscale.config.schema import RunConfig
from normscale.models.builder import build
from normscale.norms import Norm, find_norm
from normscale.probes.epsilon import COLUMNS, EpsilonSensitivity, lost, sampled, sensitivity
from normscale.train.engines.plain import PlainEngine
from normscale.train.observe import subject_of
from tests.probes.test_probes import MODEL, trained

TOKENS = torch.randint(0, 32, (3, 8), generator=torch.Generator().manual_seed(4))


def probe(every: int = 2, last: int = 3, **options: Any) -> EpsilonSensitivity:
    return EpsilonSensitivity(
        {"tokens_BT": TOKENS}, every=every, last=last, **{"rows": 10**6, "compute": torch.float32} | options
    )


def twin(x: np.ndarray, norm: Norm) -> dict[str, float]:
    """The numbers of one norm whose input is x [R, D], over all rows."""
    gamma = 1.0 if norm.gamma is None else norm.gamma.detach().double().numpy()
    bias = 0.0 if norm.bias is None else norm.bias.detach().double().numpy()
    layernorm = type(norm).__name__ == "LayerNorm"
    mean = x.mean(axis=1, keepdims=True) if layernorm else 0.0
    var = x.var(axis=1) if layernorm else (x**2).mean(axis=1)

    def y(eps: float) -> np.ndarray:
        return gamma * (x - mean) / np.sqrt(var + eps)[:, None] + bias

    def change(eps: float) -> float:
        return float(np.sqrt(((y(eps) - y(norm.eps)) ** 2).sum()) / np.sqrt((y(norm.eps) ** 2).sum()))

    gain = 1 / np.sqrt(var + norm.eps)
    return {
        "eps_up": change(10 * norm.eps),
        "eps_down": change(norm.eps / 10),
        "eps_share_1": float((norm.eps / var > 0.01).mean()),
        "eps_share_10": float((norm.eps / var > 0.1).mean()),
        "eps_gain_p50": float(np.sort(gain)[(len(gain) - 1) // 2]),
        "eps_gain_max": float(gain.max()),
    }


def norms_of(model: nn.Module) -> dict[str, Norm]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Norm)}


MODELS: dict[str, dict[str, Any]] = {
    "pre": {"scheme": "pre", "eps": 1e-2},
    "deepnorm": {"scheme": "deepnorm", "eps": 0.1, "norm_options": {"bias": False}},
    "rmsnorm": {"scheme": "peri", "norm": "rmsnorm", "eps": 3.0, "qk_norm": "head", "embedding_norm": True},
    "full": {"scheme": "reordered", "norm": "rmsnorm", "eps": 1e-3, "qk_norm": "full"},
}


@pytest.mark.parametrize("case", MODELS)
def test_it_is_that_of_plain_numpy_on_the_inputs_of_the_norms(case: str) -> None:
    own = probe()
    trainer, notes = trained([own], steps=3, model=MODELS[case])
    model = trainer.engine.inner.eval()
    inputs: dict[str, np.ndarray] = {}
    for name, norm in norms_of(model).items():
        norm.register_forward_pre_hook(
            lambda m, args, name=name: inputs.update({name: args[0].double().flatten(0, -2).numpy()})
        )
    with torch.no_grad():
        model.features(TOKENS)
    assert own.names == list(inputs)  # in the order they run
    assert len(own.names) == len(norms_of(model))
    wanted = [twin(inputs[name], norms_of(model)[name]) for name in own.names]
    for column in wanted[0]:
        np.testing.assert_allclose(
            notes.profiles[3, column], [one[column] for one in wanted], rtol=1e-9, atol=1e-12, err_msg=column
        )
    assert max(one["eps_up"] for one in wanted) > 1.02 * min(one["eps_up"] for one in wanted) > 0
    assert notes.values[3]["eps_change_max"] == pytest.approx(max(one["eps_up"] for one in wanted))
    assert notes.values[3]["eps_share_max"] == max(one["eps_share_1"] for one in wanted)
    assert {step for step, name in notes.profiles if name in COLUMNS} == {2, 3}  # every two, and the last


def test_it_changes_no_bit_of_the_training() -> None:
    plain, _ = trained([], steps=3, model={"dropout": 0.2})
    probed, _ = trained([probe(every=1)], steps=3, model={"dropout": 0.2})
    assert torch.equal(plain.engine.flat.values, probed.engine.flat.values)
    assert not any(norm._forward_pre_hooks for norm in norms_of(probed.engine.inner).values())
    assert {norm.backend for norm in norms_of(probed.engine.inner).values()} == {"auto"}


def test_training_graphs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: compile_(f, backend="eager"))
    graphs = []
    for probes in ([], [probe(every=1, last=4)]):
        torch._dynamo.reset()
        before = counters["stats"]["unique_graphs"]
        _, notes = trained(probes, steps=4, model={"scheme": "pre", "compile": True})  # type: ignore[arg-type]
        graphs.append(counters["stats"]["unique_graphs"] - before)
        assert not notes.events
    assert graphs[0] == graphs[1] > 0
    assert len(notes.profiles[2, "eps_up"]) == 7


def test_a_norm_of_a_constant_row_is_nothing_but_epsilon() -> None:
    norm = find_norm("layernorm")(4, 1e-6, find_norm("layernorm").Options())
    found = dict(zip(COLUMNS, sensitivity(torch.full((3, 4), 7.0), norm, torch.float32).tolist(), strict=True))
    assert (found["eps_up"], found["eps_share_10"]) == (0, 1)  # its output is 0 whatever eps is
    assert found["eps_gain_max"] == pytest.approx(1e3)
    with torch.no_grad():
        norm.eps = 0.0
        assert sensitivity(torch.full((3, 4), 7.0), norm, torch.float32)[5] == torch.inf


def test_inside_and_outside_of_the_root_are_told_apart() -> None:
    """At var = 1e-10 and eps = 1e-5 the normalised values are about 0.003, not the 0.5 of eps outside the root."""
    norm = find_norm("rmsnorm")(2, 1e-5, find_norm("rmsnorm").Options())
    x = torch.tensor([[1e-5, -1e-5]])
    assert float(norm(x).detach().abs().max()) == pytest.approx(0.00316, rel=1e-2)
    up, down, share_1, share_10, gain, *_ = sensitivity(x, norm, torch.float32).tolist()
    assert (up, down) == (pytest.approx(1 - 10**-0.5, rel=1e-3), pytest.approx(10**0.5 - 1, rel=1e-3))
    assert (share_1, share_10) == (1, 1)
    assert gain == pytest.approx(1 / 1e-5**0.5, rel=1e-3)


@pytest.mark.parametrize(
    ("var", "eps", "dtype", "says"),
    [
        (0.0, 1e-8, torch.float16, True),  # 0 in fp16: a constant row divides by nothing
        (1.0, 1e-8, torch.float16, False),  # there it does not matter
        (0.0, 1e-5, torch.float16, False),
        (1e-7, 1e-7, torch.float16, True),  # 1.79e-7 among numbers 6e-8 apart
        (7e4, 1e-5, torch.float16, True),  # Inf
        (7e4, 1e-5, torch.bfloat16, False),
        (0.0, 1e-8, torch.bfloat16, False),
        (0.0, 1e-8, torch.float32, False),
        (0.0, 1e-5, torch.float8_e4m3fn, True),
        (1.0, 1e-5, torch.float8_e4m3fn, False),
        (1e39, 1e-5, torch.float32, True),
    ],
)
def test_what_a_format_cannot_hold(var: float, eps: float, dtype: torch.dtype, says: bool) -> None:
    assert lost(torch.tensor([var], dtype=torch.float64), eps, dtype).tolist() == [float(says)]


def test_each_eps_is_said_as_the_compute_precision_holds_it() -> None:
    own = probe(compute=torch.float16)
    trained([own], steps=1, model={"eps": 1e-8})
    assert own.held() == {"1e-08": 0.0}
    own = probe(compute=torch.bfloat16)
    trained([own], steps=1, model={"eps": 1e-5})
    assert own.held() == {"1e-05": pytest.approx(1e-5, rel=1 / 256)}


def test_rows_are_sampled_from_everywhere_and_always_the_same() -> None:
    x = torch.arange(4096.0).view(64, 64, 1)
    rows = sampled(x, 64).flatten()
    assert rows.tolist() == sampled(x, 64).flatten().tolist() == sorted(set(rows.tolist()))
    assert len({int(row) % 64 for row in rows}) > 30  # not the same position of each sequence
    assert torch.equal(sampled(x, 4096).flatten(), x.flatten())
    state = torch.get_rng_state()
    sampled(torch.zeros(999, 2), 7)
    assert torch.equal(state, torch.get_rng_state())


def test_an_encoder_beside_a_decoder_has_all_its_norms() -> None:
    config = RunConfig(model=MODEL | {"N": 1, "M": 1, "scheme": "pre", "embedding_norm": True}, data={"task": "copy"})
    engine = PlainEngine(build(config.model, 32, 0), config.precision, torch.device("cpu"))
    inputs: Mapping[str, Tensor] = {"tokens_BT": TOKENS, "source_BS": TOKENS}
    own = EpsilonSensitivity(inputs, every=1, last=1, compute=torch.float32)
    own.attach(subject_of(engine))
    assert own.names[0] == "source_embedding_norm"
    assert own.names.index("source_ends.norm") < own.names.index("embedding_norm")
    assert own.names[-1] == "ends.norm"
    assert len(own.names) == 2 + 5 + 2


def test_its_cost_is_stated_apart() -> None:
    own = probe(every=1)
    trainer, _ = trained([own], steps=1)
    assert trainer.guard.seconds()["epsilon"] == own.stopwatch.seconds > 0


def test_a_model_without_norms_has_no_such_numbers() -> None:
    own = probe()
    own.after_step(2)
    assert own.hand_over() == {}
