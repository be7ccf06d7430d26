"""A scheme in its own words: its docstring is the one place that says what it is."""

import inspect
import re
from dataclasses import dataclass

from normscale.config.values import Section
from normscale.schemes import find_scheme


@dataclass(frozen=True)
class Told:
    """What the file of a scheme says: its title, its formula, further paragraphs, the reference, its options."""

    title: str
    formula: str
    more: tuple[str, ...]
    reference: str
    options: tuple[tuple[str, str], ...]
    topologies: tuple[str, ...]


def told(scheme: str) -> Told:
    """Returns what a scheme says of itself."""
    kind = find_scheme(scheme)
    first, *rest = _paragraphs(inspect.cleandoc(kind.__doc__ or ""))
    reference = next((text for text in rest if text.startswith("Reference:")), "")
    title = _paragraphs(inspect.getmodule(kind).__doc__ or "")[0]
    options = [(name, _value(field.default)) for name, field in kind.Options.model_fields.items()]
    more = [text for text in rest if text != reference]
    if options and kind.Options.__doc__ and kind.Options.__doc__ != Section.__doc__:
        more += _paragraphs(inspect.cleandoc(kind.Options.__doc__))
    return Told(
        title=title.rstrip("."),
        formula=first,
        more=tuple(more),
        reference=reference.removeprefix("Reference:").strip(),
        options=tuple(options),
        topologies=tuple(sorted(kind.topologies)),
    )


def _paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a docstring, each as one line; an entry of a list (`name: ...`) is one of its own."""
    blocks = [block for block in re.split(r"\n\s*\n|\n(?=\w+: )", text.strip()) if block.strip()]
    return [re.sub(r"\s+", " ", block).strip() for block in blocks] or [""]


def _value(default: object) -> str:
    return str(default).lower() if isinstance(default, bool) or default is None else f"{default}"
