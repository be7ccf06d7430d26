"""Batch scripts, as text, and as a shell reads them."""

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from launch.__main__ import main
from launch.batch import Batch
from launch.slurm import claim_scripts, train_script
from launch.task import coded
from launch.torchrun import Elastic

from .test_command import AWKWARD
from .test_main import QUICK

BATCH = Batch(nodes=2, time="1-12:00:00", partition="main", folder="/work/it's", python="/venv/bin/python")
SCRIPT = """\
#!/bin/bash
# Written by `python -m launch slurm`; sbatch it again to go on from the newest checkpoint.
#SBATCH --job-name=normscale
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=1
#SBATCH --time=1-12:00:00
#SBATCH --partition=main
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output='/work/it'"'"'s/runs/slurm/normscale-%j.out'
#SBATCH --export=NONE
set -u
cd '/work/it'"'"'s' || exit 2
export NCCL_DEBUG='a b'
export ACCELERATE_USE_CPU=true
export OMP_NUM_THREADS=1 # threads of each rank; the same on every host and at every start, being part of what a run is
script=s.sbatch
try=${1:-0} # how many jobs before this one lost a node
restart=${SLURM_RESTART_COUNT:-0}
say() { echo "normscale: job $SLURM_JOB_ID: $*" >&2; }
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 10000))
echo "job $SLURM_JOB_ID, start $restart, on $SLURM_JOB_NODELIST: 2 x 1 ranks, which meet at $first:$port"
if [ "$restart" -gt 0 ] && ! timeout 60 srun --export=ALL --ntasks-per-node=1 true; then
    say "Slurm cannot start steps in it after the loss of a node; sbatch $script goes on from the checkpoint"
    exit 1
fi
# Each task starts the ranks of its host, and ends with the exit code of the one that failed first, coded.
srun --export=ALL --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK} \\
    sh -c 'trap "" TERM USR1; "$0" -c "import launch.__main__" || exit 193; exec "$0" "$@"' \\
    /venv/bin/python -m launch torchrun --rdzv "$first:$port" --nnodes 2 --node slurm --nproc 1 \\
    --task --device cpu --grace 90 -- c.yaml 'name=a b' &
wait $! # so that this shell hears signals meanwhile
code=$?
case "$code" in # a failure is told above what Slurm's signals give, as Slurm keeps the largest code (launch/task.py)
255) code=138 ;;
254) code=1 ;;
19[3-9] | 2[0-5][0-9]) code=$((code - 192)) ;;
esac
[ "$code" -ne 137 ] || say "a task was killed outright (SIGKILL), often for want of memory"
# 143: told to stop; a checkpoint is written where checkpoint.every asks for any. Slurm does not queue a job again that
# ends by itself in time.
if [ "$code" -eq 143 ]; then
    say "told to stop; it is queued again, and goes on from its newest checkpoint (checkpoint.every)"
    scontrol update JobId="$SLURM_JOB_ID" Requeue=1 >/dev/null 2>&1
    scontrol requeue "$SLURM_JOB_ID" && sleep 30 # Slurm ends this shell
fi
exit "$code"
"""


def script(batch: Batch, args: list[str], **environ: str) -> str:
    return train_script(batch, args, environ, {}, "s.sbatch")


def test_a_training_job():
    assert script(BATCH, ["c.yaml", "name=a b"], NCCL_DEBUG="a b", AWS_SECRET="x", HOME="/root") == SCRIPT


def test_gpus_are_asked_for_and_used():
    text = script(Batch(nodes=3, gpus=4, port=4567, sbatch=("--mem=64G",)), ["c.yaml"])
    lines = text.splitlines()
    assert "#SBATCH --gres=gpu:4" in lines
    assert "#SBATCH --mem=64G" in lines
    assert "port=4567" in lines
    assert "--nnodes 3 --node slurm --nproc 4" in text
    assert "--device cuda" in text
    assert "export NORMSCALE_DEVICE=cuda\n" in claim_scripts(Batch(gpus=1), ["depth"], {})[0][1]
    assert "ACCELERATE_USE_CPU" not in text


def test_a_job_that_is_queued_again_does_not_begin_anew_again():
    (since,) = re.findall(r"export NORMSCALE_FRESH_SINCE=(\d+)\n", script(BATCH, ["c.yaml", "--fresh", "seed=1"]))
    assert abs(int(since) - 1000 * time.time()) < 60_000
    rendered = Elastic("n:1").command(["c.yaml", "--fresh"], "cpu", {"NORMSCALE_FRESH_SINCE": since}, 0)
    assert rendered.environ({"NORMSCALE_FRESH_SINCE": since})["NORMSCALE_FRESH_SINCE"] == since  # the job's


