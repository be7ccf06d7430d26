"""The runs of claims as their sources have them: what each arm's numbers would be if the claim were true.

Numbers are round and written from the sources' words, not from the bars: a bar that is turned round is not met by them.
A pattern stands for arms, with their depth behind them where they are trained (`pre L24`), and the first that fits
counts. A pair is the first record of a run and its last.
"""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from math import log10
from typing import TypeVar

from normscale.claims.claim import Cell, Claim
from normscale.tracking.reader import RunRecord
from tests.claims.synthetic import measurement, record, series

STEPS = 180
Number = float | tuple[float, float]
T = TypeVar("T")

NUMBERS: dict[str, dict[str, dict[str, Number]]] = {
    "affine-useless": {"gap": {"*": 1.0}},
    "attn-scale": {
        "largest": {"none-*": 0.9, "*": 0.1},
        "entropy": {"none-*": 0.2, "*": 0.95},
        "gradient": {"none-*": 0.01, "*": 0.12},
    },
    "batchnorm-lm": {
        "gap": {"batchnorm-2x*": 0.3, "batchnorm-*": 0.5, "*": 0.9},
        "unseen_loss": {"batchnorm-2x*": 0.5, "batchnorm-*": 0.2, "*": 0.0},
    },
    "batchnorm-ranks": {"loss_apart": {"own": 0.01, "*": 0.0}},
    "branch-grows": {"branch_p50": {"*": (0.05, 0.5)}, "branch_grown": {"*": 0.8}},
    "depth-encdec": {"bleu": {"post *": 0.0, "pre *": 27.4, "*": 28.9}},  # DeepNet, Table 1, where Post-Norm diverged
    "depth-helps": {"gap": {"*-deep *": 1.1, "*-middle *": 1.0, "*": 0.9}},
    "depth-lr-sensitivity": {},
    "depth-max-lr": {  # Keel, Table 1, 64 sublayers
        "rate_tolerated": {
            "post *": 3.0e-4,
            "deepnorm*": 3.5e-4,
            "hybridnorm *": 4.9e-4,
            "mixln *": 8.6e-4,
            "pre *": 7.65e-3,
            "keel *": 1.01e-2,
        }
    },
    "depth-no-warmup": {"gap": {"*": 1.0}},
    "depth-small-batch": {},
    "dist-stats": {"statistics_apart": {"*": 0.1}},
    "dynamic-norm": {"gap": {"layernorm *": 0.9, "two *": 0.9, "*": 1.0}},
    "embed-norm": {
        "stream_first": {"pre-norm *": (1.0, 1.1), "*": (1.0, 2.0)},
        "logz_mean": {"pre-norm *": (0.0, 0.5), "*": (0.0, 3.0)},
        "gap": {"*": 1.0},
    },
    "eps-adam": {"adam_eps_share": {"* L6": 0.1, "*": 0.5}, "gap": {"eps-1e-15 *": 1.0, "*": 0.8}},
    "eps-nan": {
        "bad_rows": {"*-0": 1.0, "*": 0.0},
        "amplification": {"*-1e-5": 316.2, "*": 1e6},  # 1 / sqrt(eps)
    },
    "eps-range": {"gap": {"*-1e-5 *": 1.0, "*-1e-6 *": 1.0, "*": 0.8}},
    "eps-range-static": {
        "error": {"1e-2-outside": 0.0099, "1e-2-*": 0.005, "*": 1e-4},
        "bad_rows": {"1e-8-*": 1.0, "*": 0.0},
    },
    "final-norm": {
        "logz_mean": {"without *": (0.0, 10.0), "*": (0.0, 1.0)},
        "logz_max": {"without L6": 20.0, "without *": 50.0, "*": 5.0},
        "gap": {"without *": 0.8, "*": 1.0},
    },
    "fold-inference": {"exact": {"*": 0.0}, "learned": {"*": 0.5}, "static": {"*": 0.01}, "int8": {"*": 0.01}},
    "fp16-core": {"error": {"*-fp32-*": 1e-4, "ln-*": 1e-2, "rms-*": 5e-3}},
    "fp16-overflow": {"largest": {"article": 60.0, "*": 2.0}, "scale_error": {"*": 0.0}},
    "fp16-scaling": {"loss_scale": {"* L6": 65536.0, "*": 1024.0}, "skipped": {"* L6": 0.0, "*": 20.0}},
    "fp8": {"error": {"bf16-*": 0.002, "*-statistics": 0.06, "*-outlier": 0.1, "*": 0.03}},
    "gamma-lr": {},
    "grad-layernorm-steady": {"growth": {"none": 3.0, "*": 0.2}, "range": {"none": 3.0, "*": 0.2}},
    "growth-families": {
        "stream_growth": {"pre *": (0.5, 0.9), "lns *": 0.3, "keel *": 0.0, "deepnorm *": 0.0, "*": 0.5},
    },
    "init-std": {"gap": {"*": 1.0}},
    "ln-geometry": {
        "length_spread": {"*": 0.0},
        "unit_distance": {"centred-*": 7.0, "*": 0.0},
        "small_length": {"*": 1.0},
        "additivity": {"unit-*": 0.4, "*": 0.0},
        "collapse": {"unit-*": 0.0, "*": 2.0},
    },
    "ln-lossy": {"mean": {"ln": 0.0, "*": 1.0}, "mean_share": {"ln": 0.0, "*": 1.0}},
    "long-context": {
        "gap": {"qk-512 *": 1.1, "*": 0.9},
        "attn_logit_max": {"qk-*": (1.0, 5.0), "*": (1.0, 50.0)},
    },
    "prenorm-needs-care": {},
    "qk-logits": {"attn_logit_max": {"qk-*": (1.0, 5.0), "*": (1.0, 100.0)}, "gap": {"qk-*": 1.1, "*": 0.9}},
    "qk-logits-rate": {"rate_tolerated": {"qk *": 0.3, "*": 0.03}},
    "quality-post-over-pre": {"gap": {"pre *": 0.9, "*": 1.0}, "bleu": {"pre *": 27.0, "post *": 28.1, "*": 27.8}},
    "rms-compute": {"ln_each": {"*": 7.005}, "rms_over_ln": {"*": 0.8}},
    "rms-faster": {"ln_over_ln": {"*": 1.0}, "rms_over_ln": {"*": 0.8}, "norm_share": {"*": 0.15}},
    "rms-mean-share": {"learned": {"*": 0.5}, "share_mean": {"*": 0.01}, "share_largest": {"*": 0.02}},
    "rms-same-quality": {"gap": {"*": 1.0}},
    "softmax-precision": {"logz_mean": {"*": (0.0, 5.0)}, "gap": {"bf16-softmax *": 0.8, "*": 1.0}},
    "stale-stats": {"output_error": {"*-recompute": 0.0, "*": 0.01}},
    "vit-gradients": {"range_first": {"with": 0.5, "*": 3.0}, "range_last": {"with": 0.5, "*": 3.0}},
}
"""By claim, number and arm."""

