"""FSDP2 (`fully_shard`): weights, gradients and optimizer state in shards, gathered block by block as they are used."""

import math
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from normscale.config.precision import PrecisionConfig
from normscale.errors import LaunchError
from normscale.models.stack import Transformer
from normscale.train.engines.plain import PlainEngine
from normscale.train.engines.precision import DTYPES
from normscale.train.engines.ranks import join, own_device
from normscale.train.flat import Fault
from normscale.train.shards import ShardedParameters


class FSDP2Engine(PlainEngine):
    """Each rank holds some rows of every parameter; a block's are gathered for its forward and for its backward.

    Products are rounded by autocast as on other engines, so that only `precision.reduce` is FSDP2's to honour. In
    bf16 a block's narrow copy of its weights is then kept for its backward, 2 bytes a parameter on every rank, unless
    `model.checkpointing` makes the block anew. Gradients are reduced once a window, after its last micro-batch: until
    then a block's lie whole on each rank, so that with `train.accumulate` above 1 they are not sharded.
    """

    name = "fsdp2"
    sharded = True
    gathers = True
    flat: ShardedParameters

    def __init__(self, model: Transformer, precision: PrecisionConfig, timeout_s: float = 300.0) -> None:
        self.rank, self.world = join(timeout_s)
        super().__init__(model, precision, own_device())

    def _laid_out(self) -> ShardedParameters:
        # Measured passes give views; nothing here writes to what a block has returned.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        # Of the group that is there: a mesh of its own making may wait for half an hour, whatever our limit.
        group = dist.group.WORLD
        assert group is not None
        mesh = DeviceMesh.from_group(group, self.device.type)
        policy = MixedPrecisionPolicy(reduce_dtype=DTYPES[self.precision.reduce], cast_forward_inputs=False)
        for block in self.inner.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.inner, mesh=mesh, mp_policy=policy)
        register_fsdp_forward_method(cast(Any, self.inner), "features")
        whole = [name for name, p in self.inner.named_parameters() if not isinstance(p, DTensor)]
        if whole or not isinstance(self.inner, FSDPModule) or mesh.size() != self.world:
            raise LaunchError(
                f"engine.name: fsdp2 was asked for on {self.world} rank(s), but PyTorch left {len(whole)} parameter(s) "
                f"whole, on {mesh.size()}; set engine.name=ddp"
            )
        return ShardedParameters(self.inner)

    def dtypes(self) -> dict[str, str]:
        return super().dtypes() | {"reduce": str(DTYPES[self.precision.reduce]).removeprefix("torch.")}

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        cast(FSDPModule, self.inner).set_requires_gradient_sync(last)
        return nullcontext()

    @contextmanager
    def aside(self) -> Iterator[Transformer]:
        try:
            with super().aside() as model:
                yield model
        finally:
            # What is gathered around the blocks stays until a backward, and weights may change before the next pass.
            cast(FSDPModule, self.inner).reshard()

    def recover(self) -> None:
        cast(FSDPModule, self.inner).reset_iter_state()

    def loss_and_norm(self, total: Tensor, count: int) -> tuple[float, float]:
        loss, square = self.sum(torch.stack([total.double(), self.flat.grad_norm().square()])).tolist()
        return loss / count, math.sqrt(square)

    def finite(self) -> bool:
        return not self.count(int(not self.flat.finite()))

    def faults(self) -> list[Fault]:
        return self.flat.joined(self.sum(self.flat.counts()))

    @contextmanager
    def whole(self, keep: bool = False) -> Iterator[Mapping[str, Tensor]]:
        tensors = self.flat.gathered()
        yield tensors
        if keep:
            for name, tensor in tensors.items():
                self.flat.keep(name, tensor)

    def state_dict(self) -> dict[str, Any]:
        own = {"model": self.flat.named(), "optimizer": self._moments()}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        others = {name: x for name, x in self.inner.state_dict().items() if name not in shapes}
        return {"model": others, "shapes": shapes, "own": own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, (start, stop) in self.flat.spans.items():
            self.flat.values[start:stop].copy_(state["own"]["model"][name])
        for name, values in self.inner.state_dict().items():
            if name not in self.shapes:
                values.copy_(state["model"][name])
        self._take_moments(state["own"]["optimizer"])

    def late_state(self) -> dict[str, Tensor]:
        return {f"own/{path}": tensor for path, tensor in super().late_state().items()}
