import pytest
import torch

from normscale.ops.statistics import PIECE, statistics, watch, write_row, write_sum


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


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(3, 50),
        torch.randn(3, 50).T,
        torch.randn(4, 5).bfloat16(),
        torch.tensor([1.0, float("nan"), -2.0]),
        torch.tensor([1.0, float("-inf")]),
        torch.tensor([-3e30, 1.0]),  # finite, but its square is not
        torch.tensor([[-7.0]]).expand(3, 4),
        torch.zeros(2, 0),
        torch.randn(3, PIECE) * torch.tensor([[1.0], [5.0], [2.0]]),  # more than one piece
        -torch.rand(2 * PIECE + 3),
        torch.full((PIECE + 1,), float("nan")),
        torch.cat([torch.ones(PIECE), torch.tensor([float("inf"), float("nan")])]),
        torch.full((2, PIECE), 6e16),  # the pieces' squares are finite, their sum is not
    ],
)
def test_what_is_read_on_the_host_is_what_the_operations_give(x: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    read = statistics(x)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    # Half a million squares summed in fp32 in another order, which is the processor's.
    torch.testing.assert_close(read, statistics(x), equal_nan=True, rtol=5e-6, atol=1e-5)
    assert read.dtype is torch.float32


def test_the_sum_is_written_where_it_is_wanted() -> None:
    sums = torch.zeros(3, 1)
    write_sum(sums, torch.tensor([2]), torch.tensor([[1.5, -4.0]], dtype=torch.bfloat16))
    write_sum(None, torch.tensor([2]), torch.ones(2))
    assert sums.tolist() == [[0], [0], [-2.5]]


def test_a_watched_tensor_is_the_same_and_its_gradient_is_measured() -> None:
    x, rows = torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.zeros(2, 3)
    y = watch(x, rows, torch.tensor([1]))
    assert torch.equal(x, y)
    (y * y).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 4.0, 6.0]
    assert rows.tolist() == [[0, 0, 0], [56.0, 6.0, 0]]
    assert watch(x, None, torch.tensor([1])) is x


def test_what_reads_a_tensor_beside_its_watched_one_has_no_share() -> None:
    leaf, rows = torch.tensor([1.0, 2.0], requires_grad=True), torch.zeros(2, 3)
    x = leaf * 1.0
    y = watch(x, rows, torch.tensor([0]))
    z = watch(y, rows, torch.tensor([1]))
    (100 * x + 10 * y + z).sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [111.0, 111.0]
    assert rows[:, 1].tolist() == [11.0, 1.0]
