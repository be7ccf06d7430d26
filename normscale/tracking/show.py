"""One run on one screen, from its spool alone: what it is, how it ended, its numbers, its curves."""

import math
import textwrap
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from normscale.config.sources import plain
from normscale.progress import duration
from normscale.tracking.draw import Look, Plot, Points, span_of
from normscale.tracking.event_report import is_bad, lines_of, report_of, sentence
from normscale.tracking.mlflow_layout import model_class, outcome, settings_of, without_keys
from normscale.tracking.reader import RunRecord, at, is_foreign
from normscale.tracking.record import PROBE_S, TRAINED_NATS, USER, too_few
from normscale.tracking.show_depth import depth
from normscale.tracking.spool import strict
from normscale.tracking.text import named, number, unit_of

LABEL = 10  # columns of the labels at the left
PLOT_LINES = 9
MAX_EVENTS = 12
MAX_NAMED = 20  # scalars for which MLflow's charts have no room
WORDS = {
    "trained": ("finished: trained", "good"),
    "plateau": ("finished: no better than token frequencies", "open"),
    "diverged": ("finished: worse than token frequencies", "bad"),
    "finished": ("finished", "good"),
    "nan": ("stopped: not finite", "bad"),
    "error": ("failed", "bad"),
    "interrupted": ("interrupted", "open"),
    "running": ("running", "open"),
}
TOPOLOGY = {(True, True): "encoder-decoder", (True, False): "encoder-only", (False, True): "decoder-only"}
NEWEST = {"lr": "lr", "grad_norm": "gradient norm", "logz_mean": "log Z"}  # numbers of a step, and how they are said
RUN_UP = 5  # steps before a bad value that are shown
WIDEST = 24  # characters of a cell of their table
HANDED_ON = 6  # modules


def show(record: RunRecord, alive: bool, look: Look) -> list[str]:
    """Returns the lines that say what is known of a run, finished or not; `alive` says whether a process writes it."""
    lines = _head(record, alive, look)
    for label, text in (*_what(record), ("", ""), *_numbers(record, alive)):
        lines += _labelled(label, text, look)
    for section in (_loss(record, look), depth(record, look), _first_bad(record, look), _events(record, look)):
        lines += ["", *section] if section else []
    return lines


def as_json(record: RunRecord, alive: bool) -> dict[str, Any]:
    """Returns everything that is known of a run as strict JSON can hold it (NaN as "NaN", as in the spool)."""
    series = {
        name: {"steps": found.steps, "applied": found.applied, "values": found.values}
        for name, found in record.series.items()
    }
    profiles = {name: {"steps": found.steps, "data": found.data} for name, found in record.profiles.items()}
    found: dict[str, Any] = strict(
        {
            "run_id": record.run_id,
            "folder": str(record.run_dir.absolute()),
            "outcome": outcome(record, None, alive),
            "running": alive,
            "attempt": record.attempt,
            "unreadable_lines": record.torn,
            "start": record.start,
            "end": record.end,
            "events": record.events,
            "ledger": record.ledger,
            "series": series,
            "profiles": profiles,
        }
    )
    return found


def value(record: RunRecord, name: str) -> Any:
    """Returns a number of the run's end, or the newest one before it; None where there is none."""
    return record.summary.get(name, record.last_finite(name))


def amount(quantity: Any, unit: str = "") -> str:
    """Returns a number with three digits and a decimal prefix, as in 22.7 G; "-" where it is none."""
    if not _is_number(quantity):
        return "-"
    for power, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(quantity) >= power:
            return f"{quantity / power:.3g} {prefix}{unit}"
    return f"{quantity:.3g} {unit}".rstrip()


def _head(record: RunRecord, alive: bool, look: Look) -> list[str]:
    ended = outcome(record, None, alive)
    words, kind = WORDS.get(ended, ("ended", "open"))
    words += ": too few steps" if too_few(ended, record.summary.get("steps")) else ""
    if record.end is None and not alive:
        words = "no end: killed, or its machine was lost"
    elif record.end is not None and record.end.get("exit_code"):
        words += f" (exit code {record.end['exit_code']})"
    name, label = plain(record.run_id), at(record, "config", "name")
    name += f" ({plain(str(label), 30)})" if label not in (None, "run") else ""
    gap = look.width - len(name) - len(words)
    if gap >= 2:
        return [look.paint(look.fit(name), "strong") + " " * gap + look.paint(words, kind)]
    return [look.paint(look.fit(name), "strong"), look.paint(look.fit(words), kind)]


