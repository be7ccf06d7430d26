"""One rank of the doctor's all-reduce. `launch doctor` sends it to each host as text, so it imports torch alone.

The argument is JSON: rank, world, `master` and `port` (or `file`, for ranks of one machine), backend, limit_s, numbers
(fp32, of the large message). It prints JSON: latency_s, bytes_s, init_s.
"""

import json
import statistics
import sys
import time
from datetime import timedelta
from typing import Any

SMALL_TIMES, LARGE_TIMES = 50, 5


def measure(settings: dict[str, Any]) -> dict[str, float]:
    """Returns how long a reduction of 8 bytes takes, and at what rate a large one goes over the slowest link.

    In a ring each rank sends, and receives, 2 (world - 1) / world of the message: the rate is that over the time.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import FileStore, TCPStore  # type: ignore[attr-defined]

    rank, world, limit = settings["rank"], settings["world"], timedelta(seconds=settings["limit_s"])
    if settings.get("file"):
        store: Any = FileStore(settings["file"], world)
    else:
        store = TCPStore(
            settings["master"], settings["port"], is_master=rank == 0, timeout=limit, wait_for_workers=False
        )
    begun = time.perf_counter()
    dist.init_process_group(settings["backend"], store=store, rank=rank, world_size=world, timeout=limit)
    device = "cuda:0" if settings["backend"] == "nccl" else "cpu"
    small, large = torch.ones(1, dtype=torch.float64, device=device), torch.ones(settings["numbers"], device=device)

    def times(values: torch.Tensor, count: int) -> list[float]:
        taken = []
        for _ in range(count):
            values.fill_(1.0)
            started = time.perf_counter()
            dist.all_reduce(values)
            if device != "cpu":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
            if not bool((values == world).all()):
                raise SystemExit(f"the sum over {world} ranks is wrong")
        return taken

    times(small, 2)
    init_s = time.perf_counter() - begun
    latency_s = statistics.median(times(small, SMALL_TIMES))
    large_s = statistics.median(times(large, LARGE_TIMES + 1)[1:])
    dist.barrier()
    return {
        "init_s": init_s,
        "latency_s": latency_s,
        "bytes_s": 2 * (world - 1) / world * 4 * settings["numbers"] / large_s,
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
