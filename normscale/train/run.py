"""The life of a run: build, record the start, train, evaluate, record the end."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normscale.arguments import exit_code_of
from normscale.config.load import dump
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches, check_divides, too_few
from normscale.data.task import load_task
from normscale.errors import NonFiniteStop, NormscaleError, RunFailed, StoreError
from normscale.models.builder import build
from normscale.tracking.files import write_whole
from normscale.tracking.reader import next_attempt, read_run
from normscale.tracking.record import Outcome
from normscale.tracking.spool import SPOOL, SpoolWriter
from normscale.train.checkpoint import Checkpoints, Found
from normscale.train.denormals import denormals
from normscale.train.engine import check_precision, device_kind, make_engine, world_size
from normscale.train.identity import identity, run_id_of
from normscale.train.session import OnStep, Session, Silent

OnResume = Callable[[int, Path], None]


@dataclass(frozen=True)
class RunResult:
    """How a run ended; `exit_code` is 0 well, 3 not finite.

    A run ends as not finite, too, if none of its steps was applied, as where fp16's loss scale never came down far
    enough: its weights are those it began with, so its losses say nothing, however finite.
    """

    run_id: str
    run_dir: Path
    outcome: Outcome
    exit_code: int
    summary: dict[str, Any]
    skipped_existing: bool = False


def run(
    config: RunConfig,
    *,
    fresh: bool = False,
    on_start: Callable[[], None] | None = None,
    on_resume: OnResume | None = None,
    on_step: OnStep | None = None,
) -> RunResult:
    """Trains one model to its end and returns how it went; a run that is finished already is only read.

    A run that was interrupted goes on from its newest checkpoint that can be used, and gives what it would have given
    without the interruption; `fresh` trains it from the beginning whatever there is of it.

    Every rank calls it; rank 0 writes the records. `on_start` is called once the input has proved good and records are
    being written, then `on_resume` with (step, folder of the checkpoint) if it goes on, and `on_step` with (step,
    steps, loss) after each step.

    Raises:
        BadInput: the configuration, the data or the store cannot be used; nothing was written.
        RunFailed: it cannot go on, or its end could not be recorded.
    """
    with denormals(config.precision.flush_denormals):  # before the first computation of all
        return _run(config, fresh, on_start, on_resume, on_step)


def _run(
    config: RunConfig,
    fresh: bool,
    on_start: Callable[[], None] | None,
    on_resume: OnResume | None,
    on_step: OnStep | None,
) -> RunResult:
    task = load_task(config)
    run_id = run_id_of(config)
    run_dir = Path(config.tracking.runs).absolute() / run_id
    if not fresh and (run_dir / SPOOL).exists():
        record = read_run(run_dir)
        if record.end is not None and record.finished:
            code = int(record.end["exit_code"])
            return RunResult(run_id, run_dir, record.end["outcome"], code, record.summary, skipped_existing=True)

    # All that can be wrong with the input shows before the first byte is written.
    check_precision(config.precision, device_kind(), world_size())
    check_divides(config.train.batch, world_size(), config.train.accumulate)
    if len(task.held_out) < config.train.batch:
        raise too_few(len(task.held_out), config.train.batch, split="held-out ")
    model = build(config.model, task.vocab, config.seed)
    first = Batches(task.train, batch=config.train.batch, seed=config.seed).window(0)
    with torch.no_grad():
        model.scheme.calibrate(lambda: model(first[0].tokens_BT, **first[0].beside))
    engine = make_engine(model, config.precision)
    torch.manual_seed(config.seed * 65_537 + engine.rank)  # dropout differs by rank; nothing else draws from it
    session = Session(config, task, engine)
    checkpoints = Checkpoints(run_dir, identity(config)["hash"], engine, config.checkpoint.keep)
    recorder = _open(config, run_dir) if engine.rank == 0 else Silent()
    outcome: Outcome = "error"
    summary: dict[str, Any] = {}
    code = 1
    try:
        found, passed_over = _found(checkpoints, session, recorder, fresh)
        step = found.step if found else 0
        if found is not None:
            session.load_state_dict(found.state)
        recorder.start(**session.facts(run_id, step))
        for path, reason in passed_over:
            recorder.event(step, "checkpoint_passed_over", path=str(path), reason=reason)
        if on_start is not None:
            on_start()
        if found is not None and on_resume is not None:
            on_resume(step, found.path)
        found = None  # a second copy of the weights
        outcome = session.train(recorder, checkpoints, on_step)
        checkpoints.clean()
        code = NonFiniteStop.exit_code if outcome == "nan" else 0
        summary = session.summary()
    except KeyboardInterrupt as error:
        outcome, code = "interrupted", exit_code_of(error)[0]
        raise
    except NormscaleError as error:
        code = error.exit_code
        raise
    except Exception as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise RunFailed(_compiler_failed(error)) from error
        raise
    finally:
        recorder.end(outcome, code, summary)
        recorder.close()
        code = 1 if recorder.gone and outcome in ("finished", "nan") else code
        _leave_status(run_dir, outcome, code)
        if outcome in ("finished", "nan"):
            engine.close()
    if recorder.gone:
        raise RunFailed(
            f"{run_dir}: the records of this run are gone or incomplete, its end could not be written "
            f"({recorder.gone}); train it again"
        )
    return RunResult(run_id, run_dir, outcome, code, summary)


def _compiler_failed(error: Exception) -> str:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"model.compile: the compiler failed ({reason[:200]}); it needs a C++ compiler and Python's headers; "
        "install them, or set model.compile=false"
    )


def _found(
    checkpoints: Checkpoints, session: Session, recorder: "SpoolWriter | Silent", fresh: bool
) -> tuple[Found | None, list[tuple[Path, str]]]:
    """Returns the checkpoint to go on from, if there is one, and those that were passed over, with the reasons."""
    passed_over: list[tuple[Path, str]] = []

    def tell(path: Path, reason: str) -> None:
        passed_over.append((path, reason))
        print(f"normscale: {path}: passed over: {reason}", file=sys.stderr, flush=True)

    if fresh:
        checkpoints.pass_over()
        return None, passed_over
    reached = read_run(recorder.run_dir).reached if isinstance(recorder, SpoolWriter) else {}
    late = {f"trainer/{name}": tensor for name, tensor in session.trainer.late_state().items()}
    found = checkpoints.newest(reached, session.state_dict(), late, tell)
    if passed_over and found is None:
        line = f"normscale: {checkpoints.root}: no checkpoint can be used; training starts at step 0"
        print(line, file=sys.stderr, flush=True)
    return found, passed_over


def _open(config: RunConfig, run_dir: Path) -> SpoolWriter:
    attempt = next_attempt(run_dir)
    writer = SpoolWriter(run_dir, attempt)
    try:
        write_whole(run_dir / "config.yaml", dump(config))
    except OSError as error:
        writer.close()
        raise StoreError(
            f"{run_dir}: cannot write config.yaml ({error.strerror}); choose another tracking.runs"
        ) from None
    return writer


def _leave_status(run_dir: Path, outcome: Outcome, code: int) -> None:
    """Leaves this rank's exit code beside the records, if their folder is there."""
    rank = os.environ.get("RANK", "0")
    with suppress(OSError):  # the exit code itself still tells
        write_whole(run_dir / f"rank{rank}.status", json.dumps({"exit_code": code, "outcome": outcome}))
