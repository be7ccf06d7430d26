"""Schemes and norms in their own words: docstring and options are the one place that says what each is."""

import inspect
import re
from dataclasses import dataclass
from typing import Any

from normscale.config.keys import Key, options_of
from normscale.config.values import Section
from normscale.norms import find_norm
from normscale.schemes import find_scheme


@dataclass(frozen=True)
class Docs:
    """What a file says: its title, its formula, further paragraphs, the reference, its options.

    `topologies` are a scheme's; a norm has none.
    """

    title: str
    formula: str
    more: tuple[str, ...]
    reference: str
    options: tuple[Key, ...]
    topologies: tuple[str, ...] = ()


def docs_of_scheme(name: str) -> Docs:
    """Returns what a scheme says of itself.

    Raises:
        ConfigError: there is no such scheme.
    """
    kind = find_scheme(name)
    return _docs(kind, kind.Options, tuple(sorted(kind.topologies)))


def docs_of_norm(name: str) -> Docs:
    """Returns what a norm says of itself.

    Raises:
        ConfigError: there is no such norm.
    """
    kind = find_norm(name)
    return _docs(kind, kind.Options)


def value_of(default: Any) -> str:
    """Returns a default as a configuration has it."""
    if isinstance(default, tuple):
        return f"[{', '.join(map(value_of, default))}]"
    return "null" if default is None else str(default).lower() if isinstance(default, bool) else str(default)


def _docs(kind: type, options: type[Section], topologies: tuple[str, ...] = ()) -> Docs:
    first, *rest = _paragraphs(inspect.cleandoc(kind.__doc__ or ""))
    reference = next((text for text in rest if text.startswith("Reference:")), "")
    more = [text for text in rest if text != reference]
    if options.model_fields and options.__doc__ and options.__doc__ != Section.__doc__:
        more += _paragraphs(inspect.cleandoc(options.__doc__))
    return Docs(
        title=_paragraphs(inspect.getmodule(kind).__doc__ or "")[0].rstrip("."),
        formula=first,
        more=tuple(more),
        reference=reference.removeprefix("Reference:").strip(),
        options=tuple(options_of(options)),
        topologies=topologies,
    )


def _paragraphs(text: str) -> list[str]:
    """Returns the paragraphs of a docstring, each as one line; an entry of a list (`name: ...`) is one of its own."""
    blocks = [block for block in re.split(r"\n\s*\n|\n(?=\w+: )", text.strip()) if block.strip()]
    return [re.sub(r"\s+", " ", block).strip() for block in blocks] or [""]
