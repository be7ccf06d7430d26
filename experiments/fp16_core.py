"""LayerNorm must compute in fp32; RMSNorm is more robust to low precision.

Two halves, as a practitioner's article has them. "Must": with its statistics in fp16 or bf16, LayerNorm's error is
more than the rounding of a bf16 number (2^-9 of it at most, so 2^-8 is the bar), already on plain rows or on rows with
a mean of 8 deviations, as the streams of trained models have; in fp32 it is below 2^-11, the rounding of fp16, on the
same rows. "More robust": RMSNorm's error is below LayerNorm's, row for row, at each of these. No source says by how
much.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

NORMS = {"ln": "layernorm", "rms": "rmsnorm"}
MEANS = {"plain": 0.0, "mean": 8.0}
DTYPES = ("fp16", "bf16", "fp32")
SAID = {"ln": "LayerNorm", "rms": "RMSNorm", "plain": "mean 0", "mean": "mean 8"}
ARMS = {
    f"{norm}-{dtype}-{kind}": {"norm": NORMS[norm], "statistics": dtype, "inputs": "fp16", "mean": MEANS[kind]}
    for norm in NORMS
    for dtype in DTYPES
    for kind in MEANS
}
LOW = [(dtype, kind) for dtype in ("fp16", "bf16") for kind in MEANS]

CLAIM = Claim(
    id="fp16-core",
    says="LayerNorm must compute its statistics in fp32; RMSNorm is more robust to low precision.",
    source="a practitioner's article on LayerNorm",
    family="precision",
    base={},
    arms=ARMS,
    labels={arm: "{}, {} statistics, {}".format(*(SAID.get(w, w) for w in arm.split("-"))) for arm in ARMS},
    measure="half_norm",
    numbers={"error": "error against fp64", "bad_rows": "share of rows with NaN or Inf"},
    control=tuple(Value(f"{norm}-fp32-{kind}", "error", below=2**-11) for norm in NORMS for kind in MEANS),
    expect=(
        *(Value(f"ln-{dtype}-{kind}", "error", above=2**-8) for dtype, kind in LOW),
        *(
            Value(f"rms-{dtype}-{kind}", "error", below=1.0, than=f"ln-{dtype}-{kind}", compare="ratio")
            for dtype, kind in LOW
        ),
    ),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "256 rows of 1024 normal numbers of deviation 1, about a mean of 0 or 8, are rounded to fp16. A norm without "
        "gain and bias is computed with every square, sum, mean and root rounded to fp16, to bf16 or to fp32 (sums by "
        "halves, then divided), and compared with the same in fp64: the root of the mean square error over that of the "
        "result. A row that is not finite counts as all wrong."
    ),
    differs=(
        "the article gives no numbers; the bars are the rounding errors of the formats",
        "roundings are simulated, operation by operation; kernels of libraries keep sums in fp32 whatever their inputs",
        "one width; the mean of 8 deviations is ours. With it the squares of a row of 1024 numbers add up to about "
        "66 560, just beyond the 65 504 that fp16 ends at: RMSNorm's fp16 error there is that of overflow and not of "
        "rounding, and comes with the width and the mean; LayerNorm takes the mean out first",
    ),
)
