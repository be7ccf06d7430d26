"""What is asked of Slurm, and whether it could be had."""

import re
import sys
from dataclasses import dataclass

from launch.command import check_port_number, check_ranks
from normscale.errors import LaunchError

TIME = re.compile(r"\d+(:\d{1,2}){0,2}|\d+-\d{1,2}(:\d{1,2}){0,2}")
NAME = re.compile(r"[A-Za-z0-9_.+][A-Za-z0-9_.+-]{0,99}")
NAMES = re.compile(
    rf"{NAME.pattern}(,{NAME.pattern}){{0,20}}"
)  # of partitions, of which Slurm takes the first that is free
LONGEST_GRACE_S = 65535
GPU_CORES = 4  # of each rank that has a GPU: its own thread, those of backward and NCCL, and the data


@dataclass(frozen=True)
class Batch:
    """What is asked of Slurm; None is left to the cluster."""

    nodes: int = 1
    gpus: int = 0
    nproc: int | None = None
    cpus: int | None = None
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    port: int | None = None
    grace_s: int = 90
    follow_up: int = 0
    name: str = "normscale"
    logs: str = "runs/slurm"
    sbatch: tuple[str, ...] = ()
    folder: str = "."
    python: str = sys.executable

    @property
    def ranks(self) -> int:
        """Returns the number of ranks of each host."""
        return self.nproc or self.gpus or 1

    @property
    def cores(self) -> int:
        """Returns the CPU cores that are asked for each rank; 0 asks for none, and the cluster gives what it gives."""
        if self.cpus is not None:
            return self.cpus
        return GPU_CORES if self.gpus else 1

    def check(self) -> None:
        """Raises LaunchError for what Slurm could not use."""
        for name, least in (("nodes", 1), ("gpus", 0), ("cpus", 0), ("follow_up", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise LaunchError(f"--{name.replace('_', '-')} {value}: give {least} or more")
        if self.nproc is not None and (self.nproc < 1 or (self.gpus and self.nproc > self.gpus)):
            raise LaunchError(f"--nproc {self.nproc}: give 1 or more ranks a host, and with GPUs at most one a GPU")
        check_ranks(self.ranks)
        if self.time is not None and not TIME.fullmatch(self.time):
            raise LaunchError(f"--time {self.time}: not a time limit; give minutes, HH:MM:SS or DAYS-HH:MM:SS (TIME=)")
        for name in ("partition", "account", "name"):
            value = getattr(self, name)
            if value is not None and not (NAMES if name == "partition" else NAME).fullmatch(value):
                raise LaunchError(f"--{name} {value!r}: not a name; letters, digits and . _ + - make one")
        if self.time is not None and minutes(self.time) * 60 < self.grace_s + 60:
            raise LaunchError(
                f"--time {self.time}: shorter than --grace {self.grace_s} and a minute; give it more (TIME=)"
            )
        for word in self.sbatch:
            if not re.fullmatch(r"--?[!-~ ]+", word):
                raise LaunchError(f"--sbatch {word!r}: not an option of sbatch; write e.g. --sbatch=--mem=64G")
        if "\n" in self.logs or "%" in self.logs:
            raise LaunchError(f"--logs {self.logs!r}: not a folder that Slurm can be told; choose a plain name")
        if self.grace_s > LONGEST_GRACE_S:
            raise LaunchError(
                f"--grace {self.grace_s}: Slurm tells a job of its limit at most {LONGEST_GRACE_S} s before"
            )
        if self.port is not None:
            check_port_number(self.port)


def minutes(limit: str) -> int:
    """Returns a time limit in whole minutes: MINUTES, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, mins = (*parts, 0)[:2]
        return (int(days) * 24 + hours) * 60 + mins
    return parts[0] * 60 + parts[1] if len(parts) == 3 else parts[0]
