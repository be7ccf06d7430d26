"""The last layer's gradient at initialisation: flat in depth for Post-Norm, L^-1/2 for Pre-Norm.

Xiong et al., Theorem 1: the norm of the gradient of W^2 of the last layer is at most O(d sqrt(ln d)) in a Post-Norm
model, whatever the number L of its layers, and at most O(d sqrt(ln d / L)) in a Pre-Norm model. As exponents of L: 0
and -1/2. A measured slope counts as the theorem's when its whole 95 % interval lies within 0.25 of it: half-way to the
other scheme's, so that the two ranges meet and do not overlap. The theorem bounds from above; that the bound is met
is what "is flat" and "falls as" claim.

The paper profile has the paper's own models, with an encoder and a decoder of 6-6 to 14-14 layers, at initialisation on
IWSLT-14 (data/iwslt14). ASSUMED, since we have not read it: every second depth between these, and the width, the batch
and the subwords of configs/train/iwslt14-10-10.yaml, without dropout and label smoothing and in fp32. A width changes
norms and not slopes.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import SlopeWithin
from normscale.claims.protocol import BOTH_STACKS, FIRST_STEP, MODEL, published_run

DEPTHS = {6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3, 1000: 1}
DEPTHS_GPU = {6: 3, 12: 3, 24: 3, 48: 3, 100: 3, 200: 3, 500: 3, 1000: 3}
ARMS = ("post", "pre", "deepnorm")
FLOOR = {key: {6: 3, 24: 3, 100: 3} for key in ("post", "pre")}
PAPER_DEPTHS = (6, 8, 10, 12, 14)
FIRST = {"train.steps": 1, "train.eval_every": 0, "train.eval_batches": 1, "train.optim.lr": 1e-3, "probes.every": 1}
PLAIN = {
    "model.dropout": 0.0,
    "train.label_smoothing": 0.0,
    "train.schedule.kind": "constant",
    "train.schedule.warmup_steps": 0,
    "precision.compute": "fp32",
}
WIDTH = 0.25  # to either side of the theorem's exponent

CLAIM = Claim(
    id="grad-init-theorem",
    says=(
        "At initialisation the gradient of the last feed-forward output matrix does not depend on depth in Post-Norm, "
        "and falls as the inverse square root of depth in Pre-Norm."
    ),
    source="Xiong et al. 2020, arXiv:2002.04745, Theorem 1",
    family="signals",
    base={**MODEL, **FIRST_STEP},
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
        "paper": Profile(
            main={arm: dict.fromkeys(PAPER_DEPTHS, 5) for arm in ("post", "pre")},  # over depths so near each other
            set={**published_run("iwslt14-10-10"), **FIRST, **PLAIN},
            depth_keys=BOTH_STACKS,
            floor={arm: dict.fromkeys(PAPER_DEPTHS, 3) for arm in ("post", "pre")},
        ),
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
        "the paper measures encoder-decoder models of 6-6 to 14-14 layers, as the paper profile does; here they are "
        "decoder-only ones of 6 to 1000 blocks",
        "one seed at 1000 blocks, three at the others",
    ),
)
