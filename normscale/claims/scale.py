"""How large a claim was run, in words: what a reader must know before comparing with the published numbers."""

from normscale.claims.claim import Cell, Claim, ProfileName, run_config
from normscale.claims.results import listed
from normscale.config.schema import TASKS_OF, RunConfig


def scale_of(claim: Claim, profile: ProfileName) -> str:
    """Returns models, training, data and precision of a profile's runs; of a measurement the number of seeds."""
    cells = claim.cells(profile)
    seeds = len({cell.seed for cell in cells})
    if claim.measure is not None:
        return f"measured, nothing trained, over {_count(seeds, 'seed')}"
    configs = [run_config(claim, cell, "runs", None) for cell in cells]
    models = [config.model for config in configs]
    tokens = [config.train.batch * config.model.context for config in configs]
    topologies = dict.fromkeys(
        "encoder-decoder" if model.N and model.M else "encoder" if model.N else "decoder" for model in models
    )
    tasks = dict.fromkeys(_task(config) for config in configs)
    padded = ", padding among them" if "translation" in tasks else ""
    return "; ".join(
        [
            f"{listed(topologies)} of width {_span([model.d for model in models])}, {_depths(cells)}",
            f"{_span([config.train.steps for config in configs])} steps of {_span(tokens)} tokens{padded}",
            f"data {listed(dict.fromkeys(config.data.source for config in configs))} ({listed(tasks)})",
            f"precision {listed(dict.fromkeys(config.precision.compute for config in configs))}",
            f"up to {_count(seeds, 'seed')}",
        ]
    )


def _task(config: RunConfig) -> str:
    topology = "encoder-decoder" if config.model.N and config.model.M else "encoder" if config.model.N else "decoder"
    return config.data.task or TASKS_OF[topology][0]


def _depths(cells: list[Cell]) -> str:
    return f"{_span([cell.depth for cell in cells])} blocks"


def _span(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low}" if low == high else f"{low} to {high}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
