"""Statistics overflow in fp16 unless the input's range is limited; the "stable" LayerNorm fixes it.

The layer that a practitioner's article calls stable divides a row by its largest absolute value, normalises, and
multiplies by that value again. Expected from what it says: without it, norms in fp16 give out before inputs of size
2^8 = 256 (whose square is 65536, and fp16 ends at 65504); with it they hold out to the largest size whose rows are
representable, 2^13 for normal rows. And it is to be a LayerNorm still: a row four times as large gives the same output,
within 1 %.
"""

from normscale.claims.claim import Claim
from normscale.claims.expect import Value
from normscale.claims.protocol import measured

LABELS = {
    "layernorm": "LayerNorm",
    "rmsnorm": "RMSNorm",
    "article": 'the article\'s "stable" LayerNorm',
    "scaled": "divided by the maximum, not multiplied back",
}

CLAIM = Claim(
    id="fp16-overflow",
    says="Statistics overflow in fp16 unless inputs are limited; dividing by the row's maximum, normalising and "
    "multiplying back is a LayerNorm that does not.",
    source="a practitioner's article on LayerNorm",
    family="precision",
    base={},
    arms={form: {"form": form} for form in LABELS},
    labels=LABELS,
    measure="overflow",
    numbers={
        "largest": "log2 of the largest input size that it stands",
        "scale_error": "change of the output for inputs 4 times as large",
    },
    control=(Value("layernorm", "scale_error", below=0.01),),
    expect=(
        Value("layernorm", "largest", below=8),
        Value("rmsnorm", "largest", below=8),
        Value("article", "largest", above=12.5),
        Value("article", "scale_error", below=0.01),
    ),
    profiles=measured(LABELS),
    core=False,
    figure="values",
    how=(
        "Normal rows of 1024 numbers, of sizes from 2^-8 up to the largest that fp16 holds, go through each form "
        "with every result of an operation rounded to fp16. The largest size is the last one at which all is finite "
        "and within 5 % of the same form in fp64. Whether the output minds the scale is seen in fp64. The article's "
        "form is that of its code: the row over its maximum, over the deviation of that, times the maximum; nothing "
        "is centred."
    ),
    differs=(
        "the article shows the layer as code, without a measurement",
        "inputs are normal; with outliers norms give out at smaller sizes",
        "the fourth form, not multiplied back, is ours and is not judged",
    ),
)
