"""What sets two runs apart, on a terminal and for programs. What is the same is not said."""

import math
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from normscale.config.sources import plain
from normscale.tracking.compare import APART, SIGNED, Pair, differences, is_finite, same_results
from normscale.tracking.draw import Look, log_span, resampled, span_of, sparkline
from normscale.tracking.reader import RunRecord
from normscale.tracking.show import points
from normscale.tracking.spool import strict
from normscale.tracking.text import number

PROFILES = {"stream_rms": "stream RMS", "grad_norm": "gradient"}
SIDES = ("A", "B")
MOST = 12  # series, and events, that one screen names; the JSON has all
LEAST_CELL = 10  # columns of a value, below which how far the values are apart is not said


def diff(a: RunRecord, b: RunRecord, look: Look) -> list[str]:
    """Returns the lines that say what sets two runs apart."""
    found = differences(a, b)
    lines = [look.fit(f"{side}  {plain(record.run_id)}") for side, record in zip(SIDES, (a, b), strict=True)]
    if a.run_dir.resolve() == b.run_dir.resolve():
        return [*lines, "", look.fit("these are one run: nothing differs")]
    if not any(found.values()):
        return [*lines, "", look.fit("nothing differs: configuration, places, numbers, curves and events are the same")]
    if same_results(found):
        lines += ["", look.fit("the results are the same to the last digit")]
    for title, section in (("configuration", "config"), ("where it ran", "place")):
        lines += _table(title, found[section], look)
    for title, section in (("numbers", "numbers"), ("cost", "cost")):
        lines += _table(title, found[section], look)
    for title in ("events", "attempts"):
        pairs = found[title]
        lines += _table(title, dict(list(pairs.items())[:MOST]), look) + _more(len(pairs), look)
    lines += _training(a, b, found["training"], look) + _series(found["series"], look)
    return lines + _profiles(a, b, found["profiles"], look)


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
    shown = {key: (*_both(pair[0], pair[1]), _moved(key, pair)) for key, pair in pairs.items()}
    keys = min(max(len(text) for text in (*pairs, title)), look.width // 2)
    rest = look.width - keys - 4
    shares = any(share for *_, share in shown.values()) and rest - 14 >= 2 * LEAST_CELL
    rest -= 14 * shares
    columns = [min(max([LEAST_CELL, *(len(texts[i]) for texts in shown.values())]), rest // 2) for i in (0, 1)]
    head = f"{title:<{keys}}  {SIDES[0]:<{columns[0]}}  {SIDES[1]}"
    lines = ["", look.paint(look.fit(head), "faint")]
    for key, (ours, theirs, share) in shown.items():
        if max(len(ours) - columns[0], len(theirs) - columns[1]) > 0:
            ours, theirs = _from_where_they_part(ours, theirs, min(columns))
        cells = [
            f"{plain(text, width):<{width}}" for text, width in zip((key, ours, theirs), (keys, *columns), strict=True)
        ]
        lines.append(look.fit("  ".join([*cells, f"{share:>12}" if shares else ""]).rstrip()))
    return lines


def _from_where_they_part(ours: str, theirs: str, width: int) -> tuple[str, str]:
    """Returns two texts without their common beginning where they would be cut before they differ."""
    shorter = min(len(ours), len(theirs))  # of which the other may be a longer form
    common = next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)
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
        said = (
            f"differs from step {found['first']} on ({_against(found['first_losses'])}), "
            f"most at step {found['largest_at']} ({_percent(found['largest'])})"
        )
    lines = ["", look.paint(look.fit("training loss"), "faint"), look.fit(said)]
    return lines + _curves([("loss", curves)], look)


def _series(found: Mapping[str, Mapping[str, Any]], look: Look) -> list[str]:
    """Returns a line for each scalar but the training loss that differs: where first, and what the last values are."""
    if not found:
        return []
    lines = ["", look.paint(look.fit("over steps"), "faint")]
    differing = [(key, apart) for key, apart in found.items() if None not in apart["at_first"]]
    for key, apart in differing[:MOST]:
        said = f"first at step {apart['first']} ({_against(apart['at_first'])}), last {_against(apart['last'])}"
        lines.append(look.fit(f"{plain(key, 32)}: {said}"))
    lines += _more(len(differing), look)
    rest = [plain(key, 32) for key, apart in found.items() if None in apart["at_first"]]
    return lines + (_wrapped(f"at some steps in one run alone, else the same: {', '.join(rest)}", look) if rest else [])


def _wrapped(text: str, look: Look) -> list[str]:
    return [look.fit(line) for line in textwrap.wrap(text, look.width)]


def _more(count: int, look: Look) -> list[str]:
    return [look.fit(f"and {count - MOST} more (--json has all)")] if count > MOST else []


def _against(pair: Pair) -> str:
    return " against ".join(_both(*pair, least=7))


def _profiles(a: RunRecord, b: RunRecord, apart: Mapping[str, int], look: Look) -> list[str]:
    """Returns which profiles over depth differ from which step on, and those of PROFILES at each run's last one."""
    if not apart:
        return []
    steps = {step: [name for name in apart if apart[name] == step] for step in sorted({*apart.values()})}
    said = "; ".join(f"from step {step} on: {', '.join(map(plain, names))}" for step, names in steps.items())
    lines = ["", *_wrapped(f"profiles differ {said}", look)]
    groups = [
        (label, [record.profiles[name].data[-1] for record in (a, b)])
        for name, label in PROFILES.items()
        if name in apart and name in a.profiles and name in b.profiles
    ]
    groups = [(label, pair) for label, pair in groups if not np.array_equal(pair[0], pair[1], equal_nan=True)]
    if not groups:
        return lines
    return [*lines, "", look.paint(look.fit("over depth, at the last measured step"), "faint"), *_curves(groups, look)]


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


def _both(a: Any, b: Any, least: int = 6) -> tuple[str, str]:
    """Returns two values as text: numbers with so many digits, or as many more as it takes to tell them apart."""
    texts = [(_said(a, digits), _said(b, digits)) for digits in range(least, 18)]
    if a == b:
        return texts[0]
    unlike = (repr(a), repr(b))  # where it is a text and a number, or two kinds of nothing
    return next((pair for pair in texts if pair[0] != pair[1]), unlike)


def _said(item: Any, digits: int = 6) -> str:
    if isinstance(item, int | float) and not isinstance(item, bool):
        return number(item, digits)
    return "-" if item in (None, "", [], {}) else str(item)


def _moved(key: str, pair: tuple[Any, ...]) -> str:
    """Returns how far the second value is from the first, empty where that is not said."""
    a, b, share = (*pair, None)[:3]
    if key in SIGNED and len(pair) > 2 and is_finite(a) and is_finite(b):
        return f"{b - a:+.3g}"
    return "" if share is None else _percent(share, "+")


def _percent(share: float, sign: str = "") -> str:
    """Returns a relative difference as a percentage where that reads well, else as a factor or a power of ten."""
    if not math.isfinite(share):
        return "beyond measure"
    if share >= 9:
        return f"x {1 + share:.3g}"
    return f"{100 * share:{sign}.3g} %" if abs(share) >= 1e-4 else f"{share:{sign}.1e}"
