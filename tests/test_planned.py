"""What a launcher planned, and the hashes that ranks compare."""

from pathlib import Path

import pytest

from normscale import planned
from normscale.errors import ConfigError, LaunchError
from normscale.planned import VARIABLE, Planned, code_hash, config_hash, planned_in


def test_a_plan_reads_back():
    for plan in (Planned(4, ("n0", "n1"), "c", "d"), Planned(None, None, "c", "d")):
        assert planned_in({VARIABLE: plan.text()}) == plan
    assert planned_in({}) is None
    assert Planned(2, ("a",), "c", "d").text() == '{"world":2,"hosts":["a"],"config":"c","code":"d"}'


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"world":"x","hosts":null,"config":"","code":""}', "3"])
def test_something_else_in_its_place_is_refused(text: str):
    with pytest.raises(LaunchError, match=f"{VARIABLE} in the environment"):
        planned_in({VARIABLE: text})


def test_the_config_hash_is_of_words_and_file(tmp_path: Path):
    path = tmp_path / "c.yaml"
    path.write_text("a: 1\n")
    base = config_hash([str(path), "x=1"])
    assert len(base) == 16
    assert config_hash([str(path), "--fresh", "x=1"]) == base
    assert config_hash([str(path), "x=2"]) != base
    assert config_hash([str(path), "x", "=1"]) != base
    path.write_text("a: 2\n")
    assert config_hash([str(path), "x=1"]) != base
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        config_hash(["nowhere.yaml"])


def test_the_code_hash_is_of_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "normscale"
    (package / "sub").mkdir(parents=True)
    monkeypatch.setattr(planned, "__file__", str(package / "planned.py"))
    seen = []
    for name, text in (("planned.py", ""), ("sub/a.py", "x"), ("sub/a.py", "y"), ("sub/b.py", "y")):
        (package / name).write_text(text)
        code_hash.cache_clear()
        seen.append(code_hash())
    (package / "sub" / "data.txt").write_text("no source")
    code_hash.cache_clear()
    assert code_hash() == seen[-1]
    assert len(set(seen)) == 4
    code_hash.cache_clear()
