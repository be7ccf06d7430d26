"""Standard deviation 0.02, or 1/sqrt(fan_in), is a good initialisation.

A practitioner's article says so. Good is read as: it trains at 12 and at 48 blocks, and at 12 blocks its held-out loss
is not above that of Xavier's initialisation by over 0.05 nats. For Pre-Norm, since the article's models have it.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, DESCRIBED, GAP, trained

NORMAL = {"model.init": "normal"}
DEEP = (12, 48)
ARMS = {
    "xavier": {},
    "small": {**NORMAL, "model.init_std": 0.02},
    "fan-in": {"model.init": "fan_in"},
    "post-small": {**NORMAL, "model.init_std": 0.02, "model.scheme": "post"},
    "post-fan-in": {"model.init": "fan_in", "model.scheme": "post"},
}

CLAIM = Claim(
    id="init-std",
    says="A standard deviation of 0.02, or of 1/sqrt(fan_in), is a good initialisation.",
    source="a practitioner's article on LayerNorm",
    family="quality",
    base={**DEPTH, "model.scheme": "pre"},
    arms=ARMS,
    labels={
        "xavier": "Xavier",
        "small": "std 0.02",
        "fan-in": "std 1/sqrt(fan_in)",
        "post-small": "Post-Norm, std 0.02",
        "post-fan-in": "Post-Norm, std 1/sqrt(fan_in)",
    },
    control=(Trains("xavier", at=DEEP),),
    expect=(
        Trains("small", at=DEEP),
        Trains("fan-in", at=DEEP),
        *(Value(arm, "gap", at=12, than="xavier", compare="difference", above=-0.05) for arm in ("small", "fan-in")),
    ),
    profiles=trained(
        main={
            **{arm: {12: 3, 48: 3} for arm in ("xavier", "small", "fan-in")},
            "post-small": {6: 3, 24: 3},
            "post-fan-in": {6: 3, 24: 3},
        },
        floor={arm: {12: 3, 48: 1} for arm in ("xavier", "small", "fan-in")},
        low_lr_gpu={arm: {12: 1, 48: 1} for arm in ("small", "fan-in")},
    ),
    core=False,
    figure="gap",
    numbers={"gap": "gap to the unigram entropy"},
    how=f"{DESCRIBED} Pre-Norm, with three initialisations of the matrices inside blocks. {GAP}",
    differs=(
        "the article gives no measure of good; 0.05 nats against Xavier is ours",
        "at width 64 a deviation of 0.02 is a sixth of 1/sqrt(fan_in); at width 2500 they would be one",
        "Post-Norm is shown and not judged",
    ),
)
