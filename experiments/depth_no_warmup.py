"""DeepNorm needs no learning-rate warm-up.

A widely read article says so; the paper does not: every published run of DeepNorm had one. Expected as the article has
it: at 24 and at 100 blocks DeepNorm trains from the first step at the full rate, and is no worse for it than by 0.05
nats, a quarter of what it takes to have trained. That it trains with a warm-up is the control. Post-Norm with and
without, at 6 and 12 blocks, stands beside it and is not judged: it is what a warm-up was introduced for.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, DESCRIBED, GAP, PILOT, published, trained

DEEP = (24, 100)
NONE = {"train.schedule.warmup_steps": 0}

CLAIM = Claim(
    id="depth-no-warmup",
    says="DeepNorm needs no learning-rate warm-up.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="depth",
    base=DEPTH,
    arms={
        "deepnorm": {"model.scheme": "deepnorm"},
        "deepnorm-nowarmup": {"model.scheme": "deepnorm", **NONE},
        "pre-nowarmup": {"model.scheme": "pre", **NONE},
        "post": {"model.scheme": "post"},
        "post-nowarmup": {"model.scheme": "post", **NONE},
    },
    labels={
        "deepnorm": "DeepNorm",
        "deepnorm-nowarmup": "DeepNorm without warm-up",
        "pre-nowarmup": "Pre-Norm without warm-up",
        "post": "Post-Norm",
        "post-nowarmup": "Post-Norm without warm-up",
    },
    control=(Trains("deepnorm", at=DEEP),),
    expect=(
        Trains("deepnorm-nowarmup", at=DEEP),
        *(
            Value("deepnorm-nowarmup", "gap", at=depth, than="deepnorm", compare="difference", above=-0.05)
            for depth in DEEP
        ),
    ),
    profiles=trained(
        main={
            "deepnorm": {24: 3, 100: 3},
            "deepnorm-nowarmup": {6: 3, 24: 3, 100: 3},
            "pre-nowarmup": {24: 3},
            "post": {6: 3, 12: 3},
            "post-nowarmup": {6: 1, 12: 1},  # runs of depth-postnorm-dies
        },
        floor={"deepnorm": {24: 3, 100: 2}, "deepnorm-nowarmup": {24: 3, 100: 2}},
        low_lr={"deepnorm-nowarmup": {100: 1}},
        gpu={
            "deepnorm": {24: 3, 100: 3, 200: 3},
            "deepnorm-nowarmup": {6: 3, 24: 3, 100: 3, 200: 3},
            "pre-nowarmup": {24: 3, 100: 3, 200: 3},
            "post": {6: 3, 12: 3},
            "post-nowarmup": {6: 3, 12: 3},
        },
        low_lr_gpu={"deepnorm-nowarmup": {24: 1, 100: 1, 200: 1}},
    ),
    core=False,
    figure="gap",
    numbers={"gap": "gap to the unigram entropy"},
    how=f"{DESCRIBED} One arm has no warm-up: the rate is full from the first step. {GAP}",
    paper={
        **published("deepnorm", *DEEP),
        **published("post", 12),
        **{f"deepnorm-nowarmup L{depth} gap": "not published: every run had a warm-up" for depth in DEEP},
    },
    differs=(
        "the article gives no setting; the paper's runs have a warm-up over 4000 of their 8000 to 100 000 steps",
        "120 steps of 512 tokens at width 64: what a missing warm-up does later in a run is not seen",
        "0.05 nats, what counts as worse, is ours",
        "Post-Norm without warm-up has one seed",
        PILOT,
    ),
)
