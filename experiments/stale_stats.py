"""Norm statistics may be reused over gradient accumulation.

A practitioner's article advises it: over the micro-batches of one step the statistics need not be computed again. It
gives no number; "may" is read as: the output changes by less than 5 %, as a root mean square, when the statistics are
those of the micro-batch before, position by position, or their mean over its positions. At initialisation, where a
model has not yet learnt to make its rows differ. The control takes them over from the same micro-batch, in the same
way: it must change nothing.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

NORMS = {"ln": "layernorm", "rms": "rmsnorm"}
SAID = {
    "ln": "LayerNorm",
    "rms": "RMSNorm",
    "recompute": "of the same micro-batch",
    "before": "those before",
    "average": "their mean before",
}
ARMS = {f"{s}-{r}": {"norm": norm, "reuse": r} for s, norm in NORMS.items() for r in ("recompute", "before", "average")}
LITTLE = 0.05

CLAIM = Claim(
    id="stale-stats",
    says="Norm statistics may be reused over the micro-batches of gradient accumulation.",
    source="a practitioner's article on LayerNorm",
    family="signals",
    base={},
    arms=ARMS,
    labels={arm: "{}, statistics: {}".format(*(SAID[word] for word in arm.split("-"))) for arm in ARMS},
    measure="stale_stats",
    seconds=3.0,
    numbers={"output_error": "change of the output", "scatter": "scatter of the statistics over positions"},
    control=tuple(Value(f"{norm}-recompute", "output_error", below=1e-6) for norm in NORMS),
    expect=tuple(
        Value(f"{norm}-{reuse}", "output_error", below=LITTLE) for norm in NORMS for reuse in ("before", "average")
    ),
    profiles=measured(ARMS),
    core=False,
    figure="values",
    how=(
        "A Pre-Norm model of 4 blocks of width 64 reads two micro-batches of 8 sequences of source text, at "
        "initialisation. What each of its norms takes in the second is normalised by its own statistics and by those "
        "of the first, and the outputs are compared."
    ),
    differs=(
        "the article gives no number; 5 % is ours",
        "at initialisation, and one norm at a time: errors do not add up through the model here, nor do gradients miss "
        "the part that goes through the statistics, nor is anything trained with such statistics: its loss is not seen",
    ),
)
