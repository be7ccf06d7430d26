"""The command that a launcher runs, as data: rendered here, tested as text, shown by DRY_RUN=1."""

import os
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Literal

from launch.plan_env import plan_env
from normscale.errors import LaunchError
from normscale.planned import DEVICE, SINCE, VARIABLE

Device = Literal["auto", "cpu", "cuda"]
MOST_RANKS = 1024
ENTRY = ("-m", "normscale", "train")
CLAIM = ("-m", "normscale", "claim", "run")
ACCELERATE_CONFIGS = Path(__file__).resolve().parent.parent / "configs" / "accelerate"

# Left over from another launch in the caller's environment, these would change what the ranks do.
STRAY = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "ROLE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)
STRAY_PREFIXES = (
    "ACCELERATE_",
    "PET_",
    "TORCHELASTIC_",
    "FSDP_",
    "PYTHON_EXEC",
    "NORMSCALE_STATUS_DIR",
    VARIABLE,
    DEVICE,
    SINCE,
)


@dataclass(frozen=True)
class Command:
    """A program, its arguments, and what it changes in the environment."""

    argv: tuple[str, ...]
    sets: dict[str, str] = field(default_factory=dict)
    unsets: tuple[str, ...] = ()

    def shell(self) -> str:
        """Returns the command as one line that a shell would run alike."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.sets.items()]
        if self.unsets:
            words = ["env", *(word for name in self.unsets for word in ("-u", name)), *words]
        return " ".join([*words, *(shlex.quote(word) for word in self.argv)])

    def environ(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment the command runs in."""
        return {name: value for name, value in base.items() if name not in self.unsets} | self.sets

    def with_plan(self, args: Sequence[str], world: int | None) -> "Command":
        """Returns the command that also tells its ranks what was planned: so many of them, to train `args`."""
        return replace(self, sets=self.sets | plan_env(args, world))


def local(
    args: Sequence[str],
    *,
    nproc: int = 1,
    device: Device = "auto",
    port: int | None = None,
    environ: Mapping[str, str] = os.environ,
    entry: Sequence[str] = ENTRY,
) -> Command:
    """Returns the command that trains on this machine with `nproc` ranks.

    One rank needs no launcher. On the CPU, Accelerate reaches several ranks only through `--multi_gpu` together with
    ACCELERATE_USE_CPU: with `--cpu` it starts a single process whatever `--num_processes` says.

    Raises:
        LaunchError: no configuration, or a number of ranks, a port or a device that cannot be had.
    """
    if not args:
        raise LaunchError(
            "no configuration to train; name one after --, as in: -- configs/train/quick.yaml train.steps=50"
        )
    check_ranks(nproc)
    chosen = choose_device(device, nproc, environ)
    # With `auto`, one rank leaves it to PyTorch, which may find no way to use the GPU that is there.
    sets = device_env(device if nproc == 1 and chosen == "cuda" else chosen)
    unsets = tuple(sorted(name for name in environ if is_stray(name) and name not in sets))
    if nproc == 1:
        return Command((sys.executable, *entry, *args), sets, unsets)
    if port is not None:
        check_port(port)
    launcher = (
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", _shown(ACCELERATE_CONFIGS / f"{chosen}.yaml")),  # never the user's own default
        "--multi_gpu",
        *("--num_processes", str(nproc)),
        *("--num_machines", "1"),
        *("--mixed_precision", "no"),
        *("--num_cpu_threads_per_process", str(threads(nproc, environ))),
        *("--main_process_port", str(port or 0)),  # 0: Accelerate takes a free one
    )
    return Command((*launcher, *entry, *args), sets, unsets)


def check_ranks(nproc: int) -> None:
    """Raises LaunchError for a number of ranks that no host has; a slip of the finger would take this one down."""
    if nproc < 1:
        raise LaunchError(f"--nproc {nproc}: at least one process is needed")
    if nproc > MOST_RANKS:
        raise LaunchError(f"--nproc {nproc}: at most {MOST_RANKS} ranks on a host")


def threads(nproc: int, environ: Mapping[str, str]) -> int:
    """Returns the threads of each rank: OMP_NUM_THREADS where it is set, else an equal share of the cores."""
    asked = environ.get("OMP_NUM_THREADS")
    if not asked:
        return max(1, len(os.sched_getaffinity(0)) // nproc)
    if not asked.isdigit() or int(asked) < 1:
        raise LaunchError(f"OMP_NUM_THREADS={asked!r} in the environment is not a number of threads; unset it or set 1")
    return int(asked)


def choose_device(asked: Device, nproc: int, environ: Mapping[str, str]) -> Literal["cpu", "cuda"]:
    """Returns the kind of device the ranks use; `auto` takes the GPUs where there are any.

    Raises:
        LaunchError: more ranks than GPUs.
    """
    if asked == "cpu":
        return "cpu"
    gpus = count_gpus(environ)
    if not gpus and asked == "auto":
        return "cpu"
    if gpus < nproc:
        raise LaunchError(
            f"--nproc {nproc}: this machine offers {gpus} GPU(s), one a rank; lower it or give --device cpu"
        )
    return "cuda"


def device_env(device: Device) -> dict[str, str]:
    """Returns the variable that holds ranks to a device; with `auto` PyTorch decides."""
    return {"cpu": {"ACCELERATE_USE_CPU": "true"}, "cuda": {DEVICE: "cuda"}, "auto": {}}[device]


def count_gpus(environ: Mapping[str, str], dev: Path = Path("/dev")) -> int:
    """Returns the number of NVIDIA GPUs that the installed PyTorch could use, without importing it."""
    try:
        if metadata.version("torch").endswith("+cpu"):
            return 0
    except metadata.PackageNotFoundError:
        return 0
    present = len([path for path in dev.glob("nvidia*") if path.name.removeprefix("nvidia").isdigit()])
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    return min(present, len([word for word in visible.split(",") if word.strip() not in ("", "-1")]))


def check_port(port: int) -> None:
    """Raises LaunchError unless the ranks could meet at this port of this machine."""
    check_port_number(port)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise LaunchError(f"--port {port}: {reason}; choose another, or leave --port out for a free one") from error


def check_port_number(port: int, where: str = "") -> None:
    """Raises LaunchError for what is no port; `where` is how it was given."""
    if not 1 <= port <= 65535:
        raise LaunchError(f"{where or f'--port {port}'}: a port is a number from 1 to 65535")


def is_stray(name: str) -> bool:
    """Returns whether a variable is left over from another launch."""
    return name in STRAY or name.startswith(STRAY_PREFIXES)


def _shown(path: Path) -> str:
    """Returns the path relative to the current folder where it lies below it, as a person would write it."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
