"""Every registered norm: the contract, and what tells the norms apart."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch._dynamo.testing import CompileCounter

from normscale.errors import BackendError, ConfigError
from normscale.norms import find_norm, norm_names
from normscale.ops.residual_norm import residual_norm
from normscale.ops.spec import NormSpec
from tests.norms.made import denormals
from tests.norms.made import made as make

NORMS = {
    *("layernorm", "rmsnorm", "scalenorm", "prmsnorm", "dyt", "derf", "groupnorm", "batchnorm", "adanorm"),
    *("cogview", "maxnorm"),
}
RELATIVE = {"cogview", "maxnorm"}  # eps stands against the largest value of the input
PARAMETERS = {
    **{name: {"gamma", "bias"} for name in ("layernorm", "groupnorm", "batchnorm", "cogview")},
    **{name: {"gamma"} for name in ("rmsnorm", "prmsnorm", "maxnorm")},
    "scalenorm": {"length"},
    "adanorm": set(),
    "dyt": {"gamma", "bias", "alpha_tanh"},
    "derf": {"gamma", "bias", "alpha_erf", "shift"},
}


def test_the_files_are_found() -> None:
    assert set(norm_names()) == NORMS == PARAMETERS.keys()


@pytest.mark.parametrize("name", norm_names())
def test_every_norm_says_where_it_is_from(name: str) -> None:
    assert "Reference:" in (find_norm(name).__doc__ or "")


@pytest.mark.parametrize("name", norm_names())
def test_what_is_trained_and_where_it_starts(name: str) -> None:
    assert {parameter for parameter, _ in make(name).named_parameters()} == PARAMETERS[name]
    started = make(name, **{"gamma_init": 0.25} if "gamma_init" in find_norm(name).Options.model_fields else {})
    if "gamma" in PARAMETERS[name]:
        assert torch.equal(started.gamma, torch.full((8,), 0.25))
        centred = make(name, zero_centred=True, gamma_init=0.25)
        assert torch.equal(centred.gamma, torch.full((8,), -0.75))
        x = torch.randn(3, 8)
        torch.testing.assert_close(centred(x), started(x))
        assert (started(x) - make(name)(x)).abs().max() > 0.1
    assert all(p.dim() == 1 for p in started.parameters())  # FSDP2 shards no 0-d parameter


DEFAULTS: dict[str, dict[str, Any]] = {
    "adanorm": {"scale": 1.0, "k": 0.1},
    "batchnorm": {"momentum": 0.1, "sync": True},
    "cogview": {"over": "tensor"},
    "derf": {"alpha_erf": 0.5, "shift": 0.0},
    "dyt": {"alpha_tanh": 0.5},
    "groupnorm": {"groups": None},
    "layernorm": {"eps_place": "inside"},
    "maxnorm": {},
    "prmsnorm": {"share": 0.0625},
    "rmsnorm": {"eps_place": "inside"},
    "scalenorm": {"gain": True, "length": None},
}
AFFINE = {"gain": True, "gamma_init": 1.0, "zero_centred": False}


@pytest.mark.parametrize("name", norm_names())
def test_options_are_what_the_papers_have_unless_stated(name: str) -> None:
    options = find_norm(name).Options().model_dump()
    affine = AFFINE if "gamma" in PARAMETERS[name] else {}
    affine = affine | ({"bias": True} if "bias" in PARAMETERS[name] else {})
    assert options == DEFAULTS[name] | affine


def test_an_unknown_norm_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"model.norm: 'layernrom' is not a norm; did you mean 'layernorm'\?"):
        find_norm("layernrom")


@pytest.mark.parametrize("name", norm_names())
def test_the_fused_entry_equals_norm_of_the_sum(name: str) -> None:
    norm, x, f = make(name), torch.randn(3, 8), torch.randn(3, 8)
    torch.testing.assert_close(norm.residual(x, f, torch.tensor(2.5)), norm(2.5 * x + f))


@pytest.mark.parametrize("name", norm_names())
def test_eps_reaches_the_function(name: str) -> None:
    x = torch.tensor([[1e-3, -1e-3, 1e-3, -1e-3], [-1e-3, 1e-3, -1e-3, 1e-3]])
    loose, tight = make(name, 4, eps=1.0)(x), make(name, 4, eps=1e-12)(x)
    if not find_norm(name).has_eps:
        assert torch.equal(loose, tight)
    elif name in RELATIVE:
        assert 0.001 < ((tight - loose) / tight).abs().max() < 0.5
    else:
        assert loose.abs().max() < 3e-3 < 0.8 < tight.abs().max()


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


@pytest.mark.parametrize("cast", [torch.nn.Module.half, torch.nn.Module.bfloat16])
@pytest.mark.parametrize("name", norm_names())
def test_constants_stay_wide_where_a_norm_is_cast(name: str, cast: Any) -> None:
    """A small eps would be 0 in fp16, and a constant row NaN under the compiler."""
    norm = cast(make(name, eps=1e-8))
    before = dict(make(name, eps=1e-8).named_buffers())
    for buffer in norm._non_persistent_buffers_set:
        assert torch.equal(norm.get_buffer(buffer), before[buffer])
    x = torch.zeros(3, 8, dtype=norm.gamma.dtype if norm.gamma is not None else torch.float16)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(norm, backend="eager")(x), norm(x))
    assert torch.isfinite(norm(x)).all()


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
@pytest.mark.parametrize("name", norm_names())
def test_no_rows_give_no_rows(name: str, shape: tuple[int, ...]) -> None:
    norm, x = make(name).eval(), torch.zeros(shape, requires_grad=True)
    y = norm(x)
    assert y.shape == x.shape
    y.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and not p.grad.any() for p in norm.parameters())


# What a norm without eps makes of x + 3 and of 4 x: the same as of x, or not.
SHIFTS = {"layernorm", "adanorm", "cogview", "groupnorm", "batchnorm"}
SCALES = {*SHIFTS, "rmsnorm", "prmsnorm", "scalenorm"}


@pytest.mark.parametrize("name", norm_names())
def test_which_norms_see_a_shift_or_a_scale(name: str) -> None:
    norm = make(name, eps=0.0).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    for invariant, other in ((SHIFTS, x + 3.0), (SCALES, 4.0 * x)):
        apart = (norm(other) - norm(x)).abs().max().item()
        assert apart < 1e-9 if name in invariant else apart > 0.05


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_eps_outside_the_root_is_in_units_of_the_input(name: str) -> None:
    norm, x = make(name, eps=0.5, eps_place="outside").double(), torch.randn(4, 8, dtype=torch.float64)
    centred = x - x.mean(-1, keepdim=True) if name == "layernorm" else x
    want = centred / (centred.square().mean(-1, keepdim=True).sqrt() + 0.5)
    torch.testing.assert_close(norm(x), want)
    assert (norm(x) - make(name, eps=0.5).double()(x)).abs().max() > 0.1
    assert norm.spec is None  # no kernel has it
    norm.backend = "triton"
    with pytest.raises(BackendError, match=r"this norm has no kernel; set model.backend=auto, or eager"):
        norm(x)
    norm.backend = "auto"
    zeros = torch.zeros(1, 8, requires_grad=True)  # of which a root of squares would have no gradient
    make(name, eps=0.5, eps_place="outside")(zeros).sum().backward()
    assert torch.isfinite(zeros.grad).all()


@pytest.mark.parametrize("flush", [False, True])
@pytest.mark.parametrize("name", norm_names())
def test_zeros_have_finite_values_and_gradients(name: str, flush: bool) -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    with denormals(flush):
        y = make(name)(x)
        y.backward(torch.randn(2, 8, generator=torch.Generator().manual_seed(0)))
    assert x.grad is not None
    assert torch.isfinite(y).all()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", norm_names())
def test_gradients_are_those_of_the_function(name: str) -> None:
    norm = make(name, 4, eps=0.1, **{"k": 1e-12} if name == "adanorm" else {}).double()  # its factor is detached
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.1 * torch.randn_like(p))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    if name == "cogview":  # whose maximum is detached: the gradient of LayerNorm at an eps in units of the maximum
        largest = float(x.detach().abs().max()) / 8
        want = make("layernorm", 4, eps=0.1 * largest**2).double()
        want.load_state_dict(norm.state_dict())
        (got,) = torch.autograd.grad(norm(x).square().sum(), x)
        torch.testing.assert_close(got, torch.autograd.grad(want(x).square().sum(), x)[0])
        return
    assert torch.autograd.gradcheck(lambda x, *_: norm(x), (x, *norm.parameters()))


CLOSE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", norm_names())
def test_a_compiled_norm_equals_the_eager_one(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    norm, other = make(name), make(name)
    if dtype is torch.float64:
        norm, other = norm.double(), other.double()
    x = torch.randn(2, 5, 8).to(dtype)
    compiled = torch.compile(other, backend="aot_eager", fullgraph=True)
    close = CLOSE[dtype]
    for _ in range(2):  # twice: what is remembered must follow, too
        torch.testing.assert_close(compiled(x), norm(x), rtol=close, atol=close)
    assert compiled(x).dtype is dtype
    norm(x)
    for key, value in norm.state_dict().items():
        torch.testing.assert_close(other.state_dict()[key], value, rtol=close, atol=close)


@pytest.mark.parametrize("name", norm_names())
def test_a_saved_norm_loads_into_a_fresh_one(name: str) -> None:
    norm, fresh, x = make(name), make(name), torch.randn(6, 8)
    with torch.no_grad():
        for p in norm.parameters():
            p.add_(0.3)
    norm(x)
    fresh.load_state_dict(norm.state_dict())
    assert torch.equal(fresh.eval()(x), norm.eval()(x))


@pytest.mark.parametrize("name", sorted({*norm_names()} - {"maxnorm"}))  # whose output is as large as its input
def test_narrow_inputs_have_statistics_in_fp32(name: str) -> None:
    x = (400.0 * torch.randn(4, 8)).half()  # whose squares overflow fp16
    got = make(name)(x)
    assert got.dtype is torch.float16
    torch.testing.assert_close(got.float(), make(name)(x.float()), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("layernorm", {"gain": False, "gamma_init": 0.5}, "gamma_init would do nothing with gain=false"),
        ("layernorm", {"gain": False, "zero_centred": True}, "zero_centred would do nothing with gain=false"),
        ("dyt", {"alpha_tanh": 0}, "greater than 0"),
        ("rmsnorm", {"gamma_init": 3.41e38}, "ends at 3.4e[+]38; give less"),
        ("groupnorm", {"gamma_init": -1e300}, "ends at 3.4e[+]38; give less"),
        ("prmsnorm", {"share": 0}, "greater than 0"),
        ("batchnorm", {"momentum": 1.5}, "less than or equal to 1"),
        ("rmsnorm", {"bias": True}, "Extra inputs"),
    ],
)
def test_options_that_make_no_sense_are_refused(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        find_norm(name).Options(**options)


@pytest.mark.parametrize("name", ["layernorm", "rmsnorm"])
def test_a_zero_centred_gain_is_one_plus_what_is_trained(name: str) -> None:
    plain, centred = make(name), make(name, zero_centred=True)
    assert centred.spec == NormSpec(name, 1e-5, zero_centred=True)
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
    if norm.spec is None:
        want = norm(2.5 * residual.float() + f.float()).to(dtype)
    else:
        want = residual_norm(residual, f, alpha, norm.gamma, norm.bias, norm.spec, backend="eager")
    assert got.dtype is dtype
    assert torch.equal(got, want)
    for a, b in zip(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(got, norm((2.5 * residual.float() + f.float()).to(dtype)))


@pytest.mark.parametrize("name", norm_names())
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_graph_serves_every_alpha_and_eps(name: str, dtype: torch.dtype) -> None:
    torch._dynamo.reset()
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
        left_out = {"gain", "bias"} & find_norm(name).Options.model_fields.keys()
        bare = make(name, **dict.fromkeys(left_out, False))
        assert {parameter for parameter, _ in bare.named_parameters()} <= {"alpha_tanh", "alpha_erf", "shift"}
        torch.testing.assert_close(bare(x), make(name)(x))  # gain 1 and bias 0 is where a trained norm starts
