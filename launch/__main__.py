"""`python -m launch LAUNCHER [options] -- CONFIG key=value ...`; `python -m launch --help` lists the launchers."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from launch import command, local
from launch.options import LEAST_SILENCE_S, claim_words, dry_run, made_words, parser
from launch.task import coded, end_when_told
from normscale.arguments import refuse_unknown, run_command
from normscale.errors import LaunchError

if TYPE_CHECKING:
    from normscale.config.load import Loaded
    from normscale.config.schema import RunConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the launch."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["agent"]:  # talks in frames: nothing may stand between it and its streams
        from launch.agent import main as agent

        return agent()
    if words[:1] == ["torchrun"] and "--task" in words[: _mark(words)]:
        end_when_told()
        return coded(run_command(lambda: _launch(words)))
    return run_command(lambda: _launch(words))


def _launch(words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        refuse_unknown(words[0], (*LAUNCHERS, "doctor"), "a launcher")
    if words[:1] == ["doctor"]:
        from launch import doctor

        return doctor.main(words[1:])
    mark = _mark(words)
    options = parser().parse_args(words[:mark])
    args = words[mark + 1 :]
    if options.from_make:
        if mark < len(words):
            raise LaunchError("OPTIONS: there is a -- in it; what to train goes into CONFIG= and ARGS=")
        args = made_words(os.environ, with_config=options.claim is None)
    elif mark == len(words) and options.claim is None:
        raise LaunchError("nothing to train; write -- and then the configuration, as in: -- configs/train/quick.yaml")
    if options.claim is not None:
        return LAUNCHERS[options.launcher](options, claim_words(options, args))
    if options.profile is not None:
        raise LaunchError("--profile: is of a claim; give --claim ID with it, or leave it out")
    if not args:
        raise LaunchError(
            "no configuration to train; name one after --, as in: -- configs/train/quick.yaml train.steps=50"
        )
    return LAUNCHERS[options.launcher](options, settle_precision(args, os.environ))


def _mark(words: Sequence[str]) -> int:
    """Returns where the options end."""
    return words.index("--") if "--" in words else len(words)


def _local(options: argparse.Namespace, args: list[str]) -> int:
    if options.claim is not None:
        return _claim_here(options, args)
    rendered = command.local(args, nproc=options.nproc, device=options.device, port=options.port)
    if dry_run(options):
        print(rendered.shell())
        return 0
    if options.nproc > 1:
        say_start(check_config(args, options.nproc), f"{options.nproc} ranks on this machine")
    rendered = rendered.with_plan(args, options.nproc)
    return _become(rendered) if options.nproc == 1 else local.run(rendered, options.grace)


def _claim_here(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Runs a claim, or one part of it, on this machine."""
    if options.nproc != 1:
        raise LaunchError("--nproc: a claim trains on one rank a run; --workers N after -- runs N at a time")
    rendered = command.local(words, device=options.device, entry=command.CLAIM)
    if dry_run(options):
        print(rendered.shell())
        return 0
    return _become(rendered)


def _become(rendered: command.Command) -> NoReturn:
    sys.stdout.flush()
    os.execvpe(rendered.argv[0], rendered.argv, rendered.environ(os.environ))


def _ssh(options: argparse.Namespace, args: list[str]) -> int:
    from launch import ssh
    from launch.hostfile import ranks_of, read_hosts
    from launch.job import Limits

    if options.hostfile is None:
        raise LaunchError("--hostfile: none is given; name a file with lines 'HOST slots=RANKS' (HOSTFILE= with make)")
    hosts = read_hosts(options.hostfile, options.include, options.exclude)
    if options.lost_after < LEAST_SILENCE_S:
        raise LaunchError(
            f"--lost-after {options.lost_after:g}: give {LEAST_SILENCE_S:g} or more; signs of life come every 2 s"
        )
    limits = Limits(options.grace, options.lost_after, options.connect)
    place = ssh.Place(options.remote_dir or os.getcwd(), options.remote_python or sys.executable)
    if options.claim is not None:
        if dry_run(options):
            print("\n".join(ssh.claim_shown(hosts, args, place, limits, options.device)))
            return 0
        return ssh.claim(hosts, args, place, limits, options.device)
    meeting = ssh.Meeting(options.port or 0, options.master_addr, options.device)
    if options.port is not None:
        command.check_port_number(options.port)
    if dry_run(options):
        print("\n".join(ssh.train_shown(hosts, args, place=place, meeting=meeting, limits=limits)))
        return 0
    say_start(check_config(args, sum(host.slots for host in hosts)), ranks_of(hosts))
    return ssh.train(hosts, args, place=place, meeting=meeting, limits=limits)


