"""What goes wrong with hosts and processes, one fault after another in the life of one run.

Each test goes on with the run where the one before left it, does the run one harm, and looks at how it ends: within a
time limit, with a code that is not 0, nothing left on any host, no checkpoint lost. The last but one lets it come to
its end, with the losses of a run that nothing happened to; the last one finds all of it in the records and in MLflow.

What is refused before a run begins (a host that is off, other code, a port that is taken, another number of ranks) is
no event of any run: nobody writes the records then, and the run they are of may be at work elsewhere. Its line and its
exit code are what there is of it, and the records stay as they were.
"""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from normscale.tracking.mlflow_artifacts import event_folders
from normscale.tracking.mlflow_sink import sync
from normscale.tracking.reader import RunRecord, read_run
from normscale.tracking.spool import SPOOL
from tests.cluster.common import ROOT, wait_until
from tests.cluster.handle import Done, Started
from tests.cluster.hosts import Cluster
from tests.multinode.jobs import (
    checkpoints,
    ended_well,
    events,
    folder_of,
    hostfile,
    launcher_on,
    make,
    rank_on,
    wait_for_step,
    whole,
    words,
)

EVERY, STEPS = 20, 600
LOST_AFTER_S = 14  # of silence, a host is lost to its launcher, or the launcher to it
OPTIONS = f"OPTIONS=--lost-after {LOST_AFTER_S} --grace 10"
QUICKLY_S = 20.0  # for a failure that somebody is alive to tell of
LATE_S = 45.0  # for one that only silence tells of

HAPPENED = [
    ("rank_lost", "rank 1 (node1) did not answer any more"),  # killed
    ("resumed", "failed after step"),
    ("preempted", "SIGTERM ended it after step"),  # so its agent told it, when the launcher was killed
    ("resumed", "was stopped after step"),
    ("rank_lost", "rank 1 (node1)"),  # unplugged for good; of the 5 s before, TCP has told nobody
    ("resumed", "failed after step"),
    ("rank_lost", "rank 1 (node1)"),  # frozen
    ("resumed", "failed after step"),
    ("rank_lost", "rank 1 (node1)"),  # without power
    ("resumed", "failed after step"),
    ("checkpoint_passed_over", "rank0.safetensors has"),
]
"""The events of the run's life, one attempt after another, with words of each."""


