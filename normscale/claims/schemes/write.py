"""Measures what is missing and writes the page about schemes."""

import time
from collections.abc import Sequence
from pathlib import Path

from normscale.claims.claim import ProfileName
from normscale.claims.discover import experiments_folder, list_claims
from normscale.claims.report import gather, writable
from normscale.claims.schemes import at_init, survey
from normscale.claims.schemes.page import page
from normscale.claims.schemes.size import Size, size_of
from normscale.claims.schemes.training import train
from normscale.errors import RunFailed, StoreError
from normscale.schemes import find_scheme, scheme_names
from normscale.tracking.files import write_whole


def run_survey(runs: Path, names: Sequence[str], profile: ProfileName, budget_h: float) -> list[str]:
    """Trains what the survey of these schemes (none named: all) lacks; returns a line for each run that failed.

    Raises:
        ConfigError: there is no such scheme.
        StoreError: the folder of runs cannot be written.
    """
    return train(_known(names), runs.absolute(), profile, budget_h)


def publish_survey(runs: Path) -> list[Path]:
    """Writes the survey's compact records to experiments/results; returns the files.

    Raises:
        StoreError: the folder cannot be written.
    """
    return survey.publish(runs.absolute(), experiments_folder() / "results")


def write_schemes(
    runs: Path,
    names: Sequence[str] = (),
    reports: Path = Path("reports"),
    depths: Sequence[int] = at_init.DEPTHS,
    take: at_init.Take | None = None,
) -> Path:
    """Writes reports/schemes.html about these schemes (none named: all) and returns its path.

    Raises:
        ConfigError: there is no such scheme.
        StoreError: a folder cannot be written, or a record cannot be read.
        RunFailed: a measurement had no end; the page is written, and says which.
    """
    schemes = _known(names)
    runs, reports = runs.absolute(), reports.absolute()
    writable(reports)
    print("schemes: finding what is measured already", flush=True)
    published = experiments_folder() / "results"
    reported = gather(runs, list_claims(), published=published)
    measured = at_init.measure(schemes, runs / survey.FOLDER, depths, take)
    sizes: dict[str, Size] = {}
    for one in measured:
        if one.at:
            blocks = one.at[len(one.at) // 2].blocks
            sizes[one.scheme] = size_of(at_init.config_of(one.scheme, blocks, "sgd", runs).model)
    surveyed = survey.found(runs, published, schemes)
    text = page(measured, sizes, surveyed, reported, time.strftime("%Y-%m-%d %H:%M %Z"))
    path = reports / "schemes.html"
    try:
        write_whole(path, text)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror}); make room") from None
    if lost := [line for one in measured for line in one.lost]:
        raise RunFailed(f"{len(lost)} measurements have no result ({lost[0]}); {path} names them; start again")
    return path


def _known(names: Sequence[str]) -> list[str]:
    schemes = list(dict.fromkeys(names)) or scheme_names()
    for name in schemes:
        find_scheme(name)
    return schemes
