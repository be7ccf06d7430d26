"""`normscale explain`: what schemes, norms and configuration keys are, what they take, and where they are from."""

import argparse
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from normscale.errors import BadInput, nearest

if TYPE_CHECKING:
    from normscale.claims.schemes.docs import Docs
    from normscale.config.keys import Key


def explain(options: argparse.Namespace) -> int:
    """Says what a scheme, a norm or a key is; lists all there are where none is named."""
    from normscale.tracking.draw import look_of

    width = look_of(sys.stdout, os.environ).width
    print("\n".join(explained(options.word, width) if options.word is not None else listed(width)))
    return 0


def explained(word: str, width: int) -> list[str]:
    """Returns what is to say of a word, in lines.

    Raises:
        BadInput: it names nothing.
    """
    from normscale.claims.schemes.docs import docs_of_norm, docs_of_scheme
    from normscale.config.keys import describe
    from normscale.norms import norm_names
    from normscale.schemes import scheme_names

    if word in scheme_names():
        return [*_docs(docs_of_scheme(word), f"model.scheme={word}", "model.scheme_options", width)]
    if word in norm_names():
        return [*_docs(docs_of_norm(word), f"model.norm={word}", "model.norm_options", width)]
    keys = describe()
    found = [key for key in keys if key.key == word or key.key.startswith(f"{word}.") or key.key.endswith(f".{word}")]
    if not found:
        known = [*scheme_names(), *norm_names(), *(key.key for key in keys), *(_last(key) for key in keys)]
        raise BadInput(
            f"explain: {word!r} is no scheme, no norm and no key{nearest(word, known)} (normscale explain lists them)"
        )
    return [*_keys(found, width)]


def listed(width: int) -> list[str]:
    """Returns all that can be explained, in lines."""
    from normscale.claims.schemes.docs import docs_of_norm, docs_of_scheme
    from normscale.config.keys import children
    from normscale.norms import norm_names
    from normscale.schemes import scheme_names

    titles = {name: docs_of_scheme(name).title for name in scheme_names()}
    norms = {name: docs_of_norm(name).title for name in norm_names()}
    indent = max(map(len, [*titles, *norms])) + 4
    lines = []
    for what, found in (("model.scheme", titles), ("model.norm", norms)):
        lines.append(what)
        for name, title in found.items():
            lines += _wrapped(title, width, indent, f"  {name}")
        lines.append("")
    return [*lines, *_wrapped(f"keys, or sections of them: {', '.join(children(''))}", width)]


def _docs(docs: "Docs", title: str, key: str, width: int) -> Iterator[str]:
    yield from _wrapped(f"{title}: {docs.title}", width)
    for text in (docs.formula, *docs.more):
        yield ""
        yield from _wrapped(text, width, 2)
    yield ""
    yield from _wrapped(docs.reference, width, 12, "from")
    if docs.topologies:
        yield from _wrapped(", ".join(docs.topologies), width, 12, "topologies")
    yield ""
    yield f"{key}:" if docs.options else f"{key}: none"
    yield from _keys(docs.options, width)


def _keys(keys: "Iterable[Key]", width: int) -> Iterator[str]:
    from normscale.claims.schemes.docs import value_of

    for key in keys:
        yield from _wrapped(f"{key.key}={value_of(key.default)}  ({key.type})", width, 6, "  ", first=2)
        yield from _wrapped(key.help, width, 6)
        if key.source:
            yield from _wrapped(f"from {key.source}", width, 6)


def _last(key: "Key") -> str:
    return key.key.rpartition(".")[2]


def _wrapped(text: str, width: int, indent: int = 0, head: str = "", first: int | None = None) -> list[str]:
    """Returns lines of a text that begin at `indent`; the first one at `first`, with a head before it."""
    begin = head.ljust(indent if first is None else first)
    return textwrap.wrap(
        text,
        width,
        initial_indent=begin,
        subsequent_indent=" " * indent,
        break_on_hyphens=False,
        break_long_words=False,
    )
