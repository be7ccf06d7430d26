"""The texts a person reads in MLflow: front pages of claims and runs, the list of claims, event reports. Markdown.

Only the first two lines of a description show until it is unfolded, so the verdict and its number stand there.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from normscale.tracking.event_page import markdown
from normscale.tracking.event_report import is_bad, lines_of, report_of, sentence
from normscale.tracking.manifest import Manifest
from normscale.tracking.mlflow_layout import NOT_TRAINED, UNJUDGED, model_class, update_at_end, without_keys
from normscale.tracking.mlflow_view import ALONE, APART
from normscale.tracking.reader import RunRecord, at, is_foreign
from normscale.tracking.record import USER
from normscale.tracking.text import named, nonfinite_points, number

PENDING = "pending"  # the word for a verdict that is not there yet
ML = "workflowType=machine_learning"  # without it a first visit lands in the mode for language-model applications
_MAX_EVENTS = 12  # that a run's page lists
_MAX_NAMED = 50  # scalars that it names


def run_path(experiment: str, run: str, artifact: str | None = None) -> str:
    """Returns the part of a link after the host: the page of a run, or of one of its artifacts."""
    place = f"/artifacts/{quote(artifact)}" if artifact else ""
    return f"#/experiments/{experiment}/runs/{run}{place}?{ML}"


def charts_path(experiment: str, view: str) -> str:
    """Returns the part of a link after the host: all runs of a claim as charts."""
    return f"#/experiments/{experiment}/runs?{ML}&compareRunsMode=CHART&viewStateShareKey={view}"


def verdict_of(manifest: Manifest) -> str:
    """Returns the verdict's word, "smoke" where the runs are too short for one, "pending" until there is one."""
    if manifest.verdict and manifest.profile == "smoke":
        return "smoke"
    return str((manifest.verdict or {}).get("verdict") or PENDING)


def claim_page(
    manifest: Manifest,
    experiment: str,
    parent: str,
    records: Mapping[str, RunRecord],
    outcomes: Mapping[str, str],
    children: Mapping[str, tuple[str, str]],
) -> str:
    """Returns a claim's front page.

    Args:
        manifest: The claim.
        experiment: Its experiment in MLflow.
        parent: Its run in MLflow.
        records: The spools read so far, by run id.
        outcomes: The outcome of each of them.
        children: (name, MLflow run) of each.
    """
    verdict = manifest.verdict or {}
    ended = sum(record.end is not None for record in records.values())
    progress = f"{ended} of {len(manifest.runs)} runs ended"
    word = verdict_of(manifest).upper()
    headline = str(verdict.get("headline") or "").strip().removeprefix(f"{word} - ") or manifest.says
    shown = sum(manifest.cell_of(run).role != APART for run in manifest.runs)
    count = f"all {shown}" if shown == len(manifest.runs) else f"{shown} of {len(manifest.runs)}"
    links = [f"[Charts of {count} runs]({charts_path(experiment, manifest.key)})"]
    links.append(f"[one line per cell]({charts_path(experiment, manifest.key + '-cells')})")
    if manifest.report:
        links.append(f"[report]({run_path(experiment, parent, 'report.html')})")
    lines = [
        f"**{word}** - {headline}" + ("" if manifest.verdict else f" ({progress})"),
        " - ".join(links),
        "",
        *_table(manifest, records, outcomes),
        "",
    ]
    if manifest.figures:
        name = manifest.figures[0].rsplit("/", 1)[-1]
        lines += [f"![](get-artifact?path=figures/{quote(name)}&run_uuid={parent})", ""]
    lines += [
        f"**The claim.** {manifest.says}",
        "",
        f"Source: {manifest.source}. Profile: {manifest.profile}. {progress}.",
    ]
    measured = verdict.get("measured") or []
    if measured:
        lines += ["", "| measured | value | interval | unit |", "|---|---|---|---|"]
        lines += [_measured(item) for item in measured]
    parts = verdict.get("parts") or []
    if parts:
        lines += ["", "| expected before the run | verdict | detail |", "|---|---|---|"]
        lines += [
            f"| {_c(part.get('expect'))} | {_c(part.get('verdict'))} | {_c(part.get('detail'))} |" for part in parts
        ]
    failed = [run for run, word in outcomes.items() if word in ("nan", "error", "interrupted") and run in children]
    if failed:
        named = [f"[{children[run][0]}]({run_path(experiment, children[run][1])}) ({outcomes[run]})" for run in failed]
        lines += ["", "Runs that stopped: " + ", ".join(named[:20])]
    return "\n".join(lines)


