"""Parallel files: which are read, and what is said of those that cannot be."""

import gzip
import os

import pytest

from normscale.data.parallel import Pair, files_of, read
from normscale.errors import DataError


def complaint(folder, key: str = "data.source") -> str:
    with pytest.raises(DataError) as e:
        list(read(files_of(str(folder / "x"), ("en", "de"), key), key))
    assert str(e.value).startswith(f"{key}: ")
    assert str(e.value).isprintable()
    return str(e.value)


def test_lines_come_in_pairs_with_their_numbers(tmp_path):
    (tmp_path / "x.en").write_bytes(b"one\n\nthree\r\n")
    (tmp_path / "x.de.gz").write_bytes(gzip.compress(b"eins\nzwei\ndrei"))
    files = files_of(str(tmp_path / "x"), ("en", "de"))
    assert [path.name for path in files] == ["x.en", "x.de.gz"]
    assert list(read(files)) == [Pair(1, b"one", b"eins"), Pair(2, b"", b"zwei"), Pair(3, b"three\r", b"drei")]
    assert [pair.source for pair in read(files_of(str(tmp_path / "x"), ("de", "en")))] == [b"eins", b"zwei", b"drei"]


def test_a_plain_file_comes_before_a_packed_one(tmp_path, monkeypatch):
    for ending in ("en", "de"):
        (tmp_path / f"x.{ending}").write_bytes(b"plain\n")
        (tmp_path / f"x.{ending}.gz").write_bytes(gzip.compress(b"packed\n"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(read(files_of("~/x", ("en", "de")))) == [Pair(1, b"plain", b"plain")]


@pytest.mark.parametrize(("en", "de"), [(2, 3), (3, 2), (0, 1)])
def test_different_numbers_of_lines(tmp_path, en, de):
    (tmp_path / "x.en").write_bytes(b"a\n" * en)
    (tmp_path / "x.de").write_bytes(b"b\n" * de)
    assert f"{tmp_path}/x.en has {en} lines and {tmp_path}/x.de has {de};" in complaint(tmp_path)


def test_a_missing_file_names_both_and_the_nearest(tmp_path):
    (tmp_path / "x.en").write_bytes(b"a\n")
    (tmp_path / "x.dd").write_bytes(b"a\n")
    said = complaint(tmp_path, "data.held_out_source")
    assert f"neither '{tmp_path}/x.de' nor the same with .gz is a file" in said
    assert "bring two files, line n of one the translation of line n of the other" in said
    assert "did you mean" not in said  # x.en is the other side, x.dd another language
    (tmp_path / "xy.de.gz").write_bytes(b"")
    assert "did you mean 'xy.de.gz'?" in complaint(tmp_path)


@pytest.mark.parametrize(("make", "says"), [("mkdir", "a folder"), ("fifo", "not a regular file")])
def test_what_is_there_and_no_file_is_not_suggested(tmp_path, make, says):
    (tmp_path / "x.en").write_bytes(b"a\n")
    if make == "mkdir":
        (tmp_path / "x.de").mkdir()
    else:
        os.mkfifo(tmp_path / "x.de")
    said = complaint(tmp_path)
    assert f"'{tmp_path}/x.de' is {says}; data.source is the path before the ending" in said
    assert "did you mean" not in said


def test_a_path_with_an_ending_says_to_drop_it(tmp_path):
    for name in ("x.en", "x.de.gz"):
        (tmp_path / name).write_bytes(b"a\n")
        with pytest.raises(DataError, match=f"is one of the files; drop its ending, '{name[1:]}': data.source"):
            files_of(str(tmp_path / name), ("en", "de"))


def test_damaged_files_are_named_with_the_line(tmp_path):
    (tmp_path / "x.en").write_bytes(b"a\n" * 40_000)
    whole = gzip.compress(os.urandom(1000) + b"\n" + b"a\n" * 40_000)
    packed = tmp_path / "x.de.gz"
    packed.write_bytes(whole[: len(whole) // 2])
    said = complaint(tmp_path)
    assert f"{packed} cannot be read after line " in said
    assert "end-of-stream" in said
    packed.write_bytes(b"not gzip")
    assert "x.de.gz cannot be read after line 0 (Not a gzipped file" in complaint(tmp_path)
    packed.write_bytes(whole[:700] + b"\xff" * 50 + whole[750:])
    assert "x.de.gz cannot be read after line" in complaint(tmp_path)


@pytest.mark.parametrize("base", ["x" * 5000, "a\x01b", " ", "nowhere/at/all", "~nobody-has-this-name/x"])
def test_odd_names_are_one_line(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as e:
        files_of(base, ("en", "de"))
    assert str(e.value).isprintable()
    assert len(str(e.value)) < 700
