"""NaN gradients usually come from a badly set epsilon.

A practitioner's article says so, without numbers. Two epsilons are badly set by common advice: 0, and 1e-12, which is
far below what fp32 resolves beside a variance of 1. "Come from" is read as: on rows that need epsilon, constant ones
(zeros for RMSNorm), the badly set one gives NaN or Inf in most rows, and 1e-5 gives none; 1 % stands for none, half for
most. Rows that vary by a millionth, and eight norms one after another, are the same question for rows that a model may
meet. What epsilon surely does is written by the algebra of one norm: a constant row's gradient is multiplied by
1 / sqrt(eps), 316 and a million times, here within 10 %.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

LABELS = {
    "ln-0": "LayerNorm, eps 0, constant rows",
    "ln-1e-12": "LayerNorm, eps 1e-12, constant rows",
    "ln-1e-5": "LayerNorm, eps 1e-5, constant rows",
    "rms-0": "RMSNorm, eps 0, rows of zeros",
    "rms-1e-12": "RMSNorm, eps 1e-12, rows of zeros",
    "rms-1e-5": "RMSNorm, eps 1e-5, rows of zeros",
    "nearly-1e-12": "LayerNorm, eps 1e-12, nearly constant rows",
    "stacked-1e-12": "8 LayerNorms, eps 1e-12, nearly constant rows",
    "stacked-1e-5": "8 LayerNorms, eps 1e-5, nearly constant rows",
    "normal": "LayerNorm, eps 1e-5, normal rows",
}
ARMS = {
    **{
        f"ln-{eps:.0e}".replace("e-0", "e-"): {"norm": "layernorm", "eps": eps, "kind": "constant"}
        for eps in (1e-12, 1e-5)
    },
    **{f"rms-{eps:.0e}".replace("e-0", "e-"): {"norm": "rmsnorm", "eps": eps, "kind": "zero"} for eps in (1e-12, 1e-5)},
    "ln-0": {"norm": "layernorm", "eps": 0.0, "kind": "constant"},
    "rms-0": {"norm": "rmsnorm", "eps": 0.0, "kind": "zero"},
    "nearly-1e-12": {"norm": "layernorm", "eps": 1e-12, "kind": "nearly"},
    "stacked-1e-12": {"norm": "layernorm", "eps": 1e-12, "kind": "nearly", "stacked": 8},
    "stacked-1e-5": {"norm": "layernorm", "eps": 1e-5, "kind": "nearly", "stacked": 8},
    "normal": {"norm": "layernorm", "eps": 1e-5, "kind": "normal"},
}
MOST, NONE = 0.5, 0.01

CLAIM = Claim(
    id="eps-nan",
    says="NaN gradients usually come from a badly set epsilon.",
    source="a practitioner's article on LayerNorm",
    family="precision",
    base={},
    arms={arm: ARMS[arm] for arm in LABELS},
    labels=LABELS,
    measure="eps_nan",
    numbers={
        "bad_rows": "share of rows with NaN or Inf",
        "amplification": "factor on the gradient",
    },
    control=(Value("normal", "bad_rows", below=NONE),),
    expect=(
        *(Value(f"{norm}-0", "bad_rows", above=MOST) for norm in ("ln", "rms")),
        *(Value(f"{arm}-1e-12", "bad_rows", above=MOST) for arm in ("ln", "rms", "nearly", "stacked")),
        *(Value(f"{arm}-1e-5", "bad_rows", below=NONE) for arm in ("ln", "rms", "stacked")),
        Value("ln-1e-5", "amplification", above=284, below=348),
        Value("ln-1e-12", "amplification", above=0.9e6, below=1.1e6),
    ),
    profiles=measured(LABELS),
    core=False,
    figure="values",
    how=(
        "64 rows of 256 numbers go through a norm without gain and bias, in fp32, and a random gradient goes back. "
        "Counted are the rows with a NaN or an Inf in value or gradient, and how much longer the gradient has become."
    ),
    paper={"ln-1e-5 amplification": "316 (1 / sqrt(eps))", "ln-1e-12 amplification": "1e6 (1 / sqrt(eps))"},
    differs=(
        "the article names no epsilon, no rows and no share: 0 and 1e-12, constant rows, and half of them are our "
        "reading",
        "rows are made for the purpose; how often a model in training has such rows is not counted here",
        "fp32 alone: in fp16 an epsilon of 1e-12 is 0",
    ),
)
