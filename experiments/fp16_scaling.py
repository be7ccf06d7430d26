"""In fp16 the gradient-scaling strategy has to be adjusted for depth.

A practitioner's article says so. If it has to, then the same dynamic scale (from 65536, halved at an overflow) ends
elsewhere by depth: at 48 blocks at less than half of what it is at 6, in Pre-Norm or in DeepNorm; both are looked at.
And a scale that serves at 6 blocks, fixed at 65536, is to leave more steps out at 48.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, DESCRIBED, GAP, trained

SHALLOW, DEEP = 6, 48
FIXED = {"precision.loss_scale.dynamic": False, "train.on_nonfinite": "skip"}
ARMS = {
    "pre": {"model.scheme": "pre"},
    "deepnorm": {"model.scheme": "deepnorm"},
    "pre-fixed": {"model.scheme": "pre", **FIXED},
    "deepnorm-fixed": {"model.scheme": "deepnorm", **FIXED},
}

CLAIM = Claim(
    id="fp16-scaling",
    says="In fp16 the gradient-scaling strategy has to be adjusted for depth.",
    source="a practitioner's article on LayerNorm",
    family="precision",
    base={**DEPTH, "precision.compute": "fp16"},
    arms=ARMS,
    labels={
        "pre": "Pre-Norm, dynamic scale",
        "deepnorm": "DeepNorm, dynamic scale",
        "pre-fixed": "Pre-Norm, fixed scale",
        "deepnorm-fixed": "DeepNorm, fixed scale",
    },
    control=(Trains("pre", at=(SHALLOW,)), Trains("deepnorm", at=(SHALLOW,))),
    expect=(
        *(Value(arm, "loss_scale", at=DEEP, than=arm, than_at=SHALLOW, below=0.5) for arm in ("pre", "deepnorm")),
        *(
            Value(arm, "skipped", at=DEEP, than=arm, than_at=SHALLOW, compare="difference", above=0)
            for arm in ("pre-fixed", "deepnorm-fixed")
        ),
    ),
    profiles=trained(
        main={arm: {SHALLOW: 3, DEEP: 3} for arm in ARMS},
        floor={arm: {SHALLOW: 3, DEEP: 3} for arm in ARMS},
    ),
    core=False,
    figure="values",
    numbers={"loss_scale": "loss scale", "skipped": "steps left out"},
    how=(
        f"{DESCRIBED} Here in fp16, with a dynamic loss scale from 65536 and with that scale fixed, at {SHALLOW} and "
        f"{DEEP} blocks. {GAP}"
    ),
    differs=(
        "fp16 is simulated on a CPU: every product's result and gradients are rounded to it, sums are in fp32",
        "120 steps: the dynamic scale doubles after 2000 steps without an overflow, and so only falls here",
        "the article gives no numbers; half the scale is ours",
    ),
)
