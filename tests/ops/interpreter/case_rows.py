"""Rows that broke norms elsewhere: no variance, large means, outliers, denormals, huge and non-finite numbers."""

import pytest
import torch
from torch import Tensor

from tests.ops.compare import ROUNDING, SUMMED, check, distance, run
from tests.ops.inputs import NON_FINITE, ROWS, problem
from tests.ops.oracle import Op, Problem, reference

KINDS = ("layernorm", "rmsnorm")
OPS: tuple[Op, ...] = ("norm", "add_norm", "residual_norm")
# 40 columns are a tile of many rows, 1000 one of few.
WIDTHS = (40, 1000)
PLACES = [*((op, 40) for op in OPS), ("residual_norm", 1000)]


def with_row(one: Problem, row: Tensor, at: int = 1) -> Problem:
    """Puts `row` into the branch, and zeros into the residual beside it, so that z is that very row."""
    one.x = one.x.clone()
    one.x[at] = row.to(one.x.dtype)
    if one.residual is not None:
        one.residual = one.residual.clone()
        one.residual[at] = 0
    return one


def check_rows(one: Problem, *, bound: float = ROUNDING[torch.float32]) -> dict[str, Tensor]:
    """Asserts the bound row by row, since one large row would hide the others in a norm over all."""
    want, got = reference(one, round_z=True), run(one)
    for name in ("y", "dx", "dresidual"):
        for row in range(len(got.get(name, ()))):
            found = distance(got[name][row], want[name][row])
            assert found <= bound, f"{name}, row {row}: {found:.2e} from fp64"
    for name in ("dgamma", "dbias"):
        if name in got:
            assert (found := distance(got[name], want[name])) <= SUMMED[torch.float32], f"{name}: {found:.2e} from fp64"
    return got


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "width"), PLACES)
@pytest.mark.parametrize("name", ROWS)
def test_each_bad_row_among_good_ones(name: str, width: int, op: Op, kind: str) -> None:
    torch.manual_seed(1)
    check_rows(with_row(problem(op, kind, (3, width)), ROWS[name](width)))


@pytest.mark.parametrize("width", [*WIDTHS, 9000, 13000])
@pytest.mark.parametrize("mean", [1e3, 1e5])
def test_a_large_mean_costs_no_accuracy(mean: float, width: int) -> None:
    # Every row; alpha 2 and branch in units of the last place keep the sum exact in fp32.
    torch.manual_seed(2)
    one = problem("residual_norm", "layernorm", (3, width), alpha=torch.tensor(2.0))
    unit = 2.0 ** -(23 - 17)
    one.residual = ((mean / 2 + torch.randn(3, width)) / unit).round() * unit
    one.x = (torch.randn(3, width) / unit).round() * unit
    check_rows(one)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "width"), PLACES)
@pytest.mark.parametrize("value", NON_FINITE)
def test_a_non_finite_entry_stays_in_its_row(value: str, width: int, op: Op, kind: str) -> None:
    clean = problem(op, kind, (5, width))
    row = clean.x[2].clone()
    row[width // 3] = NON_FINITE[value]
    want = run(with_row(clean, clean.x[2], 2))
    got, eager = (run(with_row(problem(op, kind, (5, width)), row, 2), backend) for backend in ("triton", "eager"))
    others = [0, 1, 3, 4]
    for name in ("y", "dx"):
        assert torch.equal(got[name][others], want[name][others]), f"{name} of other rows moved"
        assert not got[name][2].isfinite().all(), f"{name} hides the {value}"
    assert got["y"][2].isnan()[eager["y"][2].isnan()].all()
    assert got["dgamma"].isnan().any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("size", [1e15, 1e18, 1e25, 1e38])
def test_huge_rows_are_right_or_not_finite_but_never_zero(size: float, width: int, kind: str) -> None:
    # The squares overflow fp32 from about 1e18 on, and 1 / sqrt(Inf) is 0: a row of zeros that nothing reports.
    torch.manual_seed(3)
    row = size * torch.linspace(-3.0, 3.0, width)
    one = with_row(problem("norm", kind, (3, width), affine=""), row)
    want, got = reference(one), run(one)
    for name in ("y", "dx"):
        for i in range(3):
            right = distance(got[name][i], want[name][i]) <= ROUNDING[torch.float32]
            assert right or (i == 1 and not got[name][i].isfinite().any()), f"{name}, row {i}: {got[name][i][:4]}"


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_sums_beyond_65504(kind: str) -> None:
    # alpha = (2 N)^(1/4) at 1000 layers; the sum overflows fp16 and the norm must not.
    one = problem("residual_norm", kind, (3, 96), torch.float16, alpha=torch.tensor(6.7))
    one.residual = (6e4 * torch.sign(torch.randn(3, 96)) * torch.rand(3, 96)).half()
    got = check(one)
    assert got["y"].isfinite().all()
    one = with_row(problem("norm", kind, (3, 96), torch.float16), torch.full((96,), 6e4))
    got = check(one, than_eager=False)
    assert all(value.isfinite().all() for value in got.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_denormals_of_half_precision(kind: str, dtype: torch.dtype) -> None:
    smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    one = with_row(problem("norm", kind, (3, 64), dtype), torch.full((64,), smallest))
    got = check(one, than_eager=False)
    assert got["y"].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-8, 1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_eps_is_added_in_fp32(eps: float, kind: str, dtype: torch.dtype) -> None:
    check(problem("residual_norm", kind, (3, 48), dtype, eps=eps))
    if eps:
        one = with_row(problem("residual_norm", kind, (3, 48), dtype, eps=eps), torch.zeros(48))
        got = run(one)
        assert got["y"].isfinite().all()
        if dtype is torch.float32:  # the gradient of a row without variance is 1/sqrt(eps) large: Inf in fp16
            assert all(value.isfinite().all() for value in got.values())


def test_large_means_in_half_precision_are_recomputed_and_not_rounded() -> None:
    # A z saved in bf16 puts 3e-2 into dx here; recomputed from x and residual it is output rounding only.
    for mean in (10.0, 100.0, 1000.0):
        one = problem("residual_norm", "layernorm", (4, 512), torch.bfloat16, alpha=torch.tensor(2.0))
        one.residual = (mean + torch.randn(4, 512)).bfloat16()
        check(one, round_z=True, than_eager=False)


@pytest.mark.parametrize("kind", KINDS)
def test_one_column_has_no_gradient(kind: str) -> None:
    one = problem("residual_norm", kind, (6, 1), torch.bfloat16)
    one.residual = (100 * torch.randn(6, 1)).bfloat16()
    got = run(one)
    if kind == "layernorm":
        assert got["dx"].abs().max() == 0
        assert distance(got["y"], one.bias.double().expand(6, 1)) < 8e-3  # type: ignore[union-attr]
