"""Batch norm: statistics of a channel over all tokens."""

from typing import Annotated, Any

import torch
import torch.distributed as dist
from pydantic import Field
from torch import Tensor

from normscale.config.values import Flag, Number, says
from normscale.norms.norm import AffineNorm, AffineOptions, register, wide


@register("batchnorm")
class BatchNorm(AffineNorm):
    """gamma * (x - mean) / sqrt(var + eps) + bias, with mean and variance of a channel over all tokens.

    In training they are those of the micro-batch, over all ranks or with `sync: false` over each rank's own, and the
    running ones follow: r += momentum * (new - r), the variance unbiased, averaged over ranks either way. Evaluation
    takes the running ones.

    In a causal model this leaks: the statistics of a token come from later tokens too, in training, so that a training
    loss says less than it seems to. The held-out loss, with running statistics, is free of it. Padding counts as
    tokens. A pass that checkpointing runs again, or that comes of a step that is not applied, leaves no trace.

    Reference: Ioffe and Szegedy 2015, arXiv:1502.03167, Algorithms 1 and 2; on tokens as in Shen et al. 2020
    (PowerNorm), arXiv:2003.07845.
    """

    remembers = True
    running_mean: Tensor
    running_var: Tensor
    fresh: Tensor

    class Options(AffineOptions):
        momentum: Annotated[
            Annotated[Number, Field(gt=0, le=1)],
            says("weight of a new batch in the running statistics", "arXiv:1502.03167; 0.1 in torch.nn.BatchNorm1d"),
        ] = 0.1
        sync: Annotated[
            Flag, says("false: each rank normalises by its own tokens", "torch.nn.SyncBatchNorm (true)")
        ] = True

    options: Options

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        # A tensor, so that a compiled graph serves both: 0 while a pass is run again, whose numbers were seen before.
        self.register_buffer("fresh", torch.ones(()), persistent=False)

    def eager(self, x: Tensor) -> Tensor:
        x_wide = wide(x)
        mean, var = self._of_tokens(x_wide.flatten(0, -2)) if self.training else (self.running_mean, self.running_var)
        return self.affine((x_wide - mean) * torch.rsqrt(var + self.current_eps()), x.dtype)

    def constants(self) -> tuple[Tensor, Tensor]:
        scale, gain = torch.rsqrt(self.running_var + self.eps), self.gain()
        scale = scale if gain is None else scale * gain
        shift = -self.running_mean * scale
        return scale, shift if self.bias is None else shift + self.bias

    def _of_tokens(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Returns mean and variance over rows, and brings the running ones up to date.

        Shape: rows [tokens, D]; results [D].
        """
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        count = rows.new_full((1,), len(rows))
        if several and self.options.sync:
            total = _over_ranks(torch.cat([rows.sum(0), count]))
            count = total[-1:]
            mean = total[:-1] / count
            var = _over_ranks((rows - mean).square().sum(0)) / count
        else:
            mean = rows.mean(0)
            var = (rows - mean).square().mean(0)
        with torch.no_grad():
            seen = torch.stack([mean, var * count / (count - 1).clamp_min(1)])
            if several and not self.options.sync:
                dist.all_reduce(seen)
                seen /= dist.get_world_size()
            part = self.options.momentum * self.fresh
            self.running_mean.lerp_(seen[0].to(self.running_mean.dtype), part)
            self.running_var.lerp_(seen[1].to(self.running_var.dtype), part)
        return mean, var


def _over_ranks(values: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(values)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    """The sum over ranks; the loss is a sum over ranks too, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total
