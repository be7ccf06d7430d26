"""How the report reads: the HTML page and the Markdown text, for someone who never saw the code."""

import base64
import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from normscale.claims.expect import Value
from normscale.claims.judges.slopes import recorded_steps, when_said
from normscale.claims.judges.values import WHEN
from normscale.claims.results import MAIN, ROLES, Measured, Part, Result
from normscale.claims.state import AT_UNIGRAM, SPIKE, STANDSTILL
from normscale.claims.verdict import describe
from normscale.tracking.record import TRAINED_NATS

if TYPE_CHECKING:
    from normscale.claims.report import Reported

WRITTEN_BEFORE = (
    "What had to be seen was written down before the runs that judge it. Step counts and learning rates come from "
    "pilots; where those had shown the outcome, the claim says so."
)
STYLE = """
body{font:16px/1.55 system-ui,sans-serif;color:#1c1c1c;background:#fff;max-width:1000px;margin:2rem auto;padding:1rem}
h1{font-size:1.7rem;margin-bottom:.2rem}
h2{font-size:1.35rem;margin-top:3rem;border-top:1px solid #ddd;padding-top:1.5rem}
h3{font-size:1.05rem;margin:1.6rem 0 .4rem} p{margin:.5rem 0} .quiet{color:#666} img{width:100%;height:auto}
table{border-collapse:collapse;width:100%;font-size:.9rem;margin:.4rem 0} th{text-align:left;font-weight:600}
th,td{padding:.3rem .6rem;border-bottom:1px solid #e4e4e4;vertical-align:top} td.n{white-space:nowrap;text-align:right}
th.n{text-align:right} .badge{border-radius:4px;padding:.1rem .5rem;color:#fff;font-size:.8rem;white-space:nowrap}
.supported{background:#1a7f37}.refuted{background:#b42318}.inconclusive{background:#9a6700}
.not-run,.smoke{background:#6e7781}
.trained{color:#1a7f37}.stuck,.diverged{color:#b42318}.undecided{color:#9a6700}.missing{color:#6e7781}
.expected td:last-child{width:45%} .wide{overflow-x:auto}
code,pre{background:#f4f4f4;border-radius:4px;padding:.1rem .3rem;font-size:.9em}
summary{cursor:pointer;margin:1rem 0 .4rem;font-weight:600}
"""


def page(claims: Sequence["Reported"], date: str) -> str:
    """Returns the report as one self-contained HTML page without scripts."""
    rows = [
        [f'<a href="#{escape(r.claim.id)}">{escape(r.claim.id)}</a>', escape(r.claim.says), _badge(r.word)]
        for r in claims
    ]
    body = [
        "<h1>Which normalisation lets a Transformer train?</h1>",
        f'<p class="quiet">normscale, {escape(date)}</p>',
        f"<p>Each claim below is a statement of a paper or an article. {WRITTEN_BEFORE} The verdict is what the "
        "numbers say. <em>Inconclusive</em> means that the runs cannot tell, "
        "<em>not run</em> that there are none, <em>smoke</em> that they only show that the code runs.</p>",
        _table(["claim", "what it says", "verdict"], rows),
        *[_section(reported) for reported in claims],
        _reading(),
    ]
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>normscale: claims</title>'
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def markdown(claims: Sequence["Reported"], date: str) -> str:
    """Returns the report as Markdown; figures are files beside it."""
    lines = ["# Claims", "", date, "", WRITTEN_BEFORE, "", "| claim | verdict | in numbers |", "|---|---|---|"]
    for r in claims:
        told = r.judgement.headline.split(" - ", 1)[-1]
        lines.append(f"| [{r.claim.id}](#{r.claim.id}) | **{r.word}** | {_bar(told)} |")
    for r in claims:
        lines += ["", f"## {r.claim.id}", "", r.claim.says, "", f"Source: {r.claim.source}.", ""]
        lines += [f"**{r.word.upper()}** - {r.judgement.headline.split(' - ', 1)[-1]}", ""]
        if r.left_out and r.judgement.parts:
            lines += ["Not run: " + "; ".join(r.left_out) + ".", ""]
        if r.figure:
            lines += [f"![{r.claim.id}]({r.figure.name})", ""]
        lines += [f"How: {r.claim.how}", "", "| expected before the runs | verdict | runs |", "|---|---|---|"]
        parts = [*r.judgement.parts, *r.judgement.control]
        lines += [f"| {_bar(p.expect)} | {p.verdict} | {_bar(p.detail)} |" for p in parts]
        lines += ["", "| measured | value | published |", "|---|---|---|"]
        lines += [f"| {_bar(name)} | {value} | {_bar(paper)} |" for name, value, paper in _beside(r)]
        lines += ["", "Different here: " + "; ".join(r.claim.differs) + ".", "", f"Again: `{r.command}`"]
    return "\n".join(lines) + "\n"