def _what(record: RunRecord) -> list[tuple[str, str]]:
    """Returns what the run is, as (label, text)."""
    if not record.start:
        return [("", "its start record is missing or unreadable: what it is, is not known")]
    if is_foreign(record):
        return _foreign(record)
    model, train = at(record, "config", "model") or {}, at(record, "config", "train") or {}
    blocks = {side: model.get(side) for side in ("N", "M") if isinstance(model.get(side), int) and model.get(side)}
    topology = TOPOLOGY.get(("N" in blocks, "M" in blocks), "")
    shape = [f"{side}={count}" for side, count in blocks.items()]
    shape += [f"{key} {model[key]}" for key in ("d", "heads", "ffn", "context") if model.get(key) is not None]
    made = [
        f"{amount(at(record, 'model', 'params'))} parameters",
        f"{_n(at(record, 'model', 'sites'))} sublayers",
        f"{_n(model.get('norm'))}, eps {_n(model.get('eps'))}",
    ]
    optim, schedule = train.get("optim") or {}, train.get("schedule") or {}
    data, seen = at(record, "data") or {}, at(record, "precision_seen") or {}
    task = at(record, "config", "data", "task") or data.get("task")
    source = f"{_n(task)} on {_n(data.get('name'))}" if task else _n(data.get("name"))
    asked = at(record, "config", "precision", "compute")
    facts = [
        ("model", f"{_n(model.get('scheme'))}, {topology}: {', '.join(shape)}"),
        ("", ", ".join(made)),
        ("data", f"{source}, {amount(data.get('train_tokens'))} training tokens, digest {_n(data.get('digest'))[:12]}"),
        (
            "training",
            f"{_n(train.get('steps'))} steps of {_n(train.get('batch'))} sequences, {_n(optim.get('name'))} lr "
            f"{_n(optim.get('lr'))}, {_n(schedule.get('kind'))}, warm-up {_n(schedule.get('warmup_steps'))}, "
            f"seed {_n(at(record, 'config', 'seed'))}",
        ),
        ("precision", f"{_n(asked)} asked; seen: {_by_value(seen)}"),
        (
            "kernels",
            f"norms {_n(at(record, 'backend', 'norm'))}, attention {_n(at(record, 'backend', 'attention'))}",
        ),
    ]
    return [(label, plain(text, 400)) for label, text in [*facts, *_where(record)] if text]


def _where(record: RunRecord) -> list[tuple[str, str]]:
    """Returns where it ran and what it is known by, as (label, text)."""
    identity, where = at(record, "identity") or {}, at(record, "environment") or {}
    threads = where.get("threads") or identity.get("threads")
    return [
        (
            "ran on",
            f"{_n(identity.get('device'))} {_n(identity.get('device_name'))}, {_n(threads)} threads, "
            f"{_n(at(record, 'engine'))} engine, world {_n(identity.get('world'))}, host {_n(where.get('host'))}",
        ),
        (
            "software",
            f"normscale {_n(where.get('normscale'))}, git {_n(where.get('git'))}, torch {_n(where.get('torch'))}",
        ),
        ("identity", f"{_n(identity.get('hash'))[:16]}, sources {_n(identity.get('sources'))}"),
    ]


def _foreign(record: RunRecord) -> list[tuple[str, str]]:
    """Returns what is known of a run of another loop, or of a measurement, as (label, text)."""
    rows = record.start.get("rows") or []
    made = [
        model_class(record) or "of another loop",
        f"{amount(at(record, 'model', 'params'))} parameters" if at(record, "model", "params") else "",
        f"{len(rows)} rows over depth, {rows[0]} to {rows[-1]}" if rows else "",
    ]
    measure = at(record, "config", "measure")
    found = {name: values for name, values in record.series.items() if name.startswith(USER)} if measure else {}
    numbers = ", ".join(f"{name.removeprefix(USER)} {number(own.values[-1], 4)}" for name, own in found.items())
    facts = [
        ("measured", numbers) if measure else ("model", ", ".join(part for part in made if part)),
        ("settings", ", ".join(f"{key}={_n(item)}" for key, item in settings_of(record).items())),
        ("precision", _by_value(at(record, "precision_seen") or {})),
    ]
    needs = {"ran on": ("identity",), "software": ("environment",), "identity": ("identity", "hash")}
    facts += [(label, text.replace(", git -", "")) for label, text in _where(record) if at(record, *needs[label])]
    return [(label, plain(text, 400)) for label, text in facts if text not in ("", "-")]


