"""QK-norm helps at longer contexts.

From a survey of norms in language models, without numbers. Expected: at 512 tokens of context the held-out loss is
lower with QK-norm than without, by more than it is at 64 tokens, since what helps at 64 as much is no matter of length;
and the largest attention logit is smaller.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, GAP, RATE, WARMUP, evaluated, trained

BLOCKS, STEPS = 6, 360
ARMS = {
    f"{name}-{length}": {"model.qk_norm": kind, "model.context": length, "train.batch": 1024 // length}
    for name, kind in (("plain", "none"), ("qk", "head"))
    for length in (64, 512)
}
SAID = {"plain": "without QK-norm", "qk": "with QK-norm"}

CLAIM = Claim(
    id="long-context",
    says="QK-norm helps at longer contexts.",
    source="a survey of norms in language models",
    family="quality",
    base={**DEPTH, **evaluated(STEPS), "model.scheme": "pre", "model.positions": "rope"},
    arms=ARMS,
    labels={arm: "{}, {} tokens".format(SAID[arm.split("-")[0]], arm.split("-")[1]) for arm in ARMS},
    control=tuple(Trains(f"plain-{length}", at=(BLOCKS,)) for length in (64, 512)),
    expect=(
        Value("qk-512", "gap", at=BLOCKS, than="plain-512", compare="difference", above=0),
        Value(
            "qk-512",
            "gap",
            at=BLOCKS,
            than="plain-512",
            compare="difference",
            above=0,
            beyond=("qk-64", "plain-64"),
        ),
        Value("qk-512", "attn_logit_max", at=BLOCKS, when="max", than="plain-512", below=1.0),
    ),
    profiles=trained(
        main={arm: {BLOCKS: 5} for arm in ARMS},
        floor={arm: {BLOCKS: 3} for arm in ARMS},
    ),
    core=False,
    figure="values",
    numbers={"gap": "gap to the unigram entropy", "attn_logit_max": "largest attention logit"},
    how=(
        f"Pre-Norm models of {BLOCKS} blocks (width 64, 2 heads, rotary positions) read source text for {STEPS} Adam "
        f"steps at {RATE:g} (warm-up over {WARMUP}), 1024 tokens a step in sequences of 64 or of 512. {GAP}"
    ),
    differs=(
        "512 bytes are the longest here; the survey means contexts of many thousand tokens",
        "6 blocks of width 64",
        "no source says by how much it helps: any difference that the seeds agree on counts",
    ),
)
