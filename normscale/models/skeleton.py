"""A deep model by a few of its blocks: those that stand for all others of the same structure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.init import weights
from normscale.models.plan import Plan, resolve
from normscale.models.stack import Transformer
from normscale.schemes import Depth
from normscale.schemes.scheme import Side

SHOWN = 2  # blocks built of each structure: what the second adds, each further one adds

ROLES = {"embedding": "embeddings", "head": "head", "self": "self-attention", "cross": "cross-attention", "ffn": "ffn"}


@dataclass(frozen=True)
class Structure:
    """Blocks of one side with the same modules and shapes: how many there are, and where those that are built stand.

    `places` are positions in the skeleton's list of blocks.
    """

    side: Side
    count: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Skeleton:
    """A model of the real widths with a few blocks, on no device, and what they stand for."""

    model: Transformer
    structures: tuple[Structure, ...]

    def parameters(self) -> dict[str, int]:
        """Returns the number of parameters of the whole model by what they are for."""
        counts = dict.fromkeys((*ROLES.values(), "norms and the scheme"), 0)
        times = self._times()
        for weight in weights(self.model):
            counts[ROLES[weight.role.kind]] += weight.values.numel() * times.get(_block_of(weight.name), 1)
        everything = sum(p.numel() * times.get(_block_of(name), 1) for name, p in self.model.named_parameters())
        counts["norms and the scheme"] = everything - sum(counts.values())
        return {role: count for role, count in counts.items() if count}

    def largest_block(self) -> int:
        """Returns the number of parameters of the largest block."""
        return max(sum(p.numel() for p in block.parameters()) for block in self.model.blocks)

    def tensors(self) -> int:
        """Returns the number of parameter tensors of the whole model."""
        times = self._times()
        return sum(times.get(_block_of(name), 1) for name, _ in self.model.named_parameters())

    def _times(self) -> dict[int, int]:
        """Returns how many blocks each built block stands for: one each, and the last of a structure for the rest."""
        times = {place: 1 for structure in self.structures for place in structure.places}
        for structure in self.structures:
            times[structure.places[-1]] += structure.count - len(structure.places)
        return times


def skeleton(config: ModelConfig, vocab: int) -> Skeleton:
    """Returns the skeleton of a model of any depth, without memory for its weights.

    Raises:
        ConfigError: as `resolve`.
    """
    plan = resolve(config)
    with torch.device("meta"):
        found = _structures(plan)
        chosen = [block for blocks in found.values() for block in blocks[:SHOWN]]
        model = build(config, vocab, 0, only=frozenset(chosen))
    sides: tuple[Side, ...] = ("encoder", "decoder")
    order = sorted(chosen, key=lambda block: (sides.index(block[0]), block[1]))
    model.depth = Depth(*(sum(side == each for side, _ in order) for each in sides))
    structures = (
        Structure(blocks[0][0], len(blocks), tuple(order.index(block) for block in blocks[:SHOWN]))
        for blocks in found.values()
    )
    return Skeleton(model, tuple(structures))


def without_values(model: Transformer) -> Transformer:
    """Returns a skeleton's model with fake tensors on the CPU in place of those on no device; in a FakeTensorMode."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                made = nn.Parameter(torch.empty(parameter.shape, dtype=torch.float32))
                module._parameters[name] = made
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
    return model


def _structures(plan: Plan) -> dict[Any, list[tuple[Side, int]]]:
    """Returns the blocks of the model, (side, number), grouped by what the scheme has them own.

    All else of a block follows from its side and the configuration. Numbers of a scheme are constants, whatever they
    are.
    """
    generator = torch.Generator()
    blocks: dict[tuple[Side, int], list[Any]] = {}
    for site in plan.depth.sites():
        make = plan.make(1, generator, site.side, site.kind)
        own, slots = plan.scheme.own(plan.depth, site, make), plan.scheme.slots(plan.depth, site, make)
        blocks.setdefault((site.side, site.block), []).append((site.kind, _described(own), _described(slots)))
    groups: dict[Any, list[tuple[Side, int]]] = {}
    for (side, number), parts in blocks.items():
        groups.setdefault((side, tuple(parts)), []).append((side, number))
    return groups


def _described(parts: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple((name, _shape(part)) for name, part in parts.items())


def _shape(part: "nn.Module | Tensor | float") -> Any:
    if isinstance(part, Tensor):
        return tuple(part.shape)
    if not isinstance(part, nn.Module):
        return "constant"
    shapes = tuple((name, tuple(p.shape)) for name, p in part.named_parameters())
    return type(part).__qualname__, part.extra_repr(), shapes


def _block_of(name: str) -> int:
    """Returns the place of the block that a parameter belongs to; -1 for the ends."""
    head, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if head == "blocks" else -1
