"""The hosts themselves: what every other test here relies on."""

import base64
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.common import ROOT, wait_until
from tests.cluster.hosts import Cluster
from tests.cluster.slurm import Slurm
from tests.multinode.jobs import Watch, files_with

OWNER = """
import time
from tests.cluster.hosts import Cluster
from tests.cluster.slurm import Slurm
with Cluster(2) as cluster:
    Slurm(cluster).up()
    running = [host.start("sleep", "1000") for host in cluster]
    cluster["node1"].freeze()
    print(*(host.pid for host in cluster), cluster.rack.pid, cluster.folder, flush=True)
    time.sleep(1000)
"""


def test_each_host_has_a_name_an_address_and_folders_of_its_own(cluster: Cluster) -> None:
    for host, other in (cluster.hosts, cluster.hosts[::-1]):
        said = host.must(
            "ssh", other.name, "hostname; hostname -I; cat /etc/hostname; touch /tmp/mine; ls /run/sshd /dev/shm"
        )
        assert said.split() == [other.name, other.address, other.name, "/dev/shm:", "/run/sshd:"]
        assert "sshd" in " ".join(process.line for process in host.processes())
    assert [host.file("/tmp/mine").exists() for host in cluster] == [True, True]
    assert not Path("/tmp/mine").exists()
    here = set(os.listdir("/sys/class/net"))
    assert not {name for name in here if name.startswith(("port-", "bridge"))}
    outside = cluster["node0"].run("ssh", "-o", "ConnectTimeout=2", "-o", "StrictHostKeyChecking=no", "192.0.2.1")
    assert outside.code == 255
    assert "unreachable" in outside.err


def test_a_command_keeps_its_arguments_its_code_and_its_signals(cluster: Cluster) -> None:
    node = cluster["node1"]
    odd = ["a b", "$HOME", "`id`", "it's", '"', "line\nbreak", "ü", ""]
    said = node.must(sys.executable, "-c", "import sys; print(ascii(sys.argv[1:]))", *odd)
    assert said.strip() == ascii(odd)
    assert [node.run("bash", "-c", f"exit {code}").code for code in (0, 3)] == [0, 3]
    assert node.run("bash", "-c", "kill -9 $$").code == -signal.SIGKILL
    trapping = node.start("bash", "-c", "trap 'echo heard; exit 7' USR1; echo ready; while true; do sleep 0.05; done")
    assert wait_until(lambda: "ready" in trapping.out, 5)
    trapping.signal(signal.SIGUSR1)
    done = trapping.wait(5)
    assert (done.code, done.out) == (7, "ready\nheard\n")
    assert cluster.wait_until_idle(5) == {}
    with pytest.raises(AssertionError, match=r"did not end within 0\.2 s"):
        node.start("sleep", "60").wait(0.2)
    assert cluster.wait_until_idle(5) == {}  # it was killed on the host, too


def test_power_cable_and_frost(cluster: Cluster) -> None:
    node0, node1 = cluster.hosts
    quick = ("ssh", "-o", "ConnectTimeout=5", "node1", "echo", "here")
    node1.unplug()
    assert node0.run("ssh", "-o", "ConnectTimeout=1", "node1", "true").code == 255
    node1.plug()
    assert node0.run(*quick).out == "here\n"
    node1.start("sleep", "100")
    assert wait_until(cluster.left, 5)
    node1.freeze()
    assert {process.state for process in node1.processes()} == {"T"}
    assert node0.run("timeout", "1", *quick).code != 0
    node1.thaw()
    assert node0.run(*quick).out == "here\n"
    assert [line for lines in cluster.left().values() for line in lines if "sleep" in line] == ["sleep 100"]
    # A peer of a host that lost its power hears nothing, where one of a killed process does at once.
    server = "import socket; s = socket.create_server(('', 5000)); s.accept()[0].recv(1)"
    client = "import socket; s = socket.create_connection(('node1', 5000)); s.settimeout(2); print(s.recv(1))"
    for cut, expected in ((False, "b''"), (True, "TimeoutError")):
        serving = node1.start(sys.executable, "-c", server)
        assert wait_until(lambda: re.search(r":1388 \S+ 0A ", Path(f"/proc/{node1.pid}/net/tcp").read_text()), 5)
        waiting = node0.start(sys.executable, "-c", client)
        time.sleep(0.5)
        node1.power_off() if cut else serving.process.kill()
        done = waiting.wait(5)
        assert expected in done.out + done.err
    assert cluster["node1"].processes() == []
    node1.boot()
    assert node0.run(*quick).out == "here\n"
    assert cluster.left() == {}


