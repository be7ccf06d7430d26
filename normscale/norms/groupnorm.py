"""Group norm over the channels of one token: a LayerNorm of each head's channels."""

from typing import Annotated, Any

import torch
from torch import Tensor

from normscale.config.values import Count, says
from normscale.errors import ConfigError
from normscale.norms.norm import AffineNorm, AffineOptions, register, wide


@register("groupnorm")
class GroupNorm(AffineNorm):
    """gamma * (x - mean_h) / sqrt(var_h + eps) + bias, with mean and variance of the D / groups channels of a group.

    Groups are as many as heads, unless stated. Every token is by itself: nothing of another enters, as it would in
    the original, whose groups span all places of an image.

    Reference: Wu and He 2018, arXiv:1803.08494, Eq. 1 and 7; over heads as in RetNet, arXiv:2307.08621, section 2.2.
    """

    class Options(AffineOptions):
        groups: Annotated[
            Count | None,
            says(
                "how many; null: one for each head of the model",
                "arXiv:1803.08494; heads: arXiv:2307.08621, section 2.2",
            ),
        ] = None

    options: Options

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.groups = options.groups or 1
        if width % self.groups or width == self.groups:
            raise ConfigError(
                f"{self.groups} groups make nothing of a norm over {width} channels; give a "
                "number that divides each width normed and leaves 2 channels or more (null: model.heads)",
                key="groups",
            )

    @classmethod
    def settled(cls, options: Any, heads: int) -> Any:
        return options if options.groups is not None else options.model_copy(update={"groups": heads})

    def eager(self, x: Tensor) -> Tensor:
        heads = wide(x).view(*x.shape[:-1], self.groups, self.width // self.groups)
        centred = heads - heads.mean(-1, keepdim=True)
        y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + self.current_eps())
        return self.affine(y.flatten(-2), x.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}"
