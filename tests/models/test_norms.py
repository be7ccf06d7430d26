"""Which norm stands where, and what no norm of a model would read."""

from typing import Any

import pytest
import torch

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.models.plan import resolve
from normscale.models.skeleton import skeleton
from normscale.norms import Norm
from normscale.ops.handles import Opening

SIZE = {"d": 16, "heads": 2, "context": 8}
BOTH = {"N": 2, "M": 2}
RMS = {"norm": "rmsnorm", "norm_options": {"zero_centred": True}}


def kinds(config: ModelConfig) -> dict[str, str]:
    """Every norm's kind by the place of its module."""
    model = build(config, 32, 0)
    return {name: module.name for name, module in model.named_modules() if isinstance(module, Norm)}


def test_a_norm_by_side_reaches_all_of_the_side() -> None:
    config = ModelConfig(**SIZE, **BOTH, scheme="pre", norms={"encoder": RMS}, embedding_norm=True, kv_latent=4)
    found = kinds(config)
    assert len(found) == 2 * 2 + 2 * 3 + 2 + 2 + 2 + 4  # sites, ends, embeddings, latents
    for name, kind in found.items():
        block = int(name.split(".")[1]) if name.startswith("blocks") else None
        encoder = name.startswith("source_") if block is None else block < 2
        assert kind == ("rmsnorm" if encoder else "layernorm"), name


def test_a_norm_by_branch_reaches_its_sites_and_q_and_k() -> None:
    config = ModelConfig(**SIZE, M=2, scheme="pre", norms={"attention": "rmsnorm", "ffn": "dyt"}, qk_norm="head")
    for name, kind in kinds(config).items():
        want = "layernorm" if name.startswith("ends") else "rmsnorm" if ".self." in name else "dyt"
        assert kind == want, name
    config = config.model_copy(update={"norms": {"qk": RMS}})
    for name, kind in kinds(config).items():
        assert kind == ("rmsnorm" if ".qk_norm." in name else "layernorm"), name


def test_a_norm_of_attention_is_that_of_cross_attention_too() -> None:
    config = ModelConfig(**SIZE, **BOTH, scheme="pre", norms={"attention": "dyt", "qk": "scalenorm"}, qk_norm="head")
    for name, kind in kinds(config).items():
        want = "dyt" if ".self." in name or ".cross." in name else "layernorm"
        assert kind == ("scalenorm" if ".qk_norm." in name else want), name


def test_options_come_with_the_norm_and_numbers_depend_on_both() -> None:
    config = ModelConfig(**SIZE, **BOTH, norms={"encoder": RMS, "decoder": "rmsnorm"})
    norms = [layer.own.norm for layer in build(config, 32, 0).sublayers()]
    assert [norm.options.zero_centred for norm in norms] == [True] * 4 + [False] * 6
    numerical = resolve(config).numerical()["norms"]
    assert numerical["encoder"]["norm_options"]["zero_centred"] is True
    assert numerical["decoder"] == {"norm": "rmsnorm", "norm_options": {**numerical["decoder"]["norm_options"]}}
    assert numerical["decoder"]["norm_options"]["zero_centred"] is False


def test_sides_are_structures_of_their_own_and_counted_as_such() -> None:
    config = ModelConfig(**SIZE, **BOTH, scheme="pre", norms={"decoder": "rmsnorm"})
    assert build(config, 32, 0).structures == 2
    built = sum(p.numel() for p in build(config, 32, 0).parameters())
    assert sum(skeleton(config, 32).parameters().values()) == built


@pytest.mark.parametrize(("norms", "handed"), [({}, True), ({"ffn": "rmsnorm"}, True), ({"ffn": "dyt"}, False)])
def test_a_stack_with_a_norm_that_has_no_kernel_hands_no_handles_on(norms: dict[str, str], handed: bool) -> None:
    model = build(ModelConfig(**SIZE, M=2, scheme="post", norms=norms), 32, 0)
    assert [module.spec is not None for module in model.modules() if isinstance(module, Opening)] == [handed]


@pytest.mark.parametrize("scheme", ["pre", "peri", "reordered"])
def test_a_final_norm_can_be_left_out(scheme: str) -> None:
    model = build(ModelConfig(**SIZE, M=2, scheme=scheme, scheme_options={"final_norm": False}), 32, 0)
    assert not list(model.ends.parameters())
    outputs: list[torch.Tensor] = []
    x = model.features(torch.randint(0, 32, (2, 8)), outputs=outputs)
    assert torch.equal(x, outputs[-1])


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"norms": {"encode": "rmsnorm"}, **BOTH}, "norms.encode", "no place of a norm; did you mean 'encoder'"),
    ({"norms": {"encoder": "rmsnorm"}}, "norms.encoder", r"would do nothing with one side alone \(decoder\)"),
    ({"norms": {"encoder": "rmsnorm", "ffn": "dyt"}, **BOTH}, "norms.encoder", "norms.ffn names it too; give norms by"),
    (
        {"norms": {"qk": "rmsnorm"}},
        "norms.qk",
        "would do nothing with model.qk_norm=none; remove it or set model.qk",
    ),
    ({"norms": {"qk": "rmsnorm"}, "qk_norm": "l2"}, "norms.qk", "would do nothing with model.qk_norm=l2"),
    ({"norms": {"ffn": "layernrom"}}, "norms.ffn", "'layernrom' is not a norm; did you mean 'layernorm'"),
    ({"norms": {"ffn": 3}}, "norms.ffn", r"write the name of a norm, or norm: and norm_options: below it \(it is 3\)"),
    ({"norms": {"ffn": {"nrom": "dyt"}}}, "norms.ffn", "write the name of a norm"),
    ({"norms": {"ffn": {"norm": "dyt", "norm_options": {"alpha": 1}}}}, "norms.ffn.norm_options.alpha", "no option"),
    ({"norms": {"ffn": {"norm": "dyt", "norm_options": 3}}}, "norms.ffn.norm_options", "3 is no mapping of options"),
    ({"norms": {"encoder": "dyt", "decoder": "dyt"}, "norm": "rmsnorm", **BOTH}, "norm", "names one for each side"),
    ({"norm": "dyt", "eps": 1e-3}, "eps", "0.001 would do nothing with model.norm=dyt; remove it"),
]


@pytest.mark.parametrize(("options", "key", "says"), REFUSED, ids=[str(options) for options, *_ in REFUSED])
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(ModelConfig(**SIZE | {"M": 2} | options))
    assert str(caught.value).startswith(f"model.{key}: ")
    assert caught.value.key in (f"model.{key}", f"model.{key}".removesuffix(".alpha"))


def test_an_eps_that_some_norm_reads_is_taken() -> None:
    resolve(ModelConfig(**SIZE, M=2, norm="dyt", eps=1e-3, norms={"attention": "rmsnorm"}))
    resolve(ModelConfig(**SIZE, M=2, norm="dyt", eps=1e-3, qk_norm="l2"))
