"""The life of a run: build, record the start, train, evaluate, record the end."""

import json
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normscale.arguments import LOST_RANK, exit_code_of, is_lost_rank, to_stderr
from normscale.config.load import dump
from normscale.config.schema import RunConfig
from normscale.config.sharing import check_divides
from normscale.data.batches import Batches, too_few
from normscale.data.task import load_task
from normscale.errors import NonFiniteStop, NormscaleError, RunFailed, StoreError
from normscale.models.builder import build
from normscale.planned import SINCE, config_hash
from normscale.probes.joint import BrokenPass
from normscale.tracking.files import write_whole
from normscale.tracking.reader import RunRecord, next_attempt, read_run
from normscale.tracking.record import Outcome
from normscale.tracking.spool import SPOOL, SpoolWriter
from normscale.train.checkpoint import Checkpoints, Found
from normscale.train.denormals import denormals
from normscale.train.engines.engine import Engine
from normscale.train.engines.make import check_engine, make_engine
from normscale.train.engines.ranks import world_size
from normscale.train.identity import identity, run_id_of
from normscale.train.lost import Roll
from normscale.train.preempt import Preempted
from normscale.train.rendezvous import Meeting
from normscale.train.resumption import resumption
from normscale.train.session import OnStep, Session, Silent
from normscale.train.worlds import check_same_world

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
    words: Sequence[str] | None = None,
    on_start: Callable[[], None] | None = None,
    on_resume: OnResume | None = None,
    on_step: OnStep | None = None,
) -> RunResult:
    """Trains one model to its end and returns how it went; a run that is finished already is only read.

    A run that was interrupted goes on from its newest checkpoint that can be used, and gives what it would have given
    without the interruption; `fresh` trains it from the beginning whatever there is of it.

    Every rank calls it; rank 0 writes the records. `words` are those of the command line, if there was one, which a
    launcher's plan is compared with. `on_start` is called once the input has proved good and records are being written,
    then `on_resume` with (step, folder of the checkpoint) if it goes on, and `on_step` with (step, steps, loss) after
    each step.

    Raises:
        BadInput: the configuration, the data or the store cannot be used, or the ranks are not what was planned;
            nothing was written.
        RunFailed: it cannot go on, or its end could not be recorded.
        Preempted: a signal asked it to end, which it did with a checkpoint; on every rank.
    """
    with denormals(config.precision.flush_denormals):  # before the first computation of all
        return _run(config, fresh, words, on_start, on_resume, on_step)


def _run(
    config: RunConfig,
    fresh: bool,
    words: Sequence[str] | None,
    on_start: Callable[[], None] | None,
    on_resume: OnResume | None,
    on_step: OnStep | None,
) -> RunResult:
    # All that can be wrong with the input shows before the first byte is written, on all ranks alike.
    launched = None if words is None else config_hash(words)
    meeting = Meeting(config.model_dump(mode="json"), launched, config.engine.timeout_s)
    try:
        task, parts, run_id = load_task(config), identity(config), run_id_of(config)
        runs = Path(config.tracking.runs).absolute()
        fresh = fresh and not _begun_by_this_launch(runs / run_id)
        done = None if fresh else _ended(runs / run_id)
        if done is None:
            check_engine(config)
            check_divides(config.train.batch, world_size(), config.train.accumulate)
            if len(task.held_out) < config.train.batch:
                raise too_few(len(task.held_out), config.train.batch, split="held-out ")
            if words is not None and not fresh:
                check_same_world(config, runs / run_id)
    except Exception as error:
        meeting.fail(error)
    agreed = meeting.meet(run_id, parts, None if done is None else done.exit_code, fresh)
    run_id, run_dir, fresh = agreed.run, runs / agreed.run, agreed.fresh
    if agreed.done is not None:
        outcome: Outcome = "finished" if agreed.done == 0 else "nan"
        return done or RunResult(run_id, run_dir, outcome, agreed.done, {}, skipped_existing=True)

    model = build(config.model, task.vocab, config.seed)
    first = Batches(task.train, batch=config.train.batch, seed=config.seed).window(0)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)  # dropout, where there is some, is the same on every rank and in every attempt
        model.scheme.calibrate(lambda: model(first[0].tokens_BT, **first[0].beside))
    engine = make_engine(model, config)
    torch.manual_seed(config.seed * 65_537 + engine.rank)  # dropout differs by rank; nothing else draws from it
    session = Session(config, task, engine)
    checkpoints = Checkpoints(run_dir, agreed.hash, engine, config.checkpoint.keep)
    recorder = _open(config, run_dir) if engine.rank == 0 else Silent()
    roll = Roll(meeting.store, engine.rank, agreed.hosts)
    outcome, code, together = "error", 1, False
    summary: dict[str, Any] = {}
    status: dict[str, Any] = {}
    try:
        before = read_run(run_dir) if recorder.attempt > 1 else None
        found, passed_over = _found(checkpoints, session, before, fresh)
        step = found.step if found else 0
        if found is not None:
            session.load_state_dict(found.state)
        recorder.start(**session.facts(run_id, step), hosts=list(agreed.hosts))
        if before is not None and not fresh:
            event, fields = resumption(before, step, engine.world)
            recorder.event(step, event, **fields)
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
        if engine.world > 1:
            status = {"weights": engine.digest()}
        together = True
    except KeyboardInterrupt as error:
        outcome, code, together = "interrupted", exit_code_of(error)[0], isinstance(error, Preempted)
        raise
    except NormscaleError as error:
        code = error.exit_code
        if isinstance(error, BrokenPass):
            recorder.event(session.trainer.attempted, "pass_broken", says=str(error))
        raise
    except Exception as error:
        if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
            raise RunFailed(_compiler_failed(error)) from error
        if is_lost_rank(error) and (said := _call_roll(roll, session.trainer.attempted, recorder)):
            raise RunFailed(f"{LOST_RANK}: {said}; the first rank that failed says why") from error
        raise
    finally:
        with suppress(Exception):  # of a device that has failed, or of a step that was never made
            session.trainer.settle(recorder, alone=True)
        recorder.end(outcome, code, summary)
        recorder.close()
        roll.close()
        code = 1 if recorder.gone and outcome in ("finished", "nan") else code
        _leave_status(run_dir, outcome, code, engine, status)
        if together:
            engine.close()
    if recorder.gone:
        raise RunFailed(
            f"{run_dir}: the records of this run are gone or incomplete, its end could not be written "
            f"({recorder.gone}); train it again"
        )
    return RunResult(run_id, run_dir, outcome, code, summary)


