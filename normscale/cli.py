"""The command line: parse, call, print. What a command needs is imported when it runs, so that --help is quick."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from normscale.arguments import Parser, Stopped, number, refuse_unknown, run_command, to_stderr, whole
from normscale.commands import claims as claim_commands
from normscale.commands import explain as explain_command
from normscale.commands import look, stores, training
from normscale.commands.common import DEFAULT_RUNS, DEFAULT_URI, rank
from normscale.errors import BadInput, NormscaleError

EPILOG = (
    "exit codes: 0 well, 1 failed, 2 bad input, 3 stopped on non-finite values, 130 interrupted (Ctrl-C),"
    " 143 stopped by SIGTERM (with checkpoints: after one, to be started again)"
)
CONFIG_HELP = (
    "a YAML file, then any number of key=value, as in: configs/train/quick.yaml model.M=48 train.steps=100"
    " (normscale explain says what each key is)"
)
COMMANDS = (
    "train",
    "check",
    "explain",
    "plan",
    "show",
    "diff",
    "removal",
    "translate",
    "fold",
    "claim",
    "sync",
    "ui",
    "server",
)
CLAIM_COMMANDS = ("list", "run", "report", "schemes")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of one command."""
    words = list(sys.argv[1:] if argv is None else argv)
    said: list[str] = []
    ended: list[NormscaleError | Stopped] = []

    def say(line: str) -> None:
        said.append(line)
        speaker = getattr(ended[0], "speaker", None) if ended else None  # of what all ranks say alike
        if _status_dir() and ended and isinstance(ended[0], Stopped) and speaker is None:
            return  # the launcher that stopped us says why
        if rank() == 0 if _status_dir() or speaker is None else rank() == speaker:
            to_stderr(line)
        elif not _status_dir() and speaker is None:  # with a status folder the launcher says it, once
            to_stderr(f"rank {rank()}: {line}")

    def run() -> int:
        try:
            return _run(words)
        except (NormscaleError, Stopped) as error:
            ended.append(error)
            raise

    code = run_command(run, say)
    _leave_status(code, " ".join(said))
    return code


