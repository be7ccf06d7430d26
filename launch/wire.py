"""How a launcher and its agent on another host talk over one ssh connection.

The launcher writes a line of JSON for each message; nothing for a while, or the end of the stream, means that it is
gone. The agent answers with frames, so that what the ranks say passes through unchanged: a kind, a length, the bytes.
What a login shell prints before the agent starts is skipped.
"""

import contextlib
import json
import os
import queue
import struct
import threading
from collections.abc import Iterator
from typing import IO, Any

MAGIC = b"\nnormscale agent 1\n"
HEADER = struct.Struct(">cI")
OUT, ERR, MESSAGE = b"O", b"E", b"M"
LARGEST = 1 << 26
PIECE = 1 << 20
"""What a rank writes goes out in pieces: no line of its is too long, and a beat gets in between."""
BEAT_S = 2.0
LOST_AFTER_S = 30.0


class FrameWriter:
    """The agent's side of the connection. Messages and beats go out in a thread: a full pipe stops no watching."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._write(MAGIC)
        self._thread.start()

    def out(self, text: bytes) -> None:
        """Passes on what ranks wrote on stdout."""
        self._pieces(OUT, text)

    def err(self, text: bytes) -> None:
        """Passes on what ranks wrote on stderr."""
        self._pieces(ERR, text)

    def tell(self, **message: Any) -> None:
        """Sends a message, soon."""
        self._messages.put(message)

    def close(self, wait_s: float) -> None:
        """Waits until all messages are sent, for so long."""
        self._messages.put(None)
        self._thread.join(wait_s)

    def _send(self) -> None:
        while True:
            try:
                message = self._messages.get(timeout=BEAT_S)
            except queue.Empty:
                message = {"beat": True}
            if message is None:
                return
            self._frame(MESSAGE, json.dumps(message).encode())

    def _pieces(self, kind: bytes, text: bytes) -> None:
        for begin in range(0, len(text), PIECE):
            self._frame(kind, text[begin : begin + PIECE])

    def _frame(self, kind: bytes, payload: bytes) -> None:
        if payload:
            self._write(HEADER.pack(kind, len(payload)) + payload)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        with self._lock, contextlib.suppress(OSError):  # the launcher is gone; the end of our stdin says so, too
            while left:
                left = left[os.write(self._descriptor, left) :]


def frames(stream: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Gives the frames of an agent, kind and payload, to the end of the stream."""
    if not _skip_to_magic(stream):
        return
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        kind, length = HEADER.unpack(header)
        payload = stream.read(length) if length <= LARGEST else b""
        if len(payload) < length:
            return
        yield kind, payload


def _skip_to_magic(stream: IO[bytes]) -> bool:
    seen = b"\n"
    while byte := stream.read(1):
        seen = (seen + byte)[-len(MAGIC) :]
        if seen == MAGIC:
            return True
    return False


def line(**message: Any) -> bytes:
    """Returns a message of the launcher."""
    return json.dumps(message).encode() + b"\n"
