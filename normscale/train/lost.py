"""Who is lost, when the connection to another rank is: a roll call over the store, answered beside the training.

A rank that waits in a collective for a dead one lives, though it says nothing. So every rank answers the roll from a
thread of its own, and those that do not answer are the ones to name.
"""

import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from torch.distributed import Store  # type: ignore[attr-defined]

from normscale.train.facts import ranks

LISTEN_S = 1.0  # between two looks at whether the roll is called
ANSWER_S = 3.0  # within which a living rank answers


class Roll:
    """Answers the roll for this rank until closed, and calls it.

    Args:
        store: that of the meeting; None where this process is alone.
        hosts: the host of each rank.
    """

    def __init__(self, store: Store | None, rank: int, hosts: Sequence[str]) -> None:
        self.rank, self.hosts = rank, hosts
        self._over = threading.Event()
        # A connection of its own, since waiting holds one.
        self._store: Store | None = None if store is None else store.clone()  # type: ignore[attr-defined]
        self._listener = threading.Thread(target=self._listen, name="roll", daemon=True)
        if self._store is not None:
            self._listener.start()

    def close(self) -> None:
        """Answers no more."""
        self._over.set()
        if self._listener.is_alive():
            self._listener.join(LISTEN_S)

    def call(self) -> list[int] | None:
        """Returns the ranks that do not answer; None where that cannot be known, as nobody is asked or all answer."""
        self.close()
        lost: list[int] = []
        asking = threading.Thread(target=self._ask, args=(lost,), daemon=True)  # a store that is gone may never answer
        if self._store is not None:
            asking.start()
            asking.join(ANSWER_S + 2 * LISTEN_S)
            if asking.is_alive():
                return [0]
        return sorted(lost) or None

    def said(self, lost: Sequence[int]) -> str:
        """Returns e.g. "ranks 2, 3 (node1)"."""
        hosts = dict.fromkeys(self.hosts[rank] for rank in lost)
        return f"{ranks(lost)} ({', '.join(hosts)})"

    def _listen(self) -> None:
        assert self._store is not None
        with suppress(RuntimeError):  # the store is gone, and its rank ends the run
            while not self._over.wait(LISTEN_S):
                if self._store.check(["roll"]):
                    self._store.set(f"here{self.rank}", "1")
                    return

    def _ask(self, lost: list[int]) -> None:
        assert self._store is not None
        others = set(range(len(self.hosts))) - {self.rank}
        try:
            self._store.set(f"here{self.rank}", "1")
            self._store.set("roll", "1")
            deadline = time.monotonic() + ANSWER_S
            while others and time.monotonic() < deadline:
                others -= {rank for rank in others if self._store.check([f"here{rank}"])}
                time.sleep(LISTEN_S / 10)
        except RuntimeError:  # rank 0, or the agent beside it, holds the store
            others = {0} - {self.rank}
        lost.extend(others)
