"""`python -m launch local [--nproc N] [--device D] [--port P] [--dry-run] -- CONFIG key=value ...`"""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from launch import command, local
from normscale.arguments import Parser, refuse_unknown, run_command, whole
from normscale.errors import LaunchError

if TYPE_CHECKING:
    from normscale.config.load import Loaded

LAUNCHERS = ("local",)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the launch."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _launch(words))


def _launch(words: list[str]) -> int:
    parser = Parser(prog="python -m launch", description=__doc__, allow_abbrev=False)
    launchers = parser.add_subparsers(dest="launcher", required=True, metavar="|".join(LAUNCHERS))
    here = launchers.add_parser("local", help="ranks on this machine", allow_abbrev=False)
    here.add_argument("--nproc", type=whole, default=1, metavar="N", help="number of ranks (default 1)")
    here.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are any"
    )
    here.add_argument("--port", type=whole, metavar="P", help="where the ranks meet (default: a free port)")
    here.add_argument("--dry-run", action="store_true", help="print the command and stop; DRY_RUN=1 does the same")
    if words and not words[0].startswith("-"):
        refuse_unknown(words[0], LAUNCHERS, "a launcher")
    mark = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:mark])
    if mark == len(words):
        raise LaunchError("nothing to train; write -- and then the configuration, as in: -- configs/train/quick.yaml")

    args = settle_precision(words[mark + 1 :], os.environ)
    rendered = command.local(args, nproc=options.nproc, device=options.device, port=options.port)
    if options.dry_run or os.environ.get("DRY_RUN", "") not in ("", "0"):
        print(rendered.shell())
        return 0
    if options.nproc == 1:
        sys.stdout.flush()
        os.execvpe(rendered.argv[0], rendered.argv, rendered.environ(os.environ))
    check_config(args)
    return local.run(rendered)


def check_config(args: Sequence[str]) -> None:
    """Raises ConfigError for a mistake that would otherwise be met by every rank, seconds later."""
    _read(args)


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