def _numbers(record: RunRecord, alive: bool) -> list[tuple[str, str]]:
    """Returns how it went, as (label, text)."""
    held_out, gap, nats = value(record, "loss_val"), value(record, "gap"), at(record, "data", "unigram_nats")
    nats = record.summary.get("unigram_nats", nats)
    gap = gap if gap is not None else value(record, "loss_gap")
    side = ""
    if _is_number(gap):
        side = f"; {abs(gap):.3g} {'below' if gap >= 0 else 'above'} the unigram entropy {number(nats)}"
        side += f", which is what token frequencies alone give (trained: {TRAINED_NATS} or more below)"
    losses = f"training {number(value(record, 'loss_train'))}{side}"
    if held_out is not None or not is_foreign(record):
        losses = f"held-out {number(held_out)}, {losses}"
    if not side and (last := record.last_finite("loss_train")) is not None:
        losses += f"; the last finite training loss was {number(last)}"
    attempted = record.summary.get("steps", max((s.steps[-1] for s in record.series.values() if s.steps), default=0))
    asked = at(record, "config", "train", "steps")
    steps = (
        f"{number(attempted)}{'' if asked is None else f' of {_n(asked)}'} attempted, "
        f"{number(value(record, 'applied'))} applied, {number(value(record, 'skipped'))} skipped; "
        f"spike score {number(value(record, 'spike'))}"
    )
    found = [("loss", losses), *_newest(record), ("steps", steps)]
    if reasons := Counter(str(row["reason"]) for row in record.ledger if row.get("reason")):
        found.append(("", "not applied: " + ", ".join(f"{count} {reason}" for reason, count in reasons.items())))
    if bad := _bad(record):
        found.append(("bad", bad))
    slope, least = value(record, "grad_slope"), value(record, "grad_min_end")
    if slope is not None or least is not None:
        found.append(
            ("gradient", f"slope over depth {number(slope, 3)} (log/log), smallest of a sublayer {number(least, 3)}")
        )
    updates = [(key.partition("@")[2], item) for key, item in record.summary.items() if key.startswith("update@")]
    if updates:
        found.append(("update", ", ".join(f"step {step}: {number(item, 3)}" for step, item in updates[:8])))
    speed = f"{amount(value(record, 'tokens_s'))} tokens/s"
    if _is_number(mfu := value(record, "mfu")):
        peak, source = record.summary.get("peak_flops"), record.summary.get("peak_source")
        speed += f"; MFU {100 * mfu:.3g} % of {amount(peak, 'FLOP/s')} ({_n(source)})"
        speed += f", {amount(record.summary.get('flops_per_step'), 'FLOP')} a step"
    if value(record, "tokens_s") is not None or not is_foreign(record):
        found.append(("speed", speed))
    if _is_number(memory := value(record, "peak_memory_bytes")):
        found.append(("memory", f"{amount(memory, 'B')} at the most ({_n(record.summary.get('peak_memory_source'))})"))
    found.append(("time", _time(record, alive)))
    if probes := _probes(record):
        found.append(("probes", probes))
    if uncharted := without_keys(record):
        count = f"{len(uncharted)} of its own scalars have no room in MLflow's charts (they are in the records)"
        found.append(("note", f"{count}: {named(uncharted, MAX_NAMED)}"))
    if record.torn:
        found.append(("note", f"{record.torn} unreadable lines of its records are left out"))
    if lost := (record.end or {}).get("lost"):
        found.append(("note", f"{_n(lost)} records could not be written and are missing"))
    return [(label, plain(text, 400)) for label, text in found]


