"""RMSNorm."""

import torch
from pydantic import model_validator
from torch import Tensor, nn

from normscale.config.values import Flag, Section, conflict
from normscale.norms.norm import Norm, register
from normscale.ops.norm import rmsnorm
from normscale.ops.spec import NormSpec, one_plus


@register("rmsnorm")
class RMSNorm(Norm):
    """gamma * x / sqrt(mean(x^2) + eps); with a zero-centred gain gamma = 1 + w, where w is what is trained.

    Weight decay then pulls the gain towards 1 and not towards 0, as in Gemma.

    Reference: Zhang and Sennrich 2019, arXiv:1910.07467, Eq. 4.
    """

    class Options(Section):
        gain: Flag = True  # false: gamma is 1 and not trained
        zero_centred: Flag = False  # gamma is 1 + w, and w starts at 0

        @model_validator(mode="after")
        def _combinations(self) -> "RMSNorm.Options":
            if self.zero_centred and not self.gain:
                raise conflict("zero_centred would do nothing with gain=false; remove one of them", "zero_centred")
            return self

    def __init__(self, width: int, eps: float, options: Options) -> None:
        super().__init__(width, eps, options)
        self.spec = NormSpec("rmsnorm", eps, options.zero_centred)
        start = torch.zeros if options.zero_centred else torch.ones
        self.gamma = nn.Parameter(start(width)) if options.gain else None

    def forward(self, x: Tensor) -> Tensor:
        if (self.backend != "auto" or not x.is_cpu) and (backend := self.backend_for(x)) != "eager":
            return self.run(backend, x)
        gamma = one_plus(self.gamma) if self.options.zero_centred and self.gamma is not None else self.gamma
        return rmsnorm(x, gamma, self.current_eps())
