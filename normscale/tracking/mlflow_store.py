"""The MLflow store behind a tracking URI: found, created once, asked whether it lives. The only importer of mlflow."""

import logging
import os
import re
import tempfile
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from normscale.errors import StoreError
from normscale.tracking.address import SERVERS, database, resolve, sync_words
from normscale.tracking.files import locked
from normscale.tracking.server_names import is_own

if TYPE_CHECKING:
    from mlflow import MlflowClient

ARTIFACTS = "mlartifacts"  # the folder beside an SQLite database that takes its artifacts
QUIET = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true"}
# Every request is retried by the sink, which first asks whether it was done: mlflow's own retries would do it twice.
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "15"}
_CHOOSE = "choose another with tracking.uri=sqlite:///<file>"
_TURNED_AWAY = re.compile(r"error code (401|403)\b")
_CONNECT_S = 2.0
_CREATE_S = 120.0  # the first creation of a database takes 2 s, on a loaded machine far more


@dataclass(frozen=True)
class Bounds:
    """What one request to the installed mlflow may hold."""

    metrics: int
    params_tags: int
    tag_chars: int
    param_chars: int
    experiment_tag_chars: int
    digest_chars: int
    key_chars: int
    request_bytes: int


def check_place(uri: str) -> None:
    """Checks that an SQLite store could be made or opened where its URI says; leaves nothing behind.

    Raises:
        StoreError: it is no store's address, or the place cannot be written.
    """
    path = database(resolve(uri))
    if path is None:
        return
    made: list[Path] = []
    try:
        for folder in reversed(path.parents):
            if not folder.exists():
                folder.mkdir()
                made.append(folder)
        if path.exists():
            _check_database(path)
        with tempfile.TemporaryFile(dir=path.parent):  # SQLite writes its journal beside the database
            pass
    except OSError as error:
        raise StoreError(f"tracking.uri: cannot write {path} ({_reason(error)}); {_CHOOSE}") from None
    finally:
        for folder in reversed(made):
            with suppress(OSError):  # something else was put there meanwhile
                folder.rmdir()


def _check_database(path: Path) -> None:
    if not path.is_file():
        raise StoreError(f"tracking.uri: {path} is not a file; {_CHOOSE}")
    with path.open("r+b") as file:
        head = file.read(16)
    if head and head != b"SQLite format 3\x00":
        raise StoreError(f"tracking.uri: {path} is not an SQLite database; {_CHOOSE}")


def unreachable(uri: str) -> str | None:
    """Returns why a tracking server cannot be reached, in one line; None when it answers or the store is a file."""
    if urlsplit(uri).scheme not in ("http", "https"):
        return None
    try:
        with urllib.request.urlopen(f"{uri}/health", timeout=_CONNECT_S):
            return None
    except urllib.error.HTTPError:  # whoever answers is there
        return None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        mend = f"nothing is lost, `{sync_words(uri)}` replays the records"
        return f"tracking server {uri} does not answer ({reason}); {mend}"


def refused(uri: str, error: BaseException) -> str | None:
    """Returns why a server turns every request away, in one line with the mend; None for any other error."""
    text = str(error)
    if "Invalid Host header" in text:
        host = urlsplit(uri).hostname
        return (
            f"tracking server {uri} does not know itself as {host}; start it with normscale server --name {host}"
            f" (mlflow server: --allowed-hosts), then `{sync_words(uri)}`"
        )
    if (found := _TURNED_AWAY.search(text)) is None:
        return None
    mend = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) in the environment"
    return f"tracking server {uri} wants another password ({found[1]}); {mend}, then `{sync_words(uri)}`"


def connect(uri: str) -> "MlflowClient":
    """Returns a client of a store, with telemetry off and mlflow's own patience cut to seconds."""
    for key, value in (QUIET | _PATIENCE).items():
        os.environ.setdefault(key, value)
    import mlflow

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    return mlflow.MlflowClient(uri)


