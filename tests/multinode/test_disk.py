"""Checkpoints where there is no room for them, or no leave: what was there stays, and the run goes on from it later."""

from normscale.tracking.reader import read_run
from tests.cluster.common import wait_until
from tests.cluster.hosts import Cluster
from tests.multinode.jobs import checkpoints, ended_well, events, folder_of, hostfile, make, wait_for_step, whole, words

STEPS = 400
QUICKLY_S = 60.0


def test_a_shared_disk_fills_up_and_is_read_only_then(cluster: Cluster) -> None:
    node0, seen = cluster["node0"], cluster.seen(cluster.disk / "runs")
    args = words(cluster.disk / "runs", "checkpoint.keep=3", steps=STEPS)
    hosts = f"HOSTFILE={hostfile(cluster)}"
    cluster.remount("size=8m")
    started = make(node0, "launch-ssh", args, hosts)
    wait_for_step(seen, 60, [started])
    filler = cluster.disk / "filler"
    assert "No space left" in node0.run("dd", "if=/dev/zero", f"of={filler}", "bs=64k").err
    reached = checkpoints(seen)
    done = started.wait(QUICKLY_S)
    assert "Error 1\n" in done.err
    assert "No space left on device" in done.err
    assert "Traceback" not in done.err
    assert cluster.wait_until_idle(5) == {}
    assert whole(seen) == checkpoints(seen)
    assert set(reached[-2:]) <= set(checkpoints(seen))  # one more may have taken the place of the first of three

    node0.must("rm", filler)
    cluster.remount("ro")
    refused = make(node0, "launch-ssh", args, hosts).wait(30)
    assert "Error 2\n" in refused.err
    assert "Read-only file system" in refused.err
    assert "Traceback" not in refused.err
    assert cluster.wait_until_idle(5) == {}

    cluster.remount("rw")
    again = make(node0, "launch-ssh", args, hosts).wait(90)
    assert again.code == 0, again.err
    assert "went on from step" in again.out
    well = ended_well(seen, ["node0", "node1"], steps=STEPS)
    (resumed,) = events(well.record, "resumed")  # it tells of the end that there was no room for
    assert (resumed["step"], resumed["attempt"]) == (well.record.start["from_step"], 2)


def test_a_folder_of_checkpoints_that_cannot_be_written_ends_nothing(cluster: Cluster) -> None:
    """Records can be written, checkpoints cannot: the run says so, and ends well with the last ones kept."""
    node0, runs = cluster["node0"], cluster.shared / "runs"
    started = make(node0, "launch-ssh", words(runs, steps=STEPS), f"HOSTFILE={hostfile(cluster)}")
    wait_for_step(runs, 40, [started])
    kept = folder_of(runs) / "checkpoints"
    for host in cluster:
        host.must("mount", "--bind", kept, kept)
        host.must("mount", "-o", "remount,bind,ro", kept)
    assert wait_until(lambda: events(read_run(folder_of(runs)), "checkpoint_failed") or not started.running(), 30)
    reached = checkpoints(runs)
    done = started.wait(QUICKLY_S)
    assert done.code == 0, done.err
    assert done.err.count("the checkpoint could not be written (Read-only file system)") == 1
    assert checkpoints(runs) == reached == whole(runs)
    record = read_run(folder_of(runs))
    assert len(events(record, "checkpoint_failed")) == (STEPS - reached[-1]) // 20
    assert record.summary["steps"] == STEPS
