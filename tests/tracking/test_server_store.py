import importlib.util
import os
import sqlite3

import pytest

from normscale.errors import StoreError
from normscale.tracking.server_store import artifacts_folder, check, named, with_driver
from tests.tracking.serving import free_port


def test_the_store_is_that_of_the_option_then_of_mlflows_variable_then_the_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = {"MLFLOW_BACKEND_STORE_URI": "postgresql://u:secret@h/db"}
    assert named("sqlite:///a.db", "sqlite:///b.db", kept) == f"sqlite:///{tmp_path}/a.db"
    assert named(None, "sqlite:///b.db", kept) == "postgresql://u:secret@h/db"
    assert named(None, "sqlite:///b.db", {}) == f"sqlite:///{tmp_path}/b.db"
    with pytest.raises(StoreError, match="is a server already"):
        named("http://h:5000", "sqlite:///b.db", {})
    with pytest.raises(StoreError, match="PGPASSWORD") as caught:
        named("postgresql://u:secret@h/db", "sqlite:///b.db", {})
    assert "secret@" not in str(caught.value)


def test_a_database_that_is_not_mlflows_is_left_alone(tmp_path, new_store):
    check(new_store())
    check(f"sqlite:///{tmp_path}/new.db")
    with sqlite3.connect(tmp_path / "other.db") as database:
        database.execute("create table books (title text)")
    with pytest.raises(StoreError, match=r"other\.db holds other tables than MLflow's; name an empty"):
        check(f"sqlite:///{tmp_path}/other.db")
    (tmp_path / "broken.db").write_bytes(b"SQLite format 3\0" + bytes(5000))
    for place in ("broken.db", "other.db/x.db", ""):
        with pytest.raises(StoreError) as caught:
            check(f"sqlite:///{tmp_path}/{place}")
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "new.db").exists()


def test_the_driver_is_the_one_that_mlflow_is_made_for():
    assert with_driver("postgresql://u@h/db") == "postgresql+psycopg2://u@h/db"
    assert with_driver("mysql+pymysql://h/db") == "mysql+pymysql://h/db"
    assert with_driver("sqlite:////a.db") == "sqlite:////a.db"


def test_a_driver_that_is_missing_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(StoreError, match=r"psycopg2, which is not installed; pip install 'normscale\[postgres\]'"):
        check("postgresql://u@h/db")
    with pytest.raises(StoreError, match="needs pymysql, which is not installed; install it: pip install pymysql"):
        check("mysql+pymysql://u:secret@h/db")


def test_a_database_that_does_not_answer_is_one_line_without_the_password():
    pytest.importorskip("psycopg2", reason="needs psycopg2 (pip install 'normscale[postgres]')")
    with pytest.raises(StoreError) as caught:
        check(f"postgresql://me:secret@127.0.0.1:{free_port()}/db")
    said = str(caught.value)
    assert "postgresql://me:***@127.0.0.1" in said
    assert "Connection refused" in said
    assert said.endswith("; start the database, or correct the address")
    assert "secret" not in said
    assert "\n" not in said


def test_files_go_beside_an_sqlite_store_or_where_one_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert artifacts_folder(f"sqlite:///{tmp_path}/a/x.db", None) == tmp_path / "a" / "mlartifacts"
    assert artifacts_folder("postgresql://h/db", None) == tmp_path / "mlartifacts"
    assert artifacts_folder("postgresql://h/db", tmp_path / "files").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"--artifacts: cannot write .*file/x .*; name another folder"):
        artifacts_folder("postgresql://h/db", tmp_path / "file" / "x")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreError, match="Permission denied"):
        artifacts_folder("postgresql://h/db", tmp_path / "files")
