from pathlib import Path
from typing import Any

import pytest

from normscale.claims.cost import (
    BUILD_S,
    SLOWER,
    START_S,
    Cost,
    fitted,
    from_finished,
    hours,
    memory_of_nearest,
    steps_of,
    work_of,
)
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.tracking.spool import SPOOL
from normscale.train.flops import flops_per_step
from tests.claims.synthetic import record, write

TRUE = Cost(0.001, 0.0007, 2e-8, 1e-11)


def config(layers: int, **changes: Any) -> RunConfig:
    return revise(RunConfig(), {"model.M": layers, "train.steps": 100, **changes})


def test_work_is_counted_by_stack_and_micro_batch() -> None:
    work = work_of(config(10))
    assert (work.sublayers, work.values) == (20, 20 * 64 * 64 * 8)
    assert work.flops == flops_per_step(config(10).model, 256, 8)
    assert work_of(config(10, **{"train.accumulate": 4})).sublayers == 80
    assert work_of(config(10, **{"train.accumulate": 4})).values == work.values
    assert work_of(config(0, **{"model.N": 10})).sublayers == 20
    both = work_of(config(10, **{"model.N": 5}))
    assert (both.sublayers, both.values) == (40, 40 * 64 * 64 * 8)  # 5 x 2 and 10 x 3
    assert work_of(config(10, **{"train.batch": 16})).flops == 2 * work.flops


def test_a_cost_is_linear_in_steps_and_work() -> None:
    ten, twenty = work_of(config(10)), work_of(config(20))
    assert TRUE.step(config(10)) == pytest.approx(0.001 + 20 * 0.0007 + ten.values * 2e-8 + ten.flops * 1e-11)
    more = TRUE.of(config(20)) - TRUE.of(config(10))
    work = 20 * 0.0007 + (twenty.values - ten.values) * 2e-8 + (twenty.flops - ten.flops) * 1e-11
    assert more == pytest.approx(steps_of(config(10)) * work + 20 * BUILD_S)
    longer = TRUE.of(config(10, **{"train.steps": 200})) - TRUE.of(config(10))
    assert longer == pytest.approx(100 * TRUE.step(config(10)))
    assert TRUE.of(config(10)) > START_S


def test_evaluations_count_as_forward_passes() -> None:
    every = config(10, **{"train.eval_every": 10, "train.eval_batches": 6})
    assert steps_of(every) == pytest.approx(100 + 11 * 6 / 3)


def test_other_products_take_longer_on_a_cpu_alone() -> None:
    half = config(10, **{"precision.compute": "fp16"})
    assert TRUE.step(half) == pytest.approx(SLOWER["fp16"] * TRUE.step(config(10)))
    gpu = Cost(device="cuda")
    assert gpu.step(half) == gpu.step(config(10))


SHAPES = [
    {},
    {"train.batch": 2},
    {"model.d": 128},
    {"model.d": 32, "train.accumulate": 2},
    {"model.N": 3},
    {"precision.compute": "fp16"},
]


def test_runs_of_many_shapes_give_their_cost_back() -> None:
    points = [(own := config(layers, **shape), TRUE.step(own)) for layers in (2, 12, 48) for shape in SHAPES]
    cost = fitted(points, "x")
    assert cost is not None
    for layers in (6, 100):
        for shape in SHAPES:
            own = config(layers, **shape)
            assert cost.step(own) == pytest.approx(TRUE.step(own), rel=0.05)


def test_runs_of_one_shape_keep_the_proportions_of_the_default() -> None:
    slow = Cost(*(3 * x for x in (Cost().base, Cost().per_sublayer, Cost().per_value, Cost().per_flop)))
    one = fitted([(config(12), slow.step(config(12)))], "x")
    assert one is not None
    for shape in SHAPES:
        assert one.step(config(100, **shape)) == pytest.approx(slow.step(config(100, **shape)), rel=1e-6)
    two = fitted([(config(layers), TRUE.step(config(layers))) for layers in (2, 12)], "x")
    assert two is not None
    assert two.step(config(48)) == pytest.approx(TRUE.step(config(48)), rel=0.1)
    assert min(two.base, two.per_sublayer, two.per_value, two.per_flop) > 0
    assert fitted([], "x") is None


GPU = Cost(0.004, 0.0006, 8e-12, 2e-14, device="cuda")
WIDE = {"model.d": 1024, "train.batch": 64, "model.context": 256}


def test_a_gpu_whose_launches_were_measured_alone_is_not_taken_for_a_slow_one() -> None:
    narrow = [(own := config(layers), GPU.step(own)) for layers in (2, 12)]
    found = fitted(narrow, "x", "cuda")
    assert found is not None
    assert found.step(config(6, **WIDE)) == pytest.approx(GPU.step(config(6, **WIDE)), rel=0.7)
    both = [*narrow, *((own := config(layers, **WIDE), GPU.step(own)) for layers in (2, 12))]
    found = fitted(both, "x", "cuda")
    assert found is not None
    assert found.step(config(6, **WIDE)) == pytest.approx(GPU.step(config(6, **WIDE)), rel=0.2)


