"""Whole models on the kernels: losses, gradients, statistics and records equal eager's; run in the interpreter."""

from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.config.schema import ModelConfig, RunConfig
from normscale.models.builder import build
from normscale.models.stack import Transformer
from normscale.norms import norm as norms
from normscale.norms import set_backend
from normscale.ops.statistics import Buffers
from normscale.schemes import find_scheme, scheme_names
from normscale.tracking.reader import read_run
from normscale.train.run import run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = {"d": 12, "heads": 2, "context": 6, "positions": "learned"}
TOKENS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(0)).to(DEVICE)
SOURCE = torch.randint(0, 32, (2, 5), generator=torch.Generator().manual_seed(1)).to(DEVICE)
TOPOLOGIES = {"decoder": {"M": 2}, "both": {"N": 1, "M": 1}}
EVERYWHERE = {"embedding_norm": True, "qk_norm": "head", "kv_latent": 6}


def model_of(backend: Any, **options: Any) -> Transformer:
    model = build(ModelConfig(**SIZE | {"backend": "eager"} | options), 32, 0).to(DEVICE)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())).to(DEVICE))
    set_backend(model, backend)
    return model


def steps_of(model: Transformer, both: bool, **autocast: Any) -> tuple[torch.Tensor, Buffers]:
    rows = len(model.sites()) * model.rows_per_site
    samples = torch.zeros(len(model.blocks) + 2, 16, model.d, device=DEVICE)
    filled = Buffers(*(torch.zeros(rows, columns, device=DEVICE) for columns in (3, 3, 1, 2)), samples)
    with torch.autocast(DEVICE, enabled=bool(autocast), **autocast):
        logits = model(TOKENS, filled, **({"source_BS": SOURCE} if both else {}))
    loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), TOKENS.flatten())
    loss.backward()
    return loss.detach(), filled


def check_gradients(model: Transformer, wanted: Transformer, bound: float = 1e-5) -> None:
    """Compares every parameter's gradient; some are 0 but for rounding (a bias on k), hence the floor."""
    floor = 1e-2 * max(float(p.grad.norm()) for p in wanted.parameters())  # type: ignore[union-attr]
    for (name, a), b in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert a.grad is not None, name
        assert float((a.grad - b.grad).norm()) <= bound * max(float(b.grad.norm()), floor), name  # type: ignore


@pytest.mark.parametrize(
    ("scheme", "topology"),
    [*product(("post", "deepnorm", "pre", "peri"), TOPOLOGIES), ("reordered", "decoder")],
)
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_model_on_the_kernels_is_the_eager_one(scheme: str, norm: str, topology: str) -> None:
    options = TOPOLOGIES[topology] | EVERYWHERE | {"scheme": scheme, "norm": norm}
    eager, fused = model_of("eager", **options), model_of("triton", **options)
    (want, expected), (got, found) = (steps_of(model, topology == "both") for model in (eager, fused))
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for field, values in found._asdict().items():
        bound = 0.0 if field == "grad_rows" else 1e-5
        torch.testing.assert_close(values, getattr(expected, field), rtol=1e-4, atol=bound, msg=field)
    assert (expected.grad_rows[1 :: eager.rows_per_site, 0] > 0).all()  # type: ignore[index]
    check_gradients(fused, eager, 1e-5)


