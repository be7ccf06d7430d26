"""Data sets of the Hugging Face hub: from the local cache where they are in it, from the network where they are not.

The cache comes first, so that workers of one machine read the same rows, and a start without network waits for none.
The environment is read when a corpus is loaded: `datasets` reads it once, when it is imported.
"""

import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import datasets
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.cache.cache import Cache

from normscale.config.schema import DataConfig
from normscale.data.rows import Row, Source, document, held_by_position
from normscale.errors import DataError, nearest

# Downloads are counted on a server by default; here only where the user asks for it.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = os.environ.get("HF_UPDATE_DOWNLOAD_COUNTS", "").upper() in {"1", "TRUE"}

OFFLINE_FLAGS = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
PROBE_S = 3.0  # the longest a socket of the probe may be silent
PROBE_TOTAL_S = 6.0  # the longest the probe may take; a name server that does not answer is not bound by the former
NAME = re.compile(r"hub:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[^/:]+))?", re.ASCII)


def read(config: DataConfig) -> Source:
    """Returns the rows of the `train` split of `hub:owner/name[:config]`.

    Raises:
        DataError: the name is malformed, the data is not cached and the hub is off or out of reach, or the hub or the
            data set has no such thing.
    """
    match = NAME.fullmatch(config.source)
    if not match:
        raise DataError(f"data.source: {config.source!r} is not a name on the hub; write hub:owner/name[:config]")
    wanted = (config.source, match["repo"], match["config"])
    table = _cached(*wanted)
    if table is None:
        table = _fetched(*wanted)
    names = list(table.column_names)
    if config.field not in names:
        raise DataError(
            f"data.field: {config.field!r} is not in {config.source!r}{nearest(config.field, names)} "
            f"(it has: {', '.join(names)}); set data.field"
        )
    return Source(
        _rows(config, table),
        split=f"by row of the hub's train split: a share of {config.held_out:g}, evenly spread",
        origin={"hub_config": str(table.info.config_name)},
    )


def offline_flag() -> str | None:
    """Returns the name of the environment variable that asks for no network, if one is set now."""
    set_now = (x for x in OFFLINE_FLAGS if os.environ.get(x, "").upper() in {"1", "ON", "YES", "TRUE"})
    return next(set_now, None)


def _cached(source: str, repo: str, config: str | None) -> Any | None:
    """Returns the newest copy in the local cache, or None. Looks at files only."""
    owner, name = repo.split("/")
    root = Path(datasets.config.HF_DATASETS_CACHE).expanduser() / f"{owner}___{camelcase_to_snakecase(name)}"
    copies = [
        x.parent for x in root.glob("*/*/*/dataset_info.json") if not x.parent.name.endswith(".incomplete")
    ]  # <config>/<version>/<hash>
    configs = sorted({x.parts[-3] for x in copies})
    if config is None and len(configs) > 1:
        raise DataError(
            f"data.source: {source!r} is cached in several configurations ({', '.join(configs)}); "
            f"name one, as in hub:{repo}:{configs[0]}"
        )
    copies = [x for x in copies if config in {None, x.parts[-3]}]
    if not copies:
        return None
    newest = max(copies, key=lambda x: (x.stat().st_mtime, x.name))
    try:
        found = Cache(
            repo_id=repo, dataset_name=name, config_name=newest.parts[-3], version=newest.parts[-2], hash=newest.name
        )
        return found.as_dataset(split="train")
    except Exception as e:  # whatever the library makes of damaged files
        raise DataError(
            f"data.source: {source!r} has no train split that can be read in {newest} ({_line(e)}); "
            "remove that folder to download it again, or name another configuration"
        ) from None


def _fetched(source: str, repo: str, config: str | None) -> Any:
    """Returns the data set from the hub, which also puts it into the cache."""
    if flag := offline_flag():
        raise DataError(
            f"data.source: {source!r} is not in the cache {datasets.config.HF_DATASETS_CACHE} and {flag} is set; "
            f"unset {flag} to download it, or use a local file or 'embedded'"
        )
    endpoint = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    if reason := unreachable(endpoint):
        raise DataError(
            f"data.source: {source!r} is not in the cache {datasets.config.HF_DATASETS_CACHE} and {endpoint} cannot be "
            f"reached ({reason}); mend the network or HF_ENDPOINT, or use a local file or 'embedded'"
        )
    try:
        return datasets.load_dataset(repo, config, split="train")
    except Exception as e:  # the library raises a dozen kinds
        raise DataError(
            f"data.source: {source!r} cannot be had from {endpoint} ({_line(e)}); check its name, configuration and "
            "that it is public, or run `hf auth login`"
        ) from None


def unreachable(endpoint: str) -> str | None:
    """Returns why the endpoint does not answer, or None where it does. Any HTTP answer counts; proxies are honoured."""
    outcome: list[str | None] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(endpoint, method="HEAD", headers={"User-Agent": "normscale"})
            urllib.request.urlopen(request, timeout=PROBE_S).close()
            outcome.append(None)
        except urllib.error.HTTPError as e:
            e.close()
            outcome.append(None)
        except (OSError, ValueError, HTTPException) as e:
            outcome.append(_line(e))

    asking = threading.Thread(target=ask, daemon=True)  # a thread: looking up a name has no timeout of its own
    asking.start()
    asking.join(PROBE_TOTAL_S)
    return outcome[0] if outcome else f"no answer within {PROBE_TOTAL_S:g} s"


def _rows(config: DataConfig, table: Any) -> Iterator[Row]:
    index = 0
    for batch in table.select_columns([config.field]).iter(batch_size=1000):
        for text in batch[config.field]:
            place = f"{config.source} row {index}"
            yield Row(place, document(text, place, config.field), held_by_position(index, config.held_out))
            index += 1


def _line(error: Exception) -> str:
    """Returns an error in one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
