"""The second stage of checking: a model configuration with its names resolved."""

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError, nearest
from normscale.models.feedforward import default_ffn_width
from normscale.norms import Norm, find_norm
from normscale.schemes import Depth, Scheme, find_scheme


@dataclass(frozen=True)
class Plan:
    """A model configuration with its names resolved: what `build` needs, and what `normscale check` prints."""

    config: ModelConfig
    depth: Depth
    scheme: Scheme
    norm: type[Norm]
    norm_options: Any
    ffn: int

    def numerical(self) -> dict[str, Any]:
        """Returns the configuration with every default of scheme, norm and widths filled in: what numbers depend on."""
        filled = {
            "ffn": self.ffn,
            "scheme_options": self.scheme.options.model_dump(mode="json"),
            "norm_options": self.norm_options.model_dump(mode="json"),
        }
        return self.config.model_dump(mode="json") | filled


def resolve(config: ModelConfig) -> Plan:
    """Returns the plan of a model: scheme, norm and their own options checked against their own types.

    Raises:
        ConfigError: an unknown scheme, norm or option, a wrong value of one, or a topology the scheme refuses.
    """
    scheme_type, norm = find_scheme(config.scheme), find_norm(config.norm)
    for option, reason in scheme_type.refuses.items():
        if option in config.scheme_options:
            key = f"model.scheme_options.{option}"
            raise ConfigError(f"{key}: makes no sense with scheme={config.scheme}: {reason}", key=key)
    scheme = scheme_type(_options(scheme_type.Options, config.scheme_options, "model.scheme_options", config.scheme))
    depth = Depth(config.N, config.M)
    if depth.topology not in scheme.topologies:
        allowed = ", ".join(sorted(scheme.topologies))
        raise ConfigError(
            f"model.scheme: {config.scheme!r} has no {depth.topology} form (it has: {allowed}); "
            "choose another scheme, or other N and M",
            key="model.scheme",
        )
    norm_options = _options(norm.Options, config.norm_options, "model.norm_options", config.norm)
    return Plan(config, depth, scheme, norm, norm_options, config.ffn or default_ffn_width(config.d, config.activation))


def _options(kind: type[BaseModel], given: dict[str, Any], key: str, owner: str) -> BaseModel:
    """Returns the typed options of a scheme or norm, or an error that names the option."""
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
