"""The command line: parse, call, print. What a command needs is imported when it runs, so that --help is quick."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normscale.arguments import Parser, Stopped, number, refuse_unknown, run_command, say_error, stoppable, whole
from normscale.errors import BadInput, NonFiniteStop, NormscaleError, StoreError

if TYPE_CHECKING:
    from normscale.config.load import Loaded
    from normscale.config.schema import RunConfig
    from normscale.train.run import RunResult

EPILOG = (
    "exit codes: 0 well, 1 failed, 2 bad input, 3 stopped on non-finite values, 130 interrupted (Ctrl-C),"
    " 143 stopped by SIGTERM (with checkpoints: after one, to be started again)"
)
CONFIG_HELP = "a YAML file, then any number of key=value, as in: configs/train/quick.yaml model.M=48 train.steps=100"
COMMANDS = ("train", "check", "plan", "show", "diff", "removal", "claim", "sync", "ui", "server")
CLAIM_COMMANDS = ("list", "run", "report")
DEFAULT_RUNS, DEFAULT_URI = "runs", "sqlite:///mlflow.db"
SYNC_S = 60.0  # what the last replay may take after training


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
        if _rank() == 0 if _status_dir() or speaker is None else _rank() == speaker:
            say_error(line)
        elif not _status_dir() and speaker is None:  # with a status folder the launcher says it, once
            say_error(f"rank {_rank()}: {line}")

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
    train.set_defaults(call=_train)

    check = commands.add_parser("check", help="check a configuration and say what it makes", allow_abbrev=False)
    check.add_argument("words", nargs="*", metavar="CONFIG [key=value]", help=CONFIG_HELP)
    check.add_argument("--yaml", action="store_true", help="also print the whole configuration, as YAML")
    check.set_defaults(call=_check)

    plan = commands.add_parser("plan", help="say what a run would take, before it is paid for", allow_abbrev=False)
    plan.add_argument("words", nargs="*", metavar="CONFIG [key=value]", help=CONFIG_HELP)
    plan.add_argument("--gpus", type=whole, default=1, metavar="N", help="GPUs in all (default 1)")
    plan.add_argument("--per-host", type=whole, default=8, metavar="N", help="GPUs of one host (default 8)")
    plan.add_argument("--gpu", metavar="NAME", help="what they are, as h200 (default: this machine's)")
    plan.add_argument("--memory", type=number, metavar="GiB", help="the memory of one, where it has another")
    plan.add_argument("--vocab", type=whole, metavar="N", help="tokens of another vocabulary than the bytes, on paper")
    plan.add_argument("--mfu", type=number, metavar="SHARE", help="of the peak; default: as measured, else assumed")
    plan.add_argument("--hours-budget", type=number, metavar="H", help="GPU-hours there are; exit code 1 if too few")
    plan.add_argument("--json", action="store_true", help="the same for programs, in bytes")
    plan.set_defaults(call=_plan)

    names = "a run: its folder, its name, the beginning or a part of that, or latest"
    show = commands.add_parser("show", help="say what a run is and how it went; list the newest", allow_abbrev=False)
    show.add_argument("run", nargs="?", metavar="RUN", help=f"{names}; without one, the newest runs are listed")
    show.set_defaults(call=_show)
    diff = commands.add_parser("diff", help="say what sets two runs apart", allow_abbrev=False)
    diff.add_argument("run", metavar="RUN", help=names)
    diff.add_argument("other", metavar="RUN", help="another")
    diff.set_defaults(call=_diff)
    removal = commands.add_parser("removal", help="say what each block of a trained run is worth", allow_abbrev=False)
    removal.add_argument("run", metavar="RUN", help=f"{names}; it needs a checkpoint")
    removal.add_argument("--blocks", type=whole, default=16, help="blocks left out in turn, over all (default 16)")
    removal.add_argument("--batches", type=whole, default=2, help="held-out batches to measure on (default 2)")
    removal.add_argument("--checkpoint", type=whole, metavar="STEP", help="that of this step (default: the newest)")
    removal.set_defaults(call=_removal)
    for command in (show, diff, removal):
        _runs(command)
        command.add_argument("--json", action="store_true", help="the same for programs, with all values")

    claim = commands.add_parser("claim", help="list, run and report claims", epilog=EPILOG, allow_abbrev=False)
    claims = claim.add_subparsers(required=True, metavar="|".join(CLAIM_COMMANDS))
    claims.add_parser("list", help="list the claims").set_defaults(call=_claim_list)
    run = claims.add_parser("run", help="run and judge claims", allow_abbrev=False)
    run.add_argument("words", nargs="*", metavar="ID", help="claims to run; core stands for every core claim")
    run.add_argument("--core", action="store_true", help="the core claims")
    run.add_argument("--profile", choices=("smoke", "cpu", "gpu"), default="cpu", help="how much (default cpu)")
    run.add_argument("--dry-run", action="store_true", help="list the runs, start none (as DRY_RUN=1)")
    run.add_argument("--workers", type=whole, help="runs at a time (default: one a core)")
    shared = "every N-th run alone, for one of N machines with a common --runs; a start without --part judges them"
    run.add_argument("--part", metavar="I/N", help=shared)
    _store(run)
    run.set_defaults(call=_claim_run)
    report = claims.add_parser("report", help="write the report from stored records", allow_abbrev=False)
    report.add_argument("--publish", action="store_true", help="also write compact records to experiments/results")
    _store(report)
    report.set_defaults(call=_claim_report)

    sync = commands.add_parser("sync", help="replay the stored records into MLflow", allow_abbrev=False)
    some = "runs, as for show, or folders of runs; without any, all of --runs"
    sync.add_argument("words", nargs="*", metavar="RUN", help=some)
    _store(sync)
    sync.set_defaults(call=_sync)

    ui = commands.add_parser("ui", help="serve the MLflow UI on this machine", allow_abbrev=False)
    ui.add_argument("--port", type=_port, default=5000, help="(default 5000)")
    _store(ui)
    ui.set_defaults(call=_ui)

    server = commands.add_parser("server", help="serve an MLflow store that several machines share", allow_abbrev=False)
    server.add_argument(
        "--host", default="127.0.0.1", help="what to listen on (default 127.0.0.1; 0.0.0.0: everything)"
    )
    server.add_argument("--port", type=_port, default=5000, help="(default 5000)")
    stores = "sqlite:///FILE or postgresql://USER@HOST/NAME (default sqlite:///server.db, or MLFLOW_BACKEND_STORE_URI)"
    server.add_argument("--store", metavar="URI", help=stores)
    server.add_argument("--name", action="append", default=[], help="another name that machines call this one by")
    server.add_argument("--artifacts", type=Path, metavar="FOLDER", help="where files go (default mlartifacts)")
    server.set_defaults(call=_server)
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


def _loaded(words: Sequence[str], command: str) -> "Loaded":
    from normscale.config.load import read

    if not words or ("=" in words[0] and not os.path.exists(words[0])):  # False also for what cannot be a name
        raise BadInput(
            f"{command}: no configuration; name a YAML file first, as in: {command} configs/train/quick.yaml"
        )
    return read(Path(words[0]), words[1:])


def _check_folder(folder: Path, key: str, made: bool) -> None:
    """Raises BadInput unless a folder of runs is there; with `made`, unless its name could be a folder's."""
    from normscale.config.sources import plain

    shown = plain(str(folder), 200)
    try:
        found = folder.is_dir()
        os.lstat(folder / ("x" * 100) / ("x" * 20))  # a run and a file in it
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{key}: {shown} cannot be a folder ({reason}); choose another") from None
    if not made and not found:
        raise BadInput(f"{key}: {shown} is not a folder of runs; train something first, or name the folder with {key}")


