"""Where DeepSpeed keeps what: the fp32 parameters that its optimizer steps, and the gradients for them, by stage.

This is DeepSpeed's own business and promised to nobody, so that each name of an attribute of its optimizers stands here
and nowhere else (0.19 was read and run). Whatever is not where it was is noticed: `Parts` checks at the start that the
pieces of all ranks make up every parameter, and the engine, at its first step, that its norm is DeepSpeed's.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Piece(NamedTuple):
    """Entries [start, start + length) of a flattened parameter, which this rank's optimizer holds in a master.

    Attributes:
        name: of the parameter.
        master: index of the master.
        offset: where in the master the piece begins.
    """

    name: str
    start: int
    length: int
    master: int
    offset: int


class Parts(ABC):
    """What one rank holds.

    Attributes:
        masters: the tensors that the optimizer has for parameters: its state is by them, whole or flat.
        groups: the optimizer's group of each master.
        pieces: in the order of the masters, and within each by offset.
        whole: whether every rank holds all of every parameter.
    """

    whole = False

    def __init__(self, engine: Any, model: nn.Module) -> None:
        self.engine, self.optimizer, self.model = engine, engine.optimizer, model
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.masters: list[Tensor] = []
        self.groups: list[int] = []
        self.pieces: list[Piece] = []
        self._find()

    @abstractmethod
    def _find(self) -> None:
        """Fills the lists."""

    @abstractmethod
    def grads(self) -> list[Tensor]:
        """Returns the averaged gradient of each piece, after the last backward of a window; views, where they can be.

        Shape: each [length].
        """

    @abstractmethod
    def refresh(self) -> None:
        """Brings the model's own copies to what the masters hold; every rank calls it."""

    @abstractmethod
    def discard(self) -> None:
        """Lets go of a window's gradients, at its end; the next one is as if it had never been."""

    def values(self) -> list[Tensor]:
        """Returns what the masters hold of each piece; views.

        Shape: each [length] fp32.
        """
        return self.by_piece(self.masters)

    def by_piece(self, tensors: list[Tensor]) -> list[Tensor]:
        """Returns the pieces of tensors that are like the masters, their moments say; views."""
        flat = [tensor.detach().view(-1) for tensor in tensors]
        return [flat[piece.master].narrow(0, piece.offset, piece.length) for piece in self.pieces]

    def offloaded(self) -> list[Tensor]:
        """Returns the gradients of the pieces from where an optimizer on the host takes them; views."""
        if self.engine.device.type == "cuda":  # into pinned memory DeepSpeed copies without waiting
            torch.cuda.synchronize(self.engine.device)
        grads = [master.grad for master in self.masters if master.grad is not None]
        assert len(grads) == len(self.masters), "a master has no gradient"
        return self.by_piece(grads)

    def missing(self, shapes: Mapping[str, torch.Size]) -> int:
        """Returns how many entries of the parameters no rank holds, or several do; every rank calls it."""
        held = torch.tensor([sum(piece.length for piece in self.pieces)])
        if not self.whole and self.world > 1:
            device = "cpu" if self.engine.device.type == "cpu" else self.engine.device
            held = held.to(device)
            dist.all_reduce(held)
        return abs(sum(shape.numel() for shape in shapes.values()) - int(held))


class Stage0(Parts):
    """No ZeRO: every rank has all. In bf16 the optimizer has fp32 copies of its own."""

    whole = True

    def _find(self) -> None:
        groups = getattr(self.optimizer, "fp16_groups", None) or [g["params"] for g in self.optimizer.param_groups]
        masters = getattr(self.optimizer, "fp32_groups", groups)
        self.parameters: list[nn.Parameter] = [p for group in groups for p in group]
        for index, group in enumerate(masters):
            self.masters += group
            self.groups += [index] * len(group)
        self.pieces = [Piece(self.names[id(p)], 0, p.numel(), index, 0) for index, p in enumerate(self.parameters)]

    def grads(self) -> list[Tensor]:
        return [_given(p.grad, p.numel()) for p in self.parameters]

    def refresh(self) -> None:
        for p, master in zip(self.parameters, self.masters, strict=True):
            if p is not master:
                p.data.copy_(master.data)

    def discard(self) -> None:
        self.engine.zero_grad()


