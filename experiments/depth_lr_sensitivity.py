"""Sensitivity to the learning rate rises with depth, and faster than with width; QK-norm lowers it.

Wortsman et al. (arXiv:2309.14322, sections 2.2 and 3.3). Their definition: the mean over seven rates, 3e-4 to 3e-1, of
min(loss, loss at initialisation), minus the best loss. Expected: 24 blocks are more sensitive than 6 of the same width;
more than 6 of twice the width, which have as many parameters in their blocks; and more than 24 with QK-norm. No source
gives a difference that would do at this size: any that the seeds agree on counts. That models train at 1e-3, as in
all depth claims, is the control.

The paper profile is their sweep at width 512: QK-norm in the models that are compared over depth and width, 256 x 512
tokens a step, 100 000 steps with 5000 of warm-up, AdamW (0.9, 0.95), z-loss 1e-4, bf16, weights drawn as
1/sqrt(fan-in), eps 1e-6. ASSUMED, since we have not read it: 6 and 24 blocks as the ends of the depth sweep, 64 a head,
learned positions, C4 (data/c4). Left out: weight decay, since theirs of 1e-4 does not go with the rate and AdamW's
does; their subwords, of which bytes take the place.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Sensitive, Trains
from normscale.claims.protocol import CRAWL, DEPTH, SMOKE, STEPS, WARMUP, at_least_three, evaluated

SHALLOW, DEEP = 6, 24
CELLS = {"plain": {SHALLOW: 3, DEEP: 3}, "qk": {DEEP: 3}, "wide": {SHALLOW: 3}}
FLOOR = {"plain": {SHALLOW: 2, DEEP: 2}, "qk": {DEEP: 2}, "wide": {SHALLOW: 2}}
ADAM = {"train.optim.betas": (0.9, 0.95)}
PAPER = {
    **CRAWL,
    **ADAM,
    **evaluated(100_000),
    "model.d": 512,
    "model.ffn": 2048,
    "model.heads": 8,
    "model.context": 512,
    "model.eps": 1e-6,
    "model.init": "fan_in",
    "model.init_truncated": True,
    "train.batch": 256,
    "train.accumulate": 4,
    "train.z_loss": 1e-4,
    "train.schedule.warmup_steps": 5000,
    "precision.compute": "bf16",
}
PAPER_CELLS = {"qk": {SHALLOW: 3, DEEP: 3}, "plain": {DEEP: 3}, "qk-wide": {SHALLOW: 3}}

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
        "qk-wide": {"model.qk_norm": "head", "model.d": 1024, "model.ffn": 4096, "model.heads": 16},
    },
    labels={
        "plain": "Pre-Norm",
        "qk": "Pre-Norm with QK-norm",
        "wide": "Pre-Norm of twice the width",
        "qk-wide": "Pre-Norm of width 1024 with QK-norm",
    },
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
            main=CELLS, sweep={**CELLS, "plain": {SHALLOW: 3, DEEP: 3, 100: 3}}, set=ADAM, floor=at_least_three(FLOOR)
        ),
        "paper": Profile(
            main=PAPER_CELLS,
            sweep=PAPER_CELLS,
            set=PAPER,
            floor={"qk": {SHALLOW: 2, DEEP: 2}, "plain": {DEEP: 2}, "qk-wide": {SHALLOW: 2}},
            control=(Trains("qk", at=(SHALLOW, DEEP)), Trains("plain", at=(DEEP,)), Trains("qk-wide", at=(SHALLOW,))),
            expect=(
                Sensitive("qk", DEEP, than="qk", than_at=SHALLOW),
                Sensitive("qk", DEEP, than="qk-wide", than_at=SHALLOW),
                Sensitive("plain", DEEP, than="qk", than_at=DEEP),
            ),
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
        "no z-loss and no weight decay, of which the paper has 1e-4 each, and no QK-norm in the models compared over "
        "depth and width; in the cpu profile betas of 0.9 and 0.98, where the paper has 0.9 and 0.95",
        "faster than with width is read as: more than a model of twice the width and as many parameters",
    ),
)
