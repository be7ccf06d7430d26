"""Faults that other projects were caught with, each on the definition and on the kernels."""

import pytest
import torch

from normscale.ops.norm import norm
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from tests.ops.compare import DEVICE, check, run
from tests.ops.inputs import problem

LAYERNORM, RMSNORM = NormSpec("layernorm", 1e-5), NormSpec("rmsnorm", 1e-5)
BACKENDS = pytest.mark.parametrize("backend", ["eager", "triton"])


@BACKENDS
def test_alpha_multiplies_the_residual_and_the_sum_is_normalised(backend: str) -> None:
    # labmlai#145. Alpha on the branch flips every sign, alpha forgotten gives zeros, norm forgotten [6, 7, 8, 9].
    x, branch = torch.tensor([[1.0, 2, 3, 4]], device=DEVICE), torch.tensor([[4.0, 3, 2, 1]], device=DEVICE)
    y = residual_norm(x, branch, torch.tensor(2.0, device=DEVICE), None, None, LAYERNORM, backend=backend)
    torch.testing.assert_close(y.cpu(), torch.tensor([[-1.342, -0.447, 0.447, 1.342]]), rtol=1e-3, atol=1e-3)


@BACKENDS
@pytest.mark.parametrize("width", [3, 17, 96, 129, 384, 768, 1025, 1536, 5120])
def test_padding_is_not_counted_into_the_variance(backend: str, width: int) -> None:
    # unsloth#1867, Liger-Kernel#518, triton#9838: seen only where the mean is not zero and the width no power of two.
    for op in ("norm", "add_norm", "residual_norm"):
        check(problem(op, "layernorm", (2, width)), backend=backend)  # type: ignore[arg-type]


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-8, 1e-12])
def test_rows_without_variance_give_the_bias(backend: str, dtype: torch.dtype, eps: float) -> None:
    # pytorch#41527, DeepSpeed#581: 1e-8 and 1e-12 are 0 in fp16.
    bias = torch.arange(10.0, device=DEVICE)
    for value in (0.0, 3.0):
        x = torch.full((2, 10), value, dtype=dtype, device=DEVICE)
        y = norm(x, torch.ones(10, device=DEVICE), bias, NormSpec("layernorm", eps), backend=backend)
        torch.testing.assert_close(y, bias.to(dtype).expand(2, 10), rtol=0, atol=0)


@BACKENDS
def test_squares_do_not_overflow_half_precision(backend: str) -> None:
    # pytorch#133085: an overflow of the square shows as zeros, not as Inf.
    x = torch.tensor([[1000.0, -1000.0] * 64], dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(norm(x, None, None, RMSNORM, backend=backend), x.sign())
    x = torch.zeros(1, 128, dtype=torch.float16, device=DEVICE)
    x[0, 5] = 60000
    y = norm(x, None, None, RMSNORM, backend=backend)
    assert abs(float(y[0, 5]) - 128**0.5) < 0.01
    assert y.count_nonzero() == 1


@BACKENDS
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_a_strided_last_dimension_is_followed_in_every_pass(backend: str, kind: str) -> None:
    # LightLLM#1467: right statistics and wrong elements.
    base = torch.randn(64, 48) + 1
    for strided in (base[:, ::2], base.t()):
        shape = tuple(strided.shape)
        got = run(problem("norm", kind, shape, x=strided), backend)
        want = run(problem("norm", kind, shape, x=strided.contiguous()), backend)
        for name, value in want.items():
            if backend == "eager":  # ATen's sums over rows run in the order of the memory
                torch.testing.assert_close(got[name], value, rtol=1e-5, atol=1e-5)
            else:
                assert torch.equal(got[name], value), name


@BACKENDS
def test_a_backward_of_any_rank(backend: str) -> None:
    # FlagGems#5392: a backward with its rows from shape[0] writes past the weights' gradient.
    flat = problem("norm", "layernorm", (12, 64))
    want = run(flat, backend)
    for shape in ((3, 4, 64), (2, 3, 2, 64)):
        assert flat.dy is not None
        got = run(problem("norm", "layernorm", shape, x=flat.x.view(shape), dy=flat.dy.view(shape)), backend)
        for name, value in want.items():
            assert torch.equal(got[name].reshape(value.shape), value), name


@BACKENDS
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_eps_stands_inside_the_root(backend: str, kind: str) -> None:
    # CNTK#3816: outside, a row without variance has an infinite gradient; variance 1e-10 gives 0.5, not 0.003.
    x = torch.full((2, 10), 3.0 if kind == "layernorm" else 0.0)
    got = run(problem("norm", kind, (2, 10), x=x), backend)
    assert got["dx"].isfinite().all()
    x = torch.tensor([[1e-5, -1e-5]], device=DEVICE)
    y = norm(x, None, None, NormSpec(kind, 1e-5), backend=backend)  # type: ignore[arg-type]
    torch.testing.assert_close(y.cpu(), torch.tensor([[0.0031623, -0.0031623]]), rtol=1e-3, atol=0.0)
