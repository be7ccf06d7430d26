"""What sets two runs apart: configuration, where they ran, numbers, curves. What is the same is not said."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from normscale.config.sources import plain
from normscale.tracking.draw import Look, log_span, resampled, span_of, sparkline
from normscale.tracking.reader import RunRecord, at
from normscale.tracking.record import PROBE_S
from normscale.tracking.show import points
from normscale.tracking.spool import strict
from normscale.tracking.text import number

APART = 1e-6  # a relative difference from which two training losses are not the same
COST = (
    "seconds",
    "thread_s",
    "train_seconds",
    "checkpoint_s",
    "tokens_s",
    "tflops_s",
    "mfu",
    "peak_flops",
    "peak_memory_bytes",
)
"""Numbers that two starts of one run never share."""
PLACES = ("identity", "environment", "data", "model", "backend", "precision_seen", "engine")
POSITIONS = ("bad_step", "bad_layer")  # numbers of places, with no sense in shares
SIGNED = ("gap", "spike", "spike_grad", "grad_slope")  # that are 0 or below as well: of these the difference is said
PROFILES = {"stream_rms": "stream RMS", "grad_norm": "gradient"}
SIDES = ("A", "B")

Pair = tuple[Any, Any]


def differences(a: RunRecord, b: RunRecord) -> dict[str, Any]:
    """Returns what differs, by section; a section in which nothing differs is empty.

    `config` and `place` hold pairs by dotted key; `numbers` and `cost` hold pairs and the relative difference, None
    for numbers that may be 0 or below;
    `training` tells where the training losses part; `profiles` names those whose last arrays are not the same.
    """
    sides = [_flat({key: at(record, key) for key in PLACES}) for record in (a, b)]
    summaries = [record.summary | {"outcome": (record.end or {}).get("outcome")} for record in (a, b)]
    numbers = _pairs(*summaries)
    return {
        "config": _pairs(*(_flat(at(record, "config") or {}) for record in (a, b))),
        "place": _pairs(*sides),
        "numbers": {
            key: (*pair, None if key in (*POSITIONS, *SIGNED) else relative(*pair))
            for key, pair in numbers.items()
            if not _is_cost(key)
        },
        "cost": {key: (*pair, relative(*pair)) for key, pair in numbers.items() if _is_cost(key)},
        "training": training(a, b),
        "profiles": _profiles_apart(a, b),
    }


def training(a: RunRecord, b: RunRecord) -> dict[str, Any]:
    """Returns how the training losses part: empty where they have the same steps and values."""
    ours, theirs = dict(points(a, "loss_train")), dict(points(b, "loss_train"))
    common = sorted(ours.keys() & theirs.keys())
    apart = {step: _apart(ours[step], theirs[step]) for step in common}
    if ours.keys() == theirs.keys() and not any(apart.values()):
        return {}
    first = next((step for step in common if apart[step] > APART), None)
    most = max(common, key=lambda step: apart[step], default=None)
    return {
        "common": len(common),
        "only": (len(ours) - len(common), len(theirs) - len(common)),
        "first": first,
        "first_losses": None if first is None else (ours[first], theirs[first]),
        "largest": 0.0 if most is None else apart[most],
        "largest_at": most,
    }


def relative(a: Any, b: Any) -> float | None:
    """Returns (b - a) / |a|, None where one of them is no finite number or a is 0."""
    return (b - a) / abs(a) if _is_finite(a) and _is_finite(b) and a else None


def diff(a: RunRecord, b: RunRecord, look: Look) -> list[str]:
    """Returns the lines that say what sets two runs apart."""
    found = differences(a, b)
    lines = [look.fit(f"{side}  {plain(record.run_id)}") for side, record in zip(SIDES, (a, b), strict=True)]
    if a.run_dir.resolve() == b.run_dir.resolve():
        return [*lines, "", look.fit("these are one run: nothing differs")]
    if not any(found.values()):
        return [*lines, "", look.fit("nothing differs: configuration, places, numbers and curves are the same")]
    if not (found["numbers"] or found["training"] or found["profiles"]):
        lines += ["", look.fit("the results are the same to the last digit")]
    for title, section in (("configuration", "config"), ("where it ran", "place")):
        lines += _table(title, found[section], look)
    for title, section in (("numbers", "numbers"), ("cost", "cost")):
        lines += _table(title, found[section], look)
    return lines + _training(a, b, found["training"], look) + _profiles(a, b, found["profiles"], look)


def as_json(a: RunRecord, b: RunRecord) -> dict[str, Any]:
    """Returns what differs as strict JSON can hold it."""
    runs = [{"run_id": record.run_id, "folder": str(record.run_dir.absolute())} for record in (a, b)]
    found: dict[str, Any] = strict({"runs": runs, **differences(a, b)})
    return found


def _table(title: str, pairs: Mapping[str, tuple[Any, ...]], look: Look) -> list[str]:
    """Returns a line for each key: both values and, where the pairs have a third item, the relative difference.

    Of numbers that may be 0 or below it is the difference itself.
    """
    if not pairs:
        return []
    shown = {key: (_said(pair[0]), _said(pair[1]), _moved(key, pair)) for key, pair in pairs.items()}
    keys = min(max(len(text) for text in (*pairs, title)), look.width // 2)
    rest = look.width - keys - 4 - (14 if any(share for *_, share in shown.values()) else 0)
    columns = [min(max([10, *(len(texts[i]) for texts in shown.values())]), rest // 2) for i in (0, 1)]
    head = f"{title:<{keys}}  {SIDES[0]:<{columns[0]}}  {SIDES[1]}"
    lines = ["", look.paint(look.fit(head), "faint")]
    for key, (ours, theirs, share) in shown.items():
        if max(len(ours) - columns[0], len(theirs) - columns[1]) > 0:
            ours, theirs = _from_where_they_part(ours, theirs, min(columns))
        cells = [
            f"{plain(text, width):<{width}}" for text, width in zip((key, ours, theirs), (keys, *columns), strict=True)
        ]
        lines.append(look.fit("  ".join([*cells, f"{share:>12}"]).rstrip()))
    return lines


def _from_where_they_part(ours: str, theirs: str, width: int) -> tuple[str, str]:
    """Returns two texts without their common beginning where they would be cut before they differ."""
    common = next((i for i, (x, y) in enumerate(zip(ours, theirs, strict=False)) if x != y), 0)
    if common < width - 4:
        return ours, theirs
    return tuple(f"...{text[common - 2 :]}" for text in (ours, theirs))  # type: ignore[return-value]


def _training(a: RunRecord, b: RunRecord, found: Mapping[str, Any], look: Look) -> list[str]:
    curves = [[y for _, y in points(record, "loss_train")] for record in (a, b)]
    if not found or not any(curves):
        return []
    if not found["common"]:
        said = "no step was recorded in both"
    elif found["first"] is None:
        said = f"the same to a relative {APART:g} at all {found['common']} common steps"
    else:
        ours, theirs = found["first_losses"]
        said = (
            f"differs from step {found['first']} on ({number(ours, 7)} against {number(theirs, 7)}), "
            f"most at step {found['largest_at']} ({_percent(found['largest'])})"
        )
    lines = ["", look.paint(look.fit("training loss"), "faint"), look.fit(said)]
    return lines + _curves([("loss", curves)], look)


def _profiles_apart(a: RunRecord, b: RunRecord) -> list[str]:
    """Returns the names of the profiles whose last arrays differ, or that one run alone has."""
    apart = []
    for name in dict.fromkeys([*a.profiles, *b.profiles]):
        pair = [record.profiles[name].data[-1] for record in (a, b) if name in record.profiles]
        if len(pair) < 2 or not np.array_equal(pair[0], pair[1], equal_nan=True):
            apart.append(name)
    return apart


def _profiles(a: RunRecord, b: RunRecord, apart: Sequence[str], look: Look) -> list[str]:
    """Returns the profiles over depth that differ, at the last measured step of each run."""
    groups = [
        (label, [record.profiles[name].data[-1] for record in (a, b)])
        for name, label in PROFILES.items()
        if name in apart and name in a.profiles and name in b.profiles
    ]
    if not groups:
        return []
    return ["", look.paint(look.fit("over depth, at the last measured step"), "faint"), *_curves(groups, look)]


def _curves(groups: list[tuple[str, list[Any]]], look: Look) -> list[str]:
    """Returns two sparklines for each group, on one scale that is said, with where each begins and ends."""
    lines = []
    spans = {label: "..".join(number(end, 2) for end in span_of(*pair)) for label, pair in groups}
    labels = max(len(text) for text in (*spans, *spans.values())) + 1
    for label, pair in groups:
        low, high = span_of(*pair)
        logs = log_span(low, high)
        scale: Callable[[Any], Any] = np.log10 if logs else np.asarray
        span = span_of(*(_scaled(values, scale) for values in pair))
        for side, values in zip(SIDES, pair, strict=True):
            ends = [number(values[0], 3), number(values[-1], 3)] if len(values) else ["-", "-"]
            head = f"{label:<{labels}}{side}  {ends[0]:>8} " + ("log " if logs else "")
            width = look.width - len(head) - 10
            line = sparkline(_scaled(resampled(values, width), scale), look, width, span)
            lines.append(look.fit(f"{head}{line} {ends[1]}"))
            label = spans.get(label, "")  # what the lowest and the highest bar stand for
    return lines


def _scaled(values: Any, scale: Callable[[Any], Any]) -> Any:
    with np.errstate(divide="ignore", invalid="ignore"):
        return scale(np.asarray(values, dtype=float))


def _apart(a: float, b: float) -> float:
    """Returns the relative difference; infinite where one is not finite and the other is something else."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(b - a) / max(abs(a), abs(b))


