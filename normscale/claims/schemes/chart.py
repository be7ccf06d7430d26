"""The recommendation chart: for each depth and precision, which schemes train, by the margin that records give."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, get_args

from normscale.claims.html import table
from normscale.claims.results import listed
from normscale.claims.schemes.rates import risen
from normscale.claims.schemes.records import Ran, Square, each_once, runs_of, square, step_time
from normscale.config.precision import Compute
from normscale.tracking.record import TRAINED_NATS

if TYPE_CHECKING:
    from normscale.claims.report import Reported

STYLE = """
.chart td,.chart th{text-align:center;white-space:nowrap} .chart td:first-child,.chart th:first-child{text-align:left}
.square{display:block;border-radius:4px;padding:.1rem .3rem;min-width:3.6rem}
.trains{background:var(--good-soft)} .mixed{background:var(--open-soft)} .fails{background:var(--bad-soft)}
.square.undecided{background:var(--soft);color:inherit}
.square small{display:block;color:var(--quiet)} .best{outline:2px solid var(--good)}
@media (max-width:600px){.chart table{font-size:.66rem} .chart td,.chart th{padding:.15rem 1px}
.chart .square{min-width:0;padding:.1rem 0} .chart .sign{display:block}}
"""
SIGNS = {"trains": "\u2713", "mixed": "~", "undecided": "?", "fails": "\u2717"}
LEGEND = (
    "\u2713 trains in every seed, ~ in some, \u2717 in none, where what does not is stuck or has diverged; ? where a "
    "seed has neither trained nor come to rest within its steps"
)


def chart_of(surveyed: Sequence["Reported"], reported: Sequence["Reported"]) -> list[str]:
    """Returns the chart of all schemes that have a record, for a report of claims; nothing where none has."""
    runs = each_once([*runs_of(surveyed), *runs_of(reported)])
    schemes = sorted({ran.place.scheme for ran in runs})
    if not schemes:
        return []
    told = "<p><code>make schemes</code> writes a page about each.</p>"
    tables = [survey_table(surveyed, schemes, linked=False), chart(runs, schemes, linked=False)]
    return ["<h2>Which schemes train, at which depth and precision</h2>", told, *tables]


def survey_table(surveyed: Sequence["Reported"], schemes: Sequence[str], linked: bool = True) -> str:
    """Returns the survey: a row for each scheme, a column for each precision and depth, rate and time behind them.

    Empty where there is no record of it. `linked` schemes lead to their sections, which the page must have.
    """
    runs = runs_of(surveyed)
    places = {(ran.place.precision, ran.cell.depth) for ran in runs}
    columns = [place for word in get_args(Compute) for place in sorted(places) if place[0] == word]
    rates = {scheme: risen(surveyed, scheme) for scheme in schemes}
    if not columns and not any(rates.values()):
        return f"<p>{_survey_command('No record of the survey')}</p>"
    squares = {scheme: _by_column(runs, scheme) for scheme in schemes}
    best = {place: _best([own[place] for own in squares.values() if place in own]) for place in columns}
    rows = []
    for scheme in schemes:
        cells = [_cell(squares[scheme].get(place), best[place]) for place in columns]
        beside = "1" if scheme == "pre" else "" if (time := step_time(runs, scheme)) is None else f"{time[0]:.2f}"
        rows.append([_name(scheme, linked), *cells, "; ".join(one.said for one in rates[scheme]), beside])
    head = ["", *[f"{precision}, {depth}" for precision, depth in columns], "largest rate", "step / pre's"]
    return f'{_survey_reading(surveyed)}<div class="chart">{table(head, rows)}</div>'


def _by_column(runs: Sequence[Ran], scheme: str) -> dict[tuple[str, int], Square]:
    return {
        (precision, depth): one
        for (_, precision), own in squares_of(runs, scheme).items()
        for depth, one in own.items()
    }


def _survey_command(what: str) -> str:
    return f"{what}: <code>make schemes ARGS=--survey</code> trains it, and says first what that takes."


def _survey_reading(surveyed: Sequence["Reported"]) -> str:
    seeds = max(len({result.cell.seed for result in one.results}) for one in surveyed)
    how = " ".join(one.claim.how for one in surveyed)
    return (
        f"<p>Every scheme under one protocol, which is none of theirs, with {seeds} seed{'s' * (seeds != 1)}. "
        f"{escape(how)} Columns are precision and number of blocks. The margin is how far, in nats, the worst seed "
        f"ends beyond having trained ({TRAINED_NATS:g} nats below the unigram entropy); below it stands how many seeds "
        f"trained. {LEGEND}; framed is the largest margin of a column. "
        "<em>Step</em>: its time over Pre-Norm's, on machines that did other work besides. <b>An empty cell has no "
        f"record.</b> {_survey_command('What is missing')}</p>"
    )


def chart(runs: Sequence[Ran], schemes: Sequence[str], linked: bool = True) -> str:
    """Returns one table for each topology, task and precision that has a record, and says what has none."""
    parts, runs = [_reading()], [ran for ran in runs if ran.place.scheme in schemes]
    kinds, precisions = {(ran.place.kind, ran.place.precision) for ran in runs}, get_args(Compute)
    for kind, precision in sorted(kinds, key=lambda pair: (pair[0], precisions.index(pair[1]))):
        own = [ran for ran in runs if (ran.place.kind, ran.place.precision) == (kind, precision)]
        parts += [f"<h3>{escape(kind)}, {escape(precision)}</h3>", _squares(own, schemes, linked)]
    silent = [word for word in precisions if word not in {ran.place.precision for ran in runs}]
    if silent:
        parts.append(f"<p>No record at all in {escape(listed(silent))}: nothing is said about them.</p>")
    return "\n".join(parts)


def squares_of(runs: Sequence[Ran], scheme: str) -> dict[tuple[str, str], dict[int, Square]]:
    """Returns {(kind, precision): {depth: what became of the scheme}} where there are records."""
    found: dict[tuple[str, str], dict[int, Square]] = {}
    own = [ran for ran in runs if ran.place.scheme == scheme]
    places = {(ran.place.kind, ran.place.precision, ran.cell.depth) for ran in own}
    for kind, precision, depth in sorted(places):
        here = [r for r in own if (r.place.kind, r.place.precision, r.cell.depth) == (kind, precision, depth)]
        if (one := square(here)) is not None:
            found.setdefault((kind, precision), {})[depth] = one
    return found


def _squares(runs: Sequence[Ran], schemes: Sequence[str], linked: bool) -> str:
    depths = sorted({ran.cell.depth for ran in runs})
    found = {scheme: next(iter(squares_of(runs, scheme).values()), {}) for scheme in schemes}
    best = {depth: _best([own[depth] for own in found.values() if depth in own]) for depth in depths}
    rows = [
        [_name(scheme, linked), *[_cell(own.get(depth), best[depth]) for depth in depths]]
        for scheme, own in found.items()
        if own
    ]
    without = [scheme for scheme, own in found.items() if not own]
    said = f'<p class="quiet">Without a record here: {escape(listed(without))}.</p>' if without else ""
    return f'<div class="chart">{table(["blocks:", *map(str, depths)], rows)}</div>{said}'


def _name(scheme: str, linked: bool) -> str:
    return f'<a href="#{escape(scheme)}">{escape(scheme)}</a>' if linked else escape(scheme)


def _best(squares: Sequence[Square]) -> Square | None:
    """Returns the one that trains with the largest margin; None where none does, or nothing stands beside it."""
    training = [one for one in squares if one.word == "trains" and one.margin is not None]
    return max(training, key=lambda one: one.margin or 0.0) if training and len(squares) > 1 else None


def _cell(one: Square | None, best: Square | None) -> str:
    if one is None:
        return ""
    margin = "not finite" if one.margin is None else f"{one.margin:+.2f}"
    mark = " best" if one is best else ""
    told = f"{one.best[0].claim}: {one.best[0].label}, learning rate {one.best[0].cell.lr:g}"
    return (
        f'<span class="square {one.word}{mark}" title="{escape(told)}">'
        f'<span class="sign">{SIGNS[one.word]}</span> {margin}'
        f"<small>{one.trained} of {one.runs}</small></span>"
    )


def _reading() -> str:
    return (
        "<h3>All records, those of claims too</h3>"
        f"<p>The margin is how far, in nats, a run ends beyond having trained ({TRAINED_NATS:g} nats below the unigram "
        "entropy): of the worst seed, under that protocol of a claim or the survey which suits the scheme best. Below "
        f"it stands how many of all its runs trained, whatever the protocol. {LEGEND}; framed is the largest margin of "
        "a depth where schemes can be compared. Drawn from records "
        "alone: <b>an empty cell has no record</b>, and says neither that a scheme trains nor that it does not. Runs "
        "of different claims differ in length and rate, so that small differences of the margin mean nothing.</p>"
    )
