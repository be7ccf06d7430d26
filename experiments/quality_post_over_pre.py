"""DeepNorm has Post-Norm's quality with Pre-Norm's stability.

DeepNet's Table 1 has 28.9 BLEU for DeepNorm and 27.4 for Pre-Norm at 100L-100L, and 27.8, 28.1 and 27.0 for DeepNorm,
Post-Norm and Pre-Norm at 6L-6L. Quality: at 6 blocks, where all three train, DeepNorm's held-out loss is within 0.05
nats of Post-Norm's and below Pre-Norm's. Stability: at 48 blocks, where Post-Norm does not train, DeepNorm does, and
its loss is below Pre-Norm's there as well. In 480 steps, four times those of the depth claims; those had shown, at 120
steps, gaps of 0.50 for DeepNorm and 0.53 for Pre-Norm at 48 blocks.

The paper profile is Table 1 itself, WMT-17 at 6L-6L and 100L-100L, in BLEU: within 0.5 of Post-Norm's where that trains
(the paper has 0.3 less), and above Pre-Norm's at both depths.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import (
    BOTH_STACKS,
    DEPTH,
    GAP,
    RATE,
    WARMUP,
    evaluated,
    published,
    published_run,
    trained,
)

SHALLOW, DEEP, STEPS = 6, 48, 480
DEEPEST = 100  # of Table 1

CLAIM = Claim(
    id="quality-post-over-pre",
    says="DeepNorm has Post-Norm's quality with Pre-Norm's stability.",
    source="Wang et al. 2022 (DeepNet), arXiv:2203.00555, Table 1; a widely read article",
    family="quality",
    base={**DEPTH, **evaluated(STEPS)},
    arms={scheme: {"model.scheme": scheme} for scheme in ("post", "pre", "deepnorm")},
    labels={"post": "Post-Norm", "pre": "Pre-Norm", "deepnorm": "DeepNorm"},
    control=(Trains("post", at=(SHALLOW,)), Trains("pre", at=(SHALLOW, DEEP)), Trains("deepnorm", at=(SHALLOW,))),
    expect=(
        Value("deepnorm", "gap", at=SHALLOW, than="post", compare="difference", above=-0.05, below=0.05),
        Value("deepnorm", "gap", at=SHALLOW, than="pre", compare="difference", above=0),
        Trains("deepnorm", at=(DEEP,)),
        Value("deepnorm", "gap", at=DEEP, than="pre", compare="difference", above=0),
    ),
    profiles={
        **trained(
            main={"post": {SHALLOW: 3}, "pre": {SHALLOW: 3, DEEP: 3}, "deepnorm": {SHALLOW: 3, DEEP: 3}},
            floor={"post": {SHALLOW: 3}, "pre": {SHALLOW: 3, DEEP: 2}, "deepnorm": {SHALLOW: 3, DEEP: 2}},
            low_lr_gpu={"deepnorm": {DEEP: 1}},
        ),
        "paper": Profile(
            main={"post": {SHALLOW: 3}, **{arm: {SHALLOW: 3, DEEPEST: 3} for arm in ("pre", "deepnorm")}},
            low_lr={"deepnorm": {DEEPEST: 1}},
            set={**published_run("wmt17-6-6"), "probes.translation.sentences": 500},
            depth_keys=BOTH_STACKS,
            floor={"post": {SHALLOW: 2}, **{arm: {SHALLOW: 2, DEEPEST: 2} for arm in ("pre", "deepnorm")}},
            control=(Trains("post", at=(SHALLOW,)), Trains("pre", at=(SHALLOW, DEEPEST))),
            expect=(
                Value("deepnorm", "bleu", at=SHALLOW, than="post", compare="difference", above=-0.5, below=0.5),
                Value("deepnorm", "bleu", at=SHALLOW, than="pre", compare="difference", above=0),
                Trains("deepnorm", at=(SHALLOW, DEEPEST)),
                Value("deepnorm", "bleu", at=DEEPEST, than="pre", compare="difference", above=0),
            ),
        ),
    },
    core=False,
    figure="gap",
    numbers={"gap": "gap to the unigram entropy", "bleu": "BLEU"},
    how=(
        "A small decoder-only Transformer (width 64, feed-forward 128, 64 tokens of context, batch 8) reads source "
        f"text byte by byte for {STEPS} Adam steps at {RATE:g} (warm-up over {WARMUP}, then constant). {GAP}"
    ),
    paper={**published("pre", DEEP), **published("deepnorm", DEEP)},
    differs=(
        "language modelling on bytes, far from convergence; the paper translates, for 100 000 steps, as the paper "
        "profile does",
        "one learning rate for all three schemes; each scheme's best may lie elsewhere",
        "0.05 nats, what counts as the same quality, is ours",
    ),
)
