"""The most memory that one pass takes beside the weights: a pass of a few blocks without values, made as deep as asked.

The model's own code runs, forward and backward, on tensors without memory, and what is alive is counted. Of each kind
of block two are run; every further one keeps, until its backward pass, what the second kept. So whatever a scheme
keeps is counted as it is, and no formula has to follow the code.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from normscale.config.schema import RunConfig, TrainConfig
from normscale.models.skeleton import SHOWN, Skeleton, Structure, without_values
from normscale.models.stack import Transformer
from normscale.norms import Norm
from normscale.ops.backends import would_run
from normscale.ops.handles import Opening
from normscale.ops.products import Products
from normscale.plan.kernels import as_on
from normscale.plan.live import Live, Moment
from normscale.train.engines.precision import DTYPES, casting, products_of, settle
from normscale.train.flops import Lengths
from normscale.train.loop import differentiated, summed_loss

BEFORE, HEAD, LOSS, END = "before", "the logits", "the loss", "the end"
FORWARD, BACKWARD = "forward", "backward"  # of a block, whose number follows


@dataclass(frozen=True)
class Footprint:
    """Bytes beside weights, gradients and optimizer, by purpose (see `live`): at the most, and after the forward pass.

    `place` says where the most is.
    """

    most: Counter[str]
    kept: Counter[str]
    place: str

    @property
    def bytes(self) -> int:
        return self.most.total()


@dataclass(frozen=True)
class Pass:
    """What is run: so many sequences of these lengths, on a kind of device.

    `cached` says whether autocast keeps the narrow copy of each weight to the end of the pass; under fsdp2
    and ZeRO-3 it does not.
    """

    sequences: int
    lengths: Lengths
    device: str
    checkpointing: bool = False
    backward: bool = True  # False: an evaluation, without gradients
    cached: bool = True


def footprint(found: Skeleton, config: RunConfig, run: Pass) -> Footprint:
    """Returns the most memory that one pass through the whole model takes."""
    moments = _traced(found, config, run)
    return _as_deep(found, moments)


def _traced(found: Skeleton, config: RunConfig, run: Pass) -> list[Moment]:
    """Returns what is alive at each place of a pass through the skeleton."""
    with FakeTensorMode():
        model = without_values(found.model)
        precision = config.precision
        products = products_of(precision, run.device)
        settle(model, precision, products)
        _choose_norms(model, config, run.device)
        model.checkpointing = run.checkpointing
        model.join_blocks(not run.checkpointing)
        model.train(run.backward)
        weights = list(model.parameters())
        gradients = [torch.empty_like(parameter) for parameter in weights]  # they are there before the pass
        for parameter, gradient in zip(weights, gradients, strict=True):
            parameter.grad = gradient
        owned = [*weights, *model.buffers(), *gradients]
        cast_to = casting(precision, products, "cpu", run.cached)
        live = Live(owned, weights)
        with as_on(run.device), live, _marked(model, live), torch.set_grad_enabled(run.backward):
            _pass(model, _inputs(model, run), cast_to, live, config.train)
    return live.moments


def _pass(
    model: Transformer, inputs: dict[str, Tensor], cast_to: AbstractContextManager[Any], live: Live, train: TrainConfig
) -> None:
    """Runs what `Trainer` runs for a micro-batch, with a loss on every position."""
    targets = inputs.pop("targets_BT")
    with cast_to:
        logits = model(**inputs)  # held until the end, as the trainer does
    live.mark(HEAD)
    loss = summed_loss(logits, targets)
    if loss.requires_grad:
        loss = differentiated(loss, logits, targets, train)
    live.mark(LOSS)
    if loss.requires_grad:
        torch.autograd.backward(loss * 1.0)
    live.mark(END)


def _inputs(model: Transformer, run: Pass) -> dict[str, Tensor]:
    B, T, S = run.sequences, run.lengths.target, run.lengths.source
    inputs = {"tokens_BT": (B, T), "targets_BT": (B, T)}
    inputs |= {"source_BS": (B, S)} if model.source_ends is not None else {}
    inputs |= {"segments_BT": (B, T)} if model.segment is not None else {}
    return {name: torch.zeros(shape, dtype=torch.int64) for name, shape in inputs.items()}


def _choose_norms(model: Transformer, config: RunConfig, device: str) -> None:
    """Sets the norms to what they would run on: `auto` would look at the tensors, which are a CPU's."""
    stream = DTYPES[config.precision.stream]
    for module in model.modules():
        if isinstance(module, Norm | Opening):
            width = module.width if isinstance(module, Norm) else model.d
            gamma, bias = (module.gamma, module.bias) if isinstance(module, Norm) else (None, None)
            wanted = "auto" if config.model.backend in ("auto", "apex", "liger") else config.model.backend
            asked: Any = would_run(wanted, "norm", module.spec, width, stream, device, gamma, bias)[0]
            module.backend = asked


