"""Where a step runs: one process, or DistributedDataParallel through Accelerate."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normscale.config.schema import PrecisionConfig
from normscale.errors import ConfigError, LaunchError
from normscale.models.stack import Transformer
from normscale.ops.products import FORMATS, NATIVE, Native, Products, Rounded
from normscale.train.flat import FlatParameters

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Engine:
    """A model on its device, with flat gradients, and the sums over ranks that a step needs.

    The plain engine is the whole contract for one process; `DDPEngine` adds the other ranks.
    """

    name = "plain"
    rank = 0
    world = 1

    def __init__(self, model: Transformer, precision: PrecisionConfig, device: torch.device) -> None:
        self.device, self.precision = device, precision
        self.products = products_of(precision, device.type)
        self.inner = model.to(device)
        _settle(self.inner, precision, self.products)
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = precision.tf32
        self.flat = FlatParameters(self.inner)
        self.model: Any = self.inner

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of the forward pass: products in bf16 or fp16 where asked and where they are native."""
        if self.precision.compute == "fp32" or isinstance(self.products, Rounded):
            return nullcontext()
        return torch.autocast(self.device.type, dtype=DTYPES[self.precision.compute])

    def reduced_in(self) -> str:
        """Returns the dtype that gradients travel in between ranks; "none" where they do not travel."""
        return "none"

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
    def aside(self) -> Iterator[Transformer]:
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

    def __init__(self, model: Transformer, precision: PrecisionConfig) -> None:
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
        self._wire = DTYPES[precision.reduce]
        if self._wire is not self.flat.grads.dtype:
            self.model.register_comm_hook(self._wire, _reduce)

    def reduced_in(self) -> str:
        return str(self._wire).removeprefix("torch.")

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


def _reduce(wire: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:  # type: ignore[name-defined]
    """Averages a bucket of gradients over ranks in the dtype `wire` (DDP wants this name and this type)."""
    grads = bucket.buffer()
    sent = grads.to(wire).div_(dist.get_world_size())
    done: torch.futures.Future[Tensor] = (
        dist.all_reduce(sent, async_op=True).get_future().then(lambda future: grads.copy_(future.value()[0]))
    )
    return done


def products_of(precision: PrecisionConfig, device: str) -> Products:
    """Returns what the network's products are on a kind of device: PyTorch's own, or rounded ones.

    fp16 is native on CUDA alone: a CPU has fp16 products, at a hundredth of the speed. fp8 is rounded everywhere.
    """
    compute = precision.compute
    if compute in FORMATS and not (compute == "fp16" and device == "cuda"):
        return Rounded(FORMATS[compute], precision.softmax)
    narrow = "bf16" in (precision.stream, precision.params)
    if precision.softmax == "fp32" and not (compute == "fp32" and narrow):
        return NATIVE
    return Native(precision.softmax, torch.float32 if compute == "fp32" else None)


def check_precision(precision: PrecisionConfig, device: str, world: int) -> None:
    """Refuses what the engine for this kind of device and number of ranks would not do.

    Raises:
        ConfigError: a value that would do nothing here.
    """

    def refuse(name: str, value: str, why: str) -> ConfigError:
        key = f"precision.{name}"
        return ConfigError(f"{key}: {value} would do nothing {why}", key=key)

    if precision.reduce != "fp32" and world == 1:
        mend = "remove it, or start several ranks (python -m launch local --nproc 2)"
        raise refuse("reduce", precision.reduce, f"with one process, which has nothing to reduce; {mend}")
    if precision.tf32 and device != "cuda":
        raise refuse("tf32", "true", f"on {device}, which has no TF32; remove it or run on a CUDA device")
    if precision.flush_denormals and device != "cpu":
        raise refuse("flush_denormals", "true", f"on {device}: it is a flag of the CPU's threads; remove it")


def _settle(model: Any, precision: PrecisionConfig, products: Products) -> None:
    """Gives the model its products, the dtype of its stream, and parameters in their dtype (constants stay fp32)."""
    for module in model.modules():
        if hasattr(module, "products"):
            module.products = products
    if isinstance(products, Rounded):
        model.products = products.at_head()
    narrow = "bf16" in (precision.stream, precision.params)
    model.stream = DTYPES[precision.stream] if narrow else None
    if precision.params != "fp32":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[precision.params])


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


def make_engine(model: Transformer, precision: PrecisionConfig) -> Engine:
    """Returns the engine that fits how this process was started.

    Raises:
        LaunchError: several ranks were asked for, and Accelerate set up something else.
    """
    return DDPEngine(model, precision) if world_size() > 1 else Engine(model, precision, torch.device(device_kind()))
