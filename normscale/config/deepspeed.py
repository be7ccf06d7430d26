"""What DeepSpeed is told: one JSON, rendered from our configuration, with a user's own JSON (`engine.json`) below it.

What both name must be the same; what only one names, both take; nothing overrules anything:

| ours                                     | DeepSpeed's                                                           |
| ---------------------------------------- | --------------------------------------------------------------------- |
| train.batch                              | train_batch_size                                                      |
| train.batch / (ranks * train.accumulate) | train_micro_batch_size_per_gpu                                        |
| train.accumulate                         | gradient_accumulation_steps                                           |
| train.optim.clip (null: none)            | gradient_clipping (0: none), always written: unsaid, DeepSpeed takes 1 |
| precision.compute and .stream both bf16  | bf16.enabled                                                          |
| precision.reduce                         | communication_data_type                                               |
| engine.zero                              | zero_optimization.stage                                               |
| engine.offload                           | zero_optimization.offload_optimizer.device                            |

**Precision.** DeepSpeed's own bf16 casts parameters, stream and gradients to bf16 and keeps fp32 masters: that is
`compute: bf16, stream: bf16` (and `params: fp32`, which says what the optimizer holds). `compute: bf16` with the stream
in fp32 is bf16 products over fp32 parameters, as on every other engine, with DeepSpeed's bf16 off.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from normscale.config import deepspeed_file
from normscale.config.deepspeed_file import AUTO, named
from normscale.config.load import Loaded, revise
from normscale.config.precision import SCALED
from normscale.config.schema import RunConfig
from normscale.config.sources import plain
from normscale.errors import ConfigError

Auto = Literal["auto"]

BUCKETS: dict[str, Any] = {"reduce_bucket_size": 500_000_000, "contiguous_gradients": True}
SIZES: tuple[dict[str, Any], ...] = (
    {},
    BUCKETS | {"allgather_bucket_size": 500_000_000, "overlap_comm": False},
    BUCKETS | {"allgather_bucket_size": 500_000_000, "overlap_comm": False},
    BUCKETS
    | {
        "overlap_comm": True,
        "sub_group_size": 1_000_000_000,
        "stage3_prefetch_bucket_size": 50_000_000,
        "stage3_param_persistence_threshold": 100_000,
        "stage3_max_live_parameters": 1_000_000_000,
        "stage3_max_reuse_distance": 1_000_000_000,
    },
)
"""By stage, what DeepSpeed 0.19 would take anyway, in entries: said aloud, since memory and traffic depend on it."""


@dataclass(frozen=True)
class DeepSpeedConfig:
    """A complete DeepSpeed configuration; "auto" stands for what a run fills in."""

    stage: int
    offload: Literal["none", "cpu"]
    batch: int | Auto = AUTO
    micro_batch: int | Auto = AUTO
    accumulate: int | Auto = AUTO
    clip: float | Auto = AUTO
    bf16: bool | Auto = AUTO
    reduce: Literal["fp32", "bf16", "auto"] = AUTO

    def rendered(self, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns it as DeepSpeed reads it; `base` is what a user's own JSON says besides."""
        own = {name: value for name, value in (base or {}).items() if value != AUTO}
        zero = {"stage": self.stage} | SIZES[self.stage]
        zero |= {name: value for name, value in own.get("zero_optimization", {}).items() if value != AUTO}
        if self.offload == "cpu":
            places = ["offload_optimizer", "offload_param"] if self.stage == 3 else ["offload_optimizer"]
            chosen = [place for place in places if named(zero, f"{place}.device") == "cpu"]
            for place in chosen or places:
                zero[place] = dict(zero.get(place, {})) | {"device": "cpu"}
        return own | {
            "train_batch_size": self.batch,
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.accumulate,
            "gradient_clipping": self.clip,
            "bf16": dict(own.get("bf16", {})) | {"enabled": self.bf16},
            "fp16": {"enabled": False},
            "communication_data_type": self.reduce,
            "zero_optimization": zero,
            # The optimizer is torch's own, whatever the stage and wherever its state lies: one rule for all engines.
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": own.get("steps_per_print"),
            "wall_clock_breakdown": own.get("wall_clock_breakdown", False),
        }

    def text(self) -> str:
        """Returns the file that stands in configs/deepspeed."""
        return json.dumps(self.rendered(), indent=2) + "\n"


