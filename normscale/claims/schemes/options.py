"""Tables of options on the page about schemes: a scheme's own, the norms and theirs, and those of every model."""

import re
from collections.abc import Sequence
from html import escape

from normscale.claims.html import table
from normscale.claims.schemes.docs import docs_of_norm, value_of
from normscale.config.keys import Key, describe
from normscale.norms import norm_names

HEAD = ("option", "takes", "default", "what it does", "from")


def prose(text: str) -> str:
    """Returns text of a docstring as HTML: what stands between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def options_table(options: Sequence[Key]) -> str:
    """Returns a table of options, or that there are none."""
    if not options:
        return "<p>No options.</p>"
    return table(
        HEAD,
        [
            [
                f"<code>{escape(one.key)}</code>",
                escape(one.type),
                f"<code>{escape(value_of(one.default))}</code>",
                prose(one.help),
                prose(one.source),
            ]
            for one in options
        ],
    )


def of_models() -> list[str]:
    """Returns the section about what every model can be told beside its scheme, of all that has a source."""
    found = [key for key in describe() if key.key.startswith("model.") and key.source]
    return ['<h2 id="options">Options of every model</h2>', options_table(found)]


def of_norms() -> list[str]:
    """Returns the section about the norms."""
    parts = ['<h2 id="norms">Norms</h2>']
    for name in norm_names():
        said = docs_of_norm(name)
        parts += [
            f"<h3>{escape(said.title)} <code>{escape(name)}</code></h3>",
            f'<p class="formula">{prose(said.formula)}</p>',
            *[f"<p>{prose(text)}</p>" for text in said.more],
            f"<p><b>Reference:</b> {prose(said.reference)}</p>",
            options_table(said.options),
        ]
    return parts
