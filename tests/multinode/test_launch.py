"""Each way to start, from `make` to equal weights, over two real hosts; interrupted once, and gone on with."""

import os
import shlex
import signal
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from normscale.tracking.reader import RunRecord
from tests.cluster.handle import Started
from tests.cluster.hosts import Cluster
from tests.cluster.slurm import Slurm
from tests.multinode.jobs import (
    CONFIG,
    Watch,
    Well,
    checkpoints,
    ended_well,
    events,
    files_with,
    folder_of,
    hostfile,
    launcher_on,
    make,
    rank_on,
    wait_for_step,
    words,
)

ODD = 'a b  it\'s "q" $HOME `id` $(id) \\ * ü#\nz'
SECRET = "hunter2-of-the-tests"
SECRETS = {"MLFLOW_TRACKING_PASSWORD": SECRET, "AWS_SECRET_ACCESS_KEY": SECRET, "MY_OWN": SECRET}


def start(name: str, cluster: Cluster, args: Sequence[str]) -> list[Started]:
    """Starts a job in one of the ways that take a command a host at most; the first is the one that is waited for."""
    node0 = cluster["node0"]
    if name == "torchrun":
        settings = ("RDZV=node0:29511", "NNODES=2")
        return [make(host, "launch-torchrun", args, *settings, env=SECRETS) for host in cluster]
    return [make(node0, f"launch-{name}", args, f"HOSTFILE={hostfile(cluster)}", env=SECRETS)]


def one_host(cluster: Cluster, *more: str, name: str) -> Well:
    """Trains on one host with two ranks: what two hosts must give, too."""
    runs = cluster.shared / f"one-{name}"
    done = make(cluster["node0"], "launch", words(runs, *more), "NPROC=2").wait(90)
    assert done.code == 0, done.err
    return ended_well(runs, ["node0"] * 2)


@pytest.fixture(scope="module")
def one() -> Iterator[Well]:
    """The run that all launches are compared with: one host, the same global batch."""
    with Cluster(1) as cluster:
        yield one_host(cluster, name="plain")


def check_same(found: Well, expected: Well, *, bits: bool) -> None:
    """Fails unless a run gave what another gave: to the bit, or up to rounding."""
    if bits:
        assert found.weights == expected.weights
        assert found.losses == expected.losses
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    assert found.last == pytest.approx(expected.last, rel=1e-5)


def check_interruptions(record: RunRecord, *steps: int) -> None:
    """Fails unless a run was stopped after just these steps, each time went on from there, and says both."""
    assert (record.start["from_step"], record.attempt) == (steps[-1], len(steps) + 1)
    told = events(record, "preempted", "resumed")
    expected = [(name, step) for step in steps for name in ("preempted", "resumed")]
    assert [(event["event"], event["step"]) for event in told] == expected
    for attempt, (step, resumed) in enumerate(zip(steps, told[1::2], strict=True), start=1):
        assert f"attempt {attempt} was stopped after step {step} with exit code 143" in resumed["says"]


def check_quiet(cluster: Cluster, watch: Watch) -> None:
    """Fails if a secret of the caller's was on a command line or is in a file."""
    assert watch.holding(SECRET) == []
    own = [host.file(folder) for host in cluster for folder in ("/tmp", "/run", "/dev/shm")]
    assert files_with(SECRET, [cluster.folder, *own]) == []


@pytest.mark.parametrize(
    ("name", "engine", "more"),
    [
        ("ssh", "ddp", ()),
        ("deepspeed", "deepspeed", ("engine.name=deepspeed", "engine.zero=2")),
        ("torchrun", "ddp", ()),
    ],
)
def test_a_launch_is_interrupted_and_goes_on(
    name: str, engine: str, more: tuple[str, ...], cluster: Cluster, one: Well
) -> None:
    runs, node0 = cluster.shared / "runs", cluster["node0"]
    args = words(runs, *more, f"name={ODD}")
    with Watch(cluster) as watch:
        first = start(name, cluster, args)
        wait_for_step(runs, 60, first)
        os.kill(launcher_on(node0, name), signal.SIGTERM)
        ends = [each.wait(40) for each in first]
        assert ends[0].code != 0
        assert "Error 143" in ends[0].err  # what make says of the launcher's code
        assert cluster.wait_until_idle(10) == {}
        reached = checkpoints(runs)[-1]
        assert 60 <= reached < 300

        again = [each.wait(60) for each in start(name, cluster, args)]
    assert [end.code for end in again] == [0] * len(again), again[0].err
    assert "".join(end.out for end in again).count(f"went on from step {reached} ") == 1
    assert cluster.wait_until_idle(10) == {}

    well = ended_well(runs, ["node0", "node1"], engine)
    check_same(well, one, bits=engine == "ddp")
    check_interruptions(well.record, reached)
    assert well.record.start["config"]["name"] == ODD.replace("\n", " ")  # as YAML folds it
    for host in cluster:  # what each rank was given is what was written, byte for byte
        assert {tuple(line) for line in watch.ranks(host.name)} == {(CONFIG, *args)}
    check_quiet(cluster, watch)