def test_the_shared_disk_can_fill_up_and_refuse(cluster: Cluster) -> None:
    node0, node1 = cluster.hosts
    node0.must("dd", "if=/dev/zero", f"of={cluster.disk}/some", "bs=1M", "count=1")
    cluster.remount("size=2m")
    assert "No space left" in node1.run("dd", "if=/dev/zero", f"of={cluster.disk}/more", "bs=2M", "count=1").err
    assert sorted(path.name for path in cluster.seen(cluster.disk).iterdir()) == ["more", "some"]
    cluster.remount("ro")
    assert "Read-only" in node0.run("touch", cluster.disk / "x").err
    cluster.remount("rw")
    node0.must("touch", cluster.disk / "some")


def test_nothing_is_left_of_a_cluster_whose_owner_was_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    *pids, folder = owner.stdout.readline().split()
    assert len(pids) == 3
    namespaces = [os.readlink(f"/proc/{pid}/ns/pid") for pid in pids[:2]]
    owner.kill()
    owner.communicate()

    def left() -> list[str]:
        alive = [pid for pid in pids if Path("/proc", pid).exists()]
        return [*alive, *(name for name in namespaces if _someone_in(name))]

    assert wait_until(lambda: not left() and not Path(folder).exists(), 10), (left(), folder)


def test_a_secret_is_seen_wherever_it_is(cluster: Cluster) -> None:
    """What other tests rely on where they find none."""
    secret, node = "hunter2-of-this-test", cluster["node1"]
    coded = [base64.b64encode(b"x" * shift + secret.encode() + b" and more").decode() for shift in range(4)]
    for number, word in enumerate(coded):
        node.must("bash", "-c", f"echo {word} > /tmp/{number}")
    (cluster.shared / "file").write_text(f"a\n{secret}\n")
    with Watch(cluster) as watch:
        running = [node.start("bash", "-c", "sleep 100; true", word) for word in (*coded, f"--password={secret}")]
        assert wait_until(lambda: sum(line.startswith("bash") for line in watch.holding(secret)) == 5, 10)
    for one in running:
        one.process.kill()
    assert len(files_with(secret, [node.file("/tmp")])) == 4 + 1  # and the cluster's own folder, which lies there
    assert files_with(secret, [cluster.shared]) == [str(cluster.shared / "file")]
    assert watch.holding("hunter9-of-this-test") == []


def test_slurm_runs_jobs_on_all_hosts_and_preempts(slurm: Slurm, cluster: Cluster) -> None:
    assert sorted(slurm.head.must("srun", "-N2", "hostname").split()) == ["node0", "node1"]
    script = cluster.shared / "job.sh"
    script.write_text(
        "#!/bin/bash\necho start ${SLURM_RESTART_COUNT:-0} $CUDA_VISIBLE_DEVICES\n"
        "srun bash -c 'trap \"exit 143\" TERM; while true; do sleep 0.1; done'\n"
        "code=$?; echo code $code; [ $code = 143 ] && scontrol requeue $SLURM_JOB_ID; exit $code\n"
    )
    out = cluster.shared / "out"
    words = ("--requeue", "--open-mode=append", "--gpus-per-node=2", f"--output={out}", script)
    job = slurm.submit(*words, nodes=2)
    slurm.wait_for(job, "RUNNING", limit_s=10)
    assert wait_until(lambda: out.exists() and "start" in out.read_text(), 5)
    time.sleep(0.5)
    urgent = slurm.submit("--partition=urgent", "--exclusive", f"--chdir={cluster.shared}", "--wrap", "true", nodes=2)
    slurm.wait_for(urgent, "COMPLETED", limit_s=20)
    slurm.wait_for(job, "PENDING", limit_s=10)
    slurm.start_now(job)
    slurm.wait_for(job, "RUNNING", limit_s=20)
    assert wait_until(lambda: "start 1" in out.read_text(), 5)
    assert "start 0 0,1\n" in out.read_text()
    assert "code 143" in out.read_text()
    slurm.head.must("scancel", job)
    assert cluster.wait_until_idle(15) == {}


def _someone_in(namespace: str) -> bool:
    for entry in os.scandir("/proc"):
        try:
            if entry.name.isdigit() and os.readlink(f"/proc/{entry.name}/ns/pid") == namespace:
                return True
        except OSError:
            continue
    return False
