"""A norm folds into the next linear layer with fixed statistics, and int8 works for norms.

A practitioner's article has both, for inference: W g / sqrt(s^2 + eps) for the weight, with mean and variance s^2 fixed
as those of a BatchNorm are. It gives no numbers. "Folds" and "works" are read as: the held-out loss rises by less than
0.02 nats, below which this project counts no loss as improving either (a model is stuck when it gains less over a third
of its training). Of two ways to fix the statistics, one number a norm or one a channel, the better counts.

What algebra allows, gain and bias into the next projection and the mean out of what was written before, is the
control: it must change nothing in fp64.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {"ln": {"norm": "layernorm"}, "rms": {"norm": "rmsnorm"}}
LITTLE, LEARNED, ROUNDING = 0.02, 0.2, 1e-9

CLAIM = Claim(
    id="fold-inference",
    says="A norm folds into the next linear layer with fixed statistics, and norms work in int8.",
    source="a practitioner's article on LayerNorm",
    family="precision",
    base={},
    arms=ARMS,
    labels={"ln": "LayerNorm", "rms": "RMSNorm"},
    measure="static_fold",
    seconds=40.0,
    numbers={
        "static": "rise of the loss with fixed statistics, the better way",
        "static_token": "rise with one fixed mean and variance a norm",
        "static_channel": "rise with a fixed mean and variance for each channel",
        "int8": "rise of the loss with int8 norms",
        "int8_folded": "rise with int8 norms after the exact fold",
        "exact": "change of the loss by the exact fold, in fp64",
        "exact_bf16": "change of the loss by the exact fold, in bf16",
        "learned": "nats below the unigram entropy",
    },
    control=(
        *(Value(arm, "exact", below=ROUNDING) for arm in ARMS),
        *(Value(arm, "learned", above=LEARNED) for arm in ARMS),
    ),
    expect=(
        *(Value(arm, "static", below=LITTLE) for arm in ARMS),
        *(Value(arm, "int8", below=LITTLE) for arm in ARMS),
    ),
    profiles=measured(ARMS, smoke={"blocks": 1, "steps": 4}),
    core=False,
    figure="values",
    how=(
        "A Pre-Norm decoder of 6 blocks (width 64, 64 tokens of context, batch 8) reads source text over 300 Adam "
        "steps. Its held-out loss on 128 sequences is taken in fp64 as it is, with its gains, biases and means folded "
        "exactly into the weights beside them, and with each norm's statistics fixed to averages over 128 training "
        "sequences; and in fp32 with each norm's output rounded to 8 bits, scaled by token, and its gain to 8 bits."
    ),
    differs=(
        "the article gives no numbers; 0.02 nats is ours",
        "a small model of 300 steps: the streams of large ones have channels that stand out, which is harder on int8",
        "int8 is simulated, and of the norms alone: products stay as they are",
    ),
)
