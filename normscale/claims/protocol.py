"""The protocol that the depth claims share: same settings are same runs, so that claims share them.

How many steps and tokens a run takes is said here once, with its reason, and nowhere else.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from normscale.claims.claim import Grid, Profile, ProfileName
from normscale.claims.discover import experiments_folder
from normscale.config.load import load

STEPS = 120
"""Steps of a depth run of 512 tokens each: as many as the core claims can pay for. Of 90 steps at 7e-4, with a warm-up
of 16, most dying runs were still moving at the end (see `PILOT`)."""

WARMUP = 30
RATE = 1e-3

SMALL_STEPS = 300
"""Steps of the runs with 128 tokens a step, which are what 1000 blocks can be paid for; all depths take as many, with a
rate that falls to 0 as half a cosine, since steps of so few tokens are noisy. By pilots (see `PILOT`)."""

SMALL_RATE = 5e-4
"""Of the runs with 128 tokens a step: the rate of DeepNet's own 1000-layer model, on OPUS-100."""

SMALL_WARMUP = 40

SMALL_BATCH = 2  # sequences: with 64 tokens of context 128 tokens a step

ENCODER_STEPS = 210
"""Steps of an encoder, which is asked for 30 % of the bytes only and so learns more slowly."""

LAYER_STEPS = 120
"""Steps of the runs whose layers are looked into one by one: a block must have learnt something to be missed."""

MODEL: Mapping[str, Any] = {
    "model.N": 0,
    "model.d": 64,
    "model.ffn": 128,
    "model.heads": 2,
    "model.context": 64,
    "model.positions": "learned",  # absolute, as in the papers
    "data.source": "embedded",
}
"""Width 64, feed-forward 128, 2 heads: the geometry of DeepNet's Figure 5, its own tiny model."""