def run_page(
    record: RunRecord,
    word: str,
    experiment: str,
    run: str,
    events: Mapping[int, str],
    view: str = ALONE,
    over: bool = True,
) -> str:
    """Returns the front page of one run.

    Args:
        record: The run.
        word: Its outcome.
        experiment: Its experiment in MLflow.
        run: Its run in MLflow.
        events: {index of an event in the record: the artifact folder of its report}, once there are reports; -1 stands
            for a stop that left no event.
        view: The prepared view that shows the run among others.
        over: Whether its files are there, which come when nothing follows any more.
    """
    lines = [_first_line(record, word), _second_line(record, experiment, run, events, view, over), ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {_c(value)} |" for key, value in _run_facts(record).items() if value not in ("", "-", None)]
    if record.events:
        lines += ["", "| step | what happened | |", "|---|---|---|"]
    told = lines_of(record.events, record.start.get("rows") or [])
    shown = sorted(sorted(told, key=lambda line: not line.bad)[:_MAX_EVENTS], key=lambda line: line.place)
    for line in shown:
        folder = events.get(line.place)
        link = f"[report]({run_path(experiment, run, folder + '/report.html')})" if folder else ""
        lines.append(f"| {line.step} | {_c(line.says)} | {link} |")
    if len(told) > len(shown):
        lines += ["", f"and {len(told) - len(shown)} more events"]
    bad = _first_bad(record)
    if bad in events:  # last: the fold above would cut it to a sliver
        lines += ["", f"![](get-artifact?path={quote(events[bad])}/profile.png&run_uuid={run})"]
    return "\n".join(lines)


def _first_line(record: RunRecord, word: str) -> str:
    """Returns what became of the run, with the number or the place that says so."""
    summary, rows = record.summary, record.start.get("rows") or []
    reached = max((series.steps[-1] for series in record.series.values() if series.steps), default=0)
    steps = summary.get("steps", reached)
    bad = record.events[_first_bad(record)] if _first_bad(record) >= 0 else None
    if word == "nan":
        applied = ""
        if isinstance(count := summary.get("applied"), int | float):
            applied = f", {number(count)} step{'' if count == 1 else 's'} applied before it"
        if bad is not None and bad.get("culprit"):
            kind, _, where = sentence(bad, rows).partition(" ")
            return f"**{kind} at step {number(bad.get('step'))}** {where}{applied}."
        step, layer = summary.get("bad_step", -1), _index(summary.get("bad_layer"))
        where = ""
        if layer is not None and layer < len(rows):
            where = f" in {rows[layer]} ({layer + 1} of {len(rows)} over depth)"
        points = [item for item in nonfinite_points(record) if not item[1].startswith(USER)]
        found = [item for item in points if item[0] == step] or points[:1]
        kinds = "/".join(dict.fromkeys(item[2] for item in found)) or "Non-finite"
        when = f" at step {number(step)}" if step >= 0 else ", at no step that is known"
        return f"**{kinds}{when}**{where}{applied}."
    more = "" if bad is None else f" Step {number(bad.get('step'))} was not finite: {sentence(bad, rows)}."
    loss = f"training loss {number(record.last_finite('loss_train'))}"
    if record.end is None:
        return f"**{word}** - {number(steps)} steps so far, {loss}.{more}"
    if is_foreign(record):
        return f"**{word}** - {loss} after {number(steps)} steps.{more}"
    gap = f"gap {number(summary.get('gap'), 3)} nats (unigram entropy {number(summary.get('unigram_nats'), 4)}"
    held_out = number(summary.get("loss_val"), 4)
    return f"**{word}** - {gap}, held-out loss {held_out}) after {number(steps)} steps.{more}"


def _second_line(record: RunRecord, experiment: str, run: str, events: Mapping[int, str], view: str, over: bool) -> str:
    """Returns links: the first bad event's report, the record as text, the depth profiles, charts of runs like this."""
    bad = _first_bad(record)
    links = [f"[record]({run_path(experiment, run, 'record.txt')})"] if over else []
    if record.profiles and over and view == ALONE:  # of a claim's runs few carry pictures
        links.append(f"[profiles over depth]({run_path(experiment, run, 'figures/depth.png')})")
    links.append(f"[charts of all runs here]({charts_path(experiment, view)})")
    if bad in events:
        step = number(record.events[bad].get("step") if bad >= 0 else record.summary.get("bad_step"))
        links.insert(0, f"[report of step {step}]({run_path(experiment, run, events[bad] + '/report.html')})")
    return " - ".join(links)


def _first_bad(record: RunRecord) -> int:
    """Returns the place of the first event about values that are not finite, -1 where there is none."""
    return next((index for index, event in enumerate(record.events) if is_bad(event)), -1)


def _run_facts(record: RunRecord) -> dict[str, Any]:
    environment, identity, data = (record.start.get(key) or {} for key in ("environment", "identity", "data"))
    summary, seen = record.summary, record.start.get("precision_seen") or {}
    more = without_keys(record)
    return {
        "run": record.run_id,
        "model": model_class(record) if is_foreign(record) else "",
        "data": " ".join(str(data.get(key, "")) for key in ("name", "digest"))[:60].strip(),
        "device": f"{identity.get('device', '-')}, world {identity.get('world', '-')}" if identity else "",
        "precision seen": ", ".join(f"{key} {value}" for key, value in seen.items()),
        "parameters": _number(at(record, "model", "params")),
        "blocks" if is_foreign(record) else "sublayers": _number(
            at(record, "model", "sites") or len(record.start.get("rows") or []) or None
        ),
        "seconds": _number(summary.get("seconds")),
        "tokens/s": _number(summary.get("tokens_s")),
        "host": f"{environment.get('host', '-')}, torch {environment.get('torch', '-')}" if environment else "",
        "attempt": number(record.attempt),
        "not charted": f"{len(more)} of its own scalars, for which there is no room; they are in data/metrics.parquet: "
        + named(more, _MAX_NAMED)
        if more
        else "",
        "lost records": _number((record.end or {}).get("lost")),
    }


def family_page(claims: Sequence[tuple[str, str, str, str, str]]) -> str:
    """Returns the list of an experiment's claims; a claim is (name, verdict, headline, experiment, run)."""
    count: dict[str, int] = {}
    for _, verdict, *_ in claims:
        count[verdict] = count.get(verdict, 0) + 1
    words = ", ".join(f"{number} {verdict}" for verdict, number in count.items())
    plural = "" if len(claims) == 1 else "s"
    lines = [f"{len(claims)} claim{plural}: {words}", "", "| claim | verdict | |", "|---|---|---|"]
    for name, verdict, headline, experiment, run in claims:
        lines.append(f"| [{_c(name)}]({run_path(experiment, run)}) | {_c(verdict)} | {_c(headline)} |")
    return "\n".join(lines)


def event_page(record: RunRecord, event: Mapping[str, Any]) -> str:
    """Returns the report of one event as Markdown."""
    return markdown(report_of(record, event), record.run_id)


def _table(manifest: Manifest, records: Mapping[str, RunRecord], outcomes: Mapping[str, str]) -> list[str]:
    """Returns arms by depths: the mean over seeds of the gap, bold where a run did not train.

    Of runs that are too short to train, as all of a claim about signals are, what is measured instead.
    """
    signals = manifest.family == "signals"
    cells = [cell for cell in manifest.cells if cell.role in ("main", "control")]
    arms = list(dict.fromkeys(cell.arm for cell in cells))
    depths = sorted({cell.depth for cell in cells})
    if not any(cell.depth for cell in cells):  # measurements have no depth: their numbers are in the other table
        return []
    heads = [_what(signals, records, outcomes), *(f"L{depth:04d}" for depth in depths)]
    lines = [
        "| " + " | ".join(f"{head}&emsp;" for head in heads) + " |",  # MLflow's tables have no space between columns
        "|---" * (len(depths) + 1) + "|",
    ]
    for arm in arms:
        row = [arm]
        for depth in depths:
            runs = list(dict.fromkeys(c.run for c in cells if c.arm == arm and c.depth == depth and c.run in records))
            values = [
                _signal(records[run]) if signals or outcomes[run] == "measured" else records[run].summary.get("gap")
                for run in runs
            ]
            good = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
            words = [outcomes[run] for run in runs]
            text = number(sum(good) / len(good), 3) if good else "-" if not runs or "running" in words else "none"
            if any(word in NOT_TRAINED for word in words):
                text = f"**{text}**"
            named = ("nan", "error", "interrupted", *(() if signals else UNJUDGED))
            stopped = [f"{words.count(word)} {word}" for word in named if word in words]
            row.append(text + (f" ({', '.join(stopped)})" if stopped else ""))
        lines.append("| " + " | ".join(row) + " |")
    return lines


def _what(signals: bool, records: Mapping[str, RunRecord], outcomes: Mapping[str, str]) -> str:
    """Returns the name of the numbers in the table of arms by depths."""
    told = "log10 update / lr" if any("update" in record.series for record in records.values()) else "log10 gradient"
    if signals:
        return told if records else "log10 update / lr"
    return f"gap, nats ({told} of runs that are measured)" if "measured" in outcomes.values() else "gap, nats"


def _signal(record: RunRecord) -> float | None:
    """Returns the logarithm of what a run that is too short to train measures: its update, or a gradient."""
    update, gradient = update_at_end(record), record.last_finite("grad_last_out")
    return update if update is not None else math.log10(gradient) if gradient else None


def _measured(item: Mapping[str, Any]) -> str:
    interval = f"{number(item.get('lo'), 3)} .. {number(item.get('hi'), 3)}" if item.get("lo") is not None else ""
    return f"| {_c(item.get('name'))} | {number(item.get('value'), 3)} | {interval} | {_c(item.get('unit') or '')} |"


def _index(layer: Any) -> int | None:
    return int(layer) if isinstance(layer, int | float) and layer >= 0 else None


def _number(value: Any) -> str:
    return number(value) if isinstance(value, int | float | None) else str(value)


def _c(value: Any) -> str:
    """Returns a value that cannot break a table."""
    return str("-" if value is None else value).replace("|", "\\|").replace("\n", " ")
