"""Schemes, norms and their options say what they are, and whose idea each is."""

import pytest

from normscale.claims.schemes.docs import docs_of_norm, docs_of_scheme, value_of
from normscale.config.keys import Key, describe
from normscale.norms import norm_names
from normscale.schemes import scheme_names

OF_NORMS_AND_INIT = (
    "eps embedding_norm qk_norm qk_scale qk_scale_trained attention_scale kv_latent init init_std init_truncated"
    " init_scaled"
)
PLACES = ("arXiv:", "Glorot", "Radford", "OLMo", "torch.nn", "microsoft/", "takase/")


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme_says_what_it_is(scheme: str) -> None:
    said = docs_of_scheme(scheme)
    assert said.title
    assert not said.title.endswith(".")
    assert " = " in said.formula
    assert said.reference
    assert said.reference not in said.more
    assert said.topologies


def test_paragraphs_reference_and_options_are_told_apart() -> None:
    said = docs_of_scheme("deepnorm")
    assert said.formula.startswith("x' = Norm(alpha * x + F(x))")
    assert said.reference.startswith("Wang et al. 2022, arXiv:2203.00555, Figure 2")
    assert any(text.startswith("keel: gain (2N)^(-1/4)") for text in said.more)
    constants, use = said.options
    assert constants[:3] == ("constants", "one of paper, torchscale, mixln, keel, article", "paper")
    assert constants.source == "arXiv:2203.00555, Figure 2 (paper)"
    assert use.help == "alpha: beta is 1; beta: alpha is 1"
    assert docs_of_scheme("post").options == ()


def assert_documented(option: Key) -> None:
    """An option says what it does, and names a paper, or the code that has it."""
    assert len(option.help) > 10, option.key
    assert not option.help.endswith("."), option.key
    assert any(word in option.source for word in PLACES), option.key


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_option_of_a_scheme_is_documented(scheme: str) -> None:
    for option in docs_of_scheme(scheme).options:
        assert_documented(option)


@pytest.mark.parametrize("norm", norm_names())
def test_every_norm_and_its_options_are_documented(norm: str) -> None:
    said = docs_of_norm(norm)
    assert said.title
    assert said.formula
    assert said.reference
    assert said.topologies == ()
    for option in said.options:
        assert_documented(option)


def test_every_option_of_norms_and_init_of_a_model_has_its_source() -> None:
    described = {key.key: key for key in describe()}
    for name in OF_NORMS_AND_INIT.split():
        assert_documented(described[f"model.{name}"])
    assert described["model.heads"].source == ""


def test_defaults_read_as_in_a_configuration() -> None:
    assert [value_of(value) for value in (None, True, 0.5, (0.9, 0.98), "paper", {})] == [
        "null",
        "true",
        "0.5",
        "[0.9, 0.98]",
        "paper",
        "{}",
    ]
