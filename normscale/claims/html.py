"""What the pages share: one look, light and dark, wide and narrow; a page is one file without scripts."""

import math
from collections.abc import Sequence
from html import escape

# The shade at the edge of `.wide` is there while the table goes on beyond it.
STYLE = """
:root{color-scheme:light dark;--ink:#1c1c1c;--paper:#fff;--quiet:#5f6670;--line:#dcdfe3;--soft:#f3f4f6;
--good:#1a7f37;--bad:#b42318;--open:#8a5d00;--none:#68707a;--good-soft:#d8f0dd;--bad-soft:#fbdcd8;--open-soft:#f7e7c1;
--one:#0b62b5;--two:#b4530a;--three:#7b3fb5}
@media (prefers-color-scheme:dark){:root{--ink:#e4e6ea;--paper:#15181c;--quiet:#9aa3ad;--line:#373d45;--soft:#23282e;
--good:#4cc269;--bad:#ff8578;--open:#dda63a;--none:#9aa3ad;--good-soft:#173d22;--bad-soft:#4d1f1a;--open-soft:#46370f;
--one:#6cb2ff;--two:#ffa65c;--three:#c99bff}}
*{box-sizing:border-box}
body{font:16px/1.55 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1000px;margin:2rem auto;
padding:0 1rem;overflow-wrap:break-word}
a{color:var(--one)} h1{font-size:1.7rem;line-height:1.25;margin-bottom:.2rem}
h2{font-size:1.35rem;line-height:1.3;margin-top:3rem;border-top:1px solid var(--line);padding-top:1.5rem}
h3{font-size:1.05rem;margin:1.6rem 0 .4rem} p{margin:.5rem 0} .quiet{color:var(--quiet)}
img{width:100%;height:auto;background:#fff;border-radius:4px}
table{border-collapse:collapse;width:100%;font-size:.9rem;margin:.4rem 0} th{text-align:left;font-weight:600}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);vertical-align:top}
.badge{border-radius:4px;padding:.1rem .5rem;color:#fff;background:#6e7781;font-size:.8rem;white-space:nowrap}
.badge.supported{background:#1a7f37} .badge.refuted{background:#b42318} .badge.inconclusive{background:#8a5d00}
.trained{color:var(--good)} .stuck,.diverged{color:var(--bad)} .undecided{color:var(--open)} .missing{color:var(--none)}
@media (min-width:601px){.expected td:last-child{width:45%} .claims td:first-child{white-space:nowrap}}
.wide{overflow-x:auto;background:linear-gradient(90deg,var(--paper) 30%,transparent) 0/2rem 100%,
linear-gradient(270deg,var(--paper) 30%,transparent) 100%/2rem 100%,
linear-gradient(90deg,var(--line),transparent) 0/.8rem 100%,
linear-gradient(270deg,var(--line),transparent) 100%/.8rem 100%;
background-repeat:no-repeat;background-attachment:local,local,scroll,scroll}
code,pre{background:var(--soft);border-radius:4px;padding:.1rem .3rem;font-size:.9em;overflow-wrap:anywhere}
summary{cursor:pointer;margin:1rem 0 .4rem;font-weight:600}
@media (max-width:600px){table{font-size:.82rem}
body{margin:1rem auto;font-size:15px} th,td{padding:.3rem .35rem} h1{font-size:1.4rem}}
"""


def document(title: str, body: Sequence[str], style: str = "") -> str:
    """Returns a page; the title is text, the body HTML."""
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{STYLE}{style}</style>"
    )
    inner = "\n".join(body)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{inner}\n</body></html>\n'


def badge(word: str) -> str:
    """Returns a verdict as a coloured word."""
    return f'<span class="badge {word.replace(" ", "-")}">{escape(word.upper())}</span>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table that scrolls by itself where the page is too narrow; its head is text, its cells are HTML."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>\n{body}</tbody></table></div>'


def shown(value: object, digits: int = 4) -> str:
    """Returns a number as text: nothing for what is none, and words for what is not finite."""
    if not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:.2e}" if value and abs(value) < 0.01 else f"{value:.{digits}f}"


def interval(value: float | None, lo: float | None, hi: float | None) -> str:
    """Returns a value with its interval, where it has one."""
    if value is None:
        return "not finite"
    small = 0 < abs(value) < 0.1 or abs(value) >= 1000
    digits = ".3g" if small else ".2f"
    return f"{value:{digits}}" if lo is None or hi is None else f"{value:{digits}} ({lo:{digits}}..{hi:{digits}})"