STAGES: dict[str, DeepSpeedConfig] = {
    **{f"zero{stage}": DeepSpeedConfig(stage, "none") for stage in range(4)},
    "zero3-offload": DeepSpeedConfig(3, "cpu"),
}
"""The files in configs/deepspeed by name, each exactly what is rendered; a test holds them together."""


class Named(NamedTuple):
    """A value that a user's JSON names: our key, our value, and the place, as in "gradient_clipping=1.0 in ds.json"."""

    key: str
    value: Any
    place: str


def rendered(config: RunConfig, world: int) -> dict[str, Any]:
    """Returns what DeepSpeed is given for a run on `world` ranks.

    Raises:
        ConfigError: the user's JSON cannot be read or says otherwise than the configuration.
    """
    path, base = config.engine.json, {}
    if path is not None:
        base = deepspeed_file.read(path)
        _check(config, _named(base, path), path, base)
    train = config.train
    micro = train.batch // (world * train.accumulate)
    found = named(base, "train_micro_batch_size_per_gpu")
    if found is not None and found != micro:
        said = f"{train.batch} over {world} rank(s) and {train.accumulate} micro-batch(es) are {micro} at a time"
        place = f"train_micro_batch_size_per_gpu={found} in {plain(str(path), 200)}"
        raise ConfigError(f"train.batch: {said} but {place}; change one of the two", key="train.batch")
    own = DeepSpeedConfig(
        stage=config.engine.zero,
        offload=config.engine.offload,
        batch=train.batch,
        micro_batch=micro,
        accumulate=train.accumulate,
        clip=train.optim.clip or 0.0,
        bf16=native_bf16(config),
        reduce=config.precision.reduce,
    )
    return own.rendered(base)


def native_bf16(config: RunConfig) -> bool:
    """Returns whether DeepSpeed's own bf16 is on."""
    return config.precision.compute == config.precision.stream == "bf16"


def filled(loaded: Loaded) -> Loaded:
    """Returns the configuration with the values that only the user's DeepSpeed JSON names.

    Raises:
        ConfigError: as for `rendered`, the places of ours included.
    """
    config, sources = loaded.config, loaded.sources
    path = config.engine.json
    if config.engine.name != "deepspeed" or path is None:
        return loaded
    with sources.placed():
        base = deepspeed_file.read(path)
        found = _named(base, path)
        open_ = {key: value for key, value, _ in found if sources.place(key) is None and not _same(config, key, value)}
        if open_:
            try:
                config = revise(config, open_)
            except ConfigError as error:
                raise ConfigError(f"{plain(path, 200)}: {error}", error.key) from error
        _check(config, found, path, base)
    return Loaded(config, sources) if open_ else loaded


def check_precision(config: RunConfig, device: str) -> None:
    """Refuses a precision that this engine would not honour.

    Raises:
        ConfigError: fp16 on a CPU or with offload, fp8, or parameters in bf16.
    """
    precision = config.precision
    if precision.compute in SCALED and (device == "cpu" or precision.compute != "fp16"):
        where = "on a CPU" if precision.compute == "fp16" else "anywhere"
        raise ConfigError(
            f"precision.compute: DeepSpeed does not train in {precision.compute} {where}; set precision.compute=bf16, "
            "or engine.name=ddp, which rounds to it",
            key="precision.compute",
        )
    if precision.compute in SCALED and config.engine.offload != "none":
        raise ConfigError(
            f"engine.offload: {config.engine.offload} takes gradients before the loss scale is taken out of them; set "
            "engine.offload=none or precision.compute=bf16",
            key="engine.offload",
        )
    if precision.params != "fp32":
        raise ConfigError(
            "precision.params: DeepSpeed's optimizer holds fp32 parameters whatever the model computes with; set "
            "precision.params=fp32 (precision.stream=bf16 keeps the model's copy in bf16), or engine.name=ddp",
            key="precision.params",
        )


