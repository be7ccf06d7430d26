"""The residual stream of Pre-Norm grows with depth, so deep layers matter less and less.

The claim is a widely read article's. Three things have to be seen in Pre-Norm, each written as a number before the run:

- The stream grows: at initialisation its RMS rises along the sublayers with a log-log slope of nearly 1/2, since its
  variance is about linear in depth (Xiong et al., Lemma 2: from 1 + l/2 to 1 + 3l/2 at layer l of two sublayers, which
  are slopes of 0.35 and 0.43 over 48 sublayers). The bar is 0.25 to either side of 1/2: half-way to no growth, and
  half-way to a variance that grows with the square of depth. After training, when theory is silent, the claim needs
  growth, no more: the deep third of the sublayers is over 1.5 times the shallow third, about half-way between none and
  the 1.9 to 2.1 of a linear variance.
- Blocks turn the stream less: the angle between what a block reads and leaves falls with the branch over the stream,
  as 1 / sqrt(l) where the variance is linear: over 24 blocks the deep third turns it 0.38 to 0.47 times as far as the
  shallow third. The bar is 0.7, half-way to 1.
- Blocks are missed less: leaving one out raises the held-out loss by less in the deep third than in the shallow third.
  No source says by how much, so the bar is 0.

Models are looked into at 24 blocks, where a run can be long enough to have learnt something. Post-Norm and DeepNorm
stand beside them and are not judged. A third of 24 blocks is 8 blocks; 16 of 24 are left out in turn.

The paper profile is the 130M model of the Curse of Depth (arXiv:2502.05795) on C4 (data/c4), with 12 blocks; what of it
is assumed stands with `CURSE_130M`.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Along, Expectation, Thirds, Trains
from normscale.claims.protocol import (
    CURSE_130M,
    CURSE_BLOCKS,
    DEPTH,
    GAP,
    LAYER_STEPS,
    RATE,
    SMOKE,
    WARMUP,
    evaluated,
)

BLOCKS = 24
POST_BLOCKS = 12  # Post-Norm is known to die at 24


def expected(blocks: int) -> tuple[Expectation, ...]:
    """Returns what is expected at a depth."""
    return (
        Along("pre", "stream_rms", blocks, when="first", lo=0.25, hi=0.75),
        Thirds("pre", "stream_rms", blocks, compare="ratio", side="above", bar=1.5),
        Thirds("pre", "angle", blocks, compare="ratio", side="below", bar=0.7),
        Thirds("pre", "removal", blocks, compare="difference", side="below", bar=0.0),
    )


CLAIM = Claim(
    id="growth-prenorm",
    says="The residual stream of Pre-Norm grows with depth, so that deep layers matter less and less.",
    source=(
        "a widely read article on LayerNorm, RMSNorm and DeepNorm; theory: Xiong et al. 2020, arXiv:2002.04745, "
        "Lemma 2, and Sun et al. 2025, arXiv:2502.05795"
    ),
    family="depth",
    base={**DEPTH, **evaluated(LAYER_STEPS), "probes.layers": True},
    arms={"pre": {"model.scheme": "pre"}, "deepnorm": {"model.scheme": "deepnorm"}, "post": {"model.scheme": "post"}},
    labels={"pre": "Pre-Norm", "deepnorm": "DeepNorm", "post": "Post-Norm"},
    control=(Trains("pre", at=(BLOCKS,)),),
    expect=expected(BLOCKS),
    profiles={
        "smoke": Profile(main={"pre": {3: 1}, "deepnorm": {3: 1}, "post": {3: 1}}, set=SMOKE),
        "cpu": Profile(
            main={"pre": {BLOCKS: 3}, "deepnorm": {BLOCKS: 2}, "post": {POST_BLOCKS: 1}}, floor={"pre": {BLOCKS: 3}}
        ),
        "gpu": Profile(
            main={"pre": {BLOCKS: 3, 48: 3, 100: 3}, "deepnorm": {BLOCKS: 3, 48: 3, 100: 3}, "post": {POST_BLOCKS: 3}},
            set=evaluated(10 * LAYER_STEPS),
            floor={"pre": {BLOCKS: 3}},
        ),
        "paper": Profile(
            main={"pre": {CURSE_BLOCKS: 3}},
            set=CURSE_130M,
            floor={"pre": {CURSE_BLOCKS: 3}},
            control=(Trains("pre", at=(CURSE_BLOCKS,)),),
            expect=expected(CURSE_BLOCKS),
        ),
    },
    figure="growth",
    how=(
        "A small decoder-only Transformer (width 64, feed-forward 128, 2 heads, 64 tokens of context, batch 8) "
        f"reads the source of Python's standard library byte by byte for {LAYER_STEPS} Adam steps at learning rate "
        f"{RATE:g} (warm-up over {WARMUP}). Measured are the RMS of the residual stream after every sublayer, on the"
        " way; and at the end, on held-out text, the angle between what each block reads from the stream and what "
        "it leaves there, as a share of a half turn, and by how much the loss rises when one block is passed over. "
        "The deep third of the layers is compared with the shallow third, with the interval over the seeds. That "
        f"the model has trained at all is the control. {GAP}"
    ),
    paper={
        f"pre L{BLOCKS} stream_rms slope first": "0.35 to 0.43 (Lemma 2: variance from 1 + l/2 to 1 + 3l/2)",
        f"pre L{BLOCKS} stream_rms deep over shallow": "about 2 if the variance is linear; the deep layers of a "
        "trained model of 130M have a variance of about 175 (arXiv:2502.05795, Figure 4)",
        f"pre L{BLOCKS} angle deep over shallow": "0.38 to 0.47 if the variance is linear; deep layers below 0.2 of "
        "a half turn in trained models (arXiv:2502.05795)",
        f"pre L{BLOCKS} removal deep minus shallow": "below 0: leaving a deep layer out costs less (arXiv:2502.05795)",
    },
    differs=(
        f"{LAYER_STEPS} steps of 512 tokens at width 64; the published curves are of models of 130M parameters and "
        "more, after 10 000 steps and more, where growth may be near exponential",
        f"{BLOCKS} blocks, Post-Norm {POST_BLOCKS}, since it does not train at {BLOCKS}",
        "removal is measured with the loss of one held-out text, not on downstream tasks",
        "blocks are left out, not sublayers, and 16 of them in turn",
    ),
)
