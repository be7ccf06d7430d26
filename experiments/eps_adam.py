"""Adam's epsilon matters when gradients shrink with depth.

Wortsman et al. (arXiv:2309.14322, section 3.4): the gradient's size falls with scale towards AdamW's epsilon; 1e-15
mends what 1e-8 breaks, and 1e-6 diverges. In DeepNorm gradients fall with the inverse root of the depth. Expected: at
100 blocks more entries have sqrt(v) below 1e-8 than at 6; and at 100 blocks the held-out loss is lower with 1e-15 than
with 1e-8, and with 1e-15 than with 1e-6.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, DESCRIBED, GAP, STEPS, trained

SHALLOW, DEEP = 6, 100
EPS = {"eps-1e-6": 1e-6, "eps-1e-8": 1e-8, "eps-1e-15": 1e-15}

CLAIM = Claim(
    id="eps-adam",
    says="Adam's epsilon matters when gradients shrink with depth.",
    source="Wortsman et al. 2023, arXiv:2309.14322, section 3.4",
    family="precision",
    base={**DEPTH, "model.scheme": "deepnorm", "probes.epsilon.every": STEPS // 3},
    arms={arm: {"train.optim.eps": eps} for arm, eps in EPS.items()},
    labels={arm: f"Adam's eps {arm[4:]}" for arm in EPS},
    control=(Trains("eps-1e-8", at=(SHALLOW,)),),
    expect=(
        Value("eps-1e-8", "adam_eps_share", at=DEEP, than="eps-1e-8", than_at=SHALLOW, compare="difference", above=0.0),
        *(
            Value("eps-1e-15", "gap", at=DEEP, than=larger, compare="difference", above=0.0)
            for larger in ("eps-1e-8", "eps-1e-6")
        ),
    ),
    profiles=trained(
        main={arm: {SHALLOW: 3, DEEP: 3} for arm in EPS},
        floor={"eps-1e-6": {DEEP: 3}, "eps-1e-8": {SHALLOW: 3, DEEP: 3}, "eps-1e-15": {DEEP: 3}},
    ),
    core=False,
    figure="values",
    numbers={
        "adam_eps_share": "share of entries with sqrt(v) below Adam's eps",
        "gap": "gap to the unigram entropy",
    },
    how=f"{DESCRIBED} Only Adam's epsilon and the depth change. {GAP}",
    paper={
        "eps-1e-15 L100 minus eps-1e-8 L100 gap": "at 4.8B and a rate of 0.3, 1e-15 mends what 1e-8 breaks",
        "eps-1e-15 L100 minus eps-1e-6 L100 gap": "1e-6 diverges there",
    },
    differs=(
        "100 blocks of width 64; the paper's gradients shrink with the model's size and the rate",
        "width 64, 120 steps",
        "at either depth 1 entry in 523 lies below 1e-8: the biases of the keys, which no softmax notices, so that "
        "their gradient is rounding alone. Below 1e-6 there are more at 100 blocks than at 6",
    ),
)
