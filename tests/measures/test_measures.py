"""What each measurement gives where algebra says what it must give."""

import math
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.data.batches import Batches
from normscale.data.task import load_task
from normscale.errors import BadInput
from normscale.measures import (
    attention_entropy,
    eps_error,
    eps_nan,
    fp8_norm,
    gradient_profile,
    half_norm,
    ln_geometry,
    ln_lossy,
    mean_share,
    norm_operations,
    norm_time,
    overflow,
    stale_stats,
    two_ranks,
    vit_gradients,
)
from normscale.measures._half import rounded
from normscale.models.builder import build
from normscale.norms import find_norm
from normscale.ops.norm import layernorm, rmsnorm


def test_geometry_of_the_sphere() -> None:
    found = ln_geometry.measure(0, "layernorm", 64, eps=1e-12)
    assert found["unit_distance"] == pytest.approx(7, abs=1e-4)  # sqrt(64) - 1
    assert found["length_spread"] < 1e-6
    assert found["collapse"] < 1e-6
    # Of a scale-free map: |N(x + y) - N(x) - N(y)| for directions at right angles, (sqrt(2) - 1) sqrt(2) / sqrt(2).
    assert found["additivity"] == pytest.approx(math.sqrt(2) - 1, abs=0.02)
    small = ln_geometry.measure(0, "rmsnorm", 1024, eps=1e-5)["small_length"]
    assert small == pytest.approx(math.sqrt(0.5), abs=0.01)


def test_geometry_of_what_the_norms_are_said_to_be() -> None:
    unit, centred = ln_geometry.measure(0, "unit", 64), ln_geometry.measure(0, "centred", 64)
    assert unit["unit_distance"] < 1e-12
    assert centred["additivity"] < 1e-12
    assert centred["collapse"] == pytest.approx(2)  # |x - 3 x| / |x|
    assert centred["unit_distance"] > 1


def test_a_mean_is_told_by_what_keeps_it() -> None:
    kept, lost = ln_lossy.measure(0, "rmsnorm", 16), ln_lossy.measure(0, "layernorm", 16)
    assert kept["mean_share"] > 0.99
    assert lost["mean"] < 0.05
    assert lost["mean_share"] < 0.05
    assert ln_lossy.measure(0, "none", 16)["mean"] > 0.999


@pytest.mark.parametrize(("eps", "gain"), [(1e-4, 100.0), (1e-8, 1e4)])
def test_a_constant_rows_gradient_grows_by_the_root_of_eps(eps: float, gain: float) -> None:
    found = eps_nan.measure(0, "layernorm", eps, "constant")
    assert found["amplification"] == pytest.approx(gain, rel=0.02)
    assert found["bad_rows"] == 0


def test_rows_without_a_gradient_are_counted_and_have_no_gain() -> None:
    assert eps_nan.measure(0, "rmsnorm", 0.0, "zero") == {"bad_rows": 1.0, "amplification": 0.0}
    assert eps_nan.measure(0, "rmsnorm", 0.0, "normal")["bad_rows"] == 0


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_norms_in_fp32_and_64_are_those_of_the_operations(norm: Any) -> None:
    x = torch.randn(8, 64, dtype=torch.float64)
    mine = rounded(norm, x, 1e-5)
    truth = layernorm(x, None, None, 1e-5) if norm == "layernorm" else rmsnorm(x, None, 1e-5)
    torch.testing.assert_close(mine, truth)
    assert half_norm.measure(0, norm, "fp32", "fp16")["error"] < 1e-6
    assert 1e-4 < half_norm.measure(0, norm, "fp16", "fp16")["error"] < 2e-3
    assert 1e-3 < half_norm.measure(0, norm, "bf16", "fp16")["error"] < 2e-2


def test_an_epsilon_of_a_hundredth_of_the_variance_costs_half_a_percent() -> None:
    found = eps_error.measure(0, 1e-2, "inside")
    assert found == {"error": pytest.approx(0.005, rel=0.05), "bad_rows": 0}
    assert eps_error.measure(0, 1e-2, "outside")["error"] == pytest.approx(0.01, rel=0.05)
    assert eps_error.measure(0, 1e-6, "inside", scale=1e-3)["error"] == pytest.approx(1 - 0.5**0.5, rel=0.02)
    assert eps_error.measure(0, 1e-8, "inside")["bad_rows"] == 1  # 1e-8 is 0 in fp16


