"""How the report reads: the HTML page and the Markdown text, for someone who never saw the code."""

import base64
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from normscale.claims.expect import Value
from normscale.claims.html import badge, document, interval, shown, table
from normscale.claims.judges.slopes import recorded_steps, when_said
from normscale.claims.judges.values import WHEN
from normscale.claims.results import MAIN, ROLES, Part, Result
from normscale.claims.scale import scale_of
from normscale.claims.schemes.chart import STYLE
from normscale.claims.state import AT_UNIGRAM, SPIKE, STANDSTILL
from normscale.claims.verdict import describe
from normscale.tracking.record import TRAINED_NATS

if TYPE_CHECKING:
    from normscale.claims.report import Reported

WRITTEN_BEFORE = (
    "What had to be seen was written down before the runs that judge it. Step counts and learning rates come from "
    "pilots; where those had shown the outcome, the claim says so."
)
NOT_RUN = "What was not run, and why"
RUNS_IT = "The section of each ends with the command that runs it."


def page(claims: Sequence["Reported"], date: str, chart: Sequence[str] = ()) -> str:
    """Returns the report as one self-contained HTML page without scripts; `chart` is HTML of which schemes train."""
    claims = sorted(claims, key=lambda reported: reported.word == "not run")  # what there is to see comes first
    rows = [[f"{_link(r)}<br>{badge(r.word)}{_mark(r)}", f"{escape(r.claim.says)}{_told(r)}"] for r in _seen(claims)]
    seen = [f'<div class="claims">{table(["claim", "what it says, and in numbers"], rows)}</div>'] if rows else []
    body = [
        "<h1>Which normalisation lets a Transformer train?</h1>",
        f'<p class="quiet">normscale, {escape(date)}. {escape(counted(claims))}.</p>',
        f"<p>Each claim below is a statement of a paper or an article. {WRITTEN_BEFORE} The verdict is what the "
        "numbers say. <em>Inconclusive</em> means that the runs cannot tell, "
        "<em>not run</em> that there are none, <em>smoke</em> that they only show that the code runs, "
        "<em>published</em> that the runs are not of this folder: their record came with the code.</p>",
        *seen,
        *_not_run(claims),
        *chart,
        *[_section(reported) for reported in claims],
        _reading(),
    ]
    return document("normscale: claims", body, STYLE if chart else "")


def counted(claims: Sequence["Reported"]) -> str:
    """Returns e.g. "9 claims: 5 supported, 1 refuted, 3 not run"; what was published is counted apart from the rest.

    As in "9 claims: run here: 1 refuted; published: 5 supported; 3 not run".
    """
    published = [reported.word for reported in claims if reported.published is not None]
    here = [reported.word for reported in claims if reported.published is None and reported.word != "not run"]
    said = _counts([reported.word for reported in claims])
    if published:
        none = len(claims) - len(here) - len(published)
        said = f"run here: {_counts(here) or 'none'}; published: {_counts(published)}" + f"; {none} not run" * (
            none > 0
        )
    return f"{len(claims)} claim{'s' * (len(claims) != 1)}: {said}"


def _counts(words: Sequence[str]) -> str:
    order = ("supported", "refuted", "inconclusive", "smoke", "not run")
    return ", ".join(f"{words.count(word)} {word}" for word in order if word in words)


def _seen(claims: Sequence["Reported"]) -> list["Reported"]:
    """Returns the claims that the first table shows; the others are listed below it."""
    return [reported for reported in claims if reported.word != "not run"]


def _mark(reported: "Reported") -> str:
    return "" if reported.published is None else f'<br><span class="quiet">published {reported.published.date}</span>'


def _told(reported: "Reported") -> str:
    return f'<br><span class="quiet">{escape(_headline(reported))}</span>'


def _link(reported: "Reported") -> str:
    name = escape(reported.claim.id)
    return f'<a href="#{name}">{name}</a>'


def _md_link(reported: "Reported") -> str:
    return f"[{reported.claim.id}](#{reported.claim.id})"


def _headline(reported: "Reported") -> str:
    return reported.judgement.headline.split(" - ", 1)[-1]


def _not_run(claims: Sequence["Reported"]) -> list[str]:
    """What has no verdict, or one from less than its profile holds, and why, as HTML."""
    items = [f"<li>{escape(why)}: {', '.join(map(_link, some))}</li>" for why, some in _by_reason(claims).items()]
    return [f"<h2>{NOT_RUN}</h2>", f"<ul>{''.join(items)}</ul>", f"<p>{RUNS_IT}</p>"] if items else []


def _by_reason(claims: Sequence["Reported"]) -> dict[str, list["Reported"]]:
    """Returns {why not all of it was run: the claims}."""
    found: dict[str, list[Reported]] = {}
    for r in claims:
        if why := "; ".join(r.left_out) or (_headline(r) if r.word in ("not run", "smoke") else ""):
            found.setdefault(why, []).append(r)
    return found


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _from_record(reported: "Reported") -> list[str]:
    """Says of a published record that it is one."""
    if reported.published is None:
        return []
    return [f"From the record of {reported.published.date} that is published with the code; not run in this folder."]


