"""From a configuration to a model: the second stage of checking, then the build."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError, nearest
from normscale.models.attention import SelfAttention
from normscale.models.block import Block, Sublayer
from normscale.models.feedforward import FeedForward, default_ffn_width
from normscale.models.init import initialise
from normscale.models.stack import Decoder
from normscale.norms import Norm, find_norm
from normscale.schemes import Depth, Make, Own, Scheme, Site, find_scheme


@dataclass(frozen=True)
class Plan:
    """A model configuration with its names resolved: what `build` needs, and what `normscale check` prints."""

    config: ModelConfig
    depth: Depth
    scheme: Scheme
    norm: type[Norm]
    norm_options: Any
    ffn: int


def resolve(config: ModelConfig) -> Plan:
    """Returns the plan of a model: scheme, norm and their own options checked against their own types.

    Raises:
        ConfigError: an unknown scheme, norm or option, a wrong value of one, or a topology the scheme refuses.
    """
    scheme_type, norm = find_scheme(config.scheme), find_norm(config.norm)
    for option, reason in scheme_type.refuses.items():
        if option in config.scheme_options:
            key = f"model.scheme_options.{option}"
            raise ConfigError(f"{key}: makes no sense with scheme={config.scheme}: {reason}", key=key)
    scheme = scheme_type(_options(scheme_type.Options, config.scheme_options, "model.scheme_options", config.scheme))
    depth = Depth(config.N, config.M)
    if depth.topology not in scheme.topologies:
        allowed = ", ".join(sorted(scheme.topologies))
        raise ConfigError(
            f"model.scheme: {config.scheme!r} has no {depth.topology} form (it has: {allowed}); "
            "choose another scheme, or other N and M",
            key="model.scheme",
        )
    norm_options = _options(norm.Options, config.norm_options, "model.norm_options", config.norm)
    return Plan(config, depth, scheme, norm, norm_options, config.ffn or default_ffn_width(config.d, config.activation))


def build(config: ModelConfig, vocab: int, seed: int) -> Decoder:
    """Returns the model on the CPU, in fp32, initialised from `seed`.

    Raises:
        ConfigError: as `resolve`.
    """
    plan = resolve(config)
    scheme, depth = plan.scheme, plan.depth

    def make_norm(width: int | None = None) -> nn.Module:
        return plan.norm(width or config.d, config.eps, plan.norm_options)

    make = Make(config.d, make_norm)
    ends = Own("ends", scheme.own_ends(depth, "decoder", make))
    streams = len(scheme.enter(torch.zeros(1, 1, config.d), ends))
    blocks: dict[tuple[str, int], dict[str, Sublayer]] = {}
    for site in depth.sites():
        own = Own(site.kind, scheme.own(depth, site, make))
        sublayer = Sublayer(scheme, site, own, _branch(plan, site, make), config.dropout, streams)
        blocks.setdefault((site.side, site.block), {})[site.kind] = sublayer
    model = Decoder(
        scheme,
        depth,
        ends,
        [Block(sublayers) for sublayers in blocks.values()],
        vocab=vocab,
        d=config.d,
        context=config.context,
        positions=config.positions,
        head_width=config.d // config.heads,
        tied=config.tied,
        dropout=config.dropout,
        checkpointing=config.checkpointing,
    )
    initialise(model, config.init, config.init_std, seed)
    if config.compile:
        for block in model.blocks:
            # Compiling `forward` and not the block leaves hooks on the block eager, and lets all blocks of one
            # structure share one graph.
            block.forward = torch.compile(block.forward)
    return model


def _branch(plan: Plan, site: Site, make: Make) -> nn.Module:
    config = plan.config
    slots = plan.scheme.slots(plan.depth, site, make)
    if site.kind == "self":
        return SelfAttention(config.d, config.heads, config.bias, config.dropout, slots)
    if site.kind == "ffn":
        return FeedForward(config.d, plan.ffn, config.activation, config.bias, config.dropout, slots)
    raise ConfigError("model.N: encoder stacks are not built yet; use N=0 (decoder-only)", key="model.N")


def _options(kind: type[BaseModel], given: dict[str, Any], key: str, owner: str) -> BaseModel:
    """Returns the typed options of a scheme or norm, or an error that names the option."""
    allowed = sorted(kind.model_fields)
    for option in given:
        if option not in allowed:
            has = f"it has: {', '.join(allowed)}" if allowed else "it has no options"
            raise ConfigError(
                f"{key}.{option}: {owner} has no option {option!r}{nearest(option, allowed)} ({has})",
                key=f"{key}.{option}",
            )
    try:
        return kind(**given)
    except ValidationError as problem:
        first = problem.errors()[0]
        at = ".".join([key, *map(str, first["loc"])])
        said = first.get("ctx", {}).get("said", first["msg"])
        raise ConfigError(f"{at}: {first['input']!r}: {said} ({owner})", key=at) from None
