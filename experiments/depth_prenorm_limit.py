"""Pre-Norm's largest stable depth is about 100.

A widely read article says so: "max stable depth ~100" for Pre-Norm. Written out: Pre-Norm trains up to 100 blocks, and
beyond, from 200 on, it is stuck or diverges where DeepNorm trains. 200 is twice the limit: "about 100" leaves open what
lies between. The published record is against it (100L-100L in Table 1 of arXiv:2203.00555, 512 and 1024 sublayers in
arXiv:2601.19895), and the verdict is what the runs say.

A death would have to last at a lower learning rate. The cpu profile has no such cells at 200 blocks, since they would
cost as much as all the rest: without them a model that trains refutes the claim, and one that dies leaves it undecided
until the gpu profile is run. Nor has it 500 and 1000 blocks, which the gpu profile has: what it can pay for at 1000
goes to DeepNorm (see depth-deepnorm-trains), whose claim names that depth.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Dies, Trains
from normscale.claims.protocol import (
    DEPTH,
    DESCRIBED,
    GAP,
    PILOT,
    RATE,
    SMOKE,
    STEPS,
    at_least_three,
    published,
)

FLOOR = {key: {12: 1, 48: 1, 100: 1, 200: 1} for key in ("pre", "deepnorm")}

CLAIM = Claim(
    id="depth-prenorm-limit",
    says="The largest depth at which Pre-Norm is stable is about 100.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="depth",
    base=DEPTH,
    arms={"pre": {"model.scheme": "pre"}, "deepnorm": {"model.scheme": "deepnorm"}},
    labels={"pre": "Pre-Norm", "deepnorm": "DeepNorm"},
    control=(Trains("pre", at=(12,)), Trains("deepnorm", at=(12,))),
    expect=(Trains("pre", at=(48, 100)), Dies("pre", at_least=200, beside=("deepnorm",))),
    profiles={
        "smoke": Profile(main={"pre": {2: 1, 6: 1}, "deepnorm": {2: 1}}, set=SMOKE),
        "cpu": Profile(main={key: {12: 3, 48: 3, 100: 3, 200: 2} for key in ("pre", "deepnorm")}, floor=FLOOR),
        "gpu": Profile(
            main={key: {12: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3} for key in ("pre", "deepnorm")},
            low_lr={"pre": {200: 3, 500: 3, 1000: 3}},
            long={"pre": {200: 3}},
            floor=at_least_three(FLOOR),
        ),
    },
    figure="gap",
    how=f"{DESCRIBED} Only the normalisation scheme and the number of blocks change. {GAP}",
    paper={
        **published("pre", 12, 48, 100, 200),
        **published("deepnorm", 12, 48, 100, 200),
    },
    differs=(
        "the article gives neither task nor width; here a decoder-only model of width 64 reads bytes",
        f"{STEPS} steps of 512 tokens: what breaks later in a run is not seen",
        "trains means here that a model has begun to learn, 0.2 nats below the unigram entropy, not that its deep "
        "layers are of use",
        f"one learning rate, {RATE:g}, chosen by pilots with DeepNorm and Pre-Norm, in fp32; the limit may lie "
        "elsewhere at a higher rate or in fp16",
        "two seeds at 200 blocks; nothing deeper, though an earlier version asked for 1000 too: there Pre-Norm was "
        "0.1997 nats below the unigram entropy after 231 steps of 128 tokens, undecided by a hair",
        "no run at a lower learning rate, so that a death at 200 blocks could only have left the claim undecided here; "
        "the gpu profile has such runs",
        PILOT,
    ),
)
