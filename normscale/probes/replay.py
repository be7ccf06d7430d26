"""A step that was not finite, run again under full hooks: which value went bad first.

The replay runs the model's own module and asks `torch.autograd.grad` for the gradients, so that no `.grad`, no reducer
and no state of a sharding engine is touched, and each rank sees its own gradients before any reduction. Random numbers
are drawn as they were. See `search` for how the first event with a part in the failure is told from others.

**Compiled models** are replayed eagerly, since hooks inside a graph do not run; nothing is compiled again. Where they
draw random numbers in a graph, the eager ones are others unless `torch._inductor.config.fallback_random` was set when
they were compiled. A replay that comes out finite returns None; whoever asked has other signs then.
"""

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from normscale.errors import ReplayRefused
from normscale.probes.agreement import meeting_place
from normscale.probes.buffers import AllBuffers
from normscale.probes.chance import RandomState, Sources
from normscale.probes.culprit import Culprit
from normscale.probes.mend import Mends
from normscale.probes.search import Search, search
from normscale.probes.walk import leaves
from normscale.probes.watch import LossOf, Watch


class Kept(NamedTuple):
    """A micro-batch by reference, the random state it was begun with, and the versions its tensors had then."""

    batch: Any
    random: RandomState
    versions: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def of(cls, batch: Any, sources: Sources) -> "Kept":
        """Returns a micro-batch that is about to run; the host does not wait."""
        return cls(batch, RandomState.capture(sources), _versions(batch))

    @property
    def rewritten(self) -> bool:
        """Whether a tensor of it was written to since."""
        return self.versions is not None and self.versions != _versions(self.batch)


def replay(
    model: nn.Module,
    kept: Sequence[Kept],
    loss_of: LossOf,
    *,
    parameters: Sequence[nn.Parameter] | None = None,
    all_of_them: bool = False,
) -> Culprit | None:
    """Returns the first value that is not finite in a window, None where the replay is finite throughout.

    A micro-batch counts as bad where its loss or the gradient of a parameter is not finite. Weights, gradients, buffers
    and random states are afterwards what they were. It begins with the buffers as they are: give it those of the
    window's beginning (`buffers.WindowBuffers`) where forward passes write some.

    Args:
        model: The module itself, out of the wrappers of DDP or DeepSpeed, in the mode it was trained in.
        kept: The window's micro-batches on this rank, in order.
        loss_of: Runs `model` on one of them and returns the scalar that `backward` was called on: under the same
            autocast, with the same factors.
        parameters: What to differentiate by; None takes every parameter as modules have it when they are called, which
            fits engines that shard.
        all_of_them: Every micro-batch is run to its end whatever was found, and all ranks make the same passes, since
            engines that shard gather parameters in them. Every rank of the process group calls then, and all leave it
            together: where a rank fails, the others return what they have, or raise. (Only an exception between two
            collectives of the model's own forward or backward leaves the others waiting in them, as it would in
            training.)

    Raises:
        ReplayRefused: the model's activation checkpointing allows no replay, another rank failed, or a micro-batch was
            written to after it ran, and is finite now.
    """
    passes: _Passes | None = None
    try:
        with torch.enable_grad(), _eager():
            if all_of_them:
                trouble: Exception | None = None
                try:
                    passes = _Passes(model, kept, loss_of, parameters, to_the_end=True)
                except Exception as error:
                    trouble = error
                if _any(trouble is not None)[0] or passes is None:
                    raise trouble or ReplayRefused(_ELSEWHERE)
                culprit = _together(passes)
            else:
                passes = _Passes(model, kept, loss_of, parameters, to_the_end=False)
                culprit = _alone(passes)
    finally:
        if passes is not None:
            passes.leave()
    rewritten = [index for index, one in enumerate(kept) if one.rewritten]
    if culprit is None and rewritten:
        raise ReplayRefused(
            f"micro-batch {rewritten[0]} was written to after it ran, so that the replay had other numbers, and was "
            "finite; hand over a batch of its own each time"
        )
    if culprit is not None and culprit.micro_batch in rewritten:
        said = "the micro-batch was written to after it ran: the replay had other numbers"
        culprit = culprit.noted(said)
    return culprit


_ELSEWHERE = "the replay failed on another rank"


