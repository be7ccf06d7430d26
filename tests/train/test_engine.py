"""The engine keeps what `precision` asks for, or refuses it by name."""

from pathlib import Path

import pytest
import torch

from normscale.config.precision import PrecisionConfig
from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.norms import norm_names
from normscale.ops.products import NATIVE, Native, Rounded
from normscale.schemes import scheme_names
from normscale.tracking.reader import read_run
from normscale.train.engines.plain import PlainEngine
from normscale.train.engines.precision import check_precision, products_of
from normscale.train.run import run
from tests.probes.test_probes import Notes, trained, windows
from tests.schemes.forms import built, fits
from tests.train.test_run import config

CPU = torch.device("cpu")
AS_BEFORE = dict.fromkeys(("compute", "stream", "params", "grads", "softmax"), "float32") | {
    "reduce": "none",
    "tf32": "false",
    "simulated": "false",
    "flush_denormals": "false",
}
SEEN: list[tuple[dict[str, object], dict[str, str]]] = [
    ({}, {}),
    ({"compute": "bf16"}, {"compute": "bfloat16"}),
    ({"compute": "bf16", "softmax": "compute"}, {"compute": "bfloat16", "softmax": "bfloat16"}),
    ({"compute": "bf16", "stream": "bf16"}, {"compute": "bfloat16", "stream": "bfloat16"}),
    ({"stream": "bf16"}, {"stream": "bfloat16"}),
    ({"params": "bf16"}, {"params": "bfloat16", "grads": "bfloat16"}),
    (
        {"compute": "bf16", "stream": "bf16", "params": "bf16"},
        dict.fromkeys(("compute", "stream", "params", "grads"), "bfloat16"),
    ),
    ({"compute": "fp16"}, {"compute": "float16", "simulated": "true"}),
    (
        {"compute": "fp16", "softmax": "compute", "stream": "bf16", "params": "bf16"},
        {"compute": "float16", "softmax": "float16", "simulated": "true"}
        | dict.fromkeys(("stream", "params", "grads"), "bfloat16"),
    ),
    (
        {"compute": "fp8_e4m3", "softmax": "compute"},
        {"compute": "float8_e4m3fn", "softmax": "bfloat16", "simulated": "true"},
    ),
    ({"compute": "fp8_e5m2"}, {"compute": "float8_e5m2", "simulated": "true"}),
    ({"flush_denormals": True}, {"flush_denormals": "true"}),
]


@pytest.mark.parametrize(("asked", "seen"), SEEN)
def test_what_is_asked_for_is_what_is_seen_and_it_trains(
    tmp_path: Path, asked: dict[str, object], seen: dict[str, str]
) -> None:
    train = {"steps": 6, "batch": 4, "eval_batches": 1, "optim": {"lr": 0.01}}
    result = run(config(tmp_path, precision=asked, train=train, probes={"every": 1}))
    assert result.outcome == "finished"
    record = read_run(result.run_dir)
    assert record.start["precision_seen"] == AS_BEFORE | seen
    losses = record.series["loss_train"].values
    assert losses[-1] < losses[0] - 0.1
    assert not record.events
    attention = record.start["backend"]["attention"]
    if seen.get("simulated"):
        assert attention == "rounded"
    elif asked.get("softmax"):
        assert attention == "unfused"


@pytest.mark.parametrize(
    ("scheme", "norm"), [(s, n) for s in scheme_names() for n in norm_names() if fits(scheme=s, norm=n)]
)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_every_scheme_and_norm_keeps_the_stream_in_bf16(scheme: str, norm: str, compute: str) -> None:
    model = built(M=2, d=16, heads=2, context=8, scheme=scheme, norm=norm)
    engine = PlainEngine(model, PrecisionConfig(compute=compute, stream="bf16"), CPU)  # type: ignore[arg-type]
    streams: list[torch.dtype] = []
    for sublayer in model.sublayers():
        sublayer.register_forward_hook(lambda m, a, out: streams.extend(x.dtype for x in (*a[0], *out)))
    with engine.autocast():
        model(windows(1)[0][0].tokens_BT)
    assert set(streams) == {torch.bfloat16}


def test_parameters_in_bf16_keep_their_optimizer_state_there_too_and_constants_in_fp32() -> None:
    t, _ = trained([], steps=2, precision={"params": "bf16"})
    state = t.optimizer.state[t.optimizer.param_groups[0]["params"][0]]
    assert {state["exp_avg"].dtype, state["exp_avg_sq"].dtype, t.engine.flat.values.dtype} == {torch.bfloat16}
    assert {buffer.dtype for buffer in t.engine.inner.buffers() if buffer.is_floating_point()} == {torch.float32}
    exact = t.engine.flat.grads.double().norm()
    assert float(t.engine.flat.grad_norm()) == pytest.approx(float(exact), rel=1e-6)  # a bf16 sum would be off by more
    named = [[name] for name in t.engine.flat.names]
    assert float(t.engine.flat.squares(named).sum()) == pytest.approx(float(exact) ** 2, rel=1e-5)


def test_products_are_rounded_where_the_device_has_none() -> None:
    def products(device: str, **precision: object) -> object:
        return products_of(PrecisionConfig.model_validate(precision), device)

    assert products("cpu") is products("cuda", compute="fp16") is products("cuda", compute="bf16") is NATIVE
    assert isinstance(products("cpu", compute="fp16"), Rounded)
    assert isinstance(products("cuda", compute="fp8_e4m3"), Rounded)
    assert products("cpu", stream="bf16") == Native(operands=torch.float32)
    assert products("cuda", compute="fp16", softmax="compute") == Native("compute")


def test_one_switch_reaches_every_module_with_products() -> None:
    model = build(ModelConfig(N=1, M=1, d=16, heads=2, context=8), 32, 0)
    engine = PlainEngine(model, PrecisionConfig(compute="fp8_e4m3"), CPU)
    holders = [module for module in model.modules() if hasattr(module, "products")]
    assert len(holders) > 8
    assert all(module.products is engine.products for module in holders if module is not model)
    assert model.products.format.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("asked", "device", "world", "said"),
    [
        ({"reduce": "bf16"}, "cpu", 1, r"precision\.reduce: bf16 would do nothing with one process.*--nproc 2"),
        ({"tf32": True}, "cpu", 2, r"precision\.tf32: true would do nothing on cpu.*CUDA device"),
        ({"flush_denormals": True}, "cuda", 1, r"precision\.flush_denormals: true would do nothing on cuda"),
    ],
)
def test_what_would_do_nothing_is_refused(asked: dict[str, object], device: str, world: int, said: str) -> None:
    precision = PrecisionConfig.model_validate(asked)
    with pytest.raises(ConfigError, match=said) as caught:
        check_precision(precision, device, world)
    assert caught.value.key in said.replace("\\", "")


def test_a_refused_run_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to reduce"):
        run(config(tmp_path / "runs", precision={"reduce": "bf16"}))
    assert not (tmp_path / "runs").exists()


def test_the_defaults_leave_the_model_alone() -> None:
    model = build(ModelConfig(M=1, d=16, heads=2, context=8), 32, 0)
    PlainEngine(model, PrecisionConfig(), CPU)
    assert model.stream is None
    assert all(module.products is NATIVE for module in model.modules() if hasattr(module, "products"))
    assert Notes().events == []
