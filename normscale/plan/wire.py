"""What one step sends between GPUs, by collective.

Bytes are those of rings, which is what NCCL does with large tensors: of W ranks each sends (W - 1) / W of the tensor
for a reduce-scatter or an all-gather, and twice that for an all-reduce. A ring over several hosts crosses each host's
link once, so that the link carries what one GPU sends. The two small reductions of a step (the number of targets; loss
and norm) are left out.
"""

from dataclasses import dataclass
from typing import Literal

from normscale.plan.gpus import NETWORK_GBIT_S, Gpu

Collective = Literal["all-reduce", "reduce-scatter", "all-gather"]


@dataclass(frozen=True)
class Sent:
    """A collective over all ranks: how often a step runs over all parameters, and the bytes of all of them."""

    collective: Collective
    what: str
    times: int
    payload: int

    def by_each(self, world: int) -> int:
        """Returns the bytes that each GPU sends in a step."""
        twice = 2 if self.collective == "all-reduce" else 1
        return self.times * self.payload * twice * (world - 1) // world


def sent(engine: str, parameters: int, world: int, accumulate: int, weight: int, wire: int) -> list[Sent]:
    """Returns what an engine sends in one step; `weight` and `wire` are bytes of a gathered weight and a gradient."""
    if world == 1 or engine == "plain":
        return []
    grads, values = parameters * wire, parameters * weight
    gathered = Sent("all-gather", "weights, forward and backward", 2 * accumulate, values)
    updated = Sent("all-gather", "weights, after the step", 1, values)
    if engine == "fsdp2":  # gradients stay whole until the last micro-batch
        return [gathered, Sent("reduce-scatter", "gradients", 1, grads)]
    if engine.startswith("zero3"):
        return [gathered, Sent("reduce-scatter", "gradients", accumulate, grads)]
    if engine.startswith("zero2"):
        return [Sent("reduce-scatter", "gradients", accumulate, grads), updated]
    if engine.startswith("zero1"):
        return [Sent("reduce-scatter", "gradients", 1, grads), updated]
    return [Sent("all-reduce", "gradients", 1, grads)]


@dataclass(frozen=True)
class Link:
    """What a step's bytes cross on their way, and how long at best if nothing else happened meanwhile."""

    what: str
    gb_s: float
    source: str
    seconds: float


def links(bytes_by_each: int, gpu: Gpu | None, world: int, per_host: int) -> list[Link]:
    """Returns the links that a step's bytes cross: inside hosts where that is known, and between hosts."""
    found = []
    if gpu is not None and gpu.link_gb_s and per_host > 1 and world > 1:
        found.append(Link("inside a host", gpu.link_gb_s, "published", bytes_by_each / gpu.link_gb_s / 1e9))
    if world > per_host:
        between = NETWORK_GBIT_S / 8
        found.append(Link("between hosts", between, "assumed", bytes_by_each / between / 1e9))
    return found
