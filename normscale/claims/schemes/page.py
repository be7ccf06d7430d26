"""The page about schemes: the chart, a table of all, and a section for each."""

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

import numpy as np

from normscale.claims.html import document, interval, table
from normscale.claims.results import listed
from normscale.claims.schemes import chart, drawing
from normscale.claims.schemes.at_init import BATCH, CONTEXT, OPTIMIZERS, WIDTH, AtInit, Measured, Optimizer
from normscale.claims.schemes.docs import docs_of_scheme
from normscale.claims.schemes.drawing import Curve
from normscale.claims.schemes.options import of_models, of_norms, options_table, prose
from normscale.claims.schemes.rates import Risen, risen, tolerated
from normscale.claims.schemes.records import Ran, each_once, runs_of, slopes_of, step_time
from normscale.claims.schemes.size import Size

if TYPE_CHECKING:
    from normscale.claims.report import Reported

OWN_STYLE = """
.formula{font-size:1.1rem;padding:.6rem .8rem;border-left:3px solid var(--one)}
@media (max-width:600px){.overview table{font-size:.74rem} .overview th,.overview td{padding:.3rem .2rem}
.overview th:nth-child(2),.overview td:nth-child(2){display:none}}
"""
STYLE = chart.STYLE + drawing.STYLE + OWN_STYLE
NOT_MEASURED = "not measured here"
SAID = {"trains": "trains", "mixed": "trains in some seeds", "undecided": "undecided", "fails": "does not train"}


def page(
    measured: Sequence[Measured],
    sizes: dict[str, Size],
    surveyed: Sequence["Reported"],
    reported: Sequence["Reported"],
    date: str,
) -> str:
    """Returns the page as one self-contained HTML file without scripts."""
    names, records = [one.scheme for one in measured], [*surveyed, *reported]
    timed = [*runs_of(surveyed), *runs_of(reported)]  # where both have a run, it is compared with those of each
    runs = each_once(timed)
    body = [
        "<h1>Normalisation schemes: what each is, does and costs</h1>",
        f'<p class="quiet">normscale, {escape(date)}. {len(names)} scheme{"s" * (len(names) != 1)}.</p>',
        "<h2>Which schemes train, at which depth and precision</h2>",
        chart.survey_table(surveyed, names),
        chart.chart(runs, names),
        "<h2>All schemes at initialisation</h2>",
        _reading(measured),
        _overview(measured, sizes),
        *[_section(one, sizes.get(one.scheme), records, runs, timed) for one in measured],
        *of_models(),
        *of_norms(),
    ]
    return document("normscale: schemes", body, STYLE)


def _reading(measured: Sequence[Measured]) -> str:
    depths = sorted({at.blocks for one in measured for at in one.at})
    return (
        f"<p>Measured on fresh models of width {WIDTH} and {listed(depths) if depths else 'no'} blocks, in one step on "
        f"{BATCH} sequences of {CONTEXT} bytes of source text, fp32, one seed. <em>Stream</em>: RMS of the residual "
        "stream (the first, where a scheme has several) after each site. <em>Gradient</em>: L2 norm of the gradient of "
        "each sublayer's parameters. In the table: <em>grows</em>, last over first site, and <em>spread</em>, largest "
        "over smallest, both of the deepest model. <em>Update</em>: how far one step moves the model's last hidden "
        "state, per token, over the learning rate; its slope is that of log update over log depth: 0 where depth does "
        "not matter, 1 where twice the depth moves twice as far. It has no interval: one seed at so few depths gives "
        "none that tells anything; those of claims have. Under Adam the first step is one of the same size for "
        "every parameter.</p>"
    )


def _overview(measured: Sequence[Measured], sizes: dict[str, Size]) -> str:
    rows = []
    for one in measured:
        size, deepest = sizes.get(one.scheme), one.at[-1] if one.at else None
        rows.append(
            [
                f'<a href="#{escape(one.scheme)}">{escape(one.scheme)}</a>',
                escape(docs_of_scheme(one.scheme).title),
                "" if size is None else f"{size.norms_in_blocks / size.blocks:.3g}",
                "" if deepest is None else f"{_growth(deepest):.3g}",
                "" if deepest is None else f"{_spread(deepest):.3g}",
                *[_slope(one, optimizer) for optimizer in OPTIMIZERS],
            ]
        )
    head = ["scheme", "", "norms a block", "stream grows", "gradient spread"]
    head += [f"update slope {name}" for name in OPTIMIZERS.values()]
    return f'<div class="overview">{table(head, rows)}</div>'


def _section(
    one: Measured, size: Size | None, reported: Sequence["Reported"], runs: Sequence[Ran], timed: Sequence[Ran]
) -> str:
    said = docs_of_scheme(one.scheme)
    parts = [
        f'<h2 id="{escape(one.scheme)}">{escape(said.title)} <code>{escape(one.scheme)}</code></h2>',
        f'<p class="formula">{prose(said.formula)}</p>',
        *[f"<p>{prose(text)}</p>" for text in said.more],
        *([f"<p><b>Reference:</b> {prose(said.reference)}</p>"] if said.reference else []),
        f"<p><b>Topologies:</b> {escape(listed(said.topologies))}.</p>",
        options_table(said.options),
        "<h3>At initialisation</h3>",
        *_at_init(one),
        "<h3>What records say</h3>",
        _records(one.scheme, reported, runs),
        "<h3>What it costs</h3>",
        _cost(one, size, timed),
    ]
    return "\n".join(parts)


