"""In Post-Norm the gradient shrinks layer by layer on the way down.

DeepNet's Figure 4d has it in an 18L-18L model: from 0.81 at the top to below 0.01 at the bottom, with warm-up; without,
from 0.20 to nearly 0. At initialisation and after training, with and without warm-up, the gradient is to rise along the
sublayers: with a log-log slope of over 0.25 at initialisation (0.5 in a toy model with uniform attention), and the deep
third over three times the shallow third after training. The control is that in DeepNorm and in Pre-Norm it is not: what
every scheme does is not Post-Norm's.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Along, Thirds
from normscale.claims.protocol import DEPTH, DESCRIBED, trained

BLOCKS = 24
SHRINKS = 3.0  # deep third over shallow third

CLAIM = Claim(
    id="grad-postnorm-vanish",
    says="In Post-Norm the gradient shrinks layer by layer on the way down.",
    source="Wang et al. 2022 (DeepNet), arXiv:2203.00555, Figure 4d; a widely read article",
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
    control=tuple(
        Thirds(arm, "grad_norm", BLOCKS, compare="ratio", side="below", bar=SHRINKS) for arm in ("deepnorm", "pre")
    ),
    expect=(
        Along("post", "grad_norm", BLOCKS, when="first", lo=0.25, hi=10.0),
        *(
            Thirds(arm, "grad_norm", BLOCKS, compare="ratio", side="above", bar=SHRINKS)
            for arm in ("post", "post-nowarmup")
        ),
    ),
    profiles=trained(
        main={"post": {BLOCKS: 3}, "post-nowarmup": {BLOCKS: 3}, "deepnorm": {BLOCKS: 3}, "pre": {BLOCKS: 3}},
        floor={arm: {BLOCKS: 3} for arm in ("post", "post-nowarmup", "deepnorm", "pre")},
    ),
    core=False,
    figure="growth",
    how=(
        f"{DESCRIBED} At {BLOCKS} blocks, the norm of the gradient of each sublayer's parameters is taken at the first "
        "step and at the last."
    ),
    paper={
        f"post L{BLOCKS} grad_norm deep over shallow": "0.81 at layer 18, below 0.01 at layers 1 to 3 (Figure 4d)",
        f"post-nowarmup L{BLOCKS} grad_norm deep over shallow": "0.20 at layer 18, about 0 below 15 (Figure 4d)",
    },
    differs=(
        "decoder-only, 24 blocks of width 64; the paper's figure is of a decoder of 18 blocks with cross-attention",
        "after 120 steps; the figure is of the first 30",
        "a ratio of 3 between thirds, what counts as shrinking, is ours",
    ),
)
