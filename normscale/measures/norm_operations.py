"""How many operations a norm takes, counted while its definition runs."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from normscale.measures._rows import rows
from normscale.ops.norm import layernorm, rmsnorm

ROWS = 8
EPS = torch.tensor(1e-5)  # as a tensor: a number would call PyTorch's fused kernels, of which nothing can be counted
REDUCTIONS = (torch.ops.aten.mean.dim, torch.ops.aten.sum.dim_IntList)


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts one operation for each number that an elementwise operation makes, or that a sum or a mean takes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: int = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in REDUCTIONS:
            self.operations += args[0].numel()
        elif torch.Tag.pointwise in func.tags:
            self.operations += found.numel()
        return found


def measure(seed: int, what: Literal["forward", "training"], width: int = 1024) -> dict[str, float]:
    """Returns, of a norm with its gain (and LayerNorm's bias), forward alone or forward and backward:

    - `rms_over_ln`: the operations of RMSNorm over those of LayerNorm;
    - `ln_each`: LayerNorm's for each number of its input.
    """
    x = rows(seed, ROWS, width, torch.float32).requires_grad_()
    gamma, bias = (torch.ones(width, requires_grad=True) for _ in range(2))
    ln = _counted(lambda: layernorm(x, gamma, bias, EPS), [x, gamma, bias], what)
    rms = _counted(lambda: rmsnorm(x, gamma, EPS), [x, gamma], what)
    return {"rms_over_ln": rms / ln, "ln_each": ln / x.numel()}


def _counted(norm: Callable[[], Tensor], wanted: list[Tensor], what: str) -> int:
    counted = Counted()
    with counted:
        y = norm()
        if what == "training":
            torch.autograd.grad(y, wanted, torch.ones_like(y))
    return counted.operations
