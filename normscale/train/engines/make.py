"""Which engine a run gets, and what it would not do."""

import torch

from normscale.config.schema import RunConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.models.stack import Transformer
from normscale.train.engines.engine import Engine
from normscale.train.engines.plain import PlainEngine
from normscale.train.engines.precision import check_precision
from normscale.train.engines.ranks import device_kind, world_size


def check_engine(config: RunConfig) -> None:
    """Refuses what the engine of a configuration would not do with this many ranks on this kind of device.

    Raises:
        ConfigError: a value that would do nothing here, or that this engine cannot honour.
    """
    world, device = world_size(), device_kind()
    name = config.engine.on(world)
    check_precision(config.precision, device, world)
    _check_norms(config, name, world)
    if name == "deepspeed":
        from normscale.train.engines.zero import check_zero

        check_zero(config, device, world)


def _check_norms(config: RunConfig, engine: str, world: int) -> None:
    """Refuses norms with running statistics where these would be lost, or not the same on every rank."""
    found = next((norm.name for norm in resolve(config.model).norms_in_use() if norm.remembers), None)
    if found is not None and engine == "deepspeed":
        raise ConfigError(
            f"model.norm: {found} keeps running statistics, which ZeRO's checkpoints do not hold; set engine.name to"
            " plain, ddp or fsdp2, or choose another norm",
            key="model.norm",
        )
    if found is not None and world > 1 and config.model.compile:
        raise ConfigError(
            f"model.norm: {found} asks the other ranks within a block, which cannot be compiled; set"
            " model.compile=false, or choose another norm",
            key="model.norm",
        )


def make_engine(model: Transformer, config: RunConfig) -> Engine:
    """Returns the engine that a configuration names, on as many ranks as this process was started with.

    Raises:
        ConfigError: as for `check_engine`.
        LaunchError: what was set up is not what was asked for.
    """
    name, timeout_s = config.engine.on(world_size()), config.engine.timeout_s
    if name == "plain":
        return PlainEngine(model, config.precision, torch.device(device_kind()))
    # Imported where they are asked for: a run on one process needs none of them.
    if name == "ddp":
        from normscale.train.engines.ddp import DDPEngine

        return DDPEngine(model, config.precision, timeout_s)
    if name == "fsdp2":
        from normscale.train.engines.fsdp2 import FSDP2Engine

        return FSDP2Engine(model, config.precision, timeout_s)
    from normscale.train.engines.zero import ZeroEngine

    return ZeroEngine(model, config)
