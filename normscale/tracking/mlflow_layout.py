"""What a run looks like in MLflow: names, colours, tags, parameters, metric points. Pure; imports no mlflow."""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from zlib import crc32

from normscale.tracking.manifest import Cell, Manifest
from normscale.tracking.reader import RunRecord, Series, at, flat, is_foreign
from normscale.tracking.record import MAX_KEYS, OF_TRAINERS, QUANTITIES, TRAINED_NATS, USER, has_trained

AT_END = "0-end/"  # keys of this section are written once, at step 0, from the summary
SCALED = {"peak_memory_bytes": 1e-6}
"""Numbers of the end that are shown in a larger unit, which their key names (MB)."""
NONE_AT = ("bad_step", "bad_layer")  # numbers of the end that are below 0 where there is no such place: not shown then
NON_FINITE = QUANTITIES["nonfinite"].mlflow or "2-health/nonfinite"
NOT_TRAINED = ("plateau", "stuck", "diverged", "nan")  # the outcomes that tables show in bold
UNJUDGED = ("undecided", "measured")  # and those that say nothing for or against training: named beside the number
MAX_PICTURED = 10  # the UI's image grid shows the first ten runs that have images
MAX_PARAMS = 40  # of another loop's settings
KEY_CHARS = 250  # of a metric's key, where nobody asks the installed mlflow

COLOURS = {"post": "#d62728", "pre": "#2ca02c", "deepnorm": "#1f77b4"}
_FURTHER = ("#ff7f0e", "#9467bd", "#8c564b", "#e377c2", "#17becf", "#bcbd22", "#7f7f7f", "#393b79")


class Point(NamedTuple):
    """One metric value."""

    key: str
    value: float
    t: int
    step: int


def colours(arms: Sequence[str]) -> dict[str, str]:
    """Returns a colour for each arm, all different as far as there are.

    An arm that is named after a scheme ("post", "post-nowarmup") has the scheme's colour, the further ones of one
    scheme each a lighter shade of it; the others get theirs in order of appearance.
    """
    found: dict[str, str] = {}
    seen: dict[str, int] = {}
    for arm in sorted(dict.fromkeys(arms), key=lambda arm: arm not in COLOURS):  # the plain arm has the full colour
        scheme = arm.partition("-")[0]
        kind = scheme if scheme in COLOURS else ""
        index = seen[kind] = seen.get(kind, -1) + 1
        found[arm] = _lighter(COLOURS[kind], index) if kind else _FURTHER[index % len(_FURTHER)]
    return found


def _lighter(colour: str, times: int) -> str:
    """Returns a colour a third nearer to white, so many times."""
    parts = [int(colour[at : at + 2], 16) for at in (1, 3, 5)]
    return "#" + "".join(f"{round(255 - (255 - part) * (2 / 3) ** times):02x}" for part in parts)


def colour_alone(scheme: str) -> str:
    """Returns the colour of a run that belongs to no claim."""
    return COLOURS.get(scheme.partition("-")[0]) or _FURTHER[crc32(scheme.encode()) % len(_FURTHER)]


def experiment_name(family: str | None) -> str:
    """Returns the experiment for a claim's family, or for runs of no claim."""
    return "normscale-" + (family or "train").replace("/", "-")


