"""Every parameter of every model by name: what it is for, and the factor on its standard init."""

import math
import re
from typing import Any

import pytest
import torch

from normscale.config.schema import ModelConfig
from normscale.models.init import gain_of, weights
from normscale.schemes import Weight, scheme_names
from tests.schemes.forms import built, fits

N, M = 3, 5
TOPOLOGIES = {"encoder": {"N": N, "M": 0}, "decoder": {"N": 0, "M": M}, "encoder-decoder": {"N": N, "M": M}}
# Name of the parameter, with the side's blocks left out: the parts its rows are for, in their order.
ROLES = {
    r"token": ("embedding", "token"),
    r"(source_)?position": ("embedding", "position"),
    r"segment": ("embedding", "segment"),
    r"logits": ("head", "logits"),
    r"blocks\.\d+\.sublayers\.self\.branch\.qkv\.(weight|bias)": ("self", "q k v"),
    r"blocks\.\d+\.sublayers\.(self|cross)\.branch\.q\.(weight|bias)": (None, "q"),
    r"blocks\.\d+\.sublayers\.(self|cross)\.branch\.latent\.down\.(weight|bias)": (None, "latent"),
    r"blocks\.\d+\.sublayers\.(self|cross)\.branch\.kv\.(weight|bias)": (None, "k v"),
    r"blocks\.\d+\.sublayers\.(self|cross)\.branch\.o\.(weight|bias)": (None, "o"),
    r"blocks\.\d+\.sublayers\.ffn\.branch\.up\.(weight|bias)": ("ffn", "gate in"),
    r"blocks\.\d+\.sublayers\.ffn\.branch\.out\.(weight|bias)": ("ffn", "out"),
}
NORMS = (
    r"(source_)?(ends|embedding_norm)\..*",
    r"blocks\.\d+\.sublayers\.(self|cross|ffn)\.own\..*",
    r"blocks\.\d+\.sublayers\.(self|cross|ffn)\.branch\.(qk_norm|slots|latent\.norm)\..*",
)
SCALED = ("v", "o", "in", "out")  # what DeepNorm gives the gain beta; q, k, gate, latent and the ends keep 1


def beta(topology: str, side: str) -> float:
    """DeepNorm's gain at N = 3, M = 5, written out."""
    single = {"encoder": 24 ** (-1 / 4), "decoder": 40 ** (-1 / 4)}
    double = {"encoder": 0.87 * (81 * 5) ** (-1 / 16), "decoder": 60 ** (-1 / 4)}
    return (double if topology == "encoder-decoder" else single)[side]


def wanted(scheme: str, topology: str, entry: Weight) -> float:
    """The gain of a scheme at N = 3, M = 5, written out."""
    site, part = entry.site, entry.role.part
    if scheme == "deepnorm" and site is not None and part in SCALED:
        return beta(topology, site.side)
    if scheme == "subln" and site is not None and site.kind != "cross" and part in SCALED:
        single = {"encoder": math.log(6), "decoder": math.log(10)}
        double = {"encoder": math.log(15) * math.log(6) / 3, "decoder": math.log(15)}
        return math.sqrt((double if topology == "encoder-decoder" else single)[site.side])
    if scheme == "hyper" and part in ("o", "out"):
        return 4 ** (-1 / 2)
    if scheme == "dsinit" and site is not None:
        return float((site.block + 1) ** (-1 / 2))
    if scheme == "tfixup":
        scaled = {"encoder": 12 ** (-1 / 4), "decoder": 20 ** (-1 / 4)}
        token = scaled.get(topology, 27 ** (-1 / 4))
        if topology == "encoder-decoder":
            scaled = {"encoder": 0.67 * 3 ** (-1 / 4), "decoder": 45 ** (-1 / 4)}
        if site is not None and part in SCALED:
            return scaled[site.side]
        return token if part == "token" else 1.0
    return 1.0


def made(scheme: str, topology: str, **options: Any) -> Any:
    config = {"d": 16, "heads": 2, "context": 8, "scheme": scheme, "activation": "swiglu", "tied": False}
    return built(**config | {"positions": "learned"} | TOPOLOGIES[topology] | options)


PLAIN: dict[str, Any] = {}
FULL = {"kv_latent": 6, "qk_norm": "head", "embedding_norm": True, "segments": 2}
CASES = [
    (scheme, topology, FULL | {"qk_norm": "none"} if scheme == "hybridnorm" and options else options)  # norms q itself
    for scheme in scheme_names()
    for topology, blocks in TOPOLOGIES.items()
    for options in (PLAIN, FULL)
    if fits(scheme=scheme, **blocks, **options)
]