@pytest.mark.parametrize(
    ("asked", "cores", "threads"),
    [
        ({"gpus": 2}, 8, 4),  # and not one core for all ranks of the host, with as many threads as that comes to
        ({"gpus": 2, "nproc": 1}, 4, 4),
        ({"gpus": 2, "cpus": 7}, 14, 7),
        ({"gpus": 2, "cpus": 0}, None, 1),
        ({"nproc": 3}, 3, 1),
        ({"nproc": 3, "cpus": 2}, 6, 2),
    ],
)
def test_each_rank_gets_its_cores(slurm_here: Path, asked: dict[str, int], cores: int | None, threads: int):
    text = script(Batch(**asked), ["c.yaml"])
    assert re.findall("#SBATCH --cpus-per-task=(.*)", text) == ([] if cores is None else [str(cores)])
    assert f"export OMP_NUM_THREADS={threads} " in text
    assert "export OMP_NUM_THREADS=5\n" in script(Batch(**asked), ["c.yaml"], OMP_NUM_THREADS="5")
    given = {} if cores is None else {"SLURM_CPUS_PER_TASK": str(cores)}  # by Slurm, where the job asks
    assert run(slurm_here, Batch(**asked), **given)[0] == 0
    steps = (slurm_here / "log.srun").read_text()
    assert re.findall("cpus-per-task=([0-9]*)", steps) == ([] if cores is None else [str(cores)])


def test_no_secret_is_in_it_and_what_is_in_it_is_whole():
    odd = "a'\"$HOME `id`\n$$ é"
    text = script(BATCH, ["c.yaml"], MLFLOW_TRACKING_PASSWORD="hush", NORMSCALE_X=odd)
    assert "hush" not in text
    exports = text[text.index("export NORMSCALE_X") : text.index("export ACCELERATE")]
    done = subprocess.run(["bash", "-c", f"{exports}printenv NORMSCALE_X"], capture_output=True, text=True, check=True)
    assert done.stdout == f"{odd}\n"


FAKE = """#!/bin/sh
case "${0##*/}" in
scontrol)
    echo "scontrol $*" >> {log}
    [ "$2" = hostnames ] && printf 'n0\\nn1\\n'
    [ "$2" = job ] && echo "JobId=1 JobName=x JobState=$WAS Reason=x ExitCode=$WITH:0 RunTime=1"
    exit 0 ;;
sbatch) echo "sbatch $*" >> {log}; echo 8; exit 0 ;;
srun)
    echo "$*" >> {log}.srun
    [ "$3" = true ] && exit "${PROBE:-0}"
    while [ "$1" != -- ]; do shift; done
    shift; printf '%s\\0' "$@" > {words}; exit "${CODE:-0}" ;;
sleep) exit 0 ;;
esac
"""


@pytest.fixture
def slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("scontrol", "srun", "sbatch", "sleep"):
        text = FAKE.replace("{log}", f"{tmp_path}/log").replace("{words}", f"{tmp_path}/words")
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    (tmp_path / "log").touch()
    return tmp_path


def run(folder: Path, batch: Batch, *args: str, words: list[str] | None = None, **environ: str) -> tuple[int, str, str]:
    """Returns exit code and stderr of the script, and what Slurm was asked."""
    here = Batch(**{**batch.__dict__, "folder": str(folder)})
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-1]"}
    text = train_script(here, words or ["c.yaml"], {}, {}, "s.sbatch")
    done = subprocess.run(
        ["bash", "-s", *args], input=text, env={**os.environ, **job, **environ}, capture_output=True, text=True
    )
    return done.returncode, done.stderr, (folder / "log").read_text()


def test_words_arrive_byte_for_byte(slurm_here: Path):
    assert run(slurm_here, BATCH, words=AWKWARD)[0] == 0
    assert (slurm_here / "words").read_text().split("\0")[:-1] == AWKWARD


@pytest.mark.parametrize("code", [0, 1, 2, 3, 61, 138])
def test_the_exit_code_is_the_step_s(slurm_here: Path, code: int):
    found, err, asked = run(slurm_here, BATCH, CODE=str(coded(code)))
    assert (found, err) == (code, "")
    assert "requeue" not in asked


def test_a_failure_outdoes_what_slurm_does_to_the_other_tasks():
    assert coded(0) == 0
    assert coded(143) == 143
    assert all(143 < coded(code) < 256 for code in range(1, 256) if code != 143)
    assert max(coded(3), coded(1), 143, 137) == coded(3)


