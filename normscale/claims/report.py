"""The report of the claims: one HTML page, a Markdown text, report.json, and compact records to publish.

Everything is drawn from stored records by the judge that the runner uses too, so a report needs no GPU, no server and
no training, and can be written at any time, also while runs are missing.
"""

import json
import os
import shutil
import tempfile
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normscale.claims.claim import Claim, ProfileName
from normscale.claims.compact import Published, compact, read_published
from normscale.claims.discover import experiments_folder, list_claims
from normscale.claims.figures.drawing import draw
from normscale.claims.manifest import cells_of, left_out_of, results_of
from normscale.claims.page import markdown, page
from normscale.claims.results import Result
from normscale.claims.verdict import Judgement, judge
from normscale.errors import StoreError
from normscale.tracking.files import write_whole

LARGEST_FIRST: tuple[ProfileName, ...] = ("paper", "gpu", "cpu", "smoke")


@dataclass(frozen=True)
class Reported:
    """A claim as the report shows it; `profile` is None where it was never run."""

    claim: Claim
    profile: ProfileName | None
    judgement: Judgement
    results: list[Result]
    run_ids: list[str]
    figure: Path | None = None
    left_out: tuple[str, ...] = ()
    published: Published | None = None
    """The record that came with the code, which the rest was read from; None where the runs are here, or nothing is."""

    @property
    def command(self) -> str:
        return f"make claim CLAIM={self.claim.id} PROFILE={self.profile or 'cpu'}"

    @property
    def word(self) -> str:
        """Returns the verdict, or "smoke" for runs that only show that the code runs."""
        return "smoke" if self.profile == "smoke" else self.judgement.verdict

    @property
    def done(self) -> int:
        if self.published is not None:
            return self.published.done
        return sum(result.record is not None and result.record.finished for result in self.results)

    @property
    def lacks_runs(self) -> bool:
        """Returns whether runs are missing that the claim was to have; what a budget left out is not among them."""
        return self.done < len(self.results)

    def numbers(self) -> dict[str, Any]:
        """Returns what report.json says of the claim."""
        told = self.judgement.as_dict()
        for row in told["measured"]:
            row["paper"] = self.claim.paper.get(row["name"])
        head = {"id": self.claim.id, "says": self.claim.says, "source": self.claim.source, "profile": self.profile}
        left_out = {"left_out": list(self.left_out)} if self.left_out else {}
        runs = {"done": self.done, "of": len(self.results), **left_out}
        published = {"published": self.published.date} if self.published else {}
        return head | told | {"runs": runs, "command": self.command} | published

    def environments(self) -> list[dict[str, Any]]:
        """Returns the machines and versions that its runs saw, each once."""
        seen: list[dict[str, Any]] = list(self.published.environment) if self.published else []
        for result in self.results:
            start = result.record.start if result.record else {}
            found = {**start.get("environment", {}), "device": start.get("identity", {}).get("device")}
            if start and found not in seen:
                seen.append(found)
        return seen


@dataclass(frozen=True)
class Written:
    """A report on disk."""

    folder: Path
    claims: list[Reported]

    @property
    def page(self) -> Path:
        return self.folder / "report.html"

    def __str__(self) -> str:
        """Returns the verdicts as a table for a terminal, and where the page is."""
        return self.said([reported.claim.id for reported in self.claims])

    def said(self, ids: Sequence[str]) -> str:
        """Returns the same for some of the claims."""
        return f"{table([reported for reported in self.claims if reported.claim.id in ids])}\n\nreport   {self.page}"


