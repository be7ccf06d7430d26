"""With an encoder and a decoder, too, Post-Norm stops training as depth grows, and DeepNorm trains.

DeepNet's Table 1 (WMT-17 English-German): Post-Norm trains at 6L-6L and diverges at 18L-18L, 50L-50L and 100L-100L,
where DeepNorm, with the constants of two stacks, has 28.8, 29.0 and 28.9 BLEU and Pre-Norm 28.1, 28.0 and 27.4. So
Post-Norm is to die from 18L-18L on while DeepNorm or Pre-Norm trains, and DeepNorm to train at every depth. That
Post-Norm trains at 2L-2L is the control; at 6L-6L it is shown.

No time of a CPU pays for a translation, so the cpu profile restores hidden spans of the embedded text. The gpu profile
translates Multi30k, of which the files have to be in data/multi30k, and the paper profile WMT-17 (data/wmt17); where
they are not, the claim is left out. Both are asked for BLEU as well: at the deepest models DeepNorm's is above
Pre-Norm's (28.9 against 27.4), and a Post-Norm model that is dead has none to speak of (below 5; the paper has no
number for it). A pilot of the control alone (Post-Norm, 2L-2L) chose the number of steps and the share that is hidden.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Dies, Expectation, Trains, Value
from normscale.claims.protocol import BOTH_STACKS, DEPTH, GAP, RATE, SMOKE, SPAN, SPAN_STEPS, WARMUP, published_run

BLEU = {"probes.translation.sentences": 500}
ARMS = {scheme: {"model.scheme": scheme} for scheme in ("post", "pre", "deepnorm")}


def expected(deepest: int) -> tuple[Expectation, ...]:
    """Returns what is expected where BLEU is measured, with models of so many blocks as the deepest."""
    return (
        Dies("post", at_least=18, beside=("deepnorm", "pre")),
        Trains("deepnorm", at_least=6),
        Value("deepnorm", "bleu", at=deepest, than="pre", compare="difference", above=0),
        Value("post", "bleu", at=deepest, below=5),
    )


CLAIM = Claim(
    id="depth-encdec",
    says="With an encoder and a decoder, too, Post-Norm stops training as depth grows, and DeepNorm trains.",
    source="Wang et al. 2022 (DeepNet), arXiv:2203.00555, Table 1",
    family="depth",
    base={**DEPTH, **SPAN},
    arms=ARMS,
    depth_keys=dict.fromkeys(ARMS, BOTH_STACKS),
    labels={"post": "Post-Norm", "pre": "Pre-Norm", "deepnorm": "DeepNorm"},
    control=(Trains("post", at=(2,)),),
    expect=(Dies("post", at_least=18, beside=("deepnorm", "pre")), Trains("deepnorm", at_least=6)),
    profiles={
        "smoke": Profile(main={arm: {2: 1} for arm in ARMS}, set=SMOKE),
        "cpu": Profile(
            main={"post": {2: 3, 6: 3, 18: 3}, "deepnorm": {6: 3, 18: 3, 50: 1}, "pre": {18: 3}},
            low_lr={"post": {18: 1}},
            floor={"post": {2: 1, 18: 2}, "deepnorm": {6: 1, 18: 2}},
        ),
        "gpu": Profile(
            main={
                "post": {2: 3, 6: 3, 18: 3, 50: 3},
                "deepnorm": {6: 3, 18: 3, 50: 3},
                "pre": {6: 3, 18: 3, 50: 3},
            },
            low_lr={"post": {18: 3, 50: 3}},
            long={"post": {18: 3}},
            set={**published_run("multi30k-6-6"), **BLEU},
            floor={"post": {2: 3, 18: 3, 50: 3}, "deepnorm": {6: 3, 18: 3, 50: 3}, "pre": {50: 3}},
            control=(Trains("post", at=(2,)),),
            expect=expected(50),
        ),
        "paper": Profile(
            main={arm: {6: 3, 18: 3, 50: 3, 100: 3} for arm in ARMS},
            low_lr={"post": {18: 1, 50: 1, 100: 1}},
            set={**published_run("wmt17-6-6"), **BLEU},
            floor={arm: {6: 1, 18: 2, 50: 2, 100: 2} for arm in ARMS},
            control=(Trains("post", at=(6,)),),
            expect=expected(100),
        ),
    },
    core=False,
    figure="gap",
    numbers={"bleu": "BLEU"},
    how=(
        "A small Transformer of as many encoder as decoder blocks (width 64, feed-forward 128, 2 heads, batch 8) reads "
        "64 bytes of source text of which half are cut out in spans of 8, and writes the spans, for "
        f"{SPAN_STEPS} Adam steps at {RATE:g} (warm-up over {WARMUP}). Only the scheme and the number of blocks "
        f"change. {GAP} The gpu and paper profiles translate instead, and score held-out lines by BLEU."
    ),
    paper={
        "post L6 gap": "trains at 6L-6L: 28.1 BLEU (Table 1)",
        "post L18 gap": "diverged at 18L-18L (Table 1)",
        "deepnorm L6 gap": "27.8 BLEU at 6L-6L (Table 1)",
        "deepnorm L18 gap": "28.8 BLEU at 18L-18L (Table 1)",
        "deepnorm L50 gap": "29.0 BLEU at 50L-50L (Table 1)",
        "pre L18 gap": "28.1 BLEU at 18L-18L (Table 1)",
    },
    differs=(
        "the cpu profile restores hidden spans of text, byte by byte; the paper translates, and no BLEU is measured "
        "in that profile",
        f"{SPAN_STEPS} steps at width 64; the paper trains for 100 000 steps of 128 x 4096 tokens at width 512",
        "fp32, no dropout, no label smoothing",
        "100L-100L is left to the paper profile, 50L-50L has one seed of DeepNorm and none of Post-Norm",
    ),
)
