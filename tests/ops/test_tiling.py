"""How rows are dealt to programs, at every width that a kernel serves."""

from dataclasses import replace

import pytest
import torch

from normscale.ops.launch import Gradients, Inputs, Wanted, backward_calls, backward_plan
from normscale.ops.spec import NormSpec
from normscale.ops.tiling import (
    WIDEST,
    WIDEST_PLAIN,
    Demand,
    backward_tiling,
    forward_tiling,
    is_split,
    weights_tiling,
)

CPU = torch.device("cpu")
WIDTHS = (1, 2, 3, 17, 64, 100, 512, 768, 1024, 4095, 4096, 8192, 8193, 12288, 12289, WIDEST)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_tiles_cover_the_rows_and_partial_sums_stay_small(width: int, kind: str) -> None:
    demand = Demand(kind, 2)  # type: ignore[arg-type]
    for n_rows in (0, 1, 39, 40, 4096, 10**6):
        forward = forward_tiling(n_rows, width, CPU, demand)
        assert forward.block >= width
        assert forward.programs * forward.rows >= n_rows
        assert forward.programs * forward.rows < n_rows + forward.rows
        assert forward.warps in (1, 2, 4, 8, 16, 32)
        backward = backward_tiling(n_rows, width, CPU, demand, sums=True)
        assert backward.programs <= -(-n_rows // backward.rows)
        if is_split(width, demand):
            backward = weights_tiling(n_rows, width, CPU)
        else:
            assert backward.programs <= 2 * 132
        assert backward.programs <= max(1, n_rows // 40)


@pytest.mark.parametrize("width", [w for w in WIDTHS if w <= 8192])
def test_a_rows_bits_depend_neither_on_how_many_there_are_nor_on_being_measured(width: int) -> None:
    for itemsize in (2, 4):
        plain, measured = (Demand("layernorm", itemsize, measured=m) for m in (False, True))
        for made in (forward_tiling, lambda *of: backward_tiling(*of, sums=True)):
            few, many, watched = (made(n, width, CPU, d) for n, d in ((10, plain), (10**5, plain), (10, measured)))
            for other in (many, watched):
                assert (few.block, few.rows, few.warps, few.reread) == (
                    other.block,
                    other.rows,
                    other.warps,
                    other.reread,
                )
        assert is_split(width, plain) is is_split(width, measured)
        sums = [backward_tiling(10**5, width, CPU, demand, sums=True).programs for demand in (plain, measured)]
        assert sums[0] == sums[1]  # nor do the weights' gradients


@pytest.mark.parametrize("rows", [3, 140, 1000])
@pytest.mark.parametrize("vector", [False, True])
@pytest.mark.parametrize("width", [1024, 12_290, WIDEST])
def test_a_folded_handle_leaves_a_row_of_partials_for_every_program(width: int, vector: bool, rows: int) -> None:
    pytest.importorskip("triton")
    from normscale.ops import registered  # noqa: F401 (it registers the operations)

    x, dy, dh = (torch.empty(rows, width, device="meta") for _ in range(3))
    alpha, gamma = torch.empty((), device="meta"), torch.empty(width, device="meta")
    next_alpha = torch.empty((width,) if vector else (), device="meta")
    spec, moments = NormSpec("rmsnorm", 1e-5), torch.empty(1, rows, device="meta")
    *_, dz_partials = torch.ops.normscale.norm_backward(
        dy, dh, next_alpha, None, x, x, alpha, gamma, None, moments, 0.0, spec.kind, False,
        None, None, False, True, False, False, True,
    )  # fmt: skip
    inputs, gradients = Inputs(x, x, alpha, gamma, None, 0.0, spec), Gradients(dy, dh, next_alpha)
    plan = backward_plan(inputs, gradients, measured=True, want_affine=True)
    assert plan.folded is (width > WIDEST_PLAIN)
    if plan.folded:
        gradients = Gradients(dy)
    partials = torch.empty(plan.partial_rows, width, device="meta")
    wanted = Wanted(dx=x, dgamma=partials, dz_partials=dz_partials)
    first, *_ = backward_calls(inputs, gradients, moments, wanted, plan)
    assert first.grid == (dz_partials.shape[0],)
    short = replace(wanted, dz_partials=dz_partials[1:])
    with pytest.raises(AssertionError, match="writes its row"):
        list(backward_calls(inputs, gradients, moments, short, plan))
