"""How a folded model differs in its modules from the one that its configuration describes."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from normscale.models.stack import Transformer
from normscale.norms import Norm, find_norm


@dataclass(frozen=True)
class Form:
    """Names of modules: norms without gain and bias, LayerNorms that are RMSNorms, projections that got a bias."""

    plain: tuple[str, ...] = ()
    centred: tuple[str, ...] = ()
    biases: tuple[str, ...] = ()
    logit_bias: bool = False

    def put_on(self, model: Transformer) -> None:
        """Gives a model this form, in place; what is new in it is zero, and what it no longer has is lost.

        Raises:
            AttributeError: the model has no module of a name.
        """
        for name in self.plain:
            norm = cast(Norm, model.get_submodule(name))
            norm.gamma = norm.bias = None
        for name in self.centred:
            parent, _, leaf = name.rpartition(".")
            model.get_submodule(parent)._modules[leaf] = without_mean(model.get_submodule(name))
        for name in self.biases:
            weight = model.get_parameter(f"{name}.weight")
            model.get_submodule(name).bias = nn.Parameter(weight.new_zeros(len(weight)))
        if self.logit_bias:
            model.logit_bias = nn.Parameter(model.token.new_zeros(len(model.token)))


def without_mean(norm: nn.Module) -> Norm:
    """Returns the RMSNorm that does to rows of mean 0 what a LayerNorm without a bias does, with its gain."""
    assert isinstance(norm, Norm)
    assert norm.bias is None, "an RMSNorm has no bias"
    kind = find_norm("rmsnorm")
    kept = {name: value for name, value in norm.options if name in kind.Options.model_fields}
    if norm.gamma is None:
        kept |= {name: False for name in ("gain", "zero_centred") if name in kept}
    found = kind(norm.width, norm.eps, kind.Options(**kept))
    found.backend, found.gamma = norm.backend, norm.gamma
    return found.to(norm.eps_tensor.device)


@torch.no_grad()
def untie(model: Transformer) -> None:
    """Gives a model with a tied head a head of its own, of the same values."""
    if model.logits is None:
        model.logits = nn.Parameter(model.token.clone())


@torch.no_grad()
def learn_positions(model: Transformer) -> None:
    """Makes sinusoidal positions, which cannot be written to, a table of each side."""
    if model.sinusoids is not None:
        model.position = nn.Parameter(model.sinusoids.clone())
        if model.source_ends is not None:
            model.source_position = nn.Parameter(model.sinusoids.clone())
        model.sinusoids = None
