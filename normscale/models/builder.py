"""From a configuration to a model."""

import torch
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.attention import SelfAttention
from normscale.models.block import Block, Sublayer
from normscale.models.feedforward import FeedForward
from normscale.models.init import initialise
from normscale.models.plan import Plan, resolve
from normscale.models.stack import Decoder
from normscale.schemes import Make, Own, Site

GRAPHS_A_STRUCTURE = 4  # plain and measured, each with and without gradients


def build(config: ModelConfig, vocab: int, seed: int) -> Decoder:
    """Returns the model on the CPU, in fp32, initialised from `seed`.

    Raises:
        ConfigError: as `resolve`.
    """
    plan = resolve(config)
    scheme, depth, d = plan.scheme, plan.depth, config.d

    def make_norm(width: int | None = None) -> nn.Module:
        return plan.norm(width or d, config.eps, plan.norm_options)

    generator = torch.Generator(device="cpu").manual_seed(seed)
    make = Make(d, config.heads, plan.ffn, vocab, make_norm, generator)
    ends = Own("decoder", scheme.own_ends(depth, "decoder", make))
    streams = len(scheme.enter(torch.zeros(1, 1, d), ends))
    blocks: dict[tuple[str, int], dict[str, Sublayer]] = {}
    for site in depth.sites():
        own = Own(site.kind, scheme.own(depth, site, make))
        sublayer = Sublayer(scheme, site, own, _branch(plan, site, make), config.dropout, streams)
        blocks.setdefault((site.side, site.block), {})[site.kind] = sublayer
    model = Decoder(plan, vocab, ends, [Block(sublayers) for sublayers in blocks.values()])
    initialise(model, config.init, config.init_std, generator)
    if config.compile:
        _compile(model)
    return model


def _compile(model: Decoder) -> None:
    """Compiles block by block; more graphs than structures and modes explain are an error, not a fall back to eager.

    Compiling `forward` and not the block leaves hooks on the block eager, and lets all blocks of one structure share
    one graph.
    """
    import torch._dynamo.config as dynamo

    # Batches of other shapes (a last evaluation batch, the update probe's) take graphs of their own: hence twice.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 2 * GRAPHS_A_STRUCTURE * model.structures)
    dynamo.fail_on_recompile_limit_hit = True
    for block in model.blocks:
        block.forward = torch.compile(block.forward)


def _branch(plan: Plan, site: Site, make: Make) -> nn.Module:
    config = plan.config
    slots = plan.scheme.slots(plan.depth, site, make)
    if site.kind == "self":
        return SelfAttention(config.d, config.heads, config.bias, config.dropout, slots)
    if site.kind == "ffn":
        return FeedForward(config.d, plan.ffn, config.activation, config.bias, config.dropout, slots)
    raise ConfigError("model.N: encoder stacks are not built yet; use N=0 (decoder-only)", key="model.N")
