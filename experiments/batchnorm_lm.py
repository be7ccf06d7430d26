"""BatchNorm is unsuited to language models.

A widely read article and a survey say so; Shen et al. (arXiv:2003.07845) put it down to statistics that vary from batch
to batch. Unsuited is read as: in Pre-Norm of 6 blocks the held-out loss, with the running statistics, is over 0.05 nats
above LayerNorm's; it is further above the training loss than LayerNorm's (training statistics tell a token of later
ones, too); and both get worse as the batch gets smaller: with 2 sequences a step the two losses are further apart than
with 8, by more than LayerNorm's. With sequences of 16 tokens, as many tokens a step, it is as unsuited: over 0.05 nats
above LayerNorm's; what length does to its own losses no source says, and is shown. Each step's training loss is of
other text than the held-out loss, which LayerNorm as the other arm takes out.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, GAP, RATE, WARMUP, evaluated, trained

BLOCKS, STEPS = 6, 360
SIZES = {
    "8x64": {},
    "2x64": {"train.batch": 2, "train.eval_batches": 16},
    "32x16": {"train.batch": 32, "model.context": 16},
}
NORMS = {"layernorm": "LayerNorm", "batchnorm": "BatchNorm"}
ARMS = {f"{norm}-{size}": {"model.norm": norm, **own} for norm in NORMS for size, own in SIZES.items()}
APART = "unseen_loss"

CLAIM = Claim(
    id="batchnorm-lm",
    says="BatchNorm is unsuited to language models.",
    source="a widely read article and a survey; Shen et al. 2020 (PowerNorm), arXiv:2003.07845",
    family="quality",
    base={**DEPTH, **evaluated(STEPS), "model.scheme": "pre", "probes.every": 5},
    arms=ARMS,
    labels={arm: "{}, {} tokens".format(NORMS[arm.split("-")[0]], arm.split("-")[1]) for arm in ARMS},
    control=tuple(Trains(f"layernorm-{size}", at=(BLOCKS,)) for size in SIZES),
    expect=(
        Value("batchnorm-8x64", "gap", at=BLOCKS, than="layernorm-8x64", compare="difference", below=-0.05),
        Value("batchnorm-8x64", APART, at=BLOCKS, than="layernorm-8x64", compare="difference", above=0),
        Value("batchnorm-2x64", "gap", at=BLOCKS, than="layernorm-2x64", compare="difference", below=-0.05),
        Value("batchnorm-32x16", "gap", at=BLOCKS, than="layernorm-32x16", compare="difference", below=-0.05),
        Value(
            "batchnorm-2x64",
            APART,
            at=BLOCKS,
            than="batchnorm-8x64",
            compare="difference",
            above=0,
            beyond=("layernorm-2x64", "layernorm-8x64"),
        ),
    ),
    profiles=trained(
        main={arm: {BLOCKS: 5} for arm in ARMS},
        floor={arm: {BLOCKS: 3} for arm in ARMS},
    ),
    core=False,
    figure="values",
    numbers={"gap": "gap to the unigram entropy", APART: "held-out loss over training loss"},
    how=(
        f"Pre-Norm models of {BLOCKS} blocks (width 64) read source text for {STEPS} Adam steps at {RATE:g} (warm-up "
        f"over {WARMUP}), 8 or 2 sequences of 64 bytes a step, or 32 of 16. BatchNorm takes mean and variance of a "
        f"channel over all tokens of the step, and running ones (momentum 0.1) on held-out text. {GAP}"
    ),
    paper={
        f"batchnorm-8x64 L{BLOCKS} minus layernorm-8x64 L{BLOCKS} gap": "significantly worse in translation and "
        "language modelling (arXiv:2003.07845, abstract)",
    },
    differs=(
        "8 sequences are few for BatchNorm, which was made for batches of hundreds",
        "0.05 nats, what counts as worse, is ours",
        "that LayerNorm's own difference between batches is taken off was added after the run, which showed that the "
        "text of 2 sequences moves both norms' training losses alike",
        "6 blocks of width 64",
    ),
)
