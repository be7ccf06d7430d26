"""`launch slurm`: a batch job, rendered as a script that a person can read, keep, and hand to sbatch again.

The script starts one task a host, each of which starts its host's ranks (`launch torchrun --node slurm`). Told to stop,
by SIGTERM when the job is preempted and by SIGUSR1 some time before its limit, the ranks write a checkpoint and end
with 143; then the script queues the job again, and it goes on where it was. No variable of the caller but those of
launch/environment.py gets into the script, and no secret.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.batch import Batch
from launch.command import device_env
from launch.environment import handed_on, trimmed
from launch.options import dry_run
from launch.plan_env import plan_env
from normscale.errors import LaunchError
from normscale.planned import fresh_since

JUDGE = "-judge"
TEMPLATES = Path(__file__).with_name("templates")
NO_GPUS = re.compile(r"generic resource|gres|node configuration is not available", re.I)  # in sbatch's words
NO_CORES = re.compile(r"node configuration is not available|cpu count", re.I)
OURS = ("SLURM_CONF", "SBATCH_")  # settings of Slurm itself that the caller's environment may hold


def launch(options: argparse.Namespace, args: list[str]) -> int:
    """Submits the job, or with a dry run prints it; returns the exit code of that.

    Raises:
        LaunchError: an option that Slurm could not use, no sbatch here, or sbatch's own reason.
    """
    names = ("nodes", "gpus", "nproc", "cpus", "time", "partition", "account", "port", "follow_up", "name", "logs")
    given = {name: getattr(options, name) for name in names}
    batch = Batch(**given, sbatch=tuple(options.sbatch), grace_s=int(options.grace), folder=os.getcwd())
    batch.check()
    stem = Path(batch.folder, batch.logs, f"{batch.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    if options.claim is not None:
        if batch.follow_up:
            raise LaunchError(
                "--follow-up: a claim needs none; the same command goes on with the runs that are missing"
            )
        scripts = claim_scripts(batch, args, os.environ)
    else:
        scripts = [("", train_script(batch, args, os.environ, plan={}, script=f"{stem}.sbatch"))]
    if dry_run(options):
        print(shown(stem, scripts))
        return 0
    if options.claim is None:
        from launch.__main__ import check_config

        check_config(args, batch.nodes * batch.ranks)
        plan = plan_env(args, batch.nodes * batch.ranks)
        scripts = [("", train_script(batch, args, os.environ, plan, f"{stem}.sbatch"))]
    return _submit(batch, stem, scripts)


def train_script(
    batch: Batch, args: Sequence[str], environ: Mapping[str, str], plan: Mapping[str, str], script: str
) -> str:
    """Returns the batch script that trains; `script` is where it will lie."""
    values = _common(batch, environ, {**plan, **fresh_since(args)}) | {
        "HEADER": _header(batch, f"--nodes={batch.nodes}", signal=f"USR1@{batch.grace_s}"),
        "PORT": str(batch.port) if batch.port else "$((20000 + SLURM_JOB_ID % 10000))",
        "NODES": str(batch.nodes),
        "NPROC": str(batch.ranks),
        "DEVICE": "cuda" if batch.gpus else "cpu",
        "GRACE": str(batch.grace_s),
        "WORDS": shlex.join(args),
        "RESTARTED": _template("restarted.sh", {}),
        "FOLLOW_UP": "",
        "SCRIPT": shlex.quote(script),
    }
    if batch.follow_up:
        values["FOLLOW_UP"] = _template("follow_up.sh", {"TRIES": str(batch.follow_up)})
    return _template("train.sbatch", values)


def claim_scripts(batch: Batch, words: Sequence[str], environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Returns the scripts of a claim, each with the ending of its name: parts of the runs, one a host, then a judge."""
    judge = _claim_script(batch, words, environ, ("--nodes=1",))
    if batch.nodes == 1:
        return [("", judge)]
    part = [*words, "--part"]
    array = ("--nodes=1", f"--array=1-{batch.nodes}")
    text = _claim_script(batch, part, environ, array, f' "$SLURM_ARRAY_TASK_ID/{batch.nodes}"')
    return [("-parts", text), (JUDGE, judge)]


def _claim_script(
    batch: Batch, words: Sequence[str], environ: Mapping[str, str], asks: Sequence[str], last: str = ""
) -> str:
    values = _common(batch, environ, {}) | {
        "HEADER": _header(batch, *asks, signal=f"TERM@{batch.grace_s}"),
        "WORDS": shlex.join(words) + last,
    }
    return _template("claim.sbatch", values)


def shown(stem: Path, scripts: Sequence[tuple[str, str]]) -> str:
    """Returns shell commands that write the scripts and submit them."""
    lines = [f"mkdir -p {shlex.quote(str(stem.parent))}"]
    for suffix, text in scripts:
        path, mark = f"{stem}{suffix}.sbatch", "END-OF-SCRIPT"
        while mark in text.splitlines():
            mark += "-"
        lines.append(f"cat > {shlex.quote(path)} <<'{mark}'\n{text}{mark}")
        command = shlex.join(submit_command(path, "JOB" if suffix == JUDGE else ""))
        command = command.replace("afterok:JOB", 'afterok:"${job%%;*}"')
        lines.append(f'job=$({command}) && echo "job $job"')
    return "\n".join(lines)


