"""Gamma and beta matter little in very large models.

A practitioner's article says so. Little is read as: without the bias, without the gain, and without both, the held-out
loss differs from that with both by less than 0.05 nats. At 12 blocks of Pre-Norm and of DeepNorm, and at 48 of
Pre-Norm; very large is out of reach, so that depth stands for size.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import DEPTH, GAP, RATE, WARMUP, evaluated, trained

BLOCKS, DEEP, STEPS = 12, 48, 360
SCHEMES = {"pre": "Pre-Norm", "deepnorm": "DeepNorm"}
PARTS = {
    "both": {},
    "gain": {"model.norm_options": {"bias": False}},
    "bias": {"model.norm_options": {"gain": False}},
    "none": {"model.norm_options": {"gain": False, "bias": False}},
}
SAID = {"both": "gain and bias", "gain": "gain alone", "bias": "bias alone", "none": "neither"}
ARMS = {f"{scheme}-{part}": {"model.scheme": scheme, **own} for scheme in SCHEMES for part, own in PARTS.items()}
LITTLE = 0.05


def little(scheme: str, part: str, at: int) -> Value:
    """Returns the expectation that leaving parts out changes little."""
    than = f"{scheme}-both"
    return Value(f"{scheme}-{part}", "gap", at=at, than=than, compare="difference", above=-LITTLE, below=LITTLE)


DEEPER = {arm: {BLOCKS: 3, DEEP: 3} for arm in ("pre-both", "pre-none")}

CLAIM = Claim(
    id="affine-useless",
    says="Gamma and beta matter little in very large models.",
    source="a practitioner's article on LayerNorm",
    family="quality",
    base={**DEPTH, **evaluated(STEPS)},
    arms=ARMS,
    labels={arm: "{}, {}".format(SCHEMES[arm.split("-")[0]], SAID[arm.split("-")[1]]) for arm in ARMS},
    control=tuple(Trains(f"{scheme}-both", at=(BLOCKS,)) for scheme in SCHEMES),
    expect=(
        *(little(scheme, part, BLOCKS) for scheme in SCHEMES for part in ("gain", "bias", "none")),
        little("pre", "none", DEEP),
    ),
    profiles=trained(
        main={**{arm: {BLOCKS: 3} for arm in ARMS}, **DEEPER},
        floor={**{arm: {BLOCKS: 3} for arm in ARMS}, **DEEPER},
    ),
    core=False,
    figure="values",
    numbers={"gap": "gap to the unigram entropy"},
    how=(
        f"Models of {BLOCKS} and {DEEP} blocks (width 64, 64 tokens of context, batch 8) read source text for {STEPS} "
        f"Adam steps at {RATE:g} (warm-up over {WARMUP}); only what follows each LayerNorm changes. {GAP}"
    ),
    differs=(
        "models of width 64 are not very large; depth stands for size",
        "0.05 nats, what counts as little, is ours",
        f"{STEPS} steps, in which gains move little from 1",
    ),
)
