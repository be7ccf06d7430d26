"""Values and gradients over widths, row counts, dtypes, missing parts and wanted gradients."""

import itertools

import pytest
import torch

from tests.ops.compare import check, run
from tests.ops.inputs import WIDTHS, problem
from tests.ops.oracle import Op

OPS: tuple[Op, ...] = ("norm", "add_norm", "residual_norm")
KINDS = ("layernorm", "rmsnorm")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_width(width: int, kind: str) -> None:
    # Rows of mean 1, since numbers of mean 0 do not show padding that is counted into the variance.
    check(problem("residual_norm", kind, (3, width)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["norm", "add_norm"])
@pytest.mark.parametrize("width", [1, 2, 7, 100, 256, 1025, 4100, 8192, 12288])
def test_widths_of_the_other_operations(width: int, op: Op, kind: str) -> None:
    check(problem(op, kind, (3, width)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [17, 64, 1000, 4096])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_half_precision(width: int, op: Op, kind: str, dtype: torch.dtype) -> None:
    check(problem(op, kind, (5, width), dtype))
    check(problem(op, kind, (5, width), dtype, weights=dtype))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("branch", "stream"), itertools.permutations([F32, BF16, F16], 2))
def test_branch_and_stream_of_two_dtypes(kind: str, branch: torch.dtype, stream: torch.dtype) -> None:
    check(problem("residual_norm", kind, (5, 136), branch, stream=stream, alpha=torch.tensor(2.5)))
    check(problem("add_norm", kind, (5, 136), branch, stream=stream))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [torch.tensor(2.83), torch.tensor(-0.5), torch.linspace(0.5, 3.0, 257)])
@pytest.mark.parametrize("dtype", [F32, BF16, torch.float64])
def test_alpha_is_read_in_any_dtype(kind: str, alpha: torch.Tensor, dtype: torch.dtype) -> None:
    one = problem("residual_norm", kind, (5, 257), alpha=alpha.to(dtype))
    if dtype is torch.float64:  # a learned alpha is fp32 at most; this one is a constant
        one.inputs = tuple(n for n in one.inputs if n != "alpha")
        one.alpha = alpha.double()
        check(_rounded_alpha(one))
    else:
        check(one)


def test_a_wide_gradient_is_scaled_after_the_kernel() -> None:
    check(problem("residual_norm", "layernorm", (3, 16384), alpha=torch.linspace(0.5, 3.0, 16384)))


def _rounded_alpha(one):  # type: ignore[no-untyped-def]
    one.alpha = one.alpha.float().double()  # the kernel computes in fp32
    return one


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("affine", ["", "gamma", "bias", "gamma bias"])
def test_gain_or_bias_may_be_missing(op: Op, affine: str) -> None:
    for width in (24, 1000):
        check(problem(op, "layernorm", (4, width), affine=affine))
    check(problem(op, "rmsnorm", (4, 24), affine=affine + " rms"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", [F32, BF16])
def test_a_zero_centred_gain_is_added_in_fp32(kind: str, weights: torch.dtype) -> None:
    one = problem("residual_norm", kind, (4, 48), BF16, weights=weights, zero_centred=True)
    assert one.gamma is not None
    one.gamma = (one.gamma.float() * 0 + 0.0039).to(weights)  # 1 + 0.0039 is 1 in bf16
    got = check(one)
    one.gamma = torch.zeros_like(one.gamma)
    assert not torch.equal(got["y"], run(one)["y"])


@pytest.mark.parametrize("gain", [0.0, 1e-8, -1.0])
def test_gains_from_which_the_input_cannot_be_recovered(gain: float) -> None:
    one = problem("norm", "layernorm", (3, 40))
    assert one.gamma is not None
    one.gamma = torch.full_like(one.gamma, gain)
    one.bias = torch.full_like(one.gamma, 1e3 if gain == 1e-8 else 0.5)
    got = check(one, than_eager=False)
    if gain == 0.0:
        assert got["dx"].abs().max() == 0
        assert got["dgamma"].abs().min() > 0


@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 129, 400, 401])
@pytest.mark.parametrize("width", [24, 64])
def test_every_number_of_rows_in_tiles_of_rows(rows: int, width: int) -> None:
    for kind in KINDS:
        check(problem("norm", kind, (rows, width)))


@pytest.mark.parametrize("rows", [1, 2, 41, 80, 121])
def test_every_number_of_rows_a_program_walks(rows: int) -> None:
    check(problem("residual_norm", "layernorm", (rows, 1030)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_subset_of_gradients(op: Op, kind: str) -> None:
    full = problem(op, kind, (3, 72))
    for name in full.inputs:
        for wants in ((name,), tuple(n for n in full.inputs if n != name)):
            check(problem(op, kind, (3, 72), wants=wants))
    check(problem(op, kind, (3, 72), wants=()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_may_be_missing_on_either_output(kind: str) -> None:
    check(problem("add_norm", kind, (3, 72), dy=None))
    check(problem("add_norm", kind, (3, 72), dz=None))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_rows(op: Op, kind: str) -> None:
    for shape in ((0, 40), (2, 0, 40)):
        got = run(problem(op, kind, shape))
        assert got["y"].shape == shape
        assert got["dx"].shape == shape
        for name in ("dgamma", "dbias"):
            assert name not in got or got[name].abs().max() == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_rank_does_not_matter(op: Op, kind: str) -> None:
    # FlagGems#5392: a backward that takes its rows from shape[0] writes past the buffer.
    flat = problem(op, kind, (12, 64))
    want = check(flat)
    for shape in ((3, 4, 64), (2, 3, 2, 64)):
        names = ("x", "residual", "dy", "dz")
        views = {n: None if (v := getattr(flat, n)) is None else v.view(shape) for n in names}
        got = run(problem(op, kind, shape, **views))
        for name, value in want.items():
            assert torch.equal(got[name].reshape(value.shape), value), name
    check(problem(op, kind, (64,)))  # one row, no batch