def _begun_by_this_launch(run_dir: Path) -> bool:
    """Returns whether ranks of this launch have begun the run anew before: those that it starts later go on from there.

    A scheduler that queues a job again, and an agent that starts failed ranks again, give them the words of the first
    time.
    """
    since = os.environ.get(SINCE, "")
    return since.isdigit() and (run_dir / SPOOL).exists() and max(read_run(run_dir).starts, default=0) >= int(since)


def _ended(run_dir: Path) -> RunResult | None:
    """Returns how a run that came to its end has ended."""
    if not (run_dir / SPOOL).exists():
        return None
    record = read_run(run_dir)
    if record.end is None or not record.finished:
        return None
    code = int(record.end["exit_code"])
    return RunResult(run_dir.name, run_dir, record.end["outcome"], code, record.summary, skipped_existing=True)


def _compiler_failed(error: Exception) -> str:
    reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return (
        f"model.compile: the compiler failed ({reason[:200]}); it needs a C++ compiler and Python's headers; "
        "install them, or set model.compile=false"
    )


def _call_roll(roll: Roll, step: int, recorder: "SpoolWriter | Silent") -> str | None:
    """Records that a rank is lost, and returns which, in words; None where that cannot be known."""
    lost: list[int] | None = None
    try:
        lost = roll.call()
    finally:  # its launcher may stop this rank meanwhile
        said = f"{roll.said(lost)} did not answer any more" if lost else "the connection to another rank broke"
        recorder.event(step, "rank_lost", ranks=lost or [], says=said)
    return said if lost else None


def _found(
    checkpoints: Checkpoints, session: Session, before: RunRecord | None, fresh: bool
) -> tuple[Found | None, list[tuple[Path, str]]]:
    """Returns the checkpoint to go on from, if there is one, and those that were passed over, with the reasons.

    `before` are the records of the starts before this one.
    """
    passed_over: list[tuple[Path, str]] = []

    def tell(path: Path, reason: str) -> None:
        passed_over.append((path, reason))
        to_stderr(f"{path}: passed over: {reason}")

    if fresh:
        checkpoints.pass_over()
        return None, passed_over
    reached = before.reached if before is not None else {}
    late = {f"trainer/{name}": tensor for name, tensor in session.trainer.late_state().items()}
    found = checkpoints.newest(reached, session.state_dict(), late, tell)
    if passed_over and found is None:
        to_stderr(f"{checkpoints.root}: no checkpoint can be used; training starts at step 0")
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


def _leave_status(run_dir: Path, outcome: Outcome, code: int, engine: Engine, more: Mapping[str, Any]) -> None:
    """Leaves this rank's exit code beside the records, if their folder is there; one of several says where it ran."""
    status = {"exit_code": code, "outcome": outcome, **more}
    if engine.world > 1:
        status |= {"host": socket.gethostname(), "world": engine.world, "engine": engine.name}
    with suppress(OSError):  # the exit code itself still tells
        write_whole(run_dir / f"rank{engine.rank}.status", json.dumps(status))
