"""Hostfiles, good and bad (case PR-019)."""

from pathlib import Path

import pytest

from launch.hostfile import Host, few, parse, ranks_of, read_hosts
from normscale.errors import LaunchError

GOOD = "n1 slots=2\n\n  # spare\nn2   slots=2   \n"


def pairs(text: str) -> list[tuple[str, int]]:
    return [(host.name, host.slots) for host in parse(text)]


@pytest.mark.parametrize("text", [GOOD, GOOD.replace("\n", "\r\n"), f"\ufeff{GOOD}", GOOD.rstrip(), GOOD + "\n#\n"])
def test_blank_lines_comments_and_line_ends(text: str):
    assert pairs(text) == [("n1", 2), ("n2", 2)]


def test_a_comment_after_a_host():
    assert pairs("n1 slots=4 # the old one\n") == [("n1", 4)]


def test_a_bad_entry_is_named_with_file_line_and_content(tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text("n1 slots=2\n\n  # spare\nn2   slots=2   \nn3 lots=2\n")
    with pytest.raises(LaunchError) as caught:
        read_hosts(path)
    assert str(caught.value) == f"{path}:5: 'n3 lots=2' is not 'HOST slots=RANKS', as in: node1 slots=4"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no host in this hostfile"),
        ("# n1 slots=2\n\n", "no host in this hostfile"),
        ("n1\n", "hostfile:1: 'n1' is not"),
        ("n1 slots=0\n", "hostfile:1: 'n1 slots=0' has no slot"),
        ("n1 slots=9999\n", "hostfile:1: 'n1 slots=9999' has too many slots"),
        ("n1 slots=-1\n", "hostfile:1"),
        ("n1 slots=2 max=3\n", "hostfile:1"),
        ("n1 slots = 2\n", "hostfile:1"),
        ("-oProxyCommand=x slots=2\n", "hostfile:1"),
        ("n1;id slots=2\n", "hostfile:1"),
        ("a@-x slots=1\n", "hostfile:1"),
        ("n1 slots=\uff12\n", "hostfile:1"),
        ("n1 slots=2\nme@N1. slots=1\n", "hostfile:2: me@N1. is there twice, first in line 1; write it once"),
        ("n1 slots=2\nn2 slots=1\nn1 slots=1\n", "hostfile:3: n1 is there twice, first in line 1; write it once"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(text: str, says: str):
    with pytest.raises(LaunchError) as caught:
        parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["absent", "folder", "binary"])
def test_a_file_that_cannot_be_read_is_fatal(tmp_path: Path, kind: str):
    path = tmp_path / "hosts"
    if kind == "folder":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"\xff\xfe\x00n1")
    with pytest.raises(LaunchError, match=str(path)):
        read_hosts(path)


def test_include_and_exclude(tmp_path: Path):
    path = tmp_path / "hosts"
    path.write_text("n1 slots=1\nn2 slots=2\nn3 slots=3\n")
    assert read_hosts(path, include=["n3", "n1"]) == [Host("n1", 1, f"{path}:1"), Host("n3", 3, f"{path}:3")]
    assert [host.name for host in read_hosts(path, exclude=["n1"])] == ["n2", "n3"]
    with pytest.raises(LaunchError, match=r"--include n33: not a host of .*did you mean 'n3'"):
        read_hosts(path, include=["n33"])
    with pytest.raises(LaunchError, match="--exclude x: not a host"):
        read_hosts(path, exclude=["x"])
    with pytest.raises(LaunchError, match="both are given"):
        read_hosts(path, include=["n1"], exclude=["n2"])
    with pytest.raises(LaunchError, match=r"no host of .* is left"):
        read_hosts(path, exclude=["n1", "n2", "n3"])


def test_how_hosts_are_told_in_a_line():
    assert ranks_of([Host("n0", 1)]) == "1 rank on 1 host (n0 x 1)"
    assert ranks_of([Host("n0", 1), Host("n1", 2)]) == "3 ranks on 2 hosts (n0 x 1, n1 x 2)"
    assert few([f"n{number}" for number in range(8)]) == "n0, n1, n2, n3, n4, n5, n6, n7"
    assert few([f"n{number}" for number in range(9)]) == "n0, n1, n2, n3, ..., n5, n6, n7, n8"
