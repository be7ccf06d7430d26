"""One run on one screen, from its spool alone: what it is, how it ended, its numbers, its curves."""

import math
import textwrap
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from normscale.config.sources import plain
from normscale.progress import duration
from normscale.tracking.draw import Look, Plot, Points, log_span, span_of, sparkline
from normscale.tracking.mlflow_layout import outcome
from normscale.tracking.reader import RunRecord
from normscale.tracking.record import TRAINED_NATS
from normscale.tracking.spool import strict
from normscale.tracking.text import event_line, number

LABEL = 10  # columns of the labels at the left
PLOT_LINES = 9
MAX_EVENTS = 12
WORDS = {
    "trained": ("finished: trained", "good"),
    "plateau": (f"finished: within {TRAINED_NATS} nats of the unigram entropy", "open"),
    "diverged": (f"finished: {TRAINED_NATS} nats or more above the unigram entropy", "bad"),
    "nan": ("stopped: not finite", "bad"),
    "error": ("failed", "bad"),
    "interrupted": ("interrupted", "open"),
    "running": ("running", "open"),
}
TOPOLOGY = {(True, True): "encoder-decoder", (True, False): "encoder-only", (False, True): "decoder-only"}
BY_KIND, BY_SIDE = 2, 1  # how much of a site's name stays when its kind is grouped
TOO_MANY = ("stream_absmax", "branch_rms", "branch_absmax", "stream_nonfinite", "branch_nonfinite")
SHOWN = {"stream_rms": ("stream RMS", BY_SIDE), "grad_norm": ("gradient", BY_KIND)}


def show(record: RunRecord, alive: bool, look: Look) -> list[str]:
    """Returns the lines that say what is known of a run, finished or not; `alive` says whether a process writes it."""
    lines = _head(record, alive, look)
    for label, text in (*_what(record), ("", ""), *_numbers(record, alive)):
        lines += _labelled(label, text, look)
    for section in (_loss(record, look), _depth(record, look), _events(record, look)):
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
            "series": series,
            "profiles": profiles,
        }
    )
    return found


def at(record: RunRecord, *keys: str) -> Any:
    """Returns a field of the start record, None where it or a section around it is missing."""
    found: Any = record.start
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
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
    words, kind = WORDS.get(outcome(record, None, alive), ("ended", "open"))
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
    identity, where = at(record, "identity") or {}, at(record, "environment") or {}
    asked = at(record, "config", "precision", "compute")
    threads = where.get("threads") or identity.get("threads")
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
    return [(label, plain(text, 400)) for label, text in facts if text]


def _numbers(record: RunRecord, alive: bool) -> list[tuple[str, str]]:
    """Returns how it went, as (label, text)."""
    held_out, gap, nats = value(record, "loss_val"), value(record, "gap"), at(record, "data", "unigram_nats")
    nats = record.summary.get("unigram_nats", nats)
    gap = gap if gap is not None else value(record, "loss_gap")
    side = ""
    if _is_number(gap):
        side = f"; {abs(gap):.3g} {'below' if gap >= 0 else 'above'} the unigram entropy {number(nats)}"
    losses = f"held-out {number(held_out)}, training {number(value(record, 'loss_train'))}{side}"
    if not side and (last := record.last_finite("loss_train")) is not None:
        losses += f"; the last finite training loss was {number(last)}"
    attempted = record.summary.get("steps", max((s.steps[-1] for s in record.series.values() if s.steps), default=0))
    steps = (
        f"{number(attempted)} of {_n(at(record, 'config', 'train', 'steps'))} attempted, "
        f"{number(value(record, 'applied'))} applied, {number(value(record, 'skipped'))} skipped; "
        f"spike score {number(value(record, 'spike'))}"
    )
    found = [("loss", losses), ("steps", steps)]
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
    found.append(("speed", speed))
    if _is_number(memory := value(record, "peak_memory_bytes")):
        found.append(("memory", f"{amount(memory, 'B')} at the most ({_n(record.summary.get('peak_memory_source'))})"))
    found.append(("time", _time(record, alive)))
    if record.torn:
        found.append(("note", f"{record.torn} unreadable lines of its records are left out"))
    return [(label, plain(text, 400)) for label, text in found]


