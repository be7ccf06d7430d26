"""What sets two runs apart, by their records: configuration, places, every number and array, events."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from normscale.tracking.reader import Profile, RunRecord, at, flat
from normscale.tracking.record import ABOUT_AN_ATTEMPT, PROBE_S, USER
from normscale.tracking.show import points

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
OF_RECORDS = ("kind", "t", "attempt", "step", "event")  # fields of an event that say when it was written, or name it
OF_PLACES = ("host", "device")  # fields, at any depth, that say where it happened

Pair = tuple[Any, Any]


def differences(a: RunRecord, b: RunRecord) -> dict[str, Any]:
    """Returns what differs, by section; a section in which nothing differs is empty.

    `config` and `place` hold pairs by dotted key; `numbers` and `cost` hold pairs and the relative difference, None
    for numbers that may be 0 or below; `training` tells where the training losses part, `series` where each other
    scalar does, those of the step ledger included; `profiles` {name: first step at which the arrays differ}; `events`
    and `attempts` hold pairs by step, name and field, of what befell a step and an attempt; one that a single run
    has is a pair itself.
    """
    sides = [flat({key: at(record, key) for key in PLACES}) for record in (a, b)]
    summaries = [record.summary | {"outcome": (record.end or {}).get("outcome")} for record in (a, b)]
    numbers = _pairs(*summaries)
    return {
        "config": _pairs(*(flat(at(record, "config") or {}) for record in (a, b))),
        "place": _pairs(*sides),
        "numbers": {
            key: (*pair, None if key in (*POSITIONS, *SIGNED) else relative(*pair))
            for key, pair in numbers.items()
            if not _is_cost(key)
        },
        "cost": {key: (*pair, relative(*pair)) for key, pair in numbers.items() if _is_cost(key)},
        "training": training(a, b),
        "series": series(a, b),
        "profiles": profiles(a, b),
        "events": _happenings(*(_events(record, attempts=False) | _not_applied(record) for record in (a, b))),
        "attempts": _happenings(*(_events(record, attempts=True) for record in (a, b))),
    }


def same_results(found: Mapping[str, Any]) -> bool:
    """Returns whether two runs came to the same, by their `differences`: whatever they cost, wherever they ran."""
    return not any(found[section] for section in ("numbers", "training", "series", "profiles", "events"))


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


def series(a: RunRecord, b: RunRecord) -> dict[str, dict[str, Any]]:
    """Returns where each scalar over steps parts that is neither a cost nor the training loss.

    `first` is the first step of both at which the values differ, or without one the first that a single run has;
    `at_first` are both values there, and `last` the last one of each; None for none. The held-out loss and what another
    loop logs come first.
    """
    ours, theirs = _scalars(a), _scalars(b)
    apart = {}
    for key in sorted({**ours, **theirs}, key=lambda key: not (key == "loss_val" or key.startswith(USER))):
        pair = ours.get(key, {}), theirs.get(key, {})
        if differing := _pairs(*pair):
            first = min(differing, key=lambda step: (None in differing[step], step))
            last = tuple(values[max(values)] if values else None for values in pair)
            apart[key] = {"first": first, "at_first": differing[first], "last": last}
    return apart


def profiles(a: RunRecord, b: RunRecord) -> dict[str, int]:
    """Returns {name: the first step at which its array differs, or one run alone has it}."""
    apart = {}
    for name in {**a.profiles, **b.profiles}:
        ours, theirs = (_arrays(record.profiles.get(name)) for record in (a, b))
        steps = [
            step
            for step in ours.keys() | theirs.keys()
            if not (step in ours and step in theirs and np.array_equal(ours[step], theirs[step], equal_nan=True))
        ]
        if steps:
            apart[name] = min(steps)
    return apart


def relative(a: Any, b: Any) -> float | None:
    """Returns (b - a) / |a|, None where one of them is no finite number or a is 0."""
    return (b - a) / abs(a) if is_finite(a) and is_finite(b) and a else None


def is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _scalars(record: RunRecord) -> dict[str, dict[int, Any]]:
    """Returns {name: {step: value}} of every scalar but costs and the training loss, and of the ledger's columns."""
    found: dict[str, dict[int, Any]] = {
        key: dict(zip(of_key.steps, of_key.values, strict=True))
        for key, of_key in record.series.items()
        if not _is_cost(key) and key != "loss_train"
    }
    for row in record.ledger:
        for name, value in row.items():
            if name not in ("step", "applied", "reason") and value is not None:
                found.setdefault(f"ledger.{name}", {})[row["step"]] = value
    return found


def _arrays(profile: Profile | None) -> dict[int, Any]:
    return {} if profile is None else dict(zip(profile.steps, profile.data, strict=True))


def _happenings(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Pair]:
    """Returns the pairs that differ, without the fields of what one run alone has."""
    pairs = _pairs(ours, theirs)
    alone = tuple(f"{key}." for key, pair in pairs.items() if "happened" in pair)
    return {key: pair for key, pair in pairs.items() if not key.startswith(alone)}


def _events(record: RunRecord, attempts: bool) -> dict[str, Any]:
    """Returns the fields of the events about attempts, or of all others, by step, event and field.

    The event itself is among them, as "happened"; when and where it was seen is not.
    """
    found: dict[str, Any] = {}
    for event in record.events:
        if (event["event"] in ABOUT_AN_ATTEMPT) != attempts:
            continue
        name, again = f"{event['step']} {event['event']}", 2
        while name in found:  # of several at one step, by their order
            name, again = f"{event['step']} {event['event']} {again}", again + 1
        fields = flat({key: value for key, value in event.items() if key not in OF_RECORDS}, f"{name}.")
        found |= {name: "happened"} | {
            key: value for key, value in fields.items() if key.split(".")[-1] not in OF_PLACES
        }
    return found


def _not_applied(record: RunRecord) -> dict[str, Any]:
    return {f"{row['step']} not applied": row["reason"] for row in record.ledger if not row["applied"]}


def _apart(a: float, b: float) -> float:
    """Returns the relative difference; infinite where one is not finite and the other is something else."""
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(b - a) / max(abs(a), abs(b))


def _is_cost(key: str) -> bool:
    return key in COST or key.endswith(PROBE_S)


def _pairs(a: Mapping[Any, Any], b: Mapping[Any, Any]) -> dict[Any, Pair]:
    """Returns the keys whose values differ, in the order of `a`."""
    keys = dict.fromkeys([*a, *b])
    return {key: (a.get(key), b.get(key)) for key in keys if not _same(a.get(key), b.get(key))}


def _same(a: Any, b: Any) -> bool:
    nans = [isinstance(x, float) and math.isnan(x) for x in (a, b)]
    return all(nans) or (not any(nans) and bool(a == b))
