"""Initial values by role: the list of every weight of the network and what it is for, and the draws."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import nn

from normscale.models.projection import Projection
from normscale.models.stack import Decoder
from normscale.schemes.scheme import Role, Weight

InitName = Literal["xavier_normal", "xavier_uniform", "normal"]


def weights(model: Decoder) -> Iterator[Weight]:
    """Yields every part of every weight and bias of the network, ends included.

    What a scheme or a norm owns (gains, biases of norms, alphas) initialises itself and is not listed.
    """
    ends = (
        ("token", model.token, Role("embedding", "token")),
        ("position", model.position, Role("embedding", "position")),
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


@torch.no_grad()
def initialise(model: Decoder, init: InitName, std: float, generator: torch.Generator) -> None:
    """Draws every weight of the network by its role.

    Biases are zero. Token vectors and an untied head have standard deviation gain / sqrt(D), learned positions the
    same. Matrices: Xavier over each part's own fan-in and fan-out, or normal with `std`, times the gain.

    Reference: Glorot and Bengio 2010, Eq. 16 (uniform) and its normal counterpart; the gain multiplies the standard
    deviation, as in Wang et al. 2022, arXiv:2203.00555, Figure 2.
    """
    for weight in weights(model):
        gain, values = model.scheme.gain(model.depth, weight.site, weight.role), weight.values
        if weight.role.bias:
            values.zero_()
        elif weight.site is None:
            values.normal_(0.0, gain / model.d**0.5, generator=generator)
        elif init == "xavier_normal":
            nn.init.xavier_normal_(values, gain=gain, generator=generator)
        elif init == "xavier_uniform":
            nn.init.xavier_uniform_(values, gain=gain, generator=generator)
        else:
            values.normal_(0.0, gain * std, generator=generator)
