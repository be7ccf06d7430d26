"""QK-norm allows higher learning rates: the part of `qk-logits` that drives runs to where they fail.

A survey says so, and Wortsman et al. (arXiv:2309.14322) measure it: with QK-norm a 1.2B model trains at a rate of 0.3.
The rate rises in a line, as in `depth-max-lr` and with its runs of Pre-Norm. Expected at 32 blocks: the largest rate
that is tolerated is larger with QK-norm than without. No source says by how much at this size: any difference that the
seeds agree on counts. That Pre-Norm stands 1e-3, at which it trains in all depth claims, is the control.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Value
from normscale.claims.protocol import RAMP, RAMP_NUMBERS, RAMP_PUBLISHED, RAMP_STEPS, RAMP_TOP, RAMPED, SMOKE

BLOCKS = 32
ARMS = {"plain": "none", "qk": "head"}
CELLS = {arm: {BLOCKS: 3} for arm in ARMS}

CLAIM = Claim(
    id="qk-logits-rate",
    says="QK-norm allows higher learning rates (the part that drives runs until they fail).",
    source="a survey of norms in language models; Wortsman et al. 2023, arXiv:2309.14322",
    family="quality",
    base={**RAMP, "model.scheme": "pre"},
    arms={arm: {"model.qk_norm": kind} for arm, kind in ARMS.items()},
    labels={"plain": "without QK-norm", "qk": "with QK-norm"},
    control=(Value("plain", RAMPED, at=BLOCKS, above=1e-3),),
    expect=(Value("qk", RAMPED, at=BLOCKS, than="plain", above=1.0),),
    profiles={
        "smoke": Profile(main={arm: {2: 1} for arm in ARMS}, set=SMOKE),
        "cpu": Profile(main=CELLS, floor=CELLS),
        "gpu": Profile(main=CELLS, set=RAMP_PUBLISHED, floor=CELLS),
    },
    to_failure=True,
    core=False,
    figure="values",
    numbers=RAMP_NUMBERS,
    how=(
        f"Pre-Norm models of {BLOCKS} blocks (width 64, 2 heads, 64 tokens of context, batch 8), with and without a "
        f"norm on queries and keys of each head, read source text for {RAMP_STEPS} Adam steps while the rate rises in "
        f"a line from 0 to {RAMP_TOP:g}. Measured is the rate up to which the held-out loss (a running median of five "
        "evaluations) is at most 0.2 nats above its lowest so far, and as much below the unigram entropy."
    ),
    paper={f"qk L{BLOCKS} {RAMPED}": "a model of 1.2B trains at 0.3 (arXiv:2309.14322)"},
    differs=(
        "the paper trains at seven fixed rates with warm-up and cosine; the ramp is Keel's (arXiv:2601.19895), which "
        "gives a rate in one run",
        f"32 blocks of width 64 for {RAMP_STEPS} steps; logits of large models grow over thousands of steps",
        f"a model that stands at the end tolerates {RAMP_TOP:g} or more",
        "what is measured was another number when the runs of the cpu profile were made (see depth-max-lr)",
    ),
)
