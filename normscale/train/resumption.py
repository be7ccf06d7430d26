"""What a start of a run tells of the attempt before it, which could not always tell of its own end.

A rank 0 that was killed, whose host lost its power or whose disk was full has left nothing; the next start says so.
"""

from normscale.tracking.reader import RunRecord


def resumption(before: RunRecord, from_step: int, world: int) -> tuple[str, dict[str, int | str]]:
    """Returns the event, with its fields, of a start that follows another: `resumed`, or `begun_anew` at step 0.

    Args:
        before: the records as they were before this start.
        from_step: the step of the checkpoint, 0 without one.
        world: the number of ranks.
    """
    attempt, ranks = before.attempt + 1, f"{world} rank{'s' * (world != 1)}"
    goes_on = f"goes on from step {from_step}" if from_step else "begins at step 0, for want of a checkpoint,"
    said = f"attempt {attempt} {goes_on} with {ranks}; {_ended(before)}"
    return ("resumed" if from_step else "begun_anew"), {"reached": _reached(before), "says": said}


def _ended(before: RunRecord) -> str:
    attempt, step = f"attempt {before.attempt}", _reached(before)
    if before.end is None:
        why = "it was killed, its host was lost or its disk full"
        return f"{attempt} has no end in the records after step {step}: {why}"
    how = {"error": "failed", "interrupted": "was stopped"}.get(before.end["outcome"], "ended")
    return f"{attempt} {how} after step {step} with exit code {before.end['exit_code']}"


def _reached(before: RunRecord) -> int:
    """Returns the last step that the newest attempt is known to have made."""
    steps: list[int] = [event["step"] for event in before.events if event["attempt"] == before.attempt]
    return max([0, *steps, before.reached.get(before.attempt, 0)])