def _train(options: argparse.Namespace) -> int:
    with stoppable():  # a scheduler that takes the machine back sends SIGTERM
        return _train_until_stopped(options)


def _train_until_stopped(options: argparse.Namespace) -> int:
    from normscale.config.agreement import settled
    from normscale.models.plan import resolve

    with _told_to_others():
        loaded = settled(_loaded(options.words, "normscale train"), os.environ)
        _check_folder(Path(loaded.config.tracking.runs), "tracking.runs", made=True)
        with loaded.sources.placed():
            resolve(loaded.config.model)
    from normscale.progress import Progress
    from normscale.train.run import run

    if _rank() != 0:
        with loaded.sources.placed():
            return _exit_code(run(loaded.config, fresh=options.fresh, words=options.words))
    tracking = loaded.config.tracking
    if tracking.uri is not None:
        from normscale.tracking.mlflow_store import check_place

        with loaded.sources.placed():
            check_place(tracking.uri)
    progress = Progress()
    with contextlib.ExitStack() as stack:

        def start_sink() -> None:  # not before the input has proved good: bad input must leave nothing behind
            stack.enter_context(_sink(Path(tracking.runs), tracking.uri))

        try:
            with loaded.sources.placed():
                result = run(
                    loaded.config,
                    fresh=options.fresh,
                    words=options.words,
                    on_start=start_sink,
                    on_resume=lambda step, path: print(f"went on from step {step} ({path})", flush=True),
                    on_step=progress,
                )
        finally:
            progress.end()
    _say_result(result, tracking.uri)
    return _exit_code(result)


