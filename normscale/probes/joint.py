"""Passes that ranks make together: none begins one that another cannot make, and none is left waiting in one.

An engine that gathers weights as they are used does so by collectives in the middle of a pass. A probe that makes such
passes of its own, and fails on one rank alone, would leave the others in them until the process group gives up. So all
ranks say before each pass that they are there, and at the end of the method that made it; one that has failed says
that, and all leave. What may fail on one rank is done between passes, not within.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from normscale.arguments import is_lost_rank
from normscale.errors import RunFailed

WAIT_S = 5.0  # for other ranks to fail in a pass as this one did

_BROKEN = "normscale/broken"  # in the store: why the run ends


class Elsewhere(Exception):
    """Another rank has failed, and says why the next time that numbers are exchanged."""


class BrokenPass(RunFailed):
    """A rank has failed in the middle of a pass that others are still making: nobody can go on."""


class Joint:
    """What ranks say to each other around the passes they make together.

    Args:
        reduce_sum: values -> their sum over ranks.
        device: where those values are.
        recover: makes the model fit for passes again, after one that has failed at one place on all ranks.
    """

    def __init__(
        self,
        reduce_sum: Callable[[Tensor], Tensor],
        device: torch.device,
        rank: int,
        world: int,
        recover: Callable[[], None],
    ) -> None:
        self.reduce_sum, self.device, self.rank, self.world = reduce_sum, device, rank, world
        self.recover = recover
        self._what = ""  # what is being done; "" outside of a method
        self._over = True

    @contextmanager
    def method(self, what: str) -> Iterator[None]:
        """Surrounds what may make passes, by one name on every rank: it ends on all ranks alike, well or not.

        Raises:
            Elsewhere: it has failed on another rank.
            BrokenPass: it has failed in the middle of a pass that others are still making, here or elsewhere.
        """
        self._what, self._over = what, False
        try:
            yield
            self._say(done=True)
        except Exception as error:
            if is_lost_rank(error) and (said := _why()):
                raise BrokenPass(said) from error
            if not self._over and not is_lost_rank(error):
                self._say(failed=True)
            raise
        finally:
            self._what = ""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Surrounds one pass. Outside of a `method` it does nothing: then whoever calls has seen to it.

        Where it fails on every rank after the same collectives, as where memory runs out on all, training can go on.

        Raises:
            Elsewhere: another rank will not make it.
            BrokenPass: it has failed here, while others are still making it.
        """
        if not self._what:
            yield
            return
        self._say()
        begun = collectives(self.device)
        try:
            yield
        except Exception as error:
            if is_lost_rank(error):
                raise
            if begun is None or not self._alike(begun):
                self._over = True
                raise BrokenPass(self._told(error)) from error
            self.recover()
            raise

    def _say(self, failed: bool = False, done: bool = False) -> None:
        """Tells all ranks where this one is, and learns where they are."""
        if self._over:
            raise Elsewhere
        said = torch.tensor([failed, done], dtype=torch.float32, device=self.device)
        bad, ended = (int(count) for count in self.reduce_sum(said).tolist())
        self._over = bool(bad or ended)
        if failed:
            return
        if bad or (ended and not done):
            raise Elsewhere
        if ended not in (0, self.world):
            raise RuntimeError("it makes fewer passes here than on another rank")

    def _alike(self, begun: int) -> bool:
        """Returns whether all ranks have failed in a pass, each after as many collectives; waits shortly for them."""
        store, until = meeting_store(), time.monotonic() + WAIT_S
        keys = [f"normscale/pass/{begun}/{rank}" for rank in range(self.world)]
        store.set(keys[self.rank], str(collectives(self.device)))
        while not store.check(keys):
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return len({bytes(store.get(key)) for key in keys}) == 1

    def _told(self, error: Exception) -> str:
        """Returns what there is to say of a broken pass, having left it for the other ranks."""
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        said = (
            f"the probe {self._what} failed on rank {self.rank} in the middle of a pass that all ranks make together "
            f"({text}); the others cannot go on without it: switch that probe off"
        )
        meeting_store().set(_BROKEN, said)
        return said


def meeting_store() -> Any:
    """Returns the store by which the ranks have met: it answers whatever collectives they are in."""
    return dist.distributed_c10d._get_default_store()


def collectives(device: torch.device) -> int | None:
    """Returns how many collectives this process has begun, in all groups together; None if PyTorch does not say."""
    try:
        backends: list[Any] = [group._get_backend(device) for group in dist.distributed_c10d._world.pg_map]
        return int(sum(backend._get_sequence_number_for_group() for backend in backends))
    except (AttributeError, RuntimeError):
        return None


def _why() -> str:
    """Returns what a rank that has ended the run said of it; "" where none has, or cannot be asked any more."""
    try:
        store = meeting_store()
        return bytes(store.get(_BROKEN)).decode() if store.check([_BROKEN]) else ""
    except RuntimeError:
        return ""
