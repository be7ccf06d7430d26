"""What the second stage of checking refuses, by name, with the mend."""

from collections.abc import Mapping
from typing import Any

import pytest
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.builder import build
from normscale.models.plan import resolve
from normscale.schemes import Depth, Make, Own, Scheme, Site, Streams, registry


class OwnQK(Scheme):
    """Norms q, k and v itself, in all blocks but the first."""

    topologies = frozenset(("decoder",))

    def slots(self, depth: Depth, site: Site, make: Make) -> Mapping[str, nn.Module]:
        return {"qkv": nn.Identity()} if site.kind == "self" and site.block else {}


class Uneven(Scheme):
    """Two streams in the encoder and one in the decoder."""

    def enter(self, emb: Any, ends: Own) -> Streams:
        return (emb, emb) if ends.kind == "encoder" else (emb,)


class NoNorm(Scheme):
    """Reads no eps."""

    def clash(self, config: ModelConfig) -> tuple[str, str] | None:
        return ("eps", "it has no norms; leave it out") if config.eps != 1e-5 else None


@pytest.fixture(autouse=True)
def guests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.SCHEMES.classes, "no-norm", NoNorm)
    monkeypatch.setitem(registry.SCHEMES.classes, "own-qk", OwnQK)
    monkeypatch.setitem(registry.SCHEMES.classes, "uneven", Uneven)


@pytest.mark.parametrize(
    ("options", "key", "says"),
    [
        ({"scheme": "own-qk", "N": 2}, "model.scheme", "has no encoder-decoder form .* choose another scheme"),
        ({"scheme": "own-qk", "qk_norm": "head"}, "model.qk_norm", "scheme=own-qk.*set model.qk_norm=none"),
        ({"qk_norm": "head", "heads": 16, "positions": "learned"}, "model.qk_norm", "one channel .*model.qk_norm=full"),
        (
            {"scheme": "no-norm", "eps": 0.1},
            "model.eps",
            "0.1 makes no sense with scheme=no-norm: it has no norms; leave",
        ),
        ({"kv_latent": 1}, "model.kv_latent", "choose 2 or more"),
        (
            {"N": 2, "scheme_options": {"constants": "keel"}},
            "model.scheme_options.constants",
            "'keel' gives constants for a single stack only, not for N=2 M=3; use paper, .* set model.N=0",
        ),
        ({"N": 2, "scheme_options": {"constants": "mixln"}}, "model.scheme_options.constants", "single stack only"),
        ({"scheme_options": {"use": "neither"}}, "model.scheme_options.use", "'neither'.*'both', 'alpha' or 'beta'"),
        (
            {"norm": "rmsnorm", "norm_options": {"gain": False, "zero_centred": True}},
            "model.norm_options",
            "zero_centred would do nothing with gain=false",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options: dict[str, Any], key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        resolve(ModelConfig(**{"M": 3, "d": 16, "heads": 2} | options))
    assert caught.value.key == key
    assert str(caught.value).startswith(key)


def test_sides_of_unlike_streams_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"uneven has 2 streams in the encoder and 1 in the decoder.*single stack"):
        build(ModelConfig(N=1, M=1, d=16, heads=2, scheme="uneven"), 32, 0)
    assert build(ModelConfig(N=1, M=0, d=16, heads=2, scheme="uneven"), 32, 0).stream_count == 2


def test_neither_refusal_hits_where_it_should_not() -> None:
    resolve(ModelConfig(scheme="own-qk"))
    resolve(ModelConfig(scheme="no-norm"))
    for constants in ("paper", "torchscale", "article"):
        resolve(ModelConfig(N=2, M=3, scheme_options={"constants": constants}))
    for topology in ({"N": 3, "M": 0}, {"N": 0, "M": 3}):
        for constants in ("mixln", "keel"):
            resolve(ModelConfig(**topology, scheme_options={"constants": constants}))