@pytest.mark.parametrize(("scheme", "topology", "options"), CASES)
def test_every_parameter_has_its_role_and_gain(scheme: str, topology: str, options: dict[str, Any]) -> None:
    model = made(scheme, topology, **options)
    listed: dict[str, list[Any]] = {}
    for weight in weights(model):
        listed.setdefault(weight.name, []).append(weight)
    for name, parameter in model.named_parameters():
        if any(re.fullmatch(pattern, name) for pattern in NORMS):
            assert name not in listed, name
            continue
        found = [role for pattern, role in ROLES.items() if re.fullmatch(pattern, name)]
        assert len(found) == 1, name  # a parameter that no row of the table names fails here
        kind, parts = found[0]
        entries = listed.pop(name)
        assert " ".join(entry.role.part for entry in entries) == parts, name
        assert [entry.rows.start for entry in entries] == [0, *(entry.rows.stop for entry in entries[:-1])], name
        assert entries[-1].rows.stop == len(parameter), name
        for entry in entries:
            assert entry.values.data_ptr() == parameter[entry.rows].data_ptr(), name
            assert entry.role.kind == (kind or name.split(".")[3]), name
            assert entry.role.bias is name.endswith(".bias"), name
            if entry.site is not None:
                block = int(name.split(".")[1])
                side = "encoder" if block < TOPOLOGIES[topology]["N"] else "decoder"
                assert (entry.site.side, entry.site.kind) == (side, name.split(".")[3]), name
            assert gain_of(model, entry) == pytest.approx(wanted(scheme, topology, entry)), name
            if entry.role.bias:
                assert not entry.values.any(), name
    assert not listed


def deviations(model: Any) -> dict[tuple[str, str, str], float]:
    """Mean over blocks of the drawn deviation against Xavier's, by side, kind and part."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for entry in weights(model):
        if entry.site is not None and not entry.role.bias:
            key = (entry.site.side, entry.role.kind, entry.role.part)
            found.setdefault(key, []).append(float(entry.values.std()) / math.sqrt(2 / sum(entry.values.shape)))
    return {key: sum(values) / len(values) for key, values in found.items()}


def test_scaled_init_divides_what_writes_into_the_stream_by_the_root_of_the_sides_sublayers() -> None:
    size = {"d": 128, "heads": 2, "init_scaled": "all"}
    for scheme in ("pre", "deepnorm"):
        for (side, kind, part), ratio in deviations(made(scheme, "encoder-decoder", **size)).items():
            sublayers = 2 * N if side == "encoder" else 3 * M
            gain = beta("encoder-decoder", side) if scheme == "deepnorm" and part in SCALED else 1.0
            want = gain / math.sqrt(sublayers) if part in ("o", "out") else gain
            assert ratio == pytest.approx(want, rel=0.02), (scheme, side, kind, part)
    normal = made("pre", "decoder", d=128, init="normal", init_scaled="all")
    out = next(entry for entry in weights(normal) if entry.role.part == "out" and not entry.role.bias)
    assert float(out.values.std()) == pytest.approx(0.02 / math.sqrt(2 * M), rel=0.03)


def test_init_scaled_by_depth_divides_by_the_root_of_the_block_counted_from_one() -> None:
    for scheme in ("pre", "deepnorm"):
        model = made(scheme, "encoder-decoder", init_scaled="depth")
        for entry in weights(model):
            if entry.site is not None:
                depth = 1 / math.sqrt(2 * (entry.site.block + 1)) if entry.role.part in ("o", "out") else 1.0
                gain = beta("encoder-decoder", entry.site.side) if entry.role.part in SCALED else 1.0
                want = depth * (gain if scheme == "deepnorm" else 1.0)
                assert gain_of(model, entry, "depth") == pytest.approx(want), entry
    wide = made("pre", "decoder", d=128, init="normal", init_scaled="depth")
    outs = [entry for entry in weights(wide) if entry.role.part == "out" and not entry.role.bias]
    for block, entry in enumerate(outs):
        assert float(entry.values.std()) == pytest.approx(0.02 / math.sqrt(2 * (block + 1)), rel=0.03)


def test_what_true_and_false_said_of_init_scaled_is_still_understood() -> None:
    assert [ModelConfig(init_scaled=said).init_scaled for said in (True, False)] == ["all", "none"]


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize(("init", "deviation"), [("fan_in", None), ("normal", 0.05)])
def test_normal_inits_have_their_deviation_and_bound(init: str, deviation: float | None, truncated: bool) -> None:
    options = {"init_std": deviation} if deviation else {}
    model = made("deepnorm", "decoder", d=128, init=init, init_truncated=truncated, **options)
    for entry in weights(model):
        if entry.site is not None and not entry.role.bias:
            gain = beta("decoder", "decoder") if entry.role.part in SCALED else 1.0
            want = gain * (deviation or entry.values.shape[1] ** -0.5)
            assert float(entry.values.std()) == pytest.approx(want, rel=0.04)
            assert (float(entry.values.abs().max()) <= 3 * want) is truncated


def test_segments_and_both_sides_positions_have_the_deviation_of_vectors() -> None:
    model = made("post", "encoder-decoder", d=64, context=256, segments=64)
    for table in (model.token, model.position, model.source_position, model.segment, model.logits):
        assert float(table.detach().std()) == pytest.approx(1 / 8, rel=0.05)
    assert not torch.equal(model.position, model.source_position)
