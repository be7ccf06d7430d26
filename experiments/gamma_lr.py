"""The best learning rate is strongly tied to gamma.

A practitioner's article says so. In Pre-Norm a norm's gain multiplies all that a branch reads, so a step of one size,
as Adam makes it, changes the branch in proportion: gains 16 times as large ask for a rate 16 times as small, where they
are tied as closely as can be. Strongly is read as half of that in the logarithm: between gains that begin at 1/4 and at
4 the best of the rates of a sweep differs by over 4 times, in either direction, in Pre-Norm and in Post-Norm of 6
blocks. That models with gains from 1 train at 1e-3, as in all depth claims, is the control.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Shifts, Trains
from normscale.claims.protocol import DEPTH, RATE, SMOKE, STEPS, WARMUP, at_least_three

BLOCKS = 6
GAMMAS = {"quarter": 0.25, "one": 1.0, "four": 4.0}
SCHEMES = {"pre": "Pre-Norm", "post": "Post-Norm"}
ARMS = {
    f"{scheme}-{name}": {"model.scheme": scheme, "model.norm_options": {"gamma_init": gamma}}
    for scheme in SCHEMES
    for name, gamma in GAMMAS.items()
}
CELLS = {arm: {BLOCKS: 3} for arm in ARMS}
CONTROL = {f"{scheme}-one": {BLOCKS: 3} for scheme in SCHEMES}  # runs of the sweep, at RATE
FLOOR = {**{arm: {BLOCKS: 3} for arm in ARMS if not arm.endswith("one")}, **{arm: {BLOCKS: 1} for arm in CONTROL}}

CLAIM = Claim(
    id="gamma-lr",
    says="The best learning rate is strongly tied to gamma.",
    source="a practitioner's article on LayerNorm",
    family="quality",
    base={**DEPTH, "train.schedule.kind": "cosine"},
    arms=ARMS,
    labels={arm: "{}, gamma from {:g}".format(SCHEMES[arm.split("-")[0]], GAMMAS[arm.split("-")[1]]) for arm in ARMS},
    rates=(3e-4, 1e-3, 3e-3, 1e-2, 3e-2),
    control=tuple(Trains(arm, at=(BLOCKS,)) for arm in CONTROL),
    expect=tuple(Shifts(f"{scheme}-quarter", BLOCKS, than=f"{scheme}-four", by=4.0) for scheme in SCHEMES),
    profiles={
        "smoke": Profile(main={}, sweep={"pre-four": {2: 1}}, set=SMOKE),
        "cpu": Profile(main=CONTROL, sweep=CELLS, floor=FLOOR),
        "gpu": Profile(main=CONTROL, sweep=CELLS, floor=at_least_three(FLOOR)),
    },
    core=False,
    figure="sweep",
    how=(
        f"Models of {BLOCKS} blocks (width 64, 64 tokens of context, batch 8) read source text for {STEPS} Adam steps "
        f"at each of five peak rates (warm-up over {WARMUP}, then half a cosine), with the gains of all norms from "
        f"1/4, from 1 and from 4. The best rate is that of the lowest held-out loss. Models with gains from 1 "
        f"at {RATE:g} are the control."
    ),
    differs=(
        "the article gives no numbers; 4 times is ours",
        "rates are three times apart: the best is known to half of such a step, a ratio of two to a whole one, and a "
        "best rate at an end of the sweep only to a bound; the verdict reckons with both",
        "gains are trained, and move from where they begin",
    ),
)
