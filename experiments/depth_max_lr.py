"""The largest tolerable learning rate orders the schemes: Post < DeepNorm < Mix-LN and HybridNorm << Pre < Keel.

Keel's Table 1 (arXiv:2601.19895): over 5000 steps the rate rises in a line from 0 to 5e-2, and the rate one step before
divergence is noted. At 64 sublayers 3.0e-4 (Post-Norm), 3.5e-4 (DeepNorm), 4.9e-4 (HybridNorm), 8.6e-4 (Mix-LN),
7.65e-3 (Pre-Norm) and 1.01e-2 (Keel); at 512 sublayers the four first are between 2.8e-4 and 3.5e-4, three of them
equal. The rate up to which a model stands at what it has learnt is that before divergence (`claims/derived.py`); one
that learns nothing while the rate rises has none, and pairs with it are undecided.

Expected at 32 blocks (64 sublayers), as ratios over seeds: each scheme above the one before. For "far above" the bar is
3, half-way in the logarithm between 1 and the 8.9 of Pre-Norm over Mix-LN. The authors' DeepNorm has another gain than
DeepNet's (`misinit-baselines`) and is what is judged; DeepNet's own is unpublished in this protocol and is shown. That
Pre-Norm of 8 blocks stands 1e-3, at which it trains in all depth claims, is the control.

The gpu profile has the paper's width, 5000 steps and Adam on the text of the cpu profile: 64 sublayers are 0.4 B
parameters, and two hours or so of one large GPU (an estimate, of 50 ms a step). The paper profile is Table 1 at 64 and
512 sublayers, on FineWeb-Edu (data/fineweb-edu), which the authors name for other runs, in bytes. ASSUMED, since we
have not read it: the width of Keel's other models, 16 heads, a feed-forward of 4096, 256 sequences of 1024 a step,
learned positions, bf16, and norms without bias in all schemes.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Value
from normscale.claims.protocol import RAMP, RAMP_NUMBERS, RAMP_PUBLISHED, RAMP_STEPS, RAMP_TOP, RAMPED, SMOKE

SHALLOW, BLOCKS, DEEPEST = 8, 32, 256
ARMS = {
    "post": {"model.scheme": "post"},
    "deepnorm-keel": {"model.scheme": "deepnorm", "model.scheme_options": {"constants": "keel"}},
    "hybridnorm": {"model.scheme": "hybridnorm"},
    "mixln": {"model.scheme": "mixln"},
    "pre": {"model.scheme": "pre"},
    "keel": {"model.scheme": "keel"},
    "deepnorm": {"model.scheme": "deepnorm"},
}
JUDGED = [arm for arm in ARMS if arm != "deepnorm"]
SHOWN = ("post", "pre", "keel")  # at 8 blocks, too
FAR = 3.0
KEELS = {**RAMP_PUBLISHED, "model.d": 1024, "model.ffn": 4096, "model.heads": 16}
PAPER = {
    **KEELS,
    "model.context": 1024,
    "model.norm_options": {"bias": False},
    "model.checkpointing": True,
    "data.source": "data/fineweb-edu/train.jsonl",
    "data.max_bytes": 2_000_000_000,
    "data.held_out": 0.001,
    "train.batch": 256,
    "train.accumulate": 32,
    "precision.compute": "bf16",
}


def ordered(blocks: int) -> tuple[Value, ...]:
    """Returns the order of the schemes at a depth."""
    pairs = (("deepnorm-keel", "post"), ("hybridnorm", "deepnorm-keel"), ("mixln", "deepnorm-keel"), ("keel", "pre"))
    above = [Value(arm, RAMPED, at=blocks, than=than, above=1.0) for arm, than in pairs]
    return (*above, *(Value("pre", RAMPED, at=blocks, than=than, above=FAR) for than in ("hybridnorm", "mixln")))


CLAIM = Claim(
    id="depth-max-lr",
    says=(
        "The largest tolerable learning rate orders the schemes: Post-Norm, DeepNorm, Mix-LN and HybridNorm, far above "
        "them Pre-Norm, then Keel."
    ),
    source="Chen and Wei 2026 (Keel), arXiv:2601.19895, Table 1 and section 5.1",
    family="depth",
    base=RAMP,
    arms=ARMS,
    labels={
        "post": "Post-Norm",
        "deepnorm-keel": "DeepNorm with Keel's gain",
        "hybridnorm": "HybridNorm",
        "mixln": "Mix-LN",
        "pre": "Pre-Norm",
        "keel": "Keel",
        "deepnorm": "DeepNorm",
    },
    control=(Value("pre", RAMPED, at=SHALLOW, above=1e-3),),
    expect=ordered(BLOCKS),
    profiles={
        "smoke": Profile(main={arm: {2: 1} for arm in ARMS}, set=SMOKE),
        "cpu": Profile(
            main={arm: {BLOCKS: 3, **({SHALLOW: 3} if arm in SHOWN else {})} for arm in ARMS},
            floor={**{arm: {BLOCKS: 3} for arm in JUDGED}, "pre": {SHALLOW: 3, BLOCKS: 3}},
        ),
        "gpu": Profile(
            main={arm: {BLOCKS: 3, **({SHALLOW: 3} if arm in SHOWN else {})} for arm in ARMS},
            set=KEELS,
            floor={**{arm: {BLOCKS: 3} for arm in JUDGED}, "pre": {SHALLOW: 3, BLOCKS: 3}},
        ),
        "paper": Profile(
            main={arm: {BLOCKS: 3, DEEPEST: 3, **({SHALLOW: 3} if arm in SHOWN else {})} for arm in ARMS},
            set=PAPER,
            floor={**{arm: {BLOCKS: 3, DEEPEST: 3} for arm in JUDGED}, "pre": {SHALLOW: 3, BLOCKS: 3, DEEPEST: 3}},
            control=(Value("pre", RAMPED, at=SHALLOW, above=1e-3),),
            expect=(
                *ordered(BLOCKS),
                Value("deepnorm-keel", RAMPED, at=DEEPEST, than="post", above=1.0),
                Value("keel", RAMPED, at=DEEPEST, than="pre", above=1.0),
                *(Value("pre", RAMPED, at=DEEPEST, than=than, above=FAR) for than in ("hybridnorm", "mixln")),
            ),
        ),
    },
    to_failure=True,
    core=False,
    figure="values",
    numbers=RAMP_NUMBERS,
    how=(
        f"Decoder-only models of {SHALLOW} and {BLOCKS} blocks (width 64, 64 tokens of context, batch 8) read source "
        f"text for {RAMP_STEPS} Adam steps while the rate rises in a line from 0 to {RAMP_TOP:g}. Measured is the rate "
        "at the last evaluation (a running median of five) at which the held-out loss is 0.2 nats or more below the "
        "unigram entropy and at most 0.2 above its lowest so far: after it the run stagnates at byte frequencies, has "
        "spiked for good, grows, or is not finite any more, the ways in which the paper has a run diverge."
    ),
    paper={
        f"{arm} L{BLOCKS} {RAMPED}": f"{rate} at 64 sublayers (Table 1)"
        for arm, rate in (
            ("post", "3.0e-4"),
            ("deepnorm-keel", "3.5e-4"),
            ("hybridnorm", "4.9e-4"),
            ("mixln", "8.6e-4"),
            ("pre", "7.65e-3"),
            ("keel", "1.01e-2"),
        )
    },
    differs=(
        f"width 64 instead of 1024 in the cpu profile, and {RAMP_STEPS} steps instead of 5000, so that the rate rises "
        "five times as fast and a model is further along it before a failure shows: the order is judged, not the rates",
        "0.2 nats and an evaluation every tenth step are ours; a model that stands at the end tolerates "
        f"{RAMP_TOP:g} or more; of one that learns nothing while the rate rises so fast no rate is known",
        "another number was measured when the runs of the cpu profile were made, the rate of the last fall of the loss "
        "by 0.05 nats: it told how quick a model is, since one that has learnt all it will falls no more",
        "no clipping and no weight decay in the cpu profile, and betas of 0.9 and 0.98: the paper has 1, 0.01, and 0.9 "
        "and 0.95; Keel's norms have a bias here as all others",
        "the gpu profile has the paper's width, steps and Adam, and 512 tokens a step; 512 sublayers are left to the "
        "paper profile, where HybridNorm and Mix-LN equal DeepNorm, so that these pairs are not judged at that depth",
    ),
)
