"""DeepSpeed's four stages one after the other in one process group: what each saw, and what was special to it.

It is started as `python -m tests.integration.zero_worker OUT`, as one rank of one or of two; it says on standard output
and error what a user would see.
"""

import copy
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.train.engines.make import make_engine
from normscale.train.engines.zero import ZeroEngine
from normscale.train.loop import Trainer
from tests.integration.engines_worker import OPTIMIZERS, config_of, trajectory
from tests.probes.test_probes import Notes

STAGES = [f"deepspeed:{stage}" for stage in range(4)]
MORE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision.compute": "bf16", "precision.stream": "bf16"},
    "offload": {"engine.offload": "cpu"},
}
# In bf16 stage 0 has another optimizer of DeepSpeed's; offloaded, stages 1 and 2 share all code.
VARIANTS = [*((n, "fp32") for n in range(4)), (0, "bf16"), (2, "bf16"), (3, "bf16"), (2, "offload"), (3, "offload")]


def started(config: RunConfig) -> tuple[ZeroEngine, Trainer, Batches]:
    task = load_task(config)
    engine = make_engine(build(config.model, task.vocab, 0), config)
    assert isinstance(engine, ZeroEngine)
    batches = Batches(task.train, batch=16, seed=0, accumulate=2, rank=engine.rank, world=engine.world)
    return engine, Trainer(engine, config, []), batches


def held(engine: ZeroEngine) -> list[Tensor]:
    """All that this rank holds: masters and moments, copied."""
    state: Any = engine.state_dict()
    state = state.get("own", state)
    moments = [tensor for one in state["optimizer"].values() for tensor in one.values()]
    return [tensor.detach().clone() for tensor in (*state["model"].values(), *moments)]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def resumed(config: RunConfig) -> dict[str, Any]:
    """Trains four steps, and two, and the other two in another engine from the first one's state."""
    engine, trainer, batches = started(config)
    fresh = dict(build(config.model, load_task(config).vocab, 0).named_parameters())
    with engine.whole() as tensors:
        exact = all(torch.equal(tensors[name], p.detach()) for name, p in fresh.items())
    kept: Any = None
    norms, grads = [], None
    for step in range(4):
        if step == 2:
            kept = copy.deepcopy(trainer.state_dict())
        result = trainer.step(batches.window(step), Notes())
        theirs = engine.model.get_global_grad_norm()
        norms.append((result.norm, None if theirs is None else float(theirs)))
        grads = [p.grad for p in engine.inner.parameters()]
    other, again, _ = started(config)
    again.load_state_dict(kept)
    loaded = same(held(other), held(engine))
    results = [again.step(batches.window(step), Notes()) for step in (2, 3)]
    equal = same(held(other), held(engine)) and other.digest() == engine.digest()
    unscaled: list[float] = []
    judge = other.loss_and_norm

    def judged(total: Tensor, count: int) -> tuple[float, float]:
        unscaled.append(judge(total, count)[1])
        other.unscale(0.25)
        loss, norm = judge(total, count)
        unscaled.append(norm)
        return loss, norm

    other.loss_and_norm = judged  # type: ignore[method-assign]
    if config.engine.offload == "none":  # refused with a loss scale
        again.step(batches.window(4), Notes())
        theirs = other.model.get_global_grad_norm()
        unscaled += [] if theirs is None else [float(theirs)]
    counted = engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]["step"]
    return {
        "exact": exact,
        "counted": float(counted),
        "equal": equal,
        "unscaled": unscaled,
        "moved": not loaded,
        "clipped": all(result.norm_clipped < result.norm for result in results),
        "norms": norms,
        "no_grad": all(grad is None for grad in grads or []),
        "dtypes": engine.dtypes(),
        "clip": float(engine.model.gradient_clipping()),
    }


def faulty(config: RunConfig, phase: str) -> dict[str, Any]:
    """Trains four steps; in the second the last rank has a NaN in one pass of the first half."""
    engine, trainer, batches = started(config)
    notes, applied = Notes(), []
    seen: list[Tensor] = []
    intact = False
    for step in range(4):
        window = batches.window(step)
        bad = window[0].tokens_BT if step == 1 and engine.rank == engine.world - 1 else None

        def spoil(x: Tensor) -> Tensor:
            return torch.where(torch.arange(x.numel()).view_as(x) == 5, torch.nan, x)

        def hook(module: object, args: object, out: Any, bad: Tensor | None = bad) -> Any:
            if bad is None or not torch.equal(seen[-1], bad):
                return None
            if phase == "forward":
                return spoil(out)
            if out[0].requires_grad:
                out[0].register_hook(spoil)
            return None

        site = engine.inner.sublayers()[1]
        hooks = [
            engine.inner.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
            (site.branch if phase == "forward" else site).register_forward_hook(hook),
        ]
        before = held(engine)
        applied.append(trainer.step(window, notes).applied)
        intact = same(before, held(engine)) if step == 1 else intact
        for handle in hooks:
            handle.remove()
    other, again, _ = started(config)
    for step in (0, 2, 3):  # as if the bad window had never been
        again.step(batches.window(step), Notes())
    return {
        "applied": applied,
        "intact": intact,
        "as_if_never": same(held(other), held(engine)),
        "events": [event for event in notes.events if event["event"] == "nonfinite"],
    }


def main() -> None:
    torch.set_num_threads(1)
    out, two = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1")) > 1
    seen: dict[Any, Any] = {}
    for name in (*STAGES,) if two else ("plain", *STAGES):
        seen |= {(name, kind): trajectory(name, kind) for kind in OPTIMIZERS}
    for stage, label in VARIANTS if two else ():
        config = revise(config_of(f"deepspeed:{stage}", "adam"), {"train.optim.clip": 0.1} | MORE[label])
        seen[stage, label, "resumed"] = resumed(config)
        for phase in ("forward", "backward") if label == "fp32" else ("backward",):
            seen[stage, label, phase] = faulty(config, phase)
    groups = dist.distributed_c10d._world.pg_map
    limits = [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]
    seen["groups", "limits"] = limits
    torch.save(seen, out / f"rank{os.environ.get('RANK', '0')}.pt")
    started(config_of("deepspeed:1", "adam"))[0].close()


if __name__ == "__main__":
    main()
