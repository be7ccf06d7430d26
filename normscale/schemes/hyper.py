"""Hyper-connections: several residual streams, read, mixed and written with coefficients that are learned."""

from math import sqrt
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from normscale.config.values import Flag, Section, Whole, conflict, says
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Role, Scheme, Side, Site, Streams

GATE = 0.01  # on coefficients that depend on the input, at first: both papers
FLOOR = 1e-6  # added where mHC divides; Megatron-LM's

ITERATIONS = 20


@register("hyper")
class HyperConnections(Scheme):
    """x_j' = sum_i R_ij x_i + B_j F(Norm(sum_i A_i x_i)) for n streams, which begin as n copies of the embedding.

    form=hc: A, B and R are free, and at first what makes the streams copies of a Pre-Norm one: B is 1, R the identity,
    A reads one stream, the next at each site in turn. With `dynamic`, 0.01 tanh(Norm(x_i) W) is added to them, W being
    0 at first; 0.01 is trained, one for A and R and one for B. The streams' sum leaves the stack, through a norm.
    form=mhc: A is in (0, 1), B in (0, 2), and R doubly stochastic, so that nothing grows through it: sigmoid,
    2 sigmoid, and as many Sinkhorn iterations as `iterations` says, of 0.01 Norm(all x_i, laid end to end) W + b.
    Their mean leaves the stack.

    Coefficients are computed and applied in fp32 outside of autocast. Their norm is the model's, gain included; the
    papers have LayerNorm (hc) and RMSNorm (mhc). What the paper keeps from weight decay (A, B and R of hc themselves)
    is held in vectors, which are not decayed. Both papers have single stacks only.

    Reference: Zhu et al. 2024, arXiv:2409.19606, Eq. 1 to 5 (static), 10 to 13 (dynamic), 14 (init) and Appendix J;
    Xie et al. 2025, arXiv:2512.24880, Eq. 7 to 9. Where mHC's is silent this follows Megatron-LM's
    `core/transformer/hyper_connection.py`: b = 0, W Xavier-uniform, the mean at the end, 1e-6 in A and in Sinkhorn's
    sums, rows before columns. Others differ: x-transformers makes 5 iterations, DeepSeek-V4 in Hugging Face's
    transformers learns the last sum.
    """

    topologies = frozenset(("encoder", "decoder"))
    refuses = {"final_norm": "the norm of the streams' sum or mean is part of it"}

    class Options(Section):
        """n streams, in which form.

        out_init: hc only. The paper scales the init of o and out "by a factor of sqrt(n)", for a sum of n streams to
            deviate no more than one: divide reads it so, multiply reads it as written, none leaves it out.
        """

        form: Annotated[
            Literal["hc", "mhc"],
            says(
                "hc: free coefficients; mhc: bounded ones, doubly stochastic between streams",
                "arXiv:2409.19606 (hc); arXiv:2512.24880, Eq. 7 to 9 (mhc)",
            ),
        ] = "hc"
        streams: Annotated[
            Annotated[Whole, Field(ge=1, le=64)], says("n, how many streams", "arXiv:2409.19606, Eq. 1 to 5")
        ] = 4
        dynamic: Annotated[
            Flag,
            says("hc only; false: the coefficients are the same for every token", "arXiv:2409.19606, Eq. 10 to 13"),
        ] = True
        out_init: Annotated[
            Literal["divide", "multiply", "none"],
            says("hc only: what sqrt(n) does to the init of o and out", "arXiv:2409.19606"),
        ] = "divide"
        iterations: Annotated[
            Annotated[Whole, Field(ge=1, le=1000)],
            says("mhc only: Sinkhorn iterations", "arXiv:2512.24880; 20 in Megatron-LM, 5 in x-transformers"),
        ] = ITERATIONS

        @model_validator(mode="after")
        def _combinations(self) -> "HyperConnections.Options":
            only = {"dynamic": "hc", "out_init": "hc", "iterations": "mhc"}
            for key, form in only.items():
                value = getattr(self, key)
                if self.form != form and value != type(self).model_fields[key].default:
                    raise conflict(f"{key} would do nothing with form={self.form}; remove it or set form={form}", key)
            return self

    options: Options

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        if self.options.form == "mhc" or role.part not in ("o", "out"):
            return 1.0
        root = sqrt(self.options.streams)
        return {"divide": 1 / root, "multiply": root, "none": 1.0}[self.options.out_init]

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        kind = _Manifold if self.options.form == "mhc" else _Free
        return {"norm": make.norm(), "mix": kind(self.options, site, make)}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        return {"norm": make.norm()}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        return tuple(emb.clone() for _ in range(self.options.streams))

    def read(self, streams: Streams, own: Own) -> Tensor:
        x_BTJD = torch.stack(streams, dim=-2)
        one = _mixed(own.module("mix").reading(x_BTJD).unsqueeze(-2), x_BTJD)
        seen: Tensor = own.module("norm")(one.squeeze(-2).to(streams[0].dtype))
        return seen

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        x_BTJD = torch.stack(streams, dim=-2)
        b_BTJ, r_BTJJ = own.module("mix").writing(x_BTJD)
        written = _mixed(r_BTJJ.transpose(-1, -2), x_BTJD) + b_BTJ.unsqueeze(-1) * out.unsqueeze(-2)
        # Each a tensor by itself: views of one would be laid out unlike what enters, and be one compiled graph more.
        return tuple(stream.contiguous() for stream in written.to(streams[0].dtype).unbind(-2))

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        total = sum(streams[1:], start=streams[0])
        x: Tensor = ends.module("norm")(total if self.options.form == "hc" else total / len(streams))
        return x


