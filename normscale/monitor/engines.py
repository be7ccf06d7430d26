"""How a step is checked and applied: plain, DDP, FSDP2, and optimizers that Accelerate has prepared."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from normscale.errors import BadInput
from normscale.monitor.gradients import Gradients, Shown
from normscale.monitor.pieces import is_dtensor
from normscale.monitor.report import Reason
from normscale.probes.joint import Joint
from normscale.probes.sending import Fetched


def _nothing() -> None: ...


def _ignored(gradients: Shown | None) -> None: ...


@dataclass(frozen=True)
class Attempt:
    """What a loop asks of one step.

    Attributes:
        optimizer: what it handed over.
        loss: of the window: a tensor of one number, or a number.
        scaler: torch's GradScaler, where the loop has one.
        grad_norm: the gradient norm, where the loop has measured it; it may have clipped the gradients, too. Below 0
            it says nothing.
        clip: the largest norm that gradients may have; None leaves them.
        scheduler: the loop's, where it is to be looked at.
        norm_wanted: whether the step is measured, so that the norm is asked for.
        after_backward: called with the gradients when they are complete and not clipped yet; None where none are shown.
        before_step: called just before the parameters change, where that can be known.
    """

    optimizer: Any
    loss: Tensor | float
    scaler: Any = None
    grad_norm: Any = None
    clip: float | None = None
    scheduler: Any = None
    norm_wanted: bool = False
    after_backward: Callable[[Shown | None], None] = _ignored
    before_step: Callable[[], None] = _nothing


@dataclass(frozen=True)
class Result:
    """What came of an attempt; the reason is the same on every rank.

    Attributes:
        reason: why it was applied or not.
        loss: on this rank.
        norm: before clipping; None where it was not measured or cannot be had.
        clipped: after clipping, likewise; None where the loop has measured the norm, and may have clipped by it.
        gradients: the gradients, where they can be looked at, and nobody has clipped them or all are finite.
        scale: the loss scale of the step.
        scale_after: the one after it, where it is on the host already.
        scale_late: the same, where it is still on its way there.
        intact: whether the parameters are those before the step, so that it can be replayed.
        final: why the engine itself ends the run here, if it does.
    """

    reason: Reason
    loss: float
    norm: float | None = None
    clipped: float | None = None
    gradients: Gradients | None = None
    scale: float | None = None
    scale_after: float | None = None
    scale_late: Fetched | None = None
    intact: bool = True
    final: str = ""

    @property
    def applied(self) -> bool:
        return self.reason in ("applied", "applied although not finite")

    @property
    def bad(self) -> bool:
        """Whether something was not finite, and not by the loss scale."""
        return self.reason not in ("applied", "loss scale overflow")


class Verdict(NamedTuple):
    """What is found of a step: the reason, this rank's loss, the norm, and the norm as a tensor where it is to clip.

    `looked` says that the gradients were, and not only the norm that a loop has measured. `scale` is that of the loss,
    where there is one.
    """

    reason: Reason
    loss: float
    norm: float | None
    total: Tensor | None
    looked: bool
    scale: float | None


class Engine:
    """One process, DistributedDataParallel or FSDP2: gradients lie in `.grad`, reduced, and the step is ours to make.

    What DDP averages over all ranks is the same on each, to the bit, so that all decide alike without a word; where
    ranks hold shards, or something else that is not known, one sum of a few numbers a step makes them. That is so, too,
    where the optimizer has a parameter beside DDP's, or one that DDP ignores, where DDP spans a part of the ranks, and
    where parameters were frozen or thawed since it was made.
    """

    name = "plain"

    def __init__(self, model: nn.Module) -> None:
        several = dist.is_available() and dist.is_initialized()
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if several else (0, 1)
        self.name, self._averaged = "plain", dict[int, Tensor]()
        if isinstance(model, DistributedDataParallel):
            self.name, self._averaged = "ddp", _averaged(model, self.world)
        self._gradients: dict[int, Gradients] = {}
        self._gathers = False
        self._joint: Joint | None = None

    @property
    def gathers(self) -> bool:
        """Whether ranks work together within forward and backward, so that none may leave a replay early."""
        return self._gathers

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged over ranks: in a backward pass each rank's are those of its own mean loss."""
        return self.name in ("ddp", "fsdp2")

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over ranks."""
        return _reduced(values, dist.ReduceOp.SUM) if self.world > 1 else values

    def max(self, values: Tensor) -> Tensor:
        """Returns the maximum of `values` over ranks; NaN must not be in it (gloo loses it)."""
        return _reduced(values, dist.ReduceOp.MAX) if self.world > 1 else values

    def joint(self, inner: nn.Module, device: torch.device) -> Joint | None:
        """Returns what ranks say to each other around passes of their own, where a model's parameters are in pieces.

        They may be so only later: `fully_shard` may be called on a model that is monitored.
        """
        if self.world == 1 or self._joint is not None:
            return self._joint
        if not any(is_dtensor(p) or hasattr(p, "ds_tensor") for p in inner.parameters()):
            return None

        def recover() -> None:
            for module in inner.modules():
                reset: Any = getattr(module, "reset_iter_state", None)  # FSDP2's
                if reset is not None:
                    with suppress(RuntimeError):  # of one below the outermost, which has done it
                        reset()

        self._joint = Joint(self.sum, device, self.rank, self.world, recover)
        return self._joint

    def learning_rate(self, optimizer: Any) -> float | Fetched | None:
        """Returns the learning rate of an optimizer's first group, on its way to the host where it lies on a device."""
        return _rate(getattr(optimizer, "param_groups", None))

    def attempt(self, asked: Attempt) -> Result | None:
        """Checks the gradients and applies the step where all is finite; None while micro-batches are still to come."""
        state = getattr(asked.optimizer, "gradient_state", None)  # of an optimizer that Accelerate has prepared
        if state is not None and not state.sync_gradients:
            return None
        optimizer = asked.optimizer if state is None else asked.optimizer.optimizer
        scaler = asked.scaler if state is None else asked.optimizer.scaler
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        gradients = self._gradients_of(optimizer)
        if not gradients.fresh():
            raise BadInput(
                "monitor.step: no parameter of the optimizer has a gradient; call loss.backward() before it, and "
                "optimizer.zero_grad() after it"
            )
        if gradients.sharded:
            self.name, self._gathers = "fsdp2", True
            if scaler is not None:
                raise BadInput("monitor.step: a GradScaler with FSDP2 is not supported; use bf16, or DDP")
        before = None if scaler is None else _scale_of(scaler, gradients.device)
        found = None if scaler is None else _unscaled(scaler, optimizer)
        asked.after_backward(gradients)
        reason, loss, norm, total, looked, scale = self._judge(asked, gradients, found, before)
        clipped = norm if looked else None
        if reason == "applied":
            if total is not None and asked.clip is not None and norm is not None:
                gradients.scale_(torch.clamp(asked.clip / (total + 1e-6), max=1.0))  # as torch's clip_grad_norm_ does
                clipped = norm * min(1.0, asked.clip / (norm + 1e-6))
            asked.before_step()
            if scaler is not None and state is None:
                scaler.step(optimizer)
                scaler.update()
            else:
                asked.optimizer.step()
            if state is not None and asked.optimizer.step_was_skipped:
                reason = "skipped by the engine"
        elif scaler is not None:
            if found is not None and not self.alike(gradients):
                _told(scaler, optimizer, self.sum(found))
            scaler.update()
        after = None if scale is None else Fetched(_scale_of(scaler, gradients.device))
        at_once = after is not None and (after.ready or reason != "applied")
        scale_after = float(after.arrived()) if after is not None and at_once else None
        if scale is not None and scale_after is not None and reason not in ("applied", "non-finite loss"):
            reason = "loss scale overflow" if self._lowered(scale, scale_after, gradients) else reason
        shown = gradients if looked or reason == "norm overflow" else None
        return Result(reason, loss, norm, clipped, shown, scale, scale_after, None if at_once else after)

    def _lowered(self, before: float, after: float, gradients: Gradients) -> bool:
        """Returns whether a bad step can be put down to the loss scale, which has fallen for it, on some rank.

        One that is static, or at its own floor, does not fall. GradScaler has no floor: at 1 and below, gradients are
        no larger than the model's own.
        """
        fallen = after < before and before > 1.0
        if self.alike(gradients):
            return fallen
        return float(self.sum(torch.tensor([fallen], dtype=torch.float64, device=gradients.device))) > 0

    def _gradients_of(self, optimizer: Any) -> Gradients:
        """Returns the gradients of an optimizer's parameters, as they are now."""
        lists = [group["params"] for group in optimizer.param_groups]
        known = self._gradients.get(id(optimizer))
        if known is None or not known.are(lists):
            parameters = [p for own in lists for p in own]
            known = self._gradients[id(optimizer)] = Gradients(parameters, self._averaged)
        return known

    def alike(self, gradients: Gradients) -> bool:
        """Returns whether every rank has the same gradients, so that all decide alike without a word."""
        return self.world == 1 or not (gradients.sharded or any(p.requires_grad for p in gradients.own))

    def _judge(
        self, asked: Attempt, gradients: Gradients, found: Tensor | None = None, scale: Tensor | None = None
    ) -> Verdict:
        """Returns what is found; the host reads once: nobody could say without that whether to apply the step.

        `found` says whether a GradScaler has seen what is not finite; `scale` is its own.
        """
        alike = self.alike(gradients)
        device = gradients.device
        loss, norm, total = on_device(asked.loss, device), None, None
        if asked.grad_norm is not None:
            norm = on_device(whole(asked.grad_norm), device)
        elif asked.clip is not None and alike and not gradients.sharded:
            total = gradients.norm()
            norm = total.double()
        elif asked.clip is not None or asked.norm_wanted:
            squares = gradients.squares().sum()
            norm = (squares * self.world if alike else squares).sqrt()  # of this rank's part, where ranks hold parts
            total = norm.float()
        flags = [flag for flag in (found, None if norm is None else ~torch.isfinite(norm)) if flag is not None]
        bad = torch.stack([flag.double() for flag in flags]).amax() if flags else gradients.nonfinite().double()
        size = loss if norm is None else norm
        unknown = torch.zeros_like(size) if norm is None else (norm < 0).double()
        bad_loss, kept = (~torch.isfinite(loss)).double(), loss if scale is None else scale.double()
        numbers = torch.stack([kept, loss, size, bad, bad_loss, unknown, size.square()])
        if not alike:
            numbers[3:] = self.sum(numbers[3:])
        if not alike and total is not None:  # parts, whose squares have come together with all else
            numbers[2] = numbers[6].sqrt()
            numbers[3] += ~torch.isfinite(numbers[2])
            total = numbers[2].float()
        factor, value, length, any_bad, bad_losses, unmeasured, _ = numbers.tolist()
        if unmeasured:
            return self._judge(replace(asked, grad_norm=None, norm_wanted=True), gradients, found, scale)
        if asked.grad_norm is not None and asked.clip is not None:
            raise BadInput(
                f"monitor.step: grad_norm= with Monitor(clip={asked.clip}): either the loop measures and clips, or the "
                "monitor does; leave one of them out"
            )
        if alike and self.world > 1:
            # A loss that is not finite on one rank, while all gradients are, does no harm there: it is only counted.
            bad_losses = float(self.sum(numbers[4:5])) if any_bad else 0.0
        reason: Reason = "applied"
        if bad_losses:
            reason = "non-finite loss"
        elif any_bad:
            entries = norm is None or float(gradients.nonfinite() if alike else self.sum(gradients.nonfinite())) > 0
            reason = "non-finite gradient" if entries else "norm overflow"
        total = total if asked.clip is not None else None
        length_known = None if norm is None else length
        return Verdict(reason, value, length_known, total, asked.grad_norm is None, None if scale is None else factor)


