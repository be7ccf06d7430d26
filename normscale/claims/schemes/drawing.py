"""Curves over depth as inline SVG: no image files, and the colours follow the page's, light or dark."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 40
STROKES = (("var(--one)", ""), ("var(--two)", "7 4"), ("var(--three)", "2 3"))
"""Colour and dashes of the curves; with the dashes they can be told apart without colour."""

STYLE = """
svg{width:100%;height:auto;max-width:480px} svg text{fill:var(--ink);font:12px system-ui,sans-serif}
svg .grid{stroke:var(--line);stroke-width:1} svg .curve{fill:none;stroke-width:2}
.panels{display:flex;flex-wrap:wrap;gap:.5rem 1rem} .panels figure{flex:1 1 300px;min-width:0;margin:0}
.key{font-size:.85rem;color:var(--quiet)} .key svg{width:28px;height:10px;vertical-align:middle}
"""


@dataclass(frozen=True)
class Curve:
    """Values from the first site to the last, whatever their number; those not above 0, or not finite, are gaps."""

    label: str
    values: Sequence[float]


def panel(title: str, curves: Sequence[Curve]) -> str:
    """Returns curves over relative depth, on a logarithmic axis that shows at least one power of ten."""
    logs = [math.log10(v) for curve in curves for v in curve.values if _drawn(v)]
    if not logs:
        return f"<figure>{escape(title)}: nothing finite to draw</figure>"
    low, high = math.floor(min(logs) + 1e-6), math.ceil(max(logs) - 1e-6)
    high = max(high, low + 1)
    step = max(1, math.ceil((high - low) / 6))
    lines = [f'<text x="{LEFT}" y="16">{escape(title)}</text>']
    for power in range(low, high + 1, step):
        y = _y(power, low, high)
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        label = f"{10.0**power:g}" if -3 <= power <= 3 else f"1e{power}"
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for share, label, anchor in ((0.0, "first site", "start"), (1.0, "last site", "end")):
        lines.append(f'<text x="{_x(share):.1f}" y="{HEIGHT - 14}" text-anchor="{anchor}">{label}</text>')
    for curve, (colour, dashes) in zip(curves, STROKES, strict=False):
        last = max(1, len(curve.values) - 1)
        path, pen = [], "M"
        for i, value in enumerate(curve.values):
            if not _drawn(value):
                pen = "M"
                continue
            path.append(f"{pen}{_x(i / last):.1f} {_y(math.log10(value), low, high):.1f}")
            pen = "L"
        lines.append(
            f'<path class="curve" stroke="{colour}" stroke-dasharray="{dashes}" d="{" ".join(path)}">'
            f"<title>{escape(curve.label)}</title></path>"
        )
    inner = "".join(lines)
    return f'<figure><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{inner}</svg></figure>'


def key(labels: Sequence[str]) -> str:
    """Returns what the strokes stand for."""
    marks = [
        f'<svg viewBox="0 0 28 10"><path class="curve" stroke="{colour}" stroke-dasharray="{dashes}" d="M0 5 L28 5"/>'
        f"</svg> {escape(label)}"
        for label, (colour, dashes) in zip(labels, STROKES, strict=False)
    ]
    return f'<p class="key">{" &nbsp; ".join(marks)}</p>'


def _drawn(value: float) -> bool:
    return math.isfinite(value) and value > 0


def _x(share: float) -> float:
    return LEFT + share * (WIDTH - LEFT - RIGHT)


def _y(power: float, low: int, high: int) -> float:
    return TOP + (high - power) / (high - low) * (HEIGHT - TOP - BOTTOM)
