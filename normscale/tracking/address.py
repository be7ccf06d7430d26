"""The address of a tracking store as a person writes it: read, checked, shown without its password."""

import os
import re
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from normscale.arguments import typed
from normscale.errors import StoreError

SQLITE = "sqlite:///"
SERVERS = ("http://", "https://")
DATABASES = ("postgresql", "mysql", "mssql")  # what else mlflow stores in; a driver may follow, mysql+pymysql://
_PASSWORD = re.compile(r"(\w*password=)[^&]*", re.I)


def resolve(uri: str, *, secret: bool = False) -> str:
    """Returns the URI with an SQLite path made absolute from the current folder.

    Args:
        uri: The address as it was written.
        secret: Whether it may hold a password, since it comes from where nobody else reads.

    Raises:
        StoreError: it is no address of a tracking store, or holds a password, which records and `ps` would show.
    """
    mend = "write sqlite:///<file> or http://<host>:<port>"
    if uri.startswith(SQLITE):
        path = uri.removeprefix(SQLITE)
        if not path or "\0" in path:
            raise StoreError(f"tracking.uri: {uri!r} names no file; {mend}")
        return SQLITE + str(Path(os.path.expanduser(path)).absolute())
    try:
        parts = urlsplit(uri)
        host, _ = parts.hostname, parts.port
    except ValueError as error:  # a port that is no number, a bracket that is not closed
        shown = without_password(uri)
        why = f" ({error})" if shown == uri else ""  # of a password with a slash in it, the reason shows a part
        raise StoreError(f"tracking.uri: {shown!r} is not an address{why}; {mend}") from None
    if "://" not in uri or parts.scheme.partition("+")[0] not in ("http", "https", *DATABASES):
        raise StoreError(f"tracking.uri: {without_password(uri)!r} is not the address of a tracking store; {mend}")
    if not host and not (parts.scheme.startswith(DATABASES) and parts.path.strip("/")):  # PostgreSQL by its socket
        raise StoreError(f"tracking.uri: {without_password(uri)!r} names no host; {mend}")
    if not secret:
        _check_no_password(uri, parts)
    return uri.rstrip("/")


def _check_no_password(uri: str, parts: SplitResult) -> None:
    if parts.scheme in ("http", "https"):
        held, mend = "@" in parts.netloc, "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD in the environment"
    else:
        held = parts.password is not None or _PASSWORD.search(parts.query) is not None
        mend = "set PGPASSWORD in the environment or keep it in ~/.pgpass"
    if held:
        why = "holds a secret, and records and ps would show it"
        raise StoreError(f"tracking.uri: {without_password(uri)!r} {why}; leave it out and {mend}")


def without_password(uri: str) -> str:
    """Returns an address as it may be shown."""
    scheme, _, rest = uri.partition("://")
    user, at, _ = rest.rpartition("@")
    hidden = f"{scheme}://***" if at and (":" in user or uri.startswith(SERVERS)) else uri
    try:
        parts = urlsplit(uri)
        _ = parts.port
    except ValueError:
        return hidden
    if at and "@" not in parts.netloc:  # a password with a mark in it that ends the host
        return hidden
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    shown = "***" if at and uri.startswith(SERVERS) else f"{name}{':***' * bool(colon)}"  # it may be a token
    query = "?" * bool(parts.query) + _PASSWORD.sub(r"\1***", parts.query)
    return f"{scheme}://{shown}{at}{host}{parts.path}{query}" if parts.netloc or query else uri


def database(uri: str) -> Path | None:
    """Returns the file of an SQLite store, None for a server."""
    return Path(uri.removeprefix(SQLITE)) if uri.startswith(SQLITE) else None


def sync_words(uri: str, runs: Path | None = None) -> str:
    """Returns the command a person types to bring a store up to date with the runs of a folder."""
    from normscale.config.schema import TrackingConfig

    usual = TrackingConfig()
    there = usual.uri is not None and resolve(uri) == resolve(usual.uri)
    options = [] if there else ["--uri", uri]
    if runs is not None and runs.absolute() != Path(usual.runs).absolute():
        options += ["--runs", str(runs)]
    return typed("sync", *options)
