"""Every registered norm: the contract, and what tells the norms apart."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from normscale.errors import ConfigError
from normscale.norms import Norm, find_norm, norm_names
from normscale.ops.residual_norm import residual_norm


def make(name: str, width: int = 8, eps: float = 1e-5, **options: object) -> Norm:
    cls = find_norm(name)
    return cls(width, eps, cls.Options(**options))


def test_the_files_are_found() -> None:
    assert {"layernorm", "rmsnorm"} <= set(norm_names())


def test_an_unknown_norm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model.norm: 'layernrom' is not a norm; did you mean 'layernorm'\?"):
        find_norm("layernrom")


@pytest.mark.parametrize("name", norm_names())
def test_the_fused_entry_equals_norm_of_the_sum(name: str) -> None:
    norm, x, f = make(name), torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(norm.residual(x, f, torch.tensor(2.5)), norm(2.5 * x + f))


@pytest.mark.parametrize("name", norm_names())
def test_eps_reaches_the_function(name: str) -> None:
    x = torch.tensor([[1e-3, -1e-3]])
    loose, tight = make(name, 2, eps=1.0)(x), make(name, 2, eps=1e-12)(x)
    assert loose.abs().max() < 2e-3 < 0.9 < tight.abs().max()


@pytest.mark.parametrize("name", norm_names())
def test_eager_kernels_take_a_float_and_compiled_graphs_a_tensor(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = make(name, eps=0.125)
    assert (type(norm.current_eps()), norm.current_eps()) == (float, 0.125)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert norm.current_eps() is norm.eps_tensor
    assert (norm.eps_tensor.dtype, norm.eps_tensor.shape, float(norm.eps_tensor)) == (torch.float32, (), 0.125)


@pytest.mark.parametrize("name", norm_names())
def test_eps_is_no_part_of_the_state(name: str) -> None:
    assert not any("eps" in key for key in make(name).state_dict())


def test_layernorm_is_shift_invariant_and_rmsnorm_is_not() -> None:
    x = torch.randn(4, 8)
    torch.testing.assert_close(make("layernorm")(x + 3), make("layernorm")(x), rtol=1e-4, atol=1e-5)
    assert (make("rmsnorm")(x + 3) - make("rmsnorm")(x)).abs().max() > 0.1


def test_a_zero_centred_gain_is_one_plus_what_is_trained() -> None:
    plain, centred = make("rmsnorm"), make("rmsnorm", zero_centred=True)
    x, w = torch.randn(4, 8), torch.randn(8)
    torch.testing.assert_close(centred(x), plain(x))
    assert not centred.gamma.any()
    with torch.no_grad():
        plain.gamma.copy_(1 + w)
        centred.gamma.copy_(w)
    torch.testing.assert_close(centred(x), plain(x))
    centred(x).square().sum().backward()
    plain(x).square().sum().backward()
    torch.testing.assert_close(centred.gamma.grad, plain.gamma.grad)


@pytest.mark.parametrize("stream", [torch.bfloat16, torch.float32])
def test_the_one_of_a_zero_centred_gain_is_added_in_fp32_whatever_the_parameters(stream: torch.dtype) -> None:
    norm, x = make("rmsnorm", 32, zero_centred=True).bfloat16(), torch.randn(4, 32).to(stream)
    norm.gamma.data.fill_(0.0065)  # 1 + w is 1.0078 in bf16, half a step of it off
    wide = make("rmsnorm", 32)
    wide.gamma.data.copy_(1 + norm.gamma.data.float())
    assert norm.gamma.dtype is torch.bfloat16
    assert torch.equal(norm(x), wide(x))
    assert make("rmsnorm", zero_centred=True).double()(torch.randn(4, 8).double()).dtype is torch.float64


@pytest.mark.parametrize("name", norm_names())
@pytest.mark.parametrize("params", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_a_narrow_stream_is_not_rounded_before_it_is_normalised(
    name: str, params: torch.dtype, dtype: torch.dtype
) -> None:
    norm, alpha = make(name, 64).to(params), torch.tensor(2.5)
    residual, f = (torch.randn(16, 64).to(dtype).requires_grad_() for _ in range(2))
    leaves, dy = (residual, f, *norm.parameters()), torch.randn(16, 64).to(dtype)
    got = norm.residual(residual, f, alpha)
    want = residual_norm(residual, f, alpha, norm.gamma, norm.bias, norm.spec, backend="eager")  # type: ignore[arg-type]
    assert got.dtype is dtype
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(got, norm((2.5 * residual.float() + f.float()).to(dtype)))


@pytest.mark.parametrize("name", norm_names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_graph_serves_every_alpha_and_eps(name: str, dtype: torch.dtype) -> None:
    x, f, counter = torch.randn(3, 8).to(dtype), torch.randn(3, 8).to(dtype), CompileCounter()

    def residual(norm: Any, alpha: torch.Tensor) -> torch.Tensor:
        return norm.residual(x, f, alpha)  # type: ignore[no-any-return]

    norm, compiled = make(name), torch.compile(residual, backend=counter, fullgraph=True)
    for alpha, eps in ((1.5, 1e-5), (3.0, 0.1)):
        norm.eps_tensor.fill_(eps)
        close = 2e-2 if dtype is torch.bfloat16 else 1e-5
        want = make(name, eps=eps).residual(x, f, torch.tensor(alpha))
        torch.testing.assert_close(compiled(norm, torch.tensor(alpha)), want, rtol=close, atol=close)
    assert counter.frame_count == 1


def test_gain_and_bias_can_be_left_out() -> None:
    assert [name for name, _ in make("layernorm", bias=False).named_parameters()] == ["gamma"]
    x = torch.randn(4, 8)
    for name in norm_names():
        bare = make(name, **dict.fromkeys(find_norm(name).Options.model_fields, False))
        assert list(bare.parameters()) == []
        torch.testing.assert_close(bare(x), make(name)(x))  # gain 1 and bias 0 is where a trained norm starts