def evaluated(steps: int) -> dict[str, Any]:
    """Returns the settings of so many steps, with a held-out loss after each third of them.

    The judge of standing still looks at the last third.
    """
    return {"train.steps": steps, "train.eval_every": max(1, steps // 3)}


DEPTH: Mapping[str, Any] = {
    **MODEL,
    **evaluated(STEPS),
    "train.batch": 8,
    "train.eval_batches": 4,
    "train.optim.name": "adamw",
    "train.optim.lr": RATE,
    "train.optim.betas": (0.9, 0.98),
    "train.schedule.warmup_steps": WARMUP,
}
"""A depth run: every published run of DeepNorm had a warm-up, so these have one."""

# As many held-out tokens as the others.
SMALL: Mapping[str, Any] = {
    **evaluated(SMALL_STEPS),
    "train.batch": SMALL_BATCH,
    "train.eval_batches": 16,
    "train.optim.lr": SMALL_RATE,
    "train.schedule.kind": "cosine",
    "train.schedule.warmup_steps": SMALL_WARMUP,
}
"""What makes a depth run one of 128 tokens a step."""

ENCODER: Mapping[str, Any] = {
    **evaluated(ENCODER_STEPS),
    "train.eval_batches": 8,
    "model.M": 0,
    "model.positions": "rope",
    "data.task": "mlm",
    "data.noise": 0.3,
}
"""What makes a depth run one of an encoder alone, on masked bytes; its depth is `model.N`."""

SPAN_STEPS = 240

SPAN: Mapping[str, Any] = {
    **evaluated(SPAN_STEPS),
    "train.eval_batches": 8,
    "data.task": "span",
    "data.noise": 0.5,
    "data.span": 8.0,
}
"""What makes a depth run one of an encoder and a decoder, on cut-out spans of text; its depth is that of both."""

SMOKE: Mapping[str, Any] = {**evaluated(6), "train.eval_batches": 1, "train.schedule.warmup_steps": 2}


RAMP_STEPS, RAMP_TOP = 1000, 5e-2


def ramp(steps: int) -> dict[str, Any]:
    """Returns a rate that rises in a line over so many steps, and a hundred evaluations."""
    return {"train.steps": steps, "train.schedule.warmup_steps": steps, "train.eval_every": steps // 100}


RAMP: Mapping[str, Any] = {
    **DEPTH,
    **ramp(RAMP_STEPS),
    "train.optim.lr": RAMP_TOP,
    "train.eval_batches": 2,
    "probes.every": 10,
    "probes.profiles": False,
}
"""A run whose rate rises until it fails: Keel's protocol (arXiv:2601.19895, section 5.1) with a fifth of its steps."""

RAMP_PUBLISHED: Mapping[str, Any] = {
    **ramp(5000),
    "train.eval_every": 5,  # every 5e-5 of rate: published ones lie as near each other
    "train.optim.betas": (0.9, 0.95),
    "train.optim.weight_decay": 0.01,
    "train.optim.clip": 1.0,
}
"""What makes a ramp Keel's own, but for the size of the model."""

RAMPED = "rate_tolerated"
"""The number of such a run: see `claims.derived`."""

RAMP_NUMBERS: Mapping[str, str] = {RAMPED: "largest tolerable learning rate"}


def described(protocol: Mapping[str, Any]) -> str:
    """Returns a depth run under a protocol as a sentence."""
    return (
        "A small decoder-only Transformer (width 64, feed-forward 128, 2 heads, 64 tokens of context, batch 8) reads "
        f"the source of Python's standard library byte by byte for {protocol['train.steps']} Adam steps at learning "
        f"rate {protocol['train.optim.lr']:g} (betas 0.9 and 0.98, warm-up over "
        f"{protocol['train.schedule.warmup_steps']} steps, no clipping, fp32)."
    )


DESCRIBED = described(DEPTH)
PILOT = (
    "learning rates and step counts come from pilots and from complete runs of the claims, which saw the outcome. At "
    "90 steps and 7e-4 with a warm-up of 16, DeepNorm of 200 blocks was 0.17 and 0.26 nats below the unigram entropy, "
    "and Post-Norm of 24 blocks was stuck in 1 of 3 seeds and still moving in 2; at 120 steps, 1e-3 and a warm-up of "
    "30, DeepNorm and Pre-Norm of 200 blocks were 0.41 and 0.38 below. 1000 blocks of DeepNorm with 128 tokens a step "
    "are at the edge from 7e-4 on: with a rate falling to 0 they were 0.17 below after 150 steps from 1e-3, 0.197 "
    "after 231, and fell back to the entropy (-0.02) in 300; from 7e-4 they were 0.18 below after 231 steps, and "
    "after 300 steps 0.21 below on one processor and at the entropy (-0.02) on another, whose products round "
    "differently. From 5e-4, the rate of the paper's own 1000-layer model, a pilot was 0.32 below after 400 steps, "
    "which is why the rate is now 5e-4. At 512 tokens a step, twice the cost, they were 0.09 below after 80 steps "
    "from 1e-3 and from 5e-4. No expectation was changed"
)
GAP = (
    "The gap is the unigram entropy of the held-out text minus the held-out loss: 0 means that the model knows how "
    "often each byte occurs and nothing else."
)

PUBLISHED: Mapping[str, Mapping[int, str]] = {
    "post": {
        12: "28.1 BLEU at 6L-6L, 30 sublayers (Table 1)",
        24: "about 4 BLEU at 10L-10L, 50 sublayers (Figure 6)",
        48: "diverged at 18L-18L, 90 sublayers (Table 1)",
    },
    "pre": {
        12: "27.0 BLEU at 6L-6L, 30 sublayers (Table 1)",
        48: "28.1 BLEU at 18L-18L, 90 sublayers (Table 1)",
        100: "28.0 BLEU at 50L-50L, 250 sublayers (Table 1)",
        200: "27.4 BLEU at 100L-100L, 500 sublayers (Table 1)",
    },
    "deepnorm": {
        12: "27.8 BLEU at 6L-6L, 30 sublayers (Table 1)",
        24: "29.8 BLEU at 10L-10L, 50 sublayers (Figure 6)",
        48: "28.8 BLEU at 18L-18L, 90 sublayers (Table 1)",
        100: "29.0 BLEU at 50L-50L, 250 sublayers (Table 1)",
        200: "28.9 BLEU at 100L-100L, 500 sublayers (Table 1)",
    },
}
"""DeepNet's results (arXiv:2203.00555) by scheme and by the decoder-only depth that has about as many sublayers."""


def published(scheme: str, *depths: int, arm: str | None = None) -> dict[str, str]:
    """Returns the published results of a scheme at some depths, by the name of the measured gap of its arm."""
    return {f"{arm or scheme} L{depth} gap": PUBLISHED[scheme][depth] for depth in depths}


FIRST_STEP: Mapping[str, Any] = {
    "train.steps": 1,
    "train.batch": 2,
    "train.eval_batches": 1,
    "train.optim.lr": 1e-3,  # applied after the gradient was measured
    "probes.every": 1,
}
"""What makes a run one that measures the gradient at initialisation and little else."""

UPDATE_STEP = 10

UPDATE: Mapping[str, Any] = {
    **MODEL,
    "train.steps": UPDATE_STEP,
    "train.batch": 8,
    "train.eval_batches": 1,
    "train.optim.betas": (0.9, 0.98),
    "probes.every": UPDATE_STEP,
    "probes.profiles": False,
    "probes.update.steps": (1, UPDATE_STEP),
}
"""A run that measures the model update, in the linear regime: few steps at a tiny learning rate."""

SLOPE_BAR = 0.25
"""Half-way between 0, which Theorem 4.2 of arXiv:2203.00555 gives DeepNorm, and 1/2, which it gives where only one leg
of it is kept, and for steps of one size in every parameter."""

WEIGHTS: Mapping[str, Any] = {"model.bias": False, "model.norm_options": {"gain": False, "bias": False}}
"""No gains and biases: the theorem counts the weight matrices of the branches alone."""


def at_least_three(grid: Grid) -> Grid:
    """Returns the grid with three seeds of each cell, or more where it has more."""
    return {arm: {depth: max(LEAST_SEEDS, n) for depth, n in depths.items()} for arm, depths in grid.items()}


def trained(
    main: Grid,
    floor: Grid,
    *,
    low_lr: Grid | None = None,
    gpu: Grid | None = None,
    low_lr_gpu: Grid | None = None,
    long_gpu: Grid | None = None,
) -> dict[ProfileName, Profile]:
    """Returns the profiles of a claim about trained models; on a GPU as on a CPU unless a grid of its own is given.

    There every cell has three seeds and more.
    """
    return {
        "smoke": Profile(main={arm: {2: 1} for arm in main}, set=SMOKE),
        "cpu": Profile(main, low_lr or {}, floor=floor),
        "gpu": Profile(
            at_least_three(gpu or main),
            at_least_three(low_lr_gpu or low_lr or {}),
            at_least_three(long_gpu or {}),
            floor=at_least_three(floor),
        ),
    }


SEEDS, SEEDS_GPU, LEAST_SEEDS = 5, 10, 3
"""Of a measurement, which takes seconds; three are the least that an interval over seeds is worth anything with."""


def measured(arms: Iterable[str], smoke: Mapping[str, Any] | None = None) -> dict[ProfileName, Profile]:
    """Returns the profiles of a claim that is measured and not trained: every arm, over so many seeds.

    `smoke` are arguments that make it quick.
    """
    arms = list(arms)
    grids: dict[int, Grid] = {n: {arm: {0: n} for arm in arms} for n in (1, LEAST_SEEDS, SEEDS, SEEDS_GPU)}
    return {
        "smoke": Profile(main=grids[1], set=smoke or {}),
        "cpu": Profile(main=grids[SEEDS], floor=grids[LEAST_SEEDS]),
        "gpu": Profile(main=grids[SEEDS_GPU], floor=grids[LEAST_SEEDS]),
    }


CRAWL: Mapping[str, Any] = {
    "data.source": "data/c4/train.jsonl",
    "data.max_bytes": 4_000_000_000,  # all that is read of it is held in memory
    "data.held_out": 0.001,
}
"""C4, which is not part of the project: lines of JSON whose `text` is a page. Its bytes stand for papers' subwords."""

CURSE_130M: Mapping[str, Any] = {
    **CRAWL,
    **evaluated(20_000),
    "model.d": 768,
    "model.ffn": 2048,
    "model.heads": 12,
    "model.context": 256,
    "model.norm": "rmsnorm",
    "model.positions": "rope",
    "model.activation": "swiglu",
    "model.bias": False,
    "model.tied": False,
    "train.batch": 512,
    "train.accumulate": 4,
    "train.optim.lr": 1e-3,
    "train.optim.betas": (0.9, 0.999),
    "train.schedule.kind": "cosine",
    "train.schedule.floor": 0.1,
    "train.schedule.warmup_steps": 2000,
    "precision.compute": "bf16",
}
"""The 130M model of the Curse of Depth (arXiv:2502.05795), which has 12 blocks: C4, Adam, 1e-3, 512 sequences a step,
20 000 steps with 2000 of warm-up, bf16, no clipping, LLaMA's block. ASSUMED, since we have not read it in the paper:
the sizes of 768, 2048, 12 and 256, Adam's averages, and half a cosine to a tenth."""
CURSE_BLOCKS = 12

BOTH_STACKS = ("model.N", "model.M")
"""Where the depth of a model with encoder and decoder goes: N-N blocks."""


@cache
def published_run(name: str) -> Mapping[str, Any]:
    """Returns every setting of a file of configs/train, but the scheme and what no number depends on.

    The file says what of it is the paper's.
    """
    sections = load(experiments_folder().parent / "configs" / "train" / f"{name}.yaml").numerical()
    kept = {section: sections[section] for section in ("model", "data", "train", "precision")}
    flat = _dotted(kept)
    return {key: value for key, value in flat.items() if not key.startswith("model.scheme")}


def _dotted(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Returns the leaves by dotted key; the options of schemes and norms are one leaf each."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        whole = not isinstance(value, Mapping) or key.endswith("options") or key == "norms"
        flat |= {above + key: value} if whole else _dotted(value, f"{above}{key}.")
    return flat
