"""What one measurement is: a function of `normscale.measures`, its arguments and a seed. Imports no torch."""

from typing import Annotated, Any

from pydantic import Field

from normscale.config.values import Options, Positive, Section, Text, Whole, says


class MeasureConfig(Section):
    """One measurement, as a worker takes it. `seconds` is what it is thought to take; numbers do not depend on it."""

    name: Annotated[Text, says("a label for people; numbers do not depend on it")] = "measurement"
    measure: Annotated[Text, says("the file of normscale/measures that defines it")]
    arguments: Annotated[Options, says("what its function is called with")] = {}
    seed: Annotated[Whole, Field(ge=0, lt=2**31), says("of all that it draws")] = 0
    seconds: Annotated[Positive, says("about how long it takes on one core")] = 1.0
    runs: Annotated[Text, says("folder of the runs' records")] = "runs"

    def numerical(self) -> dict[str, Any]:
        """Returns what its numbers depend on, beside the sources."""
        return self.model_dump(mode="json", exclude={"name", "seconds", "runs"})
