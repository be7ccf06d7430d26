"""The gains of a scheme by role, for tests that list every one of them."""

from typing import get_args

from normscale.schemes import Depth, Role, Scheme
from normscale.schemes.scheme import Part

DEPTHS = (1, 6, 18, 100, 1000)
SINGLE = [*(Depth(n, 0) for n in DEPTHS), *(Depth(0, n) for n in DEPTHS)]
DOUBLE = [*(Depth(n, n) for n in DEPTHS), Depth(12, 3), Depth(3, 12)]
TOPOLOGIES = [*SINGLE, *DOUBLE]

ENDS = {"token": "embedding", "position": "embedding", "segment": "embedding", "logits": "head"}


def gains(scheme: Scheme, depth: Depth) -> dict[tuple[str, int, str, str], float]:
    """Every gain by (side, block, kind, part), of the first, a middle and the last block; ends are side "" block -1."""
    found = {("", -1, kind, part): scheme.gain(depth, None, Role(kind, part)) for part, kind in ENDS.items()}  # type: ignore[arg-type]
    blocks = {"encoder": depth.N, "decoder": depth.M}
    for site in depth.sites():
        if site.block in (0, blocks[site.side] // 2, blocks[site.side] - 1):
            parts = ("in", "gate", "out") if site.kind == "ffn" else ("q", "k", "v", "o", "latent")
            assert set(parts) <= set(get_args(Part))
            for part in parts:
                key = (site.side, site.block, site.kind, part)
                found[key] = scheme.gain(depth, site, Role(site.kind, part))  # type: ignore[arg-type]
    return found
