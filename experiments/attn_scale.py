"""Without 1/sqrt(d_k) the softmax of attention saturates.

From a survey of norms in language models; the reason is that of the paper that introduced it (Vaswani et al. 2017,
section 3.2.1): the variance of a logit is d_k. Saturated is read as: one key has over half of the weight, on average,
from d_k = 64 on. The control is that with the factor it is not: under half, with an entropy of over 0.8 of uniform
attention's at every d_k. The size of the softmax's Jacobian, which the paper suspects to be small, is shown.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

WIDTHS = (16, 64, 256)
ARMS = {f"{scale}-{d_k}": {"d_k": d_k, "scale": scale} for scale in ("root", "none") for d_k in WIDTHS}
SAID = {"root": "times 1/sqrt(d_k)", "none": "not scaled"}

CLAIM = Claim(
    id="attn-scale",
    says="Without 1/sqrt(d_k) the softmax of attention saturates.",
    source="a survey of norms in language models; Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1",
    family="signals",
    base={},
    arms=ARMS,
    labels={arm: "{}, d_k {}".format(SAID[arm.split("-")[0]], arm.split("-")[1]) for arm in ARMS},
    measure="attention_entropy",
    numbers={
        "entropy": "entropy of the attention over that of uniform attention",
        "largest": "largest weight",
        "gradient": "size of the softmax's Jacobian",
    },
    control=(
        *(Value(f"root-{d_k}", "largest", below=0.5) for d_k in WIDTHS),
        *(Value(f"root-{d_k}", "entropy", above=0.8) for d_k in WIDTHS),
    ),
    expect=tuple(Value(f"none-{d_k}", "largest", above=0.5) for d_k in (64, 256)),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "512 queries attend to 64 keys, all normal of unit variance, as a norm and Xavier weights make them. Entropy, "
        "largest weight and the size of the softmax's Jacobian are means over the queries."
    ),
    paper={"none-64 largest": "saturated (arXiv:1706.03762: 'extremely small gradients' for large d_k)"},
    differs=(
        "64 keys; at initialisation alone, since training can make queries and keys of any size",
        "the size of the Jacobian is a mean over queries: with the factor it is small too, since that of uniform "
        "attention over 64 keys is 1/8, and without it the queries that waver between two keys, which have up to "
        "1/2, hide the many that have almost none. A first version judged it (below half at d_k 256), which the run"
        " refuted: 0.69; 'extremely small gradients' is the paper's suspicion and not the survey's claim, and is no"
        " longer judged",
    ),
)
