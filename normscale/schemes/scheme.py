"""The contract of a normalisation scheme: sites, roles, streams, and what a scheme decides.

A scheme owns one whole idea: how sublayers join the residual stream, which norms stand where, the constants alpha and
beta by depth, the initial gain of every parameter by its role, and whatever the idea needs besides. Nothing else in
the tree asks which scheme it is. Defaults do nothing: the base class is a plain residual network without norms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, cast

import torch
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.config.values import Section
from normscale.ops.constants import Constants
from normscale.ops.statistics import Buffers, watch, write_row, write_sum

Side = Literal["encoder", "decoder"]
Kind = Literal["self", "cross", "ffn"]
Topology = Literal["encoder", "decoder", "encoder-decoder"]

Streams = tuple[Any, ...]
"""What flows from site to site: tensors [B, T, D], one for most schemes, two for two-stream schemes, and so on.

A scheme may carry more from site to site, after these; `Scheme.shown` tells the streams from it.
"""

Parts = Mapping[str, "nn.Module | nn.Parameter | float"]
"""What a scheme owns at a site, by name: norms and other modules, parameters, constants (numbers)."""


@dataclass(frozen=True)
class Site:
    """One place where a sublayer joins the stream. `index` is global: 0 is the first site of the whole model."""

    side: Side
    block: int
    kind: Kind
    index: int

    @property
    def name(self) -> str:
        return f"{self.side}.{self.block:04d}.{self.kind}"


@dataclass(frozen=True)
class Depth:
    """N encoder blocks and M decoder blocks; blocks, not sublayers."""

    N: int
    M: int

    def __post_init__(self) -> None:
        if self.N < 0 or self.M < 0 or self.N + self.M == 0:
            raise ValueError(f"a model needs at least one block, got N={self.N}, M={self.M}")

    @property
    def topology(self) -> Topology:
        if self.N and self.M:
            return "encoder-decoder"
        return "encoder" if self.N else "decoder"

    @property
    def single(self) -> int:
        """The number of blocks of a single stack.

        Raises:
            ValueError: there are two stacks.
        """
        if self.N and self.M:
            raise ValueError(f"not a single stack: N={self.N}, M={self.M}")
        return self.N or self.M

    def kinds(self, side: Side) -> tuple[Kind, ...]:
        """Returns the sublayers of one block, in the order they run."""
        return ("self", "cross", "ffn") if side == "decoder" and self.N else ("self", "ffn")

    def sublayers(self, side: Side) -> int:
        """Returns the number of sublayers of one side."""
        return len(self.kinds(side)) * (self.N if side == "encoder" else self.M)

    def after(self, site: Site) -> Site | None:
        """Returns the next site of the same side, None after its last."""
        kinds = self.kinds(site.side)
        place = kinds.index(site.kind) + 1
        if place < len(kinds):
            return Site(site.side, site.block, kinds[place], site.index + 1)
        last = site.block + 1 == (self.N if site.side == "encoder" else self.M)
        return None if last else Site(site.side, site.block + 1, kinds[0], site.index + 1)

    def first(self, side: Side) -> Site:
        """Returns the first site of a side."""
        return Site(side, 0, "self", self.sublayers("encoder") if side == "decoder" else 0)

    def sites(self) -> list[Site]:
        """Returns all sites in the order they run: 2N, 2M or 2N + 3M of them."""
        sites: list[Site] = []
        stacks: tuple[tuple[Side, int], ...] = (("encoder", self.N), ("decoder", self.M))
        for side, blocks in stacks:
            for block in range(blocks):
                for kind in self.kinds(side):
                    sites.append(Site(side, block, kind, len(sites)))
        return sites


Part = Literal["q", "k", "v", "o", "latent", "in", "gate", "out", "token", "position", "segment", "logits"]

SCALED: frozenset[Part] = frozenset(("v", "o", "in", "out"))
"""Parts whose gain DeepNorm, Sub-LN and T-Fixup set by depth: what the size of a plain branch's output follows from."""


