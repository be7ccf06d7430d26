"""Tests on real hosts: `make test-multinode`. They run as root, two files at a time, and nowhere else."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.common import PATIENCE
from tests.cluster.hosts import Cluster
from tests.cluster.needs import must_run, why_not
from tests.cluster.slurm import Slurm

HERE = Path(__file__).parent
LIMIT_S = 150  # of one test, with the start of its hosts


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks the tests of this folder, and leaves them out unless they are asked for by their marker."""
    own = [item for item in items if item.path.is_relative_to(HERE)]
    for item in own:
        item.add_marker(pytest.mark.multinode)
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(LIMIT_S * PATIENCE))
    if own and "multinode" not in (config.getoption("-m") or ""):
        config.hook.pytest_deselected(items=own)
        items[:] = [item for item in items if item not in set(own)]


@pytest.fixture(autouse=True, scope="session")
def _hosts_can_be_made() -> None:
    """Skips where no host can be made; under CI as root that is a failure, for there it must be possible."""
    if reason := why_not():
        if must_run():
            pytest.fail(f"{reason} (CI=true and root: these tests must run)")
        pytest.skip(reason)


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """Two hosts of this test's own; if it fails, what they logged is said."""
    with Cluster(2) as made:
        yield made
        failed = getattr(request.node, "failed", False)
        if failed:
            for path in [*sorted(made.log.glob("slurm*.log")), *sorted(made.shared.glob("logs/*.out"))]:
                print(f"--- {path.name}\n{path.read_text()[-3000:]}")


@pytest.fixture
def slurm(cluster: Cluster) -> Slurm:
    """Slurm on the two hosts."""
    made = Slurm(cluster)
    made.up()
    return made


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Lets fixtures see whether their test has failed."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if report.when == "call":
        item.failed = report.failed  # type: ignore[attr-defined]