@contextlib.contextmanager
def _told_to_others() -> Iterator[None]:
    """Ends all ranks where one of them cannot even read its configuration, instead of leaving them to wait for it."""
    try:
        yield
    except BadInput as error:
        if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            from normscale.train.rendezvous import Meeting

            Meeting({}).fail(error)
        raise


def _exit_code(result: "RunResult") -> int:
    """Returns the exit code of a run.

    Raises:
        NonFiniteStop: the run stopped or ended on a value that is not finite, or applied no step for such values.
    """
    if result.exit_code == NonFiniteStop.exit_code:
        summary = result.summary
        first, steps, what = summary.get("bad_step", "?"), summary.get("steps"), "the loss or the gradient"
        where = f", first in {summary['bad_parameter']}" if summary.get("bad_parameter") else ""
        where = f": {summary['culprit']}" if summary.get("culprit") else where
        if steps in (None, first):
            raise NonFiniteStop(f"stopped at step {first}: {what} was not finite{where}")
        if in_a_row := summary.get("stopped_after"):
            raise NonFiniteStop(f"stopped at step {steps}: {what} was not finite {in_a_row} times in a row{where}")
        if summary.get("applied") == 0:
            mend = "give it more train.steps, a smaller learning rate or, in fp16 and fp8, a smaller loss scale"
            raise NonFiniteStop(f"none of {steps} steps was applied: {what} was never finite{where}; {mend}")
        raise NonFiniteStop(f"{what} was not finite first at step {first}{where}; it went on to step {steps}")
    return result.exit_code


@contextlib.contextmanager
def _sink(runs: Path, uri: str | None) -> Iterator[None]:
    """Replays records while they are written, in a process of its own that cannot slow or stop training."""
    if uri is None:
        yield
        return
    from normscale.tracking.sink_process import Sink

    sink, stopped = Sink(runs, uri), False
    try:
        yield
    except KeyboardInterrupt:
        stopped = True
        raise
    finally:
        if problem := sink.finish(SYNC_S, stopped):
            say_error(problem)


def _say_result(result: "RunResult", uri: str | None) -> None:
    said: str = {"nan": "stopped: not finite"}.get(result.outcome, result.outcome)
    if result.skipped_existing:
        said = f"{said} before; --fresh trains it again"
    if {"loss_val", "unigram_nats"} <= result.summary.keys():
        loss, unigram = result.summary["loss_val"], result.summary["unigram_nats"]
        said += f"; held-out loss {loss:.3f} nats, {_than_unigram(loss, unigram)}"
    print(said)
    print(f"run folder: {result.run_dir}")
    if uri is not None:
        from normscale.tracking.sink_process import run_links, ui_words

        for line in run_links(result.run_dir, uri):
            print(line)
        print(f"MLflow: {ui_words(uri, DEFAULT_URI)}")


def _than_unigram(loss: float, unigram: float) -> str:
    """Returns what a held-out loss means beside the entropy of the byte frequencies."""
    if loss >= unigram:
        return f"no better than byte frequencies ({unigram:.3f}): too few steps, or it does not train"
    if loss != loss:
        return f"not finite (byte frequencies: {unigram:.3f})"
    return f"{unigram - loss:.3f} below byte frequencies ({unigram:.3f})"


