"""Waits for the other parts of claims, so that the machine that ran one of them can judge."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from normscale.claims.parts import at_work
from normscale.errors import RunFailed

PATIENCE_S = 120.0  # for a part that has not begun, or has stopped and is started again
PAUSE_S = 2.0


def wait_for_others(
    runs: Path, ids: Sequence[str], profile: str, missing: Callable[[], int], patience_s: float = PATIENCE_S
) -> None:
    """Returns once all runs of the claims have an end, and nobody works on a part of them any more.

    Args:
        runs: The folder that the parts share.
        ids: The claims.
        profile: Their profile.
        missing: Returns how many runs have no end.
        patience_s: How long nobody may work on runs that have none.

    Raises:
        RunFailed: nobody has for so long.
    """
    seen, said = time.monotonic(), False
    while (holder := at_work(runs, ids, profile)) or missing():
        now = time.monotonic()
        if holder:
            seen = now
        elif now - seen > patience_s:
            raise RunFailed(
                f"{missing()} runs of {', '.join(ids)} have no end, and nobody has worked on them for {patience_s:.0f}"
                " s; start the parts that are missing on a machine of this one's kind (CPU, GPU, PyTorch), and then"
                " this one again, which judges"
            )
        if not said:
            print(f"waiting for the other parts{f' ({holder})' if holder else ''}", flush=True)
            said = True
        time.sleep(min(PAUSE_S, patience_s))
