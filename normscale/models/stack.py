"""The decoder-only language model: embeddings, a flat list of blocks, a head."""

from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normscale.models.attention import rotary_tables
from normscale.models.block import Block, Sublayer
from normscale.models.plan import Plan
from normscale.schemes.scheme import Own, Site, Streams


class Decoder(nn.Module):
    """A decoder-only Transformer over a vocabulary of V tokens.

    Blocks stand in one flat list and run in a loop: 1000 of them need no deeper Python stack than one. Token vectors
    are drawn with standard deviation 1/sqrt(D) and multiplied by sqrt(D), so that the stream starts at unit RMS and a
    tied head gives logits of unit variance; learned positions are added as they are.

    Shape: tokens [B, T] int64; result [B, T, V].
    """

    def __init__(self, plan: Plan, vocab: int, ends: Own, blocks: list[Block]) -> None:
        super().__init__()
        config = plan.config
        self.scheme, self.depth, self.d, self.context = plan.scheme, plan.depth, config.d, config.context
        self.checkpointing = config.checkpointing
        self.structures = len({block.structure() for block in blocks})
        self.token = nn.Parameter(torch.empty(vocab, config.d))
        learned = config.positions == "learned"
        self.position = nn.Parameter(torch.empty(config.context, config.d)) if learned else None
        self.logits = None if config.tied else nn.Parameter(torch.empty(vocab, config.d))
        self.ends = ends
        self.blocks = nn.ModuleList(blocks)
        self.dropout = nn.Dropout(config.dropout)
        tables = (None, None) if learned else rotary_tables(config.context, config.d // config.heads)
        self.register_buffer("rotary_cos", tables[0], persistent=False)
        self.register_buffer("rotary_sin", tables[1], persistent=False)

    def sites(self) -> list[Site]:
        """Returns all sites in the order they run."""
        return [sublayer.site for sublayer in self.sublayers()]

    def sublayers(self) -> list[Sublayer]:
        """Returns all sublayers in the order they run."""
        return [sublayer for block in self.blocks for sublayer in cast(Block, block)]

    def named_sublayers(self) -> list[tuple[str, Sublayer]]:
        """Returns all sublayers with the names of their modules, in the order they run."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, Sublayer)]

    def site_parameters(self) -> list[list[str]]:
        """Returns, for every site, the names of its sublayer's parameters (branch and what the scheme owns there)."""
        return [
            [f"{name}.{own}" for own, _ in sublayer.named_parameters()] for name, sublayer in self.named_sublayers()
        ]

    def site_of(self, parameter: str | None) -> int:
        """Returns the index of the site a parameter belongs to; -1 for none, or for one of the ends."""
        return next((i for i, names in enumerate(self.site_parameters()) if parameter in names), -1)

    @property
    def stream_count(self) -> int:
        """The number of tensors the scheme's stream is made of."""
        return self.sublayers()[0].rows_of_site.numel() - 1

    def features(self, tokens_BT: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns the output of the stack, before the head.

        Shape: tokens [B, T] int64; rows [sites * (1 + streams), 3] fp32 or None; result [B, T, D].
        """
        x_BTD = self.token[tokens_BT] * self.d**0.5
        if self.position is not None:
            x_BTD = x_BTD + self.position[: tokens_BT.shape[1]]
        streams: Streams = self.scheme.enter(self.dropout(x_BTD), self.ends)
        rotary = None if self.rotary_cos is None else (self.rotary_cos, self.rotary_sin)
        for block in self.blocks:
            if self.checkpointing and torch.is_grad_enabled():
                # `rows` goes around checkpoint's saved inputs: it is written in place, by the recomputation too.
                streams = checkpoint(partial(block, rotary=rotary, rows=rows), streams, use_reentrant=False)
            else:
                streams = block(streams, rotary, rows)
        return self.scheme.exit(streams, self.ends)

    def forward(self, tokens_BT: Tensor, rows: Tensor | None = None) -> Tensor:
        """Returns the logits; with `rows`, the statistics of every site are written there.

        Shape: tokens [B, T] int64; rows as in `features`; result [B, T, V].
        """
        x_BTD = self.features(tokens_BT, rows)
        logits_BTV = nn.functional.linear(x_BTD, self.token if self.logits is None else self.logits)
        return logits_BTV * self.ends.tensor("logit_scale") if self.ends.has("logit_scale") else logits_BTV