def _torchrun(options: argparse.Namespace, args: list[str]) -> int:
    from launch.torchrun import Elastic, node_number, part_words
    from normscale.planned import planned_in

    node = node_number(options.node, os.environ)
    if options.claim is not None:  # whose parts do not meet
        return _claim_here(options, [*args, *part_words(options.nnodes, node)])
    if options.rdzv is None:
        raise LaunchError("--rdzv: none is given; name the first host and a free port of it, as in n1:29500 (RDZV=)")
    elastic = Elastic(options.rdzv, options.nnodes, options.nproc, options.rdzv_id, options.max_restarts)
    rendered = elastic.command(args, options.device, os.environ, node)
    if dry_run(options):
        print(rendered.shell())
        return 0
    config = check_config(args, elastic.world())
    if not options.task or node == 0:
        say_start(config, f"{options.nproc} of {elastic.world()} ranks")
    if planned_in(os.environ) is None:
        rendered = rendered.with_plan(args, elastic.world())
    first_rank = None if node is None else node * options.nproc
    restarts = options.max_restarts > 0
    return local.run(rendered, options.grace, "torchrun", restarts=restarts, first_rank=first_rank)


def _deepspeed(options: argparse.Namespace, args: list[str]) -> int:
    from launch import deepspeed

    return deepspeed.launch(options, args)


def _slurm(options: argparse.Namespace, args: list[str]) -> int:
    from launch import slurm

    return slurm.launch(options, args)


LAUNCHERS: dict[str, Callable[[argparse.Namespace, list[str]], int]] = {
    "local": _local,
    "ssh": _ssh,
    "deepspeed": _deepspeed,
    "slurm": _slurm,
    "torchrun": _torchrun,
}


def check_config(args: Sequence[str], world: int | None = None) -> "RunConfig":
    """Returns the configuration; raises ConfigError for a mistake that every rank would meet, seconds later.

    `world` is the number of ranks, None where it is open.
    """
    from normscale.config.sharing import check_divides

    config = _read(args).config
    check_divides(config.train.batch, world or 1, config.train.accumulate)
    return config


def say_start(config: "RunConfig", ranks: str) -> None:
    """Says what starts and where its records go: nothing else is said until the ranks have met, seconds later."""
    engine = config.engine
    name = f"deepspeed (ZeRO {engine.zero})" if engine.name == "deepspeed" else engine.name.replace("auto", "ddp")
    print(f"starting {ranks}: engine {name}, records in {config.tracking.runs}", flush=True)


def settle_precision(args: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """Returns the arguments, with `precision.compute` where the environment gives one that they leave open.

    The ranks cannot settle it: what `accelerate launch` sets in their environment replaces what was in ours.

    Raises:
        ConfigError: the configuration and the environment do not agree.
    """
    if not args or "ACCELERATE_MIXED_PRECISION" not in environ:
        return list(args)
    from normscale.config.agreement import KEY, settled

    loaded = _read(args)
    agreed = settled(loaded, environ).config.precision.compute
    return [*args] if agreed == loaded.config.precision.compute else [*args, f"{KEY}={agreed}"]


def _read(args: Sequence[str]) -> "Loaded":
    from normscale.config.load import read

    config, *overrides = [word for word in args if not word.startswith("--")] or [""]
    return read(Path(config), overrides)


if __name__ == "__main__":
    sys.exit(main())