def on_device(number: Any, device: torch.device) -> Tensor:
    """Returns a number, or a tensor of one, as a 0-d fp64 tensor on a device."""
    if isinstance(number, Tensor):
        return number.detach().to(device, torch.float64).reshape(())
    return torch.full((), float(number), dtype=torch.float64, device=device)


def whole(norm: Any) -> Any:
    """Returns a norm that may be a DTensor as every rank has it."""
    return cast(Any, norm).full_tensor() if isinstance(norm, Tensor) and is_dtensor(norm) else norm


def _averaged(ddp: DistributedDataParallel, world: int) -> dict[int, Tensor]:
    """Returns by id the parameters whose gradients DDP averages over all ranks.

    Those are the ones that were trained when it was made. Of these it says only how many there were: none are known
    where that is not their number now.
    """
    if ddp.process_group.size() < world:
        return {}
    ignored = ddp.parameters_to_ignore
    trained = {id(p): p for name, p in ddp.module.named_parameters() if p.requires_grad and name not in ignored}
    said = cast(Any, ddp)._get_ddp_logging_data()
    return trained if said.get("num_parameter_tensors") == len(trained) else {}


def _rate(groups: Any) -> float | Fetched | None:
    rate = groups[0].get("lr") if groups else None
    fetched = Fetched(rate.detach()) if isinstance(rate, Tensor) else None
    if fetched is not None and not fetched.ready:
        return fetched
    return None if rate is None else float(rate if fetched is None else fetched.arrived())


