"""Local text and JSONL: the bytes as they are, splits that share nothing, and one line for each mistake."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from normscale.config.schema import DataConfig
from normscale.data import local
from normscale.data.corpus import load_corpus
from normscale.errors import DataError


def load(source, **options):
    return load_corpus(DataConfig(source=str(source), **options))


def complaint(source, **options) -> str:
    with pytest.raises(DataError) as e:
        load(source, **options)
    message = str(e.value)
    assert "\n" not in message
    assert e.value.__cause__ is None
    assert e.value.exit_code == 2
    return message


def numbered(n: int) -> bytes:
    """Returns n bytes of which every 8 tell where they stand."""
    return b"".join(b"%07d\n" % i for i in range(n // 8))


def records(data: np.ndarray) -> set[bytes]:
    return set(data.tobytes().split(b"\n")) - {b""}


def test_text_is_kept_byte_for_byte(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xff\x00caf\xc3\xa9\r\n\n\n  x\r" * 900)
    corpus = load(file, held_out=0.5)
    # With half of the blocks held out and blocks of 4096 bytes, held-out comes first and they alternate.
    blocks = [file.read_bytes()[i : i + 4096] for i in range(0, file.stat().st_size, 4096)]
    assert corpus.held_out.tobytes() == b"".join(blocks[0::2])
    assert corpus.train.tobytes() == b"".join(blocks[1::2])


@pytest.mark.parametrize("size", [2_000, 40_960, 400_000])
def test_text_splits_share_nothing_and_lose_nothing(tmp_path, size):
    (tmp_path / "a.txt").write_bytes(numbered(size))
    corpus = load(tmp_path / "a.txt", max_bytes=None)
    places = [list(corpus.tables[split]["place"]) for split in ("train", "held_out")]
    assert not set(places[0]) & set(places[1])
    assert corpus.train.size + corpus.held_out.size == size
    assert abs(corpus.held_out.size / size - 0.1) < 0.06
    if size > 40_960:  # blocks of 4096 are whole records of 8
        train, held_out = records(corpus.train), records(corpus.held_out)
        assert not train & held_out
        assert len(train | held_out) == size // 8


def test_text_is_cut_at_max_bytes(tmp_path):
    (tmp_path / "a.txt").write_bytes(numbered(400_000))
    corpus = load(tmp_path / "a.txt", max_bytes=50_000, held_out=0.2)
    assert (corpus.train.size, corpus.held_out.size) == (50_000, 10_000)


def test_folder_is_its_texts_in_order_of_name(tmp_path):
    for name, text in (("b.txt", b"B" * 5000), ("a.TXT", b"A" * 5000), ("c.md", b"C" * 5000)):
        (tmp_path / name).write_bytes(text)
    corpus = load(tmp_path, held_out=0.5)
    together = corpus.train.tobytes() + corpus.held_out.tobytes()
    assert (together.count(b"A"), together.count(b"B"), together.count(b"C")) == (5000, 5000, 0)
    assert next(iter(corpus.tables["held_out"]["place"])) == "a.TXT:0"


def test_jsonl_is_split_by_line(tmp_path):
    file = tmp_path / "a.jsonl"
    lines = [json.dumps({"body": f"document {i} é"}) for i in range(50)]
    file.write_text("\ufeff" + "\n\n".join(lines) + "\n", encoding="utf-8")
    corpus = load(file, field="body")
    train, held_out = records(corpus.train), records(corpus.held_out)
    assert len(held_out) == 5
    assert not train & held_out
    assert train | held_out == {f"document {i} é".encode() for i in range(50)}
    assert next(iter(corpus.tables["held_out"]["place"])) == "a.jsonl:9"  # the fifth record: blank lines count as lines


def test_missing_names_the_nearest(tmp_path):
    (tmp_path / "shakespeare.txt").write_text("x")
    said = complaint(tmp_path / "shakespare.txt")
    assert "does not exist; did you mean 'shakespeare.txt'?" in said
    assert ".jsonl" in said
    assert "did you mean 'embedded'?" in complaint("embeded")


def test_a_link_to_nothing_is_not_its_own_suggestion(tmp_path):
    (tmp_path / "link.txt").symlink_to("gone.txt")
    said = complaint(tmp_path / "link.txt")
    assert "does not exist (a link to gone.txt, which is not there); give" in said
    assert "did you mean" not in said


def test_a_file_name_need_not_be_text(tmp_path):
    (tmp_path / os.fsdecode(b"bad\xff.txt")).write_bytes(b"x" * 9000)
    corpus = load(tmp_path, held_out=0.5)
    assert next(iter(corpus.tables["held_out"]["place"])) == "bad\\udcff.txt:0"


@pytest.mark.parametrize(
    "record", [{"a\n\x1b[31mb": 1, "text\n": 2}, {f"text{i}": 1 for i in range(50_000)}, {"k" * 10**6: 1}]
)
def test_the_keys_of_a_line_are_shown_plain_and_few(tmp_path, monkeypatch, record):
    compared = []
    real = local.nearest
    monkeypatch.setattr(local, "nearest", lambda word, names: compared.append(names) or real(word, names))
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    said = complaint(tmp_path / "a.jsonl")
    assert said.isprintable()
    assert len(said) < 600
    (names,) = compared  # each comparison takes as long as the name is
    assert len(names) <= local.MAX_COMPARED
    assert max(map(len, names), default=0) <= local.MAX_NAME


def test_folder_without_text(tmp_path):
    (tmp_path / "a.md").write_text("x")
    assert "holds no .txt file" in complaint(tmp_path)


def test_unreadable(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    file.write_text("text " * 1000)
    if os.geteuid() == 0:  # root reads everything

        def refuse(*args, **kwargs):
            raise PermissionError(13, "Permission denied", str(file))

        monkeypatch.setattr("builtins.open", refuse)
    else:
        file.chmod(0)
    said = complaint(file)
    assert str(file) in said
    assert "Permission denied" in said
    assert "permissions" in said


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_empty(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    said = complaint(tmp_path / name)
    assert name in said
    assert "0 bytes" in said


def test_one_byte_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"x")
    assert "training 1 bytes, held-out 0" in complaint(tmp_path / "a.txt")


def test_unknown_extension_and_kind(tmp_path):
    (tmp_path / "a.csv").write_text("x")
    said = complaint(tmp_path / "a.csv")
    assert "'.csv'" in said
    assert ".txt" in said
    assert ".jsonl" in said
    os.mkfifo(tmp_path / "pipe.txt")
    assert "not a regular file" in complaint(tmp_path / "pipe.txt")


@pytest.mark.parametrize("source", [" ", "x" * 5000, "a.txt/b.txt", "~nobody-has-this-name/x.txt"])
def test_odd_names_are_one_line(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("x")
    assert complaint(source).startswith("data.source: ")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": "a"', "a.jsonl:2 is not JSON"),
        (b"[1]", "a.jsonl:2 is not a JSON object"),
        (b'{"text": "\xff"}', "a.jsonl:2 is not UTF-8"),
        (b'{"texts": "a", "id": 1}', "'text' is not in a.jsonl:2; did you mean 'texts'? (the line has: texts, id)"),
        (b"{}", "the line has: nothing"),
        (b'{"text": 3}', "type int at a.jsonl:2"),
        (b'{"text": null}', "type NoneType at a.jsonl:2"),
        (b'{"text": "\\ud800"}', "surrogate"),
        (b"[" * 100_000, "a.jsonl:2 is not JSON that can be read"),
        (b'{"text": ' + b"9" * 5000 + b"}", "a.jsonl:2 is not JSON that can be read"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, said):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "fine"}\n' + line + b"\n")
    assert said in complaint(tmp_path / "a.jsonl")
