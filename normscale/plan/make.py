"""A plan: everything that is known of a run before it begins."""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from normscale.config.deepspeed import native_bf16
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.config.sharing import check_divides
from normscale.errors import BadInput
from normscale.plan.engines import Memory, Option, Size, memory, name_of, options
from normscale.plan.gpus import Gpu
from normscale.plan.hours import Hours, hours_of, rate_of
from normscale.plan.skeleton import Skeleton, skeleton
from normscale.plan.trace import Footprint, Pass, footprint
from normscale.plan.wire import Link, Sent, links, sent
from normscale.train.flops import flops_per_step, lengths_of

PER_HOST = 8


@dataclass(frozen=True)
class Asked:
    """What a plan is made for. `mfu` None: measured or assumed; `budget` in GPU-hours."""

    gpus: int = 1
    per_host: int = PER_HOST
    gpu: Gpu | None = None
    vocab: int | None = None
    mfu: float | None = None
    budget: float | None = None

    def check(self) -> None:
        """Raises BadInput for numbers that mean nothing."""
        for option, number in (("--gpus", self.gpus), ("--per-host", self.per_host), ("--vocab", self.vocab)):
            if number is not None and number < 1:
                raise BadInput(f"{option}: {number} is not a number of anything; give 1 or more")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise BadInput(f"--mfu: {self.mfu:g} is no share of a GPU's peak; give more than 0 and at most 1")
        if self.budget is not None and not self.budget > 0:
            raise BadInput(f"--hours-budget: {self.budget:g} buys nothing; give GPU-hours, e.g. 100")


@dataclass(frozen=True)
class Row:
    """One engine: its memory beside activations, and the most with them, all kept or blocks computed again."""

    name: str
    memory: Memory
    kept: int
    checkpointed: int


@dataclass(frozen=True)
class Made:
    """A plan. `passes` are the activations of the configured engine, by `model.checkpointing`; `evaluation` its
    evaluation's; `fits` is None where no GPU is known."""

    config: RunConfig
    asked: Asked
    vocab: int
    parameters: dict[str, int]
    flops_a_step: int
    micro_batch: int
    rows: list[Row]
    chosen: Row
    passes: dict[bool, Footprint]
    evaluation: Footprint
    sent: list[Sent]
    links: list[Link]
    hours: Hours | None
    accumulate: int | None  # that would fit, where the configured one does not

    @property
    def peak(self) -> int:
        """The most bytes of one GPU in a step, with the configured engine and checkpointing."""
        return self.chosen.checkpointed if self.config.model.checkpointing else self.chosen.kept

    @property
    def evaluation_peak(self) -> int:
        """The most bytes of one GPU in an evaluation."""
        return self.chosen.memory.bytes + self.evaluation.bytes

    @property
    def fits(self) -> bool | None:
        gpu = self.asked.gpu
        return None if gpu is None else max(self.peak, self.evaluation_peak) <= gpu.usable_bytes

    @property
    def in_budget(self) -> bool | None:
        budget = self.asked.budget
        return None if budget is None or self.hours is None else self.hours.gpu <= budget


