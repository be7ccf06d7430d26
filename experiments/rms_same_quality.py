"""Dropping the mean loses nothing: RMSNorm is as good as LayerNorm.

Two articles and the RMSNorm paper (arXiv:1910.07467) say so. As good is read as: held-out losses within 0.05 nats of
each other, a quarter of what it takes to have trained, in Pre-Norm and in DeepNorm.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, GAP, RATE, WARMUP, evaluated, trained

BLOCKS, STEPS = 12, 360
ARMS = {
    f"{scheme}-{short}": {"model.scheme": scheme, "model.norm": norm}
    for scheme in ("pre", "deepnorm")
    for short, norm in (("ln", "layernorm"), ("rms", "rmsnorm"))
}
SAID = {"pre": "Pre-Norm", "deepnorm": "DeepNorm", "ln": "LayerNorm", "rms": "RMSNorm"}

CLAIM = Claim(
    id="rms-same-quality",
    says="Dropping the mean loses nothing: RMSNorm trains as well as LayerNorm.",
    source="two articles on normalisation; Zhang and Sennrich 2019, arXiv:1910.07467",
    family="quality",
    base={**DEPTH, **evaluated(STEPS)},
    arms=ARMS,
    labels={arm: "{}, {}".format(*(SAID[word] for word in arm.split("-"))) for arm in ARMS},
    control=tuple(Trains(f"{scheme}-ln", at=(BLOCKS,)) for scheme in ("pre", "deepnorm")),
    expect=tuple(
        Value(f"{scheme}-rms", "gap", at=BLOCKS, than=f"{scheme}-ln", compare="difference", above=-0.05, below=0.05)
        for scheme in ("pre", "deepnorm")
    ),
    profiles=trained(
        main={arm: {BLOCKS: 5} for arm in ARMS},
        floor={arm: {BLOCKS: 3} for arm in ARMS},
    ),
    core=False,
    figure="values",
    numbers={"gap": "gap to the unigram entropy"},
    how=(
        f"Models of {BLOCKS} blocks (width 64, 64 tokens of context, batch 8) read source text for {STEPS} Adam steps "
        f"at {RATE:g} (warm-up over {WARMUP}); each seed has one pair that differs in the norm alone. {GAP}"
    ),
    paper={
        f"{scheme}-rms L{BLOCKS} minus {scheme}-ln L{BLOCKS} gap": "comparable performance on several tasks "
        "(arXiv:1910.07467, abstract)"
        for scheme in ("pre", "deepnorm")
    },
    differs=(
        "12 blocks of width 64 and 360 steps; the paper has full trainings of several tasks",
        "0.05 nats, what counts as nothing, is ours",
        "LayerNorm has a bias beside its gain, RMSNorm a gain alone, as each is used",
    ),
)
