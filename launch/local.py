"""Runs ranks on this machine and answers for them: the first failure's exit code, one line why, nothing left behind."""

import contextlib
import signal
import sys
import time
from types import FrameType

from launch.command import Command
from launch.failures import signal_name
from launch.supervise import POLL_S, STOPS, Outcome, Supervised, heed, passed_on
from normscale.arguments import debugging, to_stderr

GRACE_S = 20.0  # what survivors of a failure, or of a signal, have to end by themselves
PREEMPTED = 128 + signal.SIGTERM


def run(
    command: Command,
    grace_s: float = GRACE_S,
    what: str = "accelerate launch",
    restarts: bool = False,
    first_rank: int | None = 0,
) -> int:
    """Runs a command that starts several ranks, and returns its exit code: the first failing rank's.

    SIGINT, SIGTERM and SIGHUP reach the ranks as SIGTERM (a second one ends them at once), but for those that nohup or
    a shell's `&` have us ignore; what has not ended after `grace_s` is killed, and when this returns no process of the
    launch is left but a sink that still replays records. SIGUSR1, by which a scheduler tells of the end to come, is
    passed on alone. With `restarts`, what `command` starts deals with ranks that fail, until a signal was passed on,
    here or on another host.
    `first_rank` is that of this host, None where only the ranks will know it.
    """
    noted: list[int] = []
    ranks = Supervised(command, _say, first_rank=first_rank)
    forward_signals(ranks, noted)
    try:
        _wait(ranks, noted, grace_s, restarts)
    finally:
        outcome = ranks.finish(min(5.0, grace_s))
    if restarts and outcome.exit_code == 0:
        return 0
    if debugging():
        sys.stderr.buffer.write(outcome.noise)
    return report(outcome, noted, what)


def forward_signals(ranks: Supervised, noted: list[int]) -> None:
    """Passes signals on to the ranks, the first of each kind, and notes them all."""

    def forward(number: int, frame: FrameType | None) -> None:
        if number not in noted:
            ranks.signal(passed_on(number))
        noted.append(number)

    heed(forward)


def stops(noted: list[int]) -> list[int]:
    """Returns the signals among these that end a launch."""
    return [number for number in noted if number in STOPS]


def report(outcome: Outcome, noted: list[int], what: str) -> int:
    """Says why the launch failed, unless rank 0 has said it, and returns its exit code."""
    failure = outcome.failure
    stopped = stops(noted)
    if stopped and (failure is None or not failure.told or failure.stopped or failure.followed):
        to_stderr(f"stopped by {signal_name(stopped[0])}")
        return 128 + stopped[0]
    if signal.SIGUSR1 in noted and failure is not None and failure.error.startswith("was killed by SIGUSR1"):
        to_stderr("stopped by SIGUSR1")  # before the ranks were ready for it
        return PREEMPTED
    if failure is not None:
        if failure.rank != 0 or not failure.told:  # rank 0 has said it
            to_stderr(failure.says())
        return failure.exit_code
    if outcome.exit_code == 0:
        return 0
    sys.stderr.buffer.write(outcome.noise)  # the launcher itself failed: its words are all there is
    sys.stderr.flush()
    to_stderr(f"{what} failed with exit code {outcome.exit_code}")
    return 1


def _wait(ranks: Supervised, noted: list[int], grace_s: float, restarts: bool) -> None:
    before = ranks.ends()
    while not ranks.poll():
        before = before if noted else ranks.ends()
        # Ranks that end because they were told to, here or on another host, are not to be started again.
        told = restarts and (ranks.ends() != before if noted else ranks.stopped_elsewhere())
        if told or len(stops(noted)) > 1:
            ranks.end_within(0.0)
        elif stops(noted) or (not restarts and ranks.failure()):
            ranks.end_within(grace_s)
        time.sleep(POLL_S)


def _say(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads our stderr; the ranks must be able to write theirs
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()
