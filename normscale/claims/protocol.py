"""The protocol that the depth claims share: same settings are same runs, so that claims share them.

How many steps and tokens a run takes is said here once, with its reason, and nowhere else.
"""

from collections.abc import Mapping
from typing import Any

STEPS = 90
"""Steps of a depth run of 512 tokens each: as many as the core claims can pay for, and enough for DeepNorm and Pre-Norm
to be well below the unigram entropy at every depth that was tried."""

WARMUP = 16

SMALL_STEPS = 150
"""Steps of the runs with 128 tokens a step, which are what 1000 blocks can be paid for; all depths take as many."""

SMALL_BATCH = 2  # sequences: with 64 tokens of context 128 tokens a step

LAYER_STEPS = 120
"""Steps of the runs whose layers are looked into one by one: a block must have learnt something to be missed."""

MODEL: Mapping[str, Any] = {
    "model.N": 0,
    "model.d": 64,
    "model.heads": 4,
    "model.context": 64,
    "model.positions": "learned",  # absolute, as in the papers
    "data.source": "embedded",
}


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
    "train.optim.lr": 1e-3,
    "train.optim.betas": (0.9, 0.98),
    "train.schedule.warmup_steps": WARMUP,
}
"""A depth run: every published run of DeepNorm had a warm-up, so these have one."""

# Half of the held-out tokens of the others: an evaluation of 1000 blocks on as many would cost a quarter of the run.
SMALL: Mapping[str, Any] = {**evaluated(SMALL_STEPS), "train.batch": SMALL_BATCH, "train.eval_batches": 16}
"""What makes a depth run one of 128 tokens a step."""

SMOKE: Mapping[str, Any] = {
    **evaluated(6),
    "train.eval_batches": 1,
    "train.schedule.warmup_steps": 2,
}

DESCRIBED = (
    f"A small decoder-only Transformer (width 64, 4 heads, 64 tokens of context, batch 8) reads the source of Python's "
    f"standard library byte by byte for {STEPS} Adam steps at learning rate 1e-3 (betas 0.9 and 0.98, warm-up over "
    f"{WARMUP} steps, no clipping, fp32)."
)
GAP = (
    "The gap is the unigram entropy of the held-out text minus the held-out loss: 0 means that the model knows how "
    "often each byte occurs and nothing else."
)

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
