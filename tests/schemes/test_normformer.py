"""NormFormer's four additions, one by one and together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.plan import resolve
from normscale.schemes.normformer import NormFormer
from tests.schemes.written import (
    FORMS,
    TOKENS,
    assert_unit_gains,
    attention,
    compare,
    feedforward,
    ln,
    made,
    norm,
    owned,
)

NONE = {"scale_attn": False, "scale_fc": False, "scale_heads": False, "scale_resids": False}
WAYS: dict[str, dict[str, Any]] = {
    "paper": {},
    "all": {"scale_resids": True},
    "fairseq": {"heads": "fairseq", "scale_resids": True},
    **{name: NONE | {name: True} for name in NONE},
}


def per_head(y: Tensor, scale: Any) -> Tensor:
    return torch.cat([part * gamma for part, gamma in zip(y.chunk(len(scale.gamma), -1), scale.gamma, strict=True)], -1)


def stack_of(options: NormFormer.Options) -> Any:
    def stack(layers: list[Any], ends: Any, x: Tensor, memory: Tensor | None) -> Tensor:
        for layer in layers:
            own, slots, read = layer.own, layer.branch.slots, ln(x, layer.own.norm)
            if layer.site.kind == "cross":
                x = x + attention(layer, read, memory)
            elif layer.site.kind == "self":
                paper = options.scale_heads and options.heads == "paper"
                out = attention(layer, read, inner=lambda y, s=slots, on=paper: per_head(y, s.before_o) if on else y)
                if options.scale_heads and not paper:
                    out = per_head(out, own.out_scale)
                x = x + (ln(out, own.out_norm) if options.scale_attn else out)
            else:
                fc = options.scale_fc
                out = feedforward(layer, read, inner=lambda h, s=slots, on=fc: ln(h, s.after_act) if on else h)
                x = (own.resid * x if options.scale_resids else x) + out
        return ln(x, ends.norm)

    return stack


@pytest.mark.parametrize(("way", "form"), [*((way, "decoder") for way in WAYS), *(("all", form) for form in FORMS)])
def test_the_stack_equals_its_formula(way: str, form: str) -> None:
    compare(made("normformer", *FORMS[form], **WAYS[way]), stack_of(NormFormer.Options(**WAYS[way])))


def test_without_its_additions_it_is_pre_norm() -> None:
    one, other = made("normformer", 0, 3, **NONE), made("pre", 0, 3)
    assert torch.equal(one(TOKENS), other(TOKENS))
    for name in NONE:  # and each of them shows
        assert not torch.equal(made("normformer", 0, 3, **NONE | {name: True})(TOKENS), other(TOKENS))


def test_what_it_owns() -> None:
    assert_unit_gains(NormFormer())
    attn, ffn = norm("own.norm") | norm("own.out_norm"), norm("own.norm") | norm("branch.slots.after_act", 64)
    sites: dict[str, Any] = {"self": attn | {"branch.slots.before_o.gamma": (2,)}, "cross": norm("own.norm")}
    sites["ffn"] = ffn | {"own.resid": (16,)}
    found = owned(made("normformer", 2, 2, scale_resids=True))
    assert (found.pop("ends"), found.pop("source ends")) == (norm("norm"), norm("norm"))
    assert found == {name: sites[name.rsplit(".", 1)[1]] for name in found}
    assert owned(made("normformer", 0, 2))["decoder.0001.ffn"] == ffn
    assert owned(made("normformer", 0, 2, heads="fairseq"))["decoder.0001.self"] == attn | {"own.out_scale.gamma": (2,)}


def test_new_scales_start_at_one() -> None:
    model = made("normformer", 0, 2, perturbed=False, scale_resids=True)
    found = [p for name, p in model.named_parameters() if name.endswith(("before_o.gamma", "resid"))]
    assert len(found) == 4
    assert all((p == 1).all() for p in found)


def test_an_option_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.scheme_options: .*heads=fairseq would do nothing with scale_heads"):
        resolve(ModelConfig(scheme="normformer", scheme_options={"scale_heads": False, "heads": "fairseq"}))
