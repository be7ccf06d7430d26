import os
from pathlib import Path

import pytest

from normscale.errors import BadInput
from normscale.tracking.find import find_run, folders_of
from normscale.tracking.spool import SpoolWriter
from tests.tracking.made import make_foreign, make_run


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Returns a folder of runs; the later a name stands here, the newer its records are."""
    names = ("post-L0012-s0-aa", "post-L0012-s1-bb", "deepnorm-L0100-s0-cc", "deepnorm-L0100-s0-cc2")
    for age, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spool.jsonl").write_text("")
        os.utime(tmp_path / name / "spool.jsonl", (1000 + age, 1000 + age))
    (tmp_path / "claims").mkdir()  # no run
    (tmp_path / "sink.log").write_text("")
    return tmp_path


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("post-L0012-s1-bb", "post-L0012-s1-bb"),
        ("post-L0012-s1", "post-L0012-s1-bb"),
        ("s1", "post-L0012-s1-bb"),
        ("bb", "post-L0012-s1-bb"),
        ("deepnorm-L0100-s0-cc", "deepnorm-L0100-s0-cc"),  # a whole name wins over the beginning of another
        ("latest", "deepnorm-L0100-s0-cc2"),
    ],
)
def test_a_run_is_found_by_what_is_enough_of_its_name(word: str, name: str, runs: Path) -> None:
    assert find_run(word, runs) == runs / name


def test_a_run_is_found_by_its_path(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = runs / "post-L0012-s0-aa"
    for word in (f"{folder}", f"{folder}/", f"{folder}/spool.jsonl"):
        assert find_run(word, Path("nowhere")) == folder
    monkeypatch.chdir(runs)
    assert find_run("post-L0012-s0-aa/", Path("nowhere")).resolve() == folder
    assert find_run("post-L0012-s0-aa", Path("nowhere")).resolve() == folder
    monkeypatch.chdir(folder)
    assert find_run(".", Path("nowhere")).resolve() == folder


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("pots-L0012-s0", "nearest: post-L0012-s0-aa"),
        ("zzz", r"no run in .* is called so; the newest are \S+, \S+, \S+ \(4 runs; normscale show lists"),
        ("claims", "is called so"),
        ("sub/folder", "is not the folder of a run"),
        ("/", "is not the folder of a run"),
        ("\x1b[31m\n", r"^\\x1b\[31m\\n: no run"),
        ("x" * 5000, "is called so"),
        ("x/" * 5000, "is not the folder of a run"),
        ("\0/", "is not the folder of a run"),
        ("", "4 runs in .* are called so"),
    ],
)
def test_an_unknown_run_is_one_line_that_helps(word: str, says: str, runs: Path) -> None:
    with pytest.raises(BadInput, match=says):
        find_run(word, runs)


def test_candidates_are_named_newest_first_and_at_most_ten(runs: Path) -> None:
    with pytest.raises(BadInput) as caught:
        find_run("deepnorm-L0100", runs)
    first, *named = str(caught.value).splitlines()
    assert "deepnorm-L0100: 2 runs" in first
    assert [line.split()[0] for line in named] == ["deepnorm-L0100-s0-cc2", "deepnorm-L0100-s0-cc"]
    for seed in range(20):
        (runs / f"pre-s{seed}").mkdir()
        (runs / f"pre-s{seed}" / "spool.jsonl").write_text("")
    with pytest.raises(BadInput) as caught:
        find_run("pre", runs)
    assert len(str(caught.value).splitlines()) == 12
    assert str(caught.value).endswith("and 10 more")


def test_candidates_are_told_apart_by_what_they_are(tmp_path: Path) -> None:
    make_run(tmp_path, "post", 12, steps=20, run_id="a-post", lr=3e-4)
    make_run(tmp_path, "deepnorm", 48, seed=3, steps=30, run_id="a-deep", end=False)
    make_foreign(tmp_path, "a-gpt")
    (tmp_path / "a-torn").mkdir()
    (tmp_path / "a-torn" / "spool.jsonl").write_bytes(b'{"kind":"start","config":7}\n\xff')
    with pytest.raises(BadInput) as caught:
        find_run("a-", tmp_path)
    lines = {line.split()[0]: " ".join(line.split()[1:]) for line in str(caught.value).splitlines()[1:]}
    assert lines["a-post"].startswith("post, M=12, seed 0, lr 0.0003, step 20, written 0:0")
    assert lines["a-deep"].startswith("deepnorm, M=48, seed 3, lr 0.001, step 30, written")
    assert lines["a-gpt"].startswith("'gpt', step 8, written")
    assert lines["a-torn"].startswith("written")


def named(runs: Path, folder: str, name: str) -> None:
    with SpoolWriter(runs / folder, 1) as spool:
        spool.start(run_id=folder, config={"name": name})


def test_a_run_is_found_by_the_name_that_it_was_given(tmp_path: Path) -> None:
    for folder, name in (("post-1", "mine"), ("mine-too-2", "other"), ("pre-3", "twice"), ("pre-4", "twice")):
        named(tmp_path, folder, name)
    named(tmp_path, "deep-5", "run")  # the name of whatever was given none
    assert find_run("mine", tmp_path) == tmp_path / "post-1"  # before what only begins so
    assert find_run("mine-", tmp_path) == tmp_path / "mine-too-2"
    with pytest.raises(BadInput, match=r"twice: 2 runs in .* are called so; give the folder of one:") as caught:
        find_run("twice", tmp_path)
    lines = str(caught.value).splitlines()[1:]
    assert sorted(line.split()[0] for line in lines) == ["pre-3", "pre-4"]
    assert all("'twice'" in line for line in lines)
    with pytest.raises(BadInput, match=r"no run in .* is called so"):
        find_run("run", tmp_path)
    with pytest.raises(BadInput, match="nearest: twice"):
        find_run("twices", tmp_path)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text("")])
def test_where_there_are_no_runs_it_says_so(make, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "runs")
    with pytest.raises(BadInput, match=r"latest: there are no runs in .*--runs"):
        find_run("latest", tmp_path / "runs")


def test_runs_to_replay_are_named_singly_or_by_their_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/post-1", "runs/post-2", "node3/runs/pre-1"):
        make_run(tmp_path / name, run_id=".", steps=1)
    runs = Path("runs")
    assert folders_of([], runs) == {runs: None}
    assert folders_of(["post-2", "runs/post-1", "post-2"], runs) == {runs: ["post-2", "post-1"]}
    assert folders_of(["post-1", "node3/runs"], runs) == {runs: ["post-1"], Path("node3/runs"): None}
    assert folders_of(["node3/runs", "node3/runs/pre-1"], runs) == {Path("node3/runs"): None}
    assert folders_of([f"{tmp_path}/node3/runs/pre-1/"], runs) == {tmp_path / "node3/runs": ["pre-1"]}
    monkeypatch.chdir(tmp_path / "node3/runs/pre-1")
    assert folders_of(["."], runs) == {tmp_path / "node3/runs": ["pre-1"]}
    for word in ("node3", "./node3", "nothing/here"):
        with pytest.raises(BadInput):
            folders_of([word], runs)
