"""Rounded products against PyTorch's own half-precision ones, and against the formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.precision import PrecisionConfig
from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.ops.products import FORMATS, NATIVE, Native, Rounded, to_bf16, to_e4m3, to_e5m2, to_fp16
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import summed_loss

FP16 = Rounded(FORMATS["fp16"])
GRIDS = ((to_e4m3, torch.float8_e4m3fn, 448.0), (to_e5m2, torch.float8_e5m2, 57344.0))


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def halves(x: Tensor) -> Tensor:
    """Drawn numbers with few bits, so that sums of their products are exact in any order."""
    return (x * 8).round() / 8


def grads(y: Tensor, dy: Tensor, *leaves: Tensor) -> list[Tensor]:
    return [g.float() for g in torch.autograd.grad(y, leaves, dy)]


def test_fp16_rounds_to_even_overflows_to_inf_and_keeps_subnormals_and_nan() -> None:
    given = [65504.0, 65519.0, 65520.0, -1e6, 2.0**-24, 2.0**-25, 1.5 * 2**-25, 2049.0, 2051.0, math.nan, math.inf]
    wanted = [65504.0, 65504.0, math.inf, -math.inf, 2.0**-24, 0.0, 2.0**-24, 2048.0, 2052.0, math.nan, math.inf]
    rounded = to_fp16(torch.tensor(given))
    assert rounded.dtype is torch.float32
    torch.testing.assert_close(rounded, torch.tensor(wanted), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("rounded", "dtype", "largest"), GRIDS)
def test_fp8_is_what_the_cast_gives_with_ties_and_subnormals(rounded, dtype, largest) -> None:  # type: ignore[no-untyped-def]
    x = torch.cat([draw(4000) * torch.exp(4 * draw(4000, seed=1)), torch.arange(-600, 600) / 1024])
    x = torch.cat([x.clamp(-largest, largest), torch.tensor([largest])])  # the factor is then 1
    assert torch.equal(rounded(x), x.to(dtype).float())
    for factor in (2.0**30, 2.0**-30):  # the scale follows the tensor, so that no size overflows or vanishes
        assert torch.equal(rounded(x * factor), rounded(x) * factor)
    assert rounded(3 * x).abs().amax() == pytest.approx(3 * largest)
    assert torch.equal(rounded(torch.zeros(3)), torch.zeros(3))


@pytest.mark.parametrize(("rounded", "dtype", "largest"), GRIDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_fp8_hides_nothing_that_is_not_finite(rounded, dtype, largest, bad) -> None:  # type: ignore[no-untyped-def]
    assert torch.isfinite(rounded(torch.tensor([1.0, bad, 2.0]))).tolist() == [True, False, True]


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_the_fp16_one_bit_for_bit_where_sums_are_exact(bias: bool) -> None:
    x, w, b, dy = halves(draw(3, 5, 24)), halves(draw(7, 24, seed=1)), halves(draw(7, seed=2)), draw(3, 5, 7, seed=3)
    leaves = [t.requires_grad_() for t in ((x, w, b) if bias else (x, w))]
    y = FP16.linear(x, w, b if bias else None)
    native = [t.detach().half().requires_grad_() for t in leaves]
    y16 = F.linear(*native)
    assert torch.equal(y, y16.float())
    got, wanted = grads(y, dy, *leaves), grads(y16, dy.half(), *native)
    assert torch.equal(got[0], wanted[0])
    for ours, theirs in zip(got[1:], wanted[1:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-10, atol=2e-4)  # sums of 15: one unit in the last place
        assert torch.equal(ours, to_fp16(ours))


def test_products_that_leave_fp16_on_either_side_do_so_in_value_and_gradient() -> None:
    x, w = torch.tensor([[300.0, 1e-4]]), torch.tensor([[300.0, 0.0], [0.0, 1e-4]])
    y = FP16.linear(x.requires_grad_(), w.requires_grad_(), None)
    assert y.tolist() == [[math.inf, 0.0]]  # 90 000; 1e-8 is below half the least subnormal
    (dx, dw) = grads(y, torch.tensor([[300.0, 1e-8]]), x, w)
    assert dx[0, 0] == math.inf
    assert dw[0, 0] == math.inf
    assert dx[0, 1] == 0  # the incoming gradient itself is gone
    (dx, dw) = grads(FP16.linear(x, w, None), torch.tensor([[0.0, 1e-4]]), x, w)
    assert dw[1, 1] == 0  # a product below fp16 is gone
    assert dw[1, 0] == to_fp16(300 * to_fp16(torch.tensor(1e-4)))


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, softmax: str) -> Tensor:
    """Unfused attention in fp16 tensors."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    weights = scores.float().softmax(-1).half() if softmax == "fp32" else scores.softmax(-1)
    return weights @ v


