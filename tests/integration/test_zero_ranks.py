"""DeepSpeed, ZeRO 0 to 3, on one process and on two: the numbers of every other engine, and no step that is not finite.

What DeepSpeed would make of a NaN depends on stage and dtype (stage 0 in fp32 trains on with it); ours asks first.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from normscale.probes.culprit import Culprit
from tests.integration.ranks import ROOT, run_two
from tests.integration.test_engines_agree import TOLERANCES, compare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(320),  # all stages, once on one process and once on two
    pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs the extra 'deepspeed'"),
]

STAGES = [f"deepspeed:{stage}" for stage in range(4)]
# As in the worker.
VARIANTS = [*((n, "fp32") for n in range(4)), (0, "bf16"), (2, "bf16"), (3, "bf16"), (2, "offload"), (3, "offload")]

Seen = dict[Any, Any]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("one")
    quiet = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.zero_worker", str(out)],
        cwd=ROOT,
        env=quiet | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == done.stderr == ""  # DeepSpeed's own voice is not heard
    return torch.load(out / "rank0.pt")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[Seen]:
    out = tmp_path_factory.mktemp("two")
    run_two("zero_worker", str(out), timeout=300)
    return [torch.load(out / f"rank{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("stage", STAGES)
def test_one_process_agrees_with_plain(stage: str, kind: str, one: Seen) -> None:
    compare(one[stage, kind], one["plain", kind], stage, kind, world=1)


@pytest.mark.parametrize("kind", TOLERANCES)
@pytest.mark.parametrize("stage", STAGES)
def test_two_processes_agree_with_one(stage: str, kind: str, one: Seen, two: list[Seen]) -> None:
    first, second = (seen[stage, kind] for seen in two)
    assert torch.equal(first["losses"], second["losses"])
    assert torch.equal(first["norms"], second["norms"])
    assert first["digest"] == second["digest"]
    compare(first, one["plain", kind], stage, kind, world=2)
    # PR-012 (composer#1501): p.grad is None under ZeRO, and every layer has its norm all the same.
    assert (first["profiles"]["1 grad_norm"] > 0).all()
    assert {"5 adam_eps_share", "5 adam_eps_taken"} <= first["profiles"].keys() or kind == "sgd"


@pytest.mark.parametrize(("stage", "label"), VARIANTS)
def test_a_nan_on_one_rank_is_named_and_leaves_every_ranks_masters_and_moments(
    stage: int, label: str, two: list[Seen]
) -> None:
    """It is in the first of two micro-batches; DeepSpeed would count the second into a window that it keeps."""
    where = {
        "forward": ("blocks.0.sublayers.ffn.branch", "output"),
        "backward": ("blocks.0.sublayers.ffn.own.norm", "gradient of gamma"),
    }
    for phase in ("forward", "backward") if label == "fp32" else ("backward",):
        first, second = (seen[stage, label, phase] for seen in two)
        assert repr(first) == repr(second)  # NaN is NaN
        assert first["applied"] == [True, False, True, True]
        assert first["intact"]
        assert first["as_if_never"]
        (event,) = first["events"]
        culprit = Culprit.from_fields(event["culprit"])
        assert (culprit.rank, culprit.micro_batch, culprit.phase, culprit.kind) == (1, 0, phase, "NaN")
        assert culprit.reproduced
        assert event["layer"] == 1
        if stage < 3 and label == "fp32":  # stage 3 gives modules other outputs, whose gradients are seen before
            assert (culprit.module, culprit.tensor) == where[phase]


@pytest.mark.parametrize(("stage", "label"), VARIANTS)
def test_a_run_goes_on_from_its_shards_bit_for_bit(stage: int, label: str, two: list[Seen]) -> None:
    for seen in two:
        found = seen[stage, label, "resumed"]
        assert found["equal"]
        assert found["moved"]  # the last two steps do something


@pytest.mark.parametrize(("stage", "label"), VARIANTS)
def test_masters_begin_with_the_models_own_values(stage: int, label: str, two: list[Seen]) -> None:
    """In bf16 DeepSpeed would begin with rounded ones, and at stage 0 with a step that it makes with no gradient."""
    for seen in two:
        assert seen[stage, label, "resumed"]["exact"]
        assert seen[stage, label, "resumed"]["counted"] == 4.0


@pytest.mark.parametrize(("stage", "label"), VARIANTS)
def test_our_norm_between_backward_and_step_is_the_one_that_deepspeed_clips_by(
    stage: int, label: str, two: list[Seen]
) -> None:
    found = two[0][stage, label, "resumed"]
    assert found["clip"] == 0.1
    assert found["clipped"]
    assert found["no_grad"]
    for ours, theirs in found["norms"]:
        assert theirs is None if (stage, label) == (0, "fp32") else theirs == pytest.approx(ours, rel=1e-5)


@pytest.mark.parametrize(("stage", "label"), [one for one in VARIANTS if one[1] != "offload"])
def test_a_loss_scale_is_taken_out_before_deepspeed_looks(stage: int, label: str, two: list[Seen]) -> None:
    scaled, *unscaled = two[1][stage, label, "resumed"]["unscaled"]
    assert unscaled == [pytest.approx(scaled / 4, rel=1e-5)] * (1 if (stage, label) == (0, "fp32") else 2)


@pytest.mark.parametrize(("stage", "label"), [one for one in VARIANTS if one[1] != "offload"])
def test_the_dtypes_are_those_that_ran(stage: int, label: str, two: list[Seen]) -> None:
    wide = {"params": "float32", "grads": "float32", "reduce": "float32"}
    narrow = {"params": "bfloat16, masters in float32", "grads": "bfloat16", "reduce": "float32"}
    assert two[0][stage, label, "resumed"]["dtypes"] == (narrow if label == "bf16" else wide)


def test_no_group_waits_longer_than_it_was_told_to(two: list[Seen]) -> None:
    """DeepSpeed makes groups of its own, which would wait half an hour for a lost host."""
    for seen in two:
        limits = seen["groups", "limits"]
        assert len(limits) > 1
        assert set(limits) == {300.0}  # engine.timeout_s