def _newest(record: RunRecord) -> list[tuple[str, str]]:
    """Returns the newest numbers of the training step, then those that another loop has added, as (label, text)."""
    numbers = {said: record.last_finite(name) for name, said in NEWEST.items()}
    step = ", ".join(f"{said} {number(found)}" for said, found in numbers.items() if found is not None)
    own = {name: series.values[-1] for name, series in record.series.items() if name.startswith(USER)}
    if at(record, "config", "measure"):  # which has no step, and whose numbers are told above
        own = {}
    theirs = named([f"{plain(name.removeprefix(USER), 40)} {number(last)}" for name, last in own.items()], MAX_NAMED)
    return [(label, text) for label, text in (("newest", step), ("its own", theirs)) if text]


def _bad(record: RunRecord) -> str:
    """Returns where it first was not finite, empty where it never was."""
    event = next((event for event in record.events if event.get("event") == "nonfinite"), {})
    if event.get("culprit"):
        return f"first at step {_n(event.get('step'))}: {sentence(event)}"
    step = record.summary.get("bad_step", event.get("step", -1))
    layer = record.summary.get("bad_layer", event.get("layer", -1))
    if not _is_number(step) or step < 0:
        return ""
    rows = record.start.get("rows") or []
    where = "at an unknown place"
    if _is_number(layer) and layer >= 0:
        name = f"in {rows[int(layer)]}" if int(layer) < len(rows) else ""
        where = f"{name} ({int(layer) + 1} of {len(rows) or '?'} over depth)".lstrip()
    parameter = record.summary.get("bad_parameter") or event.get("parameter")
    fault = f", {event['fault']}" if event.get("fault") else ""
    return f"first at step {number(step)} {where}{fault}" + (f", parameter {parameter}" if parameter else "")


def _time(record: RunRecord, alive: bool) -> str:
    begun = record.start.get("t")
    times = [begun, *(series.t[-1] for series in record.series.values() if series.t)]
    ended = (record.end or {}).get("t") or max((t for t in times if t), default=None)
    said = []
    if begun:
        said.append(f"started {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(begun / 1000))}")
        now = int(time.time() * 1000) if alive else ended
        said.append(f"{'running for' if alive else 'took'} {_seconds(((now or begun) - begun) / 1000)}")
    training = record.summary.get("train_seconds")
    if _is_number(training):
        said.append(f"{_seconds(float(training or 0))} of it in training steps")
    if record.attempt > 1:
        begins = at(record, "from_step")
        said.append(f"attempt {record.attempt}" + (f", went on after step {begins}" if begins else ", from the start"))
    return ", ".join(said) or "-"


def _probes(record: RunRecord) -> str:
    """Returns what probes took for passes of their own, beside the training steps; empty where none made any."""
    taken = {key.removesuffix(PROBE_S): value for key, value in record.summary.items() if key.endswith(PROBE_S)}
    taken = {name: float(value) for name, value in taken.items() if _is_number(value) and value > 0}
    seconds = record.summary.get("seconds")
    whole = float(seconds or 0) if _is_number(seconds) else 0.0
    if not taken:
        return ""
    share = f", {100 * sum(taken.values()) / whole:.2g} % of the run" if whole > 0 else ""
    each = ", ".join(f"{name} {_seconds(value)}" for name, value in sorted(taken.items(), key=lambda one: -one[1]))
    return f"passes of their own: {each}{share}"


def _loss(record: RunRecord, look: Look) -> list[str]:
    """Returns the plot of the losses."""
    train, held_out = points(record, "loss_train"), points(record, "loss_val")
    if sum(math.isfinite(y) for _, y in train + held_out) < 3:
        return []
    nats = record.summary.get("unigram_nats", at(record, "data", "unigram_nats"))
    levels = [float(nats)] if _is_number(nats) else []
    low, high = span_of([y for _, y in train + held_out], levels)
    begin = [y for _, y in [*held_out[:1], *train[:1]] if math.isfinite(y)]
    if begin and (most := 2 * max([*begin, *levels])) > 0:
        high = min(high, most)  # one huge loss would flatten all others
    steps = [x for x, _ in train + held_out]
    plot = Plot(look, PLOT_LINES, (min(steps), max(steps)), (low, high))
    for level in levels:
        plot.level(level, "unigram")
    plot.curve(train)
    mark = "●" if look.unicode else "o"
    plot.marks(held_out, mark)
    bad = [(x, high) for x, y in train if not math.isfinite(y)]
    plot.marks(bad, look.bad)
    unit = unit_of(record, "loss_train")
    title = f"loss in {unit}" if unit else "loss"
    title += ": the line is the training loss" + (f", {mark} the held-out loss" if held_out else "")
    title += f", {look.bad} not finite" if bad else ""
    return [look.fit(title), *(look.fit(line) for line in plot.lines())]


