"""Configurations of every task, small, on text made here."""

from pathlib import Path
from typing import Any

import numpy as np

from normscale.config.schema import TASKS_OF, RunConfig

TASKS = [name for names in TASKS_OF.values() for name in names]
SIZES = {"decoder": {"N": 0, "M": 1}, "encoder": {"N": 1, "M": 0}, "encoder-decoder": {"N": 1, "M": 1}}


def text(n: int, seed: int = 0) -> bytes:
    """Returns n bytes in which some are much more frequent than others."""
    raw = np.random.default_rng(seed).random(n)
    return (97 + 26 * raw**2).astype(np.uint8).tobytes()


def write_pairs(base: Path, n: int, seed: int = 0) -> None:
    """Writes n lines of 4 to 11 bytes to each of base.en and base.de, each pair marked by its number."""
    rng = np.random.default_rng(seed)
    for ending in ("en", "de"):
        lines = [f"{i:03x}".encode() + text(int(rng.integers(1, 9)), seed=seed + i) for i in range(n)]
        base.with_name(f"{base.name}.{ending}").write_bytes(b"\n".join(lines) + b"\n")


def config_of(task: str, folder: Path, **sections: Any) -> RunConfig:
    """Returns the configuration of a task on text in `folder`, which is written there if it is not."""
    source = folder / "text.txt"
    if not source.exists():
        source.write_bytes(text(40_000))
        write_pairs(folder / "pairs", 400)
    data: dict[str, Any] = {"task": task}
    if task in ("lm", "mlm", "span"):
        data["source"] = str(source)
    elif task == "translation":
        data |= {"source": str(folder / "pairs"), "languages": ["en", "de"]}
    topology = next(topology for topology, tasks in TASKS_OF.items() if task in tasks)
    model = {"d": 16, "heads": 2, "context": 16, **SIZES[topology]}
    train = {"steps": 4, "batch": 4, "eval_batches": 2}
    base: dict[str, Any] = {"model": model, "data": data, "train": train}
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(base)
