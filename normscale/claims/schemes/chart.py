"""The recommendation chart: for each depth and precision, which schemes train, by the margin that records give."""

from collections.abc import Sequence
from html import escape
from typing import get_args

from normscale.claims.html import table
from normscale.claims.results import listed
from normscale.claims.schemes.records import Ran, Square, square
from normscale.config.precision import Compute
from normscale.tracking.record import TRAINED_NATS

STYLE = """
.chart td,.chart th{text-align:center;white-space:nowrap} .chart td:first-child,.chart th:first-child{text-align:left}
.square{display:block;border-radius:4px;padding:.1rem .3rem;min-width:3.6rem}
.trains{background:var(--good-soft)} .mixed{background:var(--open-soft)} .fails{background:var(--bad-soft)}
.square small{display:block;color:var(--quiet)} .best{outline:2px solid var(--good)}
@media (max-width:600px){.chart table{font-size:.66rem} .chart td,.chart th{padding:.15rem 1px}
.chart .square{min-width:0;padding:.1rem 0} .chart .sign{display:block}}
"""
SIGNS = {"trains": "\u2713", "mixed": "~", "fails": "\u2717"}


def chart(runs: Sequence[Ran], schemes: Sequence[str]) -> str:
    """Returns one table for each topology, task and precision that has a record, and says what has none."""
    parts, runs = [_reading()], [ran for ran in runs if ran.place.scheme in schemes]
    for kind, precision in sorted({(ran.place.kind, ran.place.precision) for ran in runs}):
        own = [ran for ran in runs if (ran.place.kind, ran.place.precision) == (kind, precision)]
        parts += [f"<h3>{escape(kind)}, {escape(precision)}</h3>", _squares(own, schemes)]
    silent = [word for word in get_args(Compute) if word not in {ran.place.precision for ran in runs}]
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


def _squares(runs: Sequence[Ran], schemes: Sequence[str]) -> str:
    depths = sorted({ran.cell.depth for ran in runs})
    found = {scheme: next(iter(squares_of(runs, scheme).values()), {}) for scheme in schemes}
    best = {depth: _best([own[depth] for own in found.values() if depth in own]) for depth in depths}
    rows = [
        [f'<a href="#{escape(scheme)}">{escape(scheme)}</a>', *[_cell(own.get(depth), best[depth]) for depth in depths]]
        for scheme, own in found.items()
        if own
    ]
    without = [scheme for scheme, own in found.items() if not own]
    said = f'<p class="quiet">Without a record here: {escape(listed(without))}.</p>' if without else ""
    return f'<div class="chart">{table(["blocks:", *map(str, depths)], rows)}</div>{said}'


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
        f"<p>The margin is how far, in nats, a run ends beyond having trained ({TRAINED_NATS:g} nats below the unigram "
        "entropy): of the worst seed, under that protocol of a claim which suits the scheme best. Below it stands how "
        "many of all its runs trained, whatever the protocol. \u2713 trains in every seed, ~ in some, \u2717 in none; "
        "framed is the largest margin of a depth where schemes can be compared. Drawn from the records of claims "
        "alone: <b>an empty cell has no record</b>, and says neither that a scheme trains nor that it does not. Runs "
        "of different claims differ in length and rate, so that small differences of the margin mean nothing.</p>"
    )
