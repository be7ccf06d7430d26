"""The protocol is the same wherever it is written down."""

from pathlib import Path

from normscale.claims.protocol import DEPTH
from normscale.config.load import load, revise
from normscale.config.schema import RunConfig

FILE = Path(__file__).parents[2] / "configs/train/depth.yaml"


def test_the_configuration_for_the_terminal_is_the_protocol() -> None:
    # Whole configurations: a key that one of the two leaves to its default is compared as well.
    ours = revise(RunConfig(), {**DEPTH, "name": "x"})
    assert load(FILE, ["name=x"]).model_dump() == ours.model_dump()