@contextmanager
def _marked(model: Transformer, live: Live) -> Iterator[None]:
    """Has every block and the head mark where they are; the places are (pass, block)."""
    handles = []
    for i, block in enumerate(model.blocks):
        handles += [block.register_forward_pre_hook(_Before(live, i)), block.register_forward_hook(_After(live, i))]
    products = model.products
    model.products = cast(Products, _Head(products, live))
    try:
        yield
    finally:
        model.products = products
        for handle in handles:
            handle.remove()


@dataclass(frozen=True)
class _Before:
    live: Live
    place: int

    def __call__(self, block: nn.Module, inputs: Any) -> None:
        if self.live.purpose != "backward":  # where it is not run again
            self.live.mark_next(BEFORE)
            self.live.purpose, self.live.block = "blocks", self.place


@dataclass(frozen=True)
class _After:
    live: Live
    place: int

    def __call__(self, block: nn.Module, inputs: Any, streams: Any) -> None:
        if self.live.purpose == "backward":
            return
        self.live.mark_next(f"{FORWARD} {self.place}")
        self.live.purpose, self.live.block = "ends", -1
        if streams[0].requires_grad:
            streams[0].register_hook(self._gradient)

    def _gradient(self, gradient: Tensor) -> None:
        self.live.mark(f"{BACKWARD} {self.place}")
        self.live.purpose = "backward"


class _Head:
    """The products of the head, which begin what is counted as the head's."""

    def __init__(self, products: Any, live: Live) -> None:
        self._products, self._live = products, live

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self._live.mark_next(BEFORE)
        self._live.purpose = "head"
        out: Tensor = self._products.linear(x, weight, bias)
        return out


def _as_deep(found: Skeleton, moments: list[Moment]) -> Footprint:
    """Returns the footprint of the whole model from that of its skeleton.

    A structure's further blocks keep what its first one has made and the second needs: from the second's forward pass
    to the end of the first's backward pass. Neither of the two is run with fewer kept below it than in the whole model.
    """
    deep = [structure for structure in found.structures if structure.count > SHOWN]
    by_last = {structure.places[-1]: structure for structure in deep}
    by_first = {structure.places[0]: structure for structure in deep}
    most, kept, where = Counter[str](), Counter[str](), ""
    further: dict[Structure, Counter[str]] = {}
    ending, before = -1, Moment("", Counter(), Counter(), {})
    for moment in moments:
        step, _, number = moment.place.partition(" ")
        block = int(number) if step in (FORWARD, BACKWARD) else -1
        if step == FORWARD and block in by_last:
            further[by_last[block]] = Counter()
        for structure in further:  # what is not needed goes within a forward pass, what is needed in the backward pass
            if step != BACKWARD and moment.place != END:
                at = moment if step == FORWARD else before
                further[structure] = _further(structure, at)
        total = _plus(moment.most, *further.values())
        if total.total() > most.total():
            most, where = total, moment.place
        if moment.place == HEAD:
            kept = _plus(moment.now, *(_further(structure, moment) for structure in further))
        if ending in by_first:
            further.pop(by_first[ending], None)
        ending, before = block if step == BACKWARD else -1, moment
    return Footprint(most, kept, where)


def _further(structure: Structure, at: Moment) -> Counter[str]:
    """Returns what the blocks that were not run would hold besides."""
    made = at.made.get(structure.places[0], Counter[str]())
    return Counter({purpose: size * (structure.count - SHOWN) for purpose, size in made.items()})


def _plus(*counters: Counter[str]) -> Counter[str]:
    return Counter({key: sum(counter[key] for counter in counters) for key in {key for c in counters for key in c}})
