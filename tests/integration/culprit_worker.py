"""One of two ranks: agrees with the other on culprits, and replays together with it.

It is started as `python -m tests.integration.culprit_worker`, with torch's variables for ranks in the environment.
"""

import math

import torch
import torch.distributed as dist

from normscale.probes.agreement import agree
from normscale.probes.replay import Kept, RandomState, replay
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

    kept = [Kept(torch.randn(3, 4), RandomState.capture(torch.device("cpu"))) for _ in range(2)]
    found = agree(replay(model, kept, loss_of, all_of_them=True))
    assert found is not None
    assert (found.module, found.kind, found.rank, found.micro_batch) == ("bad", "-Inf", 1, 0)
    counts = torch.tensor([len(passes), -len(passes)])
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    assert counts[0] == -counts[1] > 2


def main() -> None:
    dist.init_process_group("gloo")
    agreements(dist.get_rank())
    together(dist.get_rank())
    dist.destroy_process_group()


main()
