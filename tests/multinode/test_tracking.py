"""One tracking server for all hosts: a job on another is followed live, and one without a route to it catches up."""

import re
import signal
import sqlite3
from contextlib import closing
from pathlib import Path

from normscale.tracking.mlflow_layout import KEY_CHARS, points
from normscale.tracking.reader import read_run
from tests.cluster.common import wait_until
from tests.cluster.handle import Host, Started
from tests.cluster.hosts import Cluster
from tests.multinode.jobs import folder_of, make, wait_for_step, words
from tests.tracking.writers import ROWS

PORT = 5000
URI = f"http://node0:{PORT}"
ASK = "import sys, urllib.request as r; print(r.urlopen(r.Request(sys.argv[1], headers={'Host': sys.argv[2]})).status)"


def rows(store: Path, run: str) -> list[tuple[str, int]]:
    """Returns the key and the step of each point that the store has of a run."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
        return sorted((key, step) for name, key, step in database.execute(ROWS) if name == run)


def status(store: Path, run: str) -> str:
    """Returns what the store says of a run: RUNNING, KILLED, ..."""
    asked = "select status from runs join tags using (run_uuid) where tags.key = 'normscale.run' and tags.value = ?"
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as database:
        return str(database.execute(asked, (run,)).fetchone()[0])


def recorded(folder: Path) -> list[tuple[str, int]]:
    """Returns what `rows` should be, from the records."""
    return sorted((point.key, point.step) for point in points(read_run(folder), KEY_CHARS))


def answer(host: Host, name: str) -> str:
    """Returns what the server answers to a host that calls it by a name."""
    done = host.run("python3", "-c", ASK, f"{URI}/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default", name)
    return done.out.strip() or done.err.strip().splitlines()[-1]


def make_sync(host: Host, asked: list[str]) -> Started:
    """Starts what the message of a run whose records are not all there says, on a host."""
    return host.start("make", "-o", ".venv/installed", *asked, env={"OMP_NUM_THREADS": "1"})


def test_one_server_for_all_hosts(cluster: Cluster) -> None:
    node0, node1 = cluster.hosts
    store, alone, live = (cluster.shared / name for name in ("server.db", "alone", "live"))
    of_server = ("-o", ".venv/installed", "server", f"PORT={PORT}", f"ARGS=--host 0.0.0.0 --store sqlite:///{store}")
    server = node0.start("make", *of_server)

    # A host without a route to it trains as if there were none, and says what brings the rest.
    node1.unplug()
    lonely = make(node1, "train", words(alone, steps=60, uri=URI)).wait(90)
    assert lonely.code == 0, lonely.err
    mend = re.search(r'make (sync) (ARGS=)"(.*)"', lonely.err)
    assert mend, lonely.err
    spooled = folder_of(alone)

    assert wait_until(lambda: "Ctrl-C" in server.out, 60), server.out + server.err
    assert f"tracking.uri={URI}\n" in server.out
    node1.plug()
    assert answer(node1, f"node0:{PORT}") == answer(node1, f"{node0.address}:{PORT}") == "200"
    assert "403" in answer(node1, f"elsewhere.example:{PORT}")  # a page of another site that has its name point here

    # A job whose rank 0 is on the other host is followed while it runs, and stopped.
    hostfile = cluster.shared / "hostfile"
    hostfile.write_text("node1 slots=1\nnode0 slots=1\n")
    job = make(node1, "launch-ssh", words(live, steps=1_000_000, uri=URI), f"HOSTFILE={hostfile}")
    catching_up = [mend[1], f"{mend[2]}{mend[3]}"]
    caught_up = make_sync(node1, catching_up).wait(90)
    assert caught_up.code == 0, caught_up.err
    assert rows(store, spooled.name) == recorded(spooled)
    assert status(store, spooled.name) == "FINISHED"

    wait_for_step(live, 20, [job])
    followed = folder_of(live)
    assert wait_until(lambda: rows(store, followed.name), 60)
    assert job.running()
    assert status(store, followed.name) == "RUNNING"
    job.signal(signal.SIGTERM)
    assert "Error 143" in job.wait(60).err
    assert read_run(followed).start["hosts"] == ["node1", "node0"]

    # The end of a stopped job may leave no time to send the last of it; what was sent already is not sent again.
    last = make_sync(node0, ["sync", f"ARGS=--uri {URI} --runs {live}"]).wait(90)
    assert last.code == 0, last.err
    assert rows(store, followed.name) == recorded(followed)
    assert status(store, followed.name) == "KILLED"
    (report,) = (cluster.shared / "mlartifacts").rglob("step-*-preempted/report.md")
    assert "SIGTERM ended it after step" in report.read_text()
    server.signal(signal.SIGTERM)
    server.wait(30)
    assert cluster.wait_until_idle(10) == {}
