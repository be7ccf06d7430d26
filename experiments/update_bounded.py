"""DeepNorm's model update does not grow with depth; Post-Norm's does.

Theorem 4.2 bounds the update of an SGD step by a sum that DeepNorm's constants make independent of depth; "we
empirically verify it works well for Adam" (section 4.3), shown in Figure 5. The bar of 0.25 lies half-way between the
theorem's slope of 0 and 0.5, which the theorem gives when every parameter moves by the same amount, as under Adam.

Each arm's learning rate keeps its update in the linear regime at every depth: twice the rate gives twice the update,
within 5 % after 10 steps (Post-Norm at 96 blocks: 1.96 with SGD, 1.95 with Adam). There the slope does not depend on
the rate.

The theorem counts the branches' weight matrices alone. A pilot showed that the gains and biases of the norms, which no
constant of DeepNorm shrinks, move the output by an amount that grows with the number of sublayers, so the arms
`weights-*` train a model without gains and biases beside the one that people train. The bar was not moved.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Slope
from normscale.claims.protocol import SLOPE_BAR, UPDATE, UPDATE_STEP, WEIGHTS, at_least_three

DEPTHS = {6: 3, 12: 3, 24: 3, 48: 2, 96: 1}
DEPTHS_GPU = {6: 3, 12: 3, 24: 3, 48: 3, 96: 3, 192: 3}
ARMS = ("post-sgd", "post-adam", "deepnorm-sgd", "deepnorm-adam", "weights-sgd", "weights-adam")
FLOOR = {key: {6: 2, 12: 2, 24: 2, 48: 2} for key in ARMS}
SGD, ADAM = {"train.optim.name": "sgd"}, {"train.optim.name": "adamw"}

CLAIM = Claim(
    id="update-bounded",
    says="The model update of DeepNorm does not grow with depth, under SGD and under Adam; Post-Norm's does.",
    source="Wang et al. 2022 (DeepNet), arXiv:2203.00555, Theorem 4.2 and Figure 5",
    family="signals",
    base=UPDATE,
    arms={
        "post-sgd": {"model.scheme": "post", **SGD, "train.optim.lr": 1e-6},
        "post-adam": {"model.scheme": "post", **ADAM, "train.optim.lr": 1e-7},
        "deepnorm-sgd": {"model.scheme": "deepnorm", **SGD, "train.optim.lr": 3e-4},
        "deepnorm-adam": {"model.scheme": "deepnorm", **ADAM, "train.optim.lr": 1e-6},
        "weights-sgd": {"model.scheme": "deepnorm", **WEIGHTS, **SGD, "train.optim.lr": 3e-4},
        "weights-adam": {"model.scheme": "deepnorm", **WEIGHTS, **ADAM, "train.optim.lr": 1e-6},
    },
    labels={
        "post-sgd": "Post-Norm (SGD)",
        "post-adam": "Post-Norm (Adam)",
        "deepnorm-sgd": "DeepNorm (SGD)",
        "deepnorm-adam": "DeepNorm (Adam)",
        "weights-sgd": "DeepNorm without gains and biases (SGD)",
        "weights-adam": "DeepNorm without gains and biases (Adam)",
    },
    control=(),  # Post-Norm and DeepNorm are each other's: that one grows and the other does not is the claim
    expect=(
        Slope("post-sgd", "update", step=UPDATE_STEP, side="above", bar=SLOPE_BAR),
        Slope("post-adam", "update", step=UPDATE_STEP, side="above", bar=SLOPE_BAR),
        Slope("deepnorm-sgd", "update", step=UPDATE_STEP, side="not above", bar=SLOPE_BAR),
        Slope("deepnorm-adam", "update", step=UPDATE_STEP, side="not above", bar=SLOPE_BAR),
        Slope("weights-sgd", "update", step=UPDATE_STEP, side="not above", bar=SLOPE_BAR),
        Slope("weights-adam", "update", step=UPDATE_STEP, side="not above", bar=SLOPE_BAR),
    ),
    profiles={
        "smoke": Profile(main={arm: {2: 1, 4: 1} for arm in ARMS}, set={"probes.update.sequences": 1}),
        "cpu": Profile(main=dict.fromkeys(ARMS, DEPTHS), floor=FLOOR),
        "gpu": Profile(main=dict.fromkeys(ARMS, DEPTHS_GPU), floor=at_least_three(FLOOR)),
    },
    figure="slopes",
    how=(
        "The same small Transformer at 6 to 96 blocks takes 10 steps with a tiny learning rate. The update is how far "
        "the last hidden state of a fixed batch has moved from where it was before training, as a norm per token. A "
        "straight line through the logarithms of update and depth gives the slope: 0 means that depth does not "
        "matter, 1 that twice the depth gives twice the update. A slope above 0.25 counts as growth. The theorem "
        "speaks of the weight matrices inside the blocks and of nothing else, and of SGD. DeepNorm without gains and "
        "biases, added after a pilot had shown DeepNorm's growth, is the trainable model nearest to that."
    ),
    paper={
        "post-sgd slope at step 1": "1.05 (theory, exact SGD step of a toy model)",
        "post-adam slope at step 1": "1.26 (theory, sign step of a toy model)",
        "weights-sgd slope at step 1": "0.03 (theory, exact SGD step of a toy model); 0 by Theorem 4.2",
        "weights-adam slope at step 1": "0.51 (theory, sign step of a toy model)",
        "post-adam slope at step 10": "about 1 (Figure 5: 0.02 to 0.2-0.47 from 6L-6L to 100L-100L)",
        "deepnorm-adam slope at step 10": "about 0.5 (Figure 5: it rises about fourfold from 6L-6L to 100L-100L)",
    },
    differs=(
        "decoder-only; Figure 5 has encoder and decoder, of the same width 64, feed-forward 128 and 2 heads",
        "10 steps at a learning rate small enough for the linear regime; the paper takes its training rate",
        "the paper shows one optimizer, Adam, although its theorem is about SGD; here both are judged",
        "the theorem lets only the weights inside the blocks move; DeepNorm without gains and biases also trains the "
        "embedding (which is the output matrix, too) and the learned positions. In a trial with 4 heads and a "
        "feed-forward of 256, 76 % of the update of 6 blocks came from them with SGD and 6 % with Adam; held fixed "
        "(one seed) they left the slopes as they were: -0.035 instead of -0.033 with SGD, 0.48 instead of 0.46 with "
        "Adam",
        "two seeds at 48 blocks and one at 96",
    ),
)
