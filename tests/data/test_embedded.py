"""The embedded corpus: the same on every start, mixed, and split by file."""

import subprocess
import sys

import pytest

from normscale.config.schema import DataConfig
from normscale.data import embedded
from normscale.data.corpus import load_corpus
from normscale.errors import DataError


@pytest.fixture(scope="module")
def corpus():
    return load_corpus(DataConfig())


def test_fills_its_limits(corpus):
    assert corpus.train.size == 4_000_000
    assert corpus.held_out.size == 400_000


def test_digest_is_the_same_in_another_process(corpus):
    code = (
        "from normscale.config.schema import DataConfig; from normscale.data.corpus import load_corpus; "
        "print(load_corpus(DataConfig()).digest)"
    )
    # Another hash seed: an order taken from a set or from hash() would differ.
    other = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == corpus.digest


def test_splits_share_no_file(corpus):
    train, held_out = (set(corpus.tables[split]["place"]) for split in ("train", "held_out"))
    assert train
    assert held_out
    assert not train & held_out


def test_sample_is_mixed(corpus):
    places = list(corpus.tables["train"]["place"])
    assert places != sorted(places)
    letters = {place[0].lower() for place in places}
    assert len(letters) > 15  # a run of the alphabet would hold a few
    sizes = [len(text) for text in corpus.tables["train"]["text"]]
    assert max(sizes) < 0.06 * sum(sizes)


def test_larger_limit_only_appends(corpus):
    small = load_corpus(DataConfig(max_bytes=100_000))
    assert (small.train == corpus.train[:100_000]).all()
    assert (small.held_out == corpus.held_out[:10_000]).all()
    assert small.digest != corpus.digest


def test_facts_name_python_and_split(corpus):
    facts = corpus.facts()
    assert facts["python"] == sys.version.split()[0]
    assert "by file" in facts["split"]


def test_leaves_out_tests_packages_and_build_settings(tmp_path):
    kept = ["abc.py", "idlelib/editor.py", "json/decoder.py"]
    left = [
        "test/test_abc.py",
        "lib2to3/tests/test_all.py",
        "idlelib/idle_test/test_x.py",
        "site-packages/numpy/core.py",
        "dist-packages/apt.py",
        "json/__pycache__/x.py",
        "_sysconfigdata__linux.py",
        "config-3.11-x86_64-linux-gnu/python-config.py",
        "sitecustomize.py",
        "README.txt",
    ]
    for name in kept + left:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    assert sorted(embedded.library_files(tmp_path)) == kept


def test_missing_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"stdlib": str(tmp_path)})
    with pytest.raises(DataError) as e:
        load_corpus(DataConfig())
    assert "embedded" in str(e.value)
    assert str(tmp_path) in str(e.value)
    assert "\n" not in str(e.value)


def test_share_too_small_for_any_file_is_refused():
    with pytest.raises(DataError, match=r"data\.held_out=1e-06"):
        load_corpus(DataConfig(held_out=1e-6))
