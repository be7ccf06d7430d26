"""Norms whose parameters depend on the input, and different norms per head or per branch, help.

A practitioner's article says so. Help is read as: a lower held-out loss than with LayerNorm everywhere. Three kinds in
Pre-Norm of 12 blocks: AdaNorm (Xu et al., arXiv:1911.07013), whose gain follows from the input; a LayerNorm of each
head's channels (as in RetNet, arXiv:2307.08621); RMSNorm in attention beside LayerNorm in feed-forward layers. And in
a model with encoder and decoder of 4 blocks each, RMSNorm in the encoder and LayerNorm in the decoder. No source says
by how much: any difference that the seeds agree on counts.
"""

from normscale.claims.claim import Claim, Profile
from normscale.claims.expect import Trains, Value
from normscale.claims.protocol import BOTH_STACKS, DEPTH, GAP, RATE, SMOKE, WARMUP, evaluated

BLOCKS, SIDE, STEPS = 12, 4, 360
TWO = {"data.task": "span", "data.noise": 0.5, "data.span": 8.0, "train.eval_batches": 8}
ARMS = {
    "layernorm": {},
    "adanorm": {"model.norm": "adanorm"},
    "heads": {"model.norm": "groupnorm"},
    "branches": {"model.norms": {"attention": "rmsnorm"}},
    "two": TWO,
    "two-sides": {**TWO, "model.norms": {"encoder": "rmsnorm"}},
}
ONE_STACK, TWO_STACKS = ("layernorm", "adanorm", "heads", "branches"), ("two", "two-sides")
CELLS = {**{arm: {BLOCKS: 5} for arm in ONE_STACK}, **{arm: {SIDE: 5} for arm in TWO_STACKS}}
FLOOR = {**{arm: {BLOCKS: 3} for arm in ONE_STACK}, **{arm: {SIDE: 3} for arm in TWO_STACKS}}

CLAIM = Claim(
    id="dynamic-norm",
    says="Norms whose parameters depend on the input, and different norms per head or per branch, help.",
    source="a practitioner's article on LayerNorm",
    family="quality",
    base={**DEPTH, **evaluated(STEPS), "model.scheme": "pre"},
    arms=ARMS,
    depth_keys=dict.fromkeys(TWO_STACKS, BOTH_STACKS),
    labels={
        "layernorm": "LayerNorm",
        "adanorm": "AdaNorm",
        "heads": "LayerNorm of each head's channels",
        "branches": "RMSNorm in attention",
        "two": "LayerNorm on both sides",
        "two-sides": "RMSNorm in the encoder",
    },
    control=(Trains("layernorm", at=(BLOCKS,)), Trains("two", at=(SIDE,))),
    expect=(
        *(
            Value(arm, "gap", at=BLOCKS, than="layernorm", compare="difference", above=0)
            for arm in ("adanorm", "heads", "branches")
        ),
        Value("two-sides", "gap", at=SIDE, than="two", compare="difference", above=0),
    ),
    profiles={
        "smoke": Profile(main={arm: {2: 1} for arm in ARMS}, set=SMOKE),
        "cpu": Profile(main=CELLS, floor=FLOOR),
        "gpu": Profile(main=CELLS, floor=FLOOR),
    },
    core=False,
    figure="values",
    numbers={"gap": "gap to the unigram entropy"},
    how=(
        f"Pre-Norm models (width 64, 2 heads, 64 tokens of context, batch 8) read source text for {STEPS} Adam steps "
        f"at {RATE:g} (warm-up over {WARMUP}): {BLOCKS} blocks of a decoder, or {SIDE} each of an encoder that reads "
        f"text with half of it cut out in spans and a decoder that writes the spans. Only the norms change. {GAP}"
    ),
    differs=(
        "the article names no norm, task or size; these four are our reading",
        "with 2 heads, a head's norm is over 32 channels",
        f"{STEPS} steps of models of width 64",
    ),
)
