"""The table of what blocks are worth."""

import pytest

from normscale.tracking.draw import Look
from normscale.tracking.removal import table

FOUND = {
    "run": "pre-L0003-s0-x",
    "step": 40,
    "loss": 2.5,
    "sequences": 16,
    "run_sequences": 16,
    "blocks": [
        {"block": "decoder.0000", "angle": 0.25, "removal": 1.0},
        {"block": "decoder.0001", "angle": 0.125, "removal": None},
        {"block": "decoder.0002", "angle": 0.1, "removal": -0.01},
        {"block": "decoder.0003", "angle": "NaN", "removal": "+Inf"},
        {"block": "decoder.0004", "angle": 0.0, "removal": 0.5},
    ],
}


def test_bars_are_as_long_as_the_loss_rises() -> None:
    lines = table(FOUND, Look())
    assert lines[0] == "pre-L0003-s0-x, step 40: held-out loss 2.5 nats on 16 sequences"
    rows = {line.split()[0]: line for line in lines[2:-1]}
    assert list(rows) == ["decoder.0000", "decoder.0002", "decoder.0003", "decoder.0004"]  # those that were tried
    assert rows["decoder.0000"].count("█") == 2 * rows["decoder.0004"].count("█") > 20
    assert rows["decoder.0002"].count("█") == 0
    assert rows["decoder.0003"].endswith("\N{MULTIPLICATION SIGN}")
    assert "+Inf" in rows["decoder.0003"]
    assert lines[-1].startswith("angle of all 5 blocks")
    assert all(len(line) <= 100 for line in lines)


@pytest.mark.parametrize("width", [50, 100])
def test_what_the_loss_is_of_is_said_whole(width: int) -> None:
    lines = table(FOUND | {"run": "deepnorm-L0048-s0-0123456789", "run_sequences": 64}, Look(width))
    head = lines[: next(i for i, line in enumerate(lines) if line.startswith("without"))]
    assert " ".join(line.strip() for line in head).endswith("on 16 sequences (the run's own is of 64: --batches)")
    assert all(len(line) <= width for line in lines)


def test_it_fits_a_narrow_terminal_and_ascii() -> None:
    lines = table(FOUND, Look(width=50, unicode=False))
    assert all(len(line) <= 50 and line.isascii() for line in lines)
    assert "#" in lines[3]  # the first line takes two


def test_nothing_rises() -> None:
    blocks = [{"block": "decoder.0000", "angle": 0.5, "removal": 0.0}]
    assert table(FOUND | {"blocks": blocks}, Look())[2].split() == ["decoder.0000", "0", "0.5"]