SUMS = ("residual_norm", "residual_norm_handle", "add_norm")
TRAINED = {"scheme": "admin-torch", "scheme_options": {"trained": True}}
CALLS: dict[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "admin": ((6, 0, 0), (5, 0, 0)),
    "admin-torch": ((0, 6, 0), (0, 5, 0)),
    "admin-torch-trained": ((6, 0, 0), (5, 0, 0)),
    "b2t": ((6, 0, 0), (5, 0, 0)),
    "dsinit": ((0, 6, 0), (0, 5, 0)),
    "hybridnorm": ((3, 0, 0), (3, 0, 0)),
    "hyper": ((0, 0, 0), (0, 0, 0)),
    "keel": ((5, 0, 0), (5, 0, 0)),
    "layerscale": ((0, 0, 6), (0, 0, 6)),
    "lns": ((0, 0, 6), (0, 0, 6)),
    "mixln": ((2, 0, 0), (2, 0, 0)),
    "normformer": ((0, 0, 6), (0, 0, 5)),
    "residual": ((6, 0, 0), (5, 0, 0)),
    "sandwich": ((0, 0, 6), (0, 0, 6)),
    "siamese": ((6, 0, 0), (6, 0, 0)),
    "spannorm": ((6, 0, 0), (6, 0, 0)),
    "subln": ((0, 0, 6), (0, 0, 5)),
}
"""How many sums of a scheme each operation makes: in a decoder of 3 blocks, and in one block beside an encoder's one.

Of a scheme that has no such form the second are those of an encoder of 3 blocks.
"""


