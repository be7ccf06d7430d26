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
from normscale.data.parallel import Pair
from normscale.data.rows import Row, Source, document, held_by_position
from normscale.errors import DataError, nearest

# Downloads are counted on a server by default; here only where the user asks for it.
datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = os.environ.get("HF_UPDATE_DOWNLOAD_COUNTS", "").upper() in {"1", "TRUE"}

OFFLINE_FLAGS = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
PROBE_S = 3.0  # the longest a socket of the probe may be silent
PROBE_TOTAL_S = 6.0  # the longest the probe may take; a name server that does not answer is not bound by the former
PAIRED = {
    "iwslt2017": ("IWSLT/iwslt2017", "iwslt2017-{0}-{1}"),
    "wmt17": ("wmt/wmt17", "{other}-en"),
    "opus100": ("Helsinki-NLP/opus-100", "{a}-{b}"),
}  # translation sets by their short names, and what they call the configuration of two languages
CONVERTED = "refs/convert/parquet"  # where the hub keeps what it has made of data sets that are scripts
NAME = re.compile(r"hub:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<config>[^/:]+))?", re.ASCII)


def read(config: DataConfig) -> Source:
    """Returns the rows of the `train` split of `hub:owner/name[:config]`.

    Raises:
        DataError: the name is malformed, the data is not cached and the hub is off or out of reach, or the hub or the
            data set has no such thing.
    """
    table = _table(config.source, "train")
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


def pairs(config: DataConfig, held_out: bool = False) -> Iterator[Pair]:
    """Yields the pairs of a translation set, of its `train` split or of the one that `data.held_out_source` names.

    Raises:
        DataError: as `read`, or the set has no pairs of these languages.
    """
    assert config.languages is not None, "the configuration asks for them"
    key, split = ("data.held_out_source", config.held_out_source or "") if held_out else ("data.source", "train")
    source = resolved(config.source, config.languages)
    table = _table(source, split, key)
    if "translation" not in table.column_names:
        raise DataError(
            f"data.source: {source!r} has no column 'translation' (it has: {', '.join(table.column_names)}), so it is"
            " no set of translations; choose another, or give parallel files"
        )
    number = 0
    for batch in table.select_columns(["translation"]).iter(batch_size=1000):
        for row in batch["translation"]:
            number += 1
            for language in config.languages:
                if not isinstance(row.get(language), str):
                    raise DataError(
                        f"data.languages: {language!r} is not in row {number} of {source!r} (it has:"
                        f" {', '.join(sorted(row))}); name two of these"
                    )
            # A line end within a text would be two lines in a file; here it is a space.
            a, b = (" ".join(row[language].splitlines()).encode() for language in config.languages)
            yield Pair(number, a, b)


def resolved(source: str, languages: tuple[str, str]) -> str:
    """Returns the full name of a translation set that is known by a short one, as hub:wmt17; others as they are.

    Raises:
        DataError: no set is known by that name, or the set has no pairs of these languages.
    """
    short = source.removeprefix("hub:")
    if short not in PAIRED:
        if "/" in short:
            return source
        known = ", ".join(f"hub:{each}" for each in PAIRED)
        raise DataError(
            f"data.source: {source!r} is no translation set that is known by a short name{nearest(short, list(PAIRED))}"
            f" (these are: {known}); write hub:owner/name[:config]"
        )
    repo, name = PAIRED[short]
    either = sorted(languages)
    if name == "{other}-en":
        if "en" not in languages:
            raise DataError(
                f"data.languages: {source!r} pairs English with others, and has nothing of {' and '.join(languages)};"
                " make one of them en"
            )
        either = [next(language for language in languages if language != "en"), "en"]
    return f"hub:{repo}:" + name.format(*languages, a=either[0], b=either[1], other=either[0])


def offline_flag() -> str | None:
    """Returns the name of the environment variable that asks for no network, if one is set now."""
    set_now = (x for x in OFFLINE_FLAGS if os.environ.get(x, "").upper() in {"1", "ON", "YES", "TRUE"})
    return next(set_now, None)


def _table(source: str, split: str, key: str = "data.source") -> Any:
    match = NAME.fullmatch(source)
    if not match:
        raise DataError(f"data.source: {source!r} is not a name on the hub; write hub:owner/name[:config]")
    wanted = (source, match["repo"], match["config"], split, key)
    table = _cached(*wanted)
    return _fetched(*wanted) if table is None else table


def _cached(source: str, repo: str, config: str | None, split: str, key: str) -> Any | None:
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
        return found.as_dataset(split=split)
    except Exception as e:  # whatever the library makes of damaged files, or of a split that there is not
        raise DataError(
            f"{key}: {source!r} has no {split} split that can be read in {newest} ({_line(e)}); "
            "remove that folder to download it again, or name another configuration"
        ) from None


def _fetched(source: str, repo: str, config: str | None, split: str, key: str) -> Any:
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
        return _loaded(repo, config, split)
    except Exception as e:  # the library raises a dozen kinds
        raise DataError(
            f"{key}: {source!r} cannot be had from {endpoint} ({_line(e)}); check its name, configuration and "
            "that it is public, or run `hf auth login`"
        ) from None


def _loaded(repo: str, config: str | None, split: str) -> Any:
    """Returns a data set by the library. Of one that is a script, which the library runs no more, the hub's copy."""
    try:
        return datasets.load_dataset(repo, config, split=split)
    except RuntimeError as e:
        if "scripts are no longer supported" not in str(e):
            raise
        return datasets.load_dataset(repo, config, split=split, revision=CONVERTED)


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
