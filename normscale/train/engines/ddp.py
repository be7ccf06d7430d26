"""DistributedDataParallel, through Accelerate where there are several ranks."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from normscale.config.precision import PrecisionConfig
from normscale.errors import LaunchError
from normscale.models.stack import Transformer
from normscale.train.engines.plain import PlainEngine
from normscale.train.engines.precision import DTYPES
from normscale.train.engines.ranks import device_kind, join, own_device


class DDPEngine(PlainEngine):
    """One model a rank; gradients are averaged over ranks in the last micro-batch's backward."""

    name = "ddp"

    def __init__(self, model: Transformer, precision: PrecisionConfig, timeout_s: float = 300.0) -> None:
        self.rank, self.world = join(timeout_s)
        super().__init__(model, precision, own_device())
        self.model = self._wrapped()
        if not isinstance(self.model, DistributedDataParallel):
            raise LaunchError(
                f"WORLD_SIZE={self.world} was asked for, but Accelerate left the model a {type(self.model).__name__}; "
                f"start the run with `python -m launch local --nproc {self.world}`"
            )
        self.model.forward_sync_buffers = False  # they hold constants
        self._wire = DTYPES[precision.reduce]
        if self._wire is not self.flat.grads.dtype:
            self.model.register_comm_hook(self._wire, _reduce)

    def _wrapped(self) -> Any:
        # A bucket view would take the place of the flat gradient.
        if self.world == 1:  # where Accelerate wraps nothing
            return DistributedDataParallel(self.inner, gradient_as_bucket_view=False)
        from accelerate import Accelerator, DistributedDataParallelKwargs

        kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=False)
        accelerator = Accelerator(cpu=device_kind() == "cpu", mixed_precision="no", kwargs_handlers=[kwargs])
        if accelerator.num_processes != self.world:
            raise LaunchError(
                f"WORLD_SIZE={self.world} was asked for, but Accelerate set up {accelerator.num_processes} process(es);"
                f" start the run with `python -m launch local --nproc {self.world}`"
            )
        # Accelerate's own placement copies the parameters (cpu to cpu:0), out of the flat buffer.
        return accelerator.prepare(self.inner, device_placement=[False])

    def dtypes(self) -> dict[str, str]:
        return super().dtypes() | {"reduce": str(self._wire).removeprefix("torch.")}

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.model.no_sync()


def _reduce(wire: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Averages a bucket of gradients over ranks in the dtype `wire` (DDP wants this name and this type)."""
    grads = bucket.buffer()
    sent = grads.to(wire).div_(dist.get_world_size())
    done: torch.futures.Future[Tensor] = (
        dist.all_reduce(sent, async_op=True).get_future().then(lambda future: grads.copy_(future.value()[0]))
    )
    return done
