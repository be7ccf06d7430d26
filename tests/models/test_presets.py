"""The models of configs/model: each is built without memory, and is what its name says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from normscale.config.load import load
from normscale.models.builder import build
from normscale.norms import Norm

FOLDER = Path(__file__).parents[2] / "configs" / "model"
PRESETS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
# Scheme, norm, norms that are not the scheme's (block 0 and the ends), and what else is the family's.
FAMILIES: dict[str, tuple[str, str, set[str], dict[str, Any]]] = {
    "gpt2": ("pre", "LayerNorm", set(), {"init_scaled": "all", "activation": "gelu", "positions": "learned"}),
    "bert": ("post", "LayerNorm", {"embedding_norm"}, {"segments": 2, "M": 0, "eps": 1e-12, "positions": "learned"}),
    "llama": ("pre", "RMSNorm", set(), {"activation": "swiglu", "bias": False, "positions": "rope"}),
    "qwen": ("pre", "RMSNorm", {"qk_norm.q", "qk_norm.k"}, {"qk_norm": "head", "activation": "swiglu"}),
    "deepseek": ("pre", "RMSNorm", {"latent.norm"}, {"activation": "swiglu"}),
    "gemma2": ("peri", "RMSNorm", set(), {"activation": "geglu", "norm_options": {"zero_centred": True}}),
    "olmo2": ("reordered", "RMSNorm", {"qk_norm.q", "qk_norm.k"}, {"qk_norm": "full", "init": "normal"}),
}
PARAMETERS = {"deepnet-18-18": 132e6, "deepnet-100-100": 734e6}  # a hundred and a hundred: 863M with a vocabulary


def meta(name: str) -> Any:
    config = load(FOLDER / f"{name}.yaml")
    with torch.device("meta"):
        return config, build(config.model, 256, 0)


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "deepnet-500-500"])
def test_every_preset_is_built(name: str) -> None:
    config, model = meta(name)
    assert len(model.blocks) == config.model.N + config.model.M
    assert model.structures == (2 if config.model.N and config.model.M else 1)
    if name in PARAMETERS:
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.01)


def test_the_deepest_has_the_papers_sites_and_parameters() -> None:
    config = load(FOLDER / "deepnet-500-500.yaml").model
    with torch.device("meta"):
        shallow = build(config.model_copy(update={"N": 5, "M": 5}), 256, 0)
    blocks = sum(p.numel() for p in shallow.blocks.parameters()) * 100
    assert (config.N, config.M) == (500, 500)
    assert blocks == pytest.approx(3.8e9 - 0.13e9, rel=0.01)  # 3.8B, less what the paper's vocabulary takes


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_is_its_norm_recipe(name: str) -> None:
    scheme, norm, extra, options = FAMILIES[name]
    config, model = meta(name)
    assert model.scheme.name == scheme
    for key, value in options.items():
        assert getattr(config.model, key) == value
    norms = {n: m for n, m in model.named_modules() if isinstance(m, Norm)}
    assert {type(m).__name__ for m in norms.values()} == {norm}
    inside = {n.rpartition(".branch.")[2] for n in norms if n.startswith("blocks.0.") and ".own." not in n}
    outside = {n for n in norms if not n.startswith("blocks.") and n != "ends.norm"}
    assert inside | outside == extra
    assert ("ends.norm" in norms) is (scheme != "post")
    assert len(config.model.scheme_options) == 0