@pytest.mark.parametrize("softmax", ["fp32", "compute"])
@pytest.mark.parametrize("masked", ["no", "causal", "padding"])
def test_attention_is_that_of_fp16_tensors(masked: str, softmax: str) -> None:
    q, k, v = (draw(2, 2, 6, 16, seed=i).requires_grad_() for i in range(3))
    keep = torch.tensor([True] * 4 + [False] * 2).view(1, 1, 1, 6) if masked == "padding" else None
    mask = torch.ones(6, 6, dtype=torch.bool).tril() if masked == "causal" else keep
    products = Rounded(FORMATS["fp16"], softmax)  # type: ignore[arg-type]
    y = products.attention(q, k, v, keep, causal=masked == "causal", dropout=0.0)
    native = [t.detach().half().requires_grad_() for t in (q, k, v)]
    y16 = reference(*native, mask, softmax)  # type: ignore[call-arg]
    torch.testing.assert_close(y, y16.float(), rtol=2**-10, atol=2**-12)
    dy = draw(2, 2, 6, 16, seed=4)
    for ours, theirs in zip(grads(y, dy, q, k, v), grads(y16, dy.half(), *native), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2**-9, atol=2**-10)
        assert torch.equal(ours, to_fp16(ours))
    exact = NATIVE.attention(q, k, v, keep, causal=masked == "causal", dropout=0.0)
    torch.testing.assert_close(y, exact, rtol=1e-2, atol=2e-3)


def test_the_softmax_in_fp16_rounds_what_the_softmax_in_fp32_does_not() -> None:
    q, k, v = (draw(1, 1, 8, 16, seed=i).requires_grad_() for i in range(3))
    dy = draw(1, 1, 8, 16, seed=4)
    fine, coarse = (
        grads(Rounded(FORMATS["fp16"], s).attention(q, k, v, causal=True, dropout=0.0), dy, q, k)
        for s in ("fp32", "compute")
    )
    assert not torch.equal(fine[0], coarse[0])
    torch.testing.assert_close(fine[0], coarse[0], rtol=0.02, atol=1e-3)


def test_scores_overflow_where_nobody_may_look_without_harm() -> None:
    q, k, v = torch.full((1, 1, 2, 4), 300.0), torch.full((1, 1, 2, 4), 1.0), draw(1, 1, 2, 4)
    k[0, 0, 1] = 300.0  # 360 000 for the second key, which the first query must not see
    y = FP16.attention(q, k, v, causal=True, dropout=0.0)
    assert torch.equal(y[0, 0, 0], to_fp16(v[0, 0, 0]))
    assert torch.isnan(y[0, 0, 1]).all()


@pytest.mark.parametrize("products", [FP16, Native("compute")])
def test_dropout_drops_attention_weights_and_scales_the_rest(products: Rounded | Native) -> None:
    q = k = torch.zeros(1, 1, 4, 4)
    v = torch.eye(4).view(1, 1, 4, 4)  # the result is the weights
    torch.manual_seed(0)
    weights = products.attention(q, k, v, causal=False, dropout=0.5)
    assert set(weights.flatten().tolist()) == {0.0, 0.5}
    before = torch.get_rng_state()
    products.attention(q, k, v, causal=False, dropout=0.0)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(("name", "forward"), [("fp8_e4m3", to_e4m3), ("fp8_e5m2", to_e5m2)])
def test_fp8_layers_round_operands_one_way_and_gradients_to_e5m2(name: str, forward) -> None:  # type: ignore[no-untyped-def]
    x, w, b, dy = draw(6, 16), draw(4, 16, seed=1), draw(4, seed=2), draw(6, 4, seed=3)
    leaves = [t.requires_grad_() for t in (x, w, b)]
    y = Rounded(FORMATS[name]).linear(x, w, b)
    x8, w8, dy8 = forward(x), forward(w), to_e5m2(dy)
    assert torch.equal(y, to_bf16(F.linear(x8, w8, to_bf16(b))))
    for ours, theirs in zip(grads(y, dy, *leaves), (dy8 @ w8, dy8.T @ x8, dy8.sum(0)), strict=True):
        torch.testing.assert_close(ours, to_bf16(theirs), rtol=2**-8, atol=1e-6)