def test_a_preempted_job_is_queued_again(slurm_here: Path):
    code, err, asked = run(slurm_here, BATCH, CODE="143")
    assert code == 143
    said = "told to stop; it is queued again, and goes on from its newest checkpoint (checkpoint.every)"
    assert err == f"normscale: job 7: {said}\n"
    assert asked.splitlines()[-2:] == ["scontrol update JobId=7 Requeue=1", "scontrol requeue 7"]


def test_a_job_that_slurm_cannot_start_again_says_so(slurm_here: Path):
    code, err, _ = run(slurm_here, BATCH, SLURM_RESTART_COUNT="1", PROBE="1")
    assert code == 1
    assert err.startswith("normscale: job 7: Slurm cannot start steps in it after the loss of a node; sbatch s.sbatch ")
    assert run(slurm_here, BATCH, SLURM_RESTART_COUNT="1", PROBE="0")[0] == 0


FOLLOWED = Batch(nodes=2, follow_up=2)


def test_a_job_queues_its_follow_up_once(slurm_here: Path):
    text = script(FOLLOWED, ["c.yaml"])
    assert "#SBATCH --no-requeue\n" in text
    assert "#SBATCH --requeue" not in text
    follow = "sbatch --parsable --dependency=afternotok:7 --kill-on-invalid-dep=yes s.sbatch {} 7\n"
    _, said, asked = run(slurm_here, FOLLOWED)
    assert follow.format(1) in asked
    assert said == "normscale: job 7: job 8 is queued to follow it, should it fail\n"
    (slurm_here / "log").write_text("")
    assert "sbatch" not in run(slurm_here, FOLLOWED, SLURM_RESTART_COUNT="1")[2]
    assert follow.format(2) in run(slurm_here, FOLLOWED, "1", "5", WAS="NODE_FAIL", WITH="0")[2]
    (slurm_here / "log").write_text("")
    assert "sbatch" not in run(slurm_here, FOLLOWED, "2", "5", WAS="NODE_FAIL", WITH="0")[2]


@pytest.mark.parametrize(
    ("state", "code", "follows"),
    [
        ("NODE_FAIL", "0", True),
        ("PREEMPTED", "0", True),
        ("FAILED", "1", True),  # the ranks noticed before Slurm did
        ("FAILED", "2", False),
        ("FAILED", "3", False),
        ("COMPLETED", "0", False),
        ("CANCELLED", "0", False),
    ],
)
def test_what_a_follow_up_follows(slurm_here: Path, state: str, code: str, follows: bool):
    found, err, _ = run(slurm_here, FOLLOWED, "1", "5", WAS=state, WITH=code)
    assert found == 0
    assert (slurm_here / "words").exists() is follows
    assert ("follows job 5" if follows else "nothing to follow") in err


def test_a_claim_is_an_array_of_parts_and_a_judge():
    words = ["depth-ablation", "--profile", "cpu", "--runs", "a b"]
    (parts_name, parts), (judge_name, judge) = claim_scripts(BATCH, words, {})
    assert (parts_name, judge_name) == ("-parts", "-judge")
    for text in (parts, judge):
        assert "#SBATCH --nodes=1\n" in text
        assert "#SBATCH --signal=TERM@90\n" in text
    assert "#SBATCH --array=1-2\n" in parts
    assert "normscale-%A_%a.out" in parts
    base = "/venv/bin/python -m normscale claim run depth-ablation --profile cpu --runs 'a b'"
    assert f'{base} --part "$SLURM_ARRAY_TASK_ID/2" &\n' in parts
    assert f"{base} &\n" in judge
    assert "array" not in judge
    assert [name for name, _ in claim_scripts(Batch(), words, {})] == [""]


@pytest.mark.parametrize("text", [SCRIPT, *[text for _, text in claim_scripts(BATCH, ["x"], {})]])
def test_bash_can_read_it(text: str):
    assert subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True).stderr == ""
    assert "@" not in text.replace("USR1@", "").replace("TERM@", "").replace('"$@"', "")


