"""Sensitivity to the learning rate rises with depth, and faster than with width; QK-norm lowers it.

Wortsman et al. (arXiv:2309.14322, sections 2.2 and 3.3). Their definition: the mean over seven rates, 3e-4 to 3e-1, of
min(loss, loss at initialisation), minus the best loss. Expected: 24 blocks are more sensitive than 6 of the same width;
more than 6 of twice the width, which have as many parameters in their blocks; and more than 24 with QK-norm. No source
gives a difference that would do at this size: any that the seeds agree on counts. That models train at 1e-3, as in
all depth claims, is the control.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Sensitive, Trains
from normscale.claims.protocol import DEPTH, SMOKE, STEPS, WARMUP, at_least_three

SHALLOW, DEEP = 6, 24
CELLS = {"plain": {SHALLOW: 3, DEEP: 3}, "qk": {DEEP: 3}, "wide": {SHALLOW: 3}}
FLOOR = {"plain": {SHALLOW: 2, DEEP: 2}, "qk": {DEEP: 2}, "wide": {SHALLOW: 2}}
PAPER = {"train.optim.betas": (0.9, 0.95)}

CLAIM = Claim(
    id="depth-lr-sensitivity",
    says="Sensitivity to the learning rate rises with depth, and faster than with width; QK-norm lowers it.",
    source="Wortsman et al. 2023, arXiv:2309.14322, sections 2.2 and 3.3",
    family="quality",
    base={**DEPTH, "model.scheme": "pre", "train.optim.clip": 1.0, "train.schedule.kind": "cosine"},
    arms={
        "plain": {},
        "qk": {"model.qk_norm": "head"},
        "wide": {"model.d": 128, "model.ffn": 256, "model.heads": 4},
    },
    labels={"plain": "Pre-Norm", "qk": "Pre-Norm with QK-norm", "wide": "Pre-Norm of twice the width"},
    rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
    control=(Trains("plain", at=(SHALLOW, DEEP)), Trains("qk", at=(DEEP,)), Trains("wide", at=(SHALLOW,))),
    expect=(
        Sensitive("plain", DEEP, than="plain", than_at=SHALLOW),
        Sensitive("plain", DEEP, than="wide", than_at=SHALLOW),
        Sensitive("plain", DEEP, than="qk", than_at=DEEP),
    ),
    profiles={
        "smoke": Profile(main={}, sweep={"plain": {2: 1}}, set=SMOKE),
        "cpu": Profile(main=CELLS, sweep=CELLS, floor=FLOOR),  # the control is of the runs at 1e-3
        "gpu": Profile(
            main=CELLS, sweep={**CELLS, "plain": {SHALLOW: 3, DEEP: 3, 100: 3}}, set=PAPER, floor=at_least_three(FLOOR)
        ),
    },
    core=False,
    figure="sweep",
    how=(
        f"Pre-Norm models (width 64 or 128, 64 tokens of context, batch 8) read source text for {STEPS} Adam steps at "
        f"each of seven peak rates (warm-up over {WARMUP}, then half a cosine; gradients clipped at 1). The "
        "sensitivity is the mean over rates of the held-out loss, or of that at initialisation where it is lower, "
        "minus the best."
    ),
    paper={
        f"plain L{DEEP} sensitivity": "rises with depth, faster than with width (section 3.3, no number here)",
        f"qk L{DEEP} sensitivity": "lower: with QK-norm a model of 1.2B trains at 0.3",
    },
    differs=(
        "6 and 24 blocks for 120 steps; the paper has models up to 10 B and 100 000 steps",
        "no z-loss and no weight decay, of which the paper has 1e-4 each; in the cpu profile betas of 0.9 "
        "and 0.98, where the paper has 0.9 and 0.95",
        "faster than with width is read as: more than a model of twice the width and as many parameters",
    ),
)
