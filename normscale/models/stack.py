"""The Transformer: embeddings, a flat list of blocks, a head; with an encoder, a decoder, or both."""

from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from normscale.models.attention import Context, rotary_tables
from normscale.models.block import Block, Sublayer
from normscale.models.plan import Plan
from normscale.norms import Norm, seen_before
from normscale.ops import sampled
from normscale.ops.constants import Constants
from normscale.ops.products import NATIVE, Products
from normscale.ops.statistics import Buffers
from normscale.schemes.scheme import Own, Site, Streams


class Transformer(Constants):
    """A Transformer over a vocabulary of V tokens, in one of three topologies.

    Blocks stand in one flat list, the encoder's first, and run in a loop: 1000 of them need no deeper Python stack
    than one. `tokens` is what the side with the head reads; `source`, what the encoder beside a decoder reads. The two
    sides share the token vectors and have learned positions of their own. Token vectors are drawn with standard
    deviation 1/sqrt(D) and multiplied by sqrt(D), so that the stream starts at unit RMS and a tied head gives logits of
    unit variance; positions and segments are added as they are.

    Shape: tokens [B, T], source [B, S] int64; result [B, T, V].
    """

    products: Products = NATIVE
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    sinusoids: Tensor | None
    stream: torch.dtype | None = None  # what the embedding is cast to; None: it stays as the parameters are

    def __init__(
        self,
        plan: Plan,
        vocab: int,
        ends: Own,
        source_ends: Own | None,
        blocks: list[Block],
        embedding_norms: tuple[nn.Module | None, nn.Module | None],
    ) -> None:
        """Takes what the scheme owns at the ends of the side with the head, and of the encoder beside it if any.

        The embedding norms are those of the same two sides.
        """
        super().__init__()
        config = plan.config
        self.scheme, self.depth, self.d, self.context = plan.scheme, plan.depth, config.d, config.context
        self.checkpointing = config.checkpointing
        self._remembers = any(m.remembers for block in blocks for m in block.modules() if isinstance(m, Norm))

        def table(rows: int, wanted: bool) -> nn.Parameter | None:
            return nn.Parameter(torch.empty(rows, config.d)) if wanted else None

        learned, beside = config.positions == "learned", source_ends is not None
        self.token = nn.Parameter(torch.empty(vocab, config.d))
        self.position = table(config.context, learned)
        self.source_position = table(config.context, learned and beside)
        self.segment = table(config.segments, config.segments > 0)
        self.logits = table(vocab, not config.tied)
        self.logit_bias: nn.Parameter | None
        self.register_parameter("logit_bias", None)  # a folded model may have one (`normscale.fold`)
        self.ends = ends
        self.blocks = nn.ModuleList(blocks)
        self.dropout = nn.Dropout(config.dropout)
        self.source_ends = source_ends
        self.embedding_norm, self.source_embedding_norm = embedding_norms
        rope = config.positions == "rope"
        tables = rotary_tables(config.context, config.d // config.heads) if rope else (None, None)
        self.register_buffer("rotary_cos", tables[0], persistent=False)
        self.register_buffer("rotary_sin", tables[1], persistent=False)
        waves = sinusoids(config.context, config.d) if config.positions == "sinusoidal" else None
        self.register_buffer("sinusoids", waves, persistent=False)
        self.join_blocks(not self.checkpointing)
        self.structures = len({block.structure() for block in blocks})

    def sites(self) -> list[Site]:
        """Returns all sites in the order they run."""
        return [sublayer.site for sublayer in self.sublayers()]

    def sublayers(self) -> list[Sublayer]:
        """Returns all sublayers in the order they run."""
        return [sublayer for block in self.blocks for sublayer in cast(Block, block)]

    def named_sublayers(self) -> list[tuple[str, Sublayer]]:
        """Returns all sublayers with the names of their modules, in the order they run."""
        return [(name, module) for name, module in self.named_modules() if isinstance(module, Sublayer)]

    def join_blocks(self, joined: bool) -> None:
        """Tells every site which norm comes after it (`Own.after`): of the next block too where blocks are `joined`.

        Apart, a block needs no other block's parameters, and hands on the stream alone. So it is for engines that
        gather parameters block by block, and for checkpointing, which would keep the norm beside the stream.
        """
        sides: dict[str, list[Sublayer]] = {}
        for sublayer in self.sublayers():
            sides.setdefault(sublayer.site.side, []).append(sublayer)
        for side, sublayers in sides.items():
            ends = self.ends if self.source_ends is None or side == "decoder" else self.source_ends
            ring = [(None, ends), *((s.site.block, s.own) for s in sublayers), (None, ends)]
            for (block, own), (next_block, after) in pairwise(ring):
                own.precede(self.scheme.seen_through(after) if joined or block == next_block else None)

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
        return self.rows_per_site - 1 - self.scheme.sums

    @property
    def rows_per_site(self) -> int:
        """The number of rows a site has in what a measured pass fills (see `ops.statistics.Buffers`)."""
        return self.sublayers()[0].rows_of_site.numel()

    def features(
        self,
        tokens_BT: Tensor,
        # Buffers, and the last two int and list[Tensor], or None: Any, so that **inputs (tensors) type-checks
        to: Any = None,
        *,
        source_BS: Tensor | None = None,
        source_keep_BS: Tensor | None = None,
        segments_BT: Tensor | None = None,
        memory_BSD: Tensor | None = None,
        skip: Any = None,
        outputs: Any = None,
    ) -> Tensor:
        """Returns the output of the side with the head, before the head.

        `source_keep` is False at padding of what the encoder reads (the tokens, where it is alone). `memory`, what
        `encode` returned, stands for a source that was read before. What buffers `to` ask for is measured on the way.
        `skip` is a block that is passed over. `outputs` gets the first stream, detached, before the first and after
        every block of a side, the encoder's before the decoder's: (N + 1) + (M + 1) tensors where there are two sides.

        Shape: tokens, segments [B, T] int64; source [B, S] int64; source_keep [B, S], or [B, T] where the encoder is
        alone, bool; memory [B, S, D]; the buffers have sites * rows_per_site rows; result [B, T, D].

        Raises:
            ValueError: an input that this model does not read, or the lack of one that it does.
        """
        self._check_inputs(source_BS if memory_BSD is None else memory_BSD, source_keep_BS, segments_BT)
        if source_BS is not None:
            memory_BSD = self._encode(source_BS, source_keep_BS, to, skip, outputs)
        context = self._context(source_keep_BS, memory_BSD)
        first = 0 if self.source_ends is None else self.depth.N
        emb = self._embed(tokens_BT, self.position, segments_BT, self.embedding_norm)
        return self._run(emb, self.ends, range(first, len(self.blocks)), context, to, skip, outputs)

    def forward(
        self,
        tokens_BT: Tensor,
        to: Buffers | None = None,
        *,
        source_BS: Tensor | None = None,
        source_keep_BS: Tensor | None = None,
        segments_BT: Tensor | None = None,
        skip: int | None = None,
    ) -> Tensor:
        """Returns the logits; with buffers, what they ask of every site is written there.

        Shape: arguments as in `features`; result [B, T, V].
        """
        # Not `self.features`: an engine may have put its own around that one, for calls that do not come through here.
        x_BTD = Transformer.features(
            self, tokens_BT, to, source_BS=source_BS, source_keep_BS=source_keep_BS, segments_BT=segments_BT, skip=skip
        )
        return self.head(x_BTD)

    def encode(self, source_BS: Tensor, source_keep_BS: Tensor | None = None) -> Tensor:
        """Returns what the encoder beside a decoder makes of a source, for `features` to be called with many times.

        Shape: as in `features`; result [B, S, D].
        """
        return self._encode(source_BS, source_keep_BS, None, None, None)

    def head(self, x_BTD: Tensor) -> Tensor:
        """Returns the logits of what `features` returned.

        Shape: result [B, T, V].
        """
        logits_BTV = self.products.linear(x_BTD, self.token if self.logits is None else self.logits, self.logit_bias)
        return logits_BTV * self.ends.tensor("logit_scale") if self.ends.has("logit_scale") else logits_BTV

    def _encode(self, source: Tensor, keep: Tensor | None, to: Buffers | None, skip: Any, outputs: Any) -> Tensor:
        assert self.source_ends is not None
        emb = self._embed(source, self.source_position, None, self.source_embedding_norm)
        return self._run(emb, self.source_ends, range(self.depth.N), self._context(keep, None), to, skip, outputs)

    def _context(self, keep_BS: Tensor | None, memory_BSD: Tensor | None) -> Context:
        cos, sin = self.rotary_cos, self.rotary_sin
        rotary = None if cos is None or sin is None else (cos, sin)
        return Context(rotary, memory_BSD, None if keep_BS is None else keep_BS[:, None, None, :])

    def _embed(
        self, tokens: Tensor, position: Tensor | None, segments: Tensor | None, norm: nn.Module | None
    ) -> Tensor:
        x = self.token[tokens] * self.d**0.5
        table = self.sinusoids if position is None else position
        if table is not None:
            x = x + table[: tokens.shape[1]]
            if self.stream is None:
                x = x.to(self.token.dtype)  # the fp32 waves widen the sum of a model that was cast
        if segments is not None and self.segment is not None:
            x = x + self.segment[segments]
        if norm is not None:
            x = norm(x)
        out: Tensor = self.dropout(x)
        return out

    def _run(
        self,
        emb: Tensor,
        ends: Own,
        blocks: range,
        context: Context,
        to: Buffers | None,
        skip: int | None,
        outputs: list[Tensor] | None,
    ) -> Tensor:
        """Returns the output of one side: its embedding through its blocks."""
        streams: Streams = self.scheme.enter(emb if self.stream is None else emb.to(self.stream), ends)
        if outputs is not None:
            outputs.append(streams[0].detach())
        if to is not None:
            places = sampled.places(emb.shape[0], emb.shape[1], emb.device)
            context = context._replace(places=places)
            if to.samples is not None:
                row = cast(Block, self.blocks[blocks.start]).row - 1
                sampled.keep(to.samples, row, streams[0], places)
        for i in blocks:
            if i == skip:
                streams = self.scheme.shown(streams)
            else:
                block = self.blocks[i]
                if self.checkpointing and torch.is_grad_enabled():
                    # Buffers go around checkpoint's saved inputs: they are written in place, by the recomputation too.
                    run = partial(block, context=context, to=to)
                    streams = checkpoint(run, streams, use_reentrant=False, **self._again(block))
                else:
                    streams = block(streams, context, to)
            if outputs is not None:
                outputs.append(streams[0].detach())
        return self.scheme.exit(streams, ends)

    def _again(self, block: nn.Module) -> dict[str, Any]:
        """Returns what checkpointing is told, so that what norms remember is written by the first run alone."""
        return {"context_fn": lambda: (nullcontext(), seen_before(block))} if self._remembers else {}

    def _check_inputs(self, source: Tensor | None, keep: Tensor | None, segments: Tensor | None) -> None:
        wanted = {
            "source_BS": (source, self.source_ends is not None),
            "segments_BT": (segments, self.segment is not None),
        }
        for name, (given, reads) in wanted.items():
            if (given is not None) != reads:
                verb = "reads" if reads else "does not read"
                raise ValueError(f"{name}: a model with {self._described()} {verb} it")
        if keep is not None and not self.depth.N:
            raise ValueError(f"source_keep_BS: a model with {self._described()} does not read it")

    def _described(self) -> str:
        segments = 0 if self.segment is None else len(self.segment)
        return f"N={self.depth.N} M={self.depth.M} segments={segments}"


def sinusoids(context: int, d: int) -> Tensor:
    """Returns sin(t / 10000^(2i/D)) in channels 2i and the cosine of the same in channels 2i + 1.

    Shape: result [T, D] fp32.

    Reference: Vaswani et al. 2017, arXiv:1706.03762, section 3.5.
    """
    frequency = 10_000.0 ** (-torch.arange(0, d, 2, dtype=torch.float64) / d)
    angles = torch.outer(torch.arange(context, dtype=torch.float64), frequency)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)[:, :d].float()