def write_report(
    runs: Path,
    claims: Sequence[Claim] | None = None,
    profiles: Mapping[str, ProfileName] | None = None,
    reports: Path = Path("reports"),
    published: Path | None = None,
) -> Written:
    """Writes reports/<date-time>/ about the claims (None: all of the checkout) and points reports/latest at it.

    A claim is shown at the profile that `profiles` names, else at the largest that gave a verdict here. One that
    `profiles` does not name and that has none is shown as the folder `published` has it, and says so. With that folder
    goes the chart of which schemes train.

    Raises:
        StoreError: the reports folder cannot be written, or a manifest cannot be read.
    """
    from normscale.claims.schemes import survey  # it gathers with what is below
    from normscale.claims.schemes.chart import chart_of

    runs, reports = runs.absolute(), reports.absolute()
    listed = list_claims() if claims is None else claims
    gathered = gather(runs, listed, profiles, published)
    chart = [] if published is None else chart_of(survey.found(runs, published), gathered)
    try:
        folder = _new_folder(reports)
        shown = [_with_figure(reported, folder) for reported in gathered]
        written = Written(folder, shown)
        date = time.strftime("%Y-%m-%d %H:%M %Z")
        write_whole(folder / "report.html", page(shown, date, chart))
        write_whole(folder / "report.md", markdown(shown, date))
        told = {"t": time.time_ns() // 1_000_000, "date": date, "claims": [reported.numbers() for reported in shown]}
        write_whole(folder / "report.json", json.dumps(told, indent=1, allow_nan=False) + "\n")
        _point(reports / "latest", folder)
    except OSError as error:
        raise StoreError(
            f"{reports}: the report cannot be written ({error.strerror}); make room or the folder"
        ) from None
    return written


def publish(written: Written, results: Path | None = None) -> list[Path]:
    """Writes a compact record and the figure of every claim that was run to experiments/results; returns the files.

    One that `not_published` names is left out.

    Raises:
        StoreError: the folder cannot be written.
    """
    files = []
    results = results or experiments_folder() / "results"
    try:
        results.mkdir(parents=True, exist_ok=True)
        for reported in _run_here(written):
            if not reported.done or _kept_back(reported, results):
                continue
            path = results / f"{reported.claim.id}.json"
            write_whole(path, json.dumps(compact(reported), indent=1, allow_nan=False) + "\n")
            files.append(path)
            if reported.figure:
                files.append(Path(shutil.copyfile(reported.figure, path.with_suffix(".png"))))
    except OSError as error:
        raise StoreError(f"{results}: cannot be written ({error.strerror})") from None
    return files


def not_published(written: Written, results: Path | None = None) -> list[str]:
    """Returns a line for each claim that was run here and does not take the place of its published record."""
    results = results or experiments_folder() / "results"
    return [line for reported in _run_here(written) if (line := _kept_back(reported, results))]


def _run_here(written: Written) -> list[Reported]:
    return [one for one in written.claims if one.published is None and one.profile not in (None, "smoke")]


def _kept_back(reported: Reported, results: Path) -> str:
    """Returns why a claim's record is not to be published: it says less than it could, or than the one there is."""
    name, count, finish = reported.claim.id, len(reported.results), f"finish it: {reported.command}"
    if reported.lacks_runs:
        return f"{name} has {reported.done} of {count} runs; {finish}"
    try:
        kept = read_published(results, reported.claim)
    except StoreError:  # no record; to publish it again mends that
        return ""
    if kept is None or reported.profile is None:
        return ""
    remove = f"remove {results / name}.json"
    if LARGEST_FIRST.index(kept.profile) < LARGEST_FIRST.index(reported.profile):
        there = f"the published record is of profile {kept.profile}"
        return f"{name} was run at profile {reported.profile}, and {there}; {remove} to publish it"
    if reported.left_out and count < len(kept.results):
        why = "; ".join(reported.left_out)
        return (
            f"{name} has {count} runs ({why}), and the published record has {len(kept.results)}; {finish}, or {remove}"
        )
    return ""


def table(claims: Sequence[Reported], width: int | None = None) -> str:
    """Returns the verdicts as a table for a terminal."""
    width = width or min(120, max(60, shutil.get_terminal_size().columns))
    first = max([len(reported.claim.id) for reported in claims] + [5]) + 2
    lines = [f"{'claim':{first}}{'verdict':14}in numbers"]
    for reported in claims:
        verdict, text = reported.word, reported.judgement.headline.split(" - ", 1)[-1]
        if reported.published is not None:
            text += f" (published record of {reported.published.date})"
        wrapped = textwrap.wrap(text, max(20, width - first - 14)) or [""]
        lines.append(f"{reported.claim.id:{first}}{verdict.upper():14}{wrapped[0]}")
        lines += [" " * (first + 14) + line for line in wrapped[1:]]
    return "\n".join(lines)


def writable(reports: Path) -> None:
    """Makes the reports folder, before hours of runs find out that it cannot be.

    Raises:
        StoreError: it cannot be made or written.
    """
    try:
        reports.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=reports):
            pass
    except OSError as error:
        raise StoreError(f"{reports}: reports cannot be written there ({error.strerror}); make it writable") from None