DEATHS = {"depth-encdec": ("post", 18), "prenorm-needs-care": ("pre-hot", 200)}
"""The arm of a claim that dies, and from which depth."""

SWEPT: dict[str, dict[str, tuple[float, float]]] = {
    "depth-lr-sensitivity": {"plain L24": (3e-3, 0.6), "qk L24": (3e-3, 0.4), "*": (3e-3, 0.2)},
    "gamma-lr": {"*-quarter *": (3e-2, 0.3), "*": (1e-3, 0.3)},
}
"""The best rate of an arm, and the nats lost in a decade away from it."""


def first(patterns: Mapping[str, T], name: str) -> T:
    """Returns what the first pattern that fits has."""
    return next(value for pattern, value in patterns.items() if fnmatchcase(name, pattern))


def as_claimed(claim: Claim) -> Callable[[Cell], RunRecord]:
    """Returns a maker of the record of any of its cells."""
    numbers = NUMBERS[claim.id]

    def make(cell: Cell) -> RunRecord:
        name = f"{cell.arm} L{cell.depth}" if cell.depth else cell.arm
        found = {number: first(patterns, name) for number, patterns in numbers.items()}
        if claim.measure is not None:
            return measurement({number: value for number, value in found.items() if isinstance(value, float)})
        arm, depth = DEATHS.get(claim.id, (None, 0))
        dead, gap = cell.arm == arm and cell.depth >= depth, 0.9
        if cell.role == "sweep":
            best, lost = first(SWEPT[claim.id], name)
            gap -= lost * abs(log10(cell.lr / best))
        made = record(0.01, improves=0.002, steps=STEPS) if dead else record(gap, improves=0.1, steps=STEPS)
        for number, value in found.items():
            start, end = value if isinstance(value, tuple) else (value, value)
            made.series[number] = series({1: start, STEPS: end})
        return made

    return make
