"""Which models a scheme has: tests that run over all schemes ask for no others."""

from typing import Any

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.models.stack import Transformer
from normscale.schemes import Depth, find_scheme


def fits(**settings: Any) -> bool:
    """Tells whether the scheme has the topology and can follow the settings; tests of its own say what it refuses."""
    config = ModelConfig(**settings)
    scheme = find_scheme(config.scheme)()
    unread = any(getattr(config, key) != ModelConfig.model_fields[key].default for key in ("norm", "eps"))
    reads = scheme.has_norms or config.qk_norm != "none" or not unread
    return Depth(config.N, config.M).topology in scheme.topologies and scheme.clash(config) is None and reads


def built(seed: int = 0, **settings: Any) -> Transformer:
    """Builds a model over 32 tokens."""
    return build(ModelConfig(**settings), 32, seed)
