"""Statistics as extra outputs: equal to those of the tensors, wherever they are not finite too, and without effect."""

import pytest
import torch
from torch import Tensor

from normscale.ops.statistics import Statistics, statistics
from normscale.ops.tiling import WIDEST_PLAIN
from tests.ops.compare import DEVICE, run
from tests.ops.inputs import NON_FINITE, problem
from tests.ops.oracle import Op, Problem, reference

OPS: tuple[Op, ...] = ("norm", "add_norm", "residual_norm")
KINDS = ("layernorm", "rmsnorm")
WIDTHS = (40, 100, 1000, 9001)


def places() -> Statistics:
    """Row 2 for z, 4 for y, and 1 of another destination for dz; what is not written stays at -7."""
    rows, grad_rows = (torch.full((n, 3), -7.0, device=DEVICE) for n in (6, 3))
    z, y, dz = (torch.tensor([n], device=DEVICE) for n in (2, 4, 1))
    return Statistics(rows, z, y, grad_rows, dz)


def measured(one: Problem) -> tuple[dict[str, Tensor], Statistics]:
    at = places()
    return run(one, statistics=at), at


def assert_near(found: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), want, rtol=1e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_those_of_the_tensors(width: int, op: Op, kind: str) -> None:
    for rows in (1, 5, 90) if width < 1000 else (3,):
        one = problem(op, kind, (rows, width))
        plain = run(one)
        got, at = measured(one)
        for name, value in plain.items():
            if width <= WIDEST_PLAIN:
                assert torch.equal(got[name], value), f"measuring changes {name}"
            else:  # other warps and one kernel more: see `ops.tiling`
                torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)
        want = reference(one, z=got.get("z"))
        z = got.get("z", want["z"])
        assert_near(at.rows[2], statistics(z.float()))
        assert_near(at.rows[4], statistics(got["y"]))
        # dz is the gradient of the sum: dx before dropout, of the stream too where it is kept.
        assert at.grad_rows is not None
        assert_near(at.grad_rows[1], statistics(got["dx"]))
        assert (at.rows[[0, 1, 3, 5]] == -7).all()
        assert (at.grad_rows[[0, 2]] == -7).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [40, 1000])
def test_non_finite_entries_are_counted_and_show(width: int, op: Op, kind: str) -> None:
    for names in ((["inf"]), (["nan"]), (["nan", "inf", "-inf"])):
        one = problem(op, kind, (3, width))
        one.x = one.x.clone()
        for i, name in enumerate(names):
            one.x[1, 3 + 11 * i] = NON_FINITE[name]
        _, at = measured(one)
        found = at.rows[2].cpu()
        assert found[2] == len(names)
        if "nan" in names:
            assert found[:2].isnan().all()
        else:
            assert found[:2].isinf().all()
        assert at.rows[4, 2] >= 1


@pytest.mark.parametrize("kind", KINDS)
def test_statistics_of_half_precision_are_summed_in_fp32(kind: str) -> None:
    one = problem("residual_norm", kind, (4, 96), torch.float16, alpha=torch.tensor(6.7))
    one.residual = torch.full((4, 96), 6e4, dtype=torch.float16)
    got, at = measured(one)
    found = at.rows[2].cpu()
    want = reference(one)["z"]
    torch.testing.assert_close(found[0].double(), want.square().sum(), rtol=1e-5, atol=0)
    torch.testing.assert_close(found[1].double(), want.abs().max(), rtol=1e-5, atol=0)
    assert found[2] == 0
    assert_near(at.rows[4], statistics(got["y"]))


@pytest.mark.parametrize("kind", KINDS)
def test_each_may_be_left_out(kind: str) -> None:
    full = places()
    for part in (Statistics(full.rows, full.z), Statistics(full.rows, None, full.y)):
        full.rows.fill_(-7)
        run(problem("residual_norm", kind, (3, 40)), statistics=part)
        assert (full.rows[2] == -7).all() == (part.z is None)
        assert (full.rows[4] == -7).all() == (part.y is None)


@pytest.mark.parametrize("op", OPS)
def test_no_rows_have_no_size(op: Op) -> None:
    _, at = measured(problem(op, shape=(0, 40)))
    assert (at.rows[[2, 4]] == 0).all()


def test_a_large_mean_does_not_spoil_the_sum_of_squares() -> None:
    one = problem("norm", "layernorm", (3, 1000), x=1e4 + torch.randn(3, 1000))
    _, at = measured(one)
    torch.testing.assert_close(at.rows[2, 0].cpu().double(), one.x.double().square().sum(), rtol=1e-6, atol=0)


def test_dz_before_dropout_is_what_is_measured() -> None:
    one = problem("residual_norm", "layernorm", (4, 100), alpha=torch.tensor(1.0), dropout=0.5)
    got, at = measured(one)
    assert at.grad_rows is not None
    assert_near(at.grad_rows[1], statistics(got["dresidual"]))
