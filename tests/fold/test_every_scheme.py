"""What folds of each scheme and each norm function: exactly, in part, or not at all and then by name."""

import pytest

from normscale.errors import BadInput
from normscale.fold import fold
from normscale.norms import Norm, norm_names
from normscale.schemes import find_scheme, scheme_names
from tests.fold.test_folding import apart, model_of

SIDES: dict[str, dict[str, int]] = {"decoder": {}, "encoder": {"N": 2, "M": 0}, "encoder-decoder": {"N": 2}}
CASES = [(scheme, sides) for scheme in scheme_names() for sides in SIDES if sides in find_scheme(scheme).topologies]

STAYS = {
    "hyper": {"norm"},  # of the coefficients; the one before the branch goes
    "keel": {"out_norm"},
    "layerscale": set(),
    "lns": set(),
    "mixln": {"norm"},  # of the Post-Norm blocks
    "normformer": {"out_norm"},
    "peri": {"out_norm"},
    "pre": set(),
    "sandwich": {"out_norm"},
    "siamese": {"norm", "y_norm"},
    "spannorm": {"norm"},  # after the feed-forward layer; the one before it goes
    "subln": set(),
}
"""Of schemes that fold, the norms whose gain and bias stay."""

CENTRED = {"lns", "pre", "subln"}
"""Schemes whose streams lose their mean, so that all LayerNorms that read them are RMSNorms."""

REFUSED = {"admin", "admin-torch", "b2t", "deepnorm", "dsinit", "hybridnorm", "post", "reordered", "residual"}
"""Schemes whose branches read the residual itself, normed or not, and never a norm of their own."""

WITHOUT = {"ngpt", "rezero", "tfixup"}
"""Schemes without norms."""


@pytest.mark.parametrize(("scheme", "sides"), CASES)
def test_a_scheme_folds_exactly_or_is_refused_by_name(scheme: str, sides: str) -> None:
    model, inputs = model_of(scheme=scheme, **SIDES[sides])
    if scheme in REFUSED | WITHOUT:
        said = "the model has no norm" if scheme in WITHOUT else r"own\.\w+: its output is a term of the residual sum"
        with pytest.raises(BadInput, match=rf"model.scheme: {scheme}\b.*{said}"):
            fold(model, inputs)
        return
    new, folding = fold(model, inputs)
    assert apart(model, new, inputs) < 1e-12
    if scheme in STAYS:
        assert {norm.norm.rpartition(".")[2] for norm in folding.norms if norm.affine_stays} == STAYS[scheme]
        assert all(norm.centred for norm in folding.norms if ".branch." not in norm.norm) == (scheme in CENTRED)


@pytest.mark.parametrize("norm", norm_names())
def test_a_norms_gain_and_bias_go_whatever_the_norm_computes(norm: str) -> None:
    model, inputs = model_of(norm=norm)
    if all(m.gamma is None and m.bias is None for m in model.modules() if isinstance(m, Norm)):
        with pytest.raises(BadInput, match="neither gains nor biases"):
            fold(model, inputs)
        return
    new, folding = fold(model, inputs)
    assert apart(model, new, inputs) < 1e-12
    assert all(each.into and each.affine_stays is None for each in folding.norms)
    assert bool(folding.form.centred) == (norm == "layernorm")
