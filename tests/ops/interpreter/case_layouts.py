"""Strides, offsets and shared memory: a layout is never seen in the result, and nothing that came in is changed."""

import pytest
import torch

from tests.ops.compare import DEVICE, call, run
from tests.ops.inputs import LAYOUTS, expanded, problem
from tests.ops.oracle import Op

OPS: tuple[Op, ...] = ("norm", "add_norm", "residual_norm")
KINDS = ("layernorm", "rmsnorm")


@pytest.mark.parametrize(("width", "kind"), [(48, "layernorm"), (48, "rmsnorm"), (1000, "layernorm")])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_is_bit_for_bit_its_contiguous_copy(layout: str, width: int, op: Op, kind: str) -> None:
    # LightLLM#1467: a stride that is used in the statistics and forgotten in the normalisation raises no error.
    plain = problem(op, kind, (3, width))
    want = run(plain)
    for name in ("x", "residual", "dy", "dz"):
        value = getattr(plain, name)
        if value is None:
            continue
        strided = LAYOUTS[layout](value)
        assert torch.equal(strided, value)
        got = run(problem(op, kind, (3, width), **{name: strided}))
        for key, expected in want.items():
            assert torch.equal(got[key], expected), f"{name} {layout}: {key} differs"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_a_gradient_of_one_number_with_stride_zero(op: Op, kind: str) -> None:
    for shape in ((5, 48), (2, 3, 1000)):
        dz = {"dz": expanded(shape)} if op == "add_norm" else {}
        copies = {"dz": torch.ones(shape)} if op == "add_norm" else {}
        got = run(problem(op, kind, shape, dy=expanded(shape), **dz))
        want = run(problem(op, kind, shape, dy=torch.ones(shape), **copies))
        for name, expected in want.items():
            assert torch.equal(got[name], expected), name


@pytest.mark.parametrize("op", OPS)
def test_an_input_repeated_over_rows(op: Op) -> None:
    x = torch.randn(48)
    got, want = run(problem(op, shape=(5, 48), x=x.expand(5, 48))), run(problem(op, shape=(5, 48), x=x.repeat(5, 1)))
    for name, expected in want.items():
        assert torch.equal(got[name], expected), name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("width", [48, 1000])
def test_gain_bias_and_alpha_may_be_strided(op: Op, width: int) -> None:
    alpha = torch.linspace(0.5, 2.0, width)
    plain = problem(op, shape=(3, width), alpha=alpha)
    want = run(plain)
    for name in ("gamma", "bias", "alpha"):
        value = getattr(plain, name)
        if value is None:
            continue
        for strided in (torch.stack([value, value + 7], -1)[:, 0], torch.cat([value[:1], value])[1:]):
            got = run(problem(op, shape=(3, width), **({"alpha": alpha} | {name: strided})))
            for key, expected in want.items():
                assert torch.equal(got[key], expected), f"{name}: {key} differs"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["add_norm", "residual_norm"])
def test_branch_and_residual_may_be_one_tensor(op: Op, kind: str) -> None:
    one = problem(op, kind, (4, 56))
    got = run(one_tensor := problem(op, kind, (4, 56), residual=one.x))
    x = one.x.clone().to(DEVICE).requires_grad_()
    leaves = {n: None if (v := getattr(one, n)) is None else v.to(DEVICE) for n in ("alpha", "gamma", "bias")}
    out = call(one_tensor, {"x": x, "residual": x, **leaves}, "triton")
    outs, grads = (out, (one.dz, one.dy)) if op == "add_norm" else ((out,), (one.dy,))
    (dx,) = torch.autograd.grad(outs, [x], [g.to(DEVICE) for g in grads])
    torch.testing.assert_close(dx.cpu(), got["dx"] + got["dresidual"], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", OPS)
def test_nothing_that_came_in_is_changed(op: Op, kind: str) -> None:
    # A gradient may be needed elsewhere: the sum of a branch has one gradient for both.
    one = problem(op, kind, (4, 56))
    names = ("x", "residual", "alpha", "gamma", "bias", "dy", "dz")
    before = {n: v.clone() for n in names if (v := getattr(one, n)) is not None}
    run(one)
    for name, value in before.items():
        assert torch.equal(getattr(one, name), value), f"{name} was written to"


@pytest.mark.parametrize("op", OPS)
def test_no_result_shares_memory_with_another_or_with_an_input(op: Op) -> None:
    one = problem(op, shape=(4, 56))
    names = ("x", "residual", "alpha", "gamma", "bias")
    leaves = {n: None if (v := getattr(one, n)) is None else v.to(DEVICE).requires_grad_() for n in names}
    out = call(one, leaves, "triton")
    outs = list(out) if isinstance(out, tuple) else [out]
    given = [v for v in leaves.values() if v is not None]
    grads = torch.autograd.grad(outs, given, [torch.ones_like(o) for o in outs])
    places = [t.untyped_storage().data_ptr() for t in (*outs, *given)]
    assert len(set(places)) == len(places)
    for value, grad in zip(given, grads, strict=True):
        assert grad.untyped_storage().data_ptr() not in places, f"a gradient lies in {tuple(value.shape)}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [48, 1000])
def test_runs_are_bit_equal_and_rows_do_not_know_of_each_other(kind: str, width: int) -> None:
    one = problem("residual_norm", kind, (37, width))
    first, second = run(one), run(one)
    for name, value in first.items():
        assert torch.equal(second[name], value), f"{name} differs from run to run"
    assert one.residual is not None
    assert one.dy is not None
    part = problem("residual_norm", kind, (37, width))
    part.x, part.residual, part.dy = one.x[5:12], one.residual[5:12], one.dy[5:12]
    got = run(part)
    for name in ("y", "dx", "dresidual"):
        assert torch.equal(got[name], first[name][5:12]), f"{name} of a row depends on how many there are"
