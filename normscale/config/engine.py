"""The `engine` section: what training runs on, one process or several, with weights whole or in shards."""

import warnings
from typing import Annotated, Literal

from pydantic import Field, model_validator

from normscale.config.values import Number, Section, Text, Whole, conflict, says, unused
from normscale.errors import ConfigError

EngineName = Literal["plain", "ddp", "fsdp2", "deepspeed"]
LONGEST_S = 24 * 3600.0

warnings.filterwarnings("ignore", 'Field name "json" in "EngineConfig" shadows')  # a method of pydantic's past


class EngineConfig(Section):
    """What training runs on. All give the same numbers up to rounding; some hold the weights in shards."""

    name: Annotated[
        Literal["auto", "plain", "ddp", "fsdp2", "deepspeed"], says("auto: plain on one process, ddp on several")
    ] = "auto"
    zero: Annotated[
        Annotated[Whole, Field(ge=0, le=3)], says("deepspeed only: the stage of ZeRO; 0 shards nothing, 3 all")
    ] = 1
    offload: Annotated[
        Literal["none", "cpu"], says("deepspeed only, stages 1 to 3: where the optimizer and its state live")
    ] = "none"
    json: Annotated[
        Text | None, says("deepspeed only: path of a DeepSpeed configuration; null: made from this one")
    ] = None  # type: ignore[assignment]
    timeout_s: Annotated[Number, says("seconds that ranks wait for each other before a job with a lost one ends")] = (
        300.0
    )

    @model_validator(mode="after")
    def _combinations(self) -> "EngineConfig":
        for name in ("zero", "offload", "json"):
            value = getattr(self, name)
            if self.name != "deepspeed" and value != type(self).model_fields[name].default:
                raise unused(f"engine.{name}", value, f"engine.name={self.name}", "engine.name=deepspeed")
        if self.name == "deepspeed" and not self.zero and self.offload != "none":
            raise unused("engine.offload", self.offload, "engine.zero=0", "engine.zero=1")
        if not 1 <= self.timeout_s <= LONGEST_S:
            raise conflict(f"{self.timeout_s:g} is not between 1 and {LONGEST_S:.0f} seconds", "engine.timeout_s")
        return self

    def on(self, world: int) -> EngineName:
        """Returns the engine that runs with so many ranks.

        Raises:
            ConfigError: this one does not.
        """
        if self.name == "plain" and world > 1:
            raise ConfigError(
                f"engine.name: plain is for one process, and {world} were started; set it to auto, ddp, fsdp2 or"
                " deepspeed, or start one",
                key="engine.name",
            )
        return self.meant(world)

    def meant(self, world: int) -> EngineName:
        """Returns the engine that is named, or that `auto` stands for with so many ranks."""
        if self.name == "auto":
            return "plain" if world == 1 else "ddp"
        return self.name
