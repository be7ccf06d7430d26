"""Finds the schemes: every file of this folder is imported once, and what it registers counts."""

import importlib
import pkgutil
from collections.abc import Callable
from typing import TypeVar

import normscale.schemes as package
from normscale.errors import ConfigError, nearest
from normscale.schemes.scheme import Scheme

_SCHEMES: dict[str, type[Scheme]] = {}
S = TypeVar("S", bound=type[Scheme])


def register(name: str) -> Callable[[S], S]:
    """Returns a class decorator that enters a scheme under `name`."""

    def enter(cls: S) -> S:
        cls.name = name
        _SCHEMES[name] = cls
        return cls

    return enter


def scheme_names() -> list[str]:
    """Returns the names of all schemes, sorted."""
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    return sorted(_SCHEMES)


def find_scheme(name: str) -> type[Scheme]:
    """Returns the scheme class called `name`.

    Raises:
        ConfigError: there is none; the message lists those there are and names the nearest.
    """
    names = scheme_names()
    if name not in names:
        raise ConfigError(
            f"model.scheme: {name!r} is not a scheme{nearest(name, names)} (allowed: {', '.join(names)})",
            key="model.scheme",
        )
    return _SCHEMES[name]