def readable(runs: Path, claims: Sequence[Claim], published: Path) -> None:
    """Reads what a report shows of claims beside their runs, before hours of runs find out that it cannot be read.

    Raises:
        StoreError: a manifest or a published record cannot be read.
    """
    for claim in claims:
        for profile in LARGEST_FIRST:
            cells_of(runs, claim.id, profile)
        read_published(published, claim)


def gather(
    runs: Path,
    claims: Sequence[Claim],
    profiles: Mapping[str, ProfileName] | None = None,
    published: Path | None = None,
) -> list[Reported]:
    """Returns what there is of each claim, as `write_report` shows it.

    Raises:
        StoreError: a manifest or a published record cannot be read.
    """
    asked = profiles or {}
    found = [_gather(claim, runs, asked.get(claim.id)) for claim in claims]
    if published is None:
        return found
    return [
        one if claim.id in asked else _else_published(one, claim, published)
        for one, claim in zip(found, claims, strict=True)
    ]


def _gather(claim: Claim, runs: Path, profile: ProfileName | None) -> Reported:
    """Returns what there is of a claim at the largest profile that gave a verdict, else at the largest it has."""
    first: Reported | None = None
    for candidate in [profile] if profile else LARGEST_FIRST:
        found = _gather_at(claim, runs, candidate)
        if found is not None and found.judgement.verdict != "not run":
            return found
        first = first or found
    return first or Reported(claim, None, Judgement("not run", "NOT RUN - it was never started"), [], [])


def _gather_at(claim: Claim, runs: Path, profile: ProfileName) -> Reported | None:
    cells, left_out = cells_of(runs, claim.id, profile), left_out_of(runs, claim.id, profile)
    if cells:
        results = results_of(runs, cells)
        judgement = judge(claim, profile, results)
        return Reported(claim.at(profile), profile, judgement, results, [run for _, run in cells], left_out=left_out)
    if left_out:
        judgement = Judgement("not run", f"NOT RUN - {'; '.join(left_out)}")
        return Reported(claim.at(profile), profile, judgement, [], [], left_out=left_out)
    return None


def _else_published(reported: Reported, claim: Claim, folder: Path) -> Reported:
    """Returns the published record of a claim that gave no verdict here (smoke runs give none), where there is one."""
    if reported.judgement.verdict != "not run" or (found := read_published(folder, claim)) is None:
        return reported
    return Reported(
        claim.at(found.profile),
        found.profile,
        found.judgement,
        found.results,
        found.run_ids,
        found.figure,
        found.left_out,
        found,
    )


def _with_figure(reported: Reported, folder: Path) -> Reported:
    path = folder / f"{reported.claim.id}.png"
    if reported.published is not None:
        return (
            reported
            if reported.figure is None
            else replace(reported, figure=Path(shutil.copyfile(reported.figure, path)))
        )
    return replace(reported, figure=path) if draw(reported.claim, reported.results, path) else reported


def _new_folder(reports: Path) -> Path:
    stamp = time.strftime("%Y-%m-%d-%H%M%S")
    for number in range(1000):
        folder = reports / (f"{stamp}-{number}" if number else stamp)
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            if reports.exists() and not reports.is_dir():
                raise
    raise FileExistsError(17, "too many reports in one second")


def _point(link: Path, folder: Path) -> None:
    """Replaces a symbolic link in one move."""
    fresh = link.with_name(f".{link.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    os.replace(fresh, link)