def markdown(claims: Sequence["Reported"], date: str) -> str:
    """Returns the report as Markdown; figures are files beside it."""
    lines = [
        "# Claims",
        "",
        f"{date}. {counted(claims)}.",
        "",
        WRITTEN_BEFORE,
        "",
    ]
    if seen := _seen(claims):
        lines += ["| claim | verdict | in numbers |", "|---|---|---|"]
    for r in seen:
        published = f", published {r.published.date}" if r.published else ""
        lines.append(f"| {_md_link(r)} | **{r.word}**{published} | {_bar(_headline(r))} |")
    if reasons := _by_reason(claims):
        items = [f"- {why}: {', '.join(map(_md_link, some))}" for why, some in reasons.items()]
        lines += ["", f"## {NOT_RUN}", "", *items, "", RUNS_IT]
    for r in claims:
        lines += ["", f"## {r.claim.id}", "", r.claim.says, "", f"Source: {r.claim.source}.", ""]
        lines += [f"**{r.word.upper()}** - {_headline(r)}", ""]
        lines += [line for told in _from_record(r) for line in (told, "")]
        if r.left_out and r.judgement.parts:
            lines += ["Not run: " + "; ".join(r.left_out) + ".", ""]
        if r.figure:
            lines += [f"![{r.claim.id}]({r.figure.name})", ""]
        lines += [f"How: {r.claim.how}", "", "| expected before the runs | verdict | runs |", "|---|---|---|"]
        parts = [*r.judgement.parts, *r.judgement.control]
        lines += [f"| {_bar(p.expect)} | {p.verdict} | {_bar(p.detail)} |" for p in parts]
        lines += ["", "| measured | value | published |", "|---|---|---|"]
        lines += [f"| {_bar(name)} | {value} | {_bar(paper)} |" for name, value, paper in _beside(r)]
        lines += ["", "Different here: " + "; ".join(_differs(r)) + ".", "", f"Again: `{r.command}`"]
    return "\n".join(lines) + "\n"


def _section(reported: "Reported") -> str:
    claim, judgement = reported.claim, reported.judgement
    profile = (
        f"Profile {reported.profile}, {reported.done} of {len(reported.results)} runs." if reported.profile else ""
    )
    parts = [
        f'<h2 id="{escape(claim.id)}">{escape(claim.says)}</h2>',
        f'<p class="quiet">{escape(claim.id)}. Source: {escape(claim.source)}. {escape(profile)}</p>',
        *[f'<p class="quiet">{escape(line)}</p>' for line in _from_record(reported)],
        f"<p>{badge(reported.word)} {escape(_headline(reported))}</p>",
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
    parts.append(table(["measured here", "value (95 % interval)", "published"], rows))
    differs = "".join(f"<li>{escape(item)}</li>" for item in _differs(reported))
    parts += [f"<h3>What is different here</h3><ul>{differs}</ul>"]
    parts += [f"<h3>Run it again</h3><p>{_code(reported.command)}</p>"]
    if reported.published is not None:
        parts.append(f"<p>Every run: {_code(f'experiments/results/{claim.id}.json')}</p>{_environment(reported)}")
    elif reported.results:
        parts.append(f"<details><summary>All {len(reported.results)} runs</summary>{_runs(reported)}</details>")
        parts.append(_environment(reported))
    return "\n".join(parts)


def _differs(reported: "Reported") -> list[str]:
    """The scale of the runs that came to an end, then what the claim itself says."""
    ran = [result.cell for result in reported.results if result.state.label != "missing"]
    if reported.profile is None or not ran:
        return list(reported.claim.differs)
    return [f"run here: {scale_of(reported.claim, reported.profile, ran)}", *reported.claim.differs]


def _expectations(reported: "Reported") -> str:
    claim, judgement = reported.claim, reported.judgement
    if not judgement.parts:
        said = [(describe(claim, e), "") for e in claim.expect] + [
            (describe(claim, e), "control: ") for e in claim.control
        ]
        return "<ul>" + "".join(f"<li>{kind}{escape(text)}</li>" for text, kind in said) + "</ul>"
    rows = [_part(part, "") for part in judgement.parts] + [_part(part, "Control: ") for part in judgement.control]
    return f'<div class="expected">{table(["expectation", "verdict", "runs"], rows)}</div>'


def _part(part: Part, kind: str) -> list[str]:
    detail = "<br>".join(escape(line) for line in part.detail.split("; "))
    return [f"{kind}{escape(part.expect)}", badge(part.verdict), detail]


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
                cells.append(f"{interval(item.value, item.lo, item.hi)}<br>{state}{seeds}" if item else state)
            rows.append([escape(label + ROLES.get(role, "")), *cells])
    note = '<p class="quiet">In brackets: the number of seeds; with two or more, the 95 % interval over them.</p>'
    return table(["arm", *[f"{depth} blocks" for depth in depths]], rows) + note


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
        value = interval(item.value, item.lo, item.hi) if item else "not measured"
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
        numbers = ["" if trained else shown(result.value(name, step)) for name, step in judged]
        numbers += [shown(result.number(number, when)) for number, when in values]
        numbers += [shown(state.loss) if trained else ""] if losses else []
        numbers += [shown(summary.get("steps"), 0), shown(summary.get("seconds"), 1)]
        rows.append([escape(result.cell.name), *told, *numbers, f"<code>{escape(run_id)}</code>"])
    columns = [f"{name} {when_said(name, step)}" for name, step in judged]
    columns = [column.replace("grad_last_out", "gradient").replace("grad_first", "gradient") for column in columns]
    columns += [escape(claim.numbers.get(number, number) + WHEN[when]) for number, when in values]
    columns += ["held-out loss"] if losses else []
    return table(["run", "state", "", *columns, "steps", "seconds", "id"], rows)


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


def _bar(text: str) -> str:
    return text.replace("|", "\\|")
