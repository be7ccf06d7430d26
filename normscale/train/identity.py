"""What a run is: the hash that says whether two runs would give the same numbers, and where it ran."""

import functools
import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import normscale
from normscale.config.schema import RunConfig
from normscale.data.task import load_task
from normscale.models.plan import resolve
from normscale.train.backend import norm_backend
from normscale.train.engines.ranks import device_kind, world_size

NUMERICAL_SOURCES = ("ops", "norms", "schemes", "models", "data", "probes", "train")

NORM_PACKAGES = {"triton": ("triton",), "liger": ("triton", "liger-kernel"), "apex": ("apex",)}


@functools.cache
def sources_hash(*more: str) -> str:
    """Returns a hash of the source files that numbers depend on; a commit anywhere else voids no run.

    `more` are packages that other numbers than those of training depend on, too.
    """
    package = Path(normscale.__file__).parent
    digest = hashlib.sha256()
    for folder in (*NUMERICAL_SOURCES, *more):
        for path in sorted((package / folder).rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def identity(config: RunConfig, world: int | None = None, threads: int | None = None) -> dict[str, Any]:
    """Returns everything that the numbers of a run depend on, with its hash.

    The data count by their bytes, not by where they lie; options count as they are, not by whether they were written;
    an engine as what it comes to on so many ranks. It is that of this process, or as if it had been started with
    `world` ranks of so many `threads`.

    Raises:
        ConfigError: DeepSpeed's own configuration cannot be read.
        DataError: the corpus cannot be read.
        BackendError: the norms cannot run on what `model.backend` names.
    """
    plan = resolve(config.model)
    numerical = config.numerical()
    places = {"source", "languages", "held_out_source", "field", "max_bytes", "held_out"}
    numerical["data"] = {name: value for name, value in numerical["data"].items() if name not in places}
    numerical["model"] = plan.numerical()
    world = world_size() if world is None else world
    numerical["engine"]["name"] = config.engine.meant(world)
    cuda = device_kind() == "cuda"
    backend = norm_backend(plan, config.precision, device_kind())
    parts = {
        "config": numerical,
        "data_digest": load_task(config).digest,
        "device": device_kind(),
        "device_name": torch.cuda.get_device_name() if cuda else torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads() if threads is None else threads,
        "world": world,
        "precision": config.precision.compute,
        "norms": ", ".join([backend, *(f"{name} {version(name)}" for name in _packages(backend))]),
        "sources": sources_hash(),
        "torch": torch.__version__,
        **({"deepspeed": version("deepspeed")} if config.engine.name == "deepspeed" else {}),
    }
    text = json.dumps(parts, sort_keys=True)
    return {"hash": hashlib.sha256(text.encode()).hexdigest(), **{k: v for k, v in parts.items() if k != "config"}}


def _packages(backend: str) -> tuple[str, ...]:
    """Returns the packages whose kernels make the norms: of what `norm_backend` returned."""
    return NORM_PACKAGES.get(backend.partition(";")[0], ())


def run_id_of(config: RunConfig, world: int | None = None, threads: int | None = None) -> str:
    """Returns the name of the run's folder, the same on every rank and for every start of the same run.

    With `world` and `threads`, that of the same run with other ranks.

    Raises:
        DataError: the corpus cannot be read.
    """
    return f"{named_before_hash(config)}-{identity(config, world, threads)['hash'][:10]}"


def named_before_hash(config: RunConfig) -> str:
    """Returns how the names of all runs begin that share scheme, depth and seed with this one."""
    return f"{config.model.scheme}-L{config.model.N + config.model.M:04d}-s{config.seed}"


@functools.cache
def environment() -> dict[str, Any]:
    """Returns what a reader may want to know of the machine and the software."""
    return {
        "normscale": normscale.__version__,
        "git": _git_commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
    }


def version(package: str) -> str | None:
    """Returns the version of an installed package, None where there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """Returns the commit of the checkout normscale runs from, with "+" where files differ from it; None outside one."""
    folder = Path(normscale.__file__).parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != folder.parent:
            return None
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
