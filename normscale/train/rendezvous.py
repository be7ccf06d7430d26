"""Where the ranks of a run meet before its first step, and hold each other to what was planned.

Each rank leaves its facts, as JSON, in the store at MASTER_ADDR and MASTER_PORT. Rank 0 compares them, with the
launcher's plan and with each other, and leaves its judgement there for all: all go on, or all end with the same line
and exit code 2. Only then is a process group made, on the same store.
"""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from normscale.arguments import LOST_RANK
from normscale.errors import LaunchError, NormscaleError, RunFailed
from normscale.planned import code_hash, planned_in
from normscale.train.engines.ranks import make_group, world_size
from normscale.train.facts import Facts, difference, missing, other_hosts

POLL_S = 0.1
LATE_S = 3.0  # for the other ranks to come when one has met a mistake: if all have, one line stands for all
LINGER_S = 10.0  # rank 0, which may hold the store, stays so long for the others to read why the run ends
SLACK_S = 5.0  # beyond the limit, for rank 0 to judge

_store: Store | None = None  # outlives a run: a process may train several, one after the other
_meetings = 0


class Disagreement(LaunchError):
    """The ranks differ, from the plan or from each other. All of them raise it alike; rank `speaker` prints it."""

    def __init__(self, message: str, speaker: int = 0) -> None:
        super().__init__(message)
        self.speaker = speaker


class NoStore(Disagreement):
    """There is nowhere to meet; this rank alone can say so."""


@dataclass(frozen=True)
class Agreed:
    """What all ranks hold to: each rank's host and, by rank 0, the run's name and hash, its exit code if it is finished
    (`done`), and whether it begins anew (`fresh`).
    """

    run: str
    hash: str
    done: int | None
    hosts: tuple[str, ...]
    fresh: bool = False


