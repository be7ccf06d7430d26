"""What make hands on: CONFIG and ARGS byte for byte, whatever starts the ranks (cases PR-020, PR-021, PR-022)."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from launch.rank import decoded

ROOT = Path(__file__).parents[2]
ENV = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "DRY_RUN"))}
ODD = ["--name", "pre norm eps=1e-6", "--tag", "it's", "--json", '{"a": [1, 2]}', "--empty", ""]
SHARP = ["a=$HOME", "b=`id`", "c=$$", "d=$(shell touch pwned)", "e=*", 'f=a\nb "c"', "g=\\n", "h=é#x", "i=${X}", "j=%n"]


def make(folder: Path, target: str, *words: str, dry: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs the checkout's make as a person would, with an environment that counts as installed."""
    (folder / "hosts").write_text("n0 slots=2\nn1 slots=2\n")
    if not (ROOT / ".venv" / "bin" / "python").exists():
        pytest.skip("no .venv in this checkout")
    hosts = f"HOSTFILE={folder / 'hosts'}"
    meets = {"launch-ssh": [hosts], "launch-deepspeed": [hosts], "launch-torchrun": ["RDZV=n0:29500"]}
    base = ["make", "-o", ".venv/installed", target, *meets.get(target, [])]
    env = {**ENV, "DRY_RUN": "1"} if dry else ENV
    return subprocess.run([*base, *words], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)


def trained(target: str, out: str) -> list[list[str]]:
    """Returns the words of `normscale train` that each command of a dry run stands for, as a host would read them."""
    if target == "launch-slurm":
        script = out.partition("<<'END-OF-SCRIPT'\n")[2].rpartition("END-OF-SCRIPT\n")[0]
        text = script.partition("--grace 90 -- ")[2].partition(" &\nwait $!")[0]
        return [split_by_shell(text)]
    words = shlex.split(out)
    if target == "launch-deepspeed":
        return [decoded(words[-1])["words"]]
    if target == "launch-ssh":
        return [split_by_shell(word.partition(" normscale train ")[2]) for word in words if word.startswith("cd ")]
    return [words[words.index("train") + 1 :]]


def split_by_shell(text: str) -> list[str]:
    done = subprocess.run(["sh", "-c", f"printf '%s\\0' {text}"], capture_output=True, text=True, check=True)
    return done.stdout.split("\0")[:-1]


TARGETS = ("train", "launch", "launch-ssh", "launch-deepspeed", "launch-slurm", "launch-torchrun")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("words", [ODD, SHARP], ids=["odd", "sharp"])
def test_words_reach_every_rank_byte_for_byte(target: str, words: list[str], tmp_path: Path):
    done = make(tmp_path, target, f"ARGS={shlex.join(words)}", "CONFIG=it's $(here) `x`.yaml")
    assert done.returncode == 0, done.stderr
    found = trained(target, done.stdout)
    assert found == [["it's $(here) `x`.yaml", *words]] * (2 if target == "launch-ssh" else 1)
    assert not (ROOT / "pwned").exists()


def test_what_no_quotes_protect_arrives_as_it_is(tmp_path: Path):
    done = make(tmp_path, "launch", "ARGS=a=$HOME `id` $$ *\n'b c'")
    assert trained("launch", done.stdout) == [["configs/train/quick.yaml", "a=$HOME", "`id`", "$$", "*", "b c"]]


def test_a_quote_that_is_not_closed_is_said(tmp_path: Path):
    done = make(tmp_path, "launch", "ARGS=name=it's")
    assert done.returncode != 0
    assert done.stderr.startswith("normscale: ARGS: no closing quotation; quote it as in: ")


@pytest.mark.parametrize("target", ["launch", "launch-ssh", "launch-deepspeed", "launch-slurm"])
def test_a_port_reaches_every_launcher(target: str, tmp_path: Path):
    several = [] if target in ("launch-ssh", "launch-deepspeed") else ["NPROC=2"]
    assert "4567" in make(tmp_path, target, "PORT=4567", *several).stdout
    assert "5000" not in make(tmp_path, target, *several).stdout  # the default of make ui


def test_options_reach_their_launcher(tmp_path: Path):
    out = make(tmp_path, "launch-slurm", "NODES=3", "GPUS=2", "TIME=2:00:00", "PARTITION=big").stdout
    for line in ("--nodes=3", "--gres=gpu:2", "--time=2:00:00", "--partition=big"):
        assert f"#SBATCH {line}\n" in out
    assert "--nnodes 4 " in make(tmp_path, "launch-torchrun", "NNODES=4").stdout
    assert len(make(tmp_path, "launch-ssh", "OPTIONS=--include n1").stdout.splitlines()) == 1
    assert "--num_processes 3 " in make(tmp_path, "launch", "NPROC=3").stdout