def test_a_sum_of_squares_beyond_fp16_leaves_no_row() -> None:
    # 1024 squares of 100 add up to 10^7; 1 / sqrt(inf) is 0, so the row is finite, and all wrong.
    found = half_norm.measure(0, "rmsnorm", "fp16", "fp16", scale=100.0)
    assert found["error"] == 1


def test_dividing_first_stands_any_size_and_multiplying_back_minds_the_scale() -> None:
    plain, article = overflow.measure(0, "rmsnorm"), overflow.measure(0, "article")
    assert plain["largest"] == 2  # the root of 65504 / 1024 is 8, and the sum of 1024 squares scatters by a few %
    assert article["largest"] == 11  # its product overflows: the top of a row, 4.5 deviations, times itself times 2^12
    assert plain["scale_error"] < 1e-4
    assert article["scale_error"] == pytest.approx(3, rel=0.01)  # four times as large, less one
    assert overflow.measure(0, "scaled")["scale_error"] < 1e-4


def test_the_articles_form_is_the_norm_of_that_article() -> None:
    x = torch.randn(8, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1.0  # it centres nothing
    norm = find_norm("maxnorm")(64, 1e-5, find_norm("maxnorm").Options(gain=False))
    torch.testing.assert_close(overflow._of("article", x, 1e-5), norm(x))


def test_three_bits_are_coarser_than_seven() -> None:
    errors = {kind: fp8_norm.measure(0, "rmsnorm", kind, "output")["error"] for kind in ("bf16", "e4m3", "e5m2")}  # type: ignore[arg-type]
    assert errors["e4m3"] / errors["bf16"] == pytest.approx(16, rel=0.15)
    assert errors["e5m2"] / errors["e4m3"] == pytest.approx(2, rel=0.1)
    assert fp8_norm.measure(0, "rmsnorm", "e4m3", "input", outlier=1e6)["flushed"] > 0.99  # all but one of 1024
    # What is flushed to 0 is all wrong, however well the outlier itself is kept.
    assert fp8_norm.measure(0, "rmsnorm", "e4m3", "input", outlier=1e6)["error"] == pytest.approx(1, abs=0.01)


def test_fp8_of_what_the_norms_of_a_model_take() -> None:
    taken = fp8_norm._taken(0, "rmsnorm", "pre", 2)
    assert [tuple(x.shape) for x in taken] == [(2 * 64, 64)] * 5  # two a block, and the final one
    found = fp8_norm.measure(0, "rmsnorm", "e4m3", "input", scheme="pre", blocks=2)
    alone = fp8_norm.measure(0, "rmsnorm", "e4m3", "input")["error"]
    assert found["error"] == pytest.approx(alone, rel=0.5)  # of text or made up, rows are rounded alike
    assert found["error"] > 4 * fp8_norm.measure(0, "rmsnorm", "bf16", "input", scheme="pre", blocks=2)["error"]


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_statistics_of_its_own_change_nothing_and_others_do(norm: Any) -> None:
    assert stale_stats.measure(0, norm, "recompute")["output_error"] < 1e-6
    before = stale_stats.measure(0, norm, "before")
    assert before["output_error"] > 1e-3
    assert 1e-3 < before["scatter"] < 1


def test_one_key_of_width_one_is_uniform_and_a_wide_one_is_not() -> None:
    scaled, plain = (attention_entropy.measure(0, 256, scale) for scale in ("root", "none"))  # type: ignore[arg-type]
    assert scaled["entropy"] == pytest.approx(1 - 0.5 / math.log(64), abs=0.02)  # log n - sigma^2 / 2 for normal logits
    assert plain["entropy"] < scaled["entropy"] / 2
    assert plain["largest"] > scaled["largest"]


@pytest.mark.parametrize("scale", ["root", "none"])
def test_the_size_of_the_softmaxs_jacobian_is_that_of_autograds(scale: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 16, generator=generator, dtype=torch.float64) for n in (512, 64))
    logits = q @ k.T / (4.0 if scale == "root" else 1.0)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda z: torch.softmax(z, -1)))(logits)
    found = attention_entropy.measure(0, 16, scale)["gradient"]
    assert found == pytest.approx(float(jacobians.flatten(1).norm(dim=1).mean()))


