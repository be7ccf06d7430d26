"""The order in which culprits are early, and that ranks come to one."""

import itertools

import pytest
import torch

from normscale.probes.agreement import FIELDS_BYTES, NONE, _write, agree, key_of
from normscale.probes.culprit import Culprit
from normscale.probes.walk import Counts
from tests.integration.ranks import run_two


def culprit(phase: str = "forward", counts: Counts = Counts(1, 0, 0, 4), **fields: object) -> Culprit:  # noqa: B008
    said = {"module": "m", "type": "M", "tensor": "output", "device": "cpu", "micro_batch": 0}
    return Culprit.found(phase, counts, **said | fields)  # type: ignore[arg-type]


def test_keys_sort_as_culprits_are_early() -> None:
    rising = [
        key_of(culprit(order=3), 0),
        key_of(culprit(order=3), 1),
        key_of(culprit(order=3, counts=Counts(0, 1, 0, 4)), 0),
        key_of(culprit(order=3, counts=Counts(0, 0, 1, 4)), 0),
        key_of(culprit(order=4), 0),
        key_of(culprit("backward", order=1), 0),
        key_of(culprit(micro_batch=1), 0),
        key_of(culprit(micro_batch=1, order=10**9), 10**9),
        key_of(culprit(reproduced=False), 0),
        key_of(culprit("norm", micro_batch=10**9, order=10**9, reproduced=False), 10**9),
    ]
    assert all(a < b for a, b in itertools.pairwise(rising))
    assert rising[-1] < NONE < 2**63


def test_one_process_agrees_with_itself() -> None:
    one = culprit()
    assert agree(one) is one
    assert agree(None) is None


@pytest.mark.slow
def test_two_ranks_get_the_earliest_and_replay_together() -> None:
    run_two("culprit_worker")


def test_what_is_too_long_to_send_gets_shorter() -> None:
    sent = torch.zeros(FIELDS_BYTES, dtype=torch.uint8)
    long = culprit(note="n" * FIELDS_BYTES)
    _write(sent, long)
    assert b'"note": ""' in bytes(sent.tolist())
