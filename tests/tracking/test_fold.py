"""The table of a fold."""

from typing import Any

from normscale.tracking.draw import Look
from normscale.tracking.fold import table


def norm(name: str, **fate: Any) -> dict[str, Any]:
    return {"norm": name, "into": [], "affine_stays": None, "centred": False, "mean_stays": None, "gone": False} | fate


SITE = "blocks.{}.sublayers.self"
FOUND: dict[str, Any] = {
    "run": "peri-L0002-s0-x",
    "step": 40,
    "sequences": 16,
    "untied": True,
    "positions_learned": False,
    "norms": [
        *(norm(f"{SITE}.own.norm".format(i), into=[f"{SITE}.branch.qkv.weight".format(i)]) for i in range(12)),
        norm(f"{SITE}.own.out_norm".format(3), affine_stays="its output is a term of the residual sum"),
        norm("ends.norm", into=["logits"], centred=True),
    ],
    "differences": [
        {"precision": "fp32", "largest": 1e-6, "mean": 1e-7, "size": 3.0, "rounding": 2e-7, "loss": 2.5}
        | {"loss_folded": 2.50001},
        {"precision": "bf16", "largest": "NaN", "mean": "NaN", "size": 3.0, "rounding": 2e-3, "loss": 2.5}
        | {"loss_folded": "NaN"},
    ],
    "int8": {
        "unfolded": {"errors": {"blocks.0.own.a": 0.002, "ends.norm": 0.5}, "loss": 2.0, "loss_int8": 2.25},
        "folded": {"errors": {"blocks.0.own.a": 0.001, "ends.norm": 0.4}, "loss": 2.0, "loss_int8": 2.125},
    },
}


def test_norms_alike_stand_on_one_line() -> None:
    lines = table(FOUND, Look())
    assert lines[0] == "peri-L0002-s0-x, step 40: 13 of 14 norms folded whole"
    assert lines[1:5] == [
        "blocks.*.self.norm (12)",
        "    gain and bias: into blocks.*.self.qkv.weight",
        "blocks.*.self.out_norm",
        "    gain and bias stay: its output is a term of the residual sum",
    ]
    assert "the head, which was the embedding transposed, has weights of its own now" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if line}
    assert rows["fp32"] == ["1e-06", "1e-07", "2e-07", "3", "2.5", "1e-05"]
    assert rows["bf16"] == ["NaN", "NaN", "0.002", "3", "2.5", "NaN"]
    assert rows["ends.norm"] == ["0.5", "0.4"]
    assert lines[-1].split() == ["loss", "moves", "by", "0.25", "0.12"]


def test_it_fits_a_narrow_terminal_and_without_int8_says_nothing_of_it() -> None:
    lines = table(FOUND | {"int8": {}}, Look(width=50, unicode=False))
    assert all(len(line) <= 50 and line.isascii() for line in lines)
    assert not any("int8" in line for line in lines)