def test_attention_and_head_are_left_out_of_fp8() -> None:
    q = draw(1, 1, 4, 8)
    fp8, bf16 = Rounded(FORMATS["fp8_e4m3"]), Rounded(FORMATS["fp8_e4m3"]).at_head()
    assert bf16.format.dtype == "bfloat16"
    ours, theirs = (p.attention(q, q, q, causal=True, dropout=0.0) for p in (fp8, bf16))
    assert torch.equal(ours, theirs)
    assert not torch.equal(fp8.linear(q, q[0, 0], None), bf16.linear(q, q[0, 0], None))


@pytest.mark.parametrize("softmax", ["fp32", "compute"])
@pytest.mark.parametrize("compute", ["native", "fp16", "fp8_e4m3"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_that_may_look_nowhere_gets_zeros_and_gives_no_gradient(
    compute: str, softmax: str, causal: bool
) -> None:
    products = Native(softmax) if compute == "native" else Rounded(FORMATS[compute], softmax)  # type: ignore[arg-type]
    q, k, v = (draw(2, 1, 4, 8, seed=seed).requires_grad_() for seed in range(3))
    keep = torch.tensor([[True, True, True, False], [False] * 4]).view(2, 1, 1, 4)
    mask = keep & torch.ones(4, 4, dtype=torch.bool).tril() if causal else keep
    alone = softmax == "fp32" and compute == "native"  # PyTorch's function takes one of the two
    y = products.attention(q, k, v, mask if alone else keep, causal=causal and not alone, dropout=0.0)
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    torch.testing.assert_close(y[0], reference(q, k, v, mask[:1], "compute")[0], rtol=0.02, atol=0.02)
    for grad in torch.autograd.grad(y, (q, k, v), draw(2, 1, 4, 8, seed=3)):
        assert torch.isfinite(grad).all()
        assert grad[0].any()
        assert not grad[1].any()


def test_native_products_keep_their_operands_and_softmax_as_asked() -> None:
    x, w = draw(3, 8).bfloat16(), draw(4, 8, seed=1).bfloat16()
    assert Native(operands=torch.float32).linear(x, w, w[:, 0]).dtype is torch.float32
    assert torch.equal(Native().linear(x, w, None), F.linear(x, w))
    q = draw(1, 1, 4, 8)
    seen = []
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        softmax = torch.softmax
        patch.setattr(torch, "softmax", lambda x, dim: seen.append(softmax(x, dim).dtype) or softmax(x, dim))
        y = Native("compute").attention(q, q, q, causal=True, dropout=0.0)
    assert seen == [torch.bfloat16]
    torch.testing.assert_close(y.float(), NATIVE.attention(q, q, q, causal=True, dropout=0.0), rtol=0.03, atol=0.02)


def test_a_model_in_rounded_fp16_is_near_the_one_under_real_autocast() -> None:
    config = ModelConfig(M=3, d=32, heads=2, context=16, bias=True)
    tokens = torch.randint(0, 50, (2, 17), generator=torch.Generator().manual_seed(0))

    def gradient(compute: str, autocast: bool) -> tuple[float, Tensor]:
        engine = PlainEngine(build(config, 50, 0), PrecisionConfig(compute=compute), torch.device("cpu"))  # type: ignore[arg-type]
        with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
            logits = engine.inner(tokens[:, :-1])
        loss = summed_loss(logits, tokens[:, 1:])
        torch.autograd.backward(loss)
        return float(loss.detach()), engine.flat.grads

    exact, rounded, real = gradient("fp32", False), gradient("fp16", False), gradient("fp32", True)
    assert rounded[0] == pytest.approx(real[0], rel=2e-4)
    distance = float((rounded[1] - real[1]).norm() / real[1].norm())
    assert 0 < distance < 2e-3
    assert float((exact[1] - real[1]).norm() / real[1].norm()) < 4e-3
