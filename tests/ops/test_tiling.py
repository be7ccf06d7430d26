"""How rows are dealt to programs, at every width that a kernel serves."""

import pytest
import torch

from normscale.ops.tiling import WIDEST, Demand, backward_tiling, forward_tiling, is_split, weights_tiling

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


def test_tilings_depend_on_nothing_but_their_arguments() -> None:
    demand = Demand("layernorm", 2)
    assert forward_tiling(1000, 768, CPU, demand) == forward_tiling(1000, 768, CPU, demand)
    one, two = (forward_tiling(n, 768, CPU, demand) for n in (10, 1000))
    assert (one.block, one.rows, one.warps) == (two.block, two.rows, two.warps)  # a row's bits do not depend on M
