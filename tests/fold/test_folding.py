"""Folding against the model it was made of, in fp64; and each thing that cannot be folded, by name."""

from typing import Any

import pytest
import torch
from torch import Tensor

import normscale.fold.folding as module
from normscale.config.precision import PrecisionConfig
from normscale.config.schema import ModelConfig
from normscale.errors import BadInput, RunFailed
from normscale.fold import Folding, fold
from normscale.fold.folding import unfolded
from normscale.models.builder import build
from normscale.models.stack import Transformer
from normscale.norms import Norm
from normscale.train.engines.plain import PlainEngine

VOCAB = 32
TOKENS = torch.randint(0, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
SIZE: dict[str, Any] = {"M": 2, "d": 16, "heads": 2, "context": 8, "scheme": "pre"}


def model_of(**settings: Any) -> tuple[Transformer, dict[str, Tensor]]:
    """Returns a model none of whose gains, biases and alphas is what it starts as, and what it reads."""
    config = ModelConfig.model_validate(SIZE | settings)
    model = build(config, VOCAB, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    inputs = {"tokens_BT": TOKENS}
    if config.N and config.M:
        inputs |= {"source_BS": TOKENS.flip(0), "source_keep_BS": torch.arange(8).lt(6).expand(2, 8)}
    elif config.N:
        inputs |= {"source_keep_BS": torch.arange(8).lt(6).expand(2, 8)}
    if config.segments:
        inputs["segments_BT"] = TOKENS % config.segments
    return model, inputs


@torch.no_grad()
def apart(model: Transformer, new: Transformer, inputs: dict[str, Tensor]) -> float:
    before, after = unfolded(model)(**inputs), new(**inputs)
    return float((before - after).abs().max() / before.abs().max())


def folded(**settings: Any) -> tuple[Transformer, Folding]:
    model, inputs = model_of(**settings)
    new, folding = fold(model, inputs)
    assert apart(model, new, inputs) < 1e-12
    return new, folding


def reasons(folding: Folding, what: str) -> set[str]:
    return {getattr(norm, what) for norm in folding.norms} - {None}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_pre_layernorm_is_left_without_gains_biases_and_means(bias: bool, tied: bool, positions: str) -> None:
    new, folding = folded(bias=bias, tied=tied, positions=positions)
    assert folding.whole
    norms = [m for m in new.modules() if isinstance(m, Norm)]
    assert [(m.name, m.gamma, m.bias) for m in norms] == [("rmsnorm", None, None)] * 5
    assert (folding.untied, folding.positions) == (tied, positions == "sinusoidal")
    assert new.logits is not None
    assert new.logit_bias is not None  # what the last norm's bias has become
    attended = [f"blocks.{i}.sublayers.{name}" for i in range(2) for name in ("self.branch.qkv", "ffn.branch.up")]
    assert folding.form.biases == (() if bias else tuple(attended))


@pytest.mark.parametrize("settings", [{}, {"bias": False}, {"norm_options": {"zero_centred": True}}, {"tied": False}])
def test_pre_rmsnorm_is_left_without_gains(settings: dict[str, Any]) -> None:
    new, folding = folded(norm="rmsnorm", **settings)
    assert folding.whole
    assert all(m.gamma is None for m in new.modules() if isinstance(m, Norm))
    assert not folding.form.centred
    assert not folding.form.biases
    assert new.logit_bias is None


@pytest.mark.parametrize("settings", [{"N": 2, "M": 0}, {"N": 2, "M": 0, "segments": 2, "positions": "learned"}])
def test_an_encoder_folds_too(settings: dict[str, Any]) -> None:
    assert folded(**settings)[1].whole


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_what_the_encoder_ends_with_goes_into_keys_and_values_of_cross_attention(
    positions: str, activation: str
) -> None:
    _, folding = folded(N=2, positions=positions, activation=activation, bias=False)
    assert folding.whole
    last = next(norm for norm in folding.norms if norm.norm == "source_ends.norm")
    assert last.into == tuple(f"blocks.{i}.sublayers.cross.branch.kv.weight" for i in (2, 3))


def test_a_norm_without_an_affine_pair_still_loses_its_mean() -> None:
    _, folding = folded(norm_options={"gain": False, "bias": False})
    assert len(folding.form.centred) == 5
    assert not any(norm.into for norm in folding.norms)


def test_the_latents_norm_goes_into_keys_and_values() -> None:
    _, folding = folded(kv_latent=6)
    assert folding.whole
    assert "blocks.0.sublayers.self.branch.kv.weight" in {name for norm in folding.norms for name in norm.into}


def test_qk_norms_and_the_embeddings_stay_and_are_named() -> None:
    _, folding = folded(qk_norm="head", embedding_norm=True)
    assert not folding.whole
    stay = {norm.norm.rpartition(".")[0] for norm in folding.norms if norm.affine_stays}
    assert stay == {f"blocks.{i}.sublayers.self.branch.qk_norm" for i in range(2)} | {""}
    assert any("equal within each pair" in reason for reason in reasons(folding, "affine_stays"))
    assert any("residual sum" in reason for reason in reasons(folding, "affine_stays"))
    in_it = "what it reads is no sum of projections: the norm embedding_norm is in it"
    assert in_it in reasons(folding, "mean_stays")
    assert not folding.form.centred


def test_norms_after_the_branch_stay_and_so_does_the_mean() -> None:
    _, folding = folded(scheme="peri")
    assert [bool(norm.into) for norm in folding.norms] == [True, *[True, False] * 4]
    assert any(reason.endswith("ffn.own.out_norm is in it") for reason in reasons(folding, "mean_stays"))


@pytest.mark.parametrize("tied", [True, False])
def test_a_stream_that_the_head_reads_without_a_norm_keeps_its_mean(tied: bool) -> None:
    _, folding = folded(scheme_options={"final_norm": False}, tied=tied)
    assert reasons(folding, "mean_stays") == {f"{'token' if tied else 'logits'} reads the same, without a norm"}
    assert all(norm.into for norm in folding.norms)
    assert not folding.untied


def test_a_side_of_another_norm_keeps_the_mean_in_the_token_vectors_that_both_read() -> None:
    _, folding = folded(N=2, norms={"encoder": "rmsnorm"})
    assert all(norm.into for norm in folding.norms)
    assert any("(rmsnorm) reads the same, with its mean" in reason for reason in reasons(folding, "mean_stays"))
    assert not folding.form.centred


def test_what_is_multiplied_channel_by_channel_keeps_its_mean() -> None:
    only = {"scale_attn": False, "scale_fc": False, "scale_heads": False, "scale_resids": True}
    _, folding = folded(scheme="normformer", scheme_options=only)
    assert all(norm.into for norm in folding.norms)
    in_it = "what it reads is no sum of projections: the operation addcmul is in it"
    assert in_it in reasons(folding, "mean_stays")
    assert not folding.form.centred


@pytest.mark.parametrize("precision", [{"stream": "bf16"}, {"compute": "fp16"}, {"compute": "bf16", "params": "bf16"}])
def test_the_precision_of_the_run_is_none_of_the_fold(precision: dict[str, Any]) -> None:
    model, inputs = model_of()
    PlainEngine(model, PrecisionConfig(**precision), torch.device("cpu"))
    new, folding = fold(model, inputs)
    assert folding.whole
    assert {parameter.dtype for parameter in new.parameters()} == {torch.float64}
    assert new(**inputs).dtype is torch.float64
    assert apart(model, new, inputs) < 1e-12


def with_statistics(model: Transformer) -> Transformer:
    """Gives batch norms running statistics other than those they start with."""
    generator = torch.Generator().manual_seed(2)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(0.2 + torch.rand(buffer.shape, generator=generator))
    return model


@pytest.mark.parametrize("options", [{}, {"gain": False, "bias": False}, {"zero_centred": True}])
@pytest.mark.parametrize("sides", [{}, {"N": 2}])
def test_of_a_batch_norm_nothing_stays(sides: dict[str, int], options: dict[str, bool]) -> None:
    model, inputs = model_of(norm="batchnorm", eps=0.1, bias=False, norm_options=options, **sides)
    new, folding = fold(with_statistics(model), inputs)
    assert apart(model, new, inputs) < 1e-12
    assert folding.whole
    assert all(norm.gone and norm.into for norm in folding.norms)
    assert not [name for name in new.state_dict() if "running" in name or "gamma" in name]
    x = torch.randn(2, 8, 16)
    assert all(m(x) is x for m in new.modules() if isinstance(m, Norm))


def test_a_batch_norm_whose_output_is_a_residual_stays() -> None:
    model, inputs = model_of(norm="batchnorm", scheme="keel")
    _, folding = fold(with_statistics(model), inputs)
    assert {norm.norm.rpartition(".")[2] for norm in folding.norms if not norm.gone} == {"out_norm"}
    assert all("residual sum" in str(norm.affine_stays) for norm in folding.norms if not norm.gone)
    with pytest.raises(BadInput, match="post cannot be folded"):
        fold(*model_of(norm="batchnorm", scheme="post"))


def test_an_eps_outside_the_root_stays_there() -> None:
    new, folding = folded(norm_options={"eps_place": "outside"}, eps=0.1)
    assert folding.whole
    assert {m.options.eps_place for m in new.modules() if isinstance(m, Norm)} == {"outside"}


@pytest.mark.parametrize("scheme", ["post", "deepnorm"])
@pytest.mark.parametrize("sides", [{}, {"N": 2}, {"N": 2, "M": 0}])
def test_the_post_norm_family_is_refused(scheme: str, sides: dict[str, int]) -> None:
    model, inputs = model_of(scheme=scheme, **sides)
    said = rf"model.scheme: {scheme} cannot be folded: blocks.0.sublayers.self.own.norm: .*residual sum"
    with pytest.raises(BadInput, match=said):
        fold(model, inputs)


def test_reordered_norms_and_norms_without_anything_are_refused() -> None:
    with pytest.raises(BadInput, match="reordered cannot be folded"):
        fold(*model_of(scheme="reordered"))
    with pytest.raises(BadInput, match="neither gains nor biases"):
        fold(*model_of(norm="rmsnorm", norm_options={"gain": False}))


@pytest.mark.parametrize("forgotten", ["logits", "blocks.1.sublayers.ffn.branch.up.weight"])
def test_a_gain_forgotten_at_one_site_is_caught(monkeypatch: pytest.MonkeyPatch, forgotten: str) -> None:
    take_up = module._take_up

    def forgetful(model: Transformer, name: str, gain: Tensor | None, bias: Tensor | None) -> None:
        take_up(model, name, None if name == forgotten else gain, bias)

    monkeypatch.setattr(module, "_take_up", forgetful)
    with pytest.raises(RunFailed, match="from the model's; not written"):
        fold(*model_of())


def test_a_writer_that_keeps_its_mean_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    centre = module.centre

    def forgetful(model: Transformer, stream: Any) -> None:
        stream.writers = [name for name in stream.writers if name != "token"]
        centre(model, stream)

    monkeypatch.setattr(module, "centre", forgetful)
    with pytest.raises(RunFailed, match="not written"):
        fold(*model_of())


def test_logits_that_are_not_finite_are_said_to_be_so() -> None:
    model, inputs = model_of()
    with torch.no_grad():
        model.token[:, 0] = torch.inf
    with pytest.raises(BadInput, match="logits are not finite"):
        fold(model, inputs)


def test_the_model_is_left_as_it_was() -> None:
    model, inputs = model_of()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    fold(model, inputs)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
