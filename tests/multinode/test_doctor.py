"""The doctor on two hosts: nothing to say of good ones, a line and a mend for each thing wrong with a bad one."""

from tests.cluster.common import ROOT
from tests.cluster.handle import Done
from tests.cluster.hosts import Cluster
from tests.multinode.jobs import hostfile


def doctor(cluster: Cluster, *settings: str) -> Done:
    """Runs `make doctor` on the first host."""
    words = ("make", "-o", ".venv/installed", "doctor", f"HOSTFILE={hostfile(cluster)}", *settings)
    return cluster["node0"].run(*words, env={"OMP_NUM_THREADS": "1"}, limit_s=60)


def test_good_hosts_pass(cluster: Cluster) -> None:
    done = doctor(cluster)
    assert done.code == 0, done.out + done.err
    for host in cluster:
        assert host.name in done.out
    assert cluster.wait_until_idle(5) == {}


def test_each_thing_that_is_wrong_is_named_with_its_host(cluster: Cluster) -> None:
    node1 = cluster["node1"]
    other, source = cluster.shared / "other.py", ROOT / "normscale" / "errors.py"
    other.write_text(source.read_text() + "\n")
    node1.put_over(other, source)  # other code
    node1.must("mount", "-o", "remount,size=4m", "/dev/shm")  # no shared memory to speak of
    hosts = cluster.shared / "hosts"
    hosts.write_text("127.0.0.1 localhost node0\n10.77.0.11 node1\n")
    node1.must("mount", "--bind", hosts, "/etc/hosts")  # takes the first host for itself
    done = doctor(cluster, "OPTIONS=--timeout 8")
    assert "Error 1\n" in done.err, done.out + done.err
    problems = [line for line in (done.out + done.err).splitlines() if "node1" in line]
    for word in ("/dev/shm", "node0"):
        assert any(word in line for line in problems), (word, done.out, done.err)
    assert "Traceback" not in done.err

    node1.power_off()
    gone = doctor(cluster, "OPTIONS=--timeout 8")
    assert "Error 1\n" in gone.err
    assert any("node1" in line for line in (gone.out + gone.err).splitlines())
