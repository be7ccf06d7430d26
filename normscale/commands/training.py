"""`normscale train`: every rank of a run, with the sink beside rank 0."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from normscale.arguments import stoppable, to_stderr
from normscale.commands.common import DEFAULT_URI, check_folder, load, rank
from normscale.errors import BadInput, NonFiniteStop

if TYPE_CHECKING:
    from normscale.train.run import RunResult

SYNC_S = 60.0  # what the last replay may take after training


def train(options: argparse.Namespace) -> int:
    """Trains one model, as this rank."""
    with stoppable():  # a scheduler that takes the machine back sends SIGTERM
        return _train_until_stopped(options)


def _train_until_stopped(options: argparse.Namespace) -> int:
    from normscale.config.agreement import settled
    from normscale.models.plan import resolve

    with _told_to_others():
        loaded = settled(load(options.words, "normscale train"), os.environ)
        check_folder(Path(loaded.config.tracking.runs), "tracking.runs", made=True)
        with loaded.sources.placed():
            resolve(loaded.config.model)
    from normscale.progress import Progress
    from normscale.train.run import run

    if rank() != 0:
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
            to_stderr(problem)


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
        from normscale.tracking.sink_process import port_of_run, run_links, ui_words
        from normscale.tracking.ui_port import HERE

        port = port_of_run(result.run_dir, uri)
        for line in run_links(result.run_dir, uri, f"{HERE}:{port}"):
            print(line)
        print(f"MLflow: {ui_words(uri, DEFAULT_URI, port)}")


def _than_unigram(loss: float, unigram: float) -> str:
    """Returns what a held-out loss means beside the entropy of the token frequencies."""
    if loss >= unigram:
        return f"no better than token frequencies ({unigram:.3f}): too few steps, or it does not train"
    if loss != loss:
        return f"not finite (token frequencies: {unigram:.3f})"
    return f"{unigram - loss:.3f} below token frequencies ({unigram:.3f})"
