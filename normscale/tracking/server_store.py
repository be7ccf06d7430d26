"""What a tracking server stores in, tried before it is started: a mistake is one line instead of a traceback."""

import importlib.util
import os
import sqlite3
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from normscale.errors import StoreError
from normscale.tracking.address import SERVERS, database, resolve, without_password
from normscale.tracking.mlflow_store import ARTIFACTS, check_place, one_line

VARIABLE = "MLFLOW_BACKEND_STORE_URI"  # mlflow's own; an address with a password may stand there
_DRIVERS = {"postgresql": "psycopg2", "mysql": "mysqldb", "mssql": "pyodbc"}  # those that mlflow is made for
_MODULES = {"mysqldb": "MySQLdb"}
_EXTRA = {"psycopg2": "pip install 'normscale[postgres]' (in the checkout: .venv/bin/pip install -e '.[postgres]')"}
_CONNECT_S = 5
_MENDS = {
    "password authentication failed": "set PGPASSWORD in the environment or keep the password in ~/.pgpass",
    "no password supplied": "set PGPASSWORD in the environment or keep the password in ~/.pgpass",
    "does not exist": "create it (createdb, createuser) or correct the address",
    "permission denied": "let that user create tables there, or name another",
}


def named(given: str | None, default: str, environment: Mapping[str, str]) -> str:
    """Returns the address of the store that was asked for.

    It stands on the command line, or with its password in MLflow's own variable, or is the default.

    Raises:
        StoreError: it is no database's address, or shows a password on the command line.
    """
    if given is None and (kept := environment.get(VARIABLE)):
        uri = resolve(kept, secret=True)
    else:
        uri = resolve(given or default)
    if uri.startswith(SERVERS):
        raise StoreError(f"tracking.uri: {uri} is a server already; open it in a browser")
    return uri


def check(uri: str) -> None:
    """Checks that a server could store where a resolved URI says; leaves nothing behind.

    Raises:
        StoreError: it cannot, with the reason and the mend.
    """
    path = database(uri)
    if path is not None:
        check_place(uri)
        tables = _sqlite_tables(path) if path.exists() else set()
    else:
        _check_driver(uri)
        tables = _tables(uri)
    if tables and "alembic_version" not in tables:
        shown = without_password(uri)
        raise StoreError(
            f"tracking.uri: {shown} holds other tables than MLflow's; name an empty database, or a new one"
        )


def _sqlite_tables(path: Path) -> set[str]:
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=5)) as connection:
            return {name for (name,) in connection.execute("select name from sqlite_master where type = 'table'")}
    except sqlite3.Error as error:
        raise StoreError(f"tracking.uri: {path} cannot be read ({error}); name another database") from None


def _check_driver(uri: str) -> None:
    driver = urlsplit(with_driver(uri)).scheme.partition("+")[2]
    module = _MODULES.get(driver, driver)
    if importlib.util.find_spec(module) is None:
        mend = _EXTRA.get(module, f"install it: pip install {module}")
        raise StoreError(f"tracking.uri: {without_password(uri)} needs {module}, which is not installed; {mend}")


def with_driver(uri: str) -> str:
    """Returns an address that names its driver, as sqlalchemy's own choice changes (psycopg from 2.1 on)."""
    scheme, separator, rest = uri.partition("://")
    return f"{scheme}+{_DRIVERS[scheme]}{separator}{rest}" if scheme in _DRIVERS else uri


def _tables(uri: str) -> set[str]:
    """Returns the tables of a database that another process serves."""
    import sqlalchemy
    from sqlalchemy.exc import SQLAlchemyError

    limit = {"connect_timeout": _CONNECT_S} if uri.startswith("postgresql") else {}
    try:
        engine = sqlalchemy.create_engine(with_driver(uri), connect_args=limit, poolclass=sqlalchemy.NullPool)
        with engine.connect() as connection:
            return set(sqlalchemy.inspect(connection).get_table_names())
    except SQLAlchemyError as error:
        cause = getattr(error, "orig", None) or error
        said = one_line(cause).removeprefix(f"{type(cause).__name__}: ").partition("connection to server ")
        reason = (said[2] or said[0]).partition(" Is the server running")[0]
        mend = "start the database, or correct the address"
        mend = next((mend for sign, mend in _MENDS.items() if sign in reason), mend)
        raise StoreError(f"tracking.uri: {without_password(uri)} cannot be opened ({reason}); {mend}") from None


def artifacts_folder(uri: str, given: Path | None) -> Path:
    """Returns the folder that takes the files, made if need be: beside an SQLite database, else where we stand.

    Raises:
        StoreError: it cannot be written.
    """
    path = database(uri)
    folder = (given or (path.parent if path else Path()) / ARTIFACTS).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(13, "Permission denied")
    except OSError as error:
        raise StoreError(f"--artifacts: cannot write {folder} ({error.strerror}); name another folder") from None
    return folder
