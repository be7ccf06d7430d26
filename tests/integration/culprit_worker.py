"""One of two ranks: agrees with the other on culprits, and replays together with it.

It is started as `python -m tests.integration.culprit_worker`, with torch's variables for ranks in the environment.
"""

import math
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from normscale.probes import replay as replays
from normscale.probes.agreement import agree
from normscale.probes.chance import RandomState, Sources
from normscale.probes.culprit import Culprit
from normscale.probes.replay import Kept, replay
from tests.probes.test_agreement import culprit
from tests.probes.test_replay import Masked, Spoil, alibi


def agreements(rank: int) -> None:
    """Only the first, only the second, both, none; the same on both ranks each time."""
    one = agree(culprit(module="first") if rank == 0 else None)
    assert one is not None
    assert (one.module, one.rank) == ("first", 0)
    other = agree(culprit(module="second", note="α") if rank == 1 else None)
    assert other is not None
    assert (other.module, other.rank, other.note) == ("second", 1, "α")
    both = agree(culprit(micro_batch=2 - rank, module=f"of {rank}"))
    assert both is not None
    assert (both.module, both.rank, both.micro_batch) == ("of 1", 1, 1)
    assert agree(None) is None


def together(rank: int) -> None:
    """A rank with a doubt makes more passes; the other makes as many."""
    model = Masked(Spoil(-math.inf) if rank == 1 else None)
    passes: list[int] = []

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(torch.zeros(1))  # as an engine that shards would gather
        passes.append(1)
        return model(batch, alibi()).square().mean()  # type: ignore[no-any-return]

    kept = [Kept(torch.randn(3, 4), RandomState.capture(Sources())) for _ in range(2)]
    found = agree(replay(model, kept, loss_of, all_of_them=True))
    assert found is not None
    assert (found.module, found.kind, found.rank, found.micro_batch) == ("bad", "-Inf", 1, 0)
    counts = torch.tensor([len(passes), -len(passes)])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    assert counts[0] == -counts[1] > 2


def leaving(rank: int) -> None:
    """A rank that fails takes the other with it; what that has found is what both get."""

    def attempt(fails: Callable[[int], bool], bad: nn.Module | None) -> tuple[Culprit | None, str, int]:
        """Rank 1 raises in some calls of its loss; rank 0 has a model with something bad."""
        model, calls, why, found = Masked(bad if rank == 0 else None), 0, "", None

        def loss_of(batch: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            dist.all_reduce(torch.zeros(1))  # as an engine that shards would gather
            if rank == 1 and fails(calls):
                raise RuntimeError("mine")
            return model(batch, alibi()).square().mean()  # type: ignore[no-any-return]

        kept = [Kept(torch.randn(3, 4), RandomState.capture(Sources())) for _ in range(2)]
        try:
            found = replay(model, kept, loss_of, all_of_them=True)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        return agree(found), why, calls

    mine = ["ReplayRefused: the replay failed on another rank", "RuntimeError: mine"]
    culprit, why, calls = attempt(lambda call: call == 1, None)  # nothing is bad
    assert (culprit, why, calls) == (None, mine[rank], 2)
    culprit, why, calls = attempt(lambda call: call == 1, Spoil(math.nan))
    assert culprit is not None
    assert (culprit.module, culprit.rank, calls) == ("bad", 0, 2)
    assert culprit.note.endswith("whether it had a part was not tried: the replay failed on another rank")
    assert why == ["", mine[1]][rank]
    culprit, why, calls = attempt(lambda call: call == 4, Spoil(math.nan))  # in the second window
    assert culprit is not None
    assert (culprit.module, culprit.rank, calls, why) == ("bad", 0, 4, ["", mine[1]][rank])
    if rank == 1:
        replays.AllBuffers = never  # type: ignore[assignment,misc]
    culprit, why, calls = attempt(lambda call: False, Spoil(math.nan))
    assert (culprit, why, calls) == (None, [mine[0], "MemoryError: "][rank], 0)


def never(model: nn.Module) -> None:
    raise MemoryError


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    agreements(dist.get_rank())
    together(dist.get_rank())
    leaving(dist.get_rank())
    dist.destroy_process_group()


main()
