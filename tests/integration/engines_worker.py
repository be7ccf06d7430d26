"""The same training on several engines, one after the other in one process group: what each saw.

It is started as `python -m tests.integration.engines_worker OUT ENGINE...`, as one rank of one or of two; an engine is
a name, or deepspeed:STAGE. With two ranks the sharding engine meets a fault, too: see `faulty`.
"""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.models.builder import build
from normscale.probes.activations import Activations
from normscale.probes.adam import AdamEpsilon
from normscale.probes.gradients import Gradients
from normscale.probes.stream_gradients import StreamGradients
from normscale.probes.update import ModelUpdate
from normscale.probes.weights import WeightUpdates
from normscale.train.engines.engine import Engine
from normscale.train.engines.make import make_engine
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer
from normscale.train.observe import subject_of
from tests.probes.test_probes import Notes

# Learned positions and 7 rows of them: not all parameters divide by the ranks.
MODEL = {"M": 2, "d": 16, "heads": 2, "ffn": 28, "context": 7, "positions": "learned"}
OPTIMIZERS: dict[str, tuple[int, dict[str, Any]]] = {
    "sgd": (10, {"name": "sgd", "lr": 1.0, "clip": 1.0}),
    "adam": (50, {"name": "adamw", "lr": 3e-3, "eps": 1e-6, "weight_decay": 0.01}),
}


def section(engine: str) -> dict[str, Any]:
    """The configuration's `engine` for a name of ours."""
    name, _, stage = engine.partition(":")
    # Stage 3 would leave parameters as small as these whole.
    own = {"json": str(Path(__file__).with_name("zero3.json"))} if stage == "3" else {}
    return {"name": name} | ({"zero": int(stage)} if stage else {}) | own


def config_of(engine: str, optimizer: str, **more: Any) -> RunConfig:
    steps, optim = OPTIMIZERS[optimizer]
    train = {
        "steps": steps,
        "batch": 16,
        "accumulate": 2,
        "optim": optim,
        "on_nonfinite": "skip",
        "label_smoothing": 0.1,
    }
    settings = {"model": MODEL, "data": {"max_bytes": 60_000}, "train": train, "probes": {"every": 5}}
    return RunConfig(**{**settings, "engine": section(engine), **more})


def gradients_of(engine: Engine) -> dict[str, Tensor]:
    """The averaged gradients, whole, as the engine's own library gives them."""
    found = {}
    for name, p in engine.inner.named_parameters():
        if engine.name == "deepspeed":
            from deepspeed.utils import safe_get_full_grad

            found[name] = safe_get_full_grad(p).clone()
        else:
            grad: Any = p.grad
            found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
    return found


def trajectory(engine_name: str, optimizer: str) -> dict[str, Any]:
    """Trains, and returns the first gradient, all losses and norms, the profiles, and the last weights."""
    config = config_of(engine_name, optimizer)
    task = load_task(config)
    engine = make_engine(build(config.model, task.vocab, 0), config)
    batches = Batches(task.train, batch=16, seed=0, accumulate=2, rank=engine.rank, world=engine.world)
    fixed = Batches(task.train, batch=4, seed=1).window(0)[0].inputs
    steps = config.train.steps
    probes = [Activations(), StreamGradients(), Gradients(), WeightUpdates(), ModelUpdate(fixed, (), 5, steps)]
    probes += [AdamEpsilon(every=5, last=steps)]
    subject = subject_of(engine)
    for probe in probes:
        probe.attach(subject)
    trainer, notes = Trainer(engine, config, probes), Notes()
    first: dict[str, Tensor] = {}
    apply = engine.apply

    def noted(lr: float, factor: float) -> None:
        first.update({} if first else gradients_of(engine))
        apply(lr, factor)

    engine.apply = noted  # type: ignore[method-assign]
    results = [trainer.step(batches.window(step), notes) for step in range(steps)]
    with engine.whole() as tensors:
        values = {name: tensor.clone() for name, tensor in tensors.items()}
    held_out, digest = trainer.evaluate(Batches(task.train, batch=16, seed=2).window(0)), engine.digest()
    with torch.no_grad(), engine.whole(keep=True) as tensors:
        for tensor in tensors.values():
            tensor.mul_(2)
    with engine.whole() as tensors:
        kept = all(torch.equal(tensor, 2 * values[name]) for name, tensor in tensors.items())
    return {
        "class": type(engine).__name__,
        "world": engine.world,
        "gradients": first,
        "losses": torch.tensor([result.loss for result in results], dtype=torch.float64),
        "norms": torch.tensor([result.norm for result in results], dtype=torch.float64),
        "profiles": {f"{step} {name}": torch.from_numpy(rows) for (step, name), rows in notes.profiles.items()},
        "update": torch.tensor([notes.values[step]["update"] for step in range(5, steps + 1, 5)]),
        "changed": min(values["changed"] for values in notes.values.values()),
        "events": notes.events,
        "held_out": held_out,
        "kept": kept,
        "values": values,
        "digest": digest,
    }


def faulty(engine_name: str) -> dict[str, Any]:
    """Trains seven steps, of which in the third the last rank alone has a NaN in a branch, and in its first half.

    In the sixth that rank alone wants the run to end.
    """
    config = config_of(engine_name, "adam")
    task = load_task(config)
    engine = make_engine(build(config.model, task.vocab, 0), config)
    batches = Batches(task.train, batch=16, seed=0, accumulate=2, rank=engine.rank, world=engine.world)
    trainer, notes = Trainer(engine, config, []), Notes()
    applied, digests, stops = [], [], []
    for step in range(7):
        window = batches.window(step)
        bad = window[0].tokens_BT if step == 2 and engine.rank == engine.world - 1 else None
        hooks = spoilt(engine, bad)
        trainer.stop_wanted = step == 5 and engine.rank == engine.world - 1
        applied.append(trainer.step(window, notes).applied)
        stops.append(trainer.stop_agreed)
        for hook in hooks:
            hook.remove()
        digests.append(engine.digest())
    again = Trainer(make_engine(build(config.model, task.vocab, 0), config), config, [])
    for step in (0, 1, 3, 4, 5, 6):  # as if the bad window had never been
        again.step(batches.window(step), Notes())
    seen = {"applied": applied, "digests": digests, "events": notes.events, "stops": stops}
    return seen | {"without": again.engine.digest()}


def spoilt(engine: Engine, bad: Tensor | None) -> list[Any]:
    """Makes a branch of the second block NaN wherever the model reads `bad`."""
    seen: list[Tensor] = []
    branch = engine.inner.sublayers()[3].branch
    return [
        engine.inner.register_forward_pre_hook(lambda module, args: seen.append(args[0])),
        branch.register_forward_hook(
            lambda module, args, out: out * torch.nan if bad is not None and torch.equal(seen[-1], bad) else None
        ),
    ]


def main() -> None:
    torch.set_num_threads(1)
    out, *engines = sys.argv[1:]
    seen: dict[Any, Any] = {(name, kind): trajectory(name, kind) for name in engines for kind in OPTIMIZERS}
    rank = int(os.environ.get("RANK", "0"))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        seen |= {(name, "faulty"): faulty(name) for name in engines}
    torch.save(seen, Path(out) / f"rank{rank}.pt")
    PlainEngine.close(object.__new__(PlainEngine))


if __name__ == "__main__":
    main()