def test_a_job_of_slurm_comes_to_its_limit_is_preempted_and_goes_on_each_time(
    slurm: Slurm, cluster: Cluster, one: Well
) -> None:
    runs, node0 = cluster.shared / "runs", cluster["node0"]
    args = words(runs, f"name={ODD}", "engine.timeout_s=60")
    settings = ("NODES=2", "TIME=3", "PARTITION=main", f"OPTIONS=--logs {cluster.shared}/logs")
    with Watch(cluster) as watch:
        said = make(node0, "launch-slurm", args, *settings, env=SECRETS).wait(30)
        assert said.code == 0, said.err
        (job,) = slurm.jobs()
        wait_for_step(runs, 60)

        # Slurm tells of a limit when it looks, every 30 s, and wakes whoever is stopped: no step is made until then.
        for host in cluster:
            os.kill(rank_on(host), signal.SIGSTOP)
        slurm.end_soon(job)
        slurm.wait_for(job, "PENDING", limit_s=60)  # at the limit, Slurm would have ended it for good
        limited = checkpoints(runs)[-1]
        assert 60 <= limited < 300
        slurm.set_limit(job, minutes=10)
        slurm.start_now(job)

        wait_for_step(runs, limited + 40)
        urgent = slurm.submit(
            "--partition=urgent", "--exclusive", f"--chdir={cluster.shared}", "--wrap", "true", nodes=2
        )
        slurm.wait_for(urgent, "COMPLETED", limit_s=40)  # within the grace time: the ranks ended by themselves
        slurm.wait_for(job, "PENDING", limit_s=10)
        reached = checkpoints(runs)[-1]
        assert limited < reached < 300
        slurm.start_now(job)
        slurm.wait_for(job, "COMPLETED", limit_s=60)
    assert cluster.wait_until_idle(10) == {}
    assert slurm.job(job)["Restarts"] == "2"

    well = ended_well(runs, ["node0", "node1"])
    check_same(well, one, bits=True)
    check_interruptions(well.record, limited, reached)
    assert events(well.record, "preempted")[0]["says"].startswith("SIGUSR1 ended it after step")
    assert well.record.start["config"]["name"] == ODD.replace("\n", " ")  # as YAML folds it
    for host in cluster:
        assert {tuple(line) for line in watch.ranks(host.name)} == {(CONFIG, *args)}
    check_quiet(cluster, watch)


@pytest.mark.parametrize(
    ("name", "engine", "more"),
    [
        ("ssh", "fsdp2", ("engine.name=fsdp2",)),
        ("deepspeed", "deepspeed", ("engine.name=deepspeed", "engine.zero=3")),
    ],
)
def test_weights_in_shards_over_two_hosts(
    name: str, engine: str, more: tuple[str, ...], cluster: Cluster, one: Well
) -> None:
    runs = cluster.shared / "runs"
    (done,) = [each.wait(90) for each in start(name, cluster, words(runs, *more))]
    assert done.code == 0, done.err
    well = ended_well(runs, ["node0", "node1"], engine)
    check_same(well, one, bits=False)
    index = (folder_of(runs) / "checkpoints" / "step-00000300" / "index.json").read_text()
    assert [f"rank{rank}.safetensors" in index for rank in range(2)] == [True, True]
    assert cluster.wait_until_idle(10) == {}


def test_a_claim_over_pdsh_is_a_part_on_each_host_and_a_judge(cluster: Cluster) -> None:
    runs = cluster.shared / "runs"
    ours = shlex.join(["--runs", str(runs), "--uri", "null", "--workers", "1"])
    settings = ("CLAIM=growth-prenorm", "PROFILE=smoke", f"ARGS={ours}", f"HOSTFILE={hostfile(cluster)}")
    with Watch(cluster) as watch:
        made = ("make", "-o", ".venv/installed", "launch-deepspeed", *settings)
        done = cluster["node0"].run(*made, env={"OMP_NUM_THREADS": "1", **SECRETS}, limit_s=120)
    assert done.code == 0, done.err + done.out
    for part in (1, 2):
        assert f"node{part - 1}: growth-prenorm: profile smoke, part {part}/2\n" in done.out
    assert len([path for path in runs.iterdir() if (path / "spool.jsonl").exists()]) == 3  # each run was made once
    assert "3 runs ended; smoke gives no verdict" in done.out
    assert cluster.wait_until_idle(20) == {}
    check_quiet(cluster, watch)