@dataclass(frozen=True)
class Role:
    """What a parameter of the network is for: the part of which kind of sublayer (or of the model's ends).

    Attention has parts q, k, v, o and, where k and v are made from a normed latent, latent; a feed-forward sublayer
    in, out and, when gated, gate. A weight that holds several parts in one tensor has one role for each range of rows.
    """

    kind: Literal["self", "cross", "ffn", "embedding", "head"]
    part: Part
    bias: bool = False


class Own(Constants):
    """What a scheme owns at one site: modules, parameters, and constants as fp32 tensors.

    Constants are tensors, not Python numbers, so that one compiled graph serves all depths. They are buffers outside
    the state dict: they follow from the configuration. They stay fp32 where the module is cast.

    `after` is the norm that what comes next on the same side sees the stream through (see `Scheme.seen_through`), for
    `write` to make in one kernel with its sum. It is another site's own and no part of this one: no name of a parameter
    leads through it.
    """

    after: Any

    def __init__(self, kind: str, parts: Parts) -> None:
        super().__init__()
        self.kind = kind
        self.precede(None)
        for name, part in parts.items():
            if isinstance(part, nn.Parameter):
                self.register_parameter(name, part)
            elif isinstance(part, nn.Module):
                self.add_module(name, part)
            else:
                self.register_buffer(name, torch.tensor(part, dtype=torch.float32), persistent=False)

    def precede(self, norm: nn.Module | None) -> None:
        """Sets `after`; not as a module of this one, which it would be registered as."""
        object.__setattr__(self, "after", norm)

    def has(self, name: str) -> bool:
        """Tells whether the site owns a part called `name`; an exception site is one that lacks it."""
        return name in self._modules or name in self._buffers or name in self._parameters

    def module(self, name: str) -> Any:
        """Returns the module called `name`."""
        return self._modules[name]

    def tensor(self, name: str) -> Tensor:
        """Returns the parameter, or the constant (a 0-d fp32 tensor), called `name`."""
        return cast(Tensor, self._parameters[name] if name in self._parameters else self._buffers[name])


@dataclass(frozen=True)
class Weight:
    """Rows of one parameter of the network, and what they are for; `values` is a view that may be written.

    `site` is None at the ends (embeddings, head).
    """

    name: str
    rows: slice
    site: Site | None
    role: Role
    values: Tensor


@dataclass(frozen=True)
class Make:
    """What a scheme may build with: the configured norm (eps and options already in it), widths, a generator.

    `norm(width=None)` is the one way to a norm, so that the configured eps reaches every norm of the model.
    `generator` is the one source of random values a scheme draws for parameters of its own. `up` is the width of what
    the feed-forward slot `before_act` gets.
    """

    width: int
    heads: int
    ffn: int
    vocab: int
    norm: Callable[..., nn.Module]
    generator: torch.Generator
    gated: bool = False

    @property
    def up(self) -> int:
        return 2 * self.ffn if self.gated else self.ffn


