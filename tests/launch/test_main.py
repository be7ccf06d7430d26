"""`python -m launch` as a person meets it."""

from pathlib import Path

import pytest

from launch.__main__ import main
from launch.command import ACCELERATE_CONFIGS

QUICK = str(ACCELERATE_CONFIGS.parent / "train" / "quick.yaml")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["locl"], "did you mean 'local'?"),
        (["local", "--nproc", "2"], "write -- and then"),
        (["local", "--"], "no configuration"),
        (["local", "--nproc", "0", "--", QUICK], "--nproc 0"),
        (["local", "--nproc", "99999", "--", QUICK], "--nproc 99999: at most 1024 ranks on a host"),
        (["local", "--nproc", "two", "--", QUICK], "--nproc"),
        (["local", "--nproc", "2", "--port", "0", "--", QUICK], "--port 0"),
        (["local", "--nproc", "2", "--", QUICK, "model.M=x"], "model.M"),
        (["local", "--nproc", "2", "--", "nowhere.yaml"], "nowhere.yaml"),
        (["local", "--profile", "smoke", "--", QUICK], "--profile: is of a claim"),
        (["local", "--claim", "depth-ablatoin"], "did you mean 'depth-ablation'?"),
        (["local", "--claim", "depth-ablation", "--nproc", "2"], "--workers N"),
        (["ssh", "--", QUICK], "--hostfile: none is given"),
        (["ssh", "--hostfile", "nowhere", "--", QUICK], "nowhere: no such hostfile"),
        (["ssh", "--hostfile", "f", "--grace", "soon", "--", QUICK], "'soon' is not a number of seconds"),
        (["ssh", "--from-make", "--", "x"], "OPTIONS: there is a -- in it"),
        (["deepspeed", "--", QUICK], "--hostfile: none is given"),
        (["deepspeed", "--claim", "depth-ablation"], "--hostfile: none is given"),
        (
            ["torchrun", "--claim", "depth-ablation", "--nnodes", "1:2"],
            "--nnodes 1:2: a run has the same number of ranks from ",
        ),
        (["torchrun", "--claim", "depth-ablation", "--nproc", "2"], "--workers N"),
        (["torchrun", "--", QUICK], "--rdzv: none is given"),
        (["torchrun", "--rdzv", "here", "--", QUICK], "--rdzv here: not HOST:PORT"),
        (["torchrun", "--rdzv", "a:0", "--", QUICK], "--rdzv a:0: a port is"),
        (["torchrun", "--rdzv", "a:1", "--rdzv-id", "", "--", QUICK], "--rdzv-id: it is empty"),
        (["torchrun", "--rdzv", "a:1", "--nnodes", "3:2", "--", QUICK], "--nnodes 3:2"),
        (["torchrun", "--rdzv", "a:1", "--nnodes", "2", "--node", "2", "--", QUICK], "--node 2: not one of"),
        (["torchrun", "--rdzv", "a:1", "--node", "slurm", "--", QUICK], "no SLURM_NODEID here"),
        (["slurm", "--nodes", "0", "--", QUICK], "--nodes 0"),
        (["slurm", "--time", "soon", "--", QUICK], "--time soon"),
        (["slurm", "--time", "2", "--", QUICK], "--time 2: shorter than --grace 90"),
        (["slurm", "--gpus", "2", "--nproc", "3", "--", QUICK], "--nproc 3"),
        (["slurm", "--grace", "70000", "--", QUICK], "--grace 70000"),
        (["slurm", "--partition", "a,,b", "--", QUICK], "--partition 'a,,b'"),
        (["slurm", "--partition", "a b", "--", QUICK], "--partition 'a b'"),
    ],
)
def test_bad_input_is_found_before_any_rank_starts(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("launch.local.run", lambda *_: pytest.fail("ranks were started"))
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("normscale: ")
    assert err.count("\n") == 1
    assert says in err


def test_a_precision_in_the_environment_reaches_the_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    for nproc in ("1", "2"):
        assert main(["local", "--nproc", nproc, "--dry-run", "--", QUICK, "--fresh"]) == 0
        assert capsys.readouterr().out.endswith(f" train {QUICK} --fresh precision.compute=fp16\n")
        assert main(["local", "--nproc", nproc, "--dry-run", "--", QUICK, "precision.compute=bf16"]) == 2
        err = capsys.readouterr().err
        assert err.startswith("normscale: precision.compute: bf16 (override precision.compute=bf16) but fp16 (ACCEL")
        assert err.count("\n") == 1
        assert main(["local", "--nproc", nproc, "--dry-run", "--", QUICK, "precision.compute=fp16"]) == 0
        assert capsys.readouterr().out.count("precision.compute") == 1
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    assert main(["local", "--nproc", "2", "--dry-run", "--", QUICK]) == 0
    assert "precision.compute" not in capsys.readouterr().out


@pytest.mark.parametrize("how", ["option", "variable"])
def test_a_dry_run_prints_the_command_and_starts_nothing(
    how: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("launch.local.run", lambda *_: pytest.fail("ranks were started"))
    if how == "variable":
        monkeypatch.setenv("DRY_RUN", "1")
    assert main(["local", "--nproc", "2", *["--dry-run"] * (how == "option"), "--", QUICK, "name=a b"]) == 0
    out = capsys.readouterr().out
    assert "--num_processes 2" in out
    assert out.endswith(f"-m normscale train {QUICK} 'name=a b'\n")


@pytest.mark.parametrize(
    ("launcher", "line", "options", "says"),
    [
        ("ssh", "n1 slots=1", ["--lost-after", "1"], "--lost-after 1: give 6 or more"),
        ("deepspeed", "me@n1 slots=1", [], "me@n1: DeepSpeed's launcher knows no such name"),
        ("deepspeed", "::1 slots=1", [], "::1: DeepSpeed's launcher knows no such name"),
    ],
)
def test_what_a_launcher_cannot_do_with_its_hosts_is_said(
    launcher: str, line: str, options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "hosts").write_text(f"{line}\n")
    assert main([launcher, "--hostfile", str(tmp_path / "hosts"), *options, "--dry-run", "--", QUICK]) == 2
    assert capsys.readouterr().err.startswith(f"normscale: {says}")
