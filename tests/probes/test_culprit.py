"""What a culprit says of itself."""

import json

import torch

from normscale.probes.culprit import LOSS, Culprit
from normscale.probes.walk import Counts, counted, leaves, mapped


def culprit(**fields: object) -> Culprit:
    said = {"module": "blocks.1.ffn", "type": "FeedForward", "tensor": "output", "device": "cpu", "micro_batch": 2}
    return Culprit.found("forward", Counts(3, 1, 0, 512), **said | fields)  # type: ignore[arg-type]


def test_fields_travel_as_json() -> None:
    one = culprit(note="why", beside="blocks.1.ffn.up")
    fields = json.loads(json.dumps(one.fields()))
    assert Culprit.from_fields(fields) == one
    assert Culprit.from_fields(fields | {"from a later version": 1}) == one
    assert fields["kind"] == "NaN"


def test_the_sentence_names_value_module_place_and_rank() -> None:
    one = culprit(note="in its own operations, after 'up'")
    assert one.sentence() == (
        "NaN in output (4 of 512 entries), on the way forward: blocks.1.ffn (FeedForward), micro-batch 2 (from 0),"
        f" rank 0 on {one.host} (cpu); in its own operations, after 'up'"
    )
    assert "the model itself (FeedForward)" in culprit(module="").sentence()
    assert "the loss, outside the model" in culprit(module=LOSS).sentence()


def test_a_norm_that_overflows_is_told_from_a_bad_gradient() -> None:
    one = Culprit.norm_overflow(128, torch.device("cpu"), "Transformer")
    assert (one.phase, one.kind, one.reproduced) == ("norm", "+Inf", False)
    assert "each of the 128 entries of the gradient is finite" in one.sentence()
    assert "micro-batch" not in one.sentence()


def test_kinds_are_counted_apart() -> None:
    bad = torch.tensor([0.0, torch.nan, torch.inf, -torch.inf, -torch.inf])
    assert counted(bad) == Counts(1, 1, 2, 5)
    assert [Counts(n, p, m, 9).kind for n, p, m in ((1, 1, 1), (0, 1, 1), (0, 0, 1))] == ["NaN", "+Inf", "-Inf"]
    assert counted(torch.zeros(3)) is None
    assert counted(torch.tensor([1, 2])) is counted(torch.tensor([True])) is counted(torch.zeros(0)) is None
    assert counted(torch.complex(torch.zeros(2), torch.tensor([0.0, torch.nan]))) == Counts(1, 0, 0, 4)
    assert counted(torch.tensor([torch.nan]).to(torch.float8_e5m2)) == Counts(1, 0, 0, 1)
    assert counted(bad.to(torch.bfloat16)) == counted(bad.half()) == counted(bad.double()) == counted(bad)
    sparse = torch.sparse_coo_tensor([[1]], [torch.nan], (4,))
    assert counted(sparse) == Counts(1, 0, 0, 1)


def test_tensors_are_found_and_exchanged_in_any_container() -> None:
    x, y = torch.zeros(1), torch.ones(1)
    point = torch.max(torch.eye(2), dim=0)  # a named result of torch
    value = ({"h": x}, [y, 3], point)
    assert [path for path, _ in leaves(value, "output")][:2] == ["output[0].h", "output[1][0]"]
    new = mapped(value, "output", lambda path, t: t + 1 if path == "output[0].h" else t, copies=True)
    assert (float(new[0]["h"]), float(value[0]["h"])) == (1, 0)
    assert new[1] is value[1]
    assert mapped(value, "output", lambda path, t: t, copies=True) is value
    kept = mapped(value, "output", lambda path, t: t + 1, copies=False)
    assert kept[0] is value[0]
    assert type(kept[2]) is type(point)
    assert torch.equal(kept[2].values, point.values + 1)
