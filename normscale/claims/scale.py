"""How large a claim was run, in words: what a reader must know before comparing with the published numbers."""

from collections.abc import Collection

from normscale.claims.claim import Cell, Claim, ProfileName, run_config
from normscale.claims.results import listed
from normscale.config.schema import TASKS_OF, RunConfig


def scale_of(claim: Claim, profile: ProfileName, ran: Collection[Cell]) -> str:
    """Returns models, training, data and precision of the cells that ran; of a measurement the number of seeds.

    Of cells that the profile's grid no longer has only depth and seed are known.
    """
    seeds = _count(len({cell.seed for cell in ran}), "seed")
    if claim.measure is not None:
        return f"measured, nothing trained, over {seeds}"
    grid = claim.cells(profile) if profile in claim.profiles else []
    cells = [cell for cell in grid if cell in ran]  # these know their settings
    gone = [cell for cell in ran if cell not in grid]
    told = _settings(claim, cells) if cells else []
    if gone:
        told.append(f"{_count(len(gone), 'run')} that the claim no longer asks for, of {_depths(gone)}")
    return "; ".join([*told, f"up to {seeds}"])


def _settings(claim: Claim, cells: list[Cell]) -> list[str]:
    configs = [run_config(claim, cell, "runs", None) for cell in cells]
    models = [config.model for config in configs]
    tokens = [config.train.batch * config.model.context for config in configs]
    topologies = dict.fromkeys(
        "encoder-decoder" if model.N and model.M else "encoder" if model.N else "decoder" for model in models
    )
    tasks = dict.fromkeys(_task(config) for config in configs)
    padded = ", padding among them" if "translation" in tasks else ""
    return [
        f"{listed(topologies)} of width {_span([model.d for model in models])}, {_depths(cells)}",
        f"{_span([config.train.steps for config in configs])} steps of {_span(tokens)} tokens{padded}",
        f"data {listed(dict.fromkeys(config.data.source for config in configs))} ({listed(tasks)})",
        f"precision {listed(dict.fromkeys(config.precision.compute for config in configs))}",
    ]


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
