"""Reversing: the decoder writes the random symbols that the encoder read, the last one first."""

from normscale.config.schema import RunConfig
from normscale.data.task import Task
from normscale.data.tasks import copy


def make(config: RunConfig) -> Task:
    """Returns the task, with a vocabulary of the symbols and BEGIN."""
    return copy.task_of(config, "reverse")
