"""DeepSpeed brought up quietly: imported where it is asked for, nothing compiled or printed, with our time limit."""

import importlib
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from normscale.config.sources import plain
from normscale.errors import ConfigError, LaunchError


def check_installed() -> None:
    """Raises unless DeepSpeed is there; does not import it.

    Raises:
        ConfigError: it is not.
    """
    if find_spec("deepspeed") is None:
        raise ConfigError(
            "engine.name: deepspeed is not installed; pip install 'normscale[deepspeed]', or set engine.name=fsdp2",
            key="engine.name",
        )


def start(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    device: torch.device,
    timeout_s: float,
) -> Any:
    """Returns DeepSpeed's engine around a model, in the process group that is there.

    Raises:
        ConfigError: DeepSpeed does not take the settings.
        LaunchError: DeepSpeed was imported before, for another kind of device.
    """
    with _environment(device.type):
        deepspeed = _imported(device.type)
        comm: Any = importlib.import_module("deepspeed.comm.comm")
        if comm.cdb is None or not comm.cdb.is_initialized():
            with _nothing_compiled():
                deepspeed.init_distributed()
        # Groups that it makes of its own would wait for half an hour, whatever the limit of the one that it found.
        comm.cdb.new_group = partial(dist.new_group, timeout=timedelta(seconds=timeout_s))
        try:
            return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        except (ValidationError, AssertionError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"engine: DeepSpeed refuses its settings ({_said(error)})", key="engine.json") from error


def stop(engine: Any) -> None:
    """Lets go of an engine, and of all that DeepSpeed keeps of the process group, so that another can be made."""
    engine.destroy()
    importlib.import_module("deepspeed.utils.groups")._release_process_group_references()
    comm: Any = importlib.import_module("deepspeed.comm.comm")
    comm.cdb = None


def _imported(kind: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        deepspeed = importlib.import_module("deepspeed")
    logging.getLogger("DeepSpeed").setLevel(logging.CRITICAL)
    # What torch has to say of DeepSpeed's calls is nothing to whoever trains; it would be said at every step.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.\w+` is deprecated", category=FutureWarning)
    found = deepspeed.accelerator.get_accelerator().device_name()
    if found != kind:
        raise LaunchError(
            f"engine.name: DeepSpeed was set up for {found} in this process, and training runs on {kind}; start it in "
            "a process of its own"
        )
    return deepspeed


@contextmanager
def _environment(kind: str) -> Iterator[None]:
    """Gives a context in which DeepSpeed takes this kind of device without a word; LOCAL_RANK it reads later, too."""
    os.environ.setdefault("LOCAL_RANK", "0")
    before = os.environ.get("DS_ACCELERATOR")
    os.environ["DS_ACCELERATOR"] = kind
    try:
        yield
    finally:
        if before is None:
            del os.environ["DS_ACCELERATOR"]
        else:
            os.environ["DS_ACCELERATOR"] = before


@contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Gives a context in which setting up its communication compiles nothing.

    On a CPU it would build an operation for shared memory, with a C++ compiler, for one to two minutes, of which only
    its inference makes use; and a process that is killed meanwhile leaves a lock that every later one waits for.
    """
    backend: Any = importlib.import_module("deepspeed.comm.torch")
    build = backend.build_shm_op
    backend.build_shm_op = _no_op
    try:
        yield
    finally:
        backend.build_shm_op = build


def _no_op() -> None:
    return None


def _said(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return plain(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", 200)
    return plain(str(error).partition("\n")[0] or type(error).__name__, 200)
