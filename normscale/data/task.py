"""What a model is trained on: numbered samples of two splits, each a pure function of its number.

A task turns text (or nothing, for synthetic ones) into samples. What is random about a sample, which tokens are hidden
or copied, depends on the run's seed and the sample's number alone, so that ranks, epochs and resumed runs agree.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch
from numpy.typing import NDArray
from torch import Tensor

from normscale.config.schema import RunConfig, TaskName

IGNORE = -100  # a target that no loss and no count includes


class MicroBatch(NamedTuple):
    """What one forward pass takes, and what it is to predict.

    Shape:
        tokens_BT: [B, T] int64, what the stack with the head reads.
        targets_BT: [B, T] int64, what it is to say at each position, or `IGNORE`.
        source_BS: [B, S] int64, what the encoder reads where there are two stacks.
        source_keep_BS: [B, S] bool, false at padding; None where there is none.
        segments_BT: [B, T] int64 segment numbers, for models that have segment vectors.
    """

    tokens_BT: Tensor
    targets_BT: Tensor
    source_BS: Tensor | None = None
    source_keep_BS: Tensor | None = None
    segments_BT: Tensor | None = None

    @property
    def inputs(self) -> dict[str, Tensor]:
        """What the model is called with, by name."""
        return {"tokens_BT": self.tokens_BT, **self.beside}

    @property
    def beside(self) -> dict[str, Tensor]:
        """What it is called with beside the tokens, by name."""
        named = self._asdict().items()
        return {name: value for name, value in named if name not in ("tokens_BT", "targets_BT") and value is not None}

    @property
    def n_targets(self) -> int:
        """The number of targets that count."""
        return int((self.targets_BT != IGNORE).sum())

    def parts(self, size: int) -> Iterator["MicroBatch"]:
        """Yields the same in parts of at most `size` sequences."""
        for start in range(0, len(self.tokens_BT), size):
            yield MicroBatch(*(None if x is None else x[start : start + size] for x in self))  # type: ignore[arg-type]

    def to(self, device: torch.device) -> "MicroBatch":
        """Returns the same on a device."""
        return MicroBatch(*(None if value is None else value.to(device) for value in self))  # type: ignore[arg-type]


class Samples(Protocol):
    """One split of a task."""

    def __len__(self) -> int: ...

    def batch(self, samples: NDArray[Any]) -> MicroBatch:
        """Returns the samples with these numbers, on the CPU.

        Shape:
            samples: [B] int64.
        """
        ...


@dataclass(frozen=True, eq=False)
class Task:
    """A task with its data.

    Attributes:
        vocab: number of different tokens, special ones included.
        digest: of everything that samples are made from but the configuration.
        frequencies: how often each token is a target in training, up to a factor: [vocab], or [T, vocab] by position
            where the position alone says much of the target. What a model reaches that knows these alone is the
            unigram entropy.
    """

    name: TaskName
    vocab: int
    digest: str
    train: Samples
    held_out: Samples
    frequencies: NDArray[Any]
    told: Mapping[str, str | int | float] = field(default_factory=dict)

    def facts(self) -> dict[str, str | int | float]:
        """Returns what a record says about the data."""
        return {"task": self.name, "vocab": self.vocab, "digest": self.digest, **self.told}


DRAWN: tuple[TaskName, ...] = ("mlm", "span", "copy", "reverse")
"""Tasks whose samples depend on the run's seed; the corpus of another is read, and made subwords of, once for all."""


def load_task(config: RunConfig) -> Task:
    """Returns the task of a run, read once a process for each different one.

    Raises:
        DataError: the text cannot be read, or is too short for one batch.
    """
    return _load(config.task, _Key(config))


class _Key:
    """A configuration that counts as equal to another when both make the same task."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        seed = config.seed if config.task in DRAWN else None
        self.parts = (config.data, config.model.context, config.model.segments, seed, config.train.batch)

    def __hash__(self) -> int:
        return hash(self.parts[1:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.parts == other.parts


@functools.lru_cache(maxsize=4)
def _load(name: TaskName, key: _Key) -> Task:
    make: Callable[[RunConfig], Task] = import_module(f"normscale.data.tasks.{name}").make
    return make(key.config)
