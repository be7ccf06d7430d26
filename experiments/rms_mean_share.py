"""The mean is a small part of what a norm takes, so that dropping it loses nothing.

Beside `rms-same-quality`, which compares losses: why RMSNorm does as well, by the RMSNorm paper (arXiv:1910.07467), is
that rows need no centring. Small is read as: of the energy of a row, its mean square, the mean has less than 10 %,
which would change the row's length by 5 %, over all norms of a trained model, and in the norm that has most of it. Rows
of independent numbers have 1 / width, 1.6 %. In Pre-Norm and in DeepNorm. That the model has trained is the control.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {scheme: {"scheme": scheme} for scheme in ("pre", "deepnorm")}
SMALL, LEARNED = 0.1, 0.2

CLAIM = Claim(
    id="rms-mean-share",
    says="The mean is a small part of what a norm takes, so that dropping it, as RMSNorm does, loses nothing.",
    source="two articles on normalisation; Zhang and Sennrich 2019, arXiv:1910.07467",
    family="quality",
    base={},
    arms=ARMS,
    labels={"pre": "Pre-Norm", "deepnorm": "DeepNorm"},
    measure="mean_share",
    seconds=30.0,
    numbers={
        "share_mean": "share of the mean in a row's energy, over all norms",
        "share_largest": "share in the norm that has most",
        "share_first": "share in the first norm",
        "share_last": "share in the last norm",
        "learned": "nats below the unigram entropy",
    },
    control=tuple(Value(arm, "learned", above=LEARNED) for arm in ARMS),
    expect=tuple(Value(arm, number, below=SMALL) for arm in ARMS for number in ("share_mean", "share_largest")),
    profiles=measured(ARMS, smoke={"blocks": 1, "steps": 4}),
    core=False,
    figure="values",
    how=(
        "A decoder of 6 blocks (width 64, 64 tokens of context, batch 8) with LayerNorm reads source text over 300 "
        "Adam steps. Of the rows of held-out text that each of its norms takes, the square of the mean over the mean "
        "square is averaged."
    ),
    differs=(
        "the sources give no number; 10 % is ours",
        "6 blocks of width 64 and 300 steps; large models grow channels that stand out, and with them a mean",
        "a model trained with LayerNorm, which takes the mean out and so has no reason to keep it small",
    ),
)