@pytest.mark.parametrize(
    ("scheme", "norms", "blocks", "plain"),
    # Pre-Norm without its norms is x + F(x), which ReZero is where its numbers are 1.
    [
        ("pre", True, 12, {"model.scheme": "pre"}),
        ("post", True, 12, {"model.scheme": "post"}),
        ("pre", False, 32, {"model.scheme": "rezero", "model.scheme_options": {"start": 1.0}}),  # not finite in fp32
    ],
)
def test_the_profile_of_gradients_is_autograds(scheme: str, norms: bool, blocks: int, plain: dict[str, Any]) -> None:
    settings = {"model.M": blocks, "model.init": "xavier_normal", "model.positions": "learned", "train.batch": 2}
    config = revise(RunConfig(), settings | plain)
    task = load_task(config)
    model, batch = build(config.model, task.vocab, 0).double(), Batches(task.train, batch=2, seed=0).window(0)[0]
    loss = -model(batch.tokens_BT).log_softmax(-1).gather(-1, batch.targets_BT.unsqueeze(-1)).mean()
    weights = {name: p for name, p in model.named_parameters() if ".branch." in name}
    gradients = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    logs = [
        math.log10(sum(float(g.square().sum()) for name, g in gradients.items() if f"blocks.{i}." in name) ** 0.5)
        for i in range(blocks)
    ]
    found = gradient_profile.measure(0, scheme, norms, blocks)
    assert found["range"] == pytest.approx(max(logs) - min(logs), abs=1e-6)
    assert found["growth"] == pytest.approx(max(logs[i] - logs[i + 10] for i in range(blocks - 10)), abs=1e-6)


@pytest.mark.parametrize("odd", [0.0, math.inf, math.nan])
def test_a_gradient_without_a_size_has_no_growth(odd: float) -> None:
    assert gradient_profile.profile([1e-3] + 10 * [1.0]) == {"range": 3.0, "growth": -3.0}
    assert all(map(math.isnan, gradient_profile.profile([odd] + 10 * [1.0]).values()))


def test_gradients_of_a_residual_net_without_norms_grow_on_the_way_down() -> None:
    without, normed = (gradient_profile.measure(0, "pre", norms, 12)["growth"] for norms in (False, True))
    assert without > max(normed, 0)


def test_the_share_of_the_mean_is_that_of_rows_that_norms_take() -> None:
    found = mean_share.measure(0, "pre", blocks=1, steps=2)
    assert 0 < found["share_first"] <= found["share_largest"] < 0.2  # of rows of 64 fresh numbers, about 1/64
    assert found["share_mean"] <= found["share_largest"]
    assert found["learned"] < 0.2


def test_times_are_compared_by_turns() -> None:
    found = norm_time.measure(0, "kernel", "eager", 64, 16, pairs=3)
    assert found.keys() == {"rms_over_ln", "ln_over_ln"}
    assert 0.05 < found["ln_over_ln"] < 20
    assert 0.05 < found["rms_over_ln"] < 20
    step = norm_time.measure(0, "step", "eager", 64, 64, pairs=3)
    assert step.keys() == {"rms_over_ln", "ln_over_ln", "norm_share"}
    assert step["norm_share"] < 1


def test_the_kernels_of_a_gpu_are_not_measured_without_one() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(BadInput, match="its kernels run on a GPU"):
        norm_time.measure(0, "kernel", "triton", 64, 16, pairs=3)


