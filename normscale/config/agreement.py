"""One compute precision from every place that can name one; two places that disagree are an error.

The order is: the configuration (its file, with `key=value` on top, which wins as it does for every key); then, where
the configuration does not write `precision.compute`, the environment of `accelerate launch --mixed_precision` and a
DeepSpeed configuration; then the default. No place overrules another: what is named twice must be the same.

| configuration | environment | DeepSpeed | result |
| --- | --- | --- | --- |
| bf16 | | fp16.enabled: true | error naming both |
| bf16 | fp16 | | error naming both |
| not written | unset, or "no" | "auto" | the default, fp32 |
| any | any | fp16 and bf16 both true | error naming both |
| not written | bf16 | "auto", or bf16 | bf16 |
"""

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from normscale.config.load import Loaded, revise
from normscale.config.schema import Compute, PrecisionConfig
from normscale.errors import ConfigError, nearest

KEY = "precision.compute"
VARIABLE = "ACCELERATE_MIXED_PRECISION"
WORDS: dict[str, Compute | None] = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "fp8_e4m3"}
"""What `accelerate launch` leaves in the environment. "no" is its default, so that it asks for nothing."""

SECTIONS: dict[str, Compute] = {"fp16": "fp16", "bf16": "bf16", "bfloat16": "bf16"}
"""The sections of a DeepSpeed configuration; the last is an old name."""


class Said(NamedTuple):
    """A precision and the place that names it, as in "bf16", "run.yaml:12"."""

    compute: Compute
    place: str


def agreed_compute(
    written: Said | None,
    environ: Mapping[str, str],
    deepspeed: Mapping[str, Any] | None = None,
    deepspeed_path: str = "the DeepSpeed configuration",
) -> Compute:
    """Returns the one compute precision; `written` is the configuration's, None where it leaves it to the default.

    "auto" and a missing section of the DeepSpeed mapping ask for nothing. One that is false forbids its precision.

    Raises:
        ConfigError: two places name different precisions, or one of them names none that exists.
    """
    said = [one for one in (written, _environment(environ)) if one is not None]
    forbidden: dict[str, str] = {}
    if deepspeed is not None:
        wanted, forbidden = _deepspeed(deepspeed, deepspeed_path)
        said += [wanted] if wanted else []
    for one, other in itertools.pairwise(said):
        if one.compute != other.compute:
            places = f"{one.compute} ({one.place}) but {other.compute} ({other.place})"
            raise ConfigError(f"{KEY}: {places}; give one precision, in one place")
    agreed = said[0].compute if said else PrecisionConfig().compute
    if said and agreed in forbidden:
        raise ConfigError(f"{KEY}: {agreed} ({said[0].place}) but {forbidden[agreed]}; remove one of the two")
    return agreed


def settled(loaded: Loaded, environ: Mapping[str, str]) -> Loaded:
    """Returns the configuration with the compute precision that it and the environment agree on.

    Raises:
        ConfigError: as `agreed_compute`; or the precision of the environment does not go with the rest.
    """
    compute = loaded.config.precision.compute
    place = loaded.sources.place(KEY)
    if place is None and compute != PrecisionConfig().compute:  # a section that refers to another, say
        place = "the configuration"
    agreed = agreed_compute(None if place is None else Said(compute, place), environ)
    if agreed == compute:
        return loaded
    try:
        config = revise(loaded.config, {KEY: agreed})
    except ConfigError as error:
        raise ConfigError(f"{VARIABLE}={environ[VARIABLE]} in the environment: {error}", error.key) from error
    return Loaded(config, loaded.sources)


def _environment(environ: Mapping[str, str]) -> Said | None:
    word = environ.get(VARIABLE, "no")
    if word.lower() not in WORDS:
        allowed = ", ".join(WORDS)
        raise ConfigError(
            f"{VARIABLE}={word!r} in the environment is not one of {allowed}{nearest(word, tuple(WORDS))}; unset it"
        )
    compute = WORDS[word.lower()]
    return None if compute is None else Said(compute, f"{VARIABLE}={word} in the environment")


def _deepspeed(mapping: Mapping[str, Any], path: str) -> tuple[Said | None, dict[str, str]]:
    """Returns what a DeepSpeed mapping asks for, and what it forbids with the place that does."""
    found: list[Said] = []
    forbidden: dict[str, str] = {}
    for name, compute in SECTIONS.items():
        section = mapping.get(name, {})
        enabled = section.get("enabled", "auto") if isinstance(section, Mapping) else section
        if enabled is not True and enabled is not False and enabled != "auto":
            raise ConfigError(f'{name}.enabled: {enabled!r} is not true, false or "auto" ({path})')
        if enabled is True:
            found.append(Said(compute, f"{name}.enabled=true in {path}"))
        elif enabled is False:
            forbidden[compute] = f"{name}.enabled=false in {path}"
    if len({one.compute for one in found}) > 1:
        both = " and ".join(one.place.partition("=")[0] for one in found)
        raise ConfigError(f"{path}: {both} are both true; set one of them to false")
    return (found[0] if found else None), forbidden