PARTS = {"launch": 0, "launch-ssh": 2, "launch-deepspeed": 1, "launch-slurm": 0, "launch-torchrun": 1}


@pytest.mark.parametrize("target", PARTS)
def test_a_whole_claim(target: str, tmp_path: Path):
    node = ["NNODES=2", "OPTIONS=--node 1"] if target == "launch-torchrun" else []
    done = make(tmp_path, target, "CLAIM=depth-ablation", "PROFILE=smoke", "ARGS=--runs 'a b'", *node)
    assert done.returncode == 0, done.stderr
    assert "claim run depth-ablation --profile smoke --runs" in done.stdout
    assert done.stdout.count("--part") == PARTS[target]


def test_a_claim_of_several_nodes_is_an_array(tmp_path: Path):
    out = make(tmp_path, "launch-slurm", "CLAIM=depth-ablation", "NODES=4").stdout
    assert "#SBATCH --array=1-4\n" in out


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("NPROCS=2", "NPROCS: no such variable is known (did you mean NPROC?)"),
        ("HOSTFIL=x", "did you mean HOSTFILE?"),
        ("HOST_FILE=x", "did you mean HOSTFILE?"),
        ("nprocs=2", "did you mean NPROC?"),
        ("steps=50", "steps: no such variable is known (what a run is to be goes into ARGS="),
        ("it's=50", "it's: no such variable is known"),
    ],
)
def test_a_variable_that_nobody_would_read_is_refused(word: str, says: str, tmp_path: Path):
    done = make(tmp_path, "launch", word)
    assert done.returncode == 2
    assert says in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch-torchrun", "NODES=2"], "NODES: make launch-torchrun does not read it (doctor launch-slurm do)"),
        (["launch-slurm", "NNODES=2", "GPUS=8"], "NNODES: make launch-slurm does not read it (launch-torchrun does)"),
        (["launch", "HOSTFILE=hosts"], "HOSTFILE: make launch does not read it"),
        (["train", "NNODES=2"], "it reads CONFIG NPROC PORT OPTIONS ARGS DRY_RUN."),
        (["train", "CLAIM=depth-ablation"], "CLAIM: make train does not read it (claim launch "),
        (["launch-ssh", "NPROC=4"], "NPROC: make launch-ssh does not read it"),
        (["clean", "DRY_RUN=1"], "DRY_RUN: make clean does not read it"),
        (["check", "CONFIG=a.yaml"], "it reads no setting."),
    ],
)
def test_a_setting_that_the_target_does_not_read_is_refused(words: list[str], says: str):
    """A job that was meant for two hosts would be one of one host."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr


def test_every_target_may_be_given_what_its_recipe_reads():
    rules = re.findall(r"^([a-z-]+):.*##.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert len(rules) > 20
    for target, recipe in rules:
        recipe = recipe.replace(
            "$(to_train)", "(value CONFIG) (value CLAIM) (value PROFILE) (value OPTIONS) (value ARGS)"
        )
        read = re.findall(r"\((?:value |call [a-z_]+,(?:--[a-z-]+,)?)([A-Z]+)\)", recipe)
        words = ["make", "-n", "-o", ".venv/installed", target, *(f"{name}=1" for name in read if name != "CLAIM")]
        done = subprocess.run(words, cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr


def test_what_the_environment_or_another_make_has_is_not_asked_about(tmp_path: Path):
    """PYTHON too: those are handed on as environment, or read by what starts here."""
    assert make(tmp_path, "launch", "OMP_NUM_THREADS=1", "NCCL_DEBUG=INFO", "CC=gcc", "PYTHON=python3").returncode == 0
    words = ["make", "-o", ".venv/installed", "-n", "launch"]
    for more, env in (([], {"NPROCS": "2", "steps": "1"}), (["NPROCS=2"], {"MAKELEVEL": "1"})):
        done = subprocess.run([*words, *more], cwd=ROOT, env={**ENV, **env}, capture_output=True, timeout=60)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launch", "CONFIG=nowhere.yaml", "NPROC=2"], "nowhere.yaml: no such file"),
        (["launch", "CONFIG=a", "CLAIM=b"], "CONFIG and CLAIM: both are given"),
        (["launch-ssh", "HOSTFILE="], "--hostfile: none is given"),
        (["launch-torchrun", "RDZV="], "--rdzv: none is given"),
        (["launch", "NPROC=x"], "'x' is not a whole number"),
    ],
)
def test_a_launch_that_fails_is_not_0(words: list[str], says: str, tmp_path: Path):
    done = make(tmp_path, *words, dry=False)
    assert done.returncode != 0
    assert says in done.stderr


def test_all_claims_within_a_budget(tmp_path: Path):
    done = subprocess.run(
        ["make", "-n", "-o", ".venv/installed", "claims", "PROFILE=smoke", "HOURS=0.5"],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "normscale claim run --all --profile 'smoke' --hours '0.5'" in done.stdout
