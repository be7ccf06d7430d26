"""With MixLN's constants for DeepNorm the first layer's gradient falls with depth as no DeepNorm's does.

The part of `misinit-baselines` that takes no training. In a toy model (uniform attention, weights alone) the gradient
of the first layer at initialisation falls as N^-0.90 over the number N of blocks with the constants of pixeli99/MixLN,
as N^-0.49 with DeepNet's and as N^-0.51 with Keel's. A measured slope counts as one of these when its whole 95 %
interval lies within 0.2 of it: half-way between MixLN's and DeepNet's, so that the two ranges do not overlap, and each
is the other's contrast. Post-Norm, whose first layer has N^-0.51 there, stands beside them and is not judged.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import SlopeWithin
from normscale.claims.protocol import FIRST_STEP, MODEL, WEIGHTS

DEPTHS = {6: 3, 12: 3, 24: 3, 48: 3, 96: 3}
SLOPES = {"paper": -0.49, "mixln": -0.90, "keel": -0.51}
WIDTH = 0.2  # to either side of the toy model's exponent
ARMS = {
    **{
        constants: {"model.scheme": "deepnorm", "model.scheme_options": {"constants": constants}}
        for constants in SLOPES
    },
    "post": {"model.scheme": "post"},
}
FLOOR = {arm: {6: 3, 24: 3, 96: 3} for arm in SLOPES}

CLAIM = Claim(
    id="misinit-gradient",
    says=(
        "Published baselines called DeepNorm are not DeepNorm: with MixLN's constants the first layer's gradient at "
        "initialisation falls as N^-0.9, with DeepNorm's as N^-1/2."
    ),
    source=(
        "constants of Wang et al. 2022, arXiv:2203.00555, Figure 2, against pixeli99/MixLN, lmsdss/LayerNorm-Scaling "
        "and arXiv:2601.19895 section 2.3 (Keel); exponents of a toy model of this project"
    ),
    family="depth",
    base={**MODEL, **WEIGHTS, **FIRST_STEP},
    arms=ARMS,
    labels={
        "paper": "the paper's DeepNorm",
        "mixln": "MixLN's DeepNorm",
        "keel": "Keel's DeepNorm",
        "post": "Post-Norm",
    },
    control=(),  # the arms are each other's: what cannot see a slope gives the same one to all
    expect=tuple(
        SlopeWithin(arm, "grad_first", step=1, lo=slope - WIDTH, hi=slope + WIDTH) for arm, slope in SLOPES.items()
    ),
    profiles={
        "smoke": Profile(main={arm: {2: 1, 4: 1} for arm in ARMS}),
        "cpu": Profile(main=dict.fromkeys(ARMS, DEPTHS), floor=FLOOR),
        "gpu": Profile(main=dict.fromkeys(ARMS, DEPTHS), floor=FLOOR),
    },
    core=False,
    figure="slopes",
    how=(
        "A decoder-only Transformer (width 64, feed-forward 128, 2 heads, no gains and biases) of 6 to 96 blocks is "
        "initialised, reads 128 bytes of source text, and sends the gradient of the loss back once. What is measured "
        "is the L2 norm of the gradient of its first sublayer. A straight line through the logarithms of norm and "
        "depth gives the slope."
    ),
    paper={f"{arm} slope at step 1": f"{slope:.2f} (theory, a toy model)" for arm, slope in SLOPES.items()}
    | {"post slope at step 1": "-0.51 (theory, a toy model)"},
    differs=(
        "the toy model's first layer is a feed-forward sublayer under uniform attention, with ReLU and a loss that is "
        "linear in the output; here it is the first attention sublayer of a model with softmax attention, on text",
        "that these files made the published rows is inferred from the releases of the papers, not said in them",
    ),
)
