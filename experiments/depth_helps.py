"""At equal parameters deeper beats wider.

A widely read article says so; DeepNet's own gains are of huge multilingual data. Expected: 24 blocks of width 64 end
at a lower held-out loss than 6 blocks of width 128, which have as many parameters in their blocks (786 432 in
matrices), with DeepNorm and with Pre-Norm; and lower than 12 blocks of width 90, and these lower than 3 of width 180,
which have 1 % less than either.
"""

from collections.abc import Mapping

from normscale.claims.claim import Claim, Grid
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, GAP, RATE, WARMUP, evaluated, trained

STEPS = 480
SCHEMES = {"deepnorm": "DeepNorm", "pre": "Pre-Norm"}
DEPTHS = {"widest": 3, "wide": 6, "middle": 12, "deep": 24}
WIDTHS = {"widest": 180, "wide": 128, "middle": 90, "deep": 64}
PAIRS = (("deep", "wide"), ("deep", "middle"), ("middle", "widest"))
ARMS = {
    f"{scheme}-{shape}": {"model.scheme": scheme, "model.d": d, "model.ffn": 2 * d, "model.heads": d // 32}
    for scheme in SCHEMES
    for shape, d in WIDTHS.items()
}
SAID = {**SCHEMES, **{shape: f"width {d}" for shape, d in WIDTHS.items()}}


def grid(seeds: Mapping[str, int]) -> Grid:
    """Returns the shapes with so many seeds of each."""
    return {f"{scheme}-{shape}": {DEPTHS[shape]: n} for scheme in SCHEMES for shape, n in seeds.items()}


CLAIM = Claim(
    id="depth-helps",
    says="At equal parameters deeper beats wider.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="quality",
    base={**DEPTH, **evaluated(STEPS)},
    arms=ARMS,
    labels={arm: "{}, {}".format(*(SAID[word] for word in arm.split("-"))) for arm in ARMS},
    control=tuple(Trains(f"{scheme}-wide", at=(DEPTHS["wide"],)) for scheme in SCHEMES),
    expect=tuple(
        Value(
            f"{scheme}-{deeper}",
            "gap",
            at=DEPTHS[deeper],
            than=f"{scheme}-{wider}",
            than_at=DEPTHS[wider],
            compare="difference",
            above=0,
        )
        for scheme in SCHEMES
        for deeper, wider in PAIRS
    ),
    profiles=trained(
        main=grid({"widest": 3, "wide": 5, "middle": 3, "deep": 5}),
        floor=grid(dict.fromkeys(DEPTHS, 3)),
    ),
    core=False,
    figure="values",
    numbers={"gap": "gap to the unigram entropy"},
    how=(
        "Models of 24 blocks of width 64, 12 of 90, 6 of 128 and 3 of 180 (feed-forward twice the width, heads "
        f"of 32 to 45) read source text for {STEPS} Adam steps of 512 tokens at {RATE:g} (warm-up over {WARMUP}). {GAP}"
    ),
    differs=(
        "parameters are equal in the blocks within 1 %; the embedding grows with the width",
        "one learning rate for all shapes, and 480 steps: far from convergence, where depth may pay later",
        "Keel's paper warns of little data, where depth does not pay (arXiv:2601.19895)",
    ),
)
