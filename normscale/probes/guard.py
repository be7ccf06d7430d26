"""Keeps what goes wrong in a probe away from training, on one rank or on several."""

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from normscale.arguments import debugging, is_lost_rank, to_stderr
from normscale.probes.joint import BrokenPass, Elsewhere, Joint
from normscale.probes.probe import Array, Hand, Probe, Reading, Reduction, Transfer

Layout = dict[str, tuple[int, Reduction]]
Reduce = Callable[[Tensor], Tensor]

REASON = 200  # characters of a reason that travel between ranks


class Sent(NamedTuple):
    """What the probes have handed over of one step, on its way to the host, and how ranks combine."""

    probes: list[Probe]
    transfer: Transfer
    reduce_sum: Reduce
    reduce_max: Reduce

    @property
    def ready(self) -> bool:
        """Whether it can be received without waiting."""
        return self.transfer.ready


class Guard:
    """The probes of a run; the first exception of one switches it off for the rest of the run, and training goes on.

    Ranks make the same collectives whatever fails where. A rank on which a probe has failed hands over zeros of the
    shapes that this probe last handed over, and a flag; the flags are summed together with the numbers, so that all
    ranks switch the probe off at the same step and drop what it gave. Before a probe has handed over for the first
    time its shapes are not known: then the flags travel ahead, in one collective more.

    Whether a probe is due has to be the same on every rank, too. Whoever has a collective to make at each step sends
    the `votes` with it and says `agreed` what they came to: a probe is due where it is on any rank. Without that, a
    probe's `due` must go by the step and the settings alone.

    Passes that ranks make together (an engine that `gathers`) are begun and ended by all, by way of `joint`.

    `off` {name: reason} are the probes that are switched off on every rank.
    """

    def __init__(
        self,
        probes: Sequence[Probe],
        device: torch.device | None = None,
        rank: int = 0,
        world: int = 1,
        joint: Joint | None = None,
    ) -> None:
        self.probes, self.rank, self.world, self.joint = list(probes), rank, world, joint
        self.device = torch.device("cpu") if device is None else device
        self.off: dict[str, str] = {}
        self._failed: dict[str, str] = {}  # here; the other ranks may not know yet
        self._elsewhere: set[str] = set()  # on another rank, which is still to say why
        self._due: dict[str, bool] = {}  # at the step at hand, on every rank
        self._told: set[str] = set()
        self._news: list[tuple[str, str]] = []
        self._layouts: dict[tuple[str, bool], Layout] = {}
        self._states: dict[str, dict[str, Any]] = {}

    @property
    def active(self) -> list[Probe]:
        """The probes that are not switched off."""
        return [probe for probe in self.probes if probe.name not in self.off]

    def works(self, probe: Probe) -> bool:
        """Tells whether a probe has not failed on this rank, of which the others may not know yet."""
        return probe.name not in self.off and not self._fails(probe)

    def call(self, method: str, *arguments: Any) -> None:
        """Calls a method of every probe."""
        for probe in self.active:
            if self.joint is not None and self._makes_passes(probe, method, *arguments):
                self._try_together(self.joint, probe, method, *arguments)
            else:
                self._try(probe, method, *arguments)

    def votes(self, step: int) -> list[int]:
        """Returns for each active probe whether it wants `step` measured, as a number that ranks can add up."""
        self._due = {probe.name: self._wants(probe, step) for probe in self.active}
        return [int(due) for due in self._due.values()]

    def agreed(self, votes: Sequence[int]) -> bool:
        """Takes the sums of such votes over ranks; returns whether a probe wants the step measured."""
        self._due = {name: vote > 0 for name, vote in zip(self._due, votes, strict=True)}
        return any(votes)

    def due(self, step: int) -> bool:
        """Tells whether a probe wants `step` measured, on this rank."""
        return any(self.votes(step))

    def buffers(self) -> dict[str, Tensor]:
        """Returns the tensors that probes want the model to fill, by their field of `ops.statistics.Buffers`."""
        found: dict[str, Tensor] = {}
        for probe in self.active:
            found |= self._try(probe, "buffers") or {}
        return found

    def collect(self, step: int, reduce_sum: Reduce, reduce_max: Reduce) -> list[Reading]:
        """Returns the readings of a measured step; all ranks call it together."""
        return self.receive(self.send(step, reduce_sum, reduce_max))

    def send(self, step: int, reduce_sum: Reduce, reduce_max: Reduce) -> "Sent":
        """Sends what probes hand over of a measured step to the host, to be received later; all ranks together."""
        keys = {probe.name: (probe.name, self._is_due(probe, step)) for probe in self.active}
        self._due = {}
        given = {probe.name: self._handed(probe, keys[probe.name]) for probe in self.active if probe.name in keys}
        if self.world > 1 and any(keys[probe.name] not in self._layouts for probe in self.active):
            self._agree(self.active, reduce_sum(self._flags()).tolist(), reduce_sum, reduce_max)
            for probe in self.active:
                self._layouts.setdefault(keys[probe.name], _layout(given[probe.name]))
        probes = self.active
        hands = [self._zeros(keys[p.name]) if self._fails(p) else given[p.name] for p in probes]
        if self.world > 1:
            hands.append({"failed": Hand(self._flags(), "sum")})
        return Sent(probes, Transfer(hands, reduce_sum, reduce_max), reduce_sum, reduce_max)

    def receive(self, sent: "Sent", alone: bool = False) -> list[Reading]:
        """Returns the readings of what was sent; all ranks call it together.

        A rank that is `alone`, since the others may have ended, drops what a probe gave that had failed on any.
        """
        probes, found = sent.probes, sent.transfer.arrays()
        if self.world > 1:
            flags = found.pop()["failed"]
            if alone:
                for probe, flag in zip(probes, flags, strict=True):
                    if flag:
                        self._switch_off(probe.name, self._failed.get(probe.name, "it failed on another rank"))
            else:
                self._agree(probes, flags, sent.reduce_sum, sent.reduce_max)
        readings = [self._try(probe, "read", values) for probe, values in zip(probes, found, strict=True)]
        return [reading for reading in readings if reading is not None]

    def news(self) -> list[tuple[str, str]]:
        """Returns (name, reason) of the probes that were switched off since it was last asked."""
        news, self._news = self._news, []
        return news

    def seconds(self) -> dict[str, float]:
        """Returns the seconds of each probe's own passes, of those that make any."""
        return {probe.name: probe.stopwatch.seconds for probe in self.probes if probe.stopwatch is not None}

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to survive a restart; a probe that cannot say has the state it said last."""
        for probe in self.probes:
            state = self._try(probe, "state_dict")
            if state is not None:
                self._states[probe.name] = dict(state)
        return {"off": dict(self.off), **{probe.name: self._states.get(probe.name, {}) for probe in self.probes}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        self.off = {name: str(reason) for name, reason in state["off"].items()}
        for probe in self.probes:
            self._states[probe.name] = dict(state[probe.name])
            self._try(probe, "load_state_dict", state[probe.name])

    def _try(self, probe: Probe, method: str, *arguments: Any) -> Any:
        """Returns what a method of a probe gives; None where it fails or has failed before."""
        if not self.works(probe):
            return None
        try:
            return getattr(probe, method)(*arguments)
        except Exception as error:
            self._fail(probe, method, error)
            return None

    def _try_together(self, joint: Joint, probe: Probe, method: str, *arguments: Any) -> None:
        """Calls a method that makes passes; a rank on which the probe has failed takes part to say so."""
        try:
            with joint.method(f"{probe.name!r}"):
                if self._fails(probe):
                    raise _Before
                getattr(probe, method)(*arguments)
        except _Before:
            return
        except Elsewhere:
            self._elsewhere.add(probe.name)
        except BrokenPass:
            raise
        except Exception as error:
            if is_lost_rank(error):  # which no probe has brought about
                raise
            self._fail(probe, method, error)

    def _makes_passes(self, probe: Probe, method: str, *arguments: Any) -> bool:
        if not probe.passes or method not in ("attach", "after_step"):
            return False
        return method == "attach" or self._is_due(probe, *arguments)

    def _is_due(self, probe: Probe, step: int) -> bool:
        """Returns what ranks have agreed on; without that each asks for itself."""
        return self._due[probe.name] if probe.name in self._due else self._wants(probe, step)

    def _fails(self, probe: Probe) -> bool:
        return probe.name in self._failed or probe.name in self._elsewhere

    def _wants(self, probe: Probe, step: int) -> bool:
        """Asks a probe that has failed here alone, too: the other ranks ask theirs."""
        try:
            return bool(probe.due(step))
        except Exception as error:
            self._fail(probe, "due", error)
            return False

    def _handed(self, probe: Probe, key: tuple[str, bool]) -> Mapping[str, Hand]:
        hands = self._try(probe, "hand_over")
        if hands is None:
            return {}
        try:
            layout = _layout(hands)
            known = self._layouts.get(key, layout) if self.world > 1 else layout
            if layout != known:
                raise ValueError(f"it handed over {layout} and {known} before")
            return dict(hands)
        except Exception as error:
            self._fail(probe, "hand_over", error)
            return {}

    def _fail(self, probe: Probe, method: str, error: Exception) -> None:
        if debugging():
            to_stderr("".join(traceback.format_exception(error)))
        text = " ".join(str(error).split())
        reason = f"{method}: {type(error).__name__}" + (f": {text}" if text else "")
        self._failed.setdefault(probe.name, reason[:REASON])
        if self.world == 1:
            self._switch_off(probe.name, self._failed[probe.name])
        elif method == "read" and self.rank == 0:  # this rank's readings are what is recorded, and this may be the last
            self._tell(probe.name, self._failed[probe.name])

    def _switch_off(self, name: str, reason: str) -> None:
        if name not in self.off:
            self.off[name] = reason
            self._tell(name, reason)

    def _tell(self, name: str, reason: str) -> None:
        if name in self._told:
            return
        self._told.add(name)
        self._news.append((name, reason))
        if self.rank == 0:
            to_stderr(f"the probe {name!r} is switched off ({reason}); training goes on without it")

    def _flags(self) -> Tensor:
        """Returns a 1 for each active probe that has failed here."""
        flags = torch.zeros(len(self.active), dtype=torch.float64, device=self.device)
        for i, probe in enumerate(self.active):
            if probe.name in self._failed:
                flags[i] = 1
        return flags

    def _zeros(self, key: tuple[str, bool]) -> dict[str, Hand]:
        return {
            name: Hand(torch.zeros(size, dtype=torch.float64, device=self.device), reduction)
            for name, (size, reduction) in self._layouts[key].items()
        }

    def _agree(
        self, probes: Sequence[Probe], flags: "Sequence[float] | Array", reduce_sum: Reduce, reduce_max: Reduce
    ) -> None:
        """Switches off what has failed on any rank, with the reason of the first such rank; `flags` are the sums."""
        self._elsewhere.clear()
        names = [probe.name for probe, flag in zip(probes, flags, strict=True) if flag]
        if not names:
            return
        mine = [self.world - self.rank if name in self._failed else 0 for name in names]
        first = reduce_max(torch.tensor(mine, dtype=torch.float64, device=self.device)).tolist()
        texts = torch.zeros(len(names), 4 * REASON, dtype=torch.float64, device=self.device)
        for row, name, own, chosen in zip(texts, names, mine, first, strict=True):
            if own == chosen:  # then it is this rank that speaks
                letters = self._failed[name].encode()
                row[: len(letters)] = torch.tensor(list(letters), dtype=torch.float64, device=self.device)
        for name, chosen, row in zip(names, first, reduce_sum(texts).tolist(), strict=True):
            reason = bytes(int(letter) for letter in row if letter).decode(errors="replace")
            self._failed.setdefault(name, reason)
            self._switch_off(name, f"rank {self.world - int(chosen)}: {reason}")


class _Before(Exception):
    """A probe has failed on this rank before."""


def _layout(hands: Mapping[str, Hand]) -> Layout:
    for name, (_, reduction) in hands.items():
        if reduction not in get_args(Reduction):
            raise ValueError(f"{name}: {reduction!r} is no way to combine ranks")
    return {name: (values.numel(), reduction) for name, (values, reduction) in hands.items()}
