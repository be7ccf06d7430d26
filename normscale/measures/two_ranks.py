"""Whether a norm's statistics, and the loss, are others when a batch is divided among two processes."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.errors import RunFailed
from normscale.models.builder import build
from normscale.norms import Norm

BATCH, BLOCKS, WORLD = 8, 4, 2
LIMIT_S = 240  # most of it is importing torch, on a busy machine
Over = Literal["row", "batch"]


def measure(seed: int, norm: str, over: Over, options: dict[str, bool] | None = None) -> dict[str, float]:
    """Returns, of a small Pre-Norm model on text, one forward pass over 8 sequences, by two ranks of 4 and by one of 8:

    - `statistics_apart`: the largest difference of the mean squares of the norms' inputs, over the largest of them.
      `row`: of each token, as LayerNorm and RMSNorm take them, nothing is sent between ranks; `batch`: over all tokens
      of a rank, as BatchNorm takes them;
    - `bits_apart`: the share of them that differ in any bit;
    - `loss_apart`: the difference of the mean losses (of the ranks, all-reduced), over the loss.

    `options` are those of the norm.
    """
    with tempfile.TemporaryDirectory(prefix="normscale-ranks-") as folder:
        given = json.dumps({"seed": seed, "norm": norm, "over": over, "options": options or {}, "folder": folder})
        command = [sys.executable, "-m", "normscale.measures.two_ranks", given]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(WORLD)
        ]
        try:
            said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            raise RunFailed(f"two_ranks: the ranks did not end within {LIMIT_S} s; the machine is too busy") from None
        finally:
            for rank in ranks:
                rank.kill()
        if any(rank.returncode for rank in ranks):
            raise RunFailed(f"two_ranks: a rank failed: {' '.join(said).strip().splitlines()[-1]}")
        found: dict[str, float] = json.loads((Path(folder) / "found.json").read_text(encoding="utf-8"))
        return found


def rank_main(given: dict[str, Any], rank: int) -> None:
    """Computes one rank's part, then the whole, as every rank does since a norm may ask the others; rank 0 compares."""
    torch.set_num_threads(1)
    seed, folder = int(given["seed"]), Path(given["folder"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    settings = {"model.scheme": "pre", "model.norm": given["norm"], "model.M": BLOCKS, "train.batch": BATCH}
    config = revise(RunConfig(), {**settings, "model.norm_options": given["options"], "seed": seed})
    task = load_task(config)
    model = build(config.model, task.vocab, seed)
    own, loss = _pass(model, task, seed, rank, WORLD, given["over"])
    parts = [torch.empty_like(own) for _ in range(WORLD)]
    dist.all_gather(parts, own)
    dist.all_reduce(loss)
    whole, truth = _pass(model, task, seed, 0, 1, given["over"])
    if rank == 0:
        # Two ranks have two statistics of their batches where one rank has one.
        divided = torch.cat(parts, dim=1)
        whole = whole.expand_as(divided)
        found = {
            "statistics_apart": float((divided - whole).abs().max() / whole.max()),
            "bits_apart": float((divided != whole).double().mean()),
            "loss_apart": float((loss / WORLD - truth).abs() / truth),
        }
        (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _pass(
    model: torch.nn.Module, task: object, seed: int, rank: int, world: int, over: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean squares of what each norm takes, and the mean loss, of one rank's share of the first batch.

    Shape: results [norms, tokens] or [norms, 1]; [].
    """
    seen: list[torch.Tensor] = []

    def look(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        squares = inputs[0].square().mean(-1).flatten()
        seen.append(squares if over == "row" else squares.mean(0, keepdim=True))

    hooks = [m.register_forward_pre_hook(look) for m in model.modules() if isinstance(m, Norm)]
    batch = Batches(task.train, batch=BATCH, seed=seed, rank=rank, world=world).window(0)[0]  # type: ignore[attr-defined]
    with torch.no_grad():
        logits = model(batch.tokens_BT, **batch.beside)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets_BT.flatten())
    for hook in hooks:
        hook.remove()
    return torch.stack(seen), loss


if __name__ == "__main__":
    rank_main(json.loads(sys.argv[1]), int(sys.argv[2]))
