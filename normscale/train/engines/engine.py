"""The contract of an engine: what a training step, the probes and the checkpoints ask of where training runs.

A step calls, in this order: `zero_grad`; for each micro-batch, within `micro_batch(last)` and, around the forward,
`autocast`, the model and `backward`; then `check` (after the first window), `unscale` where there is a loss scale,
`loss_and_norm`, and either `apply` or, after whatever asks what was wrong, `discard`. A window is always run to its end
before anything is decided: what a sharding engine holds in the middle of one cannot be let go of.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from normscale.config.precision import PrecisionConfig
from normscale.config.schema import OptimConfig
from normscale.models.init import weights
from normscale.models.stack import Transformer
from normscale.norms import Norm
from normscale.probes.guard import Guard
from normscale.probes.joint import Joint
from normscale.probes.probe import Parameters, Probe, Reduction
from normscale.schemes.scheme import Role, Scheme, Weight
from normscale.train.engines.precision import casting, products_of, settle
from normscale.train.flat import Fault


class Engine(ABC):
    """A model on its device, its gradients and its optimizer, and the sums over ranks that a step needs.

    Attributes:
        name: what it is called in configurations and records.
        rank, world: which of how many.
        sharded: whether each rank holds a part of the weights and of the optimizer's state, and not all of them. What
            is summed over them is then summed over ranks; else every rank has the sum.
        gathers: whether ranks work together within forward and backward passes, so that all make the same ones. A
            block's parameters are then there while it runs, and no other's.
        inner: the model itself; its `features` and calls work outside of training, too (see `aside`).
        model: what a training step calls.
        shapes: the shape of every trained parameter, whole, by name, in model order.
        optimizer: what makes the steps, once `train_with` was called: probes read `param_groups` and `state` of it.
    """

    name: str
    rank = 0
    world = 1
    sharded = False
    gathers = False
    optimizer: torch.optim.Optimizer

    def __init__(self, model: Transformer, precision: PrecisionConfig, device: torch.device) -> None:
        """Puts a fresh model, the same on every rank, on its device, with the products and dtypes of its precision."""
        self.device, self.precision = device, precision
        self.products = products_of(precision, device.type)
        self.inner = model.to(device)
        if self.gathers:
            self.inner.join_blocks(False)
        settle(self.inner, precision, self.products)
        if device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = precision.tf32
        self.model: Any = self.inner
        # Norms that take statistics over all ranks meet within a pass: no rank may make one that others do not make.
        self.gathers = self.gathers or any(m.remembers for m in model.modules() if isinstance(m, Norm))
        self.shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        # By role, while parameters are still whole.
        self._roles = [(one.name, one.rows, one.site, one.role) for one in weights(self.inner)]

    # Passes.

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of the forward pass: products in bf16 or fp16 where asked and where they are native.

        Autocast's cache would keep a narrow copy of every weight to the end of the pass, gathered ones included.
        """
        return casting(self.precision, self.products, self.device.type, cached=not self.gathers)

    def micro_batch(self, last: bool) -> AbstractContextManager[Any]:
        """Returns the context of one micro-batch, forward and backward; the last one's gradients are reduced."""
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of a loss to those of the window; over ranks they come to be averaged."""
        torch.autograd.backward(loss)

    @contextmanager
    def aside(self) -> Iterator[Transformer]:
        """Gives the inner model in evaluation mode, without gradients: for evaluation and probes.

        Where the engine `gathers`, all ranks make the same passes in it.
        """
        training = self.inner.training
        self.inner.eval()
        try:
            with torch.no_grad(), self.autocast():
                yield self.inner
        finally:
            self.inner.train(training)

    @cached_property
    def joint(self) -> Joint | None:
        """What ranks say to each other around a probe's passes, where they make them together; else None."""
        several = self.gathers and self.world > 1
        return Joint(self.sum, self.device, self.rank, self.world, self.recover) if several else None

    def recover(self) -> None:  # noqa: B027 (most have nothing to do)
        """Gets ready for passes again after one that has failed half-way, at one place on all ranks."""

    # A step.

    @abstractmethod
    def train_with(self, optim: OptimConfig) -> torch.optim.Optimizer:
        """Makes the optimizer, if that was not done yet, and returns it; called once, before the first step."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Begins a window with gradients of zero."""

    @abstractmethod
    def check(self) -> None:
        """Raises if gradients do not lie where the step looks for them; called after the first window."""

    @abstractmethod
    def unscale(self, factor: float) -> None:
        """Multiplies the gradients by the inverse of the loss scale."""

    @abstractmethod
    def loss_and_norm(self, total: Tensor, count: int) -> tuple[float, float]:
        """Returns `total` summed over ranks and divided by `count`, and the norm of the averaged gradient, on the host.

        Both are the same on every rank, to the bit: a branch on them is taken by all alike. NaN and infinities show in
        them whichever rank they are on. It is the norm before any clipping.
        """

    @abstractmethod
    def finite(self) -> bool:
        """Returns whether every entry of the averaged gradient is finite, on all ranks (for an event)."""

    @abstractmethod
    def faults(self) -> list[Fault]:
        """Returns the parameters whose averaged gradients are not finite, the same on every rank, in model order."""

    @abstractmethod
    def apply(self, lr: float, factor: float) -> None:
        """Makes the optimizer step with this learning rate and the gradients times `factor` (clipping's; 1: none)."""

    @abstractmethod
    def discard(self) -> None:
        """Lets go of the window's gradients instead; the next window is as if this one had never been."""

    def project(self) -> None:
        """Lets the scheme project the weights, where it does."""
        if type(self.inner.scheme).after_step is Scheme.after_step:
            return
        with torch.no_grad(), self.whole(keep=True) as tensors:
            given = [Weight(name, rows, site, role, tensors[name][rows]) for name, rows, site, role in self._roles]
            self.inner.scheme.after_step(given)

    # What may be seen of weights and gradients. Every rank calls it; sums are this rank's part where `sharded`.

    @property
    def combined(self) -> Reduction:
        """How ranks combine sums over weights or gradients."""
        return "sum" if self.sharded else "first"

    @abstractmethod
    def whole(self, keep: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Gives all trained parameters by name, whole, on every rank; with `keep` what is written to them stays."""

    @abstractmethod
    def parameters(self) -> Parameters:
        """Returns where this rank's part of the trained parameters lies."""

    @abstractmethod
    def gradients(self) -> Tensor:
        """Returns this rank's part of the averaged gradients, laid out as the parameters are: after the backward."""

    @abstractmethod
    def squares(self, groups: Sequence[Sequence[str]]) -> Tensor:
        """Returns the sum of squares of the gradient over each group of parameter names.

        Shape: result [len(groups)] fp64.
        """

    def output_matrix(self) -> str:
        """Returns the name of the output matrix of the last feed-forward sublayer."""
        return [name for name, _, _, role in self._roles if role == Role("ffn", "out")][-1]

    def dtypes(self) -> dict[str, str]:
        """Returns the dtypes of parameters, of gradients, and of gradients between ranks ("none": they stay)."""
        return {"params": _name(self.parameters().values().dtype), "grads": _name(self.gradients().dtype)} | {
            "reduce": "none"
        }

    def facts(self) -> dict[str, Any]:
        """Returns what the start record should know of this engine alone."""
        return {}

    def digest(self) -> str:
        """Returns a hash of all parameters as this rank sees them: by name and fp32 bytes, whatever the engine."""
        digest = hashlib.sha256()
        with self.whole() as tensors:
            for name in sorted(tensors):
                digest.update(name.encode() + b"\0")
                digest.update(tensors[name].detach().float().cpu().contiguous().numpy().tobytes())
        return digest.hexdigest()

    # What a run goes on from.

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Returns weights and optimizer state, without copies: `model` and `optimizer`, the same on every rank.

        A sharded engine has this rank's part of both below `own`: of a parameter, the entries that it holds, which are
        a stretch of the flattened whole, in the order of ranks; and `shapes`, those of the wholes, by name.
        """

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave to this rank."""

    @abstractmethod
    def late_state(self) -> dict[str, Tensor]:
        """Returns tensors without values like those that the optimizer adds to the state at its first step, by path."""

    # Ranks.

    def count(self, number: int) -> int:
        """Returns the sum over ranks of a number that is on the host."""
        return self.counts(number)[0]

    def counts(self, *numbers: int) -> list[int]:
        """Returns the sum over ranks of each of some numbers that are on the host, by one reduction."""
        if self.world == 1:
            return list(numbers)
        return cast(list[int], self.sum(torch.tensor(numbers, device=self.device)).tolist())

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over ranks."""
        return values if self.world == 1 else _reduced(values, dist.ReduceOp.SUM)

    def max(self, values: Tensor) -> Tensor:
        """Returns the maximum of `values` over ranks; NaN must not be in it (gloo loses it)."""
        return values if self.world == 1 else _reduced(values, dist.ReduceOp.MAX)

    def close(self) -> None:
        """Leaves the process group, if there is one."""
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


def guard_of(engine: Engine, probes: Sequence[Probe]) -> Guard:
    """Returns the guard of probes that look at what an engine trains."""
    return Guard(probes, engine.device, engine.rank, engine.world, engine.joint)


def _reduced(values: Tensor, how: Any) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, how)
    return values


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
