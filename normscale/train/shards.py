"""This rank's part of parameters that FSDP2 has sharded, in one flat buffer each for values and gradients.

FSDP2 keeps the part that a rank has of a parameter, some of its rows, in a tensor with zeros at the end where other
ranks have more, and gathers from there. These tensors become views of one buffer; and since gradients are there already
when a backward pass brings more, they are added to, in the other buffer. The optimizer and all sums over parameters
then work as without shards, at the same small cost.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from normscale.errors import LaunchError
from normscale.train.flat import Fault, FlatParameters


class ShardedParameters(FlatParameters):
    """The parts that this rank has of a model's parameters, laid out alike on every rank."""

    def __init__(self, model: nn.Module) -> None:
        self._held = _held(model)
        super().__init__(model)

    def _sizes(self, p: nn.Parameter) -> tuple[int, int]:
        return self._held[id(p)]._sharded_param_data.numel(), _local(p).numel()

    def _move(self, p: nn.Parameter, start: int, stop: int) -> None:
        held, local = self._held[id(p)], _local(p)
        slot, gradient = self.values[start:stop], self.grads[start : start + local.numel()]
        slot.copy_(held._sharded_param_data)
        held._sharded_param_data = slot
        if held.reduce_dtype is not None and torch.promote_types(p.dtype, held.reduce_dtype) is p.dtype:
            held.reduce_dtype = None  # micro-batches are summed in it; what is sent is the group's
        p._local_tensor = slot[: local.numel()].view(local.shape)  # type: ignore[attr-defined]
        p.grad = held.to_sharded_dtensor(gradient.view(local.shape))

    def named(self) -> dict[str, Tensor]:
        """Returns the part of every parameter by name, flattened, on the host."""
        values = self.values.detach().cpu()
        return {name: values[start:stop] for name, (start, stop) in self.spans.items()}

    def check(self) -> None:
        for name, p in zip(self.spans, self.parameters, strict=True):
            start, stop = self.spans[name]
            assert self._held[id(p)]._sharded_param_data.data_ptr() == self.values[start:].data_ptr(), name
            if start < stop:
                assert p.grad is not None, name
                assert _local(p).data_ptr() == self.values[start:].data_ptr(), name
                assert _local(p.grad).data_ptr() == self.grads[start:].data_ptr(), name

    def gathered(self) -> dict[str, Tensor]:
        """Returns copies of all parameters by name, whole; every rank calls it."""
        world = dist.get_world_size()
        rows = self.values.new_empty(world, self.values.numel())
        dist.all_gather(list(rows.unbind()), self.values)
        return {
            name: rows[:, slice(*self.slots[name])].reshape(-1)[: p.numel()].view(p.shape)
            for name, p in zip(self.spans, self.parameters, strict=True)
        }

    def keep(self, name: str, whole: Tensor) -> None:
        """Puts this rank's part of a parameter that is given whole into its place."""
        (start, stop), (first, last) = self.slots[name], self.spans[name]
        begin = dist.get_rank() * (stop - start)
        self.values[first:last].copy_(whole.reshape(-1)[begin : begin + last - first])

    def counts(self) -> Tensor:
        """Returns the entries of this rank that are NaN, +Inf and -Inf, of each parameter in model order.

        Shape: result [parameters, 3] int64.
        """
        found = {fault.parameter: (fault.nan, fault.pos_inf, fault.neg_inf) for fault in self.faults()}
        return torch.tensor([found.get(name, (0, 0, 0)) for name in self.names], device=self.values.device)

    def joined(self, counts: Tensor) -> list[Fault]:
        """Returns the faults that such counts, summed over ranks, come to."""
        rows = zip(self.names, counts.tolist(), strict=True)
        return [Fault(name, *row) for name, row in rows if any(row)]


def _held(model: nn.Module) -> dict[int, Any]:
    """Returns what FSDP2 keeps of each parameter, by the parameter's id.

    Raises:
        LaunchError: this version of PyTorch keeps it in another way.
    """
    assert isinstance(model, FSDPModule)
    try:
        model._get_fsdp_state()._lazy_init()  # at the first pass it would write its own dtypes over ours
        return {
            id(held.sharded_param): held
            for module in model.modules()
            if isinstance(module, FSDPModule)
            for group in module._get_fsdp_state()._fsdp_param_groups
            for held in group.fsdp_params
            if held._sharded_param_data.dim() == 1
        }
    except AttributeError as error:
        raise LaunchError(
            f"engine.name: fsdp2 does not know how PyTorch {torch.__version__} keeps shards ({error}); set engine.name "
            "to ddp or deepspeed, or install PyTorch 2.13"
        ) from error


def _local(x: Tensor) -> Tensor:
    assert isinstance(x, DTensor)
    return x._local_tensor
