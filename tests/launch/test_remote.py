"""What hosts write, as it is passed on here."""

import queue
import sys

import pytest

from launch.hostfile import Host
from launch.remote import Event, Remote

WRITER = """
from launch.wire import FrameWriter
out = FrameWriter(1)
out.out(b"a\\nb")
out.err(b"apart\\n")
out.out(b"c\\n\\nd\\re\\n")
"""


@pytest.mark.parametrize(
    ("labelled", "shown"),
    [(False, b"a\nbc\n\nd\re\n"), (True, b"n1: a\nn1: bc\nn1: \nn1: d\rn1: e\n")],
)
def test_lines_get_the_hosts_name_where_several_hosts_write_apart(
    labelled: bool, shown: bytes, capsysbinary: pytest.CaptureFixture[bytes]
):
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    remote = Remote(Host("n1", 1), ["sh", "-c", 'read x; exec "$@"', "", sys.executable, "-c", WRITER], events)
    remote.labelled = labelled
    remote.send(start=True)
    assert events.get(timeout=20) == (remote, None)  # the end
    remote.close(5)
    out, err = capsysbinary.readouterr()
    assert (out, err) == (shown, b"n1: apart\n" if labelled else b"apart\n")
