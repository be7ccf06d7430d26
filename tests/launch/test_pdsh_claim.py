"""A claim over pdsh: the calls as text, and the parts as pdsh runs them, on hosts that are this machine."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launch.hostfile import Host
from launch.pdsh_claim import over_pdsh, shown, steps
from launch.pdsh_job import SSH_ARGS
from launch.ssh import Place
from tests.launch.test_pdsh_job import ROOT

HOSTS = [Host("n0", 2), Host("n1", 4)]
PDSH = f"PDSH_SSH_ARGS_APPEND='{SSH_ARGS}' pdsh -S -f 1024 -R ssh"
CLAIM = """
import os, sys, time
words = sys.argv[1:]
print(words, "RANK" in os.environ)
part = words[words.index("--part") + 1] if "--part" in words else "judge"
open(f"{words[0]}/{part.replace('/', '-')}", "w").write(os.environ["NORMSCALE_X"])
if part == os.environ["NORMSCALE_FAILS"]:
    sys.exit(4)
time.sleep(1.5 * (part == "1/2"))
open(f"{words[0]}/{part.replace('/', '-')}.end", "w")
"""
DRIVER = """
import sys
from launch import pdsh_claim
from launch.hostfile import Host
from launch.job import Limits
pdsh_claim.ssh.job = lambda *_: Asked()
class Asked:
    __enter__ = sites = lambda self: self
    __exit__ = lambda self, *_: None
place = pdsh_claim.Place(python=sys.argv[1])
hosts = [Host("n0", 2), Host("n1", 2)]
sys.exit(pdsh_claim.claim(hosts, sys.argv[2:], place, Limits(after_failure_s=0.1)))
"""


def test_a_part_on_each_host_and_then_the_judge_on_the_first():
    place = Place("/a b", "/venv/python")
    environ = {"NCCL_DEBUG": "INFO", "MLFLOW_TRACKING_PASSWORD": "hush"}
    words = "env NCCL_DEBUG=INFO /venv/python -m normscale claim run depth --runs 100%%n"
    assert list(shown(HOSTS, ["depth", "--runs", "100%n"], place, environ)) == [
        f"{PDSH} -w n0,n1 " + shlex.quote(f"cd '/a b' && exec {words} --part $((%n + 1))/2"),
        f"{PDSH} -N -w n0 " + shlex.quote(f"cd '/a b' && exec {words}"),
    ]
    assert "NORMSCALE_DEVICE=cuda /venv/python" in next(iter(shown(HOSTS, ["depth"], place, environ, "cuda")))


def test_a_host_alone_needs_no_parts():
    assert steps(HOSTS) == [(HOSTS, 2), (HOSTS[:1], 1)]
    assert steps(HOSTS[1:]) == [(HOSTS[1:], 1)]


def test_pdsh_gives_each_host_its_number_and_leaves_words_alone(hosts_here: Path):
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh here")
    here = over_pdsh(HOSTS, Place(str(hosts_here)), "echo part $((%n + 1)) 5%%n")
    done = subprocess.run(here.argv, env=here.environ(os.environ), capture_output=True, text=True, timeout=20)
    assert {"n0: part 1 5%n", "n1: part 2 5%n"} <= set(done.stdout.splitlines())


def start(folder: Path, fails: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs a claim that is a script, over the real pdsh and an ssh that stays here."""
    if shutil.which("pdsh") is None:
        pytest.skip("no pdsh here")
    (folder / "claim.py").write_text(CLAIM)
    there = (
        f"import sys; from launch import rank; rank.CLAIM = ('{folder}/claim.py',); sys.exit(rank.main(sys.argv[1:]))"
    )
    python = folder / "python"  # that of the hosts: `python -um launch.rank JOB`
    python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-c", there])} "$3"\n')
    python.chmod(0o755)
    words = [sys.executable, "-c", DRIVER, str(python), str(folder), "it's %n"]
    env = {**os.environ, "NORMSCALE_X": "a 'b' $HOME %n", "NORMSCALE_FAILS": fails, "AWS_SECRET_ACCESS_KEY": "hush"}
    return subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def test_parts_run_under_their_numbers_with_their_words_and_the_host_before_each_line(hosts_here: Path):
    done = start(hosts_here)
    assert (done.returncode, "normscale" in done.stderr) == (0, False), done.stderr
    words = [str(hosts_here), "it's %n"]
    lines = done.stdout.splitlines()
    for line in (f"n{part - 1}: {[*words, '--part', f'{part}/2']} False" for part in (1, 2)):
        assert line in lines
    assert lines[-1] == f"{words} False"  # the judge's, whose host needs no telling
    assert "\x1e" not in done.stdout + done.stderr
    assert (hosts_here / "1-2").read_text() == "a 'b' $HOME %n"
    assert "hush" not in (hosts_here / "ssh.log").read_text()


def test_the_code_of_a_part_that_failed_is_the_jobs_and_the_others_go_on(hosts_here: Path):
    done = start(hosts_here, fails="2/2")
    assert done.returncode == 4
    assert done.stderr.splitlines()[-1] == "normscale: n1: what it ran of the claim ended with exit code 4"
    assert (hosts_here / "1-2.end").exists()
    assert not (hosts_here / "judge").exists()
