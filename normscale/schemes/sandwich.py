"""Sandwich-LN: what CogView calls a norm before the branch and another after it."""

from normscale.schemes.peri import PeriNorm
from normscale.schemes.registry import register


@register("sandwich")
class SandwichNorm(PeriNorm):
    """x' = x + Norm(F(Norm(x))), and one norm at the end of the stack: the graph is that of `peri`, to the last bit.

    CogView's further measures are options of the model, so that each can be seen alone: its output projections are
    drawn smaller (`model.init=normal`, `model.init_scaled`), and its norms divide by the largest entry first, which is
    a norm of its own (`model.norm`). The released code does not keep the scores in bounds by a maximum, as the paper
    has it (PB-relax): it divides q by the root of the head width before the product.

    Reference: Ding et al. 2021, arXiv:2105.13290 (Sandwich-LN); `mpu/sparse_transformer.py` of
    THUDM/CogView. It is a decoder; an encoder alone is the same stack.
    """

    topologies = frozenset(("decoder", "encoder"))
