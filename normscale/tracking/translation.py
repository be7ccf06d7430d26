"""What a run translates, as lines that a person reads."""

from collections.abc import Mapping
from typing import Any

from normscale.config.sources import plain
from normscale.tracking.draw import Look

SHOWN = 5


def table(found: Mapping[str, Any], look: Look) -> list[str]:
    """Returns the lines of `Translation.as_json`: the scores, and the first sentences."""
    sentences = found["sentences"]
    head = f"{found['run']}, step {found['step']}: BLEU {found['bleu']:.2f}, chrF {found['chrf']:.2f}"
    lines = [
        look.fit(f"{head} on {len(sentences)} held-out lines, beam {found['beam']}, penalty {found['penalty']:g}"),
        look.paint(look.fit(f"sacrebleu {found['signature']}"), "faint"),
    ]
    for sentence in sentences[:SHOWN]:
        lines.append("")
        for name, key in (("source", "source"), ("wanted", "reference"), ("said", "said")):
            lines.append(look.fit(f"{name:<7} {plain(sentence[key], look.width)}"))
    return [*lines, ""]