def ensure_store(uri: str) -> "MlflowClient":
    """Returns a client of the store, creating an SQLite database once however many processes ask at once.

    Raises:
        StoreError: the place cannot be written, or holds something else than an MLflow database.
    """
    uri = resolve(uri)
    path = database(uri)
    if path is None:
        return connect(uri)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(path.name + ".lock"), _CREATE_S):
            if path.exists():
                _check_database(path)
            client = connect(uri)
            client.get_experiment_by_name("Default")  # opens the database: creates its tables, checks its version
            return client
    except (OSError, TimeoutError) as error:
        raise StoreError(f"tracking.uri: cannot write {path} ({_reason(error)}); {_CHOOSE}") from None
    except StoreError:
        raise
    except Exception as error:  # whatever sqlalchemy or mlflow raise for a database they cannot use
        if "database is locked" in str(error):
            mend = f"`{sync_words(uri)}` tries again"
            raise StoreError(f"tracking.uri: {path} is held by another process; {mend}") from None
        raise StoreError(f"tracking.uri: {path} is not usable ({one_line(error)}); {_CHOOSE}") from None


def bounds() -> Bounds:
    """Returns the limits of the installed mlflow."""
    from mlflow.utils import validation as v

    return Bounds(
        metrics=min(v.MAX_METRICS_PER_BATCH, v.MAX_ENTITIES_PER_BATCH),
        params_tags=v.MAX_PARAMS_TAGS_PER_BATCH,
        tag_chars=v.MAX_TAG_VAL_LENGTH,
        param_chars=v.MAX_PARAM_VAL_LENGTH,
        experiment_tag_chars=v.MAX_EXPERIMENT_TAG_VAL_LENGTH,
        digest_chars=v.MAX_DATASET_DIGEST_SIZE,
        key_chars=v.MAX_ENTITY_KEY_LENGTH,
        request_bytes=v.MAX_BATCH_LOG_REQUEST_SIZE,
    )


def experiment(client: "MlflowClient", uri: str, name: str) -> str:
    """Returns the id of an experiment, created where it is missing and restored where it was deleted.

    Raises:
        StoreError: this machine cannot write where the experiment keeps its files.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        path = database(uri)
        if path is None and not uri.startswith(SERVERS):
            _refuse_files(uri, name, "a folder on whatever machine is first")
        place = (path.parent / ARTIFACTS / name).as_uri() if path else None
        tags = {"mlflow.experimentKind": "custom_model_development"}
        try:
            return str(client.create_experiment(name, artifact_location=place, tags=tags))
        except MlflowException:  # another sink was quicker
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    _check_files(uri, name, str(found.artifact_location))
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
    return str(found.experiment_id)


def _check_files(uri: str, name: str, place: str) -> None:
    """Raises StoreError where the files of a found experiment would go to a disk that its readers do not see."""
    if uri.startswith(SERVERS):
        if place.startswith(("file:", "/")) and not (is_own(str(urlsplit(uri).hostname)) or _is_shared(place)):
            mend = "serve a store of its own there, as in: normscale server --store sqlite:///server.db"
            raise StoreError(
                f"tracking server {uri}: {name} keeps its files in a folder of that machine ({place}); {mend}"
            )
    elif place.startswith("mlflow-artifacts:"):
        _refuse_files(uri, name, "its tracking server")


def _is_shared(place: str) -> bool:
    """Returns whether a folder of files is on this machine, too, as it is where machines share a file system."""
    return Path(urllib.request.url2pathname(urlsplit(place).path)).parent.is_dir()


def _refuse_files(uri: str, name: str, where: str) -> None:
    mend = "give the address of its server (normscale server --store prints it)"
    raise StoreError(f"tracking.uri: {uri}: {name} would keep its files with {where}; {mend}")


def one_line(error: BaseException) -> str:
    """Returns an error as one short line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def too_slow(error: BaseException) -> bool:
    """Returns whether a request failed because no answer came in time."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, TimeoutError) or type(seen).__name__ in ("ReadTimeout", "ConnectTimeout", "Timeout"):
            return True
        seen = seen.__cause__ or seen.__context__
    return "timed out" in str(error).lower()


def _reason(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)
