"""Pre-Norm at hundreds of layers needs a tiny learning rate and a long warm-up.

A widely read article says so. Expected: at 200 blocks (400 sublayers), at 3e-3 and without warm-up, it is stuck or
diverges; at 3e-4 with a warm-up over half the run it trains. At 12 blocks it is to train either way (the control), so
that what fails is the depth's and not the rate's doing. No source says what tiny and long are; these are a tenth of the
other rate, and half the steps. Between the two, the high rate with the long warm-up and the low one without are shown
at 200 blocks and not judged: they tell which of the two is needed.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Dies, Trains
from normscale.claims.protocol import DEPTH, GAP, evaluated, trained

DEEP, STEPS = 200, 240

CLAIM = Claim(
    id="prenorm-needs-care",
    says="Pre-Norm at hundreds of layers needs a tiny learning rate and a long warm-up.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="depth",
    base={**DEPTH, "model.scheme": "pre"},
    arms={
        "pre-hot": {**evaluated(STEPS // 2), "train.optim.lr": 3e-3, "train.schedule.warmup_steps": 0},
        "pre-care": {**evaluated(STEPS), "train.optim.lr": 3e-4, "train.schedule.warmup_steps": STEPS // 2},
        "pre-warm": {**evaluated(STEPS), "train.optim.lr": 3e-3, "train.schedule.warmup_steps": STEPS // 2},
        "pre-slow": {**evaluated(STEPS), "train.optim.lr": 3e-4, "train.schedule.warmup_steps": 0},
    },
    labels={
        "pre-hot": "Pre-Norm, 3e-3, no warm-up",
        "pre-care": "Pre-Norm, 3e-4, long warm-up",
        "pre-warm": "Pre-Norm, 3e-3, long warm-up",
        "pre-slow": "Pre-Norm, 3e-4, no warm-up",
    },
    control=(Trains("pre-hot", at=(12,)), Trains("pre-care", at=(12,))),
    expect=(Dies("pre-hot", at_least=DEEP, beside=("pre-care",)), Trains("pre-care", at=(DEEP,))),
    profiles=trained(
        main={
            "pre-hot": {12: 3, 48: 2, DEEP: 2},
            "pre-care": {12: 3, DEEP: 2},
            "pre-warm": {DEEP: 1},
            "pre-slow": {DEEP: 1},
        },
        floor={"pre-hot": {12: 1, DEEP: 1}, "pre-care": {12: 1, DEEP: 1}},
        low_lr={"pre-hot": {DEEP: 1}},
        low_lr_gpu={"pre-hot": {DEEP: 1}, "pre-care": {DEEP: 1}},
        long_gpu={"pre-hot": {DEEP: 1}},
    ),
    core=False,
    figure="gap",
    how=(
        "A small decoder-only Transformer (width 64, 64 tokens of context, batch 8) reads source text: 120 Adam steps "
        f"at 3e-3 from the first step on, or {STEPS} steps at 3e-4 with a warm-up over {STEPS // 2}; beside them "
        f"{STEPS} steps with one of the two alone. {GAP}"
    ),
    differs=(
        "the article gives no numbers: rates, warm-ups and 200 blocks are our reading",
        "the careful runs, and the two between, take twice the steps, since at a tenth of the rate models learn less "
        "in each; one seed of those between",
        "width 64, fp32, no clipping",
    ),
)
