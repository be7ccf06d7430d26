"""The words of `python -m launch`: which launcher, its options, and what it is to train."""

import argparse
import os
import re
import shlex
from collections.abc import MutableMapping, Sequence
from pathlib import Path

from launch import wire
from launch.batch import GPU_CORES
from launch.job import CONNECT_S, GRACE_S
from launch.local import GRACE_S as LOCAL_GRACE_S
from normscale.arguments import Parser, whole
from normscale.errors import LaunchError, nearest

MADE_CONFIG, MADE_ARGS = "NORMSCALE_MAKE_CONFIG", "NORMSCALE_MAKE_ARGS"
"""Where make leaves CONFIG= and ARGS=, as they were written."""

USAGE = """python -m launch LAUNCHER [options] -- CONFIG [key=value ...]
       python -m launch LAUNCHER [options] --claim ID -- [options of normscale claim run]"""
LEAST_SILENCE_S = 3 * wire.BEAT_S
EXPERIMENTS = Path(__file__).resolve().parent.parent / "experiments"


def parser() -> argparse.ArgumentParser:
    """Returns the parser of everything before `--`."""
    top = Parser(prog="python -m launch", usage=USAGE, description=_ABOUT, allow_abbrev=False)
    launchers = top.add_subparsers(dest="launcher", required=True, metavar="LAUNCHER", prog="python -m launch")
    _local(_launcher(launchers, "local", "ranks on this machine", LOCAL_GRACE_S))
    _ssh(_launcher(launchers, "ssh", "ranks on the hosts of a hostfile, over ssh", GRACE_S))
    _deepspeed(_launcher(launchers, "deepspeed", "the same through DeepSpeed's launcher and pdsh", GRACE_S))
    _slurm(_launcher(launchers, "slurm", "a batch job of Slurm", 90.0))
    _torchrun(_launcher(launchers, "torchrun", "this host's ranks of several hosts', typed on each", GRACE_S))
    launchers.add_parser("doctor", help="checks hosts before training (has its own --help)", add_help=False)
    return top


_ABOUT = "Starts training, or a whole claim, on this machine or on others. --dry-run shows what it would run."


def _launcher(
    launchers: "argparse._SubParsersAction[Parser]", name: str, says: str, grace_s: float
) -> argparse.ArgumentParser:
    one = launchers.add_parser(name, help=says, description=says, allow_abbrev=False)
    one.add_argument("--claim", metavar="ID", help="run and judge a claim instead of training a configuration")
    one.add_argument("--profile", choices=("smoke", "cpu", "gpu", "paper"), help="how much of the claim (default cpu)")
    one.add_argument("--dry-run", action="store_true", help="print the commands and stop; DRY_RUN=1 does the same")
    one.add_argument("--from-make", action="store_true", help=argparse.SUPPRESS)
    _seconds(one, "--grace", grace_s, "time for a checkpoint after a signal")
    return one


def _seconds(one: argparse.ArgumentParser, name: str, default: float, says: str) -> None:
    one.add_argument(name, type=seconds, default=default, metavar="S", help=f"{says} (default {default:g})")


def _device(one: argparse.ArgumentParser) -> None:
    one.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are any")


def _local(one: argparse.ArgumentParser) -> None:
    one.add_argument("--nproc", type=whole, default=1, metavar="N", help="number of ranks (default 1)")
    _device(one)
    one.add_argument("--port", type=whole, metavar="P", help="where the ranks meet (default: a free port)")


def _hosts(one: argparse.ArgumentParser) -> None:
    one.add_argument("--hostfile", type=Path, metavar="FILE", help="lines 'HOST slots=RANKS'")
    one.add_argument("--include", action="append", default=[], metavar="HOST", help="only this host (repeatable)")
    one.add_argument("--exclude", action="append", default=[], metavar="HOST", help="not this host (repeatable)")
    one.add_argument("--master-addr", metavar="HOST", help="where the ranks meet (default: the first host)")
    one.add_argument("--port", type=whole, metavar="P", help="its port (default: a free one)")
    _device(one)


def _ssh(one: argparse.ArgumentParser) -> None:
    _hosts(one)
    one.add_argument("--remote-dir", metavar="DIR", help="the checkout on the hosts (default: this folder's path)")
    one.add_argument("--remote-python", metavar="FILE", help="the Python on the hosts (default: this one's path)")
    says = f"a host, or this launcher, that is silent for so long is lost (at least {LEAST_SILENCE_S:g})"
    _seconds(one, "--lost-after", wire.LOST_AFTER_S, says)
    _seconds(one, "--connect", CONNECT_S, "time for the hosts to answer")