def test_a_job_is_submitted_in_an_environment_without_secrets(
    slurm_here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (slurm_here / "bin" / "sbatch").write_text(f"#!/bin/sh\nenv > {slurm_here}/env\necho '12;cluster'\n")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hush")
    monkeypatch.setenv("SBATCH_ACCOUNT", "mine")
    logs = slurm_here / "logs"
    assert main(["slurm", "--logs", str(logs), "--", QUICK, "seed=3"]) == 0
    (path,) = logs.glob("*.sbatch")
    assert capsys.readouterr().out.splitlines() == [
        f"job 12: {path}",
        f"output: {logs}/normscale-12.out; squeue -j 12 shows it, scancel 12 ends it",
    ]
    seen = (slurm_here / "env").read_text()
    assert "hush" not in seen + path.read_text()
    assert "SBATCH_ACCOUNT=mine" in seen
    assert '"world":1' in path.read_text()
    assert main(["slurm", "--logs", str(logs), "--follow-up", "2", "--", QUICK]) == 0
    assert "queues another (afternotok:12), named in its output" in capsys.readouterr().out.splitlines()[-1]


def test_what_sbatch_refuses_is_said_in_a_line(slurm_here: Path, capsys: pytest.CaptureFixture[str]):
    (slurm_here / "bin" / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition' >&2\nexit 1\n")
    assert main(["slurm", "--logs", str(slurm_here / "logs"), "--partition", "no", "--", QUICK]) == 2
    err = capsys.readouterr().err
    assert err.startswith("normscale: sbatch refused the job (invalid partition); its script is ")
    assert err.count("\n") == 1


def test_gpus_that_a_cluster_does_not_have_are_hinted_at(slurm_here: Path, capsys: pytest.CaptureFixture[str]):
    said = "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification"
    (slurm_here / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    words = ["slurm", "--logs", str(slurm_here / "logs"), "--gpus"]
    assert main([*words, "8", "--", QUICK]) == 2
    assert "(gres) specification): has any node 8 GPU(s)? sinfo -o '%P %G %c'" in capsys.readouterr().err
    assert main([*words, "0", "--", QUICK]) == 2
    assert "GPU" not in capsys.readouterr().err


def test_cores_that_a_cluster_does_not_have_are_hinted_at(slurm_here: Path, capsys: pytest.CaptureFixture[str]):
    said = "sbatch: error: Batch job submission failed: Requested node configuration is not available"
    (slurm_here / "bin" / "sbatch").write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    words = ["slurm", "--logs", str(slurm_here / "logs")]
    assert main([*words, "--gpus", "8", "--cpus", "9", "--", QUICK]) == 2
    assert "has any node 8 GPU(s), and 72 cores (--cpus)? sinfo " in capsys.readouterr().err
    assert main([*words, "--cpus", "9", "--", QUICK]) == 2
    assert "has any node 9 cores? sinfo " in capsys.readouterr().err
    for gpus in ("0", "8"):  # none were asked for
        assert main([*words, "--gpus", gpus, "--cpus", "0", "--", QUICK]) == 2
        assert " cores" not in capsys.readouterr().err


def test_a_dry_run_prints_the_script_and_submits_nothing(slurm_here: Path, capsys: pytest.CaptureFixture[str]):
    words = ["slurm", "--nodes", "2", "--logs", str(slurm_here / "logs"), "--dry-run"]
    assert main([*words, "--", QUICK]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=2\n" in out
    assert f"job=$(sbatch --parsable {slurm_here}/logs/normscale-" in out
    assert main([*words, "--claim", "depth-ablation"]) == 0
    assert '--dependency=afterok:"${job%%;*}" --kill-on-invalid-dep=yes' in capsys.readouterr().out
    assert not (slurm_here / "logs").exists()
    assert (slurm_here / "log").read_text() == ""


def test_without_sbatch_a_line_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["slurm", "--logs", str(tmp_path / "logs"), "--", QUICK]) == 2
    assert capsys.readouterr().err.startswith("normscale: sbatch: no such program here; log in to ")


def test_what_a_dry_run_prints_does_it(slurm_here: Path, capsys: pytest.CaptureFixture[str]):
    logs, log = slurm_here / "lo g's $x `y`", slurm_here / "log"
    words = ["slurm", "--nodes", "2", "--logs", str(logs), "--claim", "depth-ablation"]
    args = ["--", "--x", "a\nEND-OF-SCRIPT\nb"]

    def did() -> tuple[list[str], list[list[str]]]:
        texts = [path.read_text() for path in sorted(logs.glob("*.sbatch"))]
        asked = [line.split()[:4] for line in log.read_text().splitlines()]
        shutil.rmtree(logs)
        log.write_text("")
        return texts, asked

    assert main([*words, "--dry-run", *args]) == 0
    shown = capsys.readouterr().out
    done = subprocess.run(["bash", "-eu"], input=shown, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "job 8\njob 8\n", "")
    by_hand = did()
    assert main([*words, *args]) == 0
    assert by_hand == did()
    assert (len(by_hand[0]), by_hand[1][1][2]) == (2, "--dependency=afterok:8")
