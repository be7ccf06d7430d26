"""Every registered norm: the contract, and what tells the norms apart."""

import pytest
import torch

from normscale.errors import ConfigError
from normscale.norms import Norm, find_norm, norm_names


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


def test_gain_and_bias_can_be_left_out() -> None:
    assert [name for name, _ in make("layernorm", bias=False).named_parameters()] == ["gamma"]
    x = torch.randn(4, 8)
    for name in norm_names():
        bare = make(name, **dict.fromkeys(find_norm(name).Options.model_fields, False))
        assert list(bare.parameters()) == []
        torch.testing.assert_close(bare(x), make(name)(x))  # gain 1 and bias 0 is where a trained norm starts
