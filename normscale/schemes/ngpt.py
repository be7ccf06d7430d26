"""nGPT: states, queries, keys and the vectors of every matrix have length 1; a branch turns the state by some angle."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from normscale.config.schema import ModelConfig
from normscale.config.values import Positive, Section, says
from normscale.ops.constants import Constants
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Make, Own, Parts, Scheme, Side, Site, Streams, Weight

UNREAD = {  # settings that would change nothing here, each with the reason
    "norm": "its one norm is the length of a vector",
    "norm_options": "its one norm is the length of a vector",
    "eps": "its lengths have no eps",
    "embedding_norm": "what enters the stack has length 1 already",
    "kv_latent": "the paper has no latent, and says of no length in it",
    "init_scaled": "every vector of every matrix is brought to length 1 before the first step",
    "init_std": "every vector of every matrix is brought to length 1 before the first step",
}


def unit(x: Tensor, dim: int = -1) -> Tensor:
    """Returns `x` with length 1 along `dim`; a vector of zeros stays one. Lengths are taken in fp32 at least.

    Zeros are divided by 1: a least length, as `torch.nn.functional.normalize` has it, would make their gradient huge.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    length = torch.linalg.vector_norm(wide, dim=dim, keepdim=True)
    y: Tensor = wide / length.masked_fill(length == 0, 1.0)
    return y.to(x.dtype)


class Scale(Constants):
    """x times a trained vector that starts at `start` and is stored at `stored`, which sets how fast Adam moves it.

    Shape: x [..., width]; result the same.
    """

    factor: Tensor

    def __init__(self, width: int, start: float, stored: float) -> None:
        super().__init__()
        self.stored = nn.Parameter(torch.full((width,), stored))
        self.register_buffer("factor", torch.tensor(start / stored), persistent=False)

    def value(self) -> Tensor:
        """Returns the vector itself."""
        return self.stored * self.factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.value().to(x.dtype)


class UnitQK(nn.Module):
    """q and k with length 1 in every head.

    Shape: q, k, v [B, H, T, K]; results the same.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return unit(q), unit(k), v


class LogitScale(nn.Module):
    """q times s_qk^2 and K, so that attention, which divides by sqrt(K), has (s_qk q)(s_qk k)^T sqrt(K) for logits.

    Both factors s_qk stand at q: after the position, where the release has them, that is the same product.

    Shape: q [B, H, T, K]; result the same.
    """

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads, self.head_width = heads, width // heads
        self.s_qk = Scale(width, 1.0, width**-0.5)

    def forward(self, q: Tensor) -> Tensor:
        s_H1K = self.s_qk.value().view(self.heads, 1, self.head_width)
        return q * (s_H1K.square() * self.head_width).to(q.dtype)


@register("ngpt")
class NGPT(Scheme):
    """h' = Unit(h + a (Unit(F(h)) - h)), with a trained step a > 0 for every channel: 0.05 at first.

    Rows of the embeddings and of the matrices that read the state (q, k, v, in, gate) and columns of those that write
    it (o, out) are brought to length 1 before the first step and after each. Queries and keys have length 1 per head,
    times s_qk; attention's logits are multiplied by sqrt(K) and not divided by it. What goes into the activation is
    multiplied by s_uv sqrt(D), logits by s_z of their token. Vectors other than s_uv are stored at 1 / sqrt(D). All
    gains are 1: a length takes any other out. The state leaves the stack times sqrt(D), with the RMS of 1 that other
    schemes have, and s_z has that factor less, so that logits are the paper's.

    The paper has rotary positions, SwiGLU, an untied head and no biases; whatever else the model has is trained
    beside: biases as they are, positions and segments with length 1 in the sum that is brought to length 1. It trains
    without weight decay and warm-up, which are the trainer's (`train.optim`, `train.schedule`). Only single stacks are
    defined. Its length has no eps, and none is needed: only a branch of exact zeros has no direction, and stays zero.

    Reference: Loshchilov et al. 2024, arXiv:2410.01131, sections 2.1 to 2.6; NVIDIA/ngpt, `model.py`. There u and v
    are both multiplied by sqrt(D), in the paper v alone, the one that goes through SiLU: since the branch's output is
    brought to length 1, u's makes no difference.
    """

    has_norms = False
    topologies = frozenset(("encoder", "decoder"))

    class Options(Section):
        step: Annotated[
            Positive,
            says(
                'a at first; the paper has it "of the order of 1 / (number of blocks)"',
                "arXiv:2410.01131, sections 2.1 to 2.6; 0.05 in `model.py` of NVIDIA/ngpt",
            ),
        ] = 0.05

    options: Options

    def clash(self, config: ModelConfig) -> tuple[str, str] | None:
        for key, reason in UNREAD.items():
            if getattr(config, key) != ModelConfig.model_fields[key].default:
                return key, f"{reason}; leave it out"
        return None

    def own(self, depth: Depth, site: Site, make: Make) -> Parts:
        return {"step": Scale(make.width, self.options.step, make.width**-0.5)}

    def own_ends(self, depth: Depth, side: Side, make: Make) -> Parts:
        root = make.width**0.5
        return {"root": root, "logit_scale": nn.Parameter(torch.full((make.vocab,), 1 / root))}

    def slots(self, depth: Depth, site: Site, make: Make) -> Mapping[str, nn.Module]:
        if site.kind == "ffn":
            return {"before_act": Scale(make.up, make.width**0.5, 1.0)}
        return {"qkv": UnitQK(), "attn_scale": LogitScale(make.heads, make.width)}

    def enter(self, emb: Tensor, ends: Own) -> Streams:
        return (unit(emb),)

    def write(self, streams: Streams, out: Tensor, own: Own) -> Streams:
        h: Tensor = streams[0]
        step: Any = own.module("step")
        # A branch may be narrower than the stream, and lerp, unlike a sum, promotes neither.
        return (unit(torch.lerp(h, unit(out).to(h.dtype), step.value().abs().to(h.dtype))),)

    def exit(self, streams: Streams, ends: Own) -> Tensor:
        h: Tensor = streams[0]
        return h * ends.tensor("root")

    def after_step(self, weights: Sequence[Weight]) -> None:
        for weight in weights:
            if not weight.role.bias:
                along = 0 if weight.role.part in ("o", "out") else -1
                weight.values.copy_(unit(weight.values, along))