class Scheme:
    """Base of all schemes: x' = x + F(x), no norms, unit gains, a stream of one tensor."""

    name: ClassVar[str] = "none"
    topologies: ClassVar[frozenset[Topology]] = frozenset(("encoder", "decoder", "encoder-decoder"))
    sums: ClassVar[bool] = False
    """Whether every site normalises a sum of stream and branch (z) that no stream holds: it is measured then, too."""
    has_norms: ClassVar[bool] = True
    """Whether it places norms; False: `model.norm` would do nothing by itself."""
    refuses: ClassVar[Mapping[str, str]] = {}
    """Options that make no sense for this scheme, each with the reason; naming one is an error that says why."""

    class Options(Section):
        """The scheme's own options, from `model.scheme_options`."""

    def __init__(self, options: Any = None) -> None:
        self.options = options if options is not None else self.Options()

    def unfit(self, depth: Depth) -> tuple[str, str] | None:
        """Returns the option that has no form at `depth`, and what to say of it; None where all have one."""
        return None

    def clash(self, config: ModelConfig) -> tuple[str, str] | None:
        """Returns the key in `model` whose value makes no sense with this scheme, and why; None where all do."""
        return None

    # Numbers.

    def alpha(self, depth: Depth, site: Site) -> float:
        """Returns the multiplier of the residual at `site`."""
        return 1.0

    def beta(self, depth: Depth, site: Site) -> float:
        """Returns the initial gain of the scaled parameters of the sublayer at `site`."""
        return 1.0

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        """Returns the factor on the standard init of a parameter; `site` is None for embeddings and head.

        Biases start at zero, so their gain never shows; it is stated all the same, and is 1 unless a scheme says so.
        """
        return 1.0

    # What it owns.

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        """Returns what the scheme owns at `site`."""
        return {}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        """Returns what the scheme owns where a stack begins and ends (a final norm, say), for `enter` and `exit`.

        A constant or parameter called `logit_scale` multiplies the logits.
        """
        return {}

    def slots(self, depth: Depth, site: Site, make: Make) -> Mapping[str, nn.Module]:
        """Returns modules to put inside the branch at `site`.

        Attention has `qkv` (called with q, k, v [B, H, T, K]; returns the three), `attn_scale` (called with q, after
        position) and `before_o` (called with the heads' joined output [B, T, D]); feed-forward has `before_act`
        (called with the product before the activation [B, T, F], or [B, T, 2F] when gated, gate first) and
        `after_act` (called with what goes into the last product [B, T, F]).
        """
        return {}

    # The stream.

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        """Returns the streams a stack starts with.

        Two streams that are one tensor here but two after the first block would be one compiled graph more: clone.

        Shape: emb [B, T, D].
        """
        return (emb,)

    def shown(self, streams: Streams) -> tuple[Tensor, ...]:
        """Returns the streams themselves, without what a scheme carries besides: what is measured.

        A scheme must be able to go on from these alone: where a block is left out, the rest is dropped.
        """
        return streams

    def read(self, streams: Streams, own: Own) -> Tensor:
        """Returns what the sublayer at this site sees.

        Shape: result [B, T, D].
        """
        x: Tensor = streams[0]
        return x

    def seen_through(self, own: Own) -> nn.Module | None:
        """Returns the norm that `read` of a site, or `exit` of a stack, has for the stream; None where there is none.

        The site before may carry its result, made in one kernel with the sum (`Own.after`): see `PreNorm`.
        """
        return None

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        """Returns the streams after the branch output `out` has joined them.

        Shape: out [B, T, D].
        """
        return (streams[0] + out,)

    def write_measured(self, streams: Streams, out: Tensor, own: Own, to: Buffers, index: Tensor) -> Streams:
        """Returns what `write` does, and writes what is asked of every stream into its row, and of z into the last.

        Streams that are one tensor stay one, whose gradient stands in the row of the first. A scheme that has a z
        (`sums`), or whose fused norm has the numbers at hand, overrides it.

        Shape: index [number of streams, and 1 for z where there is one] int64.
        """
        streams = self.write(streams, out, own)
        shown = self.shown(streams)
        watched: list[Tensor] = []
        for i, stream in enumerate(shown):
            row = index[i : i + 1]
            write_row(to.rows, row, stream)
            write_sum(to.sums, row, stream)
            again = i > 0 and stream is shown[i - 1]
            watched.append(watched[-1] if again else watch(stream, to.grad_rows, row))
        return (*watched, *streams[len(shown) :])

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        """Returns the output of the stack: the stream, through the norm called `norm` where the scheme ends in one.

        Shape: result [B, T, D].
        """
        x: Tensor = ends.module("norm")(streams[0]) if ends.has("norm") else streams[0]
        return x

    # Hooks in a run's life.

    def calibrate(self, forward: Callable[[], object]) -> None:
        """Adjusts what the scheme owns before training (Admin's profiling); most do nothing.

        `forward` runs the model, without gradients, over one batch that is the same on every rank; the scheme's own
        `write` sees every branch on the way. Called once, on a fresh model.
        """

    def after_step(self, weights: Sequence[Weight]) -> None:
        """Projects weights (nGPT), without gradients: once before the first step, then after each applied one.

        `weights` are all of the network's, by role; most schemes do nothing.
        """
