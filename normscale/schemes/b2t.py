"""B2T: Post-Norm with a skip from the bottom of each block to its top."""

from math import sqrt
from typing import Annotated

from torch import Tensor

from normscale.config.values import Flag, Section, says
from normscale.schemes.registry import register
from normscale.schemes.scheme import Depth, Role, Site
from normscale.schemes.spanning import Spanning


@register("b2t")
class B2T(Spanning):
    """h = Norm(x + Attn(x)), x' = Norm(x + h + FFN(h)): the skip passes every norm of the block but the last.

    In a decoder beside an encoder cross-attention comes between, h' = Norm(h + Cross(h)), and the skip passes that norm
    too. There is no final norm.

    Reference: Takase et al. 2022, arXiv:2206.00330, section 4; `fairseq/modules/transformer_layer.py` of
    takase/b2t_connection.
    """

    refuses = {"final_norm": "a B2T stream is already normalised after every sum"}

    class Options(Section):
        bypass: Annotated[Flag, says("false: without the skip, which is Post-Norm", "arXiv:2206.00330, section 4")] = (
            True
        )
        rescaled: Annotated[
            Flag, says("draw all matrices of a side of N blocks N^(-1/2) as large", "the code of takase/b2t_connection")
        ] = False

    options: Options

    def gain(self, depth: Depth, site: Site | None, role: Role) -> float:
        if site is None or role.bias or not self.options.rescaled:
            return 1.0
        return 1 / sqrt(depth.N if site.side == "encoder" else depth.M)

    def last_residual(self, x: Tensor, block_input: Tensor) -> Tensor:
        return x + block_input if self.options.bypass else x
