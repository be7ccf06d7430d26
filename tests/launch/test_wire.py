"""What passes between a launcher and an agent."""

import io
import os
import time

import pytest

from launch import wire
from launch.wire import ERR, HEADER, MAGIC, MESSAGE, OUT, FrameWriter, frames


@pytest.mark.parametrize("before", [b"", b"Welcome\n", b"motd without end", b"\x00\xff\nnormscale", MAGIC[:7]])
def test_frames_pass_whatever_a_login_shell_says_before(before: bytes):
    frame = HEADER.pack(OUT, 3) + b"a\x00\n"
    assert list(frames(io.BytesIO(before + MAGIC + frame + HEADER.pack(ERR, 1) + b"e"))) == [
        (OUT, b"a\x00\n"),
        (ERR, b"e"),
    ]


def test_a_stream_that_breaks_off_ends_the_frames():
    assert list(frames(io.BytesIO(MAGIC + HEADER.pack(OUT, 3) + b"ab"))) == []
    assert list(frames(io.BytesIO(b"Welcome\n"))) == []
    assert list(frames(io.BytesIO(MAGIC + HEADER.pack(OUT, 0xFFFFFFFF) + b"ab"))) == []


def test_the_agent_s_side_writes_what_the_launcher_s_reads(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "BEAT_S", 0.1)
    read, write = os.pipe()
    writer = FrameWriter(write)
    writer.out(b"")
    writer.out(b"o" * 5000)
    writer.err(b"e")
    writer.tell(hello={"host": "é"})
    time.sleep(0.25)
    writer.close(5)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        found = list(frames(stream))
    assert [one for one in found if one[0] != MESSAGE] == [(OUT, b"o" * 5000), (ERR, b"e")]
    messages = [payload for kind, payload in found if kind == MESSAGE]
    assert messages[0] == b'{"hello": {"host": "\\u00e9"}}'
    assert set(messages[1:]) == {b'{"beat": true}'}


def test_what_a_rank_says_without_end_comes_in_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "PIECE", 4)
    read, write = os.pipe()
    writer = FrameWriter(write)
    writer.err(b"0123456789")
    writer.close(5)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        assert [payload for kind, payload in frames(stream) if kind == ERR] == [b"0123", b"4567", b"89"]