def _check(options: argparse.Namespace) -> int:
    from normscale.config.deepspeed import filled

    loaded = filled(_loaded(options.words, "normscale check"))
    from normscale.config.load import dump
    from normscale.models.backend import norm_backend
    from normscale.models.plan import resolve
    from normscale.train.engines.ranks import device_kind

    with loaded.sources.placed():
        plan = resolve(loaded.config.model)
        backend = norm_backend(plan, loaded.config.precision, device_kind())
    from normscale.claims.cost import VOCAB
    from normscale.plan.skeleton import skeleton
    from normscale.tracking.show import amount
    from normscale.train.flops import flops_per_step, lengths_of

    config = loaded.config
    both = config.topology == "encoder-decoder"
    parameters = sum(skeleton(config.model, VOCAB).parameters().values())
    batch, lengths = config.train.batch, lengths_of(config.model)
    tokens = f"{batch * lengths.target:,} tokens" + (f" beside {batch * lengths.source:,} of the source" * both)
    flops = amount(flops_per_step(config.model, VOCAB, batch), "FLOP")
    print(f"# depth       N={plan.depth.N} M={plan.depth.M}, {len(list(plan.depth.sites()))} sublayers")
    print(f"# parameters  {parameters:,}")
    print(f"# norms       {backend}")
    print(f"# a step      {tokens}, {flops} forward and backward")
    print("\n".join(_estimates(config, device_kind())))
    if options.yaml:
        print(f"\n{dump(config).rstrip()}")
    return 0


def _plan(options: argparse.Namespace) -> int:
    loaded = _loaded(options.words, "normscale plan")
    from normscale.config.deepspeed import filled
    from normscale.plan.gpus import find_gpu
    from normscale.plan.make import Asked, made
    from normscale.plan.page import as_json, page

    gpu = find_gpu(options.gpu, options.memory)
    asked = Asked(options.gpus, options.per_host, gpu, options.vocab, options.mfu, options.hours_budget)
    with loaded.sources.placed():
        plan = made(filled(loaded).config, asked)
    print(json.dumps(as_json(plan)) if options.json else page(plan))
    return 1 if False in (plan.fits, plan.in_budget) else 0


def _estimates(config: "RunConfig", device: str) -> list[str]:
    """Returns the time of a step and the memory, as finished runs of this machine have them."""
    from normscale.claims.cost import Device, from_finished, memory_of_nearest
    from normscale.progress import duration
    from normscale.tracking.show import amount

    runs = Path(config.tracking.runs)
    kind: Device = "cuda" if device == "cuda" else "cpu"
    cost = from_finished(runs, kind)
    if cost is None:
        return [f"# time        not known: no run of 50 steps has finished in {runs} on this machine"]
    lines = [
        f"# time        about {cost.step(config):.2g} s a step, {duration(cost.of(config))} for"
        f" {config.train.steps} steps (estimated by {cost.source})"
    ]
    if nearest := memory_of_nearest(runs, config, kind):
        lines.append(f"# memory      {amount(nearest[1], 'B')} at the most in {nearest[0]}, the nearest finished run")
    return lines


def _show(options: argparse.Namespace) -> int:
    from normscale.tracking import draw, show
    from normscale.tracking.find import find_run
    from normscale.tracking.listing import as_json, listing
    from normscale.tracking.reader import is_written, read_run

    if options.run is None:
        _check_folder(options.runs, "--runs", made=False)
        if options.json:
            print(json.dumps(as_json(options.runs)))
        else:
            print("\n".join(listing(options.runs, draw.look_of(sys.stdout, os.environ))))
        return 0
    folder = find_run(options.run, options.runs)
    record, alive = read_run(folder), is_written(folder)
    if options.json:
        print(json.dumps(show.as_json(record, alive), allow_nan=False))
    else:
        print("\n".join(show.show(record, alive, draw.look_of(sys.stdout, os.environ))))
    return 0


def _diff(options: argparse.Namespace) -> int:
    from normscale.tracking import diff, draw
    from normscale.tracking.find import find_run
    from normscale.tracking.reader import read_run

    a, b = (read_run(find_run(word, options.runs)) for word in (options.run, options.other))
    if options.json:
        print(json.dumps(diff.as_json(a, b), allow_nan=False))
    else:
        print("\n".join(diff.diff(a, b, draw.look_of(sys.stdout, os.environ))))
    return 0


