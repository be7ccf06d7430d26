"""A launch over several hosts: connects them, starts their ranks, and ends all of them when one fails."""

import queue
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from launch.failures import Failure, first_of, signal_name
from launch.hostfile import Host
from launch.local import PREEMPTED, stops
from launch.remote import Event, Remote
from launch.supervise import STOPS, heed, passed_on
from launch.wire import BEAT_S, LOST_AFTER_S
from normscale.arguments import debugging, to_stderr
from normscale.errors import LaunchError
from normscale.planned import code_hash

CONNECT_S = 30.0
AFTER_FAILURE_S = 10.0  # what the ranks of other hosts have to end by themselves
GRACE_S = 30.0  # what ranks have to save a checkpoint after a signal
ENDING_S = 15.0  # what an agent has to end what is left, and to say so
TICK_S = 0.5


@dataclass(frozen=True)
class Task:
    """What one host runs; `ranks` is whether these are ranks, which fail together."""

    argv: tuple[str, ...]
    env: dict[str, str] = field(repr=False)
    first_rank: int = 0
    ranks: bool = True


@dataclass(frozen=True)
class Limits:
    """Time limits of a launch, in seconds."""

    grace_s: float = GRACE_S
    lost_after_s: float = LOST_AFTER_S
    connect_s: float = CONNECT_S
    after_failure_s: float = AFTER_FAILURE_S


@dataclass(frozen=True)
class Site:
    """A connected host: what its agent said of it. `port` is the first host's, where the ranks meet."""

    host: Host
    hostname: str
    cores: int
    gpus: int
    port: int = 0


Connect = Callable[[Host], Sequence[str]]
Plan = Callable[[list[Site]], list[Task]]