def short_lr(lr: float) -> str:
    """Returns a learning rate as people say it: 3e-4, 3.3e-4, 1e-3."""
    mantissa, exponent = f"{lr:.1e}".split("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}"


def child_names(manifest: Manifest) -> dict[str, str]:
    """Returns a name for each run of a claim, unique in it: cell and seed, then what sets the run apart."""
    names: dict[str, str] = {}
    for run in manifest.runs:
        cell = manifest.cell_of(run)
        name = _with_role(cell.name or f"{cell.cell} s{cell.seed}", cell)
        if name in names.values() and "lr" not in name:
            name += f" lr{short_lr(cell.lr)}"
        base, count = name, 2
        while name in names.values():
            name, count = f"{base} ({count})", count + 1
        names[run] = name
    return names


def cell_tag(cell: Cell) -> str:
    """Returns what groups the seeds of one arm, depth and role."""
    return _with_role(cell.cell, cell)


def _with_role(name: str, cell: Cell) -> str:
    """Returns the name with what sets the role apart, unless the name tells it already (" lr/3", " x5 steps")."""
    extra = {"low-lr": f"lr{short_lr(cell.lr)}", "long": "long"}.get(cell.role, "")
    told = {"low-lr": (" lr",), "long": (" long", " steps")}.get(cell.role, ("",))
    return name if any(mark in name for mark in told) else f"{name} {extra}"


def outcome(record: RunRecord, cell: Cell | None, alive: bool) -> str:
    """Returns trained | plateau | diverged | nan | error | interrupted | running, or the judge's own word.

    A run whose held-out loss nobody measured, as in another loop, is finished. The judge's word may also be stuck,
    undecided or measured (short runs of which nobody asks whether they train).
    """
    if record.end is None:
        return "running" if alive else "interrupted"
    if cell is not None and cell.outcome:
        return cell.outcome
    ended = str(record.end.get("outcome"))
    if ended != "finished":
        return ended
    gap = record.summary.get("gap")
    if gap is None and is_foreign(record):
        return "finished"
    if not isinstance(gap, int | float) or not math.isfinite(gap) or (gap <= -TRAINED_NATS and not _fell(record)):
        return "diverged"
    return "trained" if has_trained(gap) else "plateau"


def _fell(record: RunRecord) -> bool:
    """Returns whether the held-out loss ended below where it began: a run of a few steps has only not got far."""
    held_out = record.series.get("loss_val")
    return held_out is not None and len(held_out.values) > 1 and held_out.values[-1] < held_out.values[0]


def status(record: RunRecord, alive: bool) -> str:
    """Returns MLflow's status: FAILED only for a stop on a non-finite value or an error, KILLED for a lost process."""
    if record.end is None:
        return "RUNNING" if alive else "KILLED"
    return {"finished": "FINISHED", "interrupted": "KILLED"}.get(str(record.end.get("outcome")), "FAILED")


def params(record: RunRecord, depth: int | None) -> dict[str, str]:
    """Returns the parameters of a run, the ones people sort by, in the order in which they are shown."""
    if is_foreign(record):
        return _foreign_params(record)
    config = record.start.get("config") or {}
    model, train = config.get("model") or {}, config.get("train") or {}
    optim, schedule = train.get("optim") or {}, train.get("schedule") or {}
    tokens = train["batch"] * model["context"] if "batch" in train and "context" in model else None
    shown = {
        "scheme": model.get("scheme"),
        "layers": depth if depth is not None else model.get("N", 0) + model.get("M", 0),
        "seed": config.get("seed"),
        "norm": model.get("norm"),
        "dtype": (config.get("precision") or {}).get("compute"),
        "lr": optim.get("lr"),
        "warmup": schedule.get("warmup_steps"),
        "d_model": model.get("d"),
        "eps": model.get("eps"),
        "batch_tokens": tokens,
        "optimizer": optim.get("name"),
        "steps": train.get("steps"),
    }
    return {key: str(value) for key, value in shown.items() if value is not None}


def model_class(record: RunRecord) -> str:
    """Returns the name of the class of another loop's model, "" where it is not recorded."""
    return next((str(name) for key in ("class", "type", "name") if (name := at(record, "model", key))), "")


def _foreign_params(record: RunRecord) -> dict[str, str]:
    """Returns what is known of a run of another loop: its model, then the settings that it gave."""
    rows = record.start.get("rows") or []
    shown = {"model": model_class(record) or None, "layers": len(rows) or None, "params": at(record, "model", "params")}
    shown |= {key_of(key): value for key, value in settings_of(record).items()}
    return {key: str(value) for key, value in list(shown.items())[:MAX_PARAMS] if value is not None}


def settings_of(record: RunRecord) -> dict[str, str | int | float]:
    """Returns the settings of a run of another loop: first what it says of itself, by its own names; lists as text."""
    config = {key: item for key, item in (record.start.get("config") or {}).items() if key not in ("loop", "name")}
    loop = at(record, "config", "loop")
    found = (flat(loop) if isinstance(loop, Mapping) else {}) | flat(config)
    told = {
        key: f"[{', '.join(map(str, value))}]" if isinstance(value, list) else value for key, value in found.items()
    }
    return {key: value for key, value in told.items() if isinstance(value, str | int | float)}


def key_of(name: str, chars: int = KEY_CHARS) -> str:
    """Returns a key that MLflow takes for any name; two names never have one key.

    A name that has to be changed, or that ends as a changed one does, gets a digest of itself at its end.
    """
    parts = re.sub(r"[^\w\-. /]", "_", name).split("/")
    key = "/".join("_" if part in ("", ".", "..") else part for part in parts)
    key = re.sub(r"^\.\.", "__", key)
    if key == name and len(key) <= chars and not re.search(r"-[0-9a-f]{8}$", key):
        return key
    return f"{key[: chars - 9]}-{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def user_keys(record: RunRecord, chars: int = KEY_CHARS) -> dict[str, str]:
    """Returns {name: key} of the scalars that another loop added, as many as there is room for, the first first.

    There is room for MAX_KEYS less all that is registered and that the run has or may come to have: a key that was sent
    is never taken back.
    """
    known = record.series.keys() | record.summary.keys()
    reserved = {name for name in QUANTITIES if name in known or not (is_foreign(record) and name in OF_TRAINERS)}
    room = MAX_KEYS - len({QUANTITIES[name].mlflow for name in reserved} - {None})
    names = [name for name in record.series if name.startswith(USER) and name not in QUANTITIES]
    return {name: key_of(name, chars) for name in names[: max(0, room)]}


def without_keys(record: RunRecord) -> list[str]:
    """Returns the names, as their loop has them, of the scalars for which there is no room in MLflow's charts."""
    shown = user_keys(record)
    return [name.removeprefix(USER) for name in record.series if name.startswith(USER) and name not in shown]


def points(record: RunRecord, chars: int = KEY_CHARS, alive: bool = False) -> list[Point]:
    """Returns every metric value the window shows, in the order in which keys should first appear: by section.

    A value that is not finite is left out of its series; the step then carries 1 in 2-health/nonfinite, which is 0
    at all other recorded steps. (A number of another loop's own may be NaN where there is none, and raises no flag.)
    That flag, and what another loop adds, may still change at the newest step of a run that is `alive`, and is left
    out there: a point that was sent stays as it is.
    """
    found: list[Point] = []
    summary = record.summary | {"update_end": update_at_end(record)}
    ended = int(record.end["t"]) if record.end else 0
    by_section = sorted(QUANTITIES.items(), key=lambda item: (item[1].mlflow or "").partition("/")[0])
    for name, quantity in by_section:
        key = quantity.mlflow
        if key is None or key == NON_FINITE:
            continue
        if key.startswith(AT_END):
            shown = _shown_at_end(name, summary.get(name))
            if record.finished and (point := at_end(key.removeprefix(AT_END), shown, ended)):
                found.append(point)
        elif name in record.series:
            found += _finite(key, record.series[name])
    first_other = next((index for index, point in enumerate(found) if point.key > NON_FINITE), len(found))
    theirs = [point for name, key in user_keys(record, chars).items() for point in _finite(key, record.series[name])]
    flags = _flags(record)
    if alive and flags:
        newest = flags[-1].step
        flags, theirs = flags[:-1], [point for point in theirs if point.step < newest]
    return found[:first_other] + flags + found[first_other:] + theirs


def update_at_end(record: RunRecord) -> float | None:
    """Returns log10 of the last model update over the learning rate: arms with other rates can stand side by side."""
    update, rate = record.last_finite("update"), at(record, "config", "train", "optim", "lr")
    return math.log10(update / rate) if update and isinstance(rate, int | float) and rate > 0 else None


def _shown_at_end(name: str, value: Any) -> Any:
    if not isinstance(value, int | float) or (name in NONE_AT and value < 0):
        return None
    return value * SCALED.get(name, 1)


def at_end(name: str, value: Any, t: int) -> Point | None:
    """Returns a number of the end as it goes into tables: four digits, at step 0; None where there is none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return Point(AT_END + name, float(f"{value:.4g}"), t, 0)


def _finite(key: str, series: Series) -> list[Point]:
    rows = zip(series.values, series.t, series.steps, strict=True)
    return [Point(key, value, t, step) for value, t, step in rows if math.isfinite(value)]


def _flags(record: RunRecord) -> list[Point]:
    times: dict[int, int] = {}
    bad: set[int] = set()
    for name, series in record.series.items():
        for step, t, value in zip(series.steps, series.t, series.values, strict=True):
            times[step] = max(t, times.get(step, 0))
            spoilt = not math.isfinite(value) and not name.startswith(USER)
            if spoilt or (name == "nonfinite" and value != 0):
                bad.add(step)
    return [Point(NON_FINITE, float(step in bad), t, step) for step, t in sorted(times.items())]


def pictured(manifest: Manifest) -> list[str]:
    """Returns the runs of a claim that carry images: main cells, lowest seed, at most ten, ends of the depths kept."""
    main = [cell for cell in manifest.cells if cell.role == "main"]
    seed = min((cell.seed for cell in main), default=0)
    first: dict[tuple[int, str], str] = {}
    for cell in main:
        if cell.seed == seed:
            first.setdefault((cell.depth, cell.arm), cell.run)
    runs = list(dict.fromkeys(first.values()))
    if len(runs) <= MAX_PICTURED:
        return runs
    arms = len({arm for _, arm in first})
    depths = sorted({depth for depth, _ in first})
    count = max(1, min(len(depths), MAX_PICTURED // arms))
    places = [len(depths) - 1] if count == 1 else [round(i * (len(depths) - 1) / (count - 1)) for i in range(count)]
    chosen = {depths[place] for place in places}
    return list(dict.fromkeys(run for (depth, _), run in first.items() if depth in chosen))[:MAX_PICTURED]
