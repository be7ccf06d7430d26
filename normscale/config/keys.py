"""The dotted keys of a configuration, read off the schema: what each takes, its default and its help."""

from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

from normscale.config.schema import RunConfig
from normscale.config.values import Section

_ALIASES = {
    "model.N (encoder blocks) or model.M (decoder blocks)": "depth layers n_layers num_layers n_layer L blocks",
    "model.d": "width d_model dim hidden hidden_size n_embd embed_dim",
    "model.heads": "n_heads num_heads n_head",
    "model.ffn": "d_ff ffn_dim d_ffn mlp intermediate_size",
    "model.context": "seq_len sequence_length block_size max_len n_ctx ctx",
    "model.norm": "normalization normalisation norm_type",
    "train.steps": "max_steps num_steps n_steps iterations iters",
    "train.batch": "batch_size bs",
    "train.optim.lr": "learning_rate rate",
    "train.optim.name": "optimizer optimiser opt",
    "train.schedule.warmup_steps": "warmup",
    "precision.compute": "dtype mixed_precision",
    "checkpoint.every": "save_every save_steps",
}
"""What other programs call our keys."""


class Key(NamedTuple):
    """One dotted key: the text of its type ("a whole number >= 1 or null"), its default, its one-line help, its source.

    The source is the paper or code that the idea is from, with equation or section; "" where there is none to name.
    """

    key: str
    type: str
    default: Any
    help: str
    source: str = ""


class _Field(NamedTuple):
    schema: dict[str, Any]
    default: Any


@cache
def _fields() -> dict[str, _Field | None]:
    """Returns every dotted key; a section has no field."""
    found: dict[str, _Field | None] = {}

    def visit(section: type[Section], prefix: str) -> None:
        schemas = section.model_json_schema()["properties"]
        for name, field in section.model_fields.items():
            if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
                found[prefix + name] = None
                visit(field.annotation, f"{prefix}{name}.")
            else:
                found[prefix + name] = _Field(schemas[name], field.default)

    visit(RunConfig, "")
    return found


def describe() -> list[Key]:
    """Returns every key that can be set, in the order of the schema."""
    return [_key(key, field) for key, field in _fields().items() if field]


def options_of(section: type[Section]) -> list[Key]:
    """Returns what a section without sections holds, in its order: the own options of a scheme or of a norm."""
    schemas = section.model_json_schema().get("properties", {})
    return [_key(name, _Field(schemas[name], field.default)) for name, field in section.model_fields.items()]


def _key(key: str, field: _Field) -> Key:
    schema = field.schema
    return Key(key, _type(schema), field.default, schema.get("description", ""), schema.get("source", ""))


def is_key(key: str) -> bool:
    """Returns whether `key` is a section or a value of the schema (keys inside options and lists are not)."""
    return key in _fields()


def expected(key: str, inside: bool = False) -> str:
    """Returns what a known key takes, in words; with `inside`, what one element of its list takes."""
    field = _fields()[key]
    if field is None:
        return f"a section (a mapping with the keys {', '.join(children(key))})"
    schema = field.schema
    if inside:
        schema = schema["prefixItems"][0] if "prefixItems" in schema else schema.get("items", schema)
    return _type(schema)


def choices(key: str) -> list[str]:
    """Returns the words a known key can take, or an empty list when it takes something else."""
    field = _fields()[key]
    return field.schema.get("enum", []) if field else []


def example(key: str, inside: bool = False) -> str:
    """Returns a value that a known key takes, as YAML writes it; "" where the words of `expected` are one already."""
    field = _fields()[key]
    if field is None:
        return ""
    if inside or field.default in (None, (), "", {}):
        return _example(field.schema, inside)
    given = field.default
    kinds = [kind for kind in (bool, str, dict) if isinstance(given, kind)]
    return "" if kinds else str([*given] if isinstance(given, tuple) else given)


def _example(schema: dict[str, Any], inside: bool) -> str:
    kind = next((each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"), schema)
    if kind.get("type") == "array":
        item = _example(kind["prefixItems"][0] if "prefixItems" in kind else kind["items"], False)
        return item if inside or not item else f"[{item}]"
    return {"integer": "8", "number": "0.5"}.get(kind.get("type", ""), "") if "enum" not in kind else ""


def children(section: str) -> list[str]:
    """Returns the names directly inside a section ("" is the whole configuration)."""
    prefix = f"{section}." if section else ""
    inside = (key.removeprefix(prefix) for key in _fields() if key.startswith(prefix))
    return [name for name in inside if "." not in name]


def hint(section: str, name: str) -> str:
    """Returns the names a section has, then where an unknown name belongs or which name is nearest to it."""
    allowed = children(section)
    elsewhere = [key for key in _fields() if key.rpartition(".")[2] == name]
    known = [key for key, words in _ALIASES.items() if name in words.split()]
    if known or elsewhere:
        elsewhere = elsewhere or known
        guess = f"; write {' or '.join(elsewhere)}"
    else:  # a name of this section is written as it is, one of another section in full
        full = {key.rpartition(".")[2]: key for key in _fields()} | {own: own for own in allowed}
        close = [own for own in allowed if own.casefold() == name.casefold()] or get_close_matches(name, full, n=1)
        guess = f"; did you mean {full[close[0]]!r}?" if close else ""
    return f"; {section or 'a configuration'} has {', '.join(allowed)}{guess}"


def _type(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(_type(kind) for kind in schema["anyOf"])
    if "enum" in schema:
        return f"one of {', '.join(schema['enum'])}"
    if schema["type"] == "array":
        if "prefixItems" in schema:
            return f"a list of {schema['minItems']}, each {_type(schema['prefixItems'][0])}"
        return f"a list, each {_type(schema['items'])}"
    words = {
        "integer": "a whole number",
        "number": "a number",
        "boolean": "true or false",
        "string": "a line of text",
        "object": "a mapping of options",
        "null": "null",
    }
    signs = {"gt": ">", "ge": ">=", "lt": "<"}  # `le` only keeps numbers sane; a message names it when it is broken
    bounds = [f"{sign} {schema[name]:.10g}" for name, sign in signs.items() if name in schema]
    return " ".join([words[schema["type"]], " and ".join(bounds)]).strip()
