"""`python -m launch local [--nproc N] [--device D] [--port P] [--dry-run] -- CONFIG key=value ...`"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launch import command, local
from normscale.arguments import Parser, refuse_unknown, run_command
from normscale.errors import LaunchError

LAUNCHERS = ("local",)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the launch."""
    words = list(sys.argv[1:] if argv is None else argv)
    return run_command(lambda: _launch(words))


def _launch(words: list[str]) -> int:
    parser = Parser(prog="python -m launch", description=__doc__, allow_abbrev=False)
    launchers = parser.add_subparsers(dest="launcher", required=True, metavar="|".join(LAUNCHERS))
    here = launchers.add_parser("local", help="ranks on this machine", allow_abbrev=False)
    here.add_argument("--nproc", type=int, default=1, metavar="N", help="number of ranks (default 1)")
    here.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where there are any"
    )
    here.add_argument("--port", type=int, metavar="P", help="where the ranks meet (default: a free port)")
    here.add_argument("--dry-run", action="store_true", help="print the command and stop; DRY_RUN=1 does the same")
    if words and not words[0].startswith("-"):
        refuse_unknown(words[0], LAUNCHERS, "a launcher")
    mark = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:mark])
    if mark == len(words):
        raise LaunchError("nothing to train; write -- and then the configuration, as in: -- configs/train/quick.yaml")

    rendered = command.local(words[mark + 1 :], nproc=options.nproc, device=options.device, port=options.port)
    if options.dry_run or os.environ.get("DRY_RUN", "") not in ("", "0"):
        print(rendered.shell())
        return 0
    if options.nproc == 1:
        sys.stdout.flush()
        os.execvpe(rendered.argv[0], rendered.argv, rendered.environ(os.environ))
    check_config(words[mark + 1 :])
    return local.run(rendered)


def check_config(args: Sequence[str]) -> None:
    """Raises ConfigError for a mistake that would otherwise be met by every rank, seconds later."""
    from normscale.config.load import load

    config, *overrides = [word for word in args if not word.startswith("--")] or [""]
    load(Path(config), overrides)


if __name__ == "__main__":
    sys.exit(main())