def _bad(record: RunRecord) -> str:
    """Returns where it first was not finite, empty where it never was."""
    event = next((event for event in record.events if event.get("event") == "nonfinite"), {})
    step = record.summary.get("bad_step", event.get("step", -1))
    layer = record.summary.get("bad_layer", event.get("layer", -1))
    if not _is_number(step) or step < 0:
        return ""
    rows = record.start.get("rows") or []
    where = "in an unknown sublayer"
    if _is_number(layer) and layer >= 0:
        named = f" {rows[int(layer)]}" if int(layer) < len(rows) else ""
        where = f"in{named} (sublayer {int(layer) + 1} of {len(rows) or '?'})"
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


def _loss(record: RunRecord, look: Look) -> list[str]:
    """Returns the plot of the losses."""
    train, held_out = points(record, "loss_train"), points(record, "loss_val")
    if sum(math.isfinite(y) for _, y in train + held_out) < 3:
        return []
    nats = record.summary.get("unigram_nats", at(record, "data", "unigram_nats"))
    levels = [float(nats)] if _is_number(nats) else []
    low, high = span_of([y for _, y in train + held_out], levels)
    begin = [y for _, y in [*held_out[:1], *train[:1]] if math.isfinite(y)]
    high = min(high, 2 * max([*begin, *levels])) if begin else high  # one huge loss would flatten all others
    steps = [x for x, _ in train + held_out]
    plot = Plot(look, PLOT_LINES, (min(steps), max(steps)), (low, high))
    for level in levels:
        plot.level(level, "unigram")
    plot.curve(train)
    mark = "●" if look.unicode else "o"
    plot.marks(held_out, mark)
    bad = [(x, high) for x, y in train if not math.isfinite(y)]
    plot.marks(bad, look.bad)
    title = f"loss in nats: the line is the training loss, {mark} the held-out loss"
    title += f", {look.bad} not finite" if bad else ""
    return [look.fit(title), *(look.fit(line) for line in plot.lines())]


def _depth(record: RunRecord, look: Look) -> list[str]:
    """Returns the last of each profile on a line, by side or by kind of sublayer, and those that others added."""
    rows = record.start.get("rows") or []
    named = SHOWN | {name: (name, 0) for name in record.profiles if name not in (*SHOWN, *TOO_MANY)}
    found = [
        (label, parts, record.profiles[name])
        for name, (label, parts) in named.items()
        if name in record.profiles and record.profiles[name].data.size
    ]
    if not found:
        return []
    last = max(profile.steps[-1] for _, _, profile in found)
    title = f"over depth, step {last}"
    lines = [look.paint(look.fit(f"{title:<{LABEL + 14}} {'first':>8} {'median':>8} {'last':>8}"), "faint")]
    for label, parts, profile in found:
        if profile.steps[-1] != last:
            lines.append(look.fit(f"{label}, step {profile.steps[-1]}:"))
        for group, data in _groups(profile.data[-1], rows, parts):
            lines.append(look.fit(_bars(label, group, data, look)))
            label = ""
    return lines


def _bars(label: str, group: str, data: "np.ndarray[Any, Any]", look: Look) -> str:
    finite = data[np.isfinite(data)]
    middle = float(np.median(finite)) if finite.size else math.nan
    numbers = " ".join(f"{number(x, 3):>8}" for x in (data[0], middle, data[-1]))
    said = f"{plain(label, 24):<{LABEL}} {plain(group, 13):<13} {numbers} "
    logs = log_span(*span_of(data))
    said += "log " if logs else "    "
    if logs:
        data = np.log10(data.astype(float))
    return said + sparkline(data, look, look.width - len(said))


def _groups(data: "np.ndarray[Any, Any]", rows: Sequence[str], parts: int) -> list[tuple[str, "np.ndarray[Any, Any]"]]:
    """Returns (name, values in depth order) of each side, or of each kind of sublayer of each side."""
    if not parts or len(rows) != len(data):
        return [("", data)]
    keys = [".".join(row.split(".")[::2] if parts == BY_KIND else row.split(".")[:1]) for row in rows]
    return [(key, data[[i for i, own in enumerate(keys) if own == key]]) for key in dict.fromkeys(keys)]


def _events(record: RunRecord, look: Look) -> list[str]:
    if not record.events:
        return []
    width = len(str(record.events[-1].get("step")))
    lines = [
        look.fit(plain(f"step {event.get('step')!s:>{width}}  {event_line(event)}", 400))
        for event in record.events[:MAX_EVENTS]
    ]
    more = len(record.events) - MAX_EVENTS
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
