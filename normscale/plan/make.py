"""A plan: everything that is known of a run before it begins."""

import bisect
import functools
import math
from dataclasses import dataclass, replace
from pathlib import Path

from normscale.config.deepspeed import native_bf16
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.config.sharing import check_divides
from normscale.config.sources import plain
from normscale.errors import BadInput, ConfigError
from normscale.models.skeleton import Skeleton, skeleton
from normscale.plan.engines import Memory, Option, Size, memory, name_of, options
from normscale.plan.gpus import Gpu
from normscale.plan.hours import Hours, hours_of, rate_of
from normscale.plan.trace import Footprint, Pass, footprint
from normscale.plan.wire import Link, Sent, links, sent
from normscale.train.flops import flops_per_step, lengths_of

PER_HOST = 8
MOST = 10**9  # GPUs, or tokens of a vocabulary
LEAST_MFU = 1e-6  # below it a number is a slip, and hours are beyond numbers


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
            if number is not None and not 1 <= number <= MOST:
                shown = plain(str(number), 24)
                raise BadInput(f"{option}: {shown} is not a number of anything; give 1 or more, at most {MOST:,}")
        if self.mfu is not None and not LEAST_MFU <= self.mfu <= 1:
            raise BadInput(f"--mfu: {self.mfu:g} is no share of a GPU's peak; give more than 0 and at most 1")
        if self.budget is not None and not 0 < self.budget < math.inf:
            said = "is no budget; leave it out, or" if self.budget == math.inf else "buys nothing;"
            raise BadInput(f"--hours-budget: {self.budget:g} {said} give GPU-hours, e.g. 100")


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
    engines = {option.name: option for option in options(world)}
    own = engines[name_of(config.engine, world)]
    traces = _Traces(found, config, world)
    rows = [_row(option, config, size, traces) for option in engines.values()]
    chosen = next(row for row in rows if row.name == own.name)
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
        micro_batch=traces.micro,
        rows=rows,
        chosen=chosen,
        passes={again: traces.training(own, again) for again in (False, True)},
        evaluation=traces.evaluation(own),
        sent=moved,
        links=crossed,
        hours=hours,
        accumulate=None,
    )
    return plan if plan.fits in (None, True) else replace(plan, accumulate=_accumulate(plan, own, size, found))


class _Traces:
    """The footprints of a micro-batch of one configuration, by engine; what engines have in common is traced once."""

    def __init__(self, found: Skeleton, config: RunConfig, world: int) -> None:
        self.micro = config.train.batch // (world * config.train.accumulate)
        self._found, self._config = found, config
        self._traced = functools.cache(self._trace)

    def training(self, option: Option, checkpointing: bool) -> Footprint:
        return self._traced(*self._precision(option), checkpointing, True)

    def evaluation(self, option: Option) -> Footprint:
        """Returns the footprint of micro-batches too, but without gradients."""
        return self._traced(*self._precision(option), False, False)

    def _precision(self, option: Option) -> tuple[bool, bool]:
        """Returns whether the weights are bf16 themselves, and whether narrow copies of them live through a pass."""
        narrow = option.engine.name == "deepspeed" and native_bf16(self._config)
        sharded = option.name == "fsdp2" or option.name.startswith("zero3")
        return narrow, narrow or not sharded or self._config.precision.compute == "fp32"  # fp32 is not cast

    def _trace(self, narrow: bool, cached: bool, checkpointing: bool, backward: bool) -> Footprint:
        config = self._config
        if narrow:
            config = revise(config, {"precision.params": "bf16", "engine.name": "auto"})
        lengths = lengths_of(config.model)
        return footprint(self._found, config, Pass(self.micro, lengths, "cuda", checkpointing, backward, cached))


def _row(option: Option, config: RunConfig, size: Size, traces: _Traces) -> Row:
    own = _memory(option, config, size)
    kept, again = (_step(own, traces.training(option, checkpointing)) for checkpointing in (False, True))
    return Row(option.name, own, kept, again)


def _memory(option: Option, config: RunConfig, size: Size) -> Memory:
    engine = option.engine
    if engine.name == config.engine.name == "deepspeed":
        engine = engine.model_copy(update={"json": config.engine.json})
    return memory(config.model_copy(update={"engine": engine}), size)


def _step(own: Memory, activations: Footprint) -> int:
    """Returns the most bytes of a step."""
    return own.with_pass(activations.bytes, activations.most["backward"])


def _accumulate(plan: Made, own: Option, size: Size, found: Skeleton) -> int | None:
    """Returns the smallest larger `train.accumulate` with which the engine fits; None where it does with none.

    Each that is tried is planned as it would be run: an engine may hold more once there are several micro-batches, and
    not all that a pass takes becomes less with them. What fits with some fits with more.
    """
    gpu, config, world = plan.asked.gpu, plan.config, plan.asked.gpus
    assert gpu is not None
    usable, each = gpu.usable_bytes, config.train.batch // world

    def fits(accumulate: int) -> bool:
        try:
            tried = revise(config, {"train.accumulate": accumulate})
            held = _memory(own, tried, size)
        except ConfigError:  # an engine's JSON names another number
            return False
        traces = _Traces(found, tried, world)
        step = _step(held, traces.training(own, tried.model.checkpointing))
        return max(step, held.bytes + traces.evaluation(own).bytes) <= usable

    larger = [accumulate for accumulate in _divisors(each) if accumulate > config.train.accumulate]
    place = bisect.bisect_left(larger, True, key=fits)
    return larger[place] if place < len(larger) else None


def _divisors(number: int) -> list[int]:
    """Returns all numbers that divide one, in order; that of a batch may be as large as a configuration takes."""
    small = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return sorted({*small, *(number // each for each in small)})