class Stage1And2(Parts):
    """Each of the optimizer's groups is one flat tensor in equal parts, a rank each; parameters lie across borders."""

    def _find(self) -> None:
        held = self.optimizer
        self.masters = list(held.single_partition_of_fp32_groups)
        self.groups = list(range(len(self.masters)))
        for index, parameters in enumerate(held.bit16_groups):
            first, at = self.rank * int(held.partition_size[index]), 0
            last = first + int(held.partition_size[index])
            for p in parameters:
                start, stop = max(at, first), min(at + p.numel(), last)
                if start < stop:
                    name = self.names[id(p)]
                    self.pieces.append(Piece(name, start - at, stop - start, index, start - first))
                at += p.numel()

    def grads(self) -> list[Tensor]:
        if self.optimizer.cpu_offload:
            return self.offloaded()
        found: list[Tensor] = []
        for index in range(len(self.masters)):
            own = [piece for piece in self.pieces if piece.master == index]
            given = self.optimizer.averaged_gradients.get(index) or []
            found += [_given(grad, piece.length) for grad, piece in zip(given[: len(own)], own, strict=True)]
        return found

    def refresh(self) -> None:
        self.optimizer.update_lp_params()

    def discard(self) -> None:
        held = self.optimizer
        self.engine.zero_grad()
        held.zero_grad()
        for index in list(held.averaged_gradients):
            held.averaged_gradients[index] = held.all_grad_tensors[index] = None
        held._release_preflattened_grad_buffers()
        if held.cpu_offload:
            held.micro_step_id = -1
            held.reset_cpu_buffers()
            held._offload_accumulated_param_ids = set()


class Stage3(Parts):
    """Every parameter is in equal parts, a rank each, the last ones filled up; they lie in flat tensors together."""

    def _find(self) -> None:
        held = self.optimizer
        self.masters = list(held.fp32_partitioned_groups_flat)
        self.groups = [held.sub_group_to_group_id[index] for index in range(len(self.masters))]
        for index, parameters in enumerate(held.fp16_groups):
            at = 0
            for p in parameters:
                part = p.partition_numel()
                start = min(self.rank * part, p.ds_numel)
                self.pieces.append(Piece(self.names[id(p)], start, min(part, p.ds_numel - start), index, at))
                at += part

    def grads(self) -> list[Tensor]:
        held = self.optimizer
        if held.offload_optimizer:
            return self.offloaded()
        found: list[Tensor] = []
        for index in range(len(self.masters)):
            own = [piece for piece in self.pieces if piece.master == index]
            given = held.averaged_gradients.get(index) or []
            for grad, piece in zip(given, own, strict=True):
                found.append(grad.detach().view(-1).narrow(0, 0, piece.length))
        return found

    def refresh(self) -> None:
        held = self.optimizer
        held._partition_all_parameters()
        for index in range(len(self.masters)):
            held._reassign_or_swap_out_partitioned_parameters(index)
        if held.persistent_parameters:
            held.persistent_parameters[0].all_gather(held.persistent_parameters)

    def discard(self) -> None:
        held = self.optimizer
        self.engine.zero_grad()
        held.zero_grad()  # which counts the micro-batches of a window from 0 again
        if held.offload_optimizer:
            held.reset_cpu_buffers()
            held._offload_boundary_param_ids = set()


def parts_of(engine: Any, model: nn.Module) -> Parts:
    """Returns what a rank of a DeepSpeed engine holds."""
    stage = int(engine.zero_optimization_stage())
    return (Stage0, Stage1And2, Stage1And2, Stage3)[stage](engine, model)


class Seen:
    """DeepSpeed's optimizer as probes ask for one: a flat parameter for each group, and its state laid out like it.

    What is asked for is put together then: on measured steps.
    """

    def __init__(self, parts: Parts, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._parts, self._optimizer, self._device = parts, optimizer, device
        self._leaves = [torch.empty(0) for _ in optimizer.param_groups]

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        groups = zip(self._optimizer.param_groups, self._leaves, strict=True)
        return [{**group, "params": [leaf]} for group, leaf in groups]

    @property
    def state(self) -> dict[Tensor, dict[str, Any]]:
        return {leaf: dict(self._of_group(index)) for index, leaf in enumerate(self._leaves)}

    def _of_group(self, index: int) -> Iterator[tuple[str, Any]]:
        parts = self._parts
        states = [self._optimizer.state.get(master, {}) for master in parts.masters]
        own = [state for state, group in zip(states, parts.groups, strict=True) if group == index]
        for name, first in (own[0] if own else {}).items():
            if not isinstance(first, Tensor) or first.dim() == 0:
                yield name, first
                continue
            held = [piece for piece in parts.pieces if parts.groups[piece.master] == index]
            taken = [states[p.master][name].view(-1).narrow(0, p.offset, p.length) for p in held]
            yield name, torch.cat(taken).to(self._device) if taken else first[:0]


def _given(grad: Tensor | None, length: int) -> Tensor:
    assert grad is not None, "a parameter has no gradient"
    flat = grad.detach().reshape(-1)
    assert flat.numel() == length, (flat.numel(), length)
    return flat
