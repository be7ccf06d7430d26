"""How a folded model differs in its modules from the one that its configuration describes."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from normscale.models.stack import Transformer
from normscale.norms import Norm, find_norm


@dataclass(frozen=True)
class Form:
    """Names of modules: norms without gain and bias, LayerNorms that are RMSNorms, norms of which nothing is left,
    projections that got a bias.
    """

    plain: tuple[str, ...] = ()
    centred: tuple[str, ...] = ()
    nothing: tuple[str, ...] = ()
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
        for names, without in ((self.centred, without_mean), (self.nothing, without_anything)):
            for name in names:
                parent, _, leaf = name.rpartition(".")
                model.get_submodule(parent)._modules[leaf] = without(model.get_submodule(name))
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


class Nothing(Norm):
    """x: what is left of a norm that is constant in evaluation, when the weights that read it have taken it up."""

    name = "nothing"
    has_eps = False

    def eager(self, x: Tensor) -> Tensor:
        return x


def without_anything(norm: nn.Module) -> Norm:
    """Returns what stands in the place of a norm that has gone into weights as a whole."""
    assert isinstance(norm, Norm)
    return Nothing(norm.width, norm.eps, Nothing.Options()).to(norm.eps_tensor.device)


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
