"""One compute precision from every place that can name one; two places that disagree are an error.

The order is: the configuration (its file, with `key=value` on top, which wins as it does for every key); then, where
the configuration does not write `precision.compute`, the environment of `accelerate launch --mixed_precision` and the
DeepSpeed configuration of its `--deepspeed_config_file`, or the one that `engine.json` names; then the default. No
place overrules another: what is named twice must be the same. What else that JSON may say is compared in
`config.deepspeed`.

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
from pathlib import Path
from typing import Any, NamedTuple

from normscale.config import deepspeed_file
from normscale.config.deepspeed import filled
from normscale.config.load import Loaded, revise
from normscale.config.precision import Compute, PrecisionConfig
from normscale.config.sources import plain
from normscale.errors import ConfigError, nearest

KEY = "precision.compute"
VARIABLE = "ACCELERATE_MIXED_PRECISION"
WORDS: dict[str, Compute | None] = {"no": None, "bf16": "bf16", "fp16": "fp16", "fp8": "fp8_e4m3"}
"""What `accelerate launch` leaves in the environment. "no" is its default, so that it asks for nothing."""

DEEPSPEED_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
"""Where `accelerate launch --use_deepspeed --deepspeed_config_file` leaves the path; "none" stands for none."""

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
) -> Said:
    """Returns the one compute precision and a place that names it.

    `written` is the configuration's, None where it leaves it to the default. "auto" and a missing section of the
    DeepSpeed mapping ask for nothing. One that is false forbids its precision.

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
    agreed = said[0] if said else Said(PrecisionConfig().compute, "the default")
    if agreed.compute in forbidden:
        places = f"{agreed.compute} ({agreed.place}) but {forbidden[agreed.compute]}"
        raise ConfigError(f"{KEY}: {places}; remove one of the two")
    return agreed


def settled(loaded: Loaded, environ: Mapping[str, str]) -> Loaded:
    """Returns the configuration with the compute precision that it, the environment and DeepSpeed's file agree on.

    Of the file that `engine.json` names, all else that it alone says is taken, too.

    Raises:
        ConfigError: as `agreed_compute`; that file cannot be read; or the precision does not go with the rest.
    """
    compute = loaded.config.precision.compute
    place = loaded.sources.place(KEY)
    if place is None and compute != PrecisionConfig().compute:  # a section that refers to another, say
        place = "the configuration"
    written = None if place is None else Said(compute, place)
    path, engine = environ.get(DEEPSPEED_VARIABLE, ""), loaded.config.engine
    own = engine.json if engine.name == "deepspeed" else None
    if own is not None:
        _check_one_file(own, path)
        with loaded.sources.placed():
            agreed = agreed_compute(written, environ, deepspeed_file.read(own), plain(own, 200))
    elif path in ("", "none"):
        agreed = agreed_compute(written, environ)
    else:
        named_by = f"{DEEPSPEED_VARIABLE}={plain(path, 200)} in the environment"
        agreed = agreed_compute(written, environ, deepspeed_file.read_object(path, named_by), path)
    if agreed.compute == compute:
        return filled(loaded)
    try:
        config = revise(loaded.config, {KEY: agreed.compute})
    except ConfigError as error:
        raise ConfigError(f"{agreed.place}: {error}", error.key) from error
    return filled(Loaded(config, loaded.sources))


def _check_one_file(own: str, path: str) -> None:
    if path not in ("", "none") and Path(path).absolute() != Path(own).absolute():
        raise ConfigError(
            f"engine.json: {plain(own, 200)} but {DEEPSPEED_VARIABLE}={plain(path, 200)} in the environment; give one "
            "DeepSpeed configuration, in one place"
        )


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
