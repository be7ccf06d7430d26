from pathlib import Path

import pytest

from normscale.errors import StoreError
from normscale.tracking.address import resolve, sync_words, without_password


def test_a_relative_path_is_meant_from_the_current_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert resolve(f"sqlite:///{tmp_path}/x.db") == f"sqlite:///{tmp_path}/x.db"
    assert resolve("http://127.0.0.1:5000/") == "http://127.0.0.1:5000"


NO_STORES = ["", "mlruns", "sqlite://", "sqlite:///", "sqlite:x.db", "file:///tmp/x", "http://", "foo://bar", "foo:bar"]
NO_STORES += ["http:x", "http://h:port", "http://[", "sqlite:///a\0b", "databricks://x", "mysql:x", "postgresql://"]


@pytest.mark.parametrize("uri", NO_STORES)
def test_what_is_no_store_says_what_would_be(uri):
    with pytest.raises(StoreError, match=r"tracking\.uri: .*sqlite:///<file>") as caught:
        resolve(uri)
    assert "\n" not in str(caught.value)


def test_databases_that_mlflow_knows_pass():
    for uri in (
        "postgresql://u@h/db",
        "postgresql:///db?host=/run/postgresql",
        "mysql+pymysql://h:3306/db",
        "https://h/mlflow",
    ):
        assert resolve(uri) == uri


SECRETS = {
    "http://me:hidden@h:5000": "http://***@h:5000",
    "https://hidden@h": "https://***@h",  # a token
    "postgresql://me:hidden@h/db": "postgresql://me:***@h/db",
    "postgresql://h/db?sslmode=require&password=hidden": "postgresql://h/db?sslmode=require&password=***",
    "postgresql://me:hid/den@h/db": "postgresql://***",
    "postgresql://me:hid?den@h/db": "postgresql://***",
    "postgresql:///db?host=/run&password=hidden": "postgresql:///db?host=/run&password=***",
}


@pytest.mark.parametrize("uri", SECRETS)
def test_an_address_that_holds_a_secret_is_refused_and_shown_without_it(uri):
    with pytest.raises(StoreError) as caught:
        resolve(uri)
    said = str(caught.value)
    assert repr(SECRETS[uri]) in said
    assert "hidden" not in said
    assert "hid/" not in said
    assert "hid?" not in said
    if "***@" in said:
        assert ("MLFLOW_TRACKING_PASSWORD" if uri.startswith("http") else "PGPASSWORD") in said
    assert without_password(SECRETS[uri]) == SECRETS[uri]
    if uri.startswith("postgresql") and "hidden" in uri:
        assert resolve(uri, secret=True) == uri


def test_the_command_that_syncs_names_the_store(monkeypatch):
    monkeypatch.chdir("/")
    assert sync_words("sqlite:///mlflow.db") == sync_words("sqlite:////mlflow.db") == "normscale sync"
    assert sync_words("sqlite:///a b.db") == "normscale sync --uri 'sqlite:///a b.db'"
    assert sync_words("http://h:5000") == "normscale sync --uri http://h:5000"
    assert sync_words("http://h:5000", Path("runs")) == "normscale sync --uri http://h:5000"
    assert sync_words("sqlite:///mlflow.db", Path("/a b")) == "normscale sync --runs '/a b'"