def _is_cost(key: str) -> bool:
    return key in COST or key.endswith(PROBE_S)


def _pairs(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Pair]:
    """Returns the keys whose values differ, in the order of `a`."""
    keys = dict.fromkeys([*a, *b])
    return {key: (a.get(key), b.get(key)) for key in keys if not _same(a.get(key), b.get(key))}


def _same(a: Any, b: Any) -> bool:
    nans = [isinstance(x, float) and math.isnan(x) for x in (a, b)]
    return all(nans) or (not any(nans) and bool(a == b))


def _flat(section: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Returns a nested mapping by dotted keys."""
    flat: dict[str, Any] = {}
    for key, item in section.items():
        name = f"{before}{key}"
        flat |= _flat(item, f"{name}.") if isinstance(item, Mapping) and item else {name: item}
    return flat


def _said(item: Any) -> str:
    if isinstance(item, int | float) and not isinstance(item, bool):
        return number(item, 6)
    return "-" if item in (None, "", [], {}) else str(item)


def _moved(key: str, pair: tuple[Any, ...]) -> str:
    """Returns how far the second value is from the first, empty where that is not said."""
    a, b, share = (*pair, None)[:3]
    if key in SIGNED and len(pair) > 2 and _is_finite(a) and _is_finite(b):
        return f"{b - a:+.3g}"
    return "" if share is None else _percent(share, "+")


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _percent(share: float, sign: str = "") -> str:
    """Returns a relative difference as a percentage where that reads well, else as a factor or a power of ten."""
    if not math.isfinite(share):
        return "beyond measure"
    if share >= 9:
        return f"x {1 + share:.3g}"
    return f"{100 * share:{sign}.3g} %" if abs(share) >= 1e-4 else f"{share:{sign}.1e}"