class _Free(nn.Module):
    """Coefficients of hc: constants, and with `dynamic` what a token's streams add to them.

    Shape: x [B, T, J, D], J streams; A [B, T, J] or [J], B the same, R [B, T, J, J] or [J, J].
    """

    def __init__(self, options: HyperConnections.Options, site: Site, make: Make) -> None:
        super().__init__()
        n = self.n = options.streams
        first = torch.zeros(n)
        first[site.index % n] = 1.0
        self.a, self.b, self.r = (nn.Parameter(x) for x in (first, torch.ones(n), torch.eye(n).flatten()))
        self.norm: Any = make.norm() if options.dynamic else None
        if options.dynamic:
            self.to_a, self.to_b = (nn.Parameter(torch.zeros(1, make.width)) for _ in range(2))
            self.to_r = nn.Parameter(torch.zeros(n, make.width))
            self.gate_a, self.gate_b = (nn.Parameter(torch.full((1,), GATE)) for _ in range(2))

    def reading(self, x_BTJD: Tensor) -> Tensor:
        if self.norm is None:
            return self.a
        return self.a + self.gate_a * _product(self.norm(x_BTJD), self.to_a).tanh().squeeze(-1)

    def writing(self, x_BTJD: Tensor) -> tuple[Tensor, Tensor]:
        r_JJ = self.r.view(self.n, self.n)
        if self.norm is None:
            return self.b, r_JJ
        x = self.norm(x_BTJD)
        b = self.b + self.gate_b * _product(x, self.to_b).tanh().squeeze(-1)
        return b, r_JJ + self.gate_a * _product(x, self.to_r).tanh()


class _Manifold(nn.Module):
    """Coefficients of mhc.

    Shape: x [B, T, J, D], J streams; A, B [B, T, J], R [B, T, J, J].
    """

    def __init__(self, options: HyperConnections.Options, site: Site, make: Make) -> None:
        super().__init__()
        n, self.iterations = options.streams, options.iterations
        self.n = n
        self.norm: Any = make.norm(n * make.width)
        weight = nn.init.xavier_uniform_(torch.empty(n * n + 2 * n, n * make.width), generator=make.generator)
        parts = torch.split(weight, [n, n, n * n])
        self.to_a, self.to_b, self.to_r = (nn.Parameter(part.clone()) for part in parts)
        self.gate_a, self.gate_b, self.gate_r = (nn.Parameter(torch.full((1,), GATE)) for _ in range(3))
        self.a, self.b, self.r = (nn.Parameter(torch.zeros(len(part))) for part in parts)

    def reading(self, x_BTJD: Tensor) -> Tensor:
        a = self.gate_a * _product(self.norm(x_BTJD.flatten(-2)), self.to_a) + self.a
        return a.sigmoid() + FLOOR

    def writing(self, x_BTJD: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norm(x_BTJD.flatten(-2))
        b = self.gate_b * _product(x, self.to_b) + self.b
        r = self.gate_r * _product(x, self.to_r) + self.r
        return 2 * b.sigmoid(), sinkhorn(r.view(*r.shape[:-1], self.n, self.n), self.iterations)


def sinkhorn(logits: Tensor, iterations: int) -> Tensor:
    """Returns exp(logits) with rows and columns scaled in turn, so that all of them sum to 1.

    Columns come last: they sum to 1 but for FLOOR in what divides them, rows the closer the more iterations.

    Shape: logits [..., J, J]; result the same.

    Reference: Xie et al. 2025, arXiv:2512.24880, Eq. 9 (rows last there).
    """
    m = logits.softmax(dim=-1) + FLOOR
    m = m / (m.sum(dim=-2, keepdim=True) + FLOOR)
    for _ in range(iterations - 1):
        m = m / (m.sum(dim=-1, keepdim=True) + FLOOR)
        m = m / (m.sum(dim=-2, keepdim=True) + FLOOR)
    return m


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x W^T in fp32 at least, whatever autocast says: a handful of numbers that all streams depend on."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), weight.to(wide))


def _mixed(coefficients: Tensor, x_BTJD: Tensor) -> Tensor:
    """Returns sums of streams in fp32 at least: autocast would narrow the streams themselves.

    Shape: coefficients [..., I, J]; result [B, T, I, D].
    """
    wide = torch.promote_types(x_BTJD.dtype, torch.float32)
    with torch.autocast(x_BTJD.device.type, enabled=False):
        return torch.matmul(coefficients.to(wide), x_BTJD.to(wide))