def _reduced(values: Tensor, how: Any) -> Tensor:
    values = values.clone()
    dist.all_reduce(values, how)
    return values


def _scale_of(scaler: Any, device: torch.device) -> Tensor:
    """Returns a loss scale as a 0-d tensor; `get_scale` would make the host wait for a GPU."""
    try:
        scale: Tensor = scaler.scale(torch.ones((), device=device))
    except AttributeError:
        raise _no_grad_scaler(scaler) from None
    return scale


def _no_grad_scaler(scaler: Any) -> BadInput:
    return BadInput(
        f"monitor.step: scaler= is a {type(scaler).__name__} that does not keep what torch's GradScaler keeps "
        f"(this is torch {torch.__version__}); scale the loss by torch.amp.GradScaler, or leave scaler out"
    )


def _unscaled(scaler: Any, optimizer: Any) -> Tensor:
    """Takes the loss scale out of the gradients, once; returns whether some were not finite, as the scaler found.

    What a scaler has found has no public name.
    """
    try:
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"].name
    except (AttributeError, KeyError, TypeError):
        raise _no_grad_scaler(scaler) from None
    if stage == "READY":
        scaler.unscale_(optimizer)
    elif stage == "STEPPED":
        raise BadInput("monitor.step: scaler.step was called already; leave the step to the monitor")
    found: list[Tensor] = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
    return torch.stack([flag.reshape(()).to(found[0].device) for flag in found]).amax()


def _told(scaler: Any, optimizer: Any, found: Tensor) -> None:
    """Has a scaler know what was found on any rank, so that the scale falls on all of them or on none."""
    for flag in scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values():
        flag.fill_(0.0).add_(found.to(flag.device))