def test_ranks_see_their_share_of_the_rows_and_a_batch_of_their_own() -> None:
    config = revise(RunConfig(), {"model.scheme": "pre", "model.M": 1, "train.batch": two_ranks.BATCH})
    task = load_task(config)
    model = build(config.model, task.vocab, 0)
    whole, loss = two_ranks._pass(model, task, 0, 0, 1, "row")
    parts = [two_ranks._pass(model, task, 0, rank, 2, "row") for rank in range(2)]
    torch.testing.assert_close(torch.cat([part for part, _ in parts], dim=1), whole)
    torch.testing.assert_close((parts[0][1] + parts[1][1]) / 2, loss)
    batch, _ = two_ranks._pass(model, task, 0, 0, 1, "batch")
    torch.testing.assert_close(batch, whole.mean(1, keepdim=True))
    assert not torch.equal(two_ranks._pass(model, task, 0, 0, 2, "batch")[0], batch)


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes that import torch
def test_two_processes_send_each_other_what_they_see() -> None:
    found = two_ranks.measure(0, "layernorm", "batch")
    assert found["bits_apart"] == 1
    assert found["statistics_apart"] > 1e-4
    assert found["loss_apart"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(300)  # two processes that import torch
def test_synchronised_statistics_make_two_ranks_one() -> None:
    own, together = (two_ranks.measure(0, "batchnorm", "row", {"sync": sync}) for sync in (False, True))
    assert together["loss_apart"] < 1e-5 < 1e-4 < own["loss_apart"]


def test_the_range_of_gradients_is_told_in_decades() -> None:
    assert vit_gradients.decades([0.1, 10.0, 1.0]) == pytest.approx(2)
    assert vit_gradients.decades([1.0, 1.0]) == 0
    assert math.isnan(vit_gradients.decades([0.0, 1.0]))
    assert math.isnan(vit_gradients.decades([math.nan, 1.0]))


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers (the extra 'deepspeed')")
@pytest.mark.parametrize("norms", [True, False])
def test_a_vision_transformers_gradients_are_those_that_autograd_gives(norms: bool) -> None:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 256, "image_size": 32, "patch_size": 8}
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(**size, num_hidden_layers=3, num_labels=10)).train()
    for module in [] if norms else [m for m in model.modules() if isinstance(m, torch.nn.LayerNorm)]:
        module.register_forward_hook(lambda module, given, out: given[0])  # it hands on what it was given
    generator, ranges = torch.Generator().manual_seed(0), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    patterns = torch.randn(10, 3, 32, 32, generator=generator)
    parameters = list(model.parameters())
    layers = [module for module in model.modules() if type(module).__name__ == "ViTLayer"]
    for _ in range(2):
        labels = torch.randint(10, (16,), generator=generator)
        pixels = torch.randn(16, 3, 32, 32, generator=generator) + 0.5 * patterns[labels]
        loss = -model(pixels).logits.log_softmax(-1)[torch.arange(16), labels].mean()
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=not norms), strict=True):
            p.grad = g
        each = [[float(p.grad.square().sum()) for p in m.parameters() if p.grad is not None] for m in layers]
        sizes = [sum(squares) ** 0.5 for squares in each]
        ranges.append(math.log10(max(sizes) / min(sizes)))
        optimizer.step()
    found = vit_gradients.measure(0, norms, 3, steps=2)
    assert (found["range_first"], found["range_last"]) == pytest.approx(ranges, abs=1e-4)
    assert 0 < ranges[0] != pytest.approx(ranges[1], rel=1e-2)


def test_without_transformers_it_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vit_gradients, "find_spec", lambda _: None)
    with pytest.raises(BadInput, match="needs transformers"):
        vit_gradients.measure(0, True, 2)


def test_operations_are_those_of_the_formulas() -> None:
    forward, training = (norm_operations.measure(0, what, 64) for what in ("forward", "training"))  # type: ignore[arg-type]
    # LayerNorm: mean, minus, square, mean, times, gain, bias, and eps and root of each row; RMSNorm: without three.
    assert forward["ln_each"] == 7 + 2 / 64
    assert forward["rms_over_ln"] == (4 + 2 / 64) / (7 + 2 / 64)
    assert training["ln_each"] > 2 * forward["ln_each"]
