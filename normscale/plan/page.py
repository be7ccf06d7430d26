"""A plan as a page of text, and for programs."""

from typing import Any

from normscale.plan.gpus import FRAGMENTED, GIB, RESERVED_GIB
from normscale.plan.make import Made, Row
from normscale.plan.trace import BACKWARD, FORWARD
from normscale.progress import figure
from normscale.tracking.show import amount
from normscale.train.flops import lengths_of

PURPOSES = {
    "blocks": "blocks",
    "casts": "weights in the compute dtype",
    "ends": "embeddings",
    "head": "logits and loss",
    "backward": "gradients on their way, and what is computed again",
}


def page(plan: Made) -> str:
    """Returns the plan as people read it, in 100 columns."""
    return "\n".join([*_what(plan), "", *_memory(plan), "", *_wire(plan), *_hours(plan)])


def _what(plan: Made) -> list[str]:
    config, asked = plan.config, plan.asked
    model, train = config.model, config.train
    total, gpu = sum(plan.parameters.values()), asked.gpu
    lengths = lengths_of(model)
    both = bool(model.N and model.M)
    sublayers = 2 * model.N + (3 if both else 2) * model.M
    parts = ", ".join(f"{role} {amount(count)}" for role, count in plan.parameters.items())
    tokens = train.batch * lengths.target
    beside = f" beside {train.batch * lengths.source:,} of the source" if both else ""
    each = amount(plan.flops_a_step / tokens, "FLOP")
    size = (
        "" if gpu is None else f" of {gpu.memory_gib:g} GiB ({gpu.name}), {gpu.usable_bytes / GIB:.1f} GiB for training"
    )
    shared = (
        f"{train.accumulate} micro-batches of {plan.micro_batch}" if train.accumulate > 1 else f"{plan.micro_batch}"
    )
    return [
        f"model        N={model.N} M={model.M}, {sublayers} sublayers of width {model.d}; {plan.vocab} tokens",
        f"parameters   {total:,}",
        f"             {parts}",
        f"a step       {tokens:,} tokens{beside}; {amount(plan.flops_a_step, 'FLOP')}, {each} a token",
        f"on           {asked.gpus} GPU{'s' * (asked.gpus > 1)}{size}; {shared} sequences on each",
    ]


def _memory(plan: Made) -> list[str]:
    """Returns the table of engines, and what the most of the chosen one is made of."""
    unit, name = _unit(plan)

    def _gib(size: float) -> str:
        return _figure(size / unit)

    head = f"{name + ' on one GPU':<14}{'weights':>9}{'gradients':>11}{'optimizer':>11}{'buffers':>9}"
    lines = [f"{head}{'with all kept':>20}{'checkpointed':>18}"]
    for row in plan.rows:
        own = row.memory
        mark = ">" if row is plan.chosen else " "
        state = f"{mark} {row.name:<12}{_gib(own.weights):>9}{_gib(own.gradients):>11}{_gib(own.optimizer):>11}"
        host = f"   host {_gib(own.host)}" if own.host else ""
        lines.append(
            f"{state}{_gib(own.buffers):>9}{_gib(row.kept) + _fits(plan, row.kept):>20}"
            f"{_gib(row.checkpointed) + _fits(plan, row.checkpointed):>18}{host}"
        )
    found = plan.passes[plan.config.model.checkpointing]
    parts = [f"{PURPOSES[key]} {_gib(found.most[key])}" for key in PURPOSES if found.most[key] >= found.bytes / 200]
    lines.append(f"> configured; activations {_gib(found.bytes)} at the most, {place(found.place)}:")
    lines.append(f"  {', '.join(parts)}")
    gpu = plan.asked.gpu
    fits = "" if gpu is None or plan.evaluation_peak <= gpu.usable_bytes else ", which is too much"
    lines.append(f"  an evaluation, by micro-batches too: {_gib(plan.evaluation_peak)} in all{fits}")
    if plan.fits is False:
        mend = f"train.accumulate={plan.accumulate} would" if plan.accumulate else "no train.accumulate would"
        lines.append(f"  it does not fit; {mend}")
    if gpu is not None:
        assumed = f"{RESERVED_GIB:g} GiB for CUDA, NCCL and cuBLAS, {FRAGMENTED:.0%} for fragmentation"
        lines.append(f"  assumed besides: {assumed}")
    return lines


def _fits(plan: Made, size: int) -> str:
    gpu = plan.asked.gpu
    return "" if gpu is None else " fits" if size <= gpu.usable_bytes else " no  "