def test_many_runs_outweigh_the_proportions_of_the_default() -> None:
    quick = Cost(0.004, 0.0006, 1e-13, 2e-16, device="cuda")
    points = [(own := config(layers, **more), quick.step(own)) for layers in (2, 12, 48) for more in ({}, WIDE)] * 20
    found = fitted(points, "x", "cuda")
    assert found is not None
    wide = config(6, **WIDE)
    assert found.step(wide) == pytest.approx(quick.step(wide), rel=0.1)


def finish(runs: Path, own: RunConfig, seconds: float, name: str, *, core: float | None = None, **where: Any) -> None:
    made = record()
    assert made.end is not None
    made.end["summary"] |= {"seconds": seconds} | ({} if core is None else {"thread_s": core})
    made.start["identity"] = {"device": "cpu", "threads": 1, "world": 1, **where}
    write(runs, name, made, own.model_dump(mode="json"))


def finish_all(runs: Path, times: int, waiting: float = 0.0, **where: Any) -> None:
    """Writes 3 x `times` runs of ten seconds or more that had a core as TRUE says, and waited for it so much longer."""
    for layers in (2, 12, 48):
        own = config(layers, **{"train.steps": 5000})
        for number in range(times):
            core = TRUE.step(own) * steps_of(own)
            finish(runs, own, (1 + waiting) * core, f"run-{layers}-{number}", core=core, **where)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "host")


def test_many_finished_runs_of_this_machine_and_device_are_the_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, here: None
) -> None:
    finish_all(tmp_path, 12)
    finish(tmp_path, config(12), 1e6, "on-a-gpu", device="cuda")
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / SPOOL).write_text(
        '{"kind": "start", "t": 1, "attempt": 1, "config": {"model": {"L": 3}}}\n\xff'
    )
    found = from_finished(tmp_path)
    assert found is not None
    assert found.source == (
        "36 finished runs on this machine with 1 thread, which count 90% beside the speed of another"
    )
    assert found.step(config(100)) == pytest.approx(TRUE.step(config(100)), rel=0.1)
    assert from_finished(tmp_path, enough=36) == found
    assert from_finished(tmp_path, enough=37) is None
    gpu = from_finished(tmp_path, "cuda")
    assert gpu is not None
    assert gpu.source == "1 finished run on this machine"
    assert gpu.step(config(12)) == pytest.approx(1e6 / steps_of(config(12)))
    monkeypatch.setattr("platform.node", lambda: "another machine")
    assert from_finished(tmp_path) is None
    assert from_finished(tmp_path / "nowhere") is None


@pytest.mark.parametrize("factor", [0.1, 10])
def test_one_run_moves_the_estimate_little_and_a_short_one_less(tmp_path: Path, here: None, factor: float) -> None:
    for seconds in (100.0, 7.0):
        own = config(4, **{"train.steps": round(seconds / factor / Cost().step(config(4)))})
        took = factor * Cost().step(own) * steps_of(own)
        finish(tmp_path / str(seconds), own, took, "run")
        one, counts = from_finished(tmp_path / str(seconds)), min(1.0, took / 10)
        assert one is not None
        # Beside the four that the default counts as.
        assert one.step(own) / Cost().step(own) == pytest.approx(factor ** (counts / (counts + 4)), rel=1e-3)
        assert ("20%" in one.source) == (seconds == 100)


def test_what_else_the_machine_did_is_not_in_the_estimate(tmp_path: Path, here: None) -> None:
    finish_all(tmp_path / "idle", 2)
    finish_all(tmp_path / "loaded", 2, waiting=8)
    assert from_finished(tmp_path / "loaded") == from_finished(tmp_path / "idle")


def test_runs_of_other_threads_or_of_several_processes_say_nothing_of_a_worker(tmp_path: Path, here: None) -> None:
    finish_all(tmp_path, 1, threads=4)
    assert from_finished(tmp_path) is None
    four = from_finished(tmp_path, threads=4)
    assert four is not None
    assert "3 finished runs on this machine with 4 threads" in four.source
    finish_all(tmp_path / "ranks", 1, world=2)
    assert from_finished(tmp_path / "ranks") is None


def test_memory_is_that_of_the_nearest_finished_run_of_this_machine_and_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.node", lambda: "host")
    for layers, device in ((8, "cpu"), (12, "cpu"), (10, "cuda")):
        made = record()
        assert made.end is not None
        made.end["summary"] |= {"seconds": 1.0, "peak_memory_bytes": layers * 1e6}
        made.start["identity"] = {"device": device}
        write(tmp_path, f"run-{layers}", made, config(layers).model_dump(mode="json"))
    found = memory_of_nearest(tmp_path, config(11), "cpu")
    assert found is not None
    assert found[1] == 12e6
    assert memory_of_nearest(tmp_path, config(100), "cpu") is None, "of other work it says too little"
    assert memory_of_nearest(tmp_path, config(10), "cuda") is not None
    monkeypatch.setattr("platform.node", lambda: "another machine")
    assert memory_of_nearest(tmp_path, config(11), "cpu") is None


def test_hours_are_those_of_a_core_or_of_a_gpu() -> None:
    assert hours(5400, "cpu") == "1.5 core-hours"
    assert hours(36, "cuda") == "0.01 GPU-hours"
    assert hours(36e4, "cpu") == "100 core-hours"
