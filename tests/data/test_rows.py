"""The split by position, and documents as bytes."""

import pytest

from normscale.data.rows import document, held_by_position
from normscale.errors import DataError


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 1 / 3, 0.5, 0.9])
def test_held_share_is_exact_and_evenly_spread(share):
    held = [held_by_position(i, share) for i in range(3000)]
    assert abs(sum(held) - 3000 * share) <= 1
    for start in range(0, 2900, 100):
        assert abs(sum(held[start : start + 100]) - 100 * share) <= 1


def test_documents_end_in_one_newline():
    assert document("a", "f:1", "text") == b"a\n"
    assert document("a\n", "f:1", "text") == b"a\n"
    assert document("", "f:1", "text") == b""
    assert document("é\r\n", "f:1", "text") == "é\r\n".encode()


@pytest.mark.parametrize(("text", "said"), [(3, "type int"), (None, "type NoneType"), ("a\ud800", "surrogate")])
def test_refuses_what_is_not_text(text, said):
    with pytest.raises(DataError) as e:
        document(text, "f.jsonl:7", "body")
    assert "data.field: 'body'" in str(e.value)
    assert "f.jsonl:7" in str(e.value)
    assert said in str(e.value)
