"""The manifest of a claim: which runs belong to it, in which role, and the verdict. Written by the claim runner."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normscale.errors import StoreError
from normscale.tracking.files import read_regular


@dataclass(frozen=True)
class Cell:
    """One run's place in a claim. `outcome`, where set, is the judge's word and wins over what the spool suggests."""

    run: str
    arm: str
    cell: str
    depth: int
    seed: int
    lr: float
    role: str = "main"
    name: str = ""
    outcome: str | None = None


@dataclass(frozen=True)
class Manifest:
    """One claim at one profile. `t` is in milliseconds since 1970."""

    id: str
    profile: str
    family: str
    says: str
    source: str
    t: int
    cells: tuple[Cell, ...]
    verdict: dict[str, Any] | None = None
    figures: tuple[str, ...] = ()
    report: str | None = None
    left_out: tuple[str, ...] = ()
    path: Path = field(default=Path(), compare=False)

    @property
    def key(self) -> str:
        """Returns the name that is unique among claims and profiles."""
        return f"{self.id}-{self.profile}"

    @property
    def runs(self) -> list[str]:
        """Returns the ids of its runs, each once, in order."""
        return list(dict.fromkeys(cell.run for cell in self.cells))

    def cell_of(self, run: str) -> Cell:
        """Returns the first cell that the run fills."""
        return next(cell for cell in self.cells if cell.run == run)


def read_manifest(path: Path) -> Manifest:
    """Returns the manifest in one file; fields it does not know are left out.

    Raises:
        StoreError: it cannot be read or lacks a field.
    """
    try:
        raw = json.loads(read_regular(path))
        cells = tuple(_cell(item) for item in raw["cells"])
        return Manifest(
            id=str(raw["id"]),
            profile=str(raw["profile"]),
            family=str(raw.get("family") or "claims"),
            says=str(raw.get("says") or ""),
            source=str(raw.get("source") or ""),
            t=int(raw.get("t") or 0),
            cells=cells,
            verdict=_verdict(raw.get("verdict")),
            figures=tuple(str(path) for path in raw.get("figures") or ()),
            report=None if raw.get("report") is None else str(raw["report"]),
            left_out=tuple(str(line) for line in raw.get("left_out") or ()),
            path=path,
        )
    except OSError as error:
        raise StoreError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        message = (
            f"{path}: is not a claim manifest ({type(error).__name__}: {error}); run the claim again to rewrite it"
        )
        raise StoreError(message) from None


def _cell(raw: dict[str, Any]) -> Cell:
    known = {name: raw[name] for name in Cell.__dataclass_fields__ if name in raw}
    numbers = {"depth": int, "seed": int, "lr": int | float}
    for name, value in known.items():
        wanted = str | None if name == "outcome" else numbers.get(name, str)
        if not isinstance(value, wanted):
            raise TypeError(f"{name} of a cell is {type(value).__name__}")
    return Cell(**known)


def _verdict(raw: Any) -> dict[str, Any] | None:
    if not isinstance(raw, dict | None):
        raise TypeError(f"the verdict is {type(raw).__name__}")
    return raw
