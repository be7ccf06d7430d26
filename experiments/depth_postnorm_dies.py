"""Post-Norm stops training as depth grows, where DeepNorm trains.

Where the numbers come from: DeepNet's vanilla Post-LN trains at 6L-6L (30 sublayers) and diverges at 18L-18L (90) in
Table 1; in Figure 6 it has almost no BLEU at 10L-10L (50) and none at 20L-20L (100). A decoder-only block has two
sublayers, so 24 blocks (48) stand where Figure 6 breaks, and 48 blocks (96) where Table 1 diverges. The expectation
starts at 24 blocks. 12 blocks (24), near what trains in Table 1, are shown and not judged: the claim is that training
stops as depth grows, not where. The warm-up is part of the protocol since every published DeepNorm run had one. The
number of steps was chosen by what a pilot cost, and so that DeepNorm is well below the unigram entropy by then.

The paper profile is Figure 6 itself: IWSLT-14 with an encoder and a decoder of as many blocks. Post-Norm has almost no
BLEU at 10L-10L and none from 20L-20L on, where the expectation starts; 2L-2L is the control, and not published.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Dies, Trains
from normscale.claims.protocol import (
    BOTH_STACKS,
    DEPTH,
    GAP,
    PILOT,
    SMOKE,
    at_least_three,
    described,
    published,
    published_run,
)

PAPER_DEPTHS = (2, 10, 20, 50, 100)
FLOOR = {"post": {2: 1, 24: 2}, "post-nowarmup": {2: 1, 24: 2}, "deepnorm": {24: 2}}

CLAIM = Claim(
    id="depth-postnorm-dies",
    says=(
        "Post-Norm stops training as depth grows: its loss stays at the unigram plateau or diverges, "
        "where DeepNorm trains."
    ),
    source="Wang et al. 2022 (DeepNet), arXiv:2203.00555, Table 1 and Figure 6",
    family="depth",
    base=DEPTH,
    arms={
        "post": {"model.scheme": "post"},
        "post-nowarmup": {"model.scheme": "post", "train.schedule.warmup_steps": 0},
        "deepnorm": {"model.scheme": "deepnorm"},
        "pre": {"model.scheme": "pre"},
    },
    labels={
        "post": "Post-Norm",
        "post-nowarmup": "Post-Norm without warm-up",
        "deepnorm": "DeepNorm",
        "pre": "Pre-Norm",
    },
    control=(Trains("post", at=(2,)), Trains("post-nowarmup", at=(2,))),
    expect=(
        Dies("post", at_least=24, beside=("deepnorm", "pre")),
        Dies("post-nowarmup", at_least=24, beside=("deepnorm", "pre")),
        Trains("deepnorm", at_least=24),
    ),
    profiles={
        "smoke": Profile(
            main={"post": {2: 1}, "post-nowarmup": {2: 1}, "deepnorm": {4: 1}, "pre": {4: 1}},
            set=SMOKE,
        ),
        "cpu": Profile(
            main={
                "post": {2: 3, 6: 3, 12: 3, 24: 3},
                "post-nowarmup": {2: 2, 6: 1, 12: 1, 24: 2},
                "deepnorm": {2: 1, 6: 3, 12: 3, 24: 3, 48: 3, 100: 3},
                "pre": {2: 1, 12: 3, 48: 3},
            },
            low_lr={"post": {24: 1}, "post-nowarmup": {24: 1}},
            long={"post": {24: 1}},
            floor=FLOOR,
        ),
        "gpu": Profile(
            main={
                "post": {2: 3, 6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3},
                "post-nowarmup": {2: 3, 6: 3, 12: 3, 24: 3, 48: 3, 100: 3},
                "deepnorm": {2: 3, 6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3},
                "pre": {2: 3, 6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3},
            },
            low_lr={
                "post": {24: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3},
                "post-nowarmup": {24: 3, 48: 3, 100: 3},
            },
            long={"post": {24: 3}},
            floor=at_least_three(FLOOR),
        ),
        "paper": Profile(
            main={arm: dict.fromkeys(PAPER_DEPTHS, 3) for arm in ("post", "deepnorm", "pre")},
            low_lr={"post": dict.fromkeys((20, 50, 100), 1)},
            set=published_run("iwslt14-10-10"),
            depth_keys=BOTH_STACKS,
            floor={"post": {2: 1, 20: 2}, "deepnorm": {20: 2}},
            control=(Trains("post", at=(2,)),),
            expect=(Dies("post", at_least=20, beside=("deepnorm", "pre")), Trains("deepnorm", at_least=10)),
        ),
    },
    figure="gap",
    how=f"{described(DEPTH)} Only the normalisation scheme and the number of blocks change. {GAP}",
    paper={
        **published("post", 12, 24),
        **published("deepnorm", 12, 24, 48, 100),
        **published("pre", 12, 48),
    },
    differs=(
        "language modelling on bytes with a decoder-only model; the paper translates with encoder and decoder",
        "120 steps of 512 tokens; the paper trains for 100 000 steps of 128 x 4096 tokens (8 000 of 4 000 in Figure 6)",
        "width 64 instead of 512, fp32 instead of fp16, no dropout, no label smoothing",
        "runs at a 3x lower learning rate, and one over 5x the steps, stand for a search of the learning rate",
        PILOT,
        "fewer than three seeds: Post-Norm without warm-up at every depth (1 or 2), the others at 2 blocks (1); "
        "Post-Norm deeper than 24 blocks is left to the gpu profile",
    ),
)
