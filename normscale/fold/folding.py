"""The fold itself: exact in algebra, computed in fp64, and checked before it is handed out."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.errors import BadInput, RunFailed
from normscale.fold.affine import HEAD, Affine, affine_folds, taken_of
from normscale.fold.centring import MEANLESS, Stream, centre, streams_of
from normscale.fold.flow import flow_of
from normscale.fold.form import Form, learn_positions, untie
from normscale.models.stack import Transformer
from normscale.norms import Norm, set_backend
from normscale.ops.products import NATIVE

EXACT = 1e-9
"""Largest difference of two logits that rounding in fp64 explains, as a share of the largest logit."""


@dataclass(frozen=True)
class NormFold:
    """What became of one norm. A reason says why gain and bias, or the mean, stay; None where they went or never were.

    `into` are the weights that took up gain and bias, `centred` says that a LayerNorm has become an RMSNorm, `gone`
    that nothing is left of a norm that is constant in evaluation.
    """

    norm: str
    kind: str
    into: tuple[str, ...]
    affine_stays: str | None
    centred: bool
    mean_stays: str | None
    gone: bool = False

    @property
    def whole(self) -> bool:
        """Whether nothing stays that could be asked to go."""
        return self.affine_stays is None and self.mean_stays is None


@dataclass(frozen=True)
class Folding:
    """What a fold did: norm by norm, in model order; and what is new in the model's form and configuration."""

    norms: tuple[NormFold, ...]
    form: Form
    untied: bool
    positions: bool

    @property
    def whole(self) -> bool:
        """Whether every norm is folded as far as norms can be."""
        return all(norm.whole for norm in self.norms)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Returns the configuration that, with `form` put on what it builds, describes the folded model."""
        changed: dict[str, Any] = {"compile": False, "checkpointing": False}
        changed |= {"tied": False} if self.untied else {}
        changed |= {"positions": "learned"} if self.positions else {}
        return config.model_copy(update=changed)


@torch.no_grad()
def fold(model: Transformer, inputs: Mapping[str, Tensor]) -> tuple[Transformer, Folding]:
    """Returns a model in fp64 that computes what `model` does with as much of its norms in its weights as can be.

    Into the projections that read a norm go its gain, W' = W diag(gamma), and its bias, b' = b + W bias; into all that
    writes into the stream goes the mean that LayerNorms take out of it, and these become RMSNorms. What each token is
    divided by stays: it is of the token. A batch norm, whose running statistics are of no token, goes as a whole.
    Which norms allow it is seen in one pass over `inputs`, and so is that the result is the same.

    Args:
        model: an eager one; it is left as it is.
        inputs: what it is called with, a batch.

    Raises:
        BadInput: no sublayer reads a norm that can be folded, and the message says why not; or logits are not finite.
        RunFailed: the folded model gives other logits.
    """
    whole = unfolded(model)
    flow = flow_of(whole, inputs)
    affine, streams = affine_folds(whole, flow), streams_of(whole, flow)
    new, folding = _apply(whole, affine, streams)
    if not any(_at_its_own_site(each) or each.centred for each in folding.norms):
        raise BadInput(f"model.scheme: {_refusal(whole, folding)}")
    before, after = whole(**inputs), new(**inputs)
    if not before.isfinite().all():
        raise BadInput("the model's logits are not finite, so that no fold can be checked; fold an earlier checkpoint")
    apart = float((after - before).abs().max() / before.abs().max())
    if not apart <= EXACT:
        raise RunFailed(f"the folded model's logits are {apart:.1e} (of the largest) from the model's; not written")
    return new, folding


def unfolded(model: Transformer) -> Transformer:
    """Returns a copy in fp64 for evaluation, with exact products and norms by their definition."""
    found = copy.deepcopy(model).double().eval()
    for module in found.modules():
        if hasattr(module, "products"):
            cast(Any, module).products = NATIVE
    found.stream = None
    set_backend(found, "eager")
    return found


def _apply(model: Transformer, affine: list[Affine], streams: list[Stream]) -> tuple[Transformer, Folding]:
    new = copy.deepcopy(model)
    gone = [each for each in affine if each.into]
    no_bias = {each.norm for each in affine if each.into or cast(Norm, model.get_submodule(each.norm)).bias is None}
    useful = [s for s in streams if s.stays is None and no_bias.intersection(s.readers)]
    centred = tuple(name for stream in useful for name in dict.fromkeys(stream.readers) if name in no_bias)
    writers = {name for stream in useful for name in stream.writers}
    heads = any(HEAD in each.into for each in gone)
    untied = model.logits is None and (heads or "token" in writers)
    if untied:
        untie(new)
    if positions := "sinusoids" in writers:
        learn_positions(new)
        tables = ["position"] + ["source_position"] * (model.source_ends is not None)
        for stream in useful:
            stream.writers = [name for name in stream.writers if name != "sinusoids"] + tables

    biased = [name for each in gone if taken_of(_norm(model, each.norm))[1] is not None for name in each.into]
    nothing = tuple(each.norm for each in gone if _norm(model, each.norm).constants() is not None)
    form = Form(
        plain=tuple(each.norm for each in gone if each.norm not in nothing),
        nothing=nothing,
        centred=centred,
        biases=tuple(name.removesuffix(".weight") for name in biased if name != HEAD and _unbiased(model, name)),
        logit_bias=HEAD in biased,
    )
    Form(biases=form.biases, logit_bias=form.logit_bias).put_on(new)
    for each in gone:
        gain, bias = taken_of(_norm(model, each.norm))
        for name in each.into:
            _take_up(new, name, gain, None if bias is None else each.factor * bias)
    for stream in useful:
        centre(new, stream)
    Form(plain=form.plain, centred=form.centred, nothing=form.nothing).put_on(new)
    return new, Folding(tuple(_told(model, affine, streams, form)), form, untied, positions)


def _take_up(model: Transformer, name: str, gain: Tensor | None, bias: Tensor | None) -> None:
    """Puts what stood before a product into its weight and bias."""
    weight = model.get_parameter(name)
    if bias is not None:
        place = model.logit_bias if name == HEAD else model.get_submodule(name.removesuffix(".weight")).bias
        assert isinstance(place, Tensor)
        place.add_(weight @ bias)
    if gain is not None:
        weight.mul_(gain)


def _told(model: Transformer, affine: list[Affine], streams: list[Stream], form: Form) -> list[NormFold]:
    of = {name: stream for stream in streams for name in stream.readers}
    found = []
    for each in affine:
        kind, stays = _norm(model, each.norm).name, None
        if kind == MEANLESS and each.norm not in form.centred:
            stream = of.get(each.norm)
            reason = "no pass reaches it" if stream is None else stream.stays
            stays = reason or "its bias stays, and an RMSNorm has none"
        at = each.norm
        found.append(NormFold(at, kind, each.into, each.stays, at in form.centred, stays, at in form.nothing))
    return found


def _at_its_own_site(norm: NormFold) -> bool:
    """Tells whether a norm went into the branch of the site where it stands."""
    site = norm.norm.partition(".own.")[0].partition(".branch.")[0]
    return any(name.startswith(f"{site}.branch.") for name in norm.into)


def _refusal(model: Transformer, folding: Folding) -> str:
    name = model.scheme.name
    if not folding.norms:
        return f"{name}: the model has no norm that could be folded"
    kept = [norm for norm in folding.norms if norm.affine_stays]
    if not kept:
        return f"{name}: its norms have neither gains nor biases, nor a mean that could go elsewhere"
    first = min(kept, key=lambda norm: not norm.norm.startswith("blocks."))  # ends come first in a model
    return f"{name} cannot be folded: {first.norm}: {first.affine_stays}"


def _norm(model: Transformer, name: str) -> Norm:
    return cast(Norm, model.get_submodule(name))


def _unbiased(model: nn.Module, weight: str) -> bool:
    return model.get_submodule(weight.removesuffix(".weight")).bias is None
