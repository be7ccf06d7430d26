"""The last layer's gradient at initialisation: flat in depth for Post-Norm, L^-1/2 for Pre-Norm.

Xiong et al., Theorem 1: the norm of the gradient of W^2 of the last layer is at most O(d sqrt(ln d)) in a Post-Norm
model, whatever the number L of its layers, and at most O(d sqrt(ln d / L)) in a Pre-Norm model. As exponents of L: 0
and -1/2. A measured slope counts as the theorem's when its whole 95 % interval lies within 0.25 of it: half-way to the
other scheme's, so that the two ranges meet and do not overlap. The theorem bounds from above; that the bound is met
is what "is flat" and "falls as" claim.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import SlopeWithin
from normscale.claims.protocol import MODEL

DEPTHS = {6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3, 1000: 1}
DEPTHS_GPU = {6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3}
ARMS = ("post", "pre", "deepnorm")
FLOOR = {key: {6: 3, 24: 3, 100: 3} for key in ("post", "pre")}
WIDTH = 0.25  # to either side of the theorem's exponent

CLAIM = Claim(
    id="grad-init-theorem",
    says=(
        "At initialisation the gradient of the last feed-forward output matrix does not depend on depth in Post-Norm, "
        "and falls as the inverse square root of depth in Pre-Norm."
    ),
    source="Xiong et al. 2020, arXiv:2002.04745, Theorem 1",
    family="signals",
    base={
        **MODEL,
        "train.steps": 1,
        "train.batch": 2,
        "train.eval_batches": 1,
        "train.optim.lr": 1e-3,  # applied after the gradient was measured
        "probes.every": 1,
    },
    arms={arm: {"model.scheme": arm} for arm in ARMS},
    labels={"post": "Post-Norm", "pre": "Pre-Norm", "deepnorm": "DeepNorm (not in the theorem)"},
    control=(),  # Post-Norm and Pre-Norm are each other's: what cannot see a slope gives both the same
    expect=(
        SlopeWithin("post", "grad_last_out", step=1, lo=-WIDTH, hi=WIDTH),
        SlopeWithin("pre", "grad_last_out", step=1, lo=-0.5 - WIDTH, hi=-0.5 + WIDTH),
    ),
    profiles={
        "smoke": Profile(main={key: {2: 1, 4: 1} for key in ARMS}),
        "cpu": Profile(main=dict.fromkeys(ARMS, DEPTHS), floor=FLOOR),
        "gpu": Profile(main=dict.fromkeys(ARMS, DEPTHS_GPU), floor=FLOOR),
    },
    figure="slopes",
    how=(
        "A decoder-only Transformer (width 64, feed-forward 128, 2 heads) of 6 to 1000 blocks is initialised "
        "(Xavier), reads 128 bytes of source text, and sends the gradient of the loss back once. What is measured "
        "is the L2 norm of the gradient of the output matrix of its last feed-forward sublayer. A straight line "
        "through the logarithms of norm and depth gives the slope: 0 means that depth does not matter, -0.5 that "
        "four times the depth halves the gradient."
    ),
    paper={
        "post slope at step 1": "0 (Theorem 1); about 1.6 at 6-6 and at 14-14 layers (measured in the paper)",
        "pre slope at step 1": "-0.5 (Theorem 1)",
        "deepnorm slope at step 1": "-0.49 (theory, a toy model)",
    },
    differs=(
        "the theorem averages attention uniformly (queries and keys start at zero), has one token vector for each "
        "position drawn at random, ReLU, and a loss at one position; here it is a real model with softmax attention, "
        "GELU, text, and the mean loss over 128 tokens",
        "the paper measures encoder-decoder models of 6-6 to 14-14 layers; here decoder-only ones of 6 to 1000 blocks",
        "one seed at 1000 blocks, three at the others",
    ),
)
