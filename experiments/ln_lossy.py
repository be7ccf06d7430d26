"""LayerNorm destroys the mean of its input, RMSNorm keeps it.

From an article on the evolution of norms. Measured as how much of the variance of the input's mean the best linear map
of the output explains, on rows that it was not fitted to: below 0.1 is destroyed, above 0.5 kept. Rows differ in size,
too, by a factor of up to 4, since a norm that kept the mean of rows of one size alone would keep little. The mean over
the row's RMS, which does not mind the size, stands beside it and is judged by the same bars. The control is the input
itself: its mean is there, and the same map has to find it.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {"ln": {"norm": "layernorm"}, "rms": {"norm": "rmsnorm"}, "none": {"norm": "none"}}

CLAIM = Claim(
    id="ln-lossy",
    says="LayerNorm destroys the mean of its input, RMSNorm keeps it.",
    source="a widely read article on LayerNorm, RMSNorm and DeepNorm",
    family="signals",
    base={"width": 64},
    arms=ARMS,
    labels={"ln": "LayerNorm", "rms": "RMSNorm", "none": "no norm"},
    measure="ln_lossy",
    numbers={
        "mean": "share of the mean's variance that the output tells",
        "mean_share": "share of the variance of mean over RMS that the output tells",
    },
    control=(Value("none", "mean", above=0.99),),
    expect=(
        Value("ln", "mean", below=0.1),
        Value("ln", "mean_share", below=0.1),
        Value("rms", "mean", above=0.5),
        Value("rms", "mean_share", above=0.5),
    ),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "4096 rows of 64 normal numbers about a mean of their own, of sizes from 1/2 to 2, go through the norm. A "
        "linear map is fitted from output to mean, and its R^2 is measured on 4096 other rows."
    ),
    differs=(
        "the article gives no numbers; the bars are ours",
        "a linear map looks for the mean; another might find more of it in RMSNorm's output, in LayerNorm's there is "
        "none",
    ),
)
