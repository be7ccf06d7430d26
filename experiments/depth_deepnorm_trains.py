"""DeepNorm trains to 1000 layers.

The paper's deepest model has 1000 layers (500-500, with encoder and decoder), the abstract says "one magnitude deeper",
and Table 1 has 100-100 layers at 28.9 BLEU, Pre-Norm at 27.4. A layer of the paper is a block. The expectation is that
every depth trains, in every seed; where training begins (0.2 nats below the unigram entropy) is the project's bar for
all claims.

1000 blocks can be paid for at 128 tokens a step alone. A failure there might be the batch's and not the depth's, so the
very same protocol is the control at 6 and 12 blocks. A death there would have to last at a lower learning rate, which
the gpu profile tries and the cpu profile cannot pay for: it would leave the claim undecided.

The paper profile is Figure 6, IWSLT-14 from 10L-10L to 100L-100L, where DeepNorm is about as good at every depth. The
paper's 500L-500L is trained on OPUS-100 and on 102 languages, which is left to configs/train/opus100-500-500.yaml.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Trains
from normscale.claims.protocol import (
    BOTH_STACKS,
    DEPTH,
    DESCRIBED,
    ENCODER,
    ENCODER_STEPS,
    GAP,
    PILOT,
    SMALL,
    SMALL_BATCH,
    SMALL_STEPS,
    SMOKE,
    STEPS,
    published,
    published_run,
)

CLAIM = Claim(
    id="depth-deepnorm-trains",
    says="DeepNorm trains to 1000 layers.",
    source="Wang et al. 2022 (DeepNet), arXiv:2203.00555, abstract, Table 1 and Figure 6",
    family="depth",
    base=DEPTH,
    arms={
        "deepnorm": {"model.scheme": "deepnorm"},
        "deepnorm-128": {"model.scheme": "deepnorm", **SMALL},
        "encoder": {"model.scheme": "deepnorm", **ENCODER},
    },
    depth_keys={"encoder": ("model.N",)},
    labels={
        "deepnorm": "DeepNorm",
        "deepnorm-128": "DeepNorm, 128 tokens a step",
        "encoder": "DeepNorm, encoder-only",
    },
    control=(Trains("deepnorm-128", at=(6, 12)),),
    expect=(Trains("deepnorm", at_least=6), Trains("deepnorm-128", at=(1000,)), Trains("encoder", at_least=12)),
    profiles={
        "smoke": Profile(main={"deepnorm": {2: 1, 6: 1}, "deepnorm-128": {2: 1}, "encoder": {2: 1}}, set=SMOKE),
        "cpu": Profile(
            main={
                "deepnorm": {6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 2},
                "deepnorm-128": {6: 3, 12: 3, 1000: 1},
                "encoder": {12: 1, 24: 1},
            },
            floor={
                "deepnorm": {6: 1, 24: 1, 100: 1, 200: 1},
                "deepnorm-128": {6: 1, 12: 1, 1000: 1},
                "encoder": {12: 1, 24: 1},
            },
        ),
        "gpu": Profile(
            main={
                "deepnorm": {6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3},
                "deepnorm-128": {6: 3, 12: 3, 100: 3, 1000: 3},
                "encoder": {12: 3, 48: 3, 100: 3, 200: 3},
            },
            low_lr={"deepnorm": {500: 3, 1000: 3}, "deepnorm-128": {1000: 3}},
            floor={
                "deepnorm": {6: 3, 100: 3, 1000: 3},
                "deepnorm-128": {6: 3, 12: 3, 1000: 3},
                "encoder": {12: 3, 100: 3},
            },
        ),
        "paper": Profile(
            main={"deepnorm": dict.fromkeys((10, 20, 50, 100), 3)},
            low_lr={"deepnorm": {100: 1}},
            set=published_run("iwslt14-10-10"),
            depth_keys=BOTH_STACKS,
            floor={"deepnorm": {10: 1, 100: 1}},
            control=(Trains("deepnorm", at=(10,)),),
            expect=(Trains("deepnorm", at_least=20),),
        ),
    },
    figure="gap",
    how=(
        f"{DESCRIBED} Only the number of blocks changes. The model of 1000 blocks, with models of 6 and 12 as its "
        f"control, takes {SMALL_STEPS} steps of {SMALL_BATCH * 64} tokens instead, with a learning rate that falls "
        f"to 0. {GAP}"
    ),
    paper={
        **published("deepnorm", 12, 24, 48, 100, 200),
        "deepnorm-128 L1000 gap": "the deepest model of the paper has 500L-500L and trains",
    },
    differs=(
        "language modelling on bytes with a decoder-only model; the paper translates with encoder and decoder",
        f"{STEPS} steps of 512 tokens, {SMALL_STEPS} of 128 for the deepest; the paper trains for 100 000 steps of "
        "128 x 4096 tokens in Table 1 (8 000 of 4 000 in Figure 6)",
        "trains means here that a model has begun to learn, 0.2 nats below the unigram entropy, not that it ends as "
        "good as a shallower one",
        "width 64 instead of 512, fp32 instead of fp16, no dropout, no label smoothing",
        "one seed at 1000 blocks and two at 200; nothing at 500",
        PILOT,
        f"encoder-only models read bytes of which 30 % are masked, with rotary positions, for {ENCODER_STEPS} steps, "
        "at 12 and 24 blocks in one seed",
    ),
)