class Job:
    """Use it as a context: its end is the end of every agent."""

    def __init__(self, hosts: Sequence[Host], connect: Connect, limits: Limits) -> None:
        self._hosts, self._connect, self._limits = list(hosts), connect, limits
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._remotes: list[Remote] = []
        self._noted: list[int] = []
        self._failures: list[Failure] = []
        self._unexplained: list[tuple[Remote, dict[str, Any]]] = []
        self._deadline: float | None = None
        self._told, self._passed = 0, set[int]()
        self._beaten = 0.0
        self._together = True  # what the hosts run are ranks, which fail together

    def __enter__(self) -> "Job":
        for host in self._hosts:
            self._remotes.append(Remote(host, self._connect(host), self._events))
        return self

    def __exit__(self, *_: object) -> None:
        deadline = time.monotonic() + ENDING_S
        for remote in self._remotes:
            remote.close(max(0.1, deadline - time.monotonic()))

    def sites(self, port: int | None = None, master: str | None = None, by_name: bool = False) -> list[Site]:
        """Returns the hosts once all have answered; `port` (0: a free one) is asked of the first.

        With `by_name`, ranks will find each other by the names that their hosts have.

        Raises:
            LaunchError: a line for each host that cannot be reached, runs other code, or could not meet the others.
        """
        self._gather("hello", "no answer", self._limits.connect_s)
        self._refuse([(one, wrong) for one in self._remotes if (wrong := _differs(one))])
        self._refuse(_twice(self._remotes))
        first = (self._remotes[0].hello or {})["host"]
        several = by_name and len({(remote.hello or {})["host"] for remote in self._remotes}) > 1
        for remote in self._remotes:
            ask: dict[str, Any] = {"lost_after": self._limits.lost_after_s, "master": master, "first": first}
            ask["several"] = several
            remote.send(ask=ask | ({"port": port} if port is not None and remote is self._remotes[0] else {}))
        self._gather("answer", "no answer", self._limits.connect_s)
        answers = [(one, one.answer or {}) for one in self._remotes]
        self._refuse([(one, wrong) for one, said in answers for wrong in said["wrong"]])
        found = int(answers[0][1].get("port", 0))
        if master is not None and found:
            for remote in self._remotes:
                remote.send(reach=[master, found])
            self._gather("reached", "no answer", self._limits.connect_s)
            self._refuse([(one, one.reached) for one in self._remotes if one.reached])
        return [_site(one, found) for one in self._remotes]

    def run(self, tasks: Sequence[Task]) -> int:
        """Starts the tasks, one a host, and returns the exit code of the launch: the first failing rank's."""
        heed(self._note)
        self._together = all(task.ranks for task in tasks)
        for remote, task in zip(self._remotes, tasks, strict=True):
            remote.labelled = not self._together and len(tasks) > 1
            start = {"argv": task.argv, "env": task.env, "first_rank": task.first_rank, "ranks": task.ranks}
            remote.send(start=start)
        while not all(remote.over for remote in self._remotes):
            self._turn()
            self._pass_signals_on()
            if self._together and self._deadline is None and (self._failures or self._unexplained):
                self._stop_all(self._limits.after_failure_s)
        return self._result()

    def _turn(self) -> None:
        """Waits a moment for what the agents say, and tells them that we are here."""
        began = time.monotonic()
        if began - self._beaten >= BEAT_S:
            self._beaten = began
            for remote in self._remotes:
                remote.send(beat=True)
        try:
            remote, message = self._events.get(timeout=TICK_S)
        except queue.Empty:
            pass
        else:
            self._heed(remote, message)
        now = time.monotonic()
        if now - began > TICK_S + 5.0:  # we were stopped: their silence is ours
            for remote in self._remotes:
                remote.heard = now
        late = self._deadline is not None and now > self._deadline
        for remote in self._remotes:
            if not remote.over and late:
                self._lose(remote, f"did not end within {ENDING_S:.0f} s of being told to")
            elif not remote.over and remote.silent_s() > self._limits.lost_after_s:
                self._lose(remote, f"no sign of life for {self._limits.lost_after_s:.0f} s")

    def _heed(self, remote: Remote, message: dict[str, Any] | None) -> None:
        if message is None:
            if not remote.over:
                self._lose(remote, remote.why_lost())
        elif "hello" in message:
            remote.hello = message["hello"]
        elif "answer" in message:
            remote.answer = message["answer"]
        elif "reached" in message:
            remote.reached = message["reached"]
        elif "failed" in message:
            self._failures.append(Failure(**message["failed"]).at(remote.host.name))
        elif "end" in message:
            remote.end = end = message["end"]
            if end["failure"] is not None:
                self._failures.append(Failure(**end["failure"]).at(remote.host.name))
            elif end["code"] != 0:
                self._unexplained.append((remote, end))

    def _lose(self, remote: Remote, reason: str) -> None:
        last_heard = time.time_ns() - int(1e9 * (time.monotonic() - remote.heard))
        remote.give_up(reason)
        if remote.hello is not None:
            self._failures.append(Failure(-1, 1, f"{remote.host.name}: {reason}", t=last_heard))

    def _gather(self, what: str, otherwise: str, limit_s: float) -> None:
        """Waits until every host has said it, and refuses the launch for those that do not."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if all(remote.over or getattr(remote, what) is not None for remote in self._remotes):
                break
            self._turn()
        silent = f"{otherwise} within {limit_s:.0f} s; is it on, and does `ssh HOST true` work without a question?"
        wrong = [(one, one.lost or silent.replace("HOST", one.host.name)) for one in self._remotes]
        self._refuse([(one, why) for one, why in wrong if getattr(one, what) is None])

    def _refuse(self, wrong: Sequence[tuple[Remote, str]]) -> None:
        if wrong:
            raise LaunchError("\n".join(f"{one.host.name}: {why}{one.host.where}" for one, why in wrong))

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)

    def _pass_signals_on(self) -> None:
        """Passes on the first signal of each kind; a second one that ends a launch ends it at once."""
        fresh, self._told = self._noted[self._told :], len(self._noted)
        for number in fresh:
            if number not in self._passed:
                self._passed.add(number)
                for remote in self._remotes:
                    remote.send(signal=passed_on(number))
            if number in STOPS:
                self._stop_all(self._limits.grace_s if len(stops(self._noted)) == 1 else 0.0)

    def _stop_all(self, grace_s: float) -> None:
        for remote in self._remotes:
            remote.send(stop=grace_s)
        self._deadline = time.monotonic() + grace_s + ENDING_S

    def _result(self) -> int:
        """Says why the launch failed, unless rank 0 has said it, and returns its exit code."""
        if debugging():
            for remote in self._remotes:
                _show(remote, (remote.end or {}).get("noise", ""))
        failure, stopped = first_of(self._failures), stops(self._noted)
        own = failure is None or failure.stopped or failure.followed or not failure.told
        if stopped and own:
            to_stderr(f"stopped by {signal_name(stopped[0])}")
            return 128 + stopped[0]
        if signal.SIGUSR1 in self._noted and failure and failure.error.startswith("was killed by SIGUSR1"):
            to_stderr("stopped by SIGUSR1")  # before the ranks were ready for it
            return PREEMPTED
        if failure is not None and (failure.rank != 0 or not failure.told):
            to_stderr(failure.says() if self._together else failure.error)
        if failure is not None:
            return failure.exit_code
        if not self._unexplained:
            return 0
        remote, end = self._unexplained[0]
        _show(remote, end["noise"])
        to_stderr(f"{remote.host.name}: what it was to run ended with exit code {end['code']}")
        return int(end["code"])


def _differs(remote: Remote) -> str | None:
    code = (remote.hello or {})["code"]
    if code == code_hash():
        return None
    return (
        f"its copy of normscale is another ({code}, here {code_hash()}); copy this checkout there, or give --remote-dir"
    )


def _twice(remotes: Sequence[Remote]) -> list[tuple[Remote, str]]:
    """Returns the hosts that stand in the hostfile already, by another name."""
    found: dict[str, Remote] = {}
    again = []
    for remote in remotes:
        machine = (remote.hello or {}).get("machine")
        if machine and found.setdefault(machine, remote) is not remote:
            says = f"is the same host as {found[machine].host.name}; write it once, with all its slots"
            again.append((remote, says))
    return again


def _site(remote: Remote, port: int) -> Site:
    hello = remote.hello or {}
    return Site(remote.host, hello["host"], hello["cores"], hello["gpus"], port)


def _show(remote: Remote, noise: str) -> None:
    for line in [*noise.splitlines(), *remote.words()]:
        print(f"{remote.host.name}: {line}", file=sys.stderr, flush=True)
