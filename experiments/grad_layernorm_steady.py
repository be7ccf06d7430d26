"""LayerNorm keeps the size of gradients steady over the layers; without norms those of 32 layers explode within 10.

A practitioner's article says so. Explode is read as tenfold over 10 blocks on the way down; steady as less than that,
over any 10 blocks and from the largest to the smallest block of the model. Post-Norm, Pre-Norm and DeepNorm are all
"with LayerNorm"; the article's own model and its initialisation are not known. Judged is Xavier's, as DeepNet has it
(arXiv:2203.00555, Figure 2).
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

BLOCKS = 32
LABELS = {
    "post": "Post-Norm",
    "pre": "Pre-Norm",
    "deepnorm": "DeepNorm",
    "none": "without norms, Xavier",
    "none-small": "without norms, std 0.02",
}
ARMS = {
    **{scheme: {"scheme": scheme, "norms": True} for scheme in ("post", "pre", "deepnorm")},
    "none": {"scheme": "pre", "norms": False},
    "none-small": {"scheme": "pre", "norms": False, "init": "normal"},
}
TENFOLD = 1.0  # decades

CLAIM = Claim(
    id="grad-layernorm-steady",
    says="LayerNorm keeps the size of gradients steady over the layers; without norms, at Xavier's initialisation, "
    "they explode within 10 layers.",
    source="a practitioner's article on LayerNorm",
    family="signals",
    base={"blocks": BLOCKS},
    arms=ARMS,
    labels=LABELS,
    measure="gradient_profile",
    seconds=6.0,
    numbers={
        "growth": "growth of the gradient over 10 blocks, in decades",
        "range": "largest over smallest gradient of a block, in decades",
    },
    control=(),  # with and without norms are each other's: that one is steady and the other is not is the claim
    expect=(
        *(Value(arm, "growth", below=TENFOLD) for arm in ("post", "pre", "deepnorm")),
        *(Value(arm, "range", below=TENFOLD) for arm in ("post", "pre", "deepnorm")),
        Value("none", "growth", above=TENFOLD),
    ),
    profiles=measured(ARMS, smoke={"blocks": 12}),
    core=False,
    figure="values",
    how=(
        f"A decoder of {BLOCKS} blocks of width 64 is initialised (Xavier, normal), reads 2 sequences of source text "
        "and sends the gradient of the loss back once, in fp64: without norms attention's logits outgrow the digits of "
        "fp32, and its fused backward is not finite. Of each block the norm of its weights' gradient is taken. Without "
        "norms means x' = x + F(x): every norm is replaced by the identity, the final one too."
    ),
    differs=(
        "at Xavier's initialisation; the article does not say when, with which initialisation, of what model, or how "
        "large the explosion was",
        "tenfold over 10 blocks is our reading of exploding within 10 layers",
        "an initialisation with deviation 0.02 is shown beside it and not judged",
    ),
)
