"""What a launcher planned, as every rank finds it in its environment: how many ranks, where, and of which code."""

import functools
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from normscale.errors import ConfigError, LaunchError

VARIABLE = "NORMSCALE_PLAN"
SINCE = "NORMSCALE_FRESH_SINCE"  # when a launch with --fresh was made, in ms since 1970: it begins a run anew once
DEVICE = "NORMSCALE_DEVICE"  # "cuda" where ranks are to compute on GPUs or not at all


@dataclass(frozen=True)
class Planned:
    """The launch as it was planned; what is None was left open (the hosts of a batch job, say)."""

    world: int | None
    hosts: tuple[str, ...] | None
    config: str
    code: str

    def text(self) -> str:
        """Returns it as compact JSON, the value of NORMSCALE_PLAN."""
        return json.dumps(asdict(self), separators=(",", ":"))


def planned_in(environ: Mapping[str, str]) -> Planned | None:
    """Returns what the launcher left in the environment, or None where it left nothing.

    Raises:
        LaunchError: the variable holds something else.
    """
    text = environ.get(VARIABLE, "")
    if not text:
        return None
    try:
        found = json.loads(text)
        hosts = None if found["hosts"] is None else tuple(str(host) for host in found["hosts"])
        world = None if found["world"] is None else int(found["world"])
        return Planned(world, hosts, str(found["config"]), str(found["code"]))
    except (ValueError, TypeError, KeyError):
        raise LaunchError(f"{VARIABLE} in the environment is not what a launcher writes; unset it") from None


def fresh_since(args: Sequence[str]) -> dict[str, str]:
    """Returns the variable by which a launch that may start its ranks several times begins the run anew once alone."""
    return {SINCE: str(time.time_ns() // 1_000_000)} if "--fresh" in args else {}


def config_hash(words: Sequence[str]) -> str:
    """Returns a hash of what is trained: CONFIG, the key=value words, and the bytes of the file CONFIG.

    Options (`--fresh`) do not count.

    Raises:
        ConfigError: the file cannot be read.
    """
    kept = [word for word in words if not word.startswith("--")]
    digest = hashlib.sha256("\0".join(kept).encode("utf-8", "surrogateescape"))
    if kept:
        try:
            digest.update(b"\0" + Path(kept[0]).read_bytes())
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{kept[0]}: cannot be read: {reason}") from None
    return digest.hexdigest()[:16]


@functools.cache
def code_hash() -> str:
    """Returns a hash of every source file of this package, by its path in it."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