def _removal(options: argparse.Namespace) -> int:
    from normscale.tracking import draw
    from normscale.tracking.find import find_run
    from normscale.tracking.removal import table

    folder = find_run(options.run, options.runs)
    for name in ("blocks", "batches"):
        if getattr(options, name) < 1:
            raise BadInput(f"--{name}: {getattr(options, name)} leaves nothing to measure; give 1 or more")
    from normscale.train.removal import removal

    found, path = removal(folder, options.blocks, options.batches, options.checkpoint)
    if options.json:
        print(json.dumps(found.as_json(), allow_nan=False))
    else:
        print("\n".join([*table(found.as_json(), draw.look_of(sys.stdout, os.environ)), f"written to {path}"]))
    return 0


def _claim_list(options: argparse.Namespace) -> int:
    from normscale.claims.discover import list_claims

    claims = list_claims()
    width = max((len(claim.id) for claim in claims), default=0)
    for claim in claims:
        print(f"{claim.id:<{width}}  {claim.says}")
    return 0


def _claim_run(options: argparse.Namespace) -> int:
    from normscale.claims.runner import planned, run_claims

    ids = [*options.words, *(["core"] if options.core else [])]
    if not ids:
        raise BadInput("claim run: no claim; name one of normscale claim list (make claims-list), or give --core")
    _check_folder(options.runs, "--runs", made=True)
    part = None
    if options.part is not None:
        from normscale.claims.parts import part as part_of

        part = part_of(options.part)
    if options.dry_run or os.environ.get("DRY_RUN", "") not in ("", "0"):
        print("\n".join(planned(ids, options.profile, options.runs, options.workers, part)))
        return 0
    uri = None if options.uri == "null" else options.uri  # as tracking.uri=null
    try:
        with _uri_option():
            if uri is not None:
                from normscale.tracking.mlflow_store import check_place

                check_place(uri)  # before anything is said
            return run_claims(ids, options.profile, runs=options.runs, uri=uri, workers=options.workers, part=part)
    except KeyboardInterrupt as error:
        kept = str(error) or "finished runs are kept; the same command goes on with the others"
        print(kept, file=sys.stderr)
        raise


def _claim_report(options: argparse.Namespace) -> int:
    from normscale.claims.report import publish, write_report

    _check_folder(options.runs, "--runs", made=False)
    written = write_report(options.runs)
    print(written)
    for path in publish(written) if options.publish else []:
        print(f"published {path}")
    return 0


def _sync(options: argparse.Namespace) -> int:
    from normscale.tracking.address import resolve
    from normscale.tracking.find import folders_of
    from normscale.tracking.mlflow_sink import sync

    if not options.words:
        _check_folder(options.runs, "--runs", made=False)
    asked = folders_of(options.words, options.runs)
    with _uri_option():
        uri = resolve(options.uri)
    reports = [sync(runs, uri, only) for runs, only in asked.items()]
    print("\n".join(map(str, reports)))
    return 0 if all(report.ok for report in reports) else 1


def _ui(options: argparse.Namespace) -> int:
    from normscale.tracking.server import ui

    with _uri_option():
        return ui(options.uri, options.port, options.runs)


def _server(options: argparse.Namespace) -> int:
    from normscale.tracking.server import server

    with _uri_option("--store"):
        return server(options.store, options.host, options.port, options.name, options.artifacts)


@contextlib.contextmanager
def _uri_option(option: str = "--uri") -> Iterator[None]:
    """Lets an error about the store name the option that gave it here, instead of the configuration's key."""
    try:
        yield
    except StoreError as error:
        said = str(error).replace("tracking.uri: ", f"{option}: ", 1).replace("tracking.uri=sqlite", f"{option} sqlite")
        if option == "--store":  # which is a server's, and no server
            said = said.replace("http://<host>:<port>", "postgresql://<user>@<host>/<name>")
        raise StoreError(said) from error


def _rank() -> int:
    word = os.environ.get("RANK", "0")
    return int(word) if word.isdigit() else 0


def _status_dir() -> str | None:
    return os.environ.get("NORMSCALE_STATUS_DIR")


def _leave_status(code: int, error: str) -> None:
    """Leaves the exit code of this rank where its launcher asked for it, even if there never was a run folder."""
    folder = _status_dir()
    if folder is None:
        return
    status = {"rank": _rank(), "exit_code": code, "error": error, "t": time.time_ns()}
    path = Path(folder) / f"rank{_rank()}.status"
    with contextlib.suppress(OSError):  # the launcher is gone: nobody to tell
        path.with_suffix(".part").write_text(json.dumps(status), encoding="utf-8")
        path.with_suffix(".part").replace(path)
