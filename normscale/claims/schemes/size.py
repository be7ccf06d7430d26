"""What a scheme is made of at one size: norms, parameters, constants, counted in the models that are measured."""

from dataclasses import dataclass

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.norms import Norm

VOCAB = 256  # bytes, as in the runs


@dataclass(frozen=True)
class Size:
    """Norms in all blocks and at the ends, parameters of all blocks and of those the scheme's own, alpha and beta.

    `alphas` and `betas` are the least and the largest over sites.
    """

    blocks: int
    norms_in_blocks: int
    norms_at_ends: int
    parameters: int
    own_parameters: int
    alphas: tuple[float, float]
    betas: tuple[float, float]


def size_of(config: ModelConfig) -> Size:
    """Returns the counts of a model.

    Raises:
        ConfigError: the scheme has no model of this configuration.
    """
    model = build(config, VOCAB, 0)
    scheme, sites = model.scheme, model.sites()
    norms = [sum(isinstance(module, Norm) for module in part.modules()) for part in (model.blocks, model)]
    return Size(
        blocks=len(model.blocks),
        norms_in_blocks=norms[0],
        norms_at_ends=norms[1] - norms[0],
        parameters=sum(p.numel() for p in model.blocks.parameters()),
        own_parameters=sum(p.numel() for s in model.sublayers() for p in s.own.parameters()),
        alphas=_ends([scheme.alpha(model.depth, site) for site in sites]),
        betas=_ends([scheme.beta(model.depth, site) for site in sites]),
    )


def _ends(values: list[float]) -> tuple[float, float]:
    return min(values), max(values)
