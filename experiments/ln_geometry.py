"""LayerNorm puts every vector on a unit sphere, and is a linear map that keeps topology.

Two articles say this about LayerNorm without gain and bias. As numbers: all outputs have one length (spread below 1 %),
that length is 1 (within 1 %), also for inputs as small as sqrt(eps); it is additive (within 1 %), and distinct inputs
have distinct outputs (x and 3 x apart by over 1 %), without which no continuous map leads back. RMSNorm stands beside
it. The controls have what is claimed: a row divided by its length is on the unit sphere, a row less its mean is a
linear map of it, and tells x from 3 x.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

ARMS = {
    f"{short}-{width}": {"norm": norm, "width": width}
    for short, norm in (("ln", "layernorm"), ("rms", "rmsnorm"))
    for width in (64, 1024)
} | {"unit-64": {"norm": "unit", "width": 64}, "centred-64": {"norm": "centred", "width": 64}}
SAID = {"ln": "LayerNorm", "rms": "RMSNorm", "unit": "divided by its length", "centred": "less its mean"}

CLAIM = Claim(
    id="ln-geometry",
    says="LayerNorm puts every vector on a unit sphere, and is a linear map that keeps topology.",
    source="two articles on normalisation: its evolution, and a practitioner's notes",
    family="signals",
    base={},
    arms=ARMS,
    labels={arm: "{}, width {}".format(SAID[arm.split("-")[0]], arm.split("-")[1]) for arm in ARMS},
    measure="ln_geometry",
    numbers={
        "length_spread": "spread of the output's length",
        "unit_distance": "distance of the output from the unit sphere",
        "small_length": "length of the output over sqrt(width), inputs of size sqrt(eps)",
        "additivity": "|Norm(x + y) - Norm(x) - Norm(y)| over |Norm(x + y)|",
        "collapse": "distance of Norm(x) and Norm(3 x)",
    },
    control=(
        Value("unit-64", "unit_distance", below=0.01),
        Value("centred-64", "additivity", below=0.01),
        Value("centred-64", "collapse", above=0.01),
    ),
    expect=tuple(
        expectation
        for arm in ("ln-64", "ln-1024")
        for expectation in (
            Value(arm, "length_spread", below=0.01),
            Value(arm, "unit_distance", below=0.01),
            Value(arm, "small_length", above=0.99),
            Value(arm, "additivity", below=0.01),
            Value(arm, "collapse", above=0.01),
        )
    ),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how="256 pairs of normal rows go through the norm without gain and bias, in fp64, with an epsilon of 1e-5.",
    paper={"ln-1024 small_length": "0.71 = 1 / sqrt(2): eps is as large as the variance (algebra)"},
    differs=(
        "the articles give no numbers; 1 % stands for rounding and for an epsilon of 1e-5",
        "a sphere of radius sqrt(width) is what the formula gives; the claim's word is unit",
        "with a gain the sphere becomes an ellipsoid, which is not looked at",
    ),
)