def _run(words: list[str]) -> int:
    if words and not words[0].startswith("-"):
        refuse_unknown(words[0], COMMANDS, "a command")
        if words[0] == "claim" and len(words) > 1 and not words[1].startswith("-"):
            refuse_unknown(words[1], CLAIM_COMMANDS, "a claim command")
    options, rest = _parser().parse_known_args(words)
    if rest and hasattr(options, "words") and not any(word.startswith("-") for word in rest):
        options.words += rest  # words after an option: train CONFIG --fresh key=value
    elif rest:
        extra = next((word for word in rest if word.startswith("-")), None)
        if extra is None:
            raise BadInput(f"{rest[0]}: one word too many for normscale {words[0]} (see normscale {words[0]} --help)")
        raise BadInput(f"{extra}: normscale {words[0]} has no such option (see normscale {words[0]} --help)")
    code: int = options.call(options)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="normscale", description=_first_line(), epilog=EPILOG, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="|".join(COMMANDS))

    train = commands.add_parser("train", help="train one model", epilog=EPILOG, allow_abbrev=False)
    train.add_argument("words", nargs="*", metavar="CONFIG [key=value]", help=CONFIG_HELP)
    train.add_argument("--fresh", action="store_true", help="train from the beginning, whatever there is of this run")
    train.set_defaults(call=training.train)

    check = commands.add_parser("check", help="check a configuration and say what it makes", allow_abbrev=False)
    check.add_argument("words", nargs="*", metavar="CONFIG [key=value]", help=CONFIG_HELP)
    check.add_argument("--yaml", action="store_true", help="also print the whole configuration, as YAML")
    check.set_defaults(call=look.check)

    explain = commands.add_parser("explain", help="say what a scheme, a norm or a key is", allow_abbrev=False)
    what = "as deepnorm, rmsnorm, model.qk_norm or model; without one, all are listed"
    explain.add_argument("word", nargs="?", metavar="SCHEME|NORM|KEY", help=what)
    explain.set_defaults(call=explain_command.explain)

    plan = commands.add_parser("plan", help="say what a run would take, before it is paid for", allow_abbrev=False)
    plan.add_argument("words", nargs="*", metavar="CONFIG [key=value]", help=CONFIG_HELP)
    plan.add_argument("--gpus", type=whole, default=1, metavar="N", help="GPUs in all (default 1)")
    plan.add_argument("--per-host", type=whole, default=8, metavar="N", help="GPUs of one host (default 8)")
    plan.add_argument("--gpu", metavar="NAME", help="what they are, as h200 (default: this machine's)")
    plan.add_argument("--memory", type=number, metavar="GiB", help="the memory of one, where it has another")
    plan.add_argument("--vocab", type=whole, metavar="N", help="tokens of another vocabulary than the bytes, on paper")
    mfu = (
        "of the peak in the model's own FLOPs, as `show` has it (recomputation lowers it); default: measured or assumed"
    )
    plan.add_argument("--mfu", type=number, metavar="SHARE", help=mfu)
    plan.add_argument("--hours-budget", type=number, metavar="H", help="GPU-hours there are; exit code 1 if too few")
    plan.add_argument("--json", action="store_true", help="the same for programs, in bytes")
    plan.set_defaults(call=look.plan)

    names = "a run: its folder, the folder's name or a part of it, its name=, or latest"
    show = commands.add_parser("show", help="say what a run is and how it went; list the newest", allow_abbrev=False)
    show.add_argument("run", nargs="?", metavar="RUN", help=f"{names}; without one, the newest runs are listed")
    show.set_defaults(call=look.show)
    diff = commands.add_parser("diff", help="say what sets two runs apart", allow_abbrev=False)
    diff.add_argument("run", metavar="RUN", help=names)
    diff.add_argument("other", metavar="RUN", help="another")
    diff.set_defaults(call=look.diff)
    removal = commands.add_parser("removal", help="say what each block of a trained run is worth", allow_abbrev=False)
    removal.add_argument("run", metavar="RUN", help=f"{names}; it needs a checkpoint")
    removal.add_argument("--blocks", type=whole, default=16, help="blocks left out in turn, over all (default 16)")
    removal.add_argument("--batches", type=whole, default=2, help="held-out batches to measure on (default 2)")
    removal.add_argument("--checkpoint", type=whole, metavar="STEP", help="that of this step (default: the newest)")
    removal.set_defaults(call=look.removal)
    translate = commands.add_parser("translate", help="translate with a trained run, and score it", allow_abbrev=False)
    translate.add_argument("run", metavar="RUN", help=f"{names}; it needs a checkpoint")
    translate.add_argument("--sentences", type=whole, default=1000, help="held-out lines to translate (default 1000)")
    translate.add_argument("--beam", type=whole, default=5, help="sequences the search follows (default 5)")
    power = "a sequence counts by its log-probability over its length to this power (default 1)"
    translate.add_argument("--penalty", type=number, default=1.0, help=power)
    translate.add_argument("--checkpoint", type=whole, metavar="STEP", help="that of this step (default: the newest)")
    translate.set_defaults(call=look.translate)
    fold = commands.add_parser("fold", help="fold a trained run's norms into its weights", allow_abbrev=False)
    fold.add_argument("run", metavar="RUN", help=f"{names}; it needs a checkpoint")
    fold.add_argument("--checkpoint", type=whole, metavar="STEP", help="that of this step (default: the newest)")
    fold.add_argument("--batches", type=whole, default=8, help="held-out batches to compare on (default 8)")
    fold.add_argument("--int8", action="store_true", help="also measure norms in int8, before and after")
    fold.set_defaults(call=look.fold)
    for command in (show, diff, removal, translate, fold):
        _runs(command)
        command.add_argument("--json", action="store_true", help="the same for programs, with all values")

    claim = commands.add_parser("claim", help="list, run and report claims", epilog=EPILOG, allow_abbrev=False)
    claims = claim.add_subparsers(required=True, metavar="|".join(CLAIM_COMMANDS))
    claims.add_parser("list", help="list the claims").set_defaults(call=claim_commands.listed)
    run = claims.add_parser("run", help="run and judge claims", allow_abbrev=False)
    run.add_argument("words", nargs="*", metavar="ID", help="claims to run; core stands for every core claim")
    run.add_argument("--core", action="store_true", help="the core claims")
    run.add_argument("--all", action="store_true", help="every claim there is")
    how_much = "how much (default cpu; paper: as published, of the few claims that have it)"
    run.add_argument("--profile", choices=("smoke", "cpu", "gpu", "paper"), default="cpu", help=how_much)
    run.add_argument("--dry-run", action="store_true", help="say what is to do, start nothing (as DRY_RUN=1)")
    run.add_argument("-v", "--verbose", action="store_true", help="with --dry-run: list the single runs too")
    run.add_argument("--workers", type=whole, help="runs at a time (default: one a core)")
    budget = (
        "as many runs as so many hours pay for: seeds go first, then cells, then claims; runs that are done are kept"
    )
    run.add_argument("--hours", type=number, metavar="H", help=budget)
    shared = "every N-th run alone, for one of N machines with a common --runs; a start without --part judges them"
    run.add_argument("--part", metavar="I/N", help=shared)
    run.add_argument("--then-judge", action="store_true", help="with --part: wait for the other parts, and judge")
    _store(run)
    run.set_defaults(call=claim_commands.run)
    report = claims.add_parser("report", help="write the report from stored records", allow_abbrev=False)
    report.add_argument("--publish", action="store_true", help="also write compact records to experiments/results")
    _store(report)
    report.set_defaults(call=claim_commands.report)
    schemes = claims.add_parser("schemes", help="write a page about every scheme", allow_abbrev=False)
    schemes.add_argument("words", nargs="*", metavar="SCHEME", help="some of them (default: all)")
    surveyed = "first train all of them under one protocol, by depth and precision, and under a rate that rises"
    schemes.add_argument("--survey", action="store_true", help=surveyed)
    schemes.add_argument("--profile", choices=("cpu", "gpu"), help="with --survey: one seed in fp32 and bf16, or three")
    schemes.add_argument(
        "--hours", type=number, metavar="H", help="with --survey: no run begins that would end after (default 0.25)"
    )
    schemes.add_argument(
        "--publish", action="store_true", help="also write the survey's records to experiments/results"
    )
    _runs(schemes)
    schemes.set_defaults(call=claim_commands.schemes)

    sync = commands.add_parser("sync", help="replay the stored records into MLflow", allow_abbrev=False)
    some = "runs, as for show, or folders of runs; without any, all of --runs"
    sync.add_argument("words", nargs="*", metavar="RUN", help=some)
    _store(sync)
    sync.set_defaults(call=stores.sync)

    ui = commands.add_parser("ui", help="serve the MLflow UI on this machine", allow_abbrev=False)
    ui.add_argument("--port", type=_port, default=5000, help="(default 5000)")
    _store(ui)
    ui.set_defaults(call=stores.ui)

    server = commands.add_parser("server", help="serve an MLflow store that several machines share", allow_abbrev=False)
    server.add_argument(
        "--host", default="127.0.0.1", help="what to listen on (default 127.0.0.1; 0.0.0.0: everything)"
    )
    server.add_argument("--port", type=_port, default=5000, help="(default 5000)")
    places = "sqlite:///FILE or postgresql://USER@HOST/NAME (default sqlite:///server.db, or MLFLOW_BACKEND_STORE_URI)"
    server.add_argument("--store", metavar="URI", help=places)
    server.add_argument("--name", action="append", default=[], help="another name that machines call this one by")
    server.add_argument("--artifacts", type=Path, metavar="FOLDER", help="where files go (default mlartifacts)")
    server.set_defaults(call=stores.server)
    return parser


def _port(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{word!r} is not a port; give a number, e.g. 5000") from None


def _runs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--runs", type=Path, default=Path(DEFAULT_RUNS), help=f"folder of runs (default {DEFAULT_RUNS})"
    )


def _store(parser: argparse.ArgumentParser) -> None:
    _runs(parser)
    parser.add_argument("--uri", default=DEFAULT_URI, help=f"MLflow store or server (default {DEFAULT_URI})")


def _first_line() -> str:
    import normscale

    return (normscale.__doc__ or "").strip().partition("\n")[0]


def _status_dir() -> str | None:
    return os.environ.get("NORMSCALE_STATUS_DIR")


def _leave_status(code: int, error: str) -> None:
    """Leaves the exit code of this rank where its launcher asked for it, even if there never was a run folder."""
    folder = _status_dir()
    if folder is None:
        return
    status = {"rank": rank(), "exit_code": code, "error": error, "t": time.time_ns()}
    path = Path(folder) / f"rank{rank()}.status"
    with contextlib.suppress(OSError):  # the launcher is gone: nobody to tell
        path.with_suffix(".part").write_text(json.dumps(status), encoding="utf-8")
        path.with_suffix(".part").replace(path)
