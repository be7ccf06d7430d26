"""A Slurm on the hosts of a cluster: munged and slurmd on each, slurmctld on the first; jobs, preemption and requeue.

    with Cluster(2) as cluster:
        slurm = Slurm(cluster)
        slurm.up()
        job = slurm.submit("--wrap", "srun hostname", nodes=2)

Two partitions on the same nodes: `main`, and `urgent`, whose jobs preempt those of `main`: these get SIGTERM, after the
grace time SIGKILL, and are queued again. Each node says that it has GPUS graphics cards; it has none.
"""

import re
import time
from pathlib import Path

from tests.cluster.common import PATIENCE, wait_until
from tests.cluster.handle import Host
from tests.cluster.hosts import Cluster

GPUS = 2
GRACE_S = 20
LOST_S = round(6 * PATIENCE)  # of silence, after which slurmctld looks whether a node is lost
CONFIG = """\
ClusterName=normscale
SlurmctldHost=node0
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,batch_sched_delay=0
GresTypes=gpu
ReturnToService=2
StateSaveLocation={state}/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile={log}/slurmctld.log
SlurmdLogFile={log}/slurmd-%n.log
SlurmdParameters=config_overrides
SlurmctldTimeout=10
SlurmdTimeout={lost}
MessageTimeout={lost}
KillWait=5
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={nodes} CPUs=2 RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime={grace} MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=10 PreemptMode=off MaxTime=INFINITE State=UP
"""


class Slurm:
    """Slurm on all hosts of a cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.head = cluster, cluster.hosts[0]

    def up(self, limit_s: float = 20.0) -> None:
        """Starts it, and waits until every node is idle."""
        state = self.cluster.folder / "slurm"
        (state / "state").mkdir(exist_ok=True)
        names = ",".join(host.name for host in self.cluster)
        text = CONFIG.format(state=state, log=self.cluster.log, nodes=names, gpus=GPUS, grace=GRACE_S, lost=LOST_S)
        (state / "etc" / "slurm.conf").write_text(text)
        (state / "etc" / "gres.conf").write_text(f"Name=gpu File=/run/gpu[0-{GPUS - 1}]\n")
        self.head.must("dd", "if=/dev/urandom", f"of={state}/munge.key", "bs=128", "count=1")
        self._start_munged(self.head)
        self.head.must("slurmctld")
        for host in self.cluster:
            if host is not self.head:
                self._start_munged(host)
            self._start_slurmd(host)
        if not wait_until(lambda: set(self.nodes().values()) == {"idle"}, limit_s):
            raise RuntimeError(f"Slurm did not come up: {self.nodes()}; its logs: {self.cluster.log}")
        for host in self.cluster:
            host.settle()

    def join(self, host: Host) -> None:
        """Starts it on a host that was switched on again."""
        self._start_munged(host)
        self._start_slurmd(host)
        host.settle()

    def nodes(self) -> dict[str, str]:
        """Returns what slurmctld thinks of each node: idle, mixed, down*, ..."""
        said = self.head.run("sinfo", "--noheader", "--Node", "--partition=main", "--format=%N %T").out
        return dict(line.split() for line in said.splitlines())

    def submit(self, *words: str | Path, nodes: int = 1) -> str:
        """Submits a job and returns its number."""
        said = self.head.must("sbatch", "--parsable", f"--nodes={nodes}", *words)
        return said.strip().partition(";")[0]

    def jobs(self) -> dict[str, str]:
        """Returns the state of each job that slurmctld still knows, by number (for arrays: 7_0, 7_1, ...)."""
        said = self.head.must("squeue", "--noheader", "--array", "--states=all", "--format=%i %T")
        return dict(line.split() for line in said.splitlines())

    def job(self, number: str) -> dict[str, str]:
        """Returns all that slurmctld says of a job, as {name: value}."""
        said = self.head.must("scontrol", "show", "job", "--oneliner", number)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def wait_for(self, number: str, *states: str, limit_s: float) -> str:
        """Waits until a job is in one of some states, and returns which."""
        deadline = time.monotonic() + limit_s * PATIENCE
        while (state := self.job(number)["JobState"]) not in states:
            assert time.monotonic() < deadline, (
                f"job {number} is {state}, not {' or '.join(states)}: {self.job(number)}"
            )
            time.sleep(0.2)
        return state

    def start_now(self, number: str) -> None:
        """Spares a job that was queued again the two minutes that Slurm makes it wait."""
        # slurmd counts in whole seconds: a start in the second of the requeue is to it the job it has just killed.
        time.sleep(2)
        self.head.must("scontrol", "update", f"JobId={number}", "StartTime=now")

    def set_limit(self, number: str, minutes: int) -> None:
        """Gives a job another time limit."""
        self.head.must("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")

    def end_soon(self, number: str) -> None:
        """Gives a running job a limit that is one to two minutes away: Slurm knows whole minutes alone."""
        hours, minutes, _ = map(int, self.job(number)["RunTime"].split(":"))
        self.set_limit(number, 60 * hours + minutes + 2)

    def _start_slurmd(self, host: Host) -> None:
        for k in range(GPUS):
            host.must("mknod", f"/run/gpu{k}", "c", "1", "3")  # slurmd asks for a device; it is never opened
        host.must("slurmd", "-N", host.name)
        running = host.file("/run/slurmd.pid")  # written by the daemon itself, after the last of its forks
        if not wait_until(lambda: running.exists() and running.read_text().strip(), 10):
            raise RuntimeError(f"slurmd did not start on {host.name}; its log: {self.cluster.log}")

    def _start_munged(self, host: Host) -> None:
        key = self.cluster.folder / "slurm" / "munge.key"
        host.must("install", "-d", "-o", "munge", "-g", "munge", "-m", "755", "/run/munge")
        host.must("install", "-o", "munge", "-g", "munge", "-m", "400", key, "/run/munge/key")
        names = {
            "key-file": "key",
            "socket": "munge.socket.2",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        words = [f"--{option}=/run/munge/{name}" for option, name in names.items()]
        host.must("setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", *words)