def _section(reported: "Reported") -> str:
    claim, judgement = reported.claim, reported.judgement
    profile = f"profile {reported.profile}, {reported.done} of {len(reported.results)} runs" if reported.profile else ""
    parts = [
        f'<h2 id="{escape(claim.id)}">{escape(claim.says)}</h2>',
        f'<p class="quiet">{escape(claim.id)}. Source: {escape(claim.source)}. {escape(profile)}</p>',
        f"<p>{_badge(reported.word)} {escape(judgement.headline.split(' - ', 1)[-1])}</p>",
    ]
    if reported.left_out and judgement.parts:
        parts.append(f'<p class="quiet">Not run: {escape("; ".join(reported.left_out))}.</p>')
    if reported.figure:
        data = base64.b64encode(reported.figure.read_bytes()).decode("ascii")
        parts.append(f'<img alt="figure of {escape(claim.id)}" src="data:image/png;base64,{data}">')
    parts += ["<h3>How it was tested</h3>", f"<p>{escape(claim.how)}</p>", "<h3>What was expected before the runs</h3>"]
    parts.append(_expectations(reported))
    if reported.done and any(claim.asks_training(arm) for arm in claim.arms):
        parts += ["<h3>Gap to the unigram entropy, by depth (nats)</h3>", _matrix(reported)]
    parts += ["<h3>Beside the published numbers</h3>"]
    rows = [[escape(name), escape(value), escape(paper)] for name, value, paper in _beside(reported)]
    parts.append(_table(["measured here", "value (95 % interval)", "published"], rows))
    parts += [
        "<h3>What is different here</h3>",
        "<ul>",
        *[f"<li>{escape(item)}</li>" for item in claim.differs],
        "</ul>",
    ]
    parts += [f"<h3>Run it again</h3><p><code>{escape(reported.command)}</code></p>"]
    if reported.results:
        parts.append(f"<details><summary>All {len(reported.results)} runs</summary>{_runs(reported)}</details>")
        parts.append(_environment(reported))
    return "\n".join(parts)


def _expectations(reported: "Reported") -> str:
    claim, judgement = reported.claim, reported.judgement
    if not judgement.parts:
        said = [(describe(claim, e), "") for e in claim.expect] + [
            (describe(claim, e), "control: ") for e in claim.control
        ]
        return "<ul>" + "".join(f"<li>{kind}{escape(text)}</li>" for text, kind in said) + "</ul>"
    rows = [_part(part, "") for part in judgement.parts] + [_part(part, "Control: ") for part in judgement.control]
    return f'<div class="expected">{_table(["expectation", "verdict", "runs"], rows)}</div>'


def _part(part: Part, kind: str) -> list[str]:
    detail = "<br>".join(escape(line) for line in part.detail.split("; "))
    return [f"{kind}{escape(part.expect)}", _badge(part.verdict), detail]


def _matrix(reported: "Reported") -> str:
    """The gap by arm and depth: the mean over seeds with its interval, coloured by what became of the runs."""
    measured = {item.name: item for item in reported.judgement.measured}
    asked = [result for result in reported.results if reported.claim.asks_training(result.cell.arm)]
    depths = sorted({result.cell.depth for result in asked})
    rows = []
    for role in ("", "low-lr", "long"):
        for arm, label in reported.claim.labels.items():
            groups = {d: [r for r in reported.results if _is(r, arm, d, role)] for d in depths}
            if not any(groups.values()) or not reported.claim.asks_training(arm):
                continue
            cells = []
            for depth in depths:
                item = measured.get(f"{arm} L{depth}{' ' if role else ''}{role} gap")
                states = list(dict.fromkeys(result.state.label for result in groups[depth]))
                state = " and ".join(f'<span class="{word}">{word}</span>' for word in states)
                seeds = f" ({len(groups[depth])})" if groups[depth] else ""
                cells.append(f"{_interval(item)}<br>{state}{seeds}" if item else state)
            rows.append([escape(label + ROLES.get(role, "")), *cells])
    note = '<p class="quiet">In brackets: the number of seeds; with two or more, the 95 % interval over them.</p>'
    return f'<div class="wide">{_table(["arm", *[f"{depth} blocks" for depth in depths]], rows)}</div>{note}'


