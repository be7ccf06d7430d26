"""A norm before the head steadies the scale.

A survey says so, without numbers; Xiong et al. (arXiv:2002.04745) call the final norm of Pre-Norm required. Read as:
without it the mean log Z of the output, which is of the size of the logits, drifts over twice as far in training at 24
blocks; at initialisation the largest log Z grows with depth, from 6 to 24 blocks, by more than with it; and the
held-out loss is worse. No source says by how much; twice is ours, and for the rest any difference that the seeds agree
on counts. Post-Norm has no final norm, since its stream is normed already.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, DESCRIBED, GAP, trained

SHALLOW, BLOCKS = 6, 24
ARMS = {"with": {}, "without": {"model.scheme_options": {"final_norm": False}}}

CLAIM = Claim(
    id="final-norm",
    says="A norm before the head steadies the scale.",
    source="a survey of norms in language models; Xiong et al. 2020, arXiv:2002.04745",
    family="quality",
    base={**DEPTH, "model.scheme": "pre"},
    arms=ARMS,
    labels={"with": "Pre-Norm", "without": "Pre-Norm without its final norm"},
    control=(Trains("with", at=(SHALLOW, BLOCKS)),),
    expect=(
        Value("without", "logz_mean", at=BLOCKS, when="drift", than="with", above=2.0),
        Value("without", "logz_max", at=BLOCKS, when="first", than="without", than_at=SHALLOW, above=1.0),
        Value("with", "logz_max", at=BLOCKS, when="first", than="with", than_at=SHALLOW, above=0.95, below=1.05),
        Value("without", "gap", at=BLOCKS, than="with", compare="difference", below=0),
    ),
    profiles=trained(
        main={arm: {SHALLOW: 5, BLOCKS: 5} for arm in ARMS},
        floor={arm: {SHALLOW: 3, BLOCKS: 3} for arm in ARMS},
    ),
    core=False,
    figure="values",
    numbers={"logz_mean": "mean log Z", "logz_max": "largest log Z", "gap": "gap to the unigram entropy"},
    how=f"{DESCRIBED} Pre-Norm, with its final norm and without, at {SHALLOW} and {BLOCKS} blocks. {GAP}",
    differs=(
        "the survey gives no measure: log Z, and twice its drift, are ours",
        "120 steps at width 64, where log Z is small",
    ),
)