def _deepspeed(one: argparse.ArgumentParser) -> None:
    _hosts(one)


def _slurm(one: argparse.ArgumentParser) -> None:
    one.add_argument("--nodes", type=whole, default=1, metavar="N", help="number of hosts (default 1)")
    one.add_argument("--gpus", type=whole, default=0, metavar="N", help="GPUs, and ranks, of each; 0: the CPU")
    one.add_argument("--nproc", type=whole, metavar="N", help="ranks of each host (default: one a GPU, else 1)")
    cores = f"cores of each rank (default 1, with GPUs {GPU_CORES}; 0: as many as the cluster gives)"
    one.add_argument("--cpus", type=whole, metavar="N", help=cores)
    one.add_argument("--time", metavar="LIMIT", help="time limit as Slurm writes it, e.g. 1-12:00:00 or 90 (minutes)")
    one.add_argument("--partition", metavar="NAME", help="(default: the cluster's)")
    one.add_argument("--account", metavar="NAME", help="(default: the user's)")
    one.add_argument("--port", type=whole, metavar="P", help="where the ranks meet (default: one by the job's number)")
    more = "after a failure of a node, up to N further jobs that go on from the checkpoint (default 0)"
    one.add_argument("--follow-up", type=whole, default=0, metavar="N", help=more)
    one.add_argument("--sbatch", action="append", default=[], metavar="OPTION", help="any other, as --sbatch=--mem=64G")
    one.add_argument("--name", default="normscale", metavar="NAME", help="of the job (default normscale)")
    one.add_argument("--logs", default="runs/slurm", metavar="DIR", help="folder of its output (default runs/slurm)")


def _torchrun(one: argparse.ArgumentParser) -> None:
    one.add_argument("--rdzv", metavar="HOST:PORT", help="where the hosts meet: the same on each")
    one.add_argument("--nnodes", default="1", metavar="N", help="number of hosts (default 1)")
    one.add_argument("--nproc", type=whole, default=1, metavar="N", help="ranks of this host (default 1)")
    one.add_argument("--node", metavar="K", help="number of this host, from 0; slurm: as Slurm says")
    one.add_argument("--task", action="store_true", help=argparse.SUPPRESS)  # of a batch job: see launch/task.py
    one.add_argument("--rdzv-id", default="normscale", metavar="ID", help="name of this rendezvous, the same on each")
    one.add_argument("--max-restarts", type=whole, default=0, metavar="N", help="new starts of all ranks (default 0)")
    _device(one)


def seconds(word: str) -> float:
    """Returns the number of seconds that a word on the command line stands for."""
    if not re.fullmatch(r"\d{1,7}(\.\d{1,3})?", word):
        raise argparse.ArgumentTypeError(f"{word!r} is not a number of seconds; give e.g. 30")
    return float(word)


def dry_run(options: argparse.Namespace) -> bool:
    """Returns whether the commands are only shown."""
    return bool(options.dry_run) or os.environ.get("DRY_RUN", "") not in ("", "0")


def made_words(environ: MutableMapping[str, str], with_config: bool) -> list[str]:
    """Returns the words that make left in the environment, and takes them out of it.

    Quotes and backslashes in ARGS group as in a shell; `$`, backticks and `*` arrive as they are.

    Raises:
        LaunchError: a quote in ARGS is not closed.
    """
    config, text = environ.pop(MADE_CONFIG, ""), environ.pop(MADE_ARGS, "")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LaunchError(f"ARGS: {str(error).lower()}; quote it as in: ARGS=\"'name=it is'\"") from None
    return [config, *words] if with_config else words


def claim_words(options: argparse.Namespace, args: Sequence[str]) -> list[str]:
    """Returns the words after `normscale claim run`.

    Raises:
        LaunchError: there is no such claim.
    """
    ids = claim_ids()
    if options.claim not in (*ids, "core"):
        raise LaunchError(
            f"--claim: {options.claim!r} is not a claim{nearest(options.claim, ids)} (make claims-list lists them)"
        )
    return [options.claim, "--profile", options.profile or "cpu", *args]


def claim_ids() -> list[str]:
    """Returns the ids that files of experiments/ give, without importing them."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(EXPERIMENTS.glob("*.py"))]
    return [found for text in texts for found in re.findall(r'^\s+id="([^"]+)"', text, re.MULTILINE)]
