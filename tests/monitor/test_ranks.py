"""Two real ranks: all decide alike, know the same culprit, and write one run."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from normscale.tracking.reader import RunRecord, read_run
from tests.integration.ranks import run_two
from tests.monitor.made import batches, events, net
from tests.monitor.test_rows import twin

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KINDS = ("ddp", "ddp-late", "meeting", "fsdp2", "fsdp2-late", "accelerate", "accelerate-fsdp2")
"""In the late ones the model is wrapped, or sharded, when it is monitored already; in one ranks meet in the model."""

Said = tuple[Any, Any, RunRecord | None]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Gives a function: what the two ranks of a kind said, and their one run; all kinds are trained once."""
    folder: Path = tmp_path_factory.mktemp("ranks")
    run_two("ranks_worker", str(folder), package="tests.monitor", timeout=280)
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]

    @cache
    def of(kind: str) -> Said:
        if kind == "refused":
            return ranks[0][kind], ranks[1][kind], None
        (run,) = (folder / kind).iterdir()  # mlflow#11782: one run for all ranks
        return ranks[0][kind], ranks[1][kind], read_run(run)

    return of


def test_a_run_that_cannot_begin_is_refused_on_every_rank(trained: Any) -> None:
    one, two, _ = trained("refused")
    said = "StoreError: Monitor: cannot write x (No space left); choose another folder: Monitor(runs=<folder>)"
    assert one == [said, said, "ZeroDivisionError: on purpose"]
    assert two == [said, said, "StoreError: Monitor: rank 0 failed: ZeroDivisionError: on purpose"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_on_the_second_rank_stops_both_alike(kind: str, trained: Any) -> None:
    one, two, _ = trained(kind)
    if not kind.startswith("accelerate"):  # where each rank draws its own dropout
        assert repr(one["reports"]) == repr(two["reports"])  # NaN and all
    applied = [report[1] for report in one["reports"]]
    assert applied == [True, True, True, False, True, True, False]
    assert [report[1] for report in two["reports"]] == applied
    assert one["stopped"] == two["stopped"] != ""
    assert (one["steps"], two["steps"]) == (8, 8)
    assert one["lr"] == two["lr"]
    assert one["lr"] == pytest.approx(0.1 / 6)
    for mine, yours in zip(one["weights"], two["weights"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, yours, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(one["weights"][3], one["weights"][2], strict=True))
    _, _, reason, _, culprit = one["reports"][3]
    assert reason == "non-finite loss"
    expected = {"rank": 1, "micro_batch": 1, "module": "blocks.1.proj", "kind": "NaN", "phase": "forward"}
    assert culprit == culprit | expected | {"type": "Linear"}
    assert "blocks.1.proj" in one["stopped"]
    assert "2 in a row" in one["stopped"]


@pytest.mark.parametrize("kind", KINDS)
def test_all_ranks_write_one_run(kind: str, trained: Any) -> None:
    """mlflow#11782: not one run a rank."""
    one, two, found = trained(kind)
    assert found.run_dir.name == one["run_id"] == two["run_id"]
    assert found.start["identity"]["world"] == 2
    assert found.start["model"]["class"] == "Net"
    assert found.end is not None
    assert found.end["exit_code"] == 3
    bad = events(found, "nonfinite")
    assert [event["step"] for event in bad] == [4, 7, 8]
    assert {event["culprit"]["rank"] for event in bad} == {1}
    sizes = {name: p.numel() for name, p in net(3).named_parameters()}
    told = [(one["name"], one["kind"], one["nan"], one["of"]) for one in bad[0]["parameters"]]
    assert told == [(name, "NaN", size, size) for name, size in sizes.items()]  # of the whole, in pieces or not
    assert bad[0]["run_up"][-1]["step"] == 2
    for name in ("stream_rms", "stream_grad_norm", "grad_norm", "update_rel"):
        assert (found.profiles[name].data[0] > 0).all(), name
    assert found.series["grad_norm"].values[0] == pytest.approx(one["reports"][0][3], rel=1e-6)
    assert events(found, "ledger") == []  # the scheduler follows what was applied


def test_a_rate_that_warms_up_follows_the_steps_that_were_applied(trained: Any) -> None:
    """PR-017: warm-up 10, windows of 4 micro-batches, 2 ranks, one step of 9 not applied; 8 in one process without."""
    one, two, found = trained("warm-up")
    assert [report[1] for report in one["reports"]] == [True] * 3 + [False] + [True] * 5
    optimizer = torch.optim.SGD(net(1).parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 10))
    for _ in range(8):
        optimizer.step()
        scheduler.step()
    assert one["lr"] == two["lr"] == scheduler.get_last_lr()[0] == pytest.approx(0.09)
    assert found.series["applied"].values[-1] == 7
    assert events(found, "ledger") == []


def test_a_hook_that_fails_on_one_rank_looks_once_and_ends_nothing(trained: Any) -> None:
    """In the first of four micro-batches, long before the other rank hears of it."""
    one, two, found = trained("warm-up")
    assert (one["looked"], two["looked"]) == (0, 1)
    (off,) = events(found, "probe_off")
    assert (off["step"], off["probe"]) == (1, "rows")
    assert off["reason"] == "rank 1: after_micro_batch: RuntimeError: on purpose"
    assert "stream_rms" not in found.profiles
    assert (found.profiles["grad_norm"].data[:2] > 0).all()


@pytest.mark.parametrize("kind", ["fsdp2", "fsdp2-late"])
def test_a_pass_that_one_rank_cannot_make_holds_up_no_other(kind: str, trained: Any) -> None:
    """Under FSDP2 ranks gather weights in it; training goes on, as the other tests of this kind say."""
    found = trained(kind)[2]
    (off,) = events(found, "probe_off")
    assert (off["step"], off["probe"]) == (6, "update")
    assert off["reason"] == "rank 1: after_step: RuntimeError: on purpose"
    assert found.series["update"].steps == [1, 2, 4]


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "fsdp2-late"])
def test_gradients_of_blocks_are_those_of_the_mean_over_ranks(kind: str, trained: Any) -> None:
    """Plain autograd of what each rank does alone: its loss counts for a half of the whole."""
    own = []
    for rank in range(2):
        model = net(3)  # which seeds dropout as the worker does
        own.append(twin(model, batches(20, seed=10 + rank)[:2]))
    profiles = trained(kind)[2].profiles
    norms = np.hypot(own[0]["stream_grad_norm"], own[1]["stream_grad_norm"]) / 2
    np.testing.assert_allclose(profiles["stream_grad_norm"].data[0], norms, rtol=1e-5)
    largest = np.maximum(own[0]["stream_grad_absmax"], own[1]["stream_grad_absmax"]) / 2
    np.testing.assert_allclose(profiles["stream_grad_absmax"].data[0], largest, rtol=1e-5)


