"""RMSNorm is 10 to 30 % faster than LayerNorm, and norms take 15 % of a step.

Two articles say so, of kernels on GPUs; the RMSNorm paper has 7 to 64 % of whole models (arXiv:1910.07467). Expected
as said: RMSNorm's time is 0.70 to 0.90 of LayerNorm's, forward and backward together; norms take 10 to 20 % of a
training step (15 % give or take a third). A part is judged for eager PyTorch and for compiled code, since the claim
names neither; in the gpu profile for the Triton kernels of this project, too. The control is the same LayerNorm in
another turn: its time over that in its own is to be 1 within 5 %, a quarter of the width of what is expected, or the
machine is too busy to tell. A norm alone takes milliseconds, and so many turns more.
"""

from collections.abc import Iterable

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Value
from normscale.claims.protocol import LEAST_SEEDS, SEEDS, SEEDS_GPU

TURNS = {"kernel": 500, "step": 25}
PORTABLE = {
    "kernel-eager": {"what": "kernel", "mode": "eager", "width": 1024, "tokens": 1024, "pairs": TURNS["kernel"]},
    "kernel-compiled": {"what": "kernel", "mode": "compiled", "width": 1024, "tokens": 1024, "pairs": TURNS["kernel"]},
    "step-eager": {"what": "step", "mode": "eager", "width": 256, "tokens": 512},
    "step-compiled": {"what": "step", "mode": "compiled", "width": 256, "tokens": 512},
}
ARMS = {
    **PORTABLE,
    "kernel-triton": {"what": "kernel", "mode": "triton", "width": 1024, "tokens": 1024, "pairs": TURNS["kernel"]},
    "step-triton": {"what": "step", "mode": "triton", "width": 256, "tokens": 512},
}
TIMES = 32  # as many tokens on a GPU, which would only wait for its next kernel otherwise


def expected(arms: Iterable[str]) -> tuple[Value, ...]:
    """Returns what the articles say, of some arms."""
    kernels, steps = ([arm for arm in arms if arm.startswith(what)] for what in ("kernel", "step"))
    return (
        *(Value(arm, "rms_over_ln", above=0.7, below=0.9) for arm in kernels),
        *(Value(arm, "norm_share", above=0.1, below=0.2) for arm in steps),
    )


def quiet(arms: Iterable[str]) -> tuple[Value, ...]:
    """Returns the control of some arms: a LayerNorm takes as long as itself."""
    return tuple(Value(arm, "ln_over_ln", above=0.95, below=1.05) for arm in arms)


CLAIM = Claim(
    id="rms-faster",
    says="RMSNorm is 10 to 30 % faster than LayerNorm; norms take 15 % of a training step.",
    source="two articles on normalisation; Zhang and Sennrich 2019, arXiv:1910.07467, for whole models",
    family="precision",
    base={},
    arms=ARMS,
    labels={
        "kernel-eager": "the norm, eager",
        "kernel-compiled": "the norm, compiled",
        "step-eager": "a step, eager",
        "step-compiled": "a step, compiled",
        "kernel-triton": "the norm, Triton",
        "step-triton": "a step, Triton",
    },
    measure="norm_time",
    seconds=40.0,
    numbers={
        "rms_over_ln": "time with RMSNorm over that with LayerNorm",
        "norm_share": "share of the step that norms take",
        "ln_over_ln": "time of LayerNorm over that in another turn",
    },
    control=quiet(PORTABLE),
    expect=expected(PORTABLE),
    profiles={
        "cpu": Profile({arm: {0: SEEDS} for arm in PORTABLE}, floor={arm: {0: LEAST_SEEDS} for arm in PORTABLE}),
        "gpu": Profile(
            {arm: {0: SEEDS_GPU} for arm in ARMS},
            floor={arm: {0: LEAST_SEEDS} for arm in ARMS},
            set={"times": TIMES},
            control=quiet(ARMS),
            expect=expected(ARMS),
        ),
        "smoke": Profile(main={arm: {0: 1} for arm in ("kernel-eager", "step-eager")}, set={"pairs": 2}),
    },
    core=False,
    figure="values",
    how=(
        "Forward and backward of one norm over 1024 rows of 1024 numbers, with gain and bias as each has them, and "
        "of a Pre-Norm model of 4 blocks of width 256 on 512 tokens: LayerNorm, RMSNorm, no norm at all, and LayerNorm "
        f"again, by turns, {TURNS['kernel']} times (the norm alone) or {TURNS['step']} (the model): the median of the "
        "ratios of each turn. The interval is over repetitions. On a "
        f"GPU there are {TIMES} times as many rows and tokens."
    ),
    paper={"kernel-eager rms_over_ln": "0.7 to 0.9 (GPU kernels); 7 to 64 % of whole models (arXiv:1910.07467)"},
    differs=(
        "one thread of a CPU where the profile is cpu; the claim is about GPUs, whose kernels are bound by memory",
        "eager mode is PyTorch's own: on a CPU its LayerNorm is one kernel and its RMSNorm a chain of them, so that "
        "the ratio there is of the two ways and not of the mean; in compiled code both are made alike",
        "other work on the machine scatters the times; turns take out most of that, not all",
        "the share of norms is of a small model; the wider it is, the smaller the share",
        "seeds are repetitions, the data of which do not matter",
    ),
)
