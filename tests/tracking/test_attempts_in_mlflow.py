"""What became of each attempt of a run, from its spool to MLflow: on the run's page, and as a report of its own."""

from pathlib import Path

import mlflow

from normscale.tracking.mlflow_artifacts import event_folders
from normscale.tracking.mlflow_sink import sync
from normscale.tracking.reader import read_run
from normscale.tracking.record import ABOUT_AN_ATTEMPT
from normscale.tracking.spool import SpoolWriter

ATTEMPTS: list[list[tuple[int, str, dict[str, str]]]] = [
    [(4, "checkpoint_failed", {"reason": "Read-only file system"}), (6, "rank_lost", {"says": "rank 1 (node1)"})],
    [(4, "resumed", {"says": "attempt 2 goes on"}), (6, "rank_lost", {"says": "rank 1 (node1), again"})],
    [
        (4, "resumed", {"says": "attempt 3 goes on"}),
        (4, "checkpoint_passed_over", {"path": "step-00000006", "reason": "it was not written to its end"}),
        (4, "checkpoint_passed_over", {"path": "step-00000008.part", "reason": "rank0.safetensors is missing"}),
        (6, "preempted", {"says": "SIGTERM ended it"}),
    ],
]
FOLDERS = [
    "step-000004-checkpoint-failed",
    "step-000006-rank-lost",
    "step-000004-resumed",
    "step-000006-rank-lost-2",
    "step-000004-resumed-2",
    "step-000004-checkpoint-passed-over",
    "step-000004-checkpoint-passed-over-2",
    "step-000006-preempted",
]


def write(run_dir: Path, begins: tuple[int, ...] = (0, 4, 4)) -> None:
    for number, (events, step) in enumerate(zip(ATTEMPTS, begins, strict=True), start=1):
        with SpoolWriter(run_dir, number) as spool:
            spool.start(run_id=run_dir.name, from_step=step)
            spool.metrics(6, 6, {"loss_train": 2.0})
            for at, event, fields in events:
                spool.event(at, event, **fields)
            spool.event(6, "spike", value=1.0)
            spool.end("interrupted", 143, {})


def test_what_became_of_each_attempt_is_told_though_its_steps_were_made_again(tmp_path: Path) -> None:
    write(tmp_path / "r")
    record = read_run(tmp_path / "r")
    told = [(event["step"], event["event"], event["attempt"]) for event in record.events]
    expected = [(at, event, n) for n, events in enumerate(ATTEMPTS, start=1) for at, event, _ in events]
    assert told == [*expected, (6, "spike", 3)]
    assert {event for _, event, _ in expected} < ABOUT_AN_ATTEMPT
    assert list(event_folders(record).values()) == [f"events/{name}" for name in FOLDERS]


def test_what_was_before_a_new_beginning_is_told_no_more(tmp_path: Path) -> None:
    write(tmp_path / "r", begins=(0, 0, 4))
    assert {event["attempt"] for event in read_run(tmp_path / "r").events} == {2, 3}


def test_each_stands_in_mlflow(runs, new_store) -> None:  # type: ignore[no-untyped-def]
    uri = new_store()
    write(runs / "r")
    assert sync(runs, uri).ok
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    files = client.list_artifacts(run.info.run_id, "events")
    assert sorted(Path(file.path).name for file in files) == sorted(FOLDERS)
    page = run.data.tags["mlflow.note.content"].splitlines()
    told = [(step, event, *fields.values()) for events in ATTEMPTS for step, event, fields in events]
    lines = [line for line in page if line.startswith("| ") and "[report](" in line]
    assert len(lines) == len(told)
    for line, (step, event, *texts) in zip(lines, told, strict=True):
        assert line.startswith(f"| {step} | {event}")
        assert [text for text in texts if text not in line] == []
    first, again = (
        Path(client.download_artifacts(run.info.run_id, f"events/{name}/event.json")).read_text()
        for name in ("step-000006-rank-lost", "step-000006-rank-lost-2")
    )
    assert ("again" in first, "again" in again) == (False, True)
