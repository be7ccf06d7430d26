"""What DeepSpeed needs of a model: its autocast inside, its features by a call, its blocks not compiled."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from normscale.models.stack import Transformer


def computing_within(model: Transformer, context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Puts a context inside a forward: on CUDA DeepSpeed switches off an autocast that stands around its own."""
    forward = model.forward

    def within(*args: Any, **kwargs: Any) -> Tensor:
        with context():
            return forward(*args, **kwargs)

    model.forward = within  # type: ignore[method-assign]


def uncompiled(model: Transformer) -> bool:
    """Takes back the compilation of blocks, which ZeRO-3's hooks break into pieces; returns whether there was any."""
    taken = [vars(block).pop("forward", None) is not None for block in model.blocks]
    return any(taken)


class Called:
    """A model whose `features` are a call of the model itself, since ZeRO-3 hands its parameters to calls alone."""

    def __init__(self, inner: Transformer) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._inner(*args, **kwargs)

    def features(self, *args: Any, **kwargs: Any) -> Any:
        own = vars(self._inner)
        before = own.get("forward")
        own["forward"] = self._inner.features
        try:
            return self._inner(*args, **kwargs)
        finally:
            if before is None:
                del own["forward"]
            else:
                own["forward"] = before
