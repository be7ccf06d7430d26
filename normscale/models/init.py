"""Initial values by role: the list of every weight of the network and what it is for, and the draws."""

from collections.abc import Iterator

import torch
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.models.projection import Projection
from normscale.models.stack import Transformer
from normscale.schemes.scheme import Role, Weight


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


def gain_of(model: Transformer, weight: Weight, scaled: bool) -> float:
    """Returns the factor on the standard init of a weight: the scheme's, and the one of `init_scaled` where asked.

    Reference: Radford et al. 2019 (GPT-2), section 2.3: weights of residual layers by 1/sqrt(number of them).
    """
    gain = model.scheme.gain(model.depth, weight.site, weight.role)
    if scaled and weight.site is not None and weight.role.part in ("o", "out"):
        gain /= model.depth.sublayers(weight.site.side) ** 0.5
    return gain


@torch.no_grad()
def initialise(model: Transformer, config: ModelConfig, generator: torch.Generator) -> None:
    """Draws every weight of the network by its role.

    Biases are zero. Token vectors and an untied head have standard deviation gain / sqrt(D), learned positions and
    segments the same. Matrices: Xavier over each part's own fan-in and fan-out, or normal with `init_std`, times the
    gain.

    Reference: Glorot and Bengio 2010, Eq. 16 (uniform) and its normal counterpart; the gain multiplies the standard
    deviation, as in Wang et al. 2022, arXiv:2203.00555, Figure 2.
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
            values.normal_(0.0, gain * config.init_std, generator=generator)
