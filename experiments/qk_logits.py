"""QK-norm bounds attention logits and allows higher learning rates.

A survey says so, and Wortsman et al. (arXiv:2309.14322) measure it: with QK-norm a 1.2B model trains at a rate of 0.3,
and every run whose largest logit passed 10^4 diverged. Expected at 3e-2, a rate 30 times that of the depth claims: the
largest logit of a run is less than half of that without QK-norm, and the held-out loss is lower. At 1e-3 both train,
which is the control.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, GAP, STEPS, WARMUP, trained

BLOCKS = 6
RATES = {"1e-3": 1e-3, "1e-2": 1e-2, "3e-2": 3e-2}
ARMS = {
    f"{name}-{said}": {"model.qk_norm": kind, "train.optim.lr": rate}
    for name, kind in (("plain", "none"), ("qk", "head"))
    for said, rate in RATES.items()
}
SAID = {"plain": "without QK-norm", "qk": "with QK-norm"}
CELLS = {arm: {BLOCKS: 3} for arm in ARMS}

CLAIM = Claim(
    id="qk-logits",
    says="QK-norm bounds attention logits and allows higher learning rates.",
    source="a survey of norms in language models; Wortsman et al. 2023, arXiv:2309.14322",
    family="quality",
    base={**DEPTH, "model.scheme": "pre"},
    arms=ARMS,
    labels={arm: "{}, rate {}".format(SAID[arm.split("-", 1)[0]], arm.split("-", 1)[1]) for arm in ARMS},
    control=(Trains("plain-1e-3", at=(BLOCKS,)), Trains("qk-1e-3", at=(BLOCKS,))),
    expect=(
        Value("qk-3e-2", "attn_logit_max", at=BLOCKS, when="max", than="plain-3e-2", below=0.5),
        Value("qk-3e-2", "gap", at=BLOCKS, than="plain-3e-2", compare="difference", above=0),
    ),
    profiles=trained(
        main=CELLS,
        floor={arm: {BLOCKS: 3} for arm in ("plain-1e-3", "qk-1e-3", "plain-3e-2", "qk-3e-2")},
    ),
    core=False,
    figure="values",
    numbers={"attn_logit_max": "largest attention logit", "gap": "gap to the unigram entropy"},
    how=(
        f"Pre-Norm models of {BLOCKS} blocks (width 64, 2 heads, 64 tokens of context, batch 8) read source text for "
        f"{STEPS} Adam steps (warm-up over {WARMUP}), with and without a norm on queries and keys of each head, at "
        f"three rates. {GAP}"
    ),
    paper={"plain-3e-2 L6 attn_logit_max max": "runs with a largest logit over 10^4 diverged (arXiv:2309.14322)"},
    differs=(
        "6 blocks of width 64 for 120 steps; logits of large models grow over thousands of steps",
        "rates are ours; the paper's protocol has seven rates and a cosine",
        "logits of 16 sampled queries",
    ),
)
