"""The memory of one GPU beside activations, by engine: weights, gradients, optimizer, and what engines hold besides.

Read off the engines of `train.engines` and what they set up of PyTorch 2.13 and DeepSpeed 0.19.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from normscale.config.deepspeed import native_bf16, rendered
from normscale.config.engine import EngineConfig
from normscale.config.schema import RunConfig

FULL = 4  # bytes of an fp32 number
BUCKET = 500_000_000  # entries that DeepSpeed reduces at a time, unless told otherwise (reduce_bucket_size)
LIVE = 1_000_000_000  # entries that ZeRO-3 keeps gathered, unless told otherwise (stage3_max_live_parameters)
PREFETCHED = 50_000_000  # entries that it gathers ahead (stage3_prefetch_bucket_size)


@dataclass(frozen=True)
class Option:
    """An engine as a plan offers it."""

    name: str  # as people say it: zero2+cpu
    engine: EngineConfig


@dataclass(frozen=True)
class Size:
    """What engines need to know of a model: parameters in all, of the largest block, outside blocks; momenta; GPUs."""

    parameters: int
    block: int
    ends: int
    momenta: int
    world: int


@dataclass(frozen=True)
class Memory:
    """Bytes on one GPU, beside activations, and on its host for this GPU.

    With `held` the gradients have their place from the beginning; else they come as activations go.
    """

    weights: int
    gradients: int
    optimizer: int
    buffers: int
    host: int = 0
    held: bool = True

    @property
    def bytes(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.buffers

    def with_pass(self, activations: int, working: int) -> int:
        """Returns the most bytes of a pass; `working` are those of its activations that the last block needs, too."""
        if self.held:
            return self.bytes + activations
        return self.bytes - self.gradients + max(activations, self.gradients + working)


def options(world: int) -> list[Option]:
    """Returns all engines that so many GPUs can train with."""
    found = [Option("plain" if world == 1 else "ddp", EngineConfig(name="plain" if world == 1 else "ddp"))]
    found.append(Option("fsdp2", EngineConfig(name="fsdp2")))
    for zero in range(4):
        found.append(Option(f"zero{zero}", EngineConfig(name="deepspeed", zero=zero)))
    for zero in (1, 2, 3):
        found.append(Option(f"zero{zero}+cpu", EngineConfig(name="deepspeed", zero=zero, offload="cpu")))
    return found


def name_of(engine: EngineConfig, world: int) -> str:
    """Returns the name of the option that a configuration means."""
    name = engine.on(world)
    if name != "deepspeed":
        return name
    return f"zero{engine.zero}" + ("+cpu" if engine.offload == "cpu" else "")


def memory(config: RunConfig, size: Size) -> Memory:
    """Returns the memory of the engine that a configuration names."""
    name = config.engine.on(size.world)
    if name == "deepspeed":
        return _deepspeed(config, size)
    each = 2 if config.precision.params == "bf16" else FULL
    if name == "fsdp2":
        return _fsdp2(config, size, each)
    own = size.parameters * each
    # DDP reduces out of buckets of its own, which hold every gradient once more.
    return Memory(own, own, size.momenta * own, own if name == "ddp" else 0)


def _fsdp2(config: RunConfig, size: Size, each: int) -> Memory:
    """All is in shards but what is gathered: around the blocks for the whole pass, one block, and the next ahead.

    A backward pass has a block's gradients whole, and once more where they are reduced from. Between micro-batches they
    stay whole, of all blocks.
    """
    shard = _share(size) * each
    gathered = size.ends + 2 * size.block
    whole = size.parameters if config.train.accumulate > 1 else size.block + size.ends
    buffers = (gathered + size.block) * each + whole * each
    return Memory(shard, shard, size.momenta * shard, buffers)


def _deepspeed(config: RunConfig, size: Size) -> Memory:
    """Masters and momenta are fp32; weights and gradients that of the model."""
    zero, stage = _zero_settings(config, size.world), config.engine.zero
    each = 2 if native_bf16(config) else FULL
    own, share = size.parameters, _share(size)
    bucket = int(zero.get("reduce_bucket_size", BUCKET))
    if stage == 0:
        masters = own * FULL if each == 2 else 0
        gradients = (own + min(own, BUCKET)) * each  # and a flat copy of what is reduced at a time
        return Memory(own * each, gradients, size.momenta * own * FULL + masters, 0, held=False)
    offloaded = config.engine.offload == "cpu"
    twice = 2 if zero.get("overlap_comm", stage == 3) and stage < 3 else 1
    buffers = bucket * (FULL if stage == 1 else each) * twice
    states = size.momenta * share * FULL
    if stage < 3:
        masters = share * FULL  # a copy of this rank's share even where the weights are fp32 themselves
        gradients = own * each if stage == 1 else share * FULL
        step = share * FULL  # the share's gradient as the step takes it
        if offloaded:
            return Memory(own * each, own * each if stage == 1 else 0, 0, buffers, masters + states + step, held=False)
        return Memory(own * each, max(gradients, step), masters + states, buffers, held=False)
    masters = share * FULL
    live = min(own, int(zero.get("stage3_max_live_parameters", LIVE)))
    ahead = min(own, int(zero.get("stage3_prefetch_bucket_size", PREFETCHED)))
    buffers += (live + ahead) * each
    if offloaded:
        return Memory(0, 0, 0, buffers, masters + states + share * (FULL + each))
    # Empirical, of two CPU ranks: the share of the weights stands there twice, and its gradient once more for the step.
    return Memory(2 * share * each, share * (each + FULL), masters + states, buffers)


def _zero_settings(config: RunConfig, world: int) -> Mapping[str, Any]:
    found: Mapping[str, Any] = rendered(config, world)["zero_optimization"]
    return found


def _share(size: Size) -> int:
    return -(-size.parameters // size.world)
