"""The commands of torchrun, as text."""

import shlex
import sys

import pytest

from launch.__main__ import main
from launch.torchrun import Elastic, node_number, nodes, part_words
from normscale.errors import LaunchError

from .test_main import QUICK

PYTHON = shlex.quote(sys.executable)


def test_a_rendezvous_is_the_same_on_every_host():
    elastic = Elastic("n1:29500", "4", 2, "job7", 3)
    assert elastic.command(["c.yaml", "name=a b"], "cpu", {"OMP_NUM_THREADS": "1"}).shell() == (
        "OMP_NUM_THREADS=1 ACCELERATE_USE_CPU=true TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 "
        f"{PYTHON} -m torch.distributed.run --nnodes 4 --nproc-per-node 2 "
        "--rdzv-backend c10d --rdzv-id job7 --rdzv-endpoint n1:29500 "
        "--max-restarts 3 -m normscale train c.yaml 'name=a b'"
    )
    assert elastic.world() == 8


def test_ranks_that_an_agent_starts_again_do_not_begin_anew_again():
    def since(restarts: int, *words: str) -> bool:
        rendered = Elastic("n1:29500", max_restarts=restarts).command(["c.yaml", *words], "cpu", {})
        return "NORMSCALE_FRESH_SINCE" in rendered.sets

    assert [since(1, "--fresh"), since(0, "--fresh"), since(1)] == [True, False, False]


def test_a_numbered_host_meets_the_others_at_a_fixed_place():
    rendered = Elastic("[::1]:29500", "2", 2).command(["c.yaml"], "cpu", {"OMP_NUM_THREADS": "1"}, 1)
    assert rendered.shell().endswith(
        f"{PYTHON} -m torch.distributed.run --nnodes 2 --node-rank 1 --nproc-per-node 2 --master-addr ::1 "
        "--master-port 29500 --max-restarts 0 -m normscale train c.yaml"
    )


def test_numbered_hosts_refuse_restarts_which_they_would_not_make():
    with pytest.raises(LaunchError, match=r"--max-restarts 2: hosts that have numbers \(--node\) start nothing again"):
        Elastic("n1:29500", "2", max_restarts=2).command(["c.yaml"], "cpu", {}, 1)


def test_a_plan_made_before_is_kept_and_other_leftovers_are_not():
    environ = {"NORMSCALE_PLAN": "x", "RANK": "1", "NORMSCALE_STATUS_DIR": "y"}
    rendered = Elastic("n1:29500").command(["c.yaml"], "cpu", environ)
    assert rendered.unsets == ("NORMSCALE_STATUS_DIR", "RANK")


@pytest.mark.parametrize(
    ("nnodes", "node", "words"),
    [
        ("1", None, []),
        ("2", 0, ["--part", "1/2", "--then-judge"]),
        ("2", 1, ["--part", "2/2"]),
        ("2", None, "--node: none is given, .* give --node 0 to 1"),
        ("2", 2, "--node 2: not one of --nnodes 2"),
        ("1:4", 0, "--nnodes 1:4: a run has the same number of ranks from its beginning to its end; give one number"),
    ],
)
def test_each_numbered_host_has_a_part_of_a_claim_and_the_first_judges(
    nnodes: str, node: int | None, words: list[str] | str
):
    if isinstance(words, str):
        with pytest.raises(LaunchError, match=words):
            part_words(nnodes, node)
    else:
        assert part_words(nnodes, node) == words


@pytest.mark.parametrize("word", ["", "0", "1:2", "2:1", "1:2:3", "a", "-1", "1:"])
def test_what_is_no_number_of_hosts(word: str):
    with pytest.raises(LaunchError, match="--nnodes"):
        nodes(word)


def test_the_number_of_a_host():
    assert node_number(None, {}) is None
    assert node_number("3", {}) == 3
    assert node_number("slurm", {"SLURM_NODEID": "1"}) == 1
    with pytest.raises(LaunchError, match="no SLURM_NODEID here"):
        node_number("slurm", {})


def test_the_ranks_get_the_plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    seen = []
    monkeypatch.setattr("launch.local.run", lambda command, *_, **__: seen.append(command) or 0)
    words = ["torchrun", "--rdzv", "n1:29500", "--device", "cpu"]
    assert main([*words, "--nnodes", "2", "--", QUICK]) == 0
    assert '"world":2,"hosts":null' in seen[-1].sets["NORMSCALE_PLAN"]
    assert capsys.readouterr().out == "starting 1 of 2 ranks: engine ddp, records in runs\n"