def _first_bad(record: RunRecord, look: Look) -> list[str]:
    """Returns what is known of the first bad value: what and where it was, what led there, what was done."""
    event = next((event for event in record.events if is_bad(event)), None)
    if event is None or not (event.get("culprit") or event.get("run_up")):
        return []
    report = report_of(record, event)
    lines = [look.paint("the first value that was not finite", "faint")]
    for label, text in [("", report.says), *report.facts[1:]]:  # the step is in the sentence
        lines += _labelled(label, plain(text, 400), look)
    for table in report.tables:
        if table.title.startswith("Run-up"):
            rows, whose = [table.head, *table.rows], event.get("run_up_of")
            lines += _labelled("run-up", f"of {plain(str(whose), 400)}", look) if whose else []
            lines += _aligned([[row[0], *row[1:][-RUN_UP:]] for row in rows], "" if whose else "run-up", look)
        elif table.title.startswith("Handed"):
            names = [row[0] for row in table.rows]
            more = f" and {len(names) - HANDED_ON} more" if len(names) > HANDED_ON else ""
            lines += _labelled("handed on", plain(", ".join(names[:HANDED_ON]) + more, 400), look)
    return lines


def _aligned(rows: Sequence[Sequence[str]], label: str, look: Look) -> list[str]:
    """Returns a table whose columns are aligned to the right."""
    widths = [max(len(plain(row[i], WIDEST)) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = "  ".join(f"{plain(text, WIDEST):>{width}}" for text, width in zip(row, widths, strict=True))
        faint = look.paint(f"{label:<{LABEL}}", "faint")
        lines.append(f"{faint} {look.fit(cells)}" if look.colour else look.fit(f"{label:<{LABEL}} {cells}"))
        label = ""
    return lines


def _events(record: RunRecord, look: Look) -> list[str]:
    if not record.events:
        return []
    told = lines_of(record.events, record.start.get("rows") or [])
    shown = sorted(sorted(told, key=lambda line: not line.bad)[:MAX_EVENTS], key=lambda line: line.place)
    width = max(len(line.step) for line in shown)
    lines = [look.fit(plain(f"step {line.step:>{width}}  {line.says}", 400)) for line in shown]
    more = len(told) - len(shown)
    return [look.paint("events", "faint"), *lines, *([f"and {more} more"] if more > 0 else [])]


def points(record: RunRecord, name: str) -> Points:
    """Returns (step, value) of one scalar."""
    series = record.series.get(name)
    return list(zip(series.steps, series.values, strict=True)) if series else []


def _labelled(label: str, text: str, look: Look) -> list[str]:
    """Returns a text beside its label, on as many lines as it takes."""
    if not text:
        return [""] if not label else []
    wrapped = textwrap.wrap(text, look.width - LABEL - 1, break_on_hyphens=False) or [""]
    faint = look.paint(f"{label:<{LABEL}}", "faint") if label else " " * LABEL
    return [f"{faint} {look.fit(wrapped[0])}", *(f"{'':<{LABEL}} {look.fit(line)}" for line in wrapped[1:])]


def _by_value(fields: Mapping[str, Any]) -> str:
    """Returns fields with their values, those of one value together."""
    keys: dict[str, list[str]] = {}
    for key, item in fields.items():
        keys.setdefault(str(item), []).append(str(key))
    return "; ".join(f"{', '.join(names)} {item}" for item, names in keys.items()) or "-"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds < 60 else duration(seconds)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _n(value: Any) -> str:
    """Returns a field as it is said: numbers short, nothing as "-"."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return "-" if value is None else str(value)
