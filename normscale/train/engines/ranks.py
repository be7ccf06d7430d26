"""The ranks of a run: how many there are, what each computes on, and the process group they meet in."""

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from normscale.errors import LaunchError
from normscale.planned import DEVICE


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
    """Returns "cuda" where there is a CUDA device and ACCELERATE_USE_CPU does not keep to the CPU, else "cpu".

    Raises:
        LaunchError: the launcher was to use GPUs, and PyTorch finds none.
    """
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get(DEVICE) == "cuda":
        raise LaunchError(
            f"what was started is for GPUs, and PyTorch {torch.__version__} can use none here ({_why_no_gpu()});"
            " mend that, or give --device cpu (GPUS=0 with Slurm)"
        )
    return "cpu"


def _why_no_gpu() -> str:
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (AssertionError, RuntimeError) as error:
        return " ".join(str(error).split())[:200]
    return "no reason is given"


def own_device() -> torch.device:
    """Returns the device of this rank."""
    if device_kind() == "cpu":
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def make_group(timeout_s: float, **where: Any) -> None:
    """Makes the process group, on GPUs with NCCL beside gloo; `where`: store, rank, world_size, else of variables."""
    device = own_device()
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), **where)


def join(timeout_s: float) -> tuple[int, int]:
    """Joins the process group, if that was not done yet; returns this rank and the number of ranks.

    One process without variables for ranks gets a group of its own. `timeout_s` is how long ranks wait for each other.

    Raises:
        LaunchError: the group has another number of ranks than this process was started with.
    """
    wanted = world_size()
    if not dist.is_initialized():
        alone = {} if wanted > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
        make_group(timeout_s, **alone)
    if dist.get_world_size() != wanted:
        raise LaunchError(
            f"WORLD_SIZE={wanted} was asked for, but the process group has {dist.get_world_size()} rank(s); start the "
            f"run with `python -m launch local --nproc {wanted}`"
        )
    return dist.get_rank(), wanted