class Life:
    """The run on two hosts."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.runs, self.undisturbed = cluster.shared / "runs", cluster.shared / "undisturbed"
        self.node0, self.node1 = cluster.hosts
        self.hostfile = hostfile(cluster)
        self.args = words(self.runs, "engine.timeout_s=14", steps=STEPS)

    def launch(self, *settings: str, hostfile: Path | None = None) -> Started:
        """Starts it, or goes on with it."""
        return make(self.node0, "launch-ssh", self.args, f"HOSTFILE={hostfile or self.hostfile}", OPTIONS, *settings)

    def go_on(self) -> Started:
        """Goes on with it, and waits until it has made a checkpoint of its own."""
        before = self.steps()
        started = self.launch()
        wait_for_step(self.runs, (before[-1] if before else 0) + EVERY, [started], limit_s=60)
        return started

    def steps(self) -> list[int]:
        """Returns the steps of its complete checkpoints, which must be whole."""
        return whole(self.runs) if self.runs.exists() and checkpoints(self.runs) else []

    def failed(self, started: Started, limit_s: float, *, code: int = 1) -> Done:
        """Returns how a launch ended, which must have been badly, in time, leaving checkpoints and no process."""
        reached = checkpoints(self.runs)[-1]
        done = started.wait(limit_s)
        assert done.code != 0
        assert f"Error {code}\n" in done.err, done.err
        assert "Traceback" not in done.err
        wait_until(lambda: not self.left(), 5)
        assert self.left() == {}
        assert self.steps()[-1] >= reached
        return done

    def refused(self, started: Started, limit_s: float) -> Done:
        """Returns how a launch was refused: as one that failed, by bad input, and without a word in the records."""
        spool = folder_of(self.runs) / SPOOL
        before = spool.read_bytes()
        done = self.failed(started, limit_s, code=2)
        assert spool.read_bytes() == before
        return done

    def left(self) -> dict[str, list[str]]:
        """Returns what is left on the hosts; sshd holds a connection whose cable was pulled for as long as TCP does."""
        found = {name: [line for line in lines if "sshd: " not in line] for name, lines in self.cluster.left().items()}
        return {name: lines for name, lines in found.items() if lines}

    @property
    def record(self) -> RunRecord:
        """Its records."""
        return read_run(folder_of(self.runs))


@pytest.fixture(scope="module")
def life() -> Iterator[Life]:
    """The run, not yet begun."""
    with Cluster(2) as cluster:
        yield Life(cluster)


@pytest.fixture(autouse=True)
def _restored(life: Life) -> Iterator[None]:
    """Has both hosts up, plugged in and idle for the next test, however this one went."""
    yield
    if life.node1.pid and (life.node1.frozen or life.cluster.left()):
        life.node1.power_off()
    if not life.node1.pid:
        life.node1.boot()
    life.node1.plug()
    for process in life.node0.besides(life.node0.processes()):
        os.kill(process.pid, signal.SIGKILL)
    assert life.cluster.wait_until_idle(5) == {}


def test_a_rank_is_killed(life: Life) -> None:
    started = life.go_on()
    os.kill(rank_on(life.node1), signal.SIGKILL)
    done = life.failed(started, QUICKLY_S)
    assert "node1" in done.err
    assert re.search(r"rank 1 .*was killed by SIGKILL", done.err), done.err
    assert events(life.record, "rank_lost")[-1]["ranks"] == [1]
    assert life.record.end is not None
    assert life.record.end["outcome"] == "error"


def test_the_launcher_is_killed(life: Life) -> None:
    started = life.go_on()
    os.kill(launcher_on(life.node0, "ssh"), signal.SIGKILL)
    done = started.wait(QUICKLY_S)
    assert done.code != 0
    assert life.cluster.wait_until_idle(QUICKLY_S) == {}  # the ranks, too, though nobody told their hosts
    assert life.steps()


def test_a_cable_is_pulled_for_five_seconds_then_for_good(life: Life) -> None:
    started = life.go_on()
    life.node1.unplug()
    time.sleep(5.0)
    before = checkpoints(life.runs)[-1]
    life.node1.plug()
    wait_for_step(life.runs, before + 2 * EVERY, [started], limit_s=20)
    life.node1.unplug()
    done = life.failed(started, LATE_S)
    assert "node1" in done.err
    assert events(life.record, "rank_lost")[-1]["ranks"] == [1]


def test_a_host_freezes(life: Life) -> None:
    started = life.go_on()
    reached = checkpoints(life.runs)[-1]
    life.node1.freeze()
    args = words(life.undisturbed, "engine.timeout_s=14", steps=STEPS)
    calm = make(life.node0, "launch", args, "NPROC=2")  # while there is nothing to do but wait
    done = started.wait(LATE_S)
    assert "Error 1\n" in done.err
    assert "node1" in done.err
    assert calm.wait(90).code == 0, calm.err
    assert "node0" not in life.cluster.left()
    life.node1.thaw()
    assert life.cluster.wait_until_idle(QUICKLY_S) == {}
    assert life.steps()[-1] >= reached
    assert events(life.record, "rank_lost")[-1]["ranks"] == [1]


def test_a_host_loses_its_power(life: Life) -> None:
    started = life.go_on()
    life.node1.power_off()
    done = life.failed(started, LATE_S)
    assert "node1" in done.err
    assert events(life.record, "rank_lost")[-1]["ranks"] == [1]

    done = life.refused(life.launch(), QUICKLY_S)  # it is still off: said at once, not by a time limit of the ranks
    assert "node1" in done.err


@pytest.fixture
def other_code(life: Life) -> Iterator[None]:
    """Lets the second host have another version of one file."""
    other, source = life.cluster.shared / "other.py", ROOT / "normscale" / "errors.py"
    other.write_text(source.read_text() + "\n")
    life.node1.put_over(other, source)
    yield
    life.node1.must("umount", source)


@pytest.mark.usefixtures("other_code")
def test_a_host_has_other_code(life: Life) -> None:
    spool = (folder_of(life.runs) / SPOOL).read_bytes()
    done = life.refused(life.launch(), QUICKLY_S)
    assert "node1" in done.err
    assert "its copy of normscale is another" in done.err

    # Hosts that were started one by one find out when they meet.
    settings = ("RDZV=node0:29512", "NNODES=2")
    both = [make(host, "launch-torchrun", life.args, *settings) for host in life.cluster]
    ends = [started.wait(60) for started in both]
    assert ["Error 2\n" in end.err for end in ends] == [True, True], [end.err for end in ends]
    assert ends[0].err.count("has other code") == 1
    assert "node1" in ends[0].err
    assert life.cluster.wait_until_idle(5) == {}
    assert (folder_of(life.runs) / SPOOL).read_bytes() == spool


def test_a_port_is_taken(life: Life) -> None:
    listening = life.node0.start("python3", "-c", "import socket; s = socket.create_server(('', 29533)); s.accept()")
    assert wait_until(lambda: ":735D " in Path(f"/proc/{life.node0.pid}/net/tcp").read_text(), 5)
    spool = (folder_of(life.runs) / SPOOL).read_bytes()
    done = life.launch("PORT=29533").wait(QUICKLY_S)
    assert "Error 2\n" in done.err
    assert "29533" in done.err
    assert "Traceback" not in done.err
    assert (folder_of(life.runs) / SPOOL).read_bytes() == spool
    assert listening.running()
    listening.process.kill()


def test_another_number_of_ranks_is_refused(life: Life) -> None:
    alone = life.cluster.shared / "alone"
    alone.write_text("node0 slots=1\n")
    done = life.refused(life.launch(hostfile=alone), 60)
    assert "2 ranks" in done.err
    assert "1 rank;" in done.err or "1 rank " in done.err


def test_a_half_written_checkpoint_is_passed_over_and_the_run_ends_as_if_nothing_had_been(life: Life) -> None:
    before, newest = life.steps()[-2:]
    spoilt = folder_of(life.runs) / "checkpoints" / f"step-{newest:08d}" / "rank0.safetensors"
    os.truncate(spoilt, spoilt.stat().st_size // 2)
    done = life.launch().wait(90)
    assert done.code == 0, done.err
    assert f"step-{newest:08d}: passed over: rank0.safetensors has" in done.err
    assert f"went on from step {before} " in done.out
    well = ended_well(life.runs, ["node0", "node1"], steps=STEPS)
    assert [event["path"] for event in events(well.record, "checkpoint_passed_over")] == [str(spoilt.parent)]

    undisturbed = ended_well(life.undisturbed, ["node0"] * 2, steps=STEPS)
    assert (well.weights, well.last) == (undisturbed.weights, undisturbed.last)
    assert well.losses == undisturbed.losses
    assert life.cluster.wait_until_idle(5) == {}


def test_what_happened_stands_in_mlflow(life: Life) -> None:
    told = [(event["event"], event.get("says") or event["reason"]) for event in life.record.events]
    assert [event for event, _ in told] == [event for event, _ in HAPPENED], told
    assert [words for (_, said), (_, words) in zip(told, HAPPENED, strict=True) if words not in said] == []

    uri = f"sqlite:///{life.cluster.shared}/mlflow.db"
    assert sync(life.runs, uri).ok
    import mlflow

    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    reports = {file.path for file in client.list_artifacts(run.info.run_id, "events")}
    assert reports == set(event_folders(life.record).values())
    assert len(reports) == len(HAPPENED)
    page = run.data.tags["mlflow.note.content"]
    assert [words for _, words in HAPPENED if words not in page] == []
    assert run.data.tags["outcome"] in ("trained", "plateau")