def _at_init(one: Measured) -> list[str]:
    parts = [f'<p class="quiet">Not measured: {escape(text)}</p>' for text in one.failed]
    if not one.at:
        return parts
    labels = [f"{at.blocks} blocks" for at in one.at]
    streams = [Curve(label, at.stream_rms.tolist()) for label, at in zip(labels, one.at, strict=True)]
    gradients = [Curve(label, at.gradient.tolist()) for label, at in zip(labels, one.at, strict=True)]
    others = [
        Curve(label, at.other_stream_rms.tolist())
        for label, at in zip(labels, one.at, strict=True)
        if at.other_stream_rms is not None
    ]
    panels = [drawing.panel("RMS of the first stream" if others else "RMS of the stream", streams)]
    panels += [drawing.panel("largest RMS of the others", others)] if others else []
    panels.append(drawing.panel("gradient of each sublayer", gradients))
    rows = [
        [
            label,
            f"{at.stream_rms[0]:.3g} \u2192 {at.stream_rms[-1]:.3g}",
            f"{at.gradient[0]:.3g} \u2192 {at.gradient[-1]:.3g}",
            f"{_spread(at):.3g}",
            *[f"{at.update[o]:.3g}" if o in at.update else "not finite" for o in OPTIMIZERS],
        ]
        for label, at in zip(labels, one.at, strict=True)
    ]
    rows.append(["slope over depth", "", "", "", *[_slope(one, optimizer) for optimizer in OPTIMIZERS]])
    head = ["", "stream, first \u2192 last site", "gradient, first \u2192 last site", "largest over smallest"]
    head += [f"update / rate, {name}" for name in OPTIMIZERS.values()]
    where = "" if one.topology == "decoder" else f'<p class="quiet">Measured as {escape(one.topology)}.</p>'
    return [*parts, where, f'<div class="panels">{"".join(panels)}</div>', drawing.key(labels), table(head, rows)]


def _slope(one: Measured, optimizer: Optimizer) -> str:
    """The slope without its interval, which so few points leave too wide to tell anything."""
    line = one.update_slope(optimizer)
    return "" if line is None else f"{line.slope.value:.2f}"


def _records(scheme: str, reported: Sequence["Reported"], runs: Sequence[Ran]) -> str:
    items = []
    for (kind, precision), own in chart.squares_of(runs, scheme).items():
        words = {word: [depth for depth, one in own.items() if one.word == word] for word in chart.SIGNS}
        said = "; ".join(f"{SAID[word]} at {listed(depths)}" for word, depths in words.items() if depths)
        items.append(f"{kind}, {precision}: {said} blocks")
    for claim, item in slopes_of(reported, scheme):
        items.append(f"{item.label}: {interval(item.value, item.lo, item.hi)} ({claim})")
    rates = [
        f"largest tolerable learning rate, {one.depth} blocks, {one.label}: "
        + (f"{one.rate:g}" if one.rate is not None else f"below {one.swept[0]:g}")
        + (" or more" if one.rate == one.swept[-1] else "")
        + f" (of {len(one.swept)} rates from {one.swept[0]:g} to {one.swept[-1]:g}, {one.claim})"
        for one in tolerated(runs, scheme)
    ]
    rates += [_risen(one) for one in risen(reported, scheme)]
    items += rates or [f"largest tolerable learning rate: {NOT_MEASURED}; make schemes ARGS=--survey does"]
    if not any(ran.place.scheme == scheme for ran in runs):
        items.insert(0, "whether it trains: no record")
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _risen(one: Risen) -> str:
    seeds = f"{one.seeds} seed{'s' * (one.seeds != 1)}"
    return (
        f"largest tolerable learning rate, {one.depth} blocks, {one.label}: {one.said} "
        f"({seeds}, of a rate that rose to {one.top:g}, {one.claim})"
    )


def _cost(one: Measured, size: Size | None, timed: Sequence[Ran]) -> str:
    items = []
    if size is not None:
        own = size.own_parameters
        items += [
            f"norms: {size.norms_in_blocks / size.blocks:.3g} a block, {size.norms_at_ends} at the ends",
            f"parameters of {size.blocks} blocks of width {WIDTH}: {size.parameters:,}, of which the scheme's own "
            f"{own:,} ({100 * own / size.parameters:.2g} %)",
            f"over sites of {size.blocks} blocks: alpha {_ends(size.alphas)}, initial gain beta {_ends(size.betas)}",
        ]
    beside = step_time(timed, one.scheme)
    if beside is not None:
        items.append(
            f"time of a step: {beside[0]:.2f} of Pre-Norm's (median over {beside[1]} sets of runs alike but for their "
            "scheme, on machines that did other work besides)"
        )
    elif one.scheme != "pre":
        items.append(f"time of a step: {NOT_MEASURED} beside Pre-Norm")
    return "<ul>" + "".join(f"<li>{escape(item)}</li>" for item in items) + "</ul>"


def _ends(values: tuple[float, float]) -> str:
    return f"{values[0]:.4g}" if values[0] == values[1] else f"{values[0]:.4g} to {values[1]:.4g}"


def _growth(at: AtInit) -> float:
    return float(at.stream_rms[-1] / at.stream_rms[0])


def _spread(at: AtInit) -> float:
    found = at.gradient[at.gradient > 0]
    return float(np.max(found) / np.min(found)) if found.size else float("nan")
