"""The second stage of checking: a model configuration with its names resolved."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normscale.config.schema import ModelConfig
from normscale.errors import ConfigError
from normscale.models.feedforward import GATED, default_ffn_width
from normscale.models.norms import Norms, check_used, in_use, norms_of, typed
from normscale.norms import Norm
from normscale.schemes import Depth, Make, Scheme, Site, find_scheme
from normscale.schemes.scheme import Kind, Side


@dataclass(frozen=True)
class Plan:
    """A model configuration with its names resolved: what `build` needs, and what `normscale check` prints."""

    config: ModelConfig
    depth: Depth
    scheme: Scheme
    norms: Norms
    ffn: int

    def make(self, vocab: int, generator: torch.Generator, side: Side, kind: Kind | None = None) -> Make:
        """Returns what the scheme may build with at a site, or at a side's ends."""
        chosen = self.norms.at(side, kind)

        def norm(width: int | None = None) -> nn.Module:
            return chosen.make(width or self.config.d, self.config.eps)

        gated = self.config.activation in GATED
        return Make(self.config.d, self.config.heads, self.ffn, vocab, norm, generator, gated)

    def norm_of_qk(self, site: Site, width: int) -> nn.Module:
        """Returns a norm on q or k."""
        return self.norms.at(site.side, site.kind, qk=True).make(width, self.config.eps)

    def norms_in_use(self) -> Iterator[Norm]:
        """Yields the norms of the model, as `norms.in_use`."""
        return in_use(self.norms, self.config, self.scheme, self.depth)

    def numerical(self) -> dict[str, Any]:
        """Returns the configuration with every default of scheme, norm and widths filled in: what numbers depend on."""
        filled = {"ffn": self.ffn, "scheme_options": self.scheme.options.model_dump(mode="json")}
        return self.config.model_dump(mode="json") | filled | self.norms.numerical()


def resolve(config: ModelConfig) -> Plan:
    """Returns the plan of a model: scheme, norms and their own options checked against their own types.

    Raises:
        ConfigError: an unknown scheme, norm or option, a wrong value of one, a topology the scheme (or one of its
            options) has no form for, a setting of the model that the scheme could not follow, or a norm where it could
            say nothing.
    """
    scheme_type = find_scheme(config.scheme)
    for option, reason in scheme_type.refuses.items():
        if option in config.scheme_options:
            key = f"model.scheme_options.{option}"
            raise ConfigError(f"{key}: makes no sense with scheme={config.scheme}: {reason}", key=key)
    scheme = scheme_type(typed(scheme_type.Options, config.scheme_options, "model.scheme_options", config.scheme))
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
    ffn = config.ffn or default_ffn_width(config.d, config.activation)
    plan = Plan(config, depth, scheme, norms_of(config, depth), ffn)
    _check_norms_inside(plan)
    check_used(plan.norms, config, scheme, depth)
    return plan


def _check_norms_inside(plan: Plan) -> None:
    """Raises the error of a norm inside attention that could do nothing, or would come twice."""
    config = plan.config
    width = config.d // config.heads
    if config.qk_norm in ("head", "l2") and width == 1:
        raise ConfigError(
            f"model.qk_norm: heads of one channel (model.d={config.d} / model.heads={config.heads}) have nothing to "
            "normalise; choose fewer heads, or model.qk_norm=full",
            key="model.qk_norm",
        )
    if config.kv_latent == 1:
        raise ConfigError("model.kv_latent: a norm of 1 channel leaves a constant; choose 2 or more", "model.kv_latent")
    if config.qk_norm != "none":
        sites, generator = plan.depth.sites(), torch.Generator()
        makes = (plan.make(1, generator, site.side, site.kind) for site in sites)
        if any("qkv" in plan.scheme.slots(plan.depth, site, make) for site, make in zip(sites, makes, strict=True)):
            raise ConfigError(
                f"model.qk_norm: {config.qk_norm!r} makes no sense with scheme={config.scheme}, which does its own to "
                "q and k; set model.qk_norm=none",
                key="model.qk_norm",
            )
