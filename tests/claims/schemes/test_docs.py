import pytest

from normscale.claims.schemes.docs import told
from normscale.schemes import scheme_names


@pytest.mark.parametrize("scheme", scheme_names())
def test_every_scheme_says_what_it_is(scheme: str) -> None:
    said = told(scheme)
    assert said.title
    assert not said.title.endswith(".")
    assert " = " in said.formula
    assert said.reference
    assert said.reference not in said.more
    assert said.topologies


def test_paragraphs_reference_and_options_are_told_apart() -> None:
    said = told("deepnorm")
    assert said.formula.startswith("x' = Norm(alpha * x + F(x))")
    assert said.reference.startswith("Wang et al. 2022, arXiv:2203.00555, Figure 2")
    assert any(text.startswith("keel: gain (2N)^(-1/4)") for text in said.more)
    assert said.options == (("constants", "paper"), ("use", "both"))
    assert told("post").options == ()