@pytest.mark.parametrize("second", [False, True], ids=["decoder", "other"])
@pytest.mark.parametrize("scheme", CALLS)
def test_other_schemes_are_eagers_and_make_their_sums_on_the_kernels(
    scheme: str, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = TRAINED if scheme == "admin-torch-trained" else {"scheme": scheme}
    both = second and "encoder-decoder" in find_scheme(options["scheme"]).topologies
    options = options | ({"N": 1, "M": 1} if both else {"N": 3, "M": 0} if second else {"M": 3})
    called: Counter[str] = Counter()
    for name in SUMS:
        real = getattr(norms, name)
        monkeypatch.setattr(norms, name, lambda *a, n=name, f=real, **k: called.update([n]) or f(*a, **k))
    fused, eager = (model_of(backend, **options) for backend in ("triton", "eager"))
    got, found = steps_of(fused, both)
    assert tuple(called[name] for name in SUMS) == CALLS[scheme][second]
    want, expected = steps_of(eager, both)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    for field, values in found._asdict().items():
        bound = 0.0 if field == "grad_rows" else 1e-5
        torch.testing.assert_close(values, getattr(expected, field), rtol=1e-4, atol=bound, msg=field)
    check_gradients(fused, eager, 1e-5)


def test_every_scheme_that_has_norms_is_run_on_the_kernels() -> None:
    everywhere = {"post", "deepnorm", "pre", "peri", "reordered"}
    having = {name for name in scheme_names() if find_scheme(name).has_norms}
    assert having | {"admin-torch-trained"} == everywhere | CALLS.keys()


@pytest.mark.parametrize("options", [{"checkpointing": True}, {"norm_options": {"gain": False, "bias": False}}])
@pytest.mark.parametrize("scheme", ["deepnorm", "pre", "peri"])
def test_checkpointed_and_bare_norms(scheme: str, options: dict[str, Any]) -> None:
    eager, fused = (model_of(backend, M=2, scheme=scheme, **options) for backend in ("eager", "triton"))
    for model in (eager, fused):
        steps_of(model, both=False)
    check_gradients(fused, eager, 1e-5)


@pytest.mark.parametrize("scheme", ["deepnorm", "pre"])
def test_beside_bf16_products_a_model_is_as_near_to_fp32_as_eager(scheme: str) -> None:
    options = {"M": 2, "scheme": scheme} | EVERYWHERE
    exact, eager, fused = (model_of(backend, **options) for backend in ("eager", "eager", "triton"))
    want, _ = steps_of(exact, both=False)
    half = {"dtype": torch.bfloat16}
    off = [float((steps_of(model, both=False, **half)[0] - want).abs()) for model in (eager, fused)]
    assert off[1] <= max(2 * off[0], 2e-2)
    for (name, a), b, c in zip(fused.named_parameters(), eager.parameters(), exact.parameters(), strict=True):
        assert (a.grad - c.grad).norm() <= 2 * (b.grad - c.grad).norm() + 2e-2 * c.grad.norm(), name  # type: ignore


def test_the_post_norm_family_goes_through_handles(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[bool] = []
    real = norms.residual_norm_handle
    monkeypatch.setattr(norms, "residual_norm_handle", lambda *a, **k: called.append(True) or real(*a, **k))
    steps_of(model_of("triton", M=2, scheme="deepnorm"), both=False)
    assert len(called) == 4
    steps_of(model_of("eager", M=2, scheme="deepnorm"), both=False)
    assert len(called) == 4


@pytest.mark.parametrize(
    ("options", "joins"),
    [({"M": 3}, 6), ({"N": 1, "M": 1}, 5), ({"M": 3, "checkpointing": True}, 3), ({"M": 3, "backend": "eager"}, 0)],
    ids=["decoder", "both", "checkpointed", "eager"],
)
@pytest.mark.parametrize("scheme", ["pre", "peri"])
def test_a_pre_norm_sum_is_made_with_the_norm_after_it(
    scheme: str, options: dict[str, Any], joins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel a site; checkpointed blocks hand on the stream alone."""
    called: list[bool] = []
    real = norms.add_norm
    monkeypatch.setattr(norms, "add_norm", lambda *a, **k: called.append(True) or real(*a, **k))
    model = model_of(**{"backend": "triton", "scheme": scheme} | options)
    with torch.no_grad():
        model(TOKENS, **({"source_BS": SOURCE} if "N" in options else {}))
    assert len(called) == joins


@pytest.mark.parametrize("scheme", ["pre", "peri"])
def test_a_pre_norm_stack_goes_on_from_its_stream_alone(scheme: str) -> None:
    """Without a block, whose site carries no norm on; and with blocks apart, as where they are gathered one by one."""
    eager, fused = (model_of(backend, M=3, scheme=scheme) for backend in ("eager", "triton"))
    for skip, joined in [(0, True), (1, True), (2, True), (None, False)]:
        fused.join_blocks(joined)
        for model in (eager, fused):
            model.zero_grad()
            model(TOKENS, skip=skip).square().mean().backward()
            for block in [] if skip is None else [model.blocks[skip]]:
                assert all(p.grad is None or not p.grad.any() for p in block.parameters())
                for p in block.parameters():
                    p.grad = torch.zeros_like(p)
        check_gradients(fused, eager, 1e-5)


@pytest.mark.parametrize("scheme", ["deepnorm", "pre"])
def test_one_graph_for_each_structure(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **_: real(f, backend="aot_eager", fullgraph=True))
    options = {"M": 3, "scheme": scheme}
    eager = model_of("triton", **options)
    compiled = model_of("triton", **options, compile=True)
    counters.clear()
    (want, _), (got, _) = (steps_of(model, both=False) for model in (eager, compiled))
    assert counters["stats"]["unique_graphs"] == compiled.structures == 1
    torch.testing.assert_close(got, want, rtol=1e-6, atol=0)
    check_gradients(compiled, eager, 1e-6)
    eager, compiled = model_of("triton", **options, eps=0.5), model_of("triton", **options, eps=0.5, compile=True)
    (other, _), (got, _) = (steps_of(model, both=False) for model in (eager, compiled))
    assert counters["stats"]["unique_graphs"] == 1  # for every eps
    assert abs(other - want) > 1e-3
    torch.testing.assert_close(got, other, rtol=1e-6, atol=0)


def test_a_run_records_that_the_kernels_ran_and_has_eagers_losses(tmp_path: Path) -> None:
    ran = {}
    for backend in ("eager", "triton"):
        config = RunConfig(
            model={"M": 1, "d": 8, "heads": 1, "context": 8, "backend": backend},
            data={"max_bytes": 20_000},
            train={"steps": 2, "batch": 2, "eval_batches": 1},
            tracking={"runs": str(tmp_path), "uri": None},
            probes={"every": 1},
        )
        ran[backend] = read_run(run(config).run_dir)
    assert [ran[backend].start["backend"]["norm"] for backend in ran] == ["eager", "triton"]
    assert ran["triton"].start["identity"]["norms"].startswith("triton")
    losses = [record.series["loss_train"].values for record in ran.values()]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
