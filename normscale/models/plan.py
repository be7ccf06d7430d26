"""The second stage of checking: a model configuration with its names resolved."""

from dataclasses import dataclass
from typing import Any

import torch
from pydantic import BaseModel, ValidationError
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError, nearest
from normscale.models.feedforward import GATED, default_ffn_width
from normscale.norms import Norm, find_norm
from normscale.schemes import Depth, Make, Scheme, find_scheme


@dataclass(frozen=True)
class Plan:
    """A model configuration with its names resolved: what `build` needs, and what `normscale check` prints."""

    config: ModelConfig
    depth: Depth
    scheme: Scheme
    norm: type[Norm]
    norm_options: Any
    ffn: int

    def make(self, vocab: int, generator: torch.Generator) -> Make:
        """Returns what the scheme may build with."""

        def norm(width: int | None = None) -> nn.Module:
            return self.norm(width or self.config.d, self.config.eps, self.norm_options)

        gated = self.config.activation in GATED
        return Make(self.config.d, self.config.heads, self.ffn, vocab, norm, generator, gated)

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
        ConfigError: an unknown scheme, norm or option, a wrong value of one, a topology the scheme (or one of its
            options) has no form for, a setting of the model that the scheme could not follow, or a norm where it could
            say nothing.
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
    if (found := scheme.unfit(depth)) is not None:
        option, said = found
        key = f"model.scheme_options.{option}"
        raise ConfigError(f"{key}: {said}", key=key)
    if (found := scheme.clash(config)) is not None:
        setting, said = found
        key = f"model.{setting}"
        raise ConfigError(
            f"{key}: {getattr(config, setting)!r} makes no sense with scheme={config.scheme}: {said}", key
        )
    norm_options = _options(norm.Options, config.norm_options, "model.norm_options", config.norm)
    ffn = config.ffn or default_ffn_width(config.d, config.activation)
    plan = Plan(config, depth, scheme, norm, norm_options, ffn)
    _check_norms_inside(plan)
    return plan


def _check_norms_inside(plan: Plan) -> None:
    """Raises the error of a norm inside attention that could do nothing, or would come twice."""
    config = plan.config
    width = config.d // config.heads
    if config.qk_norm == "head" and width == 1:
        raise ConfigError(
            f"model.qk_norm: heads of one channel (model.d={config.d} / model.heads={config.heads}) have nothing to "
            "normalise; choose fewer heads, or model.qk_norm=full",
            key="model.qk_norm",
        )
    if config.kv_latent == 1:
        raise ConfigError("model.kv_latent: a norm of 1 channel leaves a constant; choose 2 or more", "model.kv_latent")
    if config.qk_norm != "none":
        make = plan.make(1, torch.Generator())
        if any("qkv" in plan.scheme.slots(plan.depth, site, make) for site in plan.depth.sites()):
            raise ConfigError(
                f"model.qk_norm: {config.qk_norm!r} makes no sense with scheme={config.scheme}, which does its own to "
                "q and k; set model.qk_norm=none",
                key="model.qk_norm",
            )


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
