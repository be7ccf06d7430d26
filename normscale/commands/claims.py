"""`normscale claim`: list, run and report claims; what they and fresh models say of each scheme."""

import argparse
import math
import os
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from normscale.commands.common import DEFAULT_RUNS, check_folder, uri_option
from normscale.errors import BadInput

SURVEY_HOURS = 0.25


def listed(options: argparse.Namespace) -> int:
    """Lists the claims."""
    from normscale.claims.discover import list_claims
    from normscale.tracking.draw import look_of

    claims, look = list_claims(), look_of(sys.stdout, os.environ)
    indent = max((len(claim.id) for claim in claims), default=0) + 2
    for claim in claims:
        wrapped = textwrap.wrap(claim.says, max(20, look.width - indent), break_on_hyphens=False)
        for i, line in enumerate(wrapped):
            print(f"{claim.id if i == 0 else '':<{indent}}{line}")
    return 0


def run(options: argparse.Namespace) -> int:
    """Runs and judges claims, or one part of them."""
    from normscale.claims.runner import planned, run_claims

    ids = [*options.words, *(["core"] if options.core else []), *(["all"] if options.all else [])]
    if not ids:
        raise BadInput(
            "claim run: no claim; name one of normscale claim list (make claims-list), or give --core or --all"
        )
    check_folder(options.runs, "--runs", made=True)
    part = None
    if options.part is not None:
        from normscale.claims.parts import part as part_of

        part = part_of(options.part)
    elif options.then_judge:
        raise BadInput("--then-judge: goes with --part; a start without that judges at its end anyway")
    if options.dry_run or os.environ.get("DRY_RUN", "") not in ("", "0"):
        how = (options.workers, part, options.hours, options.verbose)
        print("\n".join(planned(ids, options.profile, options.runs, *how)))
        return 0
    uri = None if options.uri == "null" else options.uri  # as tracking.uri=null
    with _saying_what_is_kept(), uri_option():
        if uri is not None:
            from normscale.tracking.mlflow_store import check_place

            check_place(uri)  # before anything is said
        return run_claims(
            ids,
            options.profile,
            runs=options.runs,
            uri=uri,
            workers=options.workers,
            part=part,
            then_judge=options.then_judge,
            hours=options.hours,
        )


def report(options: argparse.Namespace) -> int:
    """Writes the report from stored records."""
    from normscale.claims.discover import experiments_folder
    from normscale.claims.report import not_published, publish, write_report

    check_folder(options.runs, "--runs", made=options.runs == Path(DEFAULT_RUNS))  # a fresh checkout has none yet
    written = write_report(options.runs, published=experiments_folder() / "results")
    print(written)
    if options.publish:
        for line in not_published(written):
            print(f"not published: {line}")
        for path in publish(written):
            print(f"published {path}")
    return 0


def schemes(options: argparse.Namespace) -> int:
    """Writes the page about schemes, and measures first what is not measured yet; the survey where it is asked for."""
    check_folder(options.runs, "--runs", made=True)
    if options.hours is not None and not 0 < options.hours < math.inf:
        raise BadInput(f"--hours: {options.hours:g} pays for nothing, or never ends; give a number of hours above 0")
    if not options.survey and (options.hours is not None or options.profile is not None):
        raise BadInput("--hours and --profile: they are of the survey; give --survey, too")
    from normscale.claims.schemes.write import publish_survey, run_survey, write_schemes

    lost: list[str] = []
    with _saying_what_is_kept():
        if options.survey:
            lost = run_survey(options.runs, options.words, options.profile or "cpu", options.hours or SURVEY_HOURS)
        print(f"schemes  {write_schemes(options.runs, options.words)}")
    for path in publish_survey(options.runs) if options.publish else []:
        print(f"published {path}")
    for line in lost:
        print(f"normscale: no result: {line}", file=sys.stderr)
    return 1 if lost else 0


@contextmanager
def _saying_what_is_kept() -> Iterator[None]:
    """Says on an interruption what it leaves."""
    try:
        yield
    except KeyboardInterrupt as error:
        print(str(error) or "finished runs are kept; the same command goes on with the others", file=sys.stderr)
        raise
