"""Published baselines called DeepNorm are not DeepNorm.

Four sets of constants that went by that name, read in code releases and papers, against those of Figure 2 of the paper:

- mixln: pixeli99/MixLN and lmsdss/LayerNorm-Scaling (option `deeppost`) initialise with gain (8N)^(+1/4), the sign of
  the exponent inverted, and fix alpha at 2.83, that of 32 blocks. A toy model's update grew with a slope of 0.9.
  Expected: steeper than DeepNorm's by over 0.25 (half-way to the half that one missing constant costs, as in
  update-bounded), and at 24 blocks it dies, as Post-Norm does, where DeepNorm trains. Its updates scatter by two
  decades between seeds, so the models with a single stack have more depths and seeds than the others.
- keel: Keel's baseline has beta = (2N)^(-1/4). The bound of the update goes with beta^2: 2 times DeepNorm's at every
  depth (2.2 in a toy model), with the same slope. Expected: over 1.41 times, half-way between 1 and 2 in the
  logarithm, and not steeper by over 0.25; and it still trains at 24 blocks.
- torchscale: beside a decoder its encoder has gain 1.15 (N^4 M)^(-1/16) for 0.87, that is 1.32 times. What share of the
  update is the encoder's, no source says, so any update that is larger counts.
- article: a widely read article gives two stacks alpha (2N)^(1/4) and (16 N M^2)^(1/16). The decoder's is too small,
  ever more with depth. Any update that is larger counts.

Updates are those of SGD and of models without gains and biases, as in update-bounded. That models with an encoder train
with torchscale's and the article's constants, too, is shown and not judged: no source says that they do, or do not. The
gradient of the first layer is another claim, `misinit-gradient`.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Dies, Larger, Steeper, Trains
from normscale.claims.protocol import (
    BOTH_STACKS,
    DEPTH,
    GAP,
    PILOT,
    SLOPE_BAR,
    SMOKE,
    SPAN,
    UPDATE,
    UPDATE_STEP,
    WEIGHTS,
    at_least_three,
    described,
)

TRAINING = described(DEPTH)

BLOCKS = 24
# No deeper: at 96 blocks MixLN's update after 10 steps is not linear in the rate, whether that is 1e-6, 3e-6 or 1e-5.
SCATTERED = dict.fromkeys((4, 6, 8, 12, 16, 24, 32, 48), 6)
STACKS = {3: 3, 6: 3, 12: 3, 24: 2, 48: 2}  # blocks of the encoder, and as many of the decoder
SGD = {**UPDATE, **WEIGHTS, "train.optim.name": "sgd", "train.schedule.warmup_steps": 0, "train.eval_every": 0}
TWO = {**SGD, "data.task": "copy", "data.source": "embedded", "train.optim.lr": 1e-4}
MIXLN = {"model.scheme": "deepnorm", "model.scheme_options": {"constants": "mixln"}}
KEEL = {"model.scheme": "deepnorm", "model.scheme_options": {"constants": "keel"}}
TORCHSCALE = {"model.scheme": "deepnorm", "model.scheme_options": {"constants": "torchscale"}}
ARTICLE = {"model.scheme": "deepnorm", "model.scheme_options": {"constants": "article"}}
PAPER = {"model.scheme": "deepnorm"}
TWO_STACKS = ("paper-two", "torchscale-two", "article-two")
TRAINED = {"paper-span": PAPER, "torchscale-span": TORCHSCALE, "article-span": ARTICLE}
PAIR = 18  # blocks of the encoder, and as many of the decoder, of those that train; the paper's is one of depth-encdec
FLOOR = {
    **{key: {BLOCKS: 1} for key in ("paper", "keel")},
    "mixln": {2: 1, BLOCKS: 1},
    **{key: {6: 3, 12: 3, 24: 3, 48: 3} for key in ("paper-sgd", "mixln-sgd", "keel-sgd")},
    **{key: {3: 2, 6: 2, 12: 2, 24: 2} for key in TWO_STACKS},
}

CLAIM = Claim(
    id="misinit-baselines",
    says="Published baselines called DeepNorm are not DeepNorm: their constants give other model updates.",
    source=(
        "constants of Wang et al. 2022, arXiv:2203.00555, Figure 2, against pixeli99/MixLN, lmsdss/LayerNorm-Scaling, "
        "arXiv:2601.19895 section 2.3 (Keel), microsoft/torchscale, and a widely read article"
    ),
    family="depth",
    base=DEPTH,
    arms={
        "paper": PAPER,
        "mixln": MIXLN,
        "keel": KEEL,
        "paper-sgd": {**SGD, **PAPER, "train.optim.lr": 3e-4},
        "mixln-sgd": {**SGD, **MIXLN, "train.optim.lr": 1e-6},
        "keel-sgd": {**SGD, **KEEL, "train.optim.lr": 1e-4},
        "paper-two": {**TWO, **PAPER},
        "torchscale-two": {**TWO, **TORCHSCALE},
        "article-two": {**TWO, **ARTICLE},
        **{arm: {**SPAN, **constants} for arm, constants in TRAINED.items()},
    },
    labels={
        "paper": "the paper's DeepNorm",
        "mixln": "MixLN's DeepNorm",
        "keel": "Keel's DeepNorm",
        "paper-sgd": "the paper's DeepNorm",
        "mixln-sgd": "MixLN's DeepNorm",
        "keel-sgd": "Keel's DeepNorm",
        "paper-two": "the paper's, with encoder",
        "torchscale-two": "torchscale's, with encoder",
        "article-two": "the article's, with encoder",
        "paper-span": "the paper's, with encoder",
        "torchscale-span": "torchscale's, with encoder",
        "article-span": "the article's, with encoder",
    },
    core=False,
    depth_keys=dict.fromkeys((*TWO_STACKS, *TRAINED), BOTH_STACKS),
    control=(Trains("mixln", at=(2,)),),
    expect=(
        Steeper("mixln-sgd", "paper-sgd", "update", step=UPDATE_STEP, by=SLOPE_BAR),
        Steeper("keel-sgd", "paper-sgd", "update", step=UPDATE_STEP, by=SLOPE_BAR, side="not more"),
        Larger("keel-sgd", "paper-sgd", "update", step=UPDATE_STEP, by=1.41),
        Larger("torchscale-two", "paper-two", "update", step=UPDATE_STEP, by=1.0),
        Larger("article-two", "paper-two", "update", step=UPDATE_STEP, by=1.0),
        Trains("paper", at=(BLOCKS,)),
        Trains("keel", at=(BLOCKS,)),
        Dies("mixln", at_least=BLOCKS, beside=("paper",)),
    ),
    profiles={
        "smoke": Profile(
            main={
                **{key: {2: 1} for key in ("paper", "mixln", "keel")},
                **{key: {2: 1, 4: 1} for key in ("paper-sgd", "mixln-sgd", "keel-sgd")},
                **{key: {1: 1, 2: 1} for key in TWO_STACKS},
                **{key: {2: 1} for key in TRAINED},
            },
            set=SMOKE,
        ),
        "cpu": Profile(
            main={
                "paper": {BLOCKS: 3},
                "mixln": {2: 3, 6: 3, BLOCKS: 3},
                "keel": {BLOCKS: 3},
                **dict.fromkeys(("paper-sgd", "mixln-sgd", "keel-sgd"), SCATTERED),
                **dict.fromkeys(TWO_STACKS, STACKS),
                **{key: {PAIR: 3} for key in TRAINED},
            },
            low_lr={"mixln": {BLOCKS: 1}},
            floor=FLOOR,
        ),
        "gpu": Profile(
            main={
                "paper": {BLOCKS: 3, 100: 3, 200: 3},
                "mixln": {2: 3, 6: 3, BLOCKS: 3, 100: 3, 200: 3},
                "keel": {BLOCKS: 3, 100: 3, 200: 3},
                **dict.fromkeys(("paper-sgd", "mixln-sgd", "keel-sgd"), SCATTERED),
                **{key: {**STACKS, 24: 3, 48: 3, 96: 3} for key in TWO_STACKS},
                **{key: {PAIR: 3} for key in TRAINED},
            },
            low_lr={"mixln": {BLOCKS: 3, 100: 3, 200: 3}},
            long={"mixln": {BLOCKS: 3}},
            floor=at_least_three(FLOOR),
        ),
    },
    figure="mixed",
    how=(
        f"First the model update: {UPDATE_STEP} SGD steps at a tiny learning rate, of models without gains and biases, "
        "as in update-bounded; those with an encoder learn to copy random symbols, and their depth is the blocks of "
        "each side. Compared are the slopes over depth, and the updates at equal depth and seed, as a geometric mean. "
        f"Then whether models with a single stack train at {BLOCKS} blocks: {TRAINING[0].lower()}{TRAINING[1:]} {GAP} "
        f"Models of {PAIR} blocks on each side restore cut-out spans of text, as in depth-encdec."
    ),
    paper={
        "paper-sgd slope at step 10": "0 (Theorem 4.2); 0.03 (theory, exact SGD step of a toy model)",
        "mixln-sgd slope at step 10": "0.88 (theory, exact SGD step of a toy model)",
        "keel-sgd slope at step 10": "-0.01 (theory, exact SGD step of a toy model)",
        "keel-sgd over paper-sgd at step 10": "2 (beta^2); 2.2 (theory, exact SGD step of a toy model)",
        "torchscale-two over paper-two at step 10": "between 1 and 1.75 (1.32^2, were it all the encoder's)",
        f"mixln L{BLOCKS} gap": "perplexity 1362 and 1409, the plateau, for 350M and 1B parameters (arXiv:2502.05795, "
        "Table 1); 27.2 and 22.8 for 130M and 250M",
        f"keel L{BLOCKS} gap": "trains up to a learning rate of 3.5e-4 (arXiv:2601.19895, Table 1, at 64 and 512 "
        "sublayers)",
    },
    differs=(
        "that these files made the published rows is inferred from the releases of the papers, not said in them",
        "the article only says that beta is reduced accordingly; here it is 1 / (sqrt(2) alpha), as in the rows of the "
        "paper",
        "width 64 and 120 steps of 512 tokens with Adam; the published baselines are language models of 130M to "
        "1B parameters",
        f"whether models with an encoder train is shown at {PAIR} blocks a side, and not judged; their updates have "
        "two seeds at 24 and 48 blocks",
        "a first run had 6 blocks as the control of MixLN's constants, where they were stuck too, and a slope of "
        "theirs over 6 to 48 blocks in 3 seeds that was too uncertain to decide (1.04 above DeepNorm's, -0.99 to "
        "3.06); then came the control at 2 blocks, more depths and more seeds. No expectation was changed",
        PILOT,
    ),
)
