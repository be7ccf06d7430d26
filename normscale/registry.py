"""Finds what a folder holds: every file is imported once, and what it registers counts; no list is edited."""

import importlib
import pkgutil
from collections.abc import Callable
from types import ModuleType
from typing import Generic, TypeVar

from normscale.errors import ConfigError, nearest

T = TypeVar("T")
C = TypeVar("C")


class Registry(Generic[T]):
    """Classes by name, from the files of one package; each gets its name as the attribute `name`."""

    def __init__(self, package: ModuleType, what: str, key: str) -> None:
        """Takes the package to look in, what its classes are called, and the configuration key that names one."""
        self.package, self.what, self.key = package, what, key
        self.classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Returns a class decorator that enters a class under `name`."""

        def enter(cls: C) -> C:
            cls.name = name  # type: ignore[attr-defined]
            self.classes[name] = cls  # type: ignore[assignment]
            return cls

        return enter

    def names(self) -> list[str]:
        """Returns the names of all classes, sorted."""
        for module in pkgutil.iter_modules(self.package.__path__):
            importlib.import_module(f"{self.package.__name__}.{module.name}")
        return sorted(self.classes)

    def find(self, name: str) -> type[T]:
        """Returns the class called `name`.

        Raises:
            ConfigError: there is none; the message lists those there are and names the nearest.
        """
        names = self.names()
        if name not in names:
            raise ConfigError(
                f"{self.key}: {name!r} is not a {self.what}{nearest(name, names)} (allowed: {', '.join(names)})",
                key=self.key,
            )
        return self.classes[name]
