"""How the sequences of a step are shared by ranks and micro-batches."""

from normscale.errors import ConfigError


def check_divides(batch: int, world: int, accumulate: int) -> None:
    """Checks that every rank and every micro-batch gets the same number of sequences.

    Raises:
        ConfigError: with the three numbers and the nearest batch that would do.
    """
    unit = world * accumulate
    if batch % unit:
        near = max(unit, round(batch / unit) * unit)
        raise ConfigError(
            f"train.batch: {batch} cannot be shared by {world} ranks x train.accumulate={accumulate}; "
            f"it must be a multiple of {unit}, the nearest is {near}"
        )
