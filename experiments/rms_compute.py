"""RMSNorm takes 20 % less compute than LayerNorm.

The part of `rms-faster` that needs no clock; an article says so, without saying of what. Read as: the arithmetic of the
norm, which the definitions settle, forward and in training. 20 % give or take a third, as the share of a step in
`rms-faster`, is 13 to 27 % less. The control is that LayerNorm's count is what its formula has, forward: two means, a
difference, a square, and three for scale, gain and bias, for each number 7 (and a root for each row).
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {"forward": {"what": "forward"}, "training": {"what": "training"}}

CLAIM = Claim(
    id="rms-compute",
    says="RMSNorm takes 20 % less compute than LayerNorm.",
    source="a practitioner's article on LayerNorm",
    family="precision",
    base={},
    arms=ARMS,
    labels={"forward": "forward", "training": "forward and backward"},
    measure="norm_operations",
    numbers={
        "rms_over_ln": "operations of RMSNorm over those of LayerNorm",
        "ln_each": "operations of LayerNorm for each number of its input",
    },
    control=(Value("forward", "ln_each", above=7.0, below=7.01),),
    expect=tuple(Value(arm, "rms_over_ln", above=0.73, below=0.87) for arm in ARMS),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "The definitions of both norms run over rows of 1024 numbers, with gain and bias as each has them. One "
        "operation is counted for each number that an elementwise operation makes, and that a sum or a mean takes."
    ),
    paper={"forward rms_over_ln": "0.8 (the article, without a source)"},
    differs=(
        "the article does not say of what; of a whole step both norms are a few per cent",
        "operations that a compiler would fuse or leave out are counted as the definitions have them; time is another "
        "claim, `rms-faster`, and goes with memory rather than with operations",
        "nothing is drawn that the counts depend on: seeds agree exactly",
    ),
)