def _named(base: Mapping[str, Any], path: str) -> list[Named]:
    """Returns what a JSON names of what our configuration names too.

    Raises:
        ConfigError: a value that no configuration of ours could have.
    """
    shown = plain(path, 200)

    def place(dotted: str) -> str:
        return f"{dotted}={plain(json.dumps(named(base, dotted)), 60)} in {shown}"

    def refuse(dotted: str, mend: str) -> ConfigError:
        return ConfigError(f"engine.json: {place(dotted)}: {mend}", key="engine.json")

    found: list[Named] = []
    for dotted, key in (
        ("train_batch_size", "train.batch"),
        ("gradient_accumulation_steps", "train.accumulate"),
        ("gradient_clipping", "train.optim.clip"),
        ("zero_optimization.stage", "engine.zero"),
        ("communication_data_type", "precision.reduce"),
    ):
        value = named(base, dotted)
        if value is not None:
            if key in ("train.batch", "train.accumulate", "engine.zero") and type(value) is not int:
                raise refuse(dotted, 'give a whole number or "auto"')
            if key == "train.optim.clip" and type(value) not in (int, float):
                raise refuse(dotted, 'give a number or "auto"')
            if key == "precision.reduce" and value not in ("fp32", "bf16"):
                raise refuse(dotted, 'give "fp32", "bf16" or "auto"')
            found.append(Named(key, value or None if key == "train.optim.clip" else value, place(dotted)))
    for name in ("offload_optimizer", "offload_param"):
        device = named(base, f"zero_optimization.{name}.device")
        if device is not None:
            if device not in ("none", "cpu"):
                raise refuse(f"zero_optimization.{name}.device", 'give "cpu" or "none"')
            found.append(Named("engine.offload", device, place(f"zero_optimization.{name}.device")))
    for name in ("bf16", "fp16"):
        enabled = named(base, f"{name}.enabled")
        if enabled not in (None, True, False) or isinstance(enabled, int) is not isinstance(enabled, bool):
            raise refuse(f"{name}.enabled", 'give true, false or "auto"')
    if named(base, "fp16.enabled") and named(base, "bf16.enabled"):
        raise ConfigError(f"engine.json: fp16.enabled and bf16.enabled are both true in {shown}; set one to false")
    if named(base, "fp16.enabled"):
        mend = "DeepSpeed's fp16 has a loss scale of its own; set it to false, and precision.compute says fp16"
        raise refuse("fp16.enabled", mend)
    if named(base, "bf16.enabled"):
        found += [Named(f"precision.{name}", "bf16", place("bf16.enabled")) for name in ("compute", "stream")]
    for name, wanted in (("zero_allow_untested_optimizer", True), ("zero_force_ds_cpu_optimizer", False)):
        if named(base, name) not in (None, wanted):
            raise refuse(name, f"the optimizer is train.optim's, from torch; set it to {json.dumps(wanted)}")
    return found


def _check(config: RunConfig, found: list[Named], path: str, base: Mapping[str, Any]) -> None:
    """Raises unless the configuration has every value that a JSON names."""
    for key, value, place in found:
        if not _same(config, key, value):
            ours = _value(config, key)
            shown = "null" if ours is None else f"{ours:g}" if isinstance(ours, float) else ours
            raise ConfigError(f"{key}: {shown} but {place}; give one value, in one place", key=key)
    if named(base, "zero_optimization.offload_param.device") == "cpu" and config.engine.zero < 3:
        place = f'zero_optimization.offload_param.device="cpu" in {plain(path, 200)}'
        said = f"engine.zero: {config.engine.zero} keeps parameters where they are used, but {place}"
        raise ConfigError(f"{said}; remove it or set engine.zero=3", key="engine.zero")
    if named(base, "bf16.enabled") is False and native_bf16(config):
        place = f"bf16.enabled=false in {plain(path, 200)}"
        mend = "precision.compute=bf16 and precision.stream=bf16 are DeepSpeed's bf16"
        raise ConfigError(f"precision.stream: bf16 but {place}; {mend}; change one of them", key="precision.stream")


def _same(config: RunConfig, key: str, value: Any) -> bool:
    return bool(_value(config, key) == value)


def _value(config: RunConfig, key: str) -> Any:
    found: Any = config
    for name in key.split("."):
        found = getattr(found, name)
    return found
