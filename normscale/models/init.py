"""Initial values by role: the table of every parameter, what it is for and its gain, and the draws."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from normscale.models.projection import Projection
from normscale.models.stack import Decoder
from normscale.schemes.scheme import Role

InitName = Literal["xavier_normal", "xavier_uniform", "normal"]


@dataclass(frozen=True)
class Entry:
    """One row of the init table: `rows` of parameter `name` have `role` and are drawn with `gain`."""

    name: str
    rows: slice
    role: Role
    gain: float
    values: Tensor


def init_table(model: Decoder) -> Iterator[Entry]:
    """Yields a row for every part of every weight and bias of the network, ends included.

    What a scheme or a norm owns (gains, biases of norms, alphas) initialises itself and is not listed.
    """
    scheme, depth = model.scheme, model.depth
    ends: tuple[tuple[str, Tensor | None, Role], ...] = (
        ("token", model.token, Role("embedding", "token")),
        ("position", model.position, Role("embedding", "position")),
        ("logits", model.logits, Role("head", "logits")),
    )
    for name, values, role in ends:
        if values is not None:
            yield Entry(name, slice(0, len(values)), role, scheme.gain(depth, None, role), values)
    sites = {id(sublayer.branch): sublayer.site for sublayer in model.sublayers()}
    for branch_name, branch in model.named_modules():
        if id(branch) not in sites:
            continue
        for name, module in branch.named_modules():
            if isinstance(module, Projection):
                for tensor, rows, role in module.roles():
                    values = getattr(module, tensor)
                    gain = scheme.gain(depth, sites[id(branch)], role)
                    yield Entry(f"{branch_name}.{name}.{tensor}", rows, role, gain, values[rows])


@torch.no_grad()
def initialise(model: Decoder, init: InitName, std: float, seed: int) -> None:
    """Draws every parameter of the network by its role, from a generator of its own.

    Biases are zero. Token vectors and an untied head have standard deviation gain / sqrt(D), learned positions the
    same. Weights: Xavier over each part's own fan-in and fan-out, or normal with `std`, times the gain.

    Reference: Glorot and Bengio 2010, Eq. 16 (uniform) and its normal counterpart; the gain multiplies the standard
    deviation, as in Wang et al. 2022, arXiv:2203.00555, Figure 2.
    """
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for entry in init_table(model):
        values, gain = entry.values, entry.gain
        if entry.role.bias:
            values.zero_()
        elif entry.role.kind in ("embedding", "head"):
            values.normal_(0.0, gain / model.d**0.5, generator=generator)
        elif init == "xavier_normal":
            nn.init.xavier_normal_(values, gain=gain, generator=generator)
        elif init == "xavier_uniform":
            nn.init.xavier_uniform_(values, gain=gain, generator=generator)
        else:
            values.normal_(0.0, gain * std, generator=generator)