class _Passes:
    """Runs micro-batches of a window, each with the buffers and random numbers it had."""

    def __init__(
        self,
        model: nn.Module,
        kept: Sequence[Kept],
        loss_of: LossOf,
        parameters: Sequence[nn.Parameter] | None,
        to_the_end: bool,
    ) -> None:
        self.model, self.kept, self.loss_of = model, kept, loss_of
        self.parameters, self.to_the_end = parameters, to_the_end
        self._after = RandomState.capture(Sources.of(model))
        self.buffers = AllBuffers(model)

    def run(self, index: int, mends: Mends | None = None) -> Watch:
        watch = Watch(self.model, index, mends)
        self.kept[index].random.restore()
        watch.run(self.kept[index].batch, self.loss_of, self.parameters, self.to_the_end)
        return watch

    def leave(self) -> None:
        """Puts everything back."""
        try:
            self.buffers.put_back()
        finally:
            self._after.restore()


def _alone(passes: _Passes) -> Culprit | None:
    refused = ""
    for index in range(len(passes.kept)):
        before = AllBuffers(passes.model)
        watch = passes.run(index)
        refused = refused or watch.refused
        if watch.failed:
            looking = search(watch)
            try:
                mends = next(looking)
                while True:
                    before.put_back()
                    try:
                        again = passes.run(index, mends)
                    except Exception as error:
                        return _untried(watch, f"{type(error).__name__}: {error}")
                    mends = looking.send(again)
            except StopIteration as end:
                culprit: Culprit | None = end.value
                return culprit
    if refused:
        raise ReplayRefused(refused)
    return None


class _Side:
    """One rank's side of a joint replay: what it looks for, and what stopped it."""

    def __init__(self, passes: _Passes) -> None:
        self.passes, self.failed = passes, -1
        self.bad: Watch | None = None
        self.mends: Mends | None = None  # of the pass that this rank asks for
        self.looking: Search | None = None
        self.culprit: Culprit | None = None
        self.trouble: Exception | None = None
        self.refused = ""

    def window(self) -> None:
        """Runs every micro-batch, whatever fails in one, and learns from the one that was bad."""
        self.passes.buffers.put_back()
        for index in range(len(self.passes.kept)):
            try:
                watch = self.passes.run(index, self.mends if index == self.failed else None)
                self.refused = self.refused or watch.refused
                if self.looking is None and watch.failed:
                    self.failed, self.bad, self.looking = index, watch, search(watch)
                    self._ask(None)
                elif index == self.failed and self.mends is not None:
                    self._ask(watch)
            except Exception as error:
                self.trouble = self.trouble or error

    def _ask(self, watch: Watch | None) -> None:
        assert self.looking is not None
        try:
            self.mends = next(self.looking) if watch is None else self.looking.send(watch)
        except StopIteration as end:
            self.culprit, self.mends = end.value, None


def _together(passes: _Passes) -> Culprit | None:
    """Does what `_alone` does, in whole windows, as many of them as the rank that needs most."""
    side = _Side(passes)
    side.window()
    while True:
        stopped, wanted = _any(side.trouble is not None, side.mends is not None)
        if stopped or not wanted:
            break
        side.window()
    if side.bad is not None and side.mends is not None:  # it was still asking
        error = side.trouble
        side.culprit = _untried(side.bad, _ELSEWHERE if error is None else f"{type(error).__name__}: {error}")
    if side.culprit is None and stopped:
        raise side.trouble or ReplayRefused(_ELSEWHERE)
    if side.culprit is None and side.refused:
        raise ReplayRefused(side.refused)
    return side.culprit


def _untried(watch: Watch, why: str) -> Culprit | None:
    """Returns the first event, where the passes that would try it could not be made."""
    first = watch.events.first
    if first is None:
        return None
    return watch.propagated(first).noted(f"it is the first event; whether it had a part was not tried: {why}")


def _any(*flags: bool) -> list[bool]:
    """Tells of each flag whether any rank has it."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return list(flags)
    votes = torch.tensor([int(flag) for flag in flags], device=meeting_place())
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return [bool(vote) for vote in votes.tolist()]


def _versions(batch: Any) -> tuple[tuple[int, int], ...]:
    """Returns what changes where a tensor of a micro-batch is written to."""
    return tuple((id(x), x._version) for _, x in leaves(batch, "") if not x.is_inference())


def _eager() -> AbstractContextManager[Any]:
    """Returns a context in which what was compiled runs eagerly, so that hooks inside it are called."""
    compiled = "torch._dynamo" in sys.modules  # slow to import, and nothing was compiled without
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
