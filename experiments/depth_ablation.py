"""Alpha alone or beta alone is not enough.

Derived from Theorem 4.2 of the DeepNet paper, which bounds the update of an SGD step by a sum of 2N terms, each of
(v^2 + w^2) / alpha^2: with both constants O(1); with one of them, alpha^2 = sqrt(2N) or beta^2 = 1 / sqrt(8N), it is
O(sqrt N); with neither O(N). As log-log slopes 0, 1/2, 1/2 and 1. The bar of 0.25 is half-way between both and one, the
same as in update-bounded; models without gains and biases, as there, since the theorem counts the weights alone. A
run of the theorem's toy model gave 0.03, 1.2 (alpha alone), 0.52 (beta alone) and 1.05.

"Not enough" is also to be seen in training: at 24 blocks (48 sublayers), where Post-Norm dies (in Figure 6 it has
almost no BLEU at 50), alpha alone and beta alone are to die as it does, where both together train.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Dies, Slope, Trains
from normscale.claims.protocol import (
    DEPTH,
    GAP,
    PILOT,
    SLOPE_BAR,
    SMOKE,
    UPDATE,
    UPDATE_STEP,
    WEIGHTS,
    at_least_three,
    described,
    published,
)

TRAINING = described(DEPTH)

BLOCKS = 24
DEPTHS = {6: 3, 12: 3, 24: 3, 48: 2, 96: 1}
DEPTHS_GPU = {6: 3, 12: 3, 24: 3, 48: 3, 96: 3, 192: 3}
SCHEMES = {
    "both": {"model.scheme": "deepnorm"},
    "alpha": {"model.scheme": "deepnorm", "model.scheme_options": {"use": "alpha"}},
    "beta": {"model.scheme": "deepnorm", "model.scheme_options": {"use": "beta"}},
    "neither": {"model.scheme": "post"},
}
# Each keeps its update in the linear regime at every depth: twice the rate, twice the update within 4 %.
RATES = {"both": 3e-4, "alpha": 1e-5, "beta": 3e-5, "neither": 1e-6}
SGD = {**UPDATE, **WEIGHTS, "train.optim.name": "sgd", "train.schedule.warmup_steps": 0}
FLOOR = {
    "both": {BLOCKS: 1},
    **{key: {6: 1, BLOCKS: 1} for key in ("alpha", "beta", "neither")},
    **{f"{name}-sgd": {6: 2, 12: 2, 24: 2, 48: 2} for name in SCHEMES},
}
LABELS = {
    "both": "DeepNorm (alpha and beta)",
    "alpha": "alpha alone",
    "beta": "beta alone",
    "neither": "Post-Norm (neither)",
}

CLAIM = Claim(
    id="depth-ablation",
    says="DeepNorm needs both of its constants: alpha alone or beta alone is not enough.",
    source="derived from Theorem 4.2 of Wang et al. 2022 (DeepNet), arXiv:2203.00555",
    family="depth",
    base=DEPTH,
    arms={
        **SCHEMES,
        **{
            f"{name}-sgd": {**SGD, **scheme, "train.optim.lr": RATES[name], "train.eval_every": 0}
            for name, scheme in SCHEMES.items()
        },
    },
    labels={**LABELS, **{f"{name}-sgd": label for name, label in LABELS.items()}},
    control=tuple(Trains(arm, at=(6,)) for arm in ("alpha", "beta", "neither")),
    expect=(
        Slope("both-sgd", "update", step=UPDATE_STEP, side="not above", bar=SLOPE_BAR),
        Slope("alpha-sgd", "update", step=UPDATE_STEP, side="above", bar=SLOPE_BAR),
        Slope("beta-sgd", "update", step=UPDATE_STEP, side="above", bar=SLOPE_BAR),
        Slope("neither-sgd", "update", step=UPDATE_STEP, side="above", bar=SLOPE_BAR),
        Trains("both", at=(BLOCKS,)),
        Dies("alpha", at_least=BLOCKS, beside=("both",)),
        Dies("beta", at_least=BLOCKS, beside=("both",)),
        Dies("neither", at_least=BLOCKS, beside=("both",)),
    ),
    profiles={
        "smoke": Profile(
            main={
                **{key: {2: 1} for key in SCHEMES},
                **{f"{name}-sgd": {2: 1, 4: 1} for name in SCHEMES},
            },
            set=SMOKE,
        ),
        "cpu": Profile(
            main={
                "both": {BLOCKS: 3},
                "alpha": {6: 1, BLOCKS: 3},
                "beta": {6: 1, BLOCKS: 3},
                "neither": {6: 3, BLOCKS: 3},
                **{f"{name}-sgd": DEPTHS for name in SCHEMES},
            },
            low_lr={"alpha": {BLOCKS: 1}, "beta": {BLOCKS: 1}, "neither": {BLOCKS: 1}},
            floor=FLOOR,
        ),
        "gpu": Profile(
            main={
                "both": {BLOCKS: 3, 100: 3, 200: 3},
                **{key: {6: 3, BLOCKS: 3, 100: 3, 200: 3} for key in ("alpha", "beta", "neither")},
                **{f"{name}-sgd": DEPTHS_GPU for name in SCHEMES},
            },
            low_lr={key: {BLOCKS: 3, 100: 3, 200: 3} for key in ("alpha", "beta", "neither")},
            long={key: {BLOCKS: 3} for key in ("alpha", "beta")},
            floor=at_least_three(FLOOR),
        ),
    },
    figure="mixed",
    how=(
        "Four schemes: with both constants of DeepNorm, with alpha alone (every weight at its full size), with beta "
        "alone (the residual not multiplied), and with neither, which is Post-Norm. First the model update: "
        f"{UPDATE_STEP} SGD steps at a tiny learning rate, of models without gains and biases at 6 to 96 blocks, as in "
        "update-bounded; a slope above 0.25 counts as growth with depth. Then whether they train at "
        f"{BLOCKS} blocks: {TRAINING[0].lower()}{TRAINING[1:]} {GAP}"
    ),
    paper={
        "both-sgd slope at step 10": "0 (Theorem 4.2)",
        "alpha-sgd slope at step 10": "0.5 (Theorem 4.2); 1.2 (theory, exact SGD step of a toy model)",
        "beta-sgd slope at step 10": "0.5 (Theorem 4.2); 0.52 (theory, exact SGD step of a toy model)",
        "neither-sgd slope at step 10": "1 (Theorem 4.2); 1.05 (theory, exact SGD step of a toy model)",
        **published("deepnorm", BLOCKS, arm="both"),
        **published("post", BLOCKS, arm="neither"),
    },
    differs=(
        "no paper has this ablation: the exponents follow from its theorem, an upper bound, for SGD",
        "the theorem lets only the weights inside the blocks move; here the embedding and the positions move, too",
        "that either constant alone dies at 24 blocks does not follow from the theorem: its bound is 13.9 for alpha "
        "there and 6.9 for beta, which Post-Norm, at 4 a block, has at 2 to 4 blocks, where it trains",
        "training is with Adam, 120 steps of 512 tokens at width 64 and learning rate 1e-3, and for every "
        "death once at a third of it",
        PILOT,
        "one seed for the controls of alpha and beta alone, two at 48 blocks and one at 96 for the updates; no run "
        "over more steps",
    ),
)
