"""A configuration from a YAML file and `key=value` overrides, with the place of every value kept.

A file may say `extends: other.yaml` (or a list, the later wins; relative to the file). Values may refer to others,
`${model.d}`, or to the environment, `${oc.env:NAME}`; `???` marks a value that an override has to give. Every mistake
is one line: key, value, what is allowed, the nearest name, and the place.
"""

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from normscale.config import keys
from normscale.config.schema import RunConfig
from normscale.config.sources import Sources, plain
from normscale.errors import ConfigError, nearest

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAX_BYTES = 2**20  # of one file; a configuration is a page of text
MAX_LINES = 8  # mistakes shown at once
_OVERRIDE = re.compile(r"(?P<key>[\w-]+(?:\.[\w-]+|\[\d{1,4}\])*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Loaded:
    """A configuration and where its values were written, for the checks of the second stage.

    Wrap those checks in `with loaded.sources.placed():`; a ConfigError with a `key` then names file and line too.
    """

    config: RunConfig
    sources: Sources


def load(path: Path | None, overrides: Sequence[str] = ()) -> RunConfig:
    """Returns the configuration of a file (None: the defaults) with `key=value` overrides on top.

    Raises:
        ConfigError: anything wrong with the file, a key, a value or a combination of values.
    """
    return read(path, overrides).config


def read(path: Path | None, overrides: Sequence[str] = ()) -> Loaded:
    """Returns what `load` does, and the sources.

    Raises:
        ConfigError: as for `load`.
    """
    from omegaconf import OmegaConf

    sources = Sources()
    tree = OmegaConf.create(RunConfig().model_dump(mode="json"))
    if path is not None:
        tree = _merge(tree, _file(Path(path), sources))
    for before, override in zip(["", *overrides], overrides, strict=False):
        _override(tree, override, sources, before)
    if sources.missing():
        lines = [(plain(key), sources.where(key)) for key in sources.missing()]
        raise _mistakes([f"{key}: no value is given (???); set {key}=...{where}" for key, where in lines])
    with _reading(sources, "configuration"):
        values = OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    return Loaded(_validate(values, sources), sources)


def revise(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Returns the configuration with some values replaced by dotted key, checked as a whole again.

    Raises:
        ConfigError: an unknown key, a wrong value, or a combination that does not fit.
    """
    tree = config.model_dump(mode="json")
    for key, value in values.items():
        node = tree
        *sections, last = key.split(".")
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{plain(key)}: {section} is not a section")
        node[last] = value
    return _validate(tree, Sources())


def dump(config: RunConfig) -> str:
    """Returns the configuration as YAML that `load` reads back to an equal one."""
    from omegaconf import OmegaConf

    return str(OmegaConf.to_yaml(OmegaConf.create(_literal(config.model_dump(mode="json")))))


def _literal(value: Any) -> Any:
    """Returns the value with all text escaped that OmegaConf would otherwise take for a reference or for `???`."""
    if isinstance(value, dict):
        return {key: _literal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_literal(item) for item in value]
    if isinstance(value, str):
        if re.fullmatch(r"\\*\?\?\?", value):
            return "\\" + value
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return value


def _file(path: Path, sources: Sources, chain: tuple[Path, ...] = (), by: str = "") -> "DictConfig":
    """Returns the merged values of a file and of the files it extends, and adds their places to `sources`.

    `chain` holds the files that led here by `extends`, `by` the place of the last `extends`.
    """
    from omegaconf import OmegaConf

    text = _text(path, by)
    name = plain(str(path), 200)
    own = Sources()
    node = _node(text, name, lambda line: f"{name}:{line}" if line else name)
    if node is None or node.tag.endswith(":null"):
        return OmegaConf.create({})
    if node.id != "mapping":
        raise ConfigError(f"{name}: not a mapping; write keys, like 'model:', and indented keys below them{by}")
    through = f" by extends in {by.strip(' ()')}" if by else ""
    own.note(node, lambda key: f"{name}:{key.start_mark.line + 1}{through}")
    with _reading(own, name, lambda line: f"{name}:{line}" if line else name):
        own_values = OmegaConf.create(text)
        others = OmegaConf.to_container(own_values, resolve=False).get("extends", [])
    others = [others] if isinstance(others, str) else others
    here = own.where("extends")
    if not isinstance(others, list) or not all(isinstance(other, str) and other for other in others):
        raise ConfigError(f"extends: {_shown(others)} is not a file name or a list of file names{here}")
    if "extends" in own_values:
        del own_values["extends"]

    chain = (*chain, path.resolve())
    values = OmegaConf.create({})
    for other in others:
        target = Path(os.path.normpath(path.parent / other))
        if target.resolve() in chain:
            raise ConfigError(f"extends: {plain(other)} extends this file in turn; break the circle{here}")
        values = _merge(values, _file(target, sources, chain, here))
    sources.update(own)
    return _merge(values, own_values)


def _text(path: Path, by: str) -> str:
    name = plain(str(path), 200)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{name}: a folder; name a YAML file in it{by}")
        if not stat.S_ISREG(mode):  # a pipe might never come to an end
            raise ConfigError(f"{name}: not a regular file; name a YAML file{by}")
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{name}: {_absent(path)}{by}") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise ConfigError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}{by}") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name}: larger than {MAX_BYTES} bytes; this is not a configuration{by}")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}: not UTF-8 text; save it as UTF-8 ({name}:{line})") from None


def _absent(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {plain(os.readlink(path), 200)}, which is not there"
    try:
        names = {file.stem: file.name for file in path.parent.iterdir() if file.suffix in (".yaml", ".yml")}
    except OSError:
        return f"no such file, and no folder {plain(str(path.parent), 200)}"
    close = get_close_matches(path.stem, names, n=1)  # the suffix would make every name alike
    return f"no such file; did you mean {plain(names[close[0]])!r}?" if close else "no such file"


def _override(tree: "DictConfig", override: str, sources: Sources, before: str = "") -> None:
    """Puts one `key=value` into the tree, in place; `before` is the word before it."""
    match = _OVERRIDE.fullmatch(override)
    if not match:
        mend = "write e.g. model.d=64 or train.optim.betas[0]=0.9"
        if before and "=" not in override:
            mend += f"; if it belongs to the word before, put both into quotes: '{plain(f'{before} {override}')}'"
        raise ConfigError(f"override '{plain(override)}': not key=value; {mend}")
    key, place = match["key"], f"override {plain(override)}"
    node = _node(match["value"], key, lambda _: place)
    sources.add(key, place, missing=node is not None and node.value == "???")
    if node is not None:
        sources.note(node, lambda _: place, key)
    with _reading(sources, key, lambda _: place):
        tree.merge_with_dotlist([override])


def _merge(base: "DictConfig", over: "DictConfig") -> "DictConfig":
    """Returns `base` (which may be changed) with `over` on top: mappings are merged, everything else is replaced."""
    from omegaconf import DictConfig, OmegaConf

    with _reading(Sources(), "configuration"):
        raw = OmegaConf.to_container(over, resolve=False)
        _make_way(base, OmegaConf.to_container(base, resolve=False), raw)
        merged = OmegaConf.merge(base, over)
    assert isinstance(merged, DictConfig)
    return merged


def _make_way(base: Any, old: Any, new: Any) -> None:
    """Empties what OmegaConf would refuse to merge (a mapping and a list), so that the schema can name the mistake."""
    for name in old.keys() & new.keys():
        if isinstance(old[name], dict) and isinstance(new[name], dict):
            _make_way(base[name], old[name], new[name])
        elif isinstance(old[name], dict | list) and isinstance(new[name], dict | list):
            base[name] = None


def _node(text: str, thing: str, place: Callable[[int], str]) -> Any:
    """Returns the YAML node tree of a text, which knows its lines, or None for an empty one."""
    import yaml

    with _reading(Sources(), thing, place):
        return yaml.compose(text, Loader=yaml.SafeLoader)


@contextmanager
def _reading(sources: Sources, thing: str, place: Callable[[int], str] | None = None) -> Iterator[None]:
    """Turns what YAML and OmegaConf raise into a ConfigError about their key, or about `thing`.

    The sources say where, or else `place`, given a line (0: unknown).
    """
    try:
        yield
    except Exception as error:  # resolvers and parsers raise whatever they like, always about what was written
        key = str(getattr(error, "full_key", None) or thing)
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or getattr(error, "msg", None) or str(error) or type(error).__name__
        problem = plain(str(said).partition("\n")[0], 120)
        if isinstance(error, RecursionError):
            problem = "nested too deeply"
        elif keys.is_key(key) and "incompatible container" in problem:
            given = keys.example(key)
            problem = f"not {keys.expected(key)}" + (f"; give e.g. {given}" if given else "")
        elif "\\t" in problem:
            problem += "; indent with spaces, not tabs"
        where = "" if mark else sources.where(key)
        if place and not where:
            where = f" ({place(mark.line + 1 if mark else 0)})"
        raise ConfigError(f"{plain(key)}: {problem}{where}") from error


def _validate(values: Any, sources: Sources) -> RunConfig:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        found = sorted(error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden")
        raise _mistakes([_mistake(each, sources) for each in found]) from None


def _mistakes(lines: list[str]) -> ConfigError:
    more = len(lines) - MAX_LINES
    return ConfigError("\n".join(lines[:MAX_LINES] + ([f"... and {more} more mistakes"] if more > 0 else [])))


def _mistake(error: Mapping[str, Any], sources: Sources) -> str:
    """Returns the line for one mistake that the schema found."""
    loc = list(error["loc"])
    known = len(loc)
    while known and not keys.is_key(_dotted(loc[:known])):
        known -= 1
    key, inside = _dotted(loc[:known]), loc[known:]
    if error["type"] == "extra_forbidden":
        key, name = _dotted(loc[:-1]), str(loc[-1])
        section = f"{key}." if key else ""
        where = sources.where(f"{section}{name}")
        if keys.is_key(f"{section}{name}"):  # only words on the command line may have dots
            first, _, rest = name.partition(".")
            return f"{section}{name}: write {first}: with {rest.replace('.', ': with ')}: below it{where}"
        return f"{section}{plain(name)}: no such key{keys.hint(key, name)}{where}"
    if error["type"] == "conflict":
        about = error["ctx"]["keys"] or (key,)
        return f"{about[0]}: {plain(error['ctx']['said'], 400)}{sources.where(*about)}"
    value = error["input"]
    element = bool(inside) and error["type"] != "missing"
    wanted = keys.expected(key, inside=element)
    if error["type"] == "finite_number":
        wanted = wanted.replace("a number", "a finite number")
    elif error["type"] == "less_than_equal":
        wanted = f"{wanted} and <= {error['ctx']['le']:g}"
    shown = f"{key}[{inside[0]}]" if element else key
    mend = nearest(value, keys.choices(key)) if isinstance(value, str) else ""
    if "line of text" in wanted and not isinstance(value, str | None):
        mend = "; put it in quotes"
    given = keys.example(key, inside=element)
    mend = mend or (f"; give e.g. {given}" if given else "")
    return f"{shown}: {_shown(value)} is not {wanted}{mend}{sources.where(shown)}"


def _dotted(loc: Sequence[Any]) -> str:
    return ".".join(str(part) for part in loc)


def _shown(value: Any) -> str:
    """Returns a value as a message shows it: short, on one line, and in YAML's words where Python's differ."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else plain(repr(value), 60)
