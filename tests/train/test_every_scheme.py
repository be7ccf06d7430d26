"""Every scheme and every norm trains: 20 steps at 24 blocks on the embedded text."""

import math
from functools import cache
from typing import Any

import pytest
import torch

from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.norms import norm_names
from normscale.schemes import find_scheme, scheme_names
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from tests.probes.test_probes import Notes


def losses(steps: int = 20, precision: dict[str, str] | None = None, **model: Any) -> list[float]:
    """The loss of each step."""
    config = RunConfig(
        precision=precision or {},
        model={"d": 16, "heads": 2, "context": 16} | model,
        train={"steps": 20, "batch": 2, "optim": {"lr": 2e-3, "clip": 1.0}, "schedule": {"warmup_steps": 10}},
    )
    task = load_task(config)
    built, batches = build(config.model, task.vocab, 0), Batches(task.train, batch=2, seed=0)
    first = batches.window(0)[0]
    with torch.no_grad():
        built.scheme.calibrate(lambda: built(first.tokens_BT, **first.beside))
    trainer = Trainer(PlainEngine(built, config.precision, torch.device("cpu")), config, [])
    return [trainer.step(batches.window(step), Notes()).loss for step in range(steps)]


def falls(found: list[float]) -> bool:
    """Whether the last quarter is below the first, all of them finite."""
    return all(map(math.isfinite, found)) and sum(found[-5:]) / 5 < sum(found[:5]) / 5 - 0.1


@pytest.mark.parametrize("scheme", scheme_names())
def test_a_scheme_trains_at_24_blocks(scheme: str) -> None:
    depth = {"M": 24} if "decoder" in find_scheme(scheme).topologies else {"N": 12, "M": 12}
    assert falls(losses(scheme=scheme, **depth))


FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "mHC": ("hyper", {"form": "mhc"}),
    "HybridNorm*": ("hybridnorm", {"star": True}),
    "NormFormer, all of it": ("normformer", {"scale_resids": True, "heads": "fairseq"}),
    "admin-torch, trained": ("admin-torch", {"trained": True}),
    "SiameseNorm, as released": ("siamese", {"form": "release", "factor": "release"}),
    "B2T, as released": ("b2t", {"rescaled": True}),
    "DS-Init, as released": ("dsinit", {"constants": "release"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_schemes_other_form_trains_at_24_blocks(form: str) -> None:
    scheme, options = FORMS[form]
    assert falls(losses(scheme=scheme, M=24, scheme_options=options))


@cache
def first_two(scheme: str, compute: str = "fp32", stream: str = "fp32") -> list[float]:
    """The losses of two steps of a scheme, or of a form of one."""
    name, options = FORMS.get(scheme, (scheme, {}))
    depth = {"M": 2} if "decoder" in find_scheme(name).topologies else {"N": 2, "M": 2}
    return losses(2, {"compute": compute, "stream": stream}, scheme=name, scheme_options=options, **depth)


@pytest.mark.parametrize("scheme", [*scheme_names(), *FORMS])
@pytest.mark.parametrize(("compute", "stream"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "bf16")])
def test_a_branch_may_have_another_dtype_than_the_stream(scheme: str, compute: str, stream: str) -> None:
    assert first_two(scheme, compute, stream) == pytest.approx(first_two(scheme), rel=0.03)


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": "head"},
        {"qk_norm": "full"},
        {"qk_norm": "l2", "qk_scale_trained": True},
        {"embedding_norm": True},
        {"attention_scale": False},
        {"scheme_options": {"final_norm": False}},
        {"norm_options": {"zero_centred": True, "gamma_init": 0.5}},
        {"norm_options": {"gain": False, "bias": False}},
        {"norm_options": {"eps_place": "outside"}},
        {"norms": {"attention": "rmsnorm", "ffn": "dyt"}},
        {"init": "normal", "init_scaled": "depth"},
        {"init": "fan_in", "init_scaled": "all", "init_truncated": True},
    ],
    ids=str,
)
def test_what_stands_beside_a_norm_trains_at_24_blocks(options: dict[str, Any]) -> None:
    assert falls(losses(scheme="pre", M=24, **options))


@pytest.mark.parametrize("norm", sorted({*norm_names()} - {"maxnorm"}))
def test_a_norm_trains_at_24_blocks(norm: str) -> None:
    options = {"share": 0.5} if norm == "prmsnorm" else {}  # one channel of 16 would estimate too badly
    assert falls(losses(scheme="pre", M=24, norm=norm, norm_options=options))


def test_what_normalises_nothing_does_not_train_at_24_blocks() -> None:
    (first,) = losses(1, scheme="pre", M=24, norm="maxnorm")
    assert first > 1e6 or not math.isfinite(first)  # 48 branches in, the stream has exploded
