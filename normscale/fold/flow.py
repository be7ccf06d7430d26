"""What becomes of each tensor in one pass of a model: which operation makes it, which ones read it.

What may be folded into what follows from this and from nothing that a scheme would have to say of itself.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, resolve_name

from normscale.models.stack import Transformer
from normscale.norms import Norm


@dataclass(frozen=True, eq=False)
class Op:
    """One operation of the pass. A norm, whatever it is made of, is one operation and names its module as `norm`."""

    name: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    norm: str | None = None
    call: tuple[Any, ...] = ()  # all arguments in order, tensors or not


@dataclass
class Flow:
    """The operations of one pass, by the tensors that they make and read. Tensors are told apart by identity."""

    ops: list[Op] = field(default_factory=list)
    _maker: dict[int, Op] = field(default_factory=dict)
    _readers: dict[int, list[Op]] = field(default_factory=dict)

    def add(self, op: Op) -> None:
        """Takes in an operation, unless all it does is to hand on one of its inputs."""
        ids = {id(x) for x in op.inputs}
        if not op.outputs or any(id(x) in ids for x in op.outputs):
            return
        self.ops.append(op)
        self._maker |= {id(x): op for x in op.outputs}
        for key in ids:
            self._readers.setdefault(key, []).append(op)

    def maker(self, x: Tensor) -> Op | None:
        """Returns the operation that made a tensor, None for a parameter, a buffer or an input of the model."""
        return self._maker.get(id(x))

    def readers(self, x: Tensor) -> list[Op]:
        """Returns the operations that read a tensor, in the order of the pass."""
        return self._readers.get(id(x), [])

    def of_norm(self, name: str) -> list[Op]:
        """Returns the calls of one norm."""
        return [op for op in self.ops if op.norm == name]


@torch.no_grad()
def flow_of(model: Transformer, inputs: Mapping[str, Tensor]) -> Flow:
    """Returns the flow of one pass over `inputs`: the model is to be in evaluation mode, eager, on its eager norms."""
    found = Flow()
    with _Watch(found) as watch, _norms_as_one(model, found, watch):
        model(**inputs)
    return found


class _Watch(TorchFunctionMode):
    """Notes every call of PyTorch, but for those inside a norm."""

    def __init__(self, flow: Flow) -> None:
        super().__init__()
        self.flow, self.quiet = flow, False

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.quiet:
            call = (*args, *(kwargs or {}).values())
            name = (resolve_name(func) or getattr(func, "__name__", "?")).rpartition(".")[2].strip("_")
            self.flow.add(Op(name, tuple(_tensors(call)), tuple(_tensors(result)), call=call))
        return result


@contextmanager
def _norms_as_one(model: nn.Module, flow: Flow, watch: _Watch) -> Iterator[None]:
    """Notes each call of a norm as one operation."""
    names = {module: name for name, module in model.named_modules() if isinstance(module, Norm)}

    def before(module: nn.Module, inputs: Any) -> None:
        watch.quiet = True

    def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
        watch.quiet = False
        flow.add(Op("norm", (inputs[0],), (output,), norm=names[module]))  # type: ignore[index]

    hooks = [module.register_forward_pre_hook(before) for module in names]
    hooks += [module.register_forward_hook(after) for module in names]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
