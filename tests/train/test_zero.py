"""DeepSpeed's engine where no DeepSpeed is needed: what is refused, what is imported when, and what a rank holds."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from normscale.cli import main
from normscale.config.schema import RunConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.monitor.deepspeed import DeepSpeed
from normscale.monitor.engines import Attempt
from normscale.train.engines import zero_parts, zero_start
from normscale.train.engines.engine import Engine
from normscale.train.engines.make import check_engine
from normscale.train.engines.zero import ZeroEngine, check_zero
from normscale.train.engines.zero_model import Called, computing_within, uncompiled
from normscale.train.engines.zero_parts import Piece, Seen, Stage1And2, Stage3

ROOT = Path(__file__).parents[2]
QUICK = str(ROOT / "configs/train/quick.yaml")


def refused(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> str:
    """The one line that `normscale train` ends with; nothing is written."""
    runs = folder / "runs"
    assert main(["train", QUICK, f"tracking.runs={runs}", "tracking.uri=null", "engine.name=deepspeed", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert not runs.exists()
    return error


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_start, "find_spec", lambda name: object())
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_fp16_on_a_cpu_is_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    error = refused(capsys, tmp_path, "precision.compute=fp16")
    assert "precision.compute: DeepSpeed does not train in fp16 on a CPU; set precision.compute=bf16" in error
    assert "(override precision.compute=fp16)" in error


def test_what_json_and_configuration_both_name_ends_train(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text('{"gradient_clipping": 1.0}')
    error = refused(capsys, tmp_path, f"engine.json={tmp_path}/ds.json", "train.optim.clip=0.5")
    assert "train.optim.clip: 0.5 but gradient_clipping=1.0 in " in error


def test_a_json_that_disagrees_is_refused_where_no_command_line_was(tmp_path: Path) -> None:
    """As in a claim, whose runs are not read off a command line."""
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    config = RunConfig(engine={"name": "deepspeed", "zero": 2, "json": str(tmp_path / "ds.json")})
    with pytest.raises(ConfigError, match=r"engine.zero: 2 but zero_optimization.stage=3 in "):
        check_engine(config)


def test_where_deepspeed_is_not_installed_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero_start, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"engine.name: deepspeed is not installed; pip install 'normscale\[deep"):
        check_zero(RunConfig(engine={"name": "deepspeed"}), "cpu", 1)


def test_nobody_imports_deepspeed_before_it_trains() -> None:
    code = (
        "import sys, normscale.cli, normscale.train.engines.zero as zero\n"
        "from normscale.config.schema import RunConfig\n"
        "zero.zero_start.find_spec = lambda name: object()\n"
        "zero.check_zero(RunConfig(engine={'name': 'deepspeed'}), 'cpu', 1)\n"
        "assert 'deepspeed' not in sys.modules and 'accelerate' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr


def test_the_engine_keeps_the_whole_contract() -> None:
    assert issubclass(ZeroEngine, Engine)
    assert not ZeroEngine.__abstractmethods__


def test_compiled_blocks_are_eager_again_under_zero_3() -> None:
    model = build(RunConfig(model={"M": 2, "d": 16, "heads": 2}).model, 32, 0)
    assert not uncompiled(model)
    for block in model.blocks:
        block.forward = lambda *args: args  # what the builder puts there where it compiles
    assert uncompiled(model)
    assert all("forward" not in vars(block) for block in model.blocks)


def test_features_are_a_call_of_the_model_and_leave_its_forward_as_it_was() -> None:
    """ZeRO-3 gathers the embedding for a call of the model; its features alone would find it empty."""
    model = build(RunConfig(model={"M": 1, "d": 16, "heads": 2}).model, 32, 0).eval()
    tokens, calls = torch.zeros(1, 4, dtype=torch.int64), []
    model.register_forward_pre_hook(lambda module, args: calls.append(module))
    for _ in range(2):
        assert torch.equal(Called(model).features(tokens), model.features(tokens))
        assert torch.equal(Called(model)(tokens), model(tokens))
        computing_within(model, lambda: torch.autocast("cpu", enabled=False))  # a forward of its own, from now on
        assert "forward" in vars(model)
    assert len(calls) == 6
    assert Called(model).depth is model.depth


def test_the_products_format_is_set_inside_of_what_deepspeed_calls() -> None:
    """On CUDA DeepSpeed switches off an autocast that it finds around its forward, with one line in a log."""
    model = build(RunConfig(model={"M": 1, "d": 16, "heads": 2}).model, 32, 0)
    computing_within(model, lambda: torch.autocast("cpu", dtype=torch.bfloat16))
    with torch.autocast("cpu", enabled=False):
        assert model(torch.zeros(1, 4, dtype=torch.int64)).dtype == torch.bfloat16


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.arange(float(torch.Size(shape).numel())).view(shape))


def group_of_one(monkeypatch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "get_world_size", lambda: world)


@pytest.mark.parametrize(
    ("rank", "pieces"),
    [
        (0, [Piece("a", 0, 6, 0, 0), Piece("b", 0, 1, 0, 6), Piece("c", 0, 2, 1, 0)]),
        (1, [Piece("b", 1, 3, 0, 0), Piece("c", 2, 1, 1, 0)]),
    ],
)
def test_a_parameter_lies_across_the_border_of_two_ranks(
    monkeypatch: pytest.MonkeyPatch, rank: int, pieces: list[Piece]
) -> None:
    """ZeRO 1 and 2 cut a whole group in equal parts: 6 + 4 entries at 7, 3 at 2; what is over is padding."""
    group_of_one(monkeypatch, rank, 2)
    a, b, c = parameter(2, 3), parameter(2, 2), parameter(3)
    held = SimpleNamespace(
        single_partition_of_fp32_groups=[torch.zeros(7), torch.zeros(2)],
        partition_size=[7, 2],
        bit16_groups=[[a, b], [c]],
    )
    model = SimpleNamespace(named_parameters=lambda: [("a", a), ("b", b), ("c", c)])
    assert Stage1And2(SimpleNamespace(optimizer=held), model).pieces == pieces  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "lengths"), [(0, [3, 1]), (1, [2, 0])])
def test_zero_3_cuts_every_parameter_and_leaves_out_what_fills_it_up(
    monkeypatch: pytest.MonkeyPatch, rank: int, lengths: list[int]
) -> None:
    group_of_one(monkeypatch, rank, 2)
    a, b = (SimpleNamespace(ds_numel=n, partition_numel=lambda n=n: -(-n // 2)) for n in (5, 1))
    held = SimpleNamespace(
        fp32_partitioned_groups_flat=[torch.tensor([1.0, 2.0, 3.0, 4.0])],
        sub_group_to_group_id={0: 0},
        fp16_groups=[[a, b]],
    )
    model = SimpleNamespace(named_parameters=lambda: [("a", a), ("b", b)])
    parts = Stage3(SimpleNamespace(optimizer=held), model)  # type: ignore[arg-type]
    assert [(piece.start, piece.length, piece.offset) for piece in parts.pieces] == [
        (3 * rank, lengths[0], 0),
        (rank, lengths[1], 3),
    ]
    assert [values.tolist() for values in parts.values()] == [[1.0, 2.0, 3.0][: lengths[0]], [4.0][: lengths[1]]]


def test_probes_see_the_optimizers_state_without_what_fills_it_up(monkeypatch: pytest.MonkeyPatch) -> None:
    masters = [torch.zeros(4, requires_grad=True), torch.zeros(2, requires_grad=True)]
    optimizer = torch.optim.AdamW([{"params": [one], "weight_decay": 0.0} for one in masters], lr=0.5)
    parts: Any = SimpleNamespace(
        masters=masters, groups=[0, 1], pieces=[Piece("a", 0, 2, 0, 0), Piece("b", 0, 1, 0, 3), Piece("c", 0, 2, 1, 0)]
    )
    seen = Seen(parts, optimizer, torch.device("cpu"))
    first = seen.param_groups[0]["params"][0]
    assert seen.state[first] == {}
    for master, grad in zip(masters, ([1.0, 2.0, 99.0, 3.0], [4.0, 5.0]), strict=True):
        master.grad = torch.tensor(grad)
    optimizer.step()
    moments = [seen.state[group["params"][0]]["exp_avg"].tolist() for group in seen.param_groups]
    assert moments == [pytest.approx([0.1, 0.2, 0.3]), pytest.approx([0.4, 0.5])]
    assert float(seen.state[first]["step"]) == 1.0
    assert seen.param_groups[0]["lr"] == 0.5


def test_each_stage_has_its_own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for stage, wanted in enumerate(("Stage0", "Stage1And2", "Stage1And2", "Stage3")):
        monkeypatch.setattr(zero_parts, wanted, lambda engine, model, wanted=wanted: wanted)
        assert (
            zero_parts.parts_of(SimpleNamespace(zero_optimization_stage=lambda s=stage: s), nn.Linear(1, 1)) == wanted
        )


class ScaledFake:
    """DeepSpeed in fp16, which skips every step; ZeRO 1 to 3 raise where their scale cannot fall any more."""

    global_steps, gradient_clipping = 0, staticmethod(lambda: 0.0)

    def __init__(self, scale: float, dynamic: bool, least: float, raises: bool) -> None:
        scaler = {"cur_scale": scale, "min_scale": least, "delayed_shift": 1, "cur_hysteresis": 1}
        self.scaler = SimpleNamespace(dynamic=dynamic, raise_error_at_min_scale=raises, **scaler)
        self.optimizer = SimpleNamespace(loss_scaler=self.scaler, cur_scale=scale, param_groups=[{"lr": 0.1}])

    def zero_optimization_stage(self) -> int:
        return 2

    def fp16_enabled(self) -> bool:
        return True

    bfloat16_enabled = was_step_applied = lambda self: False
    is_gradient_accumulation_boundary = fp16_enabled

    def step(self) -> None:
        if self.scaler.raise_error_at_min_scale and self.scaler.cur_scale == self.scaler.min_scale:
            raise Exception("Current loss scale already at minimum")
        self.global_steps += 1
        if self.scaler.dynamic:
            self.scaler.cur_scale = max(self.scaler.min_scale, self.scaler.cur_scale / 2)
        self.optimizer.cur_scale = self.scaler.cur_scale

    def get_global_grad_norm(self) -> float:
        return float("inf")


@pytest.mark.parametrize(("dynamic", "least", "absorbed"), [(True, 1.0, 4), (True, 8.0, 1), (False, 1.0, 0)])
@pytest.mark.parametrize("raises", [False, True])
def test_a_loss_scale_at_its_floor_is_no_excuse(dynamic: bool, least: float, absorbed: int, raises: bool) -> None:
    """PR-015 (DeepSpeed#697): from 2^4 four steps are the scale's, and every one after them the model's."""
    engine = ScaledFake(16.0, dynamic, least, raises and dynamic)
    monitored = DeepSpeed(nn.Linear(1, 1), engine)
    found = [monitored.attempt(Attempt(engine, torch.tensor(2.0))) for _ in range(7)]
    reasons = [one.reason for one in found if one is not None]
    assert reasons == ["loss scale overflow"] * absorbed + ["non-finite gradient"] * (7 - absorbed)
    assert [one.bad for one in found if one is not None] == [False] * absorbed + [True] * (7 - absorbed)
    assert [bool(one.final) for one in found if one is not None] == [
        raises and dynamic and i >= absorbed for i in range(7)
    ]
    assert engine.scaler.raise_error_at_min_scale == (raises and dynamic)
