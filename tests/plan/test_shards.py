"""The predicted peak of engines with several ranks against what PyTorch's tracker sees of one of two."""

import json
from pathlib import Path
from typing import Any

import pytest

from normscale.config.load import revise
from normscale.models.skeleton import skeleton
from normscale.plan.engines import Size, memory
from normscale.plan.trace import Pass, footprint
from normscale.train.flops import Lengths
from tests.integration.ranks import run_two
from tests.plan.shards_worker import BASE

CASES: list[dict[str, Any]] = [
    {"engine.name": "ddp"},
    {"engine.name": "fsdp2"},
    {"engine.name": "fsdp2", "train.accumulate": 2},
    {"engine.name": "fsdp2", "model.checkpointing": True},
    *({"engine.name": "deepspeed", "engine.zero": stage} for stage in range(4)),
]
BUCKETS = {  # DeepSpeed's own would hide all else of so small a model
    "reduce_bucket_size": 40_000,
    "stage3_prefetch_bucket_size": 10_000,
    "stage3_max_live_parameters": 100_000,
    "stage3_param_persistence_threshold": 100,
}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_rank_takes_what_was_predicted(tmp_path: Path) -> None:
    out, settings = tmp_path / "peaks.json", tmp_path / "deepspeed.json"
    settings.write_text(json.dumps({"zero_optimization": BUCKETS}))
    cases = [case | ({"engine.json": str(settings)} if case["engine.name"] == "deepspeed" else {}) for case in CASES]
    run_two("shards_worker", str(out), *map(json.dumps, cases), package="tests.plan", timeout=170)
    peaks = json.loads(out.read_text())
    for changes, peak in zip(cases, peaks, strict=True):
        config = revise(BASE, changes)
        found = skeleton(config.model, 256)
        blocks = [sum(p.numel() for p in block.parameters()) for block in found.model.blocks]
        ends = sum(p.numel() for p in found.model.parameters()) - sum(blocks)
        own = memory(config, Size(sum(found.parameters().values()), max(blocks), ends, 2, 2))
        run = Pass(2 // config.train.accumulate, Lengths(64), "cpu", config.model.checkpointing)
        most = footprint(found, config, run)
        assert own.with_pass(most.bytes, most.most["backward"]) == pytest.approx(peak, rel=0.1), changes
