"""A micro-batch between its begin and its end."""

import copy
from collections.abc import Callable, Mapping
from typing import Any


class MicroBatch:
    """What `Monitor.micro_batch` returns; in a `with`, an exception takes the micro-batch out of its window."""

    def __init__(self, batch: Any, end: Callable[[bool], None]) -> None:
        self.batch, self.end = batch, end

    def __enter__(self) -> Any:
        return self.batch

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(kind is None)


def shallow(batch: Any) -> Any:
    """Returns a batch whose outer container is its own, since losses pop labels from theirs."""
    return copy.copy(batch) if isinstance(batch, Mapping | list) else batch
