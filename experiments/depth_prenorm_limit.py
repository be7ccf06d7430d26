"""Pre-Norm's largest stable depth is about 100.

A widely read article says so: "max stable depth ~100" for Pre-Norm. Written out: Pre-Norm trains up to 100 blocks, and
beyond, from 200 on, it is stuck or diverges where DeepNorm trains. 200 is twice the limit: "about 100" leaves open what
lies between. The published record is against it (100L-100L in Table 1 of arXiv:2203.00555, 512 and 1024 sublayers in
arXiv:2601.19895), and the verdict is what the runs say.

A death would have to last at a lower learning rate. The cpu profile has no such cells at 200 and 1000 blocks, since
they would cost as much as all the rest: without them a model that trains refutes the claim, and one that dies leaves
it undecided until the gpu profile is run.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Dies, Trains
from normscale.claims.protocol import (
    DEPTH,
    DESCRIBED,
    GAP,
    PILOT,
    RATE,
    SMALL,
    SMALL_BATCH,
    SMALL_RATE,
    SMALL_STEPS,
    SMOKE,
    STEPS,
    published,
)

CLAIM = Claim(
    id="depth-prenorm-limit",
    says="The largest depth at which Pre-Norm is stable is about 100.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="depth",
    base=DEPTH,
    arms={
        "pre": {"model.scheme": "pre"},
        "pre-128": {"model.scheme": "pre", **SMALL},
        "deepnorm": {"model.scheme": "deepnorm"},
        "deepnorm-128": {"model.scheme": "deepnorm", **SMALL},
    },
    labels={
        "pre": "Pre-Norm",
        "pre-128": "Pre-Norm, 128 tokens a step",
        "deepnorm": "DeepNorm",
        "deepnorm-128": "DeepNorm, 128 tokens a step",
    },
    control=(Trains("pre-128", at=(6, 12)), Trains("deepnorm-128", at=(6, 12))),
    expect=(
        Trains("pre", at=(12, 48, 100)),
        Dies("pre", at_least=200, beside=("deepnorm",)),
        Dies("pre-128", at_least=1000, beside=("deepnorm-128",)),
    ),
    profiles={
        "smoke": Profile(
            main={"pre": {2: 1, 6: 1}, "pre-128": {2: 1}, "deepnorm": {2: 1}, "deepnorm-128": {2: 1}}, set=SMOKE
        ),
        "cpu": Profile(
            main={
                "pre": {12: 3, 48: 3, 100: 3, 200: 2},
                "pre-128": {6: 3, 12: 3, 1000: 1},
                "deepnorm": {12: 3, 48: 3, 100: 3, 200: 2},
                "deepnorm-128": {6: 3, 12: 3, 1000: 1},
            }
        ),
        "gpu": Profile(
            main={
                "pre": {12: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3},
                "pre-128": {6: 3, 12: 3, 1000: 3},
                "deepnorm": {12: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3},
                "deepnorm-128": {6: 3, 12: 3, 1000: 3},
            },
            low_lr={"pre": {200: 3, 500: 1, 1000: 1}, "pre-128": {1000: 1}},
            long={"pre": {200: 1}},
        ),
    },
    figure="gap",
    how=(
        f"{DESCRIBED} Only the normalisation scheme and the number of blocks change. The models of 1000 blocks, with "
        f"models of 6 and 12 as their control, take {SMALL_STEPS} steps of {SMALL_BATCH * 64} tokens instead, with a "
        f"learning rate that falls to 0. {GAP}"
    ),
    paper={
        **published("pre", 12, 48, 100, 200),
        **published("deepnorm", 12, 48, 100, 200),
        "pre-128 L1000 gap": "trains with 1024 sublayers (Keel, Table 3); this model has 2000",
    },
    differs=(
        "the article gives neither task nor width; here a decoder-only model of width 64 reads bytes",
        f"{STEPS} steps of 512 tokens, {SMALL_STEPS} of 128 for the deepest: what breaks later in a run is not seen",
        "trains means here that a model has begun to learn, 0.2 nats below the unigram entropy, not that its deep "
        "layers are of use",
        f"one learning rate, {RATE:g} (falling from {SMALL_RATE:g} to 0 with 128 tokens a step), "
        "chosen by pilots with DeepNorm and Pre-Norm, in fp32; the limit may lie elsewhere at a higher rate or in fp16",
        "one seed at 1000 blocks and two at 200; nothing at 500",
        "no run at a lower learning rate, so that a death at 200 or 1000 blocks could only have left the claim "
        "undecided here; the gpu profile has such runs",
        PILOT,
    ),
)
