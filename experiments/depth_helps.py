"""At equal parameters deeper beats wider.

A widely read article says so; DeepNet's own gains are of huge multilingual data. Expected: 24 blocks of width 64 end
at a lower held-out loss than 6 blocks of width 128, which have as many parameters in their blocks (786 432 in
matrices), with DeepNorm and with Pre-Norm.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, GAP, RATE, WARMUP, evaluated, trained

WIDE, DEEP, STEPS = 6, 24, 480
ARMS = {
    f"{scheme}-{shape}": {"model.scheme": scheme, "model.d": d, "model.ffn": 2 * d, "model.heads": d // 32}
    for scheme in ("deepnorm", "pre")
    for shape, d in (("wide", 128), ("deep", 64))
}
SAID = {"deepnorm": "DeepNorm", "pre": "Pre-Norm", "wide": "width 128", "deep": "width 64"}
DEPTHS = {"wide": WIDE, "deep": DEEP}

CLAIM = Claim(
    id="depth-helps",
    says="At equal parameters deeper beats wider.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="quality",
    base={**DEPTH, **evaluated(STEPS)},
    arms=ARMS,
    labels={arm: "{}, {}".format(*(SAID[word] for word in arm.split("-"))) for arm in ARMS},
    control=tuple(Trains(f"{scheme}-wide", at=(WIDE,)) for scheme in ("deepnorm", "pre")),
    expect=tuple(
        Value(f"{scheme}-deep", "gap", at=DEEP, than=f"{scheme}-wide", than_at=WIDE, compare="difference", above=0)
        for scheme in ("deepnorm", "pre")
    ),
    profiles=trained(
        main={arm: {DEPTHS[arm.split("-")[1]]: 5} for arm in ARMS},
        floor={arm: {DEPTHS[arm.split("-")[1]]: 3} for arm in ARMS},
    ),
    core=False,
    figure="values",
    numbers={"gap": "gap to the unigram entropy"},
    how=(
        f"Models of {DEEP} blocks of width 64 and of {WIDE} blocks of width 128 (feed-forward twice the width, heads "
        f"of 32) read source text for {STEPS} Adam steps of 512 tokens at {RATE:g} (warm-up over {WARMUP}). {GAP}"
    ),
    differs=(
        "parameters are equal in the blocks; the wide model's embedding is twice as large",
        "one learning rate for both shapes, and 480 steps: far from convergence, where depth may pay later",
        "Keel's paper warns of little data, where depth does not pay (arXiv:2601.19895)",
    ),
)
