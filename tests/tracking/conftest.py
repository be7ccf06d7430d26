import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory) -> Path:
    """An MLflow database without runs; creating one takes seconds, copying it does not."""
    from normscale.tracking.mlflow_store import ensure_store

    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    ensure_store(f"sqlite:///{path}")
    return path


@pytest.fixture
def new_store(empty_database, tmp_path) -> Callable[[], str]:
    """Gives URIs of fresh stores under the test's folder."""
    count = 0

    def make() -> str:
        nonlocal count
        count += 1
        folder = tmp_path / f"store {count}"  # a space, as people's folders have
        folder.mkdir()
        shutil.copy(empty_database, folder / "mlflow.db")
        return f"sqlite:///{folder / 'mlflow.db'}"

    return make


@pytest.fixture
def runs(tmp_path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder
