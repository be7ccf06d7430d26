from pathlib import Path

import pytest

import normscale
from normscale.claims import discover
from normscale.claims.discover import experiments_folder, list_claims, select
from normscale.errors import BadInput

ROOT = Path(__file__).resolve().parents[2]


def test_the_checkout_is_found_from_a_folder_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT / "tests")
    assert experiments_folder() == ROOT / "experiments"


def test_outside_a_checkout_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert experiments_folder() == ROOT / "experiments"  # this package itself lies in a checkout
    monkeypatch.setattr(normscale, "__file__", str(tmp_path / "site-packages" / "normscale" / "__init__.py"))
    with pytest.raises(BadInput, match=r"no checkout of normscale at .* clone the repository"):
        discover.experiments_folder()


def test_every_file_defines_a_claim_or_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "_shared.py").write_text("x = 1\n")
    assert list_claims(tmp_path) == []
    (tmp_path / "empty.py").write_text("x = 1\n")
    with pytest.raises(BadInput, match=r"empty\.py: it defines no CLAIM"):
        list_claims(tmp_path)
    (tmp_path / "empty.py").write_text("import nothing_like_this\n")
    with pytest.raises(BadInput, match=r"empty\.py: ModuleNotFoundError"):
        list_claims(tmp_path)


def test_two_files_may_not_share_an_id(tmp_path: Path) -> None:
    text = (ROOT / "experiments" / "update_bounded.py").read_text()
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(text)
    with pytest.raises(BadInput, match=r"b\.py: the id 'update-bounded' is taken"):
        list_claims(tmp_path)


def test_claims_are_chosen_by_id_or_as_core() -> None:
    claims = list_claims(ROOT / "experiments")
    assert select(["core"], claims) == [claim for claim in claims if claim.core]
    assert select(["all"], claims) == claims
    assert [claim.id for claim in select(["update-bounded", "update-bounded"], claims)] == ["update-bounded"]
    published = [claim for claim in claims if "paper" in claim.profiles]
    assert 0 < len(published) < len(claims)
    assert select(["all"], claims, "paper") == published
    assert select(["update-bounded"], claims, "paper")[0].id == "update-bounded"  # which says what it has
    with pytest.raises(BadInput, match="no claim of 'core' has a profile 'paper'"):
        select(["core"], [claim for claim in claims if claim not in published], "paper")
    with pytest.raises(BadInput, match=r"'update-bound': .* did you mean 'update-bounded'"):
        select(["update-bound"], claims)
