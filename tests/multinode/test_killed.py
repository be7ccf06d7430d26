"""The other launchers under kill -9, and a claim over ssh: the same end, whoever starts the ranks."""

import os
import signal

import pytest

from normscale.tracking.reader import read_run
from tests.cluster.common import ROOT
from tests.cluster.hosts import Cluster
from tests.multinode.jobs import (
    checkpoints,
    folder_of,
    hostfile,
    launcher_on,
    make,
    rank_on,
    wait_for_step,
    whole,
    words,
)

QUICKLY_S = 25.0
STEPS = 2000


@pytest.mark.parametrize("victim", ["rank", "launcher"])
@pytest.mark.parametrize("name", ["deepspeed", "torchrun"])
def test_kill(name: str, victim: str, cluster: Cluster) -> None:
    node0, node1 = cluster.hosts
    runs = cluster.shared / "runs"
    if name == "torchrun":
        args = words(runs, steps=STEPS)
        started = [make(host, "launch-torchrun", args, "RDZV=node0:29513", "NNODES=2") for host in cluster]
    else:
        args = words(runs, "engine.name=deepspeed", steps=STEPS)
        started = [make(node0, "launch-deepspeed", args, f"HOSTFILE={hostfile(cluster)}")]
    wait_for_step(runs, 20, started)
    os.kill(rank_on(node1) if victim == "rank" else launcher_on(node0, name), signal.SIGKILL)
    reached = checkpoints(runs)[-1]
    ends = [one.wait(QUICKLY_S) for one in started]
    assert all(end.code != 0 for end in ends)
    assert cluster.wait_until_idle(QUICKLY_S) == {}
    assert whole(runs)[-1] >= reached
    if victim == "rank":
        assert "SIGKILL" in "".join(end.err for end in ends)
        assert "Traceback" not in "".join(end.err for end in ends)
    told = [event["event"] for event in read_run(folder_of(runs)).events]
    assert told == ["rank_lost" if victim == "rank" else "preempted"]


def test_a_claim_over_ssh_is_a_part_on_each_host_and_a_judge(cluster: Cluster) -> None:
    runs = cluster.shared / "runs"
    ours = f"--runs {runs} --uri sqlite:///{cluster.shared}/mlflow.db --workers 1"
    settings = ("CLAIM=growth-prenorm", "PROFILE=smoke", f"ARGS={ours}", f"HOSTFILE={hostfile(cluster)}")
    made = ("make", "-o", ".venv/installed", "launch-ssh", *settings)
    done = cluster["node0"].run(*made, env={"OMP_NUM_THREADS": "1"}, folder=ROOT, limit_s=120)
    assert done.code == 0, done.err + done.out
    folders = [path for path in runs.iterdir() if (path / "spool.jsonl").exists()]
    assert len(folders) == 3
    assert done.out.count("growth-prenorm") >= 1
    assert cluster.wait_until_idle(20) == {}