def test_ddp_and_fsdp2_give_the_same_numbers(trained: Any) -> None:
    """Their first step is the same; FSDP2 has its gradients in pieces, and is clipped."""
    ddp, fsdp2 = (trained(kind)[2] for kind in ("ddp", "fsdp2"))
    same = (
        "stream_rms",
        "stream_absmax",
        "stream_grad_norm",
        "grad_norm",
        "angle_online",
        "branch_ratio",
        "eps_gain_max",
    )
    for name in same:
        np.testing.assert_allclose(fsdp2.profiles[name].data[0], ddp.profiles[name].data[0], rtol=1e-5, err_msg=name)
    missing = {event["what"]: event for event in events(trained("ddp-late")[2], "unavailable")}
    told = missing["stream_grad_norm"]
    assert told["says"].startswith("stream_grad_norm is of 2 ranks' own losses together")
    norm = ddp.series["grad_norm"].values[0]
    assert fsdp2.series["grad_norm"].values[0] == pytest.approx(norm, rel=1e-5)
    assert norm >= ddp.profiles["grad_norm"].data[0].max()
    assert fsdp2.series["grad_norm_clipped"].values[0] == pytest.approx(0.05, rel=1e-3)
    moved = ddp.profiles["update_rel"].data[0] * 0.05 / norm
    np.testing.assert_allclose(fsdp2.profiles["update_rel"].data[0], moved, rtol=1e-3)