def _wire(plan: Made) -> list[str]:
    world, (unit, name) = plan.asked.gpus, _unit(plan)
    if not plan.sent:
        return ["sent         nothing: one GPU"] if world == 1 else []
    lines: list[str] = []
    for one in plan.sent:
        times, begin = f"{one.times} x " if one.times > 1 else "", "" if lines else "sent"
        payload, by_each = (_figure(size / unit) for size in (one.payload, one.by_each(world)))
        said = f"{times}{payload} {name} a step, {by_each} {name} by each GPU"
        lines.append(f"{begin:<13}{one.collective} of {one.what}: {said}")
    for link in plan.links:
        lines.append(f"{'':<13}{link.what}: {figure(link.seconds)} s a step at {link.gb_s:g} GB/s ({link.source})")
    return lines


def _hours(plan: Made) -> list[str]:
    hours, train = plan.hours, plan.config.train
    if hours is None:
        lacks = "no GPU is given or here" if plan.asked.gpu is None else "the peak of this GPU is not published"
        return [f"time         not known: {lacks} (--gpu NAME)"]
    lines = [
        f"time         {figure(hours.step_s)} s a step, {figure(hours.wall)} hours for {train.steps:,} steps and their "
        f"evaluations: {figure(hours.gpu)} GPU-hours",
        f"             at {hours.rate.mfu:.0%} of the peak ({hours.rate.source})",
    ]
    if plan.config.model.checkpointing:
        lines.append(
            "             in the model's own FLOPs, three quarters of what is computed: blocks are computed again"
        )
    if hours.by_links:
        lines.append(
            "             that is the links' time, longer than the products': fewer micro-batches, or another engine"
        )
    if plan.asked.budget is not None:
        steps = int(train.steps * min(1.0, plan.asked.budget / hours.gpu))
        said = "enough" if plan.in_budget else f"enough for {steps:,} steps"
        lines.append(f"budget       {figure(plan.asked.budget)} GPU-hours: {said}")
    return lines


def place(found: str) -> str:
    """Returns where the most is, in words."""
    if found.startswith(FORWARD):
        return "at the end of the blocks' forward pass"
    return "when the backward pass begins" if found.startswith(BACKWARD) else "at the loss"


def _unit(plan: Made) -> tuple[int, str]:
    """Returns what a page counts bytes in: GiB, or MiB where all is less than one GiB."""
    return (GIB, "GiB") if max(row.kept for row in plan.rows) >= GIB else (GIB // 1024, "MiB")


def _figure(size: float) -> str:
    return (
        f"{size:.0f}"
        if size >= 1000
        else f"{size:.3g}"
        if size >= 100
        else f"{size:.1f}"
        if size >= 1
        else f"{size:.2g}"
    )


def as_json(plan: Made) -> dict[str, Any]:
    """Returns the plan for programs; all sizes in bytes."""
    gpu, asked, hours = plan.asked.gpu, plan.asked, plan.hours
    return {
        "parameters": plan.parameters | {"all": sum(plan.parameters.values())},
        "vocab": plan.vocab,
        "flops_per_step": plan.flops_a_step,
        "gpus": asked.gpus,
        "gpu": None
        if gpu is None
        else {"name": gpu.name, "memory": int(gpu.memory_gib * GIB), "usable": gpu.usable_bytes},
        "micro_batch": plan.micro_batch,
        "engine": plan.chosen.name,
        "engines": {row.name: _row(plan, row) for row in plan.rows},
        "activations": {
            "kept": _counted(plan.passes[False].most),
            "checkpointed": _counted(plan.passes[True].most),
            "evaluation": _counted(plan.evaluation.most),
        },
        "peak": plan.peak,
        "peak_of_evaluation": plan.evaluation_peak,
        "fits": plan.fits,
        "accumulate_that_fits": plan.accumulate,
        "sent_per_step": [
            {
                "collective": one.collective,
                "what": one.what,
                "times": one.times,
                "payload": one.payload,
                "by_each": one.by_each(asked.gpus),
            }
            for one in plan.sent
        ],
        "links": [vars(link) for link in plan.links],
        "hours": None if hours is None else {"wall": hours.wall, "gpu": hours.gpu, "step_s": hours.step_s},
        "mfu": None if hours is None else {"value": hours.rate.mfu, "source": hours.rate.source},
        "in_budget": plan.in_budget,
    }


def _row(plan: Made, row: Row) -> dict[str, Any]:
    own = row.memory
    sizes = {"weights": own.weights, "gradients": own.gradients, "optimizer": own.optimizer, "buffers": own.buffers}
    return sizes | {"host": own.host, "peak": row.kept, "peak_checkpointed": row.checkpointed}


def _counted(sizes: Any) -> dict[str, int]:
    return {purpose: int(sizes[purpose]) for purpose in PURPOSES} | {"all": int(sum(sizes.values()))}
