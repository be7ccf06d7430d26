"""Which variables a launcher hands on to other hosts. What is not named here stays where it was set.

| handed on | what for |
| --- | --- |
| OMP_NUM_THREADS | threads of each rank |
| NCCL_*, GLOO_*, TORCH_NCCL_*, TORCH_GLOO_* | network interfaces and time limits of the ranks' connections |
| TORCH_CPP_LOG_LEVEL, TORCH_DISTRIBUTED_DEBUG, TORCH_LOGS, TORCH_SHOW_CPP_STACKTRACES | finding faults |
| TORCH_EXTENSIONS_DIR | where DeepSpeed keeps what it compiled |
| HF_HOME, HF_DATASETS_CACHE, HF_DATASETS_OFFLINE, HF_HUB_OFFLINE | data sets |
| MLFLOW_TRACKING_URI | where records go |
| NORMSCALE_* | settings of normscale itself |
| MLFLOW_TRACKING_USERNAME, _PASSWORD, _TOKEN | over ssh's standard input alone, never on a command line or in a file |

CUDA_VISIBLE_DEVICES stays: which GPUs there are is each host's own matter, or Slurm's.

A value that a command line or a file must not show (a password by its name, an address with a password in it) is a
secret: `launch ssh` sends it over the standard input of its ssh connection; for the other launchers, each host has it
in its own environment or does without.
"""

import re
from collections.abc import Mapping

from normscale.planned import DEVICE, SINCE, VARIABLE

NAMES = frozenset(
    (
        "OMP_NUM_THREADS",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_LOGS",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_EXTENSIONS_DIR",
        "HF_HOME",
        "HF_DATASETS_CACHE",
        "HF_DATASETS_OFFLINE",
        "HF_HUB_OFFLINE",
        "MLFLOW_TRACKING_URI",
    )
)
PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "TORCH_GLOO_", "NORMSCALE_")
SECRETS = frozenset(("MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN"))
OWN = ("NORMSCALE_STATUS_DIR", VARIABLE, DEVICE, SINCE, "NORMSCALE_MAKE_")
"""What belongs to one launch on one host."""

TOOLS = ("HOME", "USER", "LOGNAME", "PATH", "LANG", "LC_ALL", "TMPDIR", "TERM", "SSH_AUTH_SOCK", "LD_LIBRARY_PATH")
"""What ssh, pdsh, DeepSpeed's launcher and sbatch need of our environment for themselves."""

_SECRET_NAME = re.compile(r"PASSW|SECRET|TOKEN|CREDENTIAL|(API|ACCESS|PRIVATE)_?KEY", re.I)
_WITH_PASSWORD = re.compile(r"://[^/\s]*@")


def handed_on(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that any launcher may hand on: none of them is a secret."""
    return {name: value for name, value in sorted(environ.items()) if _named(name) and not _secret(name, value)}


def secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that may travel over a private channel alone."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if name in SECRETS or (_named(name) and _secret(name, value))
    }


def trimmed(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns what a tool may see that puts its environment on command lines or into files."""
    return {name: environ[name] for name in TOOLS if name in environ}


def _named(name: str) -> bool:
    return name in NAMES or (name.startswith(PREFIXES) and not name.startswith(OWN))


def _secret(name: str, value: str) -> bool:
    return _SECRET_NAME.search(name) is not None or _WITH_PASSWORD.search(value) is not None
