"""Plans as a whole: the paper's own models, what fits, what is sent, what it costs, and the command."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from normscale.cli import main
from normscale.config.engine import EngineConfig
from normscale.config.load import load, revise
from normscale.config.schema import RunConfig
from normscale.errors import BadInput, ConfigError
from normscale.models.skeleton import skeleton
from normscale.plan.engines import FULL, Size, memory
from normscale.plan.gpus import FRAGMENTED, GIB, GPUS, RESERVED_GIB, find_gpu
from normscale.plan.hours import ASSUMED_MFU, RECOMPUTED, hours_of, measured, rate_of
from normscale.plan.make import Asked, made
from normscale.plan.page import as_json, page
from normscale.plan.wire import sent
from normscale.tracking.spool import SpoolWriter

TRAIN = Path(__file__).parents[2] / "configs" / "train"
PAPERS = sorted(path for path in TRAIN.glob("*.yaml") if path.stem.startswith(("wmt17", "iwslt14", "opus100")))
XLM_R = 250_002  # pieces: the vocabulary that the paper's parameter counts of OPUS-100 point to
H200 = GPUS["h200"]
SMALL = RunConfig.model_validate({"model": {"M": 6}, "train": {"batch": 8, "steps": 100}})


@pytest.mark.parametrize("path", PAPERS, ids=lambda path: path.stem)
def test_the_papers_models_check_and_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(path)]) == 0
    assert main(["plan", str(path), "--gpus", "8", "--gpu", "h200"]) in (0, 1)
    out = capsys.readouterr().out
    assert "2500 sublayers" in out or "500-500" not in path.stem
    assert "> ddp" in out


def test_the_papers_hyper_parameters() -> None:
    published = {
        "wmt17": (1.5e-3, 1e-4, 0.4, 100_000),
        "iwslt14": (5e-4, 1e-4, 0.4, 8000),
        "opus100": (5e-4, 0.0, 0.1, None),
    }
    lines = {"wmt17": 128 * 140, "iwslt14": 160, "opus100": 128 * 140}  # of 4096 / 140 and 4000 / 160 tokens
    subwords = {"wmt17": 40_000, "iwslt14": 10_000, "opus100": 250_000}
    assert len(PAPERS) == 7
    for path in PAPERS:
        config = load(path)
        name, *depths = path.stem.split("-")
        optim, schedule = config.train.optim, config.train.schedule
        lr, decay, dropout, steps = published[name]
        assert (optim.lr, optim.weight_decay, config.model.dropout) == (lr, decay, dropout)
        assert (optim.name, optim.betas, optim.eps, optim.clip) == ("adamw", (0.9, 0.98), 1e-8, None)
        assert (schedule.kind, schedule.warmup_steps) == ("inverse_sqrt", 4000)
        assert (config.train.batch, config.data.subwords, config.model.context) == (lines[name], subwords[name], 128)
        assert config.train.label_smoothing == 0.1
        assert steps in (None, config.train.steps)
        assert (config.model.d, config.model.ffn, config.model.heads) == (512, 2048, 8)
        assert [str(config.model.N), str(config.model.M)] == depths
        assert config.precision.compute == "fp16"
    assert "ASSUMED: 100 000 updates" in (TRAIN / "opus100-500-500.yaml").read_text()


@pytest.mark.parametrize(("name", "published"), [("opus100-500-500", 3.8e9), ("opus100-100-100", 863e6)])
def test_the_published_parameters_come_out(name: str, published: float) -> None:
    counted = sum(skeleton(load(TRAIN / f"{name}.yaml").model, XLM_R).parameters().values())
    assert counted == pytest.approx(published, rel=0.002)  # 3.806 and 863.8: 0.16 % and 0.09 % more
    assert sum(skeleton(load(TRAIN / f"{name}.yaml").model, 256).parameters().values()) < 0.97 * published


def test_a_thousand_blocks_are_planned_by_two_of_each_kind() -> None:
    found = skeleton(load(TRAIN / "opus100-500-500.yaml").model, 256)
    assert len(found.model.blocks) == 4
    assert [structure.count for structure in found.structures] == [500, 500]


def test_what_does_not_fit_says_what_would() -> None:
    config = revise(load(TRAIN / "wmt17-100-100.yaml"), {"train.accumulate": 1})
    plan = made(config, Asked(gpus=8, gpu=H200))
    assert plan.fits is False
    assert plan.accumulate is not None
    fitting = made(revise(config, {"train.accumulate": plan.accumulate}), Asked(gpus=8, gpu=H200))
    assert fitting.peak <= H200.usable_bytes
    assert f"train.accumulate={plan.accumulate} would" in page(plan)
    smaller = [a for a in range(1, plan.accumulate) if config.train.batch // 8 % a == 0][-1]
    assert made(revise(config, {"train.accumulate": smaller}), Asked(gpus=8, gpu=H200)).peak > H200.usable_bytes


@pytest.mark.parametrize(("gib", "accumulate"), [(8.0, None), (12.0, 16)])
def test_what_would_fit_is_planned_as_fitting(gib: float, accumulate: int | None) -> None:
    """Of FSDP2, whose gradients stay whole between micro-batches, and with casts of weights that do not shrink."""
    changes = {"engine.name": "fsdp2", "train.batch": 512, "train.accumulate": 1}
    config, asked = revise(load(TRAIN / "opus100-100-100.yaml"), changes), Asked(gpus=16, gpu=find_gpu(None, gib))
    plan = made(config, asked)
    assert (plan.fits, plan.accumulate) == (False, accumulate)
    assert (
        f"it does not fit; {f'train.accumulate={accumulate}' if accumulate else 'no train.accumulate'} would"
        in page(plan)
    )
    fits = {n: made(revise(config, {"train.accumulate": n}), asked).fits for n in ((8, 16) if accumulate else ())}
    assert [n for n in fits if fits[n]] == ([accumulate] if accumulate else [])


@pytest.mark.timeout(120)
def test_a_batch_beyond_any_machine_is_not_worked_at_without_end() -> None:
    config = revise(load(TRAIN / "quick.yaml"), {"train.batch": 10**12, "engine.name": "plain"})
    plan = made(config, Asked(gpu=find_gpu(None, 8.0)))
    assert plan.fits is False
    assert plan.accumulate is not None
    divisors = [2**i * 5**j for i in range(13) for j in range(13)]
    assert plan.accumulate in divisors
    smaller = max(each for each in divisors if each < plan.accumulate)
    fits = [made(revise(config, {"train.accumulate": n}), plan.asked).fits for n in (smaller, plan.accumulate)]
    assert fits == [False, True]


def test_an_evaluation_alone_that_does_not_fit_is_said() -> None:
    config = revise(load(TRAIN / "wmt17-100-100.yaml"), {"train.batch": 64, "train.accumulate": 1})
    config = revise(config, {"model.checkpointing": True, "precision.compute": "fp32", "engine.name": "deepspeed"})
    config = revise(config, {"engine.zero": 0})
    plan = made(config, Asked(gpus=8, gpu=H200))
    assert plan.peak < plan.evaluation_peak
    usable = (plan.peak + plan.evaluation_peak) / 2
    gpu = find_gpu(None, usable / GIB / (1 - FRAGMENTED) + RESERVED_GIB)
    said = page(made(config, Asked(gpus=8, gpu=gpu)))
    assert "in all, which is too much\n  it does not fit; " in said


def test_an_accumulation_that_an_engines_json_names_is_not_advised_against(tmp_path: Path) -> None:
    path = tmp_path / "zero.json"
    path.write_text(json.dumps({"gradient_accumulation_steps": 1}))
    config = revise(load(TRAIN / "wmt17-100-100.yaml"), {"train.batch": 512, "train.accumulate": 1})
    config = revise(config, {"engine.name": "deepspeed", "engine.zero": 1, "precision.compute": "fp32"})
    asked = Asked(gpus=8, gpu=find_gpu(None, 24.0))
    assert made(config, asked).accumulate is not None
    assert made(revise(config, {"engine.json": str(path)}), asked).accumulate is None


def engine(**fields: Any) -> RunConfig:
    return SMALL.model_copy(update={"engine": EngineConfig.model_validate({"name": "deepspeed", **fields})})


def test_shards_by_arithmetic() -> None:
    """By stage, of N parameters on 4 GPUs in fp32: weights, gradients, optimizer with masters."""
    n, size = 4000, Size(4000, 100, 50, 2, 4)
    wanted = {0: (n, 2 * n, 2 * n), 1: (n, n, 3 * n // 4), 2: (n, n // 4, 3 * n // 4), 3: (n // 2, n // 2, 3 * n // 4)}
    for zero, parts in wanted.items():
        found = memory(engine(zero=zero), size)
        assert (found.weights, found.gradients, found.optimizer) == tuple(FULL * part for part in parts)
    sharded = memory(SMALL.model_copy(update={"engine": EngineConfig(name="fsdp2")}), size)
    assert (sharded.weights, sharded.gradients, sharded.optimizer) == (n, n, 2 * n)
    whole = memory(SMALL, size)
    assert (whole.weights, whole.gradients, whole.optimizer, whole.buffers) == (4 * n, 4 * n, 8 * n, 4 * n)
    off = memory(engine(zero=2, offload="cpu"), size)
    assert (off.optimizer, off.host) == (0, 4 * n)  # a share of the master, two momenta and the gradient


def test_fsdp2_keeps_whole_gradients_between_micro_batches() -> None:
    config = SMALL.model_copy(update={"engine": EngineConfig(name="fsdp2")})
    size = Size(4000, 100, 50, 2, 4)
    more = memory(revise(config, {"train.accumulate": 2}), size).buffers - memory(config, size).buffers
    assert more == FULL * (4000 - 100 - 50)


def test_bytes_between_gpus() -> None:
    """Of 100 fp32 parameters on 4 GPUs with 2 micro-batches: rings send 3/4 of a tensor, an all-reduce twice that."""
    by_each = {
        name: sum(one.by_each(4) for one in sent(name, 100, 4, 2, 4, 4))
        for name in ("ddp", "zero1", "zero2", "zero3", "fsdp2")
    }
    assert by_each == {"ddp": 600, "zero1": 600, "zero2": 900, "zero3": 1800, "fsdp2": 1500}
    assert sent("plain", 100, 1, 2, 4, 4) == []


def test_hours_follow_from_flops_and_a_rate_that_is_named() -> None:
    config = revise(load(TRAIN / "wmt17-18-18.yaml"), {"train.eval_every": 0, "train.eval_batches": 1})
    plan = made(config, Asked(gpus=8, gpu=H200, budget=1.0))
    assert plan.hours is not None
    assert (plan.hours.rate.mfu, plan.hours.rate.source[:7]) == (ASSUMED_MFU, "assumed")
    assert plan.hours.step_s == pytest.approx(plan.flops_a_step / (8 * 989.5e12 * ASSUMED_MFU))
    assert plan.hours.gpu == pytest.approx(8 * plan.hours.wall)
    assert plan.in_budget is False
    assert "budget       1 GPU-hours: enough for" in page(plan)
    again = made(revise(config, {"model.checkpointing": True}), Asked(gpus=8, gpu=H200, mfu=0.15))
    assert again.hours is not None
    assert again.hours.step_s == pytest.approx(plan.hours.step_s * 2)  # it is this run's, recomputation included
    assert again.hours.rate.source == "given by --mfu"
    assert "three quarters of what is computed: blocks are computed again" in page(again)
    assert "three quarters" not in page(plan)


def finished(runs: Path, name: str, config: RunConfig, mfu: float) -> None:
    """Writes the records of a run of this configuration that ended with this MFU on an H200."""
    with SpoolWriter(runs / name, 1) as spool:
        spool.start(run_id=name, config=config.model_dump(mode="json"), identity={"device_name": H200.device})
        spool.metrics(1, 1, {"loss_train": 1.0})
        spool.end("finished", 0, {"mfu": mfu})


def test_a_measured_rate_has_its_recomputation_in_it_once(tmp_path: Path) -> None:
    """A checkpointed run's MFU is of the model's own FLOPs over all its time: the next one takes as long."""
    changes = {"tracking.runs": str(tmp_path), "train.eval_every": 0, "train.eval_batches": 1}
    plainly = revise(load(TRAIN / "wmt17-18-18.yaml"), changes)
    again = revise(plainly, {"model.checkpointing": True})
    assert step_s(again, tmp_path) == pytest.approx(step_s(plainly, tmp_path) * RECOMPUTED)
    for source, mfu in ((again, 0.12), (plainly, 0.16)):
        finished(tmp_path, "only", source, mfu)
        assert step_s(again, tmp_path) == pytest.approx(1e15 / (8 * 989.5e12 * 0.12))
        assert step_s(plainly, tmp_path) == pytest.approx(1e15 / (8 * 989.5e12 * 0.16))
        shutil.rmtree(tmp_path / "only")


def step_s(config: RunConfig, runs: Path) -> float:
    """Returns the seconds of a step of 1 PFLOP on 8 GPUs, at the rate that the runs of a folder tell."""
    hours = hours_of(config, 1e15, H200, 8, rate_of(config, H200, runs, None))
    assert hours is not None
    return hours.step_s


def test_a_rate_is_measured_with_the_same_products(tmp_path: Path) -> None:
    config = revise(load(TRAIN / "quick.yaml"), {"tracking.runs": str(tmp_path)})
    tf32 = revise(config, {"precision.tf32": True})
    finished(tmp_path, "plain", config, 0.1)
    finished(tmp_path, "tf32", tf32, 0.05)
    for asked, name in ((config, "plain"), (tf32, "tf32")):
        found = measured(asked, H200, tmp_path)
        assert found is not None
        assert found.source == f"measured in {name}"
    assert measured(revise(config, {"precision.compute": "bf16"}), H200, tmp_path) is None


def test_links_that_are_slower_than_the_products_are_said() -> None:
    config = revise(load(TRAIN / "wmt17-100-100.yaml"), {"engine.name": "fsdp2", "train.accumulate": 70})
    plan = made(config, Asked(gpus=16, gpu=H200))
    assert "that is the links' time" in page(plan)
    assert plan.hours is not None
    assert plan.hours.step_s == max(link.seconds for link in plan.links)
    assert "links' time" not in page(made(config, Asked(gpus=16, per_host=16, gpu=H200, mfu=0.01)))


def test_gpus_by_name_and_memory() -> None:
    assert find_gpu("H200", None) is H200
    found = find_gpu(None, 24.0)
    assert found is not None
    assert 0 < found.usable_bytes < 24 * GIB
    with pytest.raises(BadInput, match="did you mean 'h100'"):
        find_gpu("h10", None)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gpus", "3"], "train.batch: 8 cannot be shared by 3 ranks"),
        (["--gpus", "0"], "--gpus: 0"),
        (["--gpu", "h201"], "did you mean 'h200'?"),
        (["--memory", "x"], "'x' is not a number"),
        (["--memory", "inf"], "--memory: inf GiB are no one GPU's; give more than 1 and at most 1,048,576"),
        (["--memory", "nan"], "--memory: nan GiB hold no training"),
        (["--memory", "1e300"], "--memory: 1e+300 GiB are no one GPU's"),
        (["--gpu", "h200", "--memory", "inf"], "--memory: inf GiB"),
        (["--hours-budget", "inf"], "--hours-budget: inf is no budget; leave it out"),
        (["--hours-budget", "nan"], "--hours-budget: nan buys nothing"),
        (["--mfu", "nan"], "--mfu: nan"),
        (["--mfu", "1e-320"], "--mfu: 9.99989e-321 is no share"),
        (["--vocab", "1000000000000000000000"], "--vocab: 1000000000000000000000 is not"),
        (["--per-host", "9" * 400], f"--per-host: {'9' * 21}... is not"),
        (["--mfu", "2"], "--mfu: 2"),
        (["--hours-budget", "0"], "--hours-budget: 0"),
        (["engine.name=plain", "--gpus", "2"], "engine.name: plain is for one process"),
        (["model.heads=3"], "heads"),
    ],
)
def test_bad_input_is_one_line(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(TRAIN / "quick.yaml"), *words]) == 2
    out, err = capsys.readouterr()
    assert says in err
    assert err.count("\n") == 1
    assert not out


def test_the_command_prints_a_page_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", str(TRAIN / "quick.yaml"), "--gpus", "2", "--gpu", "a100-80", "train.steps=1000"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 110
    assert "> ddp" in text
    assert main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is True
    assert found["engines"]["ddp"]["peak"] == found["peak"]
    assert set(found["engines"]) == {
        "ddp",
        "fsdp2",
        *(f"zero{i}" for i in range(4)),
        "zero1+cpu",
        "zero2+cpu",
        "zero3+cpu",
    }
    assert found["parameters"]["all"] == sum(v for k, v in found["parameters"].items() if k != "all")


def test_an_engine_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="plain is for one process"):
        made(SMALL.model_copy(update={"engine": EngineConfig(name="plain")}), Asked(gpus=2))
    assert as_json(made(SMALL, Asked()))["fits"] is None