def submit_command(script: str, after: str = "") -> tuple[str, ...]:
    """Returns the sbatch command; with `after`, the job waits for that one to end well."""
    depends = (f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes") if after else ()
    return ("sbatch", "--parsable", *depends, script)


def _header(batch: Batch, *asks: str, signal: str) -> str:
    logs = f"{Path(batch.folder, batch.logs)}/{batch.name}-{'%A_%a' if any('array' in ask for ask in asks) else '%j'}"
    lines = [
        f"--job-name={batch.name}",
        *asks,
        "--ntasks-per-node=1",
        f"--cpus-per-task={batch.cores * batch.ranks}" if batch.cores else "",
        f"--gres=gpu:{batch.gpus}" if batch.gpus else "",
        f"--time={batch.time}" if batch.time else "",
        f"--partition={batch.partition}" if batch.partition else "",
        f"--account={batch.account}" if batch.account else "",
        f"--signal={signal}",
        "--no-requeue" if batch.follow_up else "--requeue",
        "--open-mode=append",
        f"--output={shlex.quote(f'{logs}.out')}",
        "--export=NONE",
        *batch.sbatch,
    ]
    return "\n".join(f"#SBATCH {line}" for line in lines if line)


def _common(batch: Batch, environ: Mapping[str, str], plan: Mapping[str, str]) -> dict[str, str]:
    env = handed_on(environ) | dict(plan)
    exports = [f"export {name}={shlex.quote(value)}" for name, value in env.items()]
    for name, value in device_env("cuda" if batch.gpus else "cpu").items():
        exports.append(f"export {name}={value}")
    if "OMP_NUM_THREADS" not in env:
        says = "# threads of each rank; the same on every host and at every start, being part of what a run is"
        exports.append(f"export OMP_NUM_THREADS={batch.cores or 1} {says}")
    return {
        "FOLDER": shlex.quote(batch.folder),
        "EXPORTS": "\n".join(exports),
        "PYTHON": shlex.quote(batch.python),
        # srun does not take the cores of a task over from the job by itself. Where the job asks for none, 1 would be
        # all that its ranks get, whatever it has.
        "SRUN": "srun --export=ALL --kill-on-bad-exit=1 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}",
        "END": _template("end.sh", {}),
    }


def _template(name: str, values: Mapping[str, str]) -> str:
    """Returns a template with its @NAMES@ filled in, each once, whatever the values hold."""
    text = (TEMPLATES / name).read_text(encoding="utf-8")
    lines = [line for line in text.splitlines(keepends=True) if values.get(line.strip().strip("@"), "-") != ""]
    return re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]].rstrip("\n"), "".join(lines))


def _submit(batch: Batch, stem: Path, scripts: Sequence[tuple[str, str]]) -> int:
    if shutil.which("sbatch") is None:
        raise LaunchError("sbatch: no such program here; log in to a host of the Slurm cluster, or use launch ssh")
    try:
        stem.parent.mkdir(parents=True, exist_ok=True)
        for suffix, text in scripts:
            Path(f"{stem}{suffix}.sbatch").write_bytes(os.fsencode(text))
    except OSError as error:
        raise LaunchError(f"--logs {stem.parent}: cannot be written ({error.strerror}); choose another") from None
    env = trimmed(os.environ) | {name: value for name, value in os.environ.items() if name.startswith(OURS)}
    job = ""
    for suffix, _ in scripts:
        path = f"{stem}{suffix}.sbatch"
        done = subprocess.run(submit_command(path, job), env=env, capture_output=True, text=True)
        if done.returncode != 0:
            reason = " ".join(done.stderr.split()).removeprefix("sbatch: error: ")
            raise LaunchError(f"sbatch refused the job ({reason}){_mend(batch, reason)}; its script is {path}")
        job = done.stdout.strip().partition(";")[0]
        print(f"job {job}: {path}")
    print(f"output: {batch.logs}/{batch.name}-{job}.out; squeue -j {job} shows it, scancel {job} ends it")
    if batch.follow_up:
        print(
            f"after the loss of a node: as job {job} starts it queues another (afternotok:{job}), named in its output,"
            f" that goes on from the checkpoint; up to {batch.follow_up} in all"
        )
    return 0


def _mend(batch: Batch, reason: str) -> str:
    """Returns what may mend a refusal, where the reason tells."""
    asked = batch.cores * batch.ranks if NO_CORES.search(reason) else 0
    if batch.gpus and NO_GPUS.search(reason):
        cores = f", and {asked} cores (--cpus)" if asked else ""
        lists = "sinfo -o '%P %G %c' lists those of each partition; GPUS=0 takes CPUs"
        return f": has any node {batch.gpus} GPU(s){cores}? {lists}"
    if asked:
        return f": has any node {asked} cores? sinfo -o '%P %c' lists those of each partition"
    return ""
