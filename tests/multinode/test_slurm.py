"""Slurm's own faults: a node that is lost, with a job that follows; and a claim as an array of parts."""

from tests.cluster.common import wait_until
from tests.cluster.hosts import Cluster
from tests.cluster.slurm import Slurm
from tests.multinode.jobs import checkpoints, ended_well, events, make, wait_for_step, whole, words

STEPS = 400


def test_a_node_is_lost_and_a_job_that_follows_goes_on(slurm: Slurm, cluster: Cluster) -> None:
    node0, node1 = cluster.hosts
    runs = cluster.shared / "runs"
    settings = ("NODES=2", "TIME=20", f"OPTIONS=--logs {cluster.shared}/logs --follow-up 2")
    said = make(node0, "launch-slurm", words(runs, steps=STEPS), *settings).wait(30)
    assert said.code == 0, said.err
    job = min(slurm.jobs())
    wait_for_step(runs, 60)
    node1.power_off()
    slurm.wait_for(job, "NODE_FAIL", "FAILED", limit_s=60)  # by Slurm's time limit, or by that of the ranks before
    assert wait_until(lambda: not any("normscale" in process.line for process in node0.processes()), 30)
    reached = whole(runs)[-1]
    assert 60 <= reached < STEPS

    calm = make(node0, "launch", words(cluster.shared / "calm", steps=STEPS), "NPROC=2").wait(60)  # Slurm takes as long
    assert calm.code == 0, calm.err
    assert wait_until(lambda: slurm.nodes()["node1"].startswith("down"), 40)
    node1.boot()
    slurm.join(node1)
    (second,) = set(slurm.jobs()) - {job} - {number for number, state in slurm.jobs().items() if state == "CANCELLED"}
    slurm.wait_for(second, "COMPLETED", limit_s=90)
    well = ended_well(runs, ["node0", "node1"], steps=STEPS)
    assert well.record.start["from_step"] == reached
    assert events(well.record, "rank_lost")[0]["ranks"] == [1]
    (resumed,) = events(well.record, "resumed")
    assert (resumed["step"], resumed["attempt"]) == (reached, 2)
    assert checkpoints(runs)[-1] == STEPS
    assert cluster.wait_until_idle(10) == {}

    undisturbed = ended_well(cluster.shared / "calm", ["node0"] * 2, steps=STEPS)
    assert (well.weights, well.losses, well.last) == (undisturbed.weights, undisturbed.losses, undisturbed.last)


def test_a_claim_is_an_array_of_parts_and_a_judge(slurm: Slurm, cluster: Cluster) -> None:
    runs, logs = cluster.shared / "runs", cluster.shared / "logs"
    ours = f"--runs {runs} --uri sqlite:///{cluster.shared}/mlflow.db --workers 1"
    settings = ("CLAIM=growth-prenorm", "PROFILE=smoke", f"ARGS={ours}", "NODES=2", f"OPTIONS=--logs {logs}")
    node0 = cluster["node0"]
    environment = {"OMP_NUM_THREADS": "1"}
    said = node0.run("make", "-o", ".venv/installed", "launch-slurm", *settings, env=environment, limit_s=30)
    assert said.code == 0, said.err
    judge = max(slurm.jobs(), key=lambda number: int(number.partition("_")[0]))
    parts = [number for number in slurm.jobs() if "_" in number]
    assert len(parts) == 2
    slurm.wait_for(judge, "COMPLETED", "FAILED", "CANCELLED", limit_s=120)
    told = {path.name: path.read_text() for path in logs.glob("*.out")}
    assert slurm.jobs()[judge] == "COMPLETED", told
    folders = [path for path in runs.iterdir() if (path / "spool.jsonl").exists()]
    assert len(folders) == 3  # each run was made once
    assert cluster.wait_until_idle(20) == {}
