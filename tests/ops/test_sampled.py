"""Sampled positions and what is computed of them, against plain computations over everything."""

import math
from itertools import pairwise

import pytest
import torch

from normscale.ops import sampled
from normscale.ops.sampled import SAMPLES, Places, attention_row, keep, places, spread, take, turns

SHAPES = [(1, 1), (1, 7), (1, 100), (2, 8), (3, 50), (5, 64), (8, 64), (9, 3), (16, 2), (40, 33), (300, 1)]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, params=["host", "device"])
def _read_where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads as on the host, and by the operations that run on a device and in compiled code."""
    if request.param == "device":
        monkeypatch.setattr(sampled, "on_host", lambda x: False)


def listed(at: Places, batch: int, length: int) -> list[tuple[int, int]]:
    """The places as (sequence, position)."""
    return [(b, t) for b in range(batch)[at.sequences] for t in range(length)[at.positions]]


@pytest.mark.parametrize(("batch", "length"), SHAPES)
def test_places_are_few_and_spread_over_everything(batch: int, length: int) -> None:
    at = places(batch, length, CPU)
    found = listed(at, batch, length)
    assert min(15, length * min(batch, 4)) <= len(set(found)) == len(found) <= 16
    for of, taken in ((batch, range(batch)[at.sequences]), (length, range(length)[at.positions])):
        assert abs(taken[0] - (of - 1 - taken[-1])) <= 1  # as far from one end as from the other
        assert taken[0] <= taken.step
    assert torch.equal(at.hidden.sum(-1), length - 1 - torch.arange(length)[at.positions])


def test_a_grid_of_four_sequences_and_four_positions() -> None:
    assert listed(places(8, 64, CPU), 8, 64) == [(b, t) for b in (1, 3, 5, 7) for t in (8, 24, 40, 56)]
    assert len(listed(places(2, 8, CPU), 2, 8)) == 16  # all there are


def test_what_is_taken_stands_at_the_places_and_is_kept_in_its_row() -> None:
    x = torch.randn(8, 64, 3, requires_grad=True)
    at = places(8, 64, CPU)
    want = torch.stack([x[b, t] for b, t in listed(at, 8, 64)]).detach()
    assert torch.equal(take(x, at).flatten(0, 1), want)
    samples = torch.zeros(3, 16, 3)
    keep(samples, torch.tensor([1]), x, at)
    assert torch.equal(samples[1], want)
    assert not samples[[0, 2]].any()
    keep(samples, torch.tensor([2]), x[:1, :5].bfloat16(), places(1, 5, CPU))
    assert torch.equal(samples[2, :5], x[0, :5].bfloat16().float())
    assert not samples[2, 5:].any()


def test_angles_are_those_of_the_cosine() -> None:
    x = torch.randn(4, 16, 5)
    want = [
        torch.arccos(torch.cosine_similarity(a.double(), b.double(), dim=-1)).mean() / math.pi for a, b in pairwise(x)
    ]
    torch.testing.assert_close(turns(x), torch.stack(want))
    x[1] = x[0] + 1e-5 * torch.randn(16, 5)
    want = torch.arccos(torch.cosine_similarity(x[0].double(), x[1].double(), dim=-1)).mean() / math.pi
    assert float(turns(x)[0]) == pytest.approx(float(want), rel=1e-5)  # in fp32 it would be 0 or 1e-4
    x[:, 9:] = 0  # a batch of 9 places
    torch.testing.assert_close(turns(x), turns(x[:, :9]))


@pytest.mark.parametrize("batch", [2, 20])
@pytest.mark.parametrize("masks", ["causal", "padding", "both", "none"])
def test_attention_is_that_of_the_whole_matrix_at_the_places(masks: str, batch: int) -> None:
    q, k = (3 * torch.randn(batch, 3, n, 4, requires_grad=True) for n in (6, 6))
    kept = torch.rand(batch, 1, 1, 6) > 0.4
    kept[..., 0] = True
    seen = torch.ones(batch, 1, 6, 6, dtype=torch.bool)
    causal = masks in ("causal", "both")
    if causal:
        seen = seen & torch.ones(6, 6).tril().bool()
    if masks in ("padding", "both"):
        seen = seen & kept
    at = places(batch, 6, CPU)
    given = kept if masks in ("padding", "both") else None
    largest, entropy = attention_row(q, k, at, keep_B11S=given, causal=causal)
    scores = (q.double() @ k.double().mT / 2).masked_fill(~seen, -math.inf)
    weights = scores.softmax(-1)
    whole = torch.special.entr(weights).sum(-1).detach()  # [B, H, T]
    rows = listed(at, batch, 6)
    assert float(largest) == pytest.approx(max(float(scores[b, :, t].detach().max()) for b, t in rows), rel=1e-5)
    want = torch.stack([whole[b, :, t] for b, t in rows]).mean()
    assert float(entropy) == pytest.approx(float(want), rel=1e-4)
    assert not largest.requires_grad


def test_large_logits_have_an_entropy_too() -> None:
    q = torch.full((1, 1, 1, 1), 2e4)
    k = torch.tensor([[1.0], [0.5], [1.0]])[None, None]
    at = places(1, 1, CPU)
    assert attention_row(q, k, at).tolist() == pytest.approx([2e4, math.log(2)], rel=1e-5)
    assert attention_row(q, 1e36 * k, at)[0] == math.inf


@pytest.mark.filterwarnings("error")
def test_what_is_not_finite_shows_without_a_warning() -> None:
    q, k, at = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8), places(1, 4, CPU)
    for bad in (math.nan, math.inf, 1e38):
        assert not math.isfinite(attention_row(q.masked_fill(q > 0, bad), 10 * k, at)[0])
    nothing = torch.zeros(1, 1, 1, 4, dtype=torch.bool)
    largest, entropy = attention_row(q, k, at, keep_B11S=nothing).tolist()
    assert (largest, math.isnan(entropy)) == (-math.inf, True)


def test_autocast_does_not_round_what_is_measured() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    at = places(1, 4, CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = attention_row(q, k, at)
    assert torch.equal(inside, attention_row(q, k, at))


def test_a_query_that_sees_nothing_counts_nowhere() -> None:
    q, k = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    keep_B11S = torch.tensor([False, True, True, True]).view(1, 1, 1, 4)  # padding on the left, under a causal mask
    _, entropy = attention_row(q, k, places(1, 4, CPU), keep_B11S=keep_B11S, causal=True)
    scores = (q @ k.mT / 8**0.5)[..., 1:, 1:].masked_fill(torch.ones(3, 3).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    assert float(entropy) == pytest.approx(float(torch.special.entr(weights).sum(-1).mean()), rel=1e-5)


def test_fewer_places_leave_nothing_of_the_samples_before() -> None:
    samples, row = torch.ones(2, SAMPLES, 3), torch.tensor([1])
    x_BTD = torch.randn(1, 2, 3)
    keep(samples, row, x_BTD, places(1, 2, CPU))
    assert torch.equal(samples[1, :2], x_BTD[0])
    assert not samples[1, 2:].any()
    assert bool((samples[0] == 1).all())


@pytest.mark.parametrize(("batch", "length"), SHAPES)
def test_rows_that_are_spread_are_those_at_the_places(batch: int, length: int) -> None:
    x = torch.randn(batch, length, 3)
    assert torch.equal(spread(x), take(x, places(batch, length, CPU)))
    assert torch.equal(spread(x[0]), take(x[:1], places(1, length, CPU))[0])
    heads = spread(x.unflatten(0, (batch, 1)).expand(-1, 5, -1, -1))
    assert heads.dim() == 4
    assert 1 <= heads.flatten(0, -2).shape[0] <= SAMPLES
