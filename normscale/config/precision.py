"""The `precision` section: what is computed and kept in what, and the scale of the loss."""

import math
from typing import Annotated, Literal

from pydantic import model_validator

from normscale.config.values import Count, Flag, Positive, Section, conflict, says, unused

LARGEST_SCALE = 2.0**24  # of the loss: more helps nothing in fp16, nor does less than its inverse

Compute = Literal["fp32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2"]
SCALED: tuple[Compute, ...] = ("fp16", "fp8_e4m3", "fp8_e5m2")  # gradients may underflow: the loss is scaled


class LossScaleConfig(Section):
    """The factor on the loss that keeps small gradients representable; for compute=fp16 and fp8."""

    dynamic: Annotated[Flag, says("halve at an overflow, double after growth_steps without one")] = True
    initial: Annotated[Positive, says("the scale to begin with")] = 65536.0
    growth_steps: Annotated[Count, says("applied steps before the scale is doubled")] = 2000
    minimum: Annotated[Positive, says("an overflow at this scale is the model's, not the scale's")] = 1.0

    @model_validator(mode="after")
    def _combinations(self) -> "LossScaleConfig":
        for name in ("initial", "minimum"):
            value, bound = getattr(self, name), LARGEST_SCALE
            if not 1 / bound <= value <= bound:
                raise conflict(
                    f"{value:g} is not between 2**-24 and 2**24; give {max(1 / bound, min(bound, value)):.17g}",
                    f"precision.loss_scale.{name}",
                )
            if math.frexp(value)[0] != 0.5:
                near = 2.0 ** round(math.log2(value))
                raise conflict(
                    f"{value:g} is not a power of two, so that scaling would round; give {near:.17g}",
                    f"precision.loss_scale.{name}",
                )
        for name in ("growth_steps", "minimum"):
            value, default = getattr(self, name), type(self).model_fields[name].default
            if not self.dynamic and value != default:
                mend = "precision.loss_scale.dynamic=true"
                raise unused(f"precision.loss_scale.{name}", value, "precision.loss_scale.dynamic=false", mend)
        return self


class PrecisionConfig(Section):
    """What is computed and kept in what. An engine that cannot honour a value refuses it."""

    compute: Annotated[
        Compute, says("what products are computed in; on a CPU fp16 and fp8 are rounded to, not run natively")
    ] = "fp32"
    stream: Annotated[Literal["fp32", "bf16"], says("the residual stream between sublayers")] = "fp32"
    params: Annotated[Literal["fp32", "bf16"], says("parameters, and with them the optimizer's state")] = "fp32"
    reduce: Annotated[Literal["fp32", "bf16"], says("gradients on their way between ranks")] = "fp32"
    softmax: Annotated[Literal["fp32", "compute"], says("the softmax inside attention")] = "fp32"
    tf32: Annotated[Flag, says("fp32 products may be rounded to TF32 (CUDA only)")] = False
    flush_denormals: Annotated[
        Flag, says("denormal numbers become 0, from the process's start: vanished gradients read as zeros")
    ] = False
    loss_scale: LossScaleConfig = LossScaleConfig()

    @model_validator(mode="after")
    def _combinations(self) -> "PrecisionConfig":
        if self.compute not in SCALED and self.loss_scale != LossScaleConfig():
            key = next(k for k, v in self.loss_scale if v != getattr(LossScaleConfig(), k))
            has = f"precision.compute={self.compute}"
            raise unused(f"precision.loss_scale.{key}", getattr(self.loss_scale, key), has, "precision.compute=fp16")
        if self.loss_scale.dynamic and self.loss_scale.minimum > self.loss_scale.initial:
            raise conflict(
                f"{self.loss_scale.minimum:g} is more than precision.loss_scale.initial={self.loss_scale.initial:g}",
                "precision.loss_scale.minimum",
                "precision.loss_scale.initial",
            )
        if self.tf32 and self.compute != "fp32":
            raise unused("precision.tf32", True, f"precision.compute={self.compute}", "precision.compute=fp32")
        if self.softmax == "compute" and self.compute == "fp32":
            raise unused("precision.softmax", "compute", "precision.compute=fp32", "precision.compute=bf16")
        return self
