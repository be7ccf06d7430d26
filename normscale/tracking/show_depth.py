"""What a run recorded over depth, on a terminal: every array over depth as its numbers and a line of bars."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from normscale.config.sources import plain
from normscale.tracking.draw import Look, log_span, span_of, sparkline
from normscale.tracking.reader import RunRecord, last_whole
from normscale.tracking.text import number

DEPTH_LABEL = 15  # and of the arrays' names
BY_KIND, BY_SIDE = 2, 1  # how much of a site's name stays when its kind is grouped
TOO_MANY = re.compile(
    r"(stream|branch|z)_(grad_)?(absmax|nonfinite|mean.*)|(branch|z)_rms|z_grad_norm|(eps|adam_eps)_.*"
)
"""Profiles that one screen has no room for, unless they are in SHOWN; the Parquet files have them."""

SHOWN = {
    "stream_rms": ("stream RMS", BY_SIDE),
    "other_stream_rms": ("other streams", BY_SIDE),
    "branch_ratio": ("branch / stream", BY_SIDE),
    "grad_norm": ("gradient", BY_KIND),
    "stream_grad_norm": ("stream gradient", BY_SIDE),
    "other_stream_grad_norm": ("other gradient", BY_SIDE),
    "stream_grad": ("stream gradient", BY_SIDE),
    "headroom_bits": ("headroom, bits", BY_SIDE),
    "update_rel": ("step / weights", BY_SIDE),
    "attn_logit_max": ("attention logit", BY_SIDE),
    "attn_entropy": ("attn. entropy", BY_SIDE),
    "eps_up": ("10 eps changes", 0),
    "eps_share_1": ("eps over 1 %", 0),
    "adam_eps_share": ("Adam's eps over", BY_SIDE),
}
SITE = re.compile(r"(encoder|decoder)\.\d+\.\w+")


def depth(record: RunRecord, look: Look) -> list[str]:
    """Returns the last finite array of each profile on a line, by side or by kind of sublayer."""
    rows = record.start.get("rows") or []
    others = [name for name in record.profiles if name not in SHOWN and not TOO_MANY.fullmatch(name)]
    named = SHOWN | {name: (name, 0) for name in others}
    found = [
        (label, parts, record.profiles[name])
        for name, (label, parts) in named.items()
        if name in record.profiles and record.profiles[name].data.size
    ]
    if not found:
        return []
    places = [last_whole(profile) for _, _, profile in found]
    steps = [profile.steps[place] for place, (_, _, profile) in zip(places, found, strict=True)]
    last = Counter(steps).most_common(1)[0][0]
    title = f"over depth, step {last}"
    heads = " ".join(f"{name:>8}" for name in ("first", "median", "last", "least", "most"))
    title = f"{title:<{DEPTH_LABEL + 14}} {heads} bars from 0, or log"
    lines = [look.paint(look.fit(title), "faint")]
    for place, (label, parts, profile) in zip(places, found, strict=True):
        if profile.steps[place] != last:
            lines.append(look.fit(f"{label}, step {profile.steps[place]}:"))
        never: NDArray[np.bool_] = np.asarray(np.isnan(profile.data).all(axis=0))
        for group, chosen in _groups(profile.data.shape[1], rows, parts):
            data = profile.data[place][[i for i in chosen if not never[i] or never.all()]]
            if data.size:
                lines.append(look.fit(_bars(label, group, data, look)))
                label = ""
    newest = max(profile.steps[-1] for _, _, profile in found)
    if newest > max(steps):
        lines.append(look.fit(f"(what was recorded later, to step {newest}, is not finite throughout)"))
    return lines


def _bars(label: str, group: str, data: "np.ndarray[Any, Any]", look: Look) -> str:
    """Returns an array as its numbers and as bars, from 0 or logarithmic, so that what is flat looks flat."""
    finite = data[np.isfinite(data)]
    middle = float(np.median(finite)) if finite.size else math.nan
    low, high = span_of(data)
    numbers = " ".join(f"{number(x, 3):>8}" for x in (data[0], middle, data[-1], low, high))
    said = f"{plain(label, 24):<{DEPTH_LABEL}} {plain(group, 13):<13} {numbers} "
    if log_span(low, high):
        said += "log "
        return said + sparkline(np.log10(data.astype(float)), look, look.width - len(said))
    said += "    "
    bottom, top = min(low, 0.0), max(high, 0.0)
    return said + sparkline(data, look, look.width - len(said), (bottom, top if top > bottom else bottom + 1.0))


def _groups(count: int, rows: Sequence[str], parts: int) -> list[tuple[str, list[int]]]:
    """Returns (name, places in depth order) of each side, or of each kind of sublayer of each side.

    Rows that are not named as our sublayers are, as those of another loop, are all of one group.
    """
    if not parts or len(rows) != count or not all(map(SITE.fullmatch, rows)):
        return [("", list(range(count)))]
    keys = [".".join(row.split(".")[::2] if parts == BY_KIND else row.split(".")[:1]) for row in rows]
    return [(key, [i for i, own in enumerate(keys) if own == key]) for key in dict.fromkeys(keys)]
