"""Norm statistics need synchronising between devices.

A practitioner's article says so of LayerNorm in distributed training. If they did, the statistics of a batch divided
among two ranks that send each other nothing would differ from those of one rank: by more than rounding, 1e-3 of the
largest. The control is a statistic that does need it: the mean square over all tokens of a rank, as BatchNorm takes it.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {
    "layernorm": {"norm": "layernorm", "over": "row"},
    "rmsnorm": {"norm": "rmsnorm", "over": "row"},
    "batch": {"norm": "layernorm", "over": "batch"},
}

CLAIM = Claim(
    id="dist-stats",
    says="Norm statistics need synchronising between devices.",
    source="a practitioner's article on LayerNorm",
    family="signals",
    base={},
    arms=ARMS,
    labels={"layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "batch": "statistics over all tokens of a rank"},
    measure="two_ranks",
    seconds=15.0,
    numbers={
        "statistics_apart": "difference of the statistics on two ranks and on one",
        "bits_apart": "share of the statistics that differ in any bit",
        "loss_apart": "difference of the loss",
    },
    control=(Value("batch", "statistics_apart", above=1e-3),),
    expect=(
        Value("layernorm", "statistics_apart", above=1e-3),
        Value("rmsnorm", "statistics_apart", above=1e-3),
    ),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "A Pre-Norm model of 4 blocks reads 8 sequences of source text on one process, and 4 on each of two (gloo). "
        "The mean squares of what each norm takes are gathered and compared, token by token; nothing is "
        "synchronised."
    ),
    differs=(
        "two processes of one CPU, data parallel; where a row itself is divided (tensor parallel), its statistics "
        "have to be put together",
        "one forward pass at initialisation",
    ),
)
