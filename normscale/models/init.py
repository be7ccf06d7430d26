"""Initial values by role: the list of every weight of the network and what it is for, and the draws."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.models.projection import Projection
from normscale.models.stack import Transformer
from normscale.schemes.scheme import Role, Weight

Scaled = Literal["none", "all", "depth"]


def weights(model: Transformer) -> Iterator[Weight]:
    """Yields every part of every weight and bias of the network, ends included.

    What a scheme or a norm owns (gains, biases of norms, alphas) initialises itself and is not listed.
    """
    ends = (
        ("token", model.token, Role("embedding", "token")),
        ("position", model.position, Role("embedding", "position")),
        ("source_position", model.source_position, Role("embedding", "position")),
        ("segment", model.segment, Role("embedding", "segment")),
        ("logits", model.logits, Role("head", "logits")),
    )
    for name, parameter, role in ends:
        if parameter is not None:
            yield Weight(name, slice(0, len(parameter)), None, role, parameter.detach())
    for prefix, sublayer in model.named_sublayers():
        for name, module in sublayer.branch.named_modules():
            if isinstance(module, Projection):
                for tensor, rows, role in module.roles():
                    values = getattr(module, tensor).detach()[rows]
                    yield Weight(f"{prefix}.branch.{name}.{tensor}", rows, sublayer.site, role, values)


def gain_of(model: Transformer, weight: Weight, scaled: Scaled = "none") -> float:
    """Returns the factor on the standard init of a weight: the scheme's, and the one of `init_scaled` where asked.

    Reference: Radford et al. 2019 (GPT-2), section 2.3, for "all": weights of residual layers by 1/sqrt(number of
    them). For "depth", by 1/sqrt(2 (l + 1)) in block l of a side, counted from 0: `llama_depth` of OLMo-core, and
    torchtitan's `depth_init`.
    """
    gain = model.scheme.gain(model.depth, weight.site, weight.role)
    if scaled in ("all", "depth") and weight.site is not None and weight.role.part in ("o", "out"):
        site = weight.site
        gain /= (model.depth.sublayers(site.side) if scaled == "all" else 2 * (site.block + 1)) ** 0.5
    return gain


@torch.no_grad()
def initialise(model: Transformer, config: ModelConfig, generator: torch.Generator) -> None:
    """Draws every weight of the network by its role.

    Biases are zero. Token vectors and an untied head have standard deviation gain / sqrt(D), learned positions and
    segments the same. Matrices: Xavier over each part's own fan-in and fan-out, or normal with `init_std` or with
    1/sqrt(fan-in), times the gain; truncated at three deviations where asked, as in OLMo-core (which leaves 0.987 of
    the deviation).

    Reference: Glorot and Bengio 2010, Eq. 16 (uniform) and its normal counterpart; the gain multiplies the standard
    deviation, as in Wang et al. 2022, arXiv:2203.00555, Figure 2. LeCun et al. 1998, Efficient BackProp, Eq. 16
    (fan-in); Wortsman et al. 2023, arXiv:2309.14322, truncate it.
    """
    for weight in weights(model):
        gain, values, init = gain_of(model, weight, config.init_scaled), weight.values, config.init
        if weight.role.bias:
            values.zero_()
        elif weight.site is None:
            values.normal_(0.0, gain / model.d**0.5, generator=generator)
        elif init == "xavier_normal":
            nn.init.xavier_normal_(values, gain=gain, generator=generator)
        elif init == "xavier_uniform":
            nn.init.xavier_uniform_(values, gain=gain, generator=generator)
        else:
            deviation = gain * (config.init_std if init == "normal" else values.shape[1] ** -0.5)
            if config.init_truncated:
                bound = 3 * deviation
                nn.init.trunc_normal_(values, 0.0, deviation, -bound, bound, generator=generator)
            else:
                values.normal_(0.0, deviation, generator=generator)
