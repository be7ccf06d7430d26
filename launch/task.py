"""The exit code of a task of a batch job, of which Slurm keeps the largest of all tasks.

When a task fails, Slurm tells the others to stop, and they end with 143, as they do when the job is preempted. So that
a failure is not taken for that, and its job not queued again for ever, failures are told by codes above 143.
templates/end.sh takes them back. A task that a signal kills hides the codes of all others: none may, not even as it
starts, so that its shell ignores SIGTERM until there is a handler.
"""

import os
import signal

PREEMPTED = 128 + signal.SIGTERM
ABOVE, LAST = 192, 61
OTHER, STOPPED, UNSAVED = 254, 128 + signal.SIGUSR1, 255


def end_when_told() -> None:
    """Lets SIGTERM end this task by an exit code, until its ranks are there."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(PREEMPTED))


def coded(code: int) -> int:
    """Returns the code that a task ends with."""
    if code in (0, PREEMPTED):
        return code
    if code == STOPPED:  # by the time limit, without a checkpoint
        return UNSAVED
    return ABOVE + code if 0 < code <= LAST else OTHER
