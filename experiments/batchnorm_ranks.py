"""BatchNorm's statistics need synchronising between devices.

Beside `dist-stats`, which asks the same of LayerNorm; the survey that calls BatchNorm unsuited to language models names
its dependence on the batch, of which a rank has a share. Expected of one forward pass over 8 sequences by two ranks of
4: with each rank's own statistics the loss differs from that of one rank with all 8 by over 1e-4 of it, a thousand
times the rounding of fp32; with synchronised ones (SyncBatchNorm) by less than 1e-5.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {
    "layernorm": {"norm": "layernorm", "over": "row"},
    "own": {"norm": "batchnorm", "over": "row", "options": {"sync": False}},
    "sync": {"norm": "batchnorm", "over": "row", "options": {"sync": True}},
}

CLAIM = Claim(
    id="batchnorm-ranks",
    says="BatchNorm's statistics need synchronising between devices.",
    source="a survey of norms in language models",
    family="signals",
    base={},
    arms=ARMS,
    labels={"layernorm": "LayerNorm", "own": "BatchNorm, each rank's own", "sync": "BatchNorm, synchronised"},
    measure="two_ranks",
    seconds=15.0,
    numbers={"loss_apart": "difference of the loss on two ranks and on one"},
    control=(Value("layernorm", "loss_apart", below=1e-5),),
    expect=(Value("own", "loss_apart", above=1e-4), Value("sync", "loss_apart", below=1e-5)),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "A Pre-Norm model of 4 blocks with BatchNorm reads 8 sequences of source text on one process, and 4 on each of "
        "two (gloo), in training mode. The mean losses are compared."
    ),
    differs=("two processes of one CPU", "one forward pass at initialisation"),
)
