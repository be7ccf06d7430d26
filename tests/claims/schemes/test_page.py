from collections.abc import Mapping
from pathlib import Path

import pytest

from normscale.claims.claim import Profile
from normscale.claims.expect import Trains
from normscale.claims.schemes import write
from normscale.claims.schemes.size import Size, size_of
from normscale.claims.schemes.write import write_schemes
from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.errors import ConfigError, RunFailed
from tests.claims.schemes.test_at_init import here
from tests.claims.test_report import Tags, store
from tests.claims.test_verdict import UNDECIDED, as_expected, but, depth_claim


def test_the_page_is_one_file_with_what_is_known_and_says_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = depth_claim(
        control=(),
        expect=(Trains("deepnorm", at=(24,)),),
        profiles={"cpu": Profile({"post": {24: 2}, "deepnorm": {2: 1}})},
    )
    store(tmp_path / "runs", claim, as_expected)
    monkeypatch.setattr(write, "list_claims", lambda: [claim])
    monkeypatch.setattr(write, "experiments_folder", lambda: tmp_path)
    path = write_schemes(tmp_path / "runs", ["post", "peri"], tmp_path / "reports", depths=(2, 4), take=here)
    assert path == tmp_path / "reports" / "schemes.html"
    page = Tags(path.read_text())
    assert page.open == []
    assert "script" not in {tag for tag, _ in page.tags}
    links = [value for _, attrs in page.tags for key, value in attrs.items() if key in ("src", "href")]
    assert set(links) == {"#post", "#peri"}
    assert {attrs.get("id") for tag, attrs in page.tags if tag == "h2"} >= {"post", "peri"}
    for wanted in (
        "x' = Norm(alpha * x + F(x)), with alpha = 1.",  # the scheme's own words
        "Kim et al. 2025, arXiv:2502.02732",
        "decoder, lm, fp32",
        "\N{BALLOT X} -0.19",  # a gap of 0.01 beside 0.2
        "0 of 2",
        "Without a record here: peri.",
        "make schemes ARGS=--survey",
        "No record at all in bf16, fp16, fp8_e4m3 and fp8_e5m2",
        "an empty cell has no record",
        "whether it trains: no record",
        "largest tolerable learning rate: not measured here",
        "time of a step: not measured here",
        "norms: 4 a block, 1 at the ends",
        "norms: 2 a block",
        "gradient of each sublayer",
    ):
        assert wanted in page.text, wanted
    assert "2 blocks" in page.text  # of the curves
    assert "deepnorm" not in page.text  # not asked for, though it has a record
    assert not list((tmp_path / "runs").glob("p*-L*"))  # measurements lie in a folder of their own


def test_what_has_not_come_to_rest_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profiles = {"cpu": Profile({"post": {2: 1, 24: 2}})}
    claim = depth_claim(control=(), expect=(Trains("post", at=(2, 24)),), profiles=profiles)
    store(tmp_path / "runs", claim, but(lambda cell: (cell.depth, cell.seed) == (24, 1), UNDECIDED))
    monkeypatch.setattr(write, "list_claims", lambda: [claim])
    monkeypatch.setattr(write, "experiments_folder", lambda: tmp_path)
    page = Tags(write_schemes(tmp_path / "runs", ["post"], tmp_path / "reports", depths=(2,), take=here).read_text())
    assert "decoder, lm, fp32: trains at 2; undecided at 24 blocks" in page.text
    assert "? -0.19" in page.text  # of the seed that is stuck; the other has come further
    assert "does not train" not in page.text
    assert "\N{BALLOT X} -" not in page.text
    assert any("undecided" in (attrs.get("class") or "").split() for tag, attrs in page.tags if tag == "span")


def test_of_several_streams_the_page_shows_the_first_and_the_others(tmp_path: Path) -> None:
    path = write_schemes(tmp_path / "runs", ["residual"], tmp_path / "reports", depths=(2,), take=here)
    page = path.read_text()
    assert "RMS of the first stream" in page
    assert "largest RMS of the others" in page
    path = write_schemes(tmp_path / "runs", ["pre"], tmp_path / "reports", depths=(2,), take=here)
    assert "RMS of the stream" in path.read_text()
    assert "the others" not in path.read_text()


def test_measurements_without_an_end_are_a_failure_once_the_page_is_written(tmp_path: Path) -> None:
    def full(configs: Mapping[str, RunConfig]) -> Mapping[str, str]:
        return dict.fromkeys(configs, "no space left")

    with pytest.raises(RunFailed, match=r"2 measurements have no result \(pre, 2 blocks, SGD: no space left\)"):
        write_schemes(tmp_path / "runs", ["pre"], tmp_path / "reports", depths=(2,), take=full)
    assert "Not measured: pre, 2 blocks, SGD: no space left" in (tmp_path / "reports" / "schemes.html").read_text()


def test_an_unknown_scheme_is_named_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'post'"):
        write_schemes(tmp_path / "runs", ["pos"], tmp_path / "reports")
    assert not list(tmp_path.iterdir())


def test_sizes_are_counted_in_the_model() -> None:
    def of(scheme: str) -> Size:
        return size_of(revise(RunConfig(), {"model.scheme": scheme, "model.M": 4}).model)

    pre, peri, deepnorm = of("pre"), of("peri"), of("deepnorm")
    assert (pre.norms_in_blocks, pre.norms_at_ends, pre.own_parameters) == (8, 1, 8 * 2 * 64)
    assert peri.own_parameters == 2 * pre.own_parameters
    assert peri.parameters - pre.parameters == pre.own_parameters
    assert deepnorm.alphas == (pytest.approx(8 ** (1 / 4)),) * 2
