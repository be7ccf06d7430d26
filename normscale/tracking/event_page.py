"""The report of an event as a page: Markdown for text, one self-contained HTML file where pictures are wanted.

MLflow shows no pictures in Markdown files and no files that an HTML page refers to, hence the picture in the page.
"""

import base64
from collections.abc import Sequence
from html import escape

from normscale.tracking.event_report import EventReport

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1c1c1c;background:#fff;max-width:900px;margin:1rem auto;padding:0 1rem}
h1{font-size:1.25rem;line-height:1.35} h2{font-size:1.05rem;margin:1.4rem 0 .3rem} .quiet{color:#666}
table{border-collapse:collapse;font-size:.9rem} th{text-align:left;font-weight:600}
th,td{padding:.2rem .8rem .2rem 0;border-bottom:1px solid #e4e4e4;vertical-align:top} img{max-width:720px;width:100%}
ol{margin:.2rem 0;padding-left:1.6rem} .wide{overflow-x:auto}
"""


def markdown(report: EventReport, run: str) -> str:
    """Returns the report as Markdown."""
    lines = [f"**{cell(report.says)}**", "", f"Run `{run}`."]
    for table in report.parts:
        lines += ["", f"{table.title}:", ""]
        if table.head:
            lines += rows_of(table.head, table.rows)
        else:
            lines += [f"{number}. {', '.join(row)}" for number, row in enumerate(table.rows, start=1)]
    return "\n".join(lines) + "\n"


def html(report: EventReport, run: str, picture: bytes | None = None, says: str = "") -> str:
    """Returns the report as one HTML page without scripts; `picture` is a PNG, `says` the line below it."""
    body = [f"<h1>{escape(report.says)}</h1>", f'<p class="quiet">run {escape(run)}</p>']
    if picture is not None:
        data = base64.b64encode(picture).decode("ascii")
        body += [f"<h2>{escape(says)}</h2>", f'<img alt="{escape(says)}" src="data:image/png;base64,{data}">']
    for table in report.parts:
        body.append(f"<h2>{escape(table.title)}</h2>")
        if table.head:
            body.append(_html(table.rows, table.head))
        else:
            body.append("<ol>" + "".join(f"<li>{escape(', '.join(row))}</li>" for row in table.rows) + "</ol>")
    head = f'<meta charset="utf-8"><title>{escape(report.says)}</title><style>{STYLE}</style>'
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n' + "\n".join(body) + "\n</body></html>\n"


def rows_of(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = ["| " + " | ".join(map(cell, head)) + " |", "|---" * len(head) + "|"]
    return lines + ["| " + " | ".join(map(cell, row)) + " |" for row in rows]


def cell(text: str) -> str:
    """Returns a text that cannot break a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _html(rows: Sequence[Sequence[str]], head: Sequence[str]) -> str:
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table>{f"<tr>{top}</tr>" if head else ""}\n{body}</table></div>'
