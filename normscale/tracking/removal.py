"""What the blocks of a run are worth, as a table that a person reads."""

import math
import textwrap
from collections.abc import Mapping
from typing import Any

from normscale.tracking.draw import Look, sparkline
from normscale.tracking.spool import restored
from normscale.tracking.text import number


def table(found: Mapping[str, Any], look: Look) -> list[str]:
    """Returns the lines of `Removal.as_json`: each block that was left out with a bar, and the angles of all.

    A bar is as long as the loss rises without the block, the longest one as long as there is room; a block without
    which the loss is no higher has none.
    """
    blocks = found["blocks"]
    tried = [block for block in blocks if block["removal"] is not None]
    width = max(len(block["block"]) for block in blocks)
    rises = [restored(block["removal"]) for block in tried]
    longest = max((rise for rise in rises if math.isfinite(rise)), default=0.0)
    room = look.width - width - 24
    loss, own = number(restored(found["loss"])), found["run_sequences"]
    said = f"{found['run']}, step {found['step']}: held-out loss {loss} nats on {found['sequences']} sequences"
    other = f" (the run's own is of {own}: --batches)" if own != found["sequences"] else ""
    lines = [
        *map(look.fit, textwrap.wrap(said + other, look.width, subsequent_indent="    ", break_on_hyphens=False)),
        look.paint(look.fit(f"{'without':<{width}}  {'loss rises by':>13}  angle"), "faint"),
    ]
    for block, rise in zip(tried, rises, strict=True):
        bar = look.bad if not math.isfinite(rise) else _bar(rise, longest, room, look)
        angle = number(restored(block["angle"]), 3)
        lines.append(look.fit(f"{block['block']:<{width}}  {number(rise, 3):>13}  {angle:<6} {bar}").rstrip())
    angles = [restored(block["angle"]) for block in blocks]
    said = f"angle of all {len(blocks)} blocks, in depth order, over pi: "
    lines.append(look.fit(said + sparkline(angles, look, look.width - len(said))))
    return lines


def _bar(rise: float, longest: float, room: int, look: Look) -> str:
    share = rise / longest if longest > 0 else 0.0
    return ("█" if look.unicode else "#") * max(0, round(share * room))
