"""Which norm stands where: `model.norm` and `model.norms` resolved against the norms' own types."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ValidationError

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError, nearest
from normscale.norms import Norm, find_norm
from normscale.schemes import Depth, Scheme
from normscale.schemes.scheme import Kind, Side

SIDES: tuple[Side, ...] = ("encoder", "decoder")
BRANCHES = ("attention", "ffn")
PLACES = (*SIDES, *BRANCHES, "qk")


@dataclass(frozen=True)
class Choice:
    """A norm and its options, and the key of the configuration that these come from."""

    kind: type[Norm]
    options: Any
    key: str

    def make(self, width: int, eps: float) -> Norm:
        """Returns a norm.

        Raises:
            ConfigError: one of its options does not fit the width.
        """
        try:
            return self.kind(width, eps, self.options)
        except ConfigError as error:
            key = f"{self.key}.{error.key}"
            raise ConfigError(f"{key}: {error}", key=key) from None

    def numerical(self) -> dict[str, Any]:
        """Returns the choice with every default filled in."""
        return {"norm": self.kind.name, "norm_options": self.options.model_dump(mode="json")}


@dataclass(frozen=True)
class Norms:
    """The norms of a model: the one of `model.norm`, and by place what stands there instead.

    A norm over q or k takes the place `qk`, all else of a site its branch or its side, a final norm or one of the
    embedding its side.
    """

    default: Choice
    places: Mapping[str, Choice]

    def at(self, side: Side, kind: Kind | None = None, qk: bool = False) -> Choice:
        """Returns the norm of a site, of a side's ends where there is no kind, or on q and k."""
        branch = () if kind is None else ("ffn",) if kind == "ffn" else ("attention",)
        places = (*(("qk",) if qk else ()), *branch, side)
        return next((self.places[place] for place in places if place in self.places), self.default)

    def numerical(self) -> dict[str, Any]:
        """Returns the configuration's norms with every default filled in."""
        places = {place: choice.numerical() for place, choice in self.places.items()}
        return {"norm_options": self.default.numerical()["norm_options"], "norms": places}


def norms_of(config: ModelConfig, depth: Depth) -> Norms:
    """Returns the norms of a model.

    Raises:
        ConfigError: an unknown norm, place or option, a wrong value of one, or a place where none would do anything.
    """
    default = _choice(config, config.norm, config.norm_options, "model.norm_options")
    places: dict[str, Choice] = {}
    for place, given in config.norms.items():
        _check_place(place, config, depth)
        key = f"model.norms.{place}"
        entry = {"norm": given} if isinstance(given, str) else given
        if not isinstance(entry, dict) or "norm" not in entry or entry.keys() - {"norm", "norm_options"}:
            raise ConfigError(
                f"{key}: write the name of a norm, or norm: and norm_options: below it (it is {given!r})", key=key
            )
        places[place] = _choice(config, entry["norm"], entry.get("norm_options", {}), f"{key}.norm_options", key)
    if config.qk_norm == "l2":
        places["qk"] = _choice(config, "scalenorm", {"gain": False}, "model.qk_norm")
    return Norms(default, places)


def in_use(norms: Norms, config: ModelConfig, scheme: Scheme, depth: Depth) -> Iterator[Norm]:
    """Yields one norm of each choice that a model holds, without values.

    A choice may stand at other widths, too: schemes place norms inside their branches.
    """
    with torch.device("meta"):
        for side in (side for side, blocks in zip(SIDES, (depth.N, depth.M), strict=True) if blocks):
            if config.embedding_norm:
                yield norms.at(side).make(config.d, config.eps)
            for kind in depth.kinds(side):
                if scheme.has_norms:
                    yield norms.at(side, kind).make(config.d, config.eps)
                if kind != "ffn" and config.qk_norm != "none":
                    width = config.d if config.qk_norm == "full" else config.d // config.heads
                    yield norms.at(side, kind, qk=True).make(width, config.eps)
                if kind != "ffn" and config.kv_latent is not None:
                    yield norms.at(side, kind).make(config.kv_latent, config.eps)


def check_used(norms: Norms, config: ModelConfig, scheme: Scheme, depth: Depth) -> None:
    """Refuses what no norm of the model would read.

    Raises:
        ConfigError: it names the key.
    """
    used = list(in_use(norms, config, scheme, depth))
    fields = ModelConfig.model_fields
    if config.eps != fields["eps"].default and not any(norm.has_eps for norm in used):
        what = f"model.norm={config.norm}" if used else f"model.scheme={config.scheme}, which has no norms"
        raise _unused("model.eps", f"{config.eps:g}", what)
    if not used:
        for name in ("norm", "norm_options", "norms"):
            if (value := getattr(config, name)) != fields[name].default:
                raise _unused(f"model.{name}", value, f"model.scheme={config.scheme}, which has no norms")
    elif set(SIDES) <= norms.places.keys() and config.norm != fields["norm"].default:
        raise _unused("model.norm", config.norm, "model.norms, which names one for each side")


def typed(kind: type[BaseModel], given: dict[str, Any], key: str, owner: str) -> Any:
    """Returns the typed options of a scheme or norm.

    Raises:
        ConfigError: it names the option.
    """
    allowed = sorted(kind.model_fields)
    for option in given:
        if option not in allowed:
            has = f"it has: {', '.join(allowed)}" if allowed else "it has no options"
            raise ConfigError(
                f"{key}.{option}: {owner} has no option {option!r}{nearest(option, allowed)} ({has})",
                key=f"{key}.{option}",
            )
    try:
        return kind(**given)
    except ValidationError as problem:
        first = problem.errors()[0]
        at = ".".join([key, *map(str, first["loc"])])
        said = first.get("ctx", {}).get("said", first["msg"])
        raise ConfigError(f"{at}: {first['input']!r}: {said} ({owner})", key=at) from None


def _choice(config: ModelConfig, name: str, given: Any, options_key: str, key: str = "model.norm") -> Choice:
    try:
        norm = find_norm(name)
    except ConfigError as error:
        raise ConfigError(str(error).replace("model.norm:", f"{key}:", 1), key=key) from None
    if not isinstance(given, dict):
        raise ConfigError(f"{options_key}: {given!r} is no mapping of options", key=options_key)
    return Choice(norm, norm.settled(typed(norm.Options, given, options_key, name), config.heads), options_key)


def _check_place(place: str, config: ModelConfig, depth: Depth) -> None:
    key = f"model.norms.{place}"
    if place not in PLACES:
        said = f"{place!r} is no place of a norm{nearest(place, PLACES)} (allowed: {', '.join(PLACES)})"
        raise ConfigError(f"{key}: {said}", key=key)
    if place in SIDES and depth.topology != "encoder-decoder":
        raise _unused(key, config.norms[place], f"one side alone ({depth.topology})", "model.norm")
    if place in SIDES and (branch := next((each for each in BRANCHES if each in config.norms), None)):
        raise ConfigError(
            f"{key}: a site has one norm, and model.norms.{branch} names it too; give norms by side or by branch",
            key=key,
        )
    if place == "qk" and config.qk_norm not in ("head", "full"):
        raise _unused(key, config.norms[place], f"model.qk_norm={config.qk_norm}", "model.qk_norm=head or full")


def _unused(key: str, value: Any, has: str, mend: str = "") -> ConfigError:
    mended = f" or set {mend}" if mend else ""
    return ConfigError(f"{key}: {value} would do nothing with {has}; remove it{mended}", key=key)
