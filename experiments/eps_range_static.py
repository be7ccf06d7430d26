"""Epsilon between 1e-6 and 1e-5 is best; larger hurts precision. The part of it that takes no training.

A practitioner's article says so. Larger hurts precision: at 1e-2 the output is off by more than a bf16 number's
rounding (2^-8), and at 1e-6 and 1e-5 by less, for rows of size 1 and for rows of size 0.02, that of a fresh embedding.
Smaller is worse: 1e-8 is 0 in fp16, so that rows of zeros give NaN, where 1e-6 and 1e-5 give none. All with eps inside
the root, as almost every model has it; outside, as in the RMSNorm authors' code, is shown beside it, and is the
control: its error at 1e-2 is what algebra says, and 1e-2 gives no NaN.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

EPS = {"1e-8": 1e-8, "1e-6": 1e-6, "1e-5": 1e-5, "1e-2": 1e-2}
SIZES = {"unit": 1.0, "embedding": 0.02}
ARMS = {
    **{
        f"{name}-{size}": {"eps": eps, "place": "inside", "scale": SIZES[size]}
        for name, eps in EPS.items()
        for size in SIZES
    },
    **{f"{name}-outside": {"eps": EPS[name], "place": "outside"} for name in ("1e-8", "1e-5", "1e-2")},
}
SAID = {"unit": "rows of size 1", "embedding": "rows of size 0.02", "outside": "outside the root, size 1"}
ROUNDING = 2**-8
GOOD = ("1e-6", "1e-5")

CLAIM = Claim(
    id="eps-range-static",
    says="Epsilon between 1e-6 and 1e-5 is best; larger hurts precision (the part that takes no training).",
    source="a practitioner's article on LayerNorm",
    family="precision",
    base={},
    arms=ARMS,
    labels={arm: f"eps {arm.rsplit('-', 1)[0]}, {SAID[arm.rsplit('-', 1)[1]]}" for arm in ARMS},
    measure="eps_error",
    numbers={"error": "error that epsilon makes", "bad_rows": "share of rows of zeros with NaN or Inf in fp16"},
    control=(
        Value("1e-2-outside", "error", above=0.0094, below=0.0104),  # 1 - 1 / (1 + 1e-2) = 0.0099
        Value("1e-2-unit", "bad_rows", below=0.01),  # what fp16 holds gives no NaN
    ),
    expect=(
        *(Value(f"1e-2-{size}", "error", above=ROUNDING) for size in SIZES),
        *(Value(f"{eps}-{size}", "error", below=ROUNDING) for eps in GOOD for size in SIZES),
        Value("1e-8-unit", "bad_rows", above=0.5),
        *(Value(f"{eps}-unit", "bad_rows", below=0.01) for eps in GOOD),
    ),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "Normal rows of 1024 numbers go through RMSNorm with and without epsilon, in fp64; rows of zeros go through it "
        "with every result rounded to fp16."
    ),
    differs=(
        "one norm alone; what epsilon does in training is another claim",
        "the article gives no measure; a bf16 number's rounding is ours",
        "fp16 statistics are simulated; libraries keep them in fp32, where 1e-8 is not 0",
    ),
)