def _is(result: Result, arm: str, depth: int, role: str) -> bool:
    own = "" if result.cell.role in MAIN else result.cell.role
    return (result.cell.arm, result.cell.depth, own) == (arm, depth, role)


def _beside(reported: "Reported") -> list[tuple[str, str, str]]:
    """Returns (label, value, published) for every number that has a published one; of others all but the gaps, which
    have a table of their own."""
    measured = {item.name: item for item in reported.judgement.measured}
    names = [name for name in measured if name in reported.claim.paper or not name.endswith(" gap")]
    names += [name for name in reported.claim.paper if name not in measured]
    rows = []
    for name in names:
        item = measured.get(name)
        value = _interval(item) if item else "not measured"
        rows.append((item.label if item else name, value, reported.claim.paper.get(name, "")))
    return rows


def _runs(reported: "Reported") -> str:
    """Every run: what became of it, the numbers that are judged of its arm, what it cost."""
    claim = reported.claim
    judged = [(name, step) for name in claim.quantities for step in recorded_steps(name, reported.results)]
    losses = any(claim.asks_training(arm) for arm in claim.arms)
    values = list(dict.fromkeys((e.number, e.when) for e in claim.expect if isinstance(e, Value)))
    rows = []
    for result, run_id in zip(reported.results, reported.run_ids, strict=True):
        state, trained = result.state, claim.asks_training(result.cell.arm)
        summary = result.record.summary if result.record else {}
        label = state.label if trained or state.label == "missing" else "ended"
        told = [f'<span class="{label}">{label}</span>', escape(state.why if label != "ended" else "")]
        numbers = ["" if trained else _number(result.value(name, step)) for name, step in judged]
        numbers += [_number(result.number(number, when)) for number, when in values]
        numbers += [_number(state.loss) if trained else ""] if losses else []
        numbers += [_number(summary.get("steps"), 0), _number(summary.get("seconds"), 1)]
        rows.append([escape(result.cell.name), *told, *numbers, f"<code>{escape(run_id)}</code>"])
    columns = [f"{name} {when_said(name, step)}" for name, step in judged]
    columns = [column.replace("grad_last_out", "gradient") for column in columns]
    columns += [escape(claim.numbers.get(number, number) + WHEN[when]) for number, when in values]
    columns += ["held-out loss"] if losses else []
    return f'<div class="wide">{_table(["run", "state", "", *columns, "steps", "seconds", "id"], rows)}</div>'


def _environment(reported: "Reported") -> str:
    lines = []
    for seen in reported.environments():
        known = {key: value for key, value in seen.items() if value is not None}
        lines.append(", ".join(f"{key} {value}" for key, value in known.items()))
    return "".join(f'<p class="quiet">Ran on: {escape(line)}</p>' for line in lines)


def _reading() -> str:
    return (
        "<h2>How to read this</h2><ul>"
        "<li><b>Unigram entropy</b>: the loss of a model that knows how often each byte occurs and nothing else, on "
        "the very text that the held-out loss is measured on. The gap is how far a run is below it.</li>"
        f"<li><b>Trained</b>: at least {TRAINED_NATS} nats below it. <b>Stuck</b>: less than {AT_UNIGRAM} nats below "
        f"it and improving by less than {STANDSTILL} nats over the last third of the run, or creeping towards it from "
        "above. <b>Diverged</b>: not finite at its end or at any step of its last third, or a "
        f"training loss that ends over {SPIKE} nats above an earlier level. <b>Undecided</b>: none of these.</li>"
        "<li>A run that was lost with its machine is <b>missing</b>, which is no measurement.</li>"
        "<li>Intervals are 95 % by Student's t: over seeds for means; for slopes over all runs or over the means of "
        "the depths, whichever is wider. They speak of other seeds, not of other texts.</li></ul>"
    )


def _badge(verdict: str) -> str:
    return f'<span class="badge {verdict.replace(" ", "-")}">{escape(verdict.upper())}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; its cells are HTML already."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table>"


def _interval(item: Measured) -> str:
    if item.value is None:
        return "not finite"
    small = 0 < abs(item.value) < 0.1 or abs(item.value) >= 1000
    digits = ".3g" if small else ".2f"
    if item.lo is None or item.hi is None:
        return f"{item.value:{digits}}"
    return f"{item.value:{digits}} ({item.lo:{digits}}..{item.hi:{digits}})"


def _number(value: object, digits: int = 4) -> str:
    if not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "not finite"
    small = value and abs(value) < 0.01
    return f"{value:.2e}" if small else f"{value:.{digits}f}"


def _bar(text: str) -> str:
    return text.replace("|", "\\|")
