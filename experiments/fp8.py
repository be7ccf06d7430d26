"""FP8 training puts new demands on the norm.

A practitioner's article says so and names none. Three demands that would be new beside bf16, each as a number:

- what a norm gives is coarser: rounded to e4m3 its error is over 8 times that in bf16 (e4m3 has 3 bits after the point,
  bf16 has 7: 16 times);
- statistics cannot be kept in it: with input, squares and mean in e4m3 the error is over 1.5 times that of a rounded
  input alone;
- one scale for a tensor feels outliers: with one feature 1000 times as large the error of a rounded input is over 1.5
  times that without. Both formats are looked at.

What the norms of Pre-Norm and of DeepNorm take at 6 and 48 blocks is shown beside it, and not judged: the article does
not say what schemes or depth do to it.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {
    "bf16-output": {"format": "bf16", "where": "output"},
    **{
        f"{kind}-{name}": {"format": kind, **settings}
        for kind in ("e4m3", "e5m2")
        for name, settings in (
            ("output", {"where": "output"}),
            ("input", {"where": "input"}),
            ("statistics", {"where": "statistics"}),
            ("outlier", {"where": "input", "outlier": 1000.0}),
        )
    },
    **{
        f"e4m3-{scheme}-{blocks}": {"format": "e4m3", "where": "input", "scheme": scheme, "blocks": blocks}
        for scheme in ("pre", "deepnorm")
        for blocks in (6, 48)
    },
}
SCHEMES = {"pre": "Pre-Norm", "deepnorm": "DeepNorm"}
SAID = {"output": "output", "input": "input", "statistics": "statistics", "outlier": "input with an outlier"}


def label_of(format: str, what: str, blocks: str = "") -> str:
    """Returns what an arm is called."""
    return f"{format}, {SCHEMES[what]} of {blocks} blocks" if blocks else f"{format}, {SAID[what]}"


CLAIM = Claim(
    id="fp8",
    says="FP8 puts new demands on the norm: its output, its statistics, and outliers in its input.",
    source="a practitioner's article on LayerNorm; the three demands are our reading of it",
    family="precision",
    base={"norm": "rmsnorm"},
    arms=ARMS,
    labels={arm: label_of(*arm.split("-")) for arm in ARMS},
    measure="fp8_norm",
    numbers={"error": "error against fp64", "flushed": "share of entries that become 0"},
    control=(Value("bf16-output", "error", below=2**-8),),
    expect=tuple(
        expectation
        for kind in ("e4m3", "e5m2")
        for expectation in (
            Value(f"{kind}-output", "error", above=8, than="bf16-output"),
            Value(f"{kind}-statistics", "error", above=1.5, than=f"{kind}-input"),
            Value(f"{kind}-outlier", "error", above=1.5, than=f"{kind}-input"),
        )
    ),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "256 rows of 1024 normal numbers go through RMSNorm in fp64. Rounded to fp8, with one scale for the tensor, "
        "are its output, its input, or its input and all that its statistics are made of; once with one feature 1000 "
        "times as large as the others. The error is the root of its mean square over that of the result. Beside them "
        "is what the norms of models of width 64 take of text at initialisation, rounded, where the norm with the "
        "largest error counts."
    ),
    paper={"e4m3-output over bf16-output error": "16 (3 bits after the point against 7)"},
    differs=(
        "the article names no demand and no number",
        "simulated on a CPU: values are rounded to the format, products are not run in it; nothing is trained",
        "scales are of the moment; recipes with scales of the steps before are coarser",
    ),
)
