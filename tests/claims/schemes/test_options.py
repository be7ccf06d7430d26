from normscale.claims.schemes.docs import docs_of_scheme
from normscale.claims.schemes.options import of_models, of_norms, options_table
from normscale.norms import norm_names


def test_a_table_says_what_an_option_takes_does_and_is_from() -> None:
    said = options_table(docs_of_scheme("siamese").options)
    row = said[said.index("input_norm") : said.index("</tr>", said.index("input_norm"))]
    assert "<td>true or false</td><td><code>true</code></td>" in row
    assert "false: a branch sees X + Norm(Y) as it is" in row
    assert "arXiv:2602.08064, section 3" in row
    assert options_table(()) == "<p>No options.</p>"


def test_models_and_norms_have_theirs() -> None:
    models, norms = "\n".join(of_models()), "\n".join(of_norms())
    assert "model.qk_norm" in models
    assert "model.heads" not in models  # nobody's idea
    assert all(f"<code>{name}</code></h3>" in norms for name in norm_names())
    assert norms.count("zero_centred") >= 2
