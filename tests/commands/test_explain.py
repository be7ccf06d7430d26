"""`normscale explain` on schemes, norms and keys."""

import pytest

from normscale.cli import main
from normscale.commands.explain import explained, listed
from normscale.errors import BadInput
from normscale.norms import norm_names
from normscale.schemes import scheme_names


def test_a_scheme_is_said_with_formula_source_topologies_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "reordered"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("model.scheme=reordered: Reordered norm")
    assert "x' = x + Norm(F(x))" in said
    assert "\nfrom        OLMo 2, arXiv:2501.00656, section 2.1" in said
    assert "\ntopologies  decoder, encoder\n" in said
    assert "model.scheme_options:\n  final_norm=true  (true or false)\n      false: the stream leaves as" in said
    assert "      from arXiv:2501.00656" in said


def test_what_has_no_options_says_so() -> None:
    assert explained("post", 100)[-1] == "model.scheme_options: none"


def test_a_norm_is_said_without_topologies() -> None:
    said = "\n".join(explained("rmsnorm", 100))
    assert "model.norm_options:\n  gain=true  (true or false)" in said
    assert "topologies" not in said


@pytest.mark.parametrize(
    ("word", "keys"),
    [
        ("model.qk_norm", ["model.qk_norm=none"]),
        ("qk_norm", ["model.qk_norm=none"]),
        (
            "train.schedule",
            ["train.schedule.kind=constant", "train.schedule.warmup_steps=0", "train.schedule.floor=0.0"],
        ),
        ("eps", ["model.eps=1e-05", "train.optim.eps=1e-08"]),
    ],
)
def test_a_key_is_found_by_its_name_its_end_and_its_section(word: str, keys: list[str]) -> None:
    assert [line.split()[0] for line in explained(word, 100) if line.startswith("  ") and line[2] != " "] == keys


def test_all_that_can_be_explained_is_listed_within_the_width() -> None:
    lines = listed(60)
    assert {line.split()[0] for line in lines if line.startswith("  ") and line[2] != " "} >= {
        *scheme_names(),
        *norm_names(),
    }
    for word in ("deepnorm", "layernorm", "model"):
        lines += explained(word, 60)
    assert max(map(len, lines)) <= 60


def test_an_unknown_word_names_the_nearest() -> None:
    with pytest.raises(BadInput, match="explain: 'deepnrom' is no scheme, no norm and no key; did you mean 'deepnorm'"):
        explained("deepnrom", 100)