def made(config: RunConfig, asked: Asked) -> Made:
    """Returns the plan of a run.

    Raises:
        ConfigError: a model that cannot be, an engine or a batch that so many GPUs cannot share.
        BadInput: something asked for means nothing.
    """
    asked.check()
    train, world = config.train, asked.gpus
    name_of(config.engine, world)
    check_divides(train.batch, world, train.accumulate)
    vocab = asked.vocab or config.data.expected_vocab
    found = skeleton(config.model, vocab)
    parameters = found.parameters()
    total = sum(parameters.values())
    blocks = [sum(p.numel() for p in block.parameters()) for block in found.model.blocks]
    ends = sum(p.numel() for p in found.model.parameters()) - sum(blocks)
    momenta = 2 if train.optim.name == "adamw" else int(train.optim.momentum > 0)
    size = Size(total, max(blocks), ends, momenta, world)
    micro = train.batch // (world * train.accumulate)
    cached = _cached(name_of(config.engine, world))
    evaluation = _evaluation(found, config, micro, cached)

    @functools.cache
    def both(cached: bool) -> dict[bool, Footprint]:
        return {again: _pass(found, config, micro, again, cached) for again in (False, True)}

    def passes_of(option: str) -> dict[bool, Footprint]:
        return both(cached if config.precision.compute == "fp32" else _cached(option))  # fp32 is not cast

    rows = [_row(option, found, config, size, micro, passes_of) for option in options(world)]
    chosen = next(row for row in rows if row.name == name_of(config.engine, world))
    flops = flops_per_step(config.model, vocab, train.batch)
    weight = 2 if config.engine.name == "deepspeed" and native_bf16(config) else 4
    wire = 2 if config.precision.reduce == "bf16" else 4
    moved = sent(chosen.name, total, world, train.accumulate, weight, wire)
    crossed = links(sum(one.by_each(world) for one in moved), asked.gpu, world, asked.per_host)
    hours = None
    if asked.gpu is not None:
        rate = rate_of(config, asked.gpu, Path(config.tracking.runs), asked.mfu)
        hours = hours_of(config, flops, asked.gpu, world, rate, max((link.seconds for link in crossed), default=0.0))
    plan = Made(
        config=config,
        asked=asked,
        vocab=vocab,
        parameters=parameters,
        flops_a_step=flops,
        micro_batch=micro,
        rows=rows,
        chosen=chosen,
        passes=both(cached),
        evaluation=evaluation,
        sent=moved,
        links=crossed,
        hours=hours,
        accumulate=None,
    )
    return plan if plan.fits in (None, True) else replace(plan, accumulate=_accumulate(plan))


def _cached(engine: str) -> bool:
    return engine != "fsdp2" and not engine.startswith("zero3")


def _pass(found: Skeleton, config: RunConfig, sequences: int, checkpointing: bool, cached: bool = True) -> Footprint:
    return footprint(found, config, Pass(sequences, lengths_of(config.model), "cuda", checkpointing, cached=cached))


def _evaluation(found: Skeleton, config: RunConfig, sequences: int, cached: bool) -> Footprint:
    """Returns the footprint of an evaluation: micro-batches, without gradients."""
    run = Pass(sequences, lengths_of(config.model), "cuda", backward=False, cached=cached)
    return footprint(found, config, run)


def _row(
    option: Option,
    found: Skeleton,
    config: RunConfig,
    size: Size,
    micro: int,
    passes_of: Callable[[str], dict[bool, Footprint]],
) -> Row:
    here = config.model_copy(update={"engine": option.engine})
    if option.engine.name == config.engine.name == "deepspeed":
        here = here.model_copy(update={"engine": option.engine.model_copy(update={"json": config.engine.json})})
    own = memory(here, size)
    if option.engine.name == "deepspeed" and native_bf16(config):  # weights are bf16 themselves, and not cast
        narrow = revise(config, {"precision.params": "bf16", "engine.name": "auto"})
        passes = {again: _pass(found, narrow, micro, again) for again in (False, True)}
    else:
        passes = passes_of(option.name)
    kept, again = (own.with_pass(passes[each].bytes, passes[each].most["backward"]) for each in (False, True))
    return Row(option.name, own, kept, again)


def _accumulate(plan: Made) -> int | None:
    """Returns the smallest `train.accumulate` that would fit, by the share of the micro-batch; None where none would.

    Activations go with the sequences of a micro-batch.
    """
    gpu, config = plan.asked.gpu, plan.config
    assert gpu is not None
    room = gpu.usable_bytes - plan.chosen.memory.bytes
    now = plan.passes[config.model.checkpointing].bytes
    each = config.train.batch // plan.asked.gpus
    for accumulate in range(config.train.accumulate + 1, each + 1):
        if each % accumulate == 0 and now * (each / accumulate) / plan.micro_batch <= room:
            return accumulate
    return None
