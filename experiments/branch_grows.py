"""DeepNorm's branches start tiny and grow in importance during training.

A widely read article says so. The median over sublayers of the branch's RMS over that of the stream is to be below 0.2
at the first step, and to have grown by the last: no source says by how much, so any growth counts that the seeds agree
on. It is to have grown in most sublayers, over half, not in few of them by much. That the model has trained is the
control; Pre-Norm and Post-Norm stand beside it.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, DESCRIBED, trained

BLOCKS = 24

CLAIM = Claim(
    id="branch-grows",
    says="DeepNorm's branches start tiny and grow in importance during training.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="depth",
    base=DEPTH,
    arms={scheme: {"model.scheme": scheme} for scheme in ("deepnorm", "pre", "post")},
    labels={"deepnorm": "DeepNorm", "pre": "Pre-Norm", "post": "Post-Norm"},
    control=(Trains("deepnorm", at=(BLOCKS,)),),
    expect=(
        Value("deepnorm", "branch_p50", at=BLOCKS, when="first", below=0.2),
        Value("deepnorm", "branch_p50", at=BLOCKS, when="growth", above=1.0),
        Value("deepnorm", "branch_grown", at=BLOCKS, above=0.5),
    ),
    profiles=trained(
        main={"deepnorm": {BLOCKS: 3, 100: 3}, "pre": {48: 3}, "post": {6: 3}},
        floor={"deepnorm": {BLOCKS: 3}},
    ),
    core=False,
    figure="values",
    numbers={"branch_p50": "branch over stream", "branch_grown": "share of sublayers in which it has grown"},
    how=f"{DESCRIBED} Measured is the median over sublayers of the RMS of the branch over that of the stream after it.",
    differs=(
        "the article gives no numbers; 0.2 for tiny is ours",
        "the first step and the last are judged; the ratio of every sublayer over steps is in the records of the runs "
        "(branch_ratio)",
        "120 steps",
    ),
)
