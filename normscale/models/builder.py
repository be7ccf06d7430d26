"""From a configuration to a model."""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.attention import CrossAttention, Latent, QKNorm, SelfAttention
from normscale.models.block import Block, Sublayer
from normscale.models.feedforward import FeedForward
from normscale.models.init import initialise
from normscale.models.plan import Plan, resolve
from normscale.models.stack import Transformer
from normscale.norms import Norm, set_backend
from normscale.ops.handles import Opening
from normscale.schemes import Make, Own, Site
from normscale.schemes.scheme import Side

GRAPHS_A_STRUCTURE = 4  # plain and measured, each with and without gradients


def build(config: ModelConfig, vocab: int, seed: int, only: Collection[tuple[Side, int]] | None = None) -> Transformer:
    """Returns the model on the CPU, in fp32, initialised from `seed`.

    With `only` it has these blocks alone, each (side, number), as they are in the whole model: for what can be learned
    of a deep model from a few of its blocks (see `normscale.plan`).

    Raises:
        ConfigError: as `resolve`.
    """
    plan = resolve(config)
    scheme, depth = plan.scheme, plan.depth
    generator = torch.Generator(device="cpu").manual_seed(seed)
    make = partial(plan.make, vocab, generator)
    source_ends = (
        _ends(plan, "encoder", make("encoder"), headless=True) if depth.topology == "encoder-decoder" else None
    )
    side: Side = "decoder" if depth.M else "encoder"
    ends = _ends(plan, side, make(side))
    streams = _streams(plan, ends, source_ends)
    blocks: dict[tuple[str, int], dict[str, Sublayer]] = {}
    for site in depth.sites():
        if only is not None and (site.side, site.block) not in only:
            continue
        at = make(site.side, site.kind)
        own = Own(site.kind, scheme.own(depth, site, at))
        sublayer = Sublayer(scheme, site, own, _branch(plan, site, at), config.dropout, streams)
        blocks.setdefault((site.side, site.block), {})[site.kind] = sublayer
    norms = (
        make(side).norm() if config.embedding_norm else None,
        make("encoder").norm() if config.embedding_norm and source_ends is not None else None,
    )
    first_row = {"encoder": 1, "decoder": 2 if depth.N else 1}  # before a side's blocks, what enters it
    stack = [Block(sublayers, first_row[of] + i) for i, ((of, _), sublayers) in enumerate(blocks.items())]
    model = Transformer(plan, vocab, ends, source_ends, stack, norms)
    initialise(model, config, generator)
    _open_plainly(model)
    set_backend(model, config.backend)
    if config.compile:
        _compile(model)
    return model


def _ends(plan: Plan, side: Side, make: Make, headless: bool = False) -> Own:
    parts = plan.scheme.own_ends(plan.depth, side, make)
    # The logits are scaled at the side with the head alone: a parameter here would never get a gradient.
    return Own(side, {name: part for name, part in parts.items() if not headless or name != "logit_scale"})


def _open_plainly(model: Transformer) -> None:
    """Has no stack begin with a handle (see `ops.handles`) where one of the sites' norms has no kernel to take it."""
    norms = [module for layer in model.sublayers() for module in layer.own.modules() if isinstance(module, Norm)]
    if any(norm.spec is None for norm in norms):
        for module in model.modules():
            if isinstance(module, Opening):
                module.spec = None


def _streams(plan: Plan, ends: Own, source_ends: Own | None) -> int:
    """Returns the number of the scheme's streams, which rows are laid out by."""
    emb = torch.zeros(1, 1, plan.config.d)
    counts = [len(plan.scheme.shown(plan.scheme.enter(emb, side))) for side in (ends, source_ends) if side is not None]
    if len(set(counts)) > 1:
        raise ConfigError(
            f"model.scheme: {plan.config.scheme} has {counts[1]} streams in the encoder and {counts[0]} in the decoder;"
            " both sides need the same number, so choose another scheme or a single stack",
            key="model.scheme",
        )
    return counts[0]


def _compile(model: Transformer) -> None:
    """Compiles block by block; more graphs than structures and modes explain are an error, not a fall back to eager.

    Compiling `forward` and not the block leaves hooks on the block eager, and lets all blocks of one structure share
    one graph.
    """
    import torch._dynamo.config as dynamo

    # Batches of other shapes (a last evaluation batch, the update probe's), and with or without padding, take graphs
    # of their own: hence four times.
    dynamo.recompile_limit = max(dynamo.recompile_limit, 4 * GRAPHS_A_STRUCTURE * model.structures)
    dynamo.fail_on_recompile_limit_hit = True
    # Asserts on the compiler's own buffers and a Python wrapper around its kernels are a tenth of a small block's time.
    # The wrapper in C++ wants CUDA's headers where there is a CUDA device, so it is for CPUs alone.
    options: dict[str, Any] = {"size_asserts": False, "cpp_wrapper": not torch.cuda.is_available()}
    for block in model.blocks:
        block.forward = torch.compile(block.forward, options=options)


def _branch(plan: Plan, site: Site, make: Make) -> nn.Module:
    config = plan.config
    slots = plan.scheme.slots(plan.depth, site, make)
    if site.kind == "ffn":
        return FeedForward(config.d, plan.ffn, config.activation, config.bias, config.dropout, slots)
    qk_norm = _qk_norm(plan, site)
    latent = None
    if config.kv_latent is not None:
        latent = Latent(site.kind, config.d, config.kv_latent, config.bias, make.norm(config.kv_latent))
    given: Any = {"qk_norm": qk_norm, "latent": latent, "scaled": config.attention_scale}
    if site.kind == "cross":
        return CrossAttention(config.d, config.heads, config.bias, config.dropout, slots, **given)
    causal = site.side == "decoder"
    return SelfAttention(config.d, config.heads, config.bias, config.dropout, slots, causal=causal, **given)


def _qk_norm(plan: Plan, site: Site) -> QKNorm | None:
    config = plan.config
    if config.qk_norm == "none":
        return None
    full = config.qk_norm == "full"
    width = config.d if full else config.d // config.heads
    scale: nn.Parameter | float | None = None
    if config.qk_norm == "l2":
        # Of q and k of length sqrt(K) each, whose score is divided by sqrt(K), to the cosine times the scale.
        scale = config.qk_scale / width**0.5
        scale = nn.Parameter(torch.tensor([scale])) if config.qk_scale_trained else scale
    return QKNorm(plan.norm_of_qk(site, width), plan.norm_of_qk(site, width), full=full, scale=scale)
