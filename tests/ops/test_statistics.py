import pytest
import torch

from normscale.ops.statistics import statistics, write_row


def test_sum_of_squares_absmax_and_count() -> None:
    assert statistics(torch.tensor([[3.0, -4.0], [0.0, 1.0]])).tolist() == [26.0, 4.0, 0.0]


def test_non_finite_entries_are_counted_and_show() -> None:
    row = statistics(torch.tensor([1.0, float("nan"), float("inf"), float("-inf")]))
    assert row[2] == 3
    assert not torch.isfinite(row[:2]).any()


@pytest.mark.parametrize("bad", [1, 2, 5])
def test_every_non_finite_entry_counts_once(bad: int) -> None:
    x = torch.ones(2, 4)
    x.view(-1)[:bad] = float("inf")
    assert statistics(x)[2] == bad


def test_half_precision_is_summed_in_fp32() -> None:
    assert statistics(torch.full((2,), 300.0, dtype=torch.float16))[0] == 180_000.0


def test_a_row_is_overwritten_not_added_to() -> None:
    rows = torch.zeros(3, 3)
    for _ in range(2):
        write_row(rows, torch.tensor([1]), torch.tensor([2.0], requires_grad=True))
    assert rows.tolist() == [[0, 0, 0], [4.0, 2.0, 0.0], [0, 0, 0]]
