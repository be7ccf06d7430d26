"""What the sink remembers between syncs. A saving of time only: without these files a sync finds out by asking."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normscale.tracking.files import write_whole

RUN_FILE = "sink.json"  # in a run's folder
CLAIMS_FILE = ".sink.json"  # in the folder of all runs


def load(path: Path, uri: str) -> dict[str, Any]:
    """Returns what is remembered for a store; empty where nothing is, or where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get(uri)
    except (OSError, ValueError, AttributeError):
        return {}
    return found if isinstance(found, dict) else {}


def save(path: Path, uri: str, remembered: Mapping[str, Any]) -> None:
    """Remembers; a folder that cannot be written is not a reason to stop."""
    try:
        everything = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        everything = {}
    if not isinstance(everything, dict):
        everything = {}
    if everything.get(uri) == remembered:
        return
    everything[uri] = dict(remembered)
    try:
        write_whole(path, json.dumps(everything, indent=1))
    except OSError:
        return
