"""How the residual stream grows with depth in Peri-Norm, LayerNorm-Scaling, Sub-LN, Keel and DeepNorm.

The growth is the log-log slope of the stream's RMS over the number of the sublayer: half that of its variance. What the
papers say, as numbers over 24 blocks:

- Peri-Norm (arXiv:2502.02732): the variance is linear, at initialisation and in training, where Pre-Norm's turns
  towards exponential: 1/2, give or take 1/4 (half-way to no growth, and to a variance that is quadratic), and less than
  Pre-Norm's after training.
- LayerNorm-Scaling (arXiv:2502.05795): slower than Pre-Norm's at both times (after 10 000 steps its deep layers have a
  variance of about 25, Pre-Norm's 175). The variance is between linear (a slope of 1/2, less 1/4 as above), its stated
  lower bound, and L^(2 - e) with e of at least 1/2 (3/4), its upper bound as of version 5 of the paper. A toy model has
  less than the lower bound, so that it is tested here.
- Sub-LN (arXiv:2210.06423): each branch ends in a norm and a projection of one gain, so each adds as much: 1/2 give or
  take 1/4 at initialisation. The paper says nothing of training.
- Keel (arXiv:2601.19895) and DeepNorm (arXiv:2203.00555) norm the stream at every sum: no growth, within 1/4, at both
  times.

Pre-Norm between 1/4 and 3/4 at initialisation is the control, and that it trains.

The paper profile is LayerNorm-Scaling's own 130M model, of 12 blocks, beside Pre-Norm's, on C4 (data/c4); what of it is
assumed stands with `CURSE_130M`. The other papers' settings are not known well enough.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Trains, Value, When
from normscale.claims.protocol import CURSE_130M, CURSE_BLOCKS, DEPTH, DESCRIBED, LAYER_STEPS, SMOKE, evaluated

BLOCKS = 24
GROWTH = "stream_growth"
ARMS = {scheme: {"model.scheme": scheme} for scheme in ("peri", "lns", "subln", "keel", "deepnorm", "pre")}


def expected(blocks: int) -> tuple[Value, ...]:
    """Returns what is expected at a depth."""

    def within(arm: str, when: When, above: float, below: float) -> Value:
        return Value(arm, GROWTH, at=blocks, when=when, above=above, below=below)

    def less_than_pre(arm: str, when: When) -> Value:
        return Value(arm, GROWTH, at=blocks, when=when, than="pre", compare="difference", below=0)

    both: tuple[When, ...] = ("first", "last")
    return (
        *(within("peri", when, 0.25, 0.75) for when in both),
        less_than_pre("peri", "last"),
        *(less_than_pre("lns", when) for when in both),
        *(within("lns", when, 0.25, 0.75) for when in both),
        within("subln", "first", 0.25, 0.75),
        *(within(arm, when, -0.25, 0.25) for arm in ("keel", "deepnorm") for when in both),
    )


def controlled(blocks: int) -> tuple[Trains | Value, ...]:
    """Returns the control at a depth."""
    return Trains("pre", at=(blocks,)), Value("pre", GROWTH, at=blocks, when="first", above=0.25, below=0.75)


CLAIM = Claim(
    id="growth-families",
    says=(
        "The residual stream grows as its papers say: linearly in Peri-Norm, slower than Pre-Norm's with "
        "LayerNorm-Scaling, evenly in Sub-LN, and not at all in Keel and DeepNorm."
    ),
    source=(
        "Kim et al. 2025, arXiv:2502.02732; Sun et al. 2025, arXiv:2502.05795v5; Wang et al. 2022, arXiv:2210.06423 "
        "and arXiv:2203.00555; Chen and Wei 2026, arXiv:2601.19895"
    ),
    family="depth",
    base={**DEPTH, **evaluated(LAYER_STEPS)},
    arms=ARMS,
    labels={
        "peri": "Peri-Norm",
        "lns": "LayerNorm-Scaling",
        "subln": "Sub-LN",
        "keel": "Keel",
        "deepnorm": "DeepNorm",
        "pre": "Pre-Norm",
    },
    control=controlled(BLOCKS),
    expect=expected(BLOCKS),
    profiles={
        "smoke": Profile(main={arm: {2: 1} for arm in ARMS}, set=SMOKE),
        "cpu": Profile(
            main={arm: {BLOCKS: 3} for arm in ARMS},
            floor={arm: {BLOCKS: 3} for arm in ARMS},
        ),
        "gpu": Profile(
            main={arm: {BLOCKS: 3, 100: 3} for arm in ARMS},
            set=evaluated(10 * LAYER_STEPS),
            floor={arm: {BLOCKS: 3} for arm in ARMS},
        ),
        "paper": Profile(
            main={arm: {CURSE_BLOCKS: 3} for arm in ("lns", "pre")},
            set=CURSE_130M,
            control=controlled(CURSE_BLOCKS),
            expect=tuple(e for e in expected(CURSE_BLOCKS) if e.arm == "lns"),
            floor={arm: {CURSE_BLOCKS: 3} for arm in ("lns", "pre")},
        ),
    },
    core=False,
    figure="values",
    numbers={GROWTH: "growth of the stream's RMS, log over log"},
    how=(
        f"{DESCRIBED} At {BLOCKS} blocks the RMS of the stream after every sublayer is recorded, and its log-log slope "
        "over the number of the sublayer is taken at the first step and at the last."
    ),
    paper={
        f"peri L{BLOCKS} {GROWTH} first": "variance linear in depth: 0.5",
        f"lns L{BLOCKS} {GROWTH}": "variance of deep layers about 25 where Pre-Norm has 175, after 10 000 steps",
    },
    differs=(
        f"{LAYER_STEPS} steps at width 64; the papers look at streams after thousands of steps",
        "the papers' bounds are of theorems at initialisation and of plots in training; a slope within 1/4 is ours",
        "Keel's norms have a bias here, as all others",
    ),
)