class Meeting:
    """The ranks of one start of a run; a process that is alone only holds itself to the plan.

    Args:
        settings: the whole configuration.
        words: the hash of the command line, where there was one (planned.config_hash).
        limit_s: how long a rank waits for the others.

    Raises:
        LaunchError: this process alone is not what was planned.
    """

    def __init__(self, settings: Mapping[str, Any], words: str | None = None, limit_s: float = 300.0) -> None:
        self.settings, self.words, self.limit_s = settings, words, limit_s
        self.world = world_size()
        self.rank = int(os.environ["RANK"]) if self.world > 1 else 0
        self.planned = planned_in(os.environ)
        self.store: Store | None = None
        if not 0 <= self.rank < self.world:
            raise LaunchError(f"RANK={self.rank} in the environment is no rank of {self.world}; start the ranks anew")
        alone = [self._facts()] if self.world == 1 else []
        if line := difference(alone, self.planned) or (alone and other_hosts(alone, self.planned)):
            raise LaunchError(line)

    def fail(self, error: BaseException) -> NoReturn:
        """Tells the other ranks why this one cannot train, and raises what all of them raise."""
        if self.world > 1:
            text = str(error) if isinstance(error, NormscaleError) else f"{type(error).__name__}: {error}"
            with suppress(NoStore):
                self._meet(self._facts(error=text), error)
        raise error

    def meet(self, run: str, parts: Mapping[str, Any], done: int | None, fresh: bool = False) -> Agreed:
        """Returns what all ranks agree on; there is a process group then, unless the run is finished already.

        `parts` is the identity of the run, with its hash.

        Raises:
            Disagreement: something differs, or a rank did not come in time.
            RunFailed: rank 0 was lost meanwhile.
        """
        if self.world == 1:
            return Agreed(run, parts["hash"], done, (socket.gethostname(),), fresh)
        judged = self._meet(self._facts(run=run, parts=parts, done=done, fresh=fresh))
        agreed = Agreed(judged["run"], judged["hash"], judged["done"], tuple(judged["hosts"]), judged["fresh"])
        if agreed.done is None and not dist.is_initialized():
            self._make_group()
        return agreed

    def _facts(self, **more: Any) -> Facts:
        own: dict[str, Any] = {"world": self.world, "words": self.words, "settings": self.settings}
        own |= {"torch": torch.__version__, **more}
        return Facts(rank=self.rank, host=socket.gethostname(), code=code_hash(), **own)

    def _make_group(self) -> None:
        assert self.store is not None
        make_group(self.limit_s, store=PrefixStore("group", self.store), rank=self.rank, world_size=self.world)

    def _meet(self, mine: Facts, error: BaseException | None = None) -> dict[str, Any]:
        """Returns rank 0's judgement if it is that all go on; else raises the line that all raise."""
        self.store = self._reach()
        try:
            judged = self._judged(self.store, mine)
        except dist.DistError as lost:
            raise RunFailed(f"{LOST_RANK}, rank 0, while the ranks met ({_short(lost)})") from None
        if judged.get("error") is None:
            return judged
        _ignore_signals()  # the first rank that is gone may have the others ended, who end by themselves
        if error is not None and judged["own"]:
            raise error
        raise Disagreement(judged["error"], judged["speaker"])

    def _reach(self) -> Store:
        """Returns this meeting's part of the store of all ranks, which rank 0 holds unless an agent of torchrun's does.

        Raises:
            NoStore: there is none.
        """
        global _store, _meetings
        _store = _store or self._connected()
        _meetings += 1
        return PrefixStore(f"meeting{_meetings}", _store)

    def _connected(self) -> Store:
        address, port, environ = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ
        agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        held = self.rank == 0 and not agent
        try:
            store = TCPStore(
                address,
                int(port),
                is_master=held,
                timeout=timedelta(seconds=self.limit_s),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            why = "rank 0 cannot listen there" if held else f"nobody answered there for {self.limit_s:g} s"
            raise NoStore(
                f"rank {self.rank} on {socket.gethostname()}: the ranks were to meet at {address}:{port}, and {why}"
                f" ({_short(error)}); is rank 0 started, the name right and the port free and open? ask make doctor",
                self.rank,
            ) from None
        # An agent keeps its store when it starts its ranks again. It counts starts for itself, so that with several
        # agents the store had better be rank 0's, which is new each time (launch/torchrun.py).
        start = [environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "RESTART_COUNT")]
        return PrefixStore("/".join(["normscale", *start] if agent else ["normscale"]), store)

    def _judged(self, store: Store, mine: Facts) -> dict[str, Any]:
        if store.add(f"there{self.rank}", 1) > 1:
            store.set("twice", f"rank {self.rank} was started twice, once on {mine.host}; start each rank once")
        store.set(f"facts{self.rank}", json.dumps(asdict(mine)))
        if self.rank == 0:
            judged, readers = self._judge(store)
            store.set("judged", json.dumps(judged))
            if readers:
                _wait(lambda: store.add("read", 0) >= readers, LINGER_S)
            return judged
        if not _wait(lambda: store.check(["judged"]), self.limit_s + SLACK_S):
            came = [facts for rank in range(self.world) if (facts := _facts_of(store, rank))]
            line = missing(came, self.world, self.limit_s, self.planned)
            return {"error": line, "own": False, "speaker": came[0].rank}
        found: dict[str, Any] = json.loads(store.get("judged"))
        store.add("read", 1)
        return found

    def _judge(self, store: Store) -> tuple[dict[str, Any], int]:
        """Returns the judgement, and how many other ranks it should not leave alone before they have read it."""
        came: dict[int, Facts] = {}

        def wrong() -> str | None:
            for rank in set(range(self.world)) - came.keys():
                if facts := _facts_of(store, rank):
                    came[rank] = facts
            if store.check(["twice"]):
                return store.get("twice").decode()
            return difference([came[rank] for rank in sorted(came)], self.planned)

        line = None
        ended_s, late = time.monotonic() + self.limit_s, False
        while (line := wrong()) is None and len(came) < self.world and time.monotonic() < ended_s:
            if not late and any(facts.error for facts in came.values()):
                ended_s, late = min(ended_s, time.monotonic() + LATE_S), True
            time.sleep(POLL_S)
        everyone = [came[rank] for rank in sorted(came)]
        failed = next((facts for facts in everyone if facts.error), None)
        own = False
        if line is None and failed is not None:
            own = len(everyone) == self.world and all(facts.error == failed.error for facts in everyone)
            line = f"{failed}: {failed.error}"
        if line is None and len(everyone) < self.world:
            line = missing(everyone, self.world, self.limit_s, self.planned)
            return {"error": line, "own": False, "speaker": 0}, len(everyone) - 1
        if line := line or other_hosts(everyone, self.planned):
            return {"error": line, "own": own, "speaker": 0}, self.world - 1
        first = everyone[0]
        agreed = {"run": first.run, "hash": first.parts["hash"], "done": first.done, "fresh": first.fresh}
        return {**agreed, "hosts": [facts.host for facts in everyone]}, 0 if first.done is None else self.world - 1


def _facts_of(store: Store, rank: int) -> Facts | None:
    return Facts(**json.loads(store.get(f"facts{rank}"))) if store.check([f"facts{rank}"]) else None


def _wait(come: Callable[[], bool], limit_s: float) -> bool:
    """Returns whether it came true within the limit."""
    deadline = time.monotonic() + limit_s
    while not (came := come()) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return came


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            with suppress(ValueError):
                signal.signal(number, signal.SIG_IGN)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
