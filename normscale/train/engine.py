"""Where a step runs: one process, or DistributedDataParallel through Accelerate."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normscale.config.schema import PrecisionConfig
from normscale.errors import LaunchError
from normscale.models.stack import Decoder
from normscale.train.flat import FlatParameters


class Engine:
    """A model on its device, with flat gradients, and the sums over ranks that a step needs.

    The plain engine is the whole contract for one process; `DDPEngine` adds the other ranks.
    """

    name = "plain"
    rank = 0
    world = 1

    def __init__(self, model: Decoder, precision: PrecisionConfig, device: torch.device) -> None:
        self.device, self.precision = device, precision
        self.inner = model.to(device)
        self.flat = FlatParameters(self.inner)
        self.model: Any = self.inner

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of the forward pass: products in bf16 where asked; stream and parameters stay fp32."""
        if self.precision.compute == "bf16":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Returns the context of one micro-batch, forward and backward; the last one's gradients are reduced."""
        return nullcontext()

    def count(self, targets: int) -> int:
        """Returns the sum over ranks of a number that is on the host."""
        return targets

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over ranks."""
        return values

    def max(self, values: Tensor) -> Tensor:
        """Returns the maximum of `values` over ranks; NaN must not be in it (gloo loses it)."""
        return values

    def close(self) -> None:
        """Leaves the process group."""

    @contextmanager
    def aside(self) -> Iterator[Decoder]:
        """Gives the inner model in evaluation mode, without gradients: for evaluation and probes."""
        training = self.inner.training
        self.inner.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield self.inner
        finally:
            self.inner.train(training)


class DDPEngine(Engine):
    """One model a rank; gradients are averaged over ranks in the last micro-batch's backward."""

    name = "ddp"

    def __init__(self, model: Decoder, precision: PrecisionConfig) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        # A bucket view would take the place of the flat gradient.
        kwargs = DistributedDataParallelKwargs(gradient_as_bucket_view=False)
        accelerator = Accelerator(cpu=device_kind() == "cpu", mixed_precision="no", kwargs_handlers=[kwargs])
        super().__init__(model, precision, accelerator.device)
        self.rank, self.world = accelerator.process_index, accelerator.num_processes
        # Accelerate's own placement copies the parameters (cpu to cpu:0), out of the flat buffer.
        self.model = accelerator.prepare(self.inner, device_placement=[False])
        wanted = world_size()
        if self.world != wanted or not isinstance(self.model, torch.nn.parallel.DistributedDataParallel):
            raise LaunchError(
                f"WORLD_SIZE={wanted} was asked for, but Accelerate set up {self.world} process(es) with "
                f"{type(self.model).__name__}; start the run with `python -m launch local --nproc {wanted}`"
            )
        self.model.forward_sync_buffers = False  # they hold constants

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if last else self.model.no_sync()

    def count(self, targets: int) -> int:
        return int(self.sum(torch.tensor(targets, device=self.device)))

    def sum(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.SUM)
        return values

    def max(self, values: Tensor) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX)
        return values

    def close(self) -> None:
        dist.destroy_process_group()


def world_size() -> int:
    """Returns the number of ranks this process was started with.

    Raises:
        LaunchError: the environment names ranks that could never meet.
    """
    word = os.environ.get("WORLD_SIZE", "1")
    if not word.isdigit() or int(word) < 1:
        raise LaunchError(f"WORLD_SIZE={word!r} in the environment is not a number of processes; unset it")
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if int(word) > 1 and missing:
        raise LaunchError(
            f"WORLD_SIZE={word} is in the environment but {', '.join(missing)} is not; unset it, or start the ranks "
            f"with `python -m launch local --nproc {word}`"
        )
    return int(word)


def device_kind() -> str:
    """Returns "cuda" where there is a CUDA device and ACCELERATE_USE_CPU does not keep to the CPU, else "cpu"."""
    kept = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
    return "cuda" if torch.cuda.is_available() and not kept else "cpu"


def make_engine(model: Decoder, precision: PrecisionConfig) -> Engine:
    """Returns the engine that fits how this process was started.

    Raises:
        LaunchError: several ranks were asked for, and Accelerate set up something else.
    """
    return DDPEngine(model, precision) if world_size() > 1 else Engine(model, precision, torch.device(device_kind()))
