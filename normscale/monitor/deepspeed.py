"""DeepSpeed's engine, ZeRO 0 to 3: it makes the step itself, and says afterwards what it did."""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normscale.errors import BadInput
from normscale.monitor.engines import Attempt, Engine, Result, on_device
from normscale.monitor.gradients import Gradients
from normscale.monitor.report import Reason
from normscale.monitor.zero_gradients import ZeroGradients
from normscale.probes.ledger import resolved_norm
from normscale.probes.sending import Fetched

FINAL = "DeepSpeed ends a run whose loss scale is at its minimum"


class DeepSpeed(Engine):
    """An engine of DeepSpeed, by itself or behind Accelerate, which hides the step inside `accelerator.backward`.

    Stages 1 to 3, and stage 0 in bf16 or fp16, check their gradients within `engine.step()`, all ranks together, and
    leave the parameters alone where these are not finite: a skip can be replayed. Stage 0 in fp32 checks nothing, so
    that the gradients are looked at before. What the engine says of the norm may be -1, None, inf or of the step
    before; what cannot be known is None, never 0.

    On measured steps of stages 1 to 3 the gradients of blocks are taken from where they lie. Behind Accelerate they are
    gone when its `backward` returns, and stage 0 in bf16 or fp16 keeps them to itself: there the record has an event
    "unavailable", and standard error a line, in place of the profile.
    """

    def __init__(self, model: nn.Module, engine: Any) -> None:
        super().__init__(model)
        self.engine = engine
        self.stage = int(engine.zero_optimization_stage())
        self.name = f"deepspeed-zero{self.stage}"
        self.known = int(engine.global_steps)
        self.norm_before: Any = None
        self.scale_before = self._scale()
        self.unchecked = self.stage == 0 and not (engine.bfloat16_enabled() or engine.fp16_enabled())

    @property
    def gathers(self) -> bool:
        return self.stage == 3

    @property
    def averages(self) -> bool:
        return True

    def learning_rate(self, optimizer: Any) -> float | Fetched | None:
        return super().learning_rate(self.engine.optimizer)

    def attempt(self, asked: Attempt) -> Result | None:
        engine = self.engine
        if any(given is not None for given in (asked.clip, asked.grad_norm, asked.scaler, asked.scheduler)):
            raise BadInput(
                "monitor.step: DeepSpeed clips, scales, measures and steps schedulers by its own configuration; "
                "leave clip, grad_norm, scaler and scheduler out"
            )
        hidden = hasattr(asked.optimizer, "gradient_state")  # an optimizer that Accelerate has prepared
        stepped = engine.global_steps != self.known
        if hidden and self.unchecked:
            raise BadInput(
                "monitor.step: ZeRO stage 0 in fp32 checks no gradient, and Accelerate makes its step in "
                "backward(), where nobody else can; use DDP, stage 1, or "
                "engine.backward and monitor.step(engine, loss)"
            )
        if not stepped and (hidden or not engine.is_gradient_accumulation_boundary()):
            if not hidden:
                engine.step()  # which counts the micro-batch and does no more
                self.known = int(engine.global_steps)
            return None
        if not stepped and self.unchecked:
            return self._checked_step(asked)
        scale = self.scale_before if stepped else self._scale()
        at_floor = False
        if not stepped:
            asked.after_backward(self._shown(scale) if asked.norm_wanted and self.stage else None)
            asked.before_step()
            at_floor = self._step()
        self.known = int(engine.global_steps)
        applied = bool(engine.was_step_applied())
        raw = engine.get_global_grad_norm()
        read = asked.norm_wanted or not applied or not isinstance(raw, Tensor)  # a tensor is read where it is asked for
        norm = resolved_norm(raw, applied, self.norm_before) if read else None
        self.norm_before = raw
        result = self._result(asked, applied, norm, scale)
        return replace(result, final=FINAL) if at_floor and not applied else result

    def _step(self) -> bool:
        """Makes the engine's step; returns whether the engine ends the run should this one have been skipped.

        ZeRO 1 to 3 raise an exception there, their loss scale being at its minimum, before anybody has heard where the
        overflow was: they are kept from it.
        """
        scaler: Any = getattr(self.engine.optimizer, "loss_scaler", None)
        if not getattr(scaler, "raise_error_at_min_scale", False):
            self.engine.step()
            return False
        at_floor = scaler.cur_scale == scaler.min_scale and 1 in (scaler.delayed_shift, scaler.cur_hysteresis)
        scaler.raise_error_at_min_scale = False
        try:
            self.engine.step()
        finally:
            scaler.raise_error_at_min_scale = True
        return bool(at_floor)

    def _result(self, asked: Attempt, applied: bool, norm: float | None, scale: float | None) -> Result:
        """Returns what the engine's step came to; whether the loss is finite is asked of all ranks where it matters."""
        loss = on_device(asked.loss, _device(self.engine))
        value = float(loss)
        self.scale_before = after = self._scale()
        scale = None if after is None else scale
        after = None if scale is None else after
        if applied:
            fine = norm is None or math.isfinite(norm)
            return Result(
                "applied" if fine else "applied although not finite",
                value,
                norm,
                self._clipped(norm),
                None,
                scale,
                after,
                intact=fine,
            )
        bad_losses = float(self.sum((~torch.isfinite(loss)).double().reshape(1)))
        reason: Reason = "non-finite loss" if bad_losses else "non-finite gradient"
        if not bad_losses and scale is not None and scale > self._least_scale():
            reason = "loss scale overflow"
        return Result(
            reason, value, None if norm is None or math.isfinite(norm) else math.nan, None, None, scale, after
        )

    def _checked_step(self, asked: Attempt) -> Result:
        """Makes a step of stage 0 in fp32, of which the engine would apply anything."""
        engine = self.engine
        gradients = Gradients([p for p in engine.module.parameters() if p.requires_grad])
        gradients.fresh()
        asked.after_backward(gradients)
        reason, loss, norm, *_ = self._judge(asked, gradients)
        if reason == "applied":
            asked.before_step()
            engine.step()
        else:
            engine.zero_grad()
            if engine._is_gradient_accumulation_boundary is None:
                engine.micro_steps += 1  # the window is over, as after a step
        self.known = int(engine.global_steps)
        return Result(reason, loss, norm, self._clipped(norm), gradients)

    def _clipped(self, norm: float | None) -> float | None:
        clip = float(self.engine.gradient_clipping() or 0.0)
        return norm if norm is None or not clip else norm * min(1.0, clip / (norm + 1e-6))

    def _shown(self, scale: float | None) -> ZeroGradients:
        parameters = [p for p in self.engine.module.parameters() if p.requires_grad]
        return ZeroGradients(parameters, _device(self.engine), self.rank, scale)

    def _scale(self) -> float | None:
        if not self.engine.fp16_enabled():
            return None
        found = getattr(self.engine.optimizer, "cur_scale", getattr(self.engine.optimizer, "loss_scale", None))
        return float(found) if isinstance(found, int | float | Tensor) else None

    def _least_scale(self) -> float:
        """Returns what the loss scale does not fall below; one that is static does not fall at all.

        With hysteresis it does not fall at every overflow that is put down to it.
        """
        optimizer = self.engine.optimizer
        scaler = getattr(optimizer, "loss_scaler", getattr(optimizer, "loss_scale_config", None))  # ZeRO's; stage 0's
        dynamic = getattr(scaler, "dynamic", getattr(scaler, "dynamic_loss_scale", False))
        return float(getattr(scaler, "min_scale", getattr(scaler, "min_loss_scale", 1.0))) if dynamic else math.inf


def _device(engine: Any) -> torch.device:
    device = getattr(engine, "device", None)
    return torch.device(device) if device is not None else torch.device("cpu")
