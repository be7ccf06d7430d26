import json
import math
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow
import pytest

from normscale.tracking import mlflow_sink, sink_state
from normscale.tracking import record as records
from normscale.tracking.mlflow_requests import Store, SyncReport
from normscale.tracking.mlflow_sink import follow, links, main, sync
from normscale.tracking.mlflow_view import TAG, unpack
from normscale.tracking.spool import SpoolWriter
from tests.tracking.made import VERDICT, cell, make_manifest, make_run


def client_of(uri):
    return mlflow.MlflowClient(uri)


def everything(uri):
    """Returns all runs of a store, by name."""
    client = client_of(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {run.info.run_name: run for run in client.search_runs(experiments, max_results=1000)}


def history(uri, run):
    client = client_of(uri)
    return {
        key: [
            (metric.step, metric.value, metric.timestamp) for metric in client.get_metric_history(run.info.run_id, key)
        ]
        for key in run.data.metrics
    }


def files(run):
    folder = Path(unquote(urlsplit(run.info.artifact_uri).path))
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def make_claim(runs, tmp_path):
    """Writes a judged claim of four runs: one per arm, one of another seed, one that stopped on a NaN."""
    (tmp_path / "verdict.png").write_bytes(b"png")
    (tmp_path / "report.html").write_text("<h1>report</h1>")
    cells = [
        cell(make_run(runs, "post", 12, trains=False, steps=20)),
        cell(make_run(runs, "deepnorm", 12, steps=20), "deepnorm"),
        cell(make_run(runs, "deepnorm", 12, 1, steps=20), "deepnorm", seed=1),
        cell(make_run(runs, "post", 24, trains=False, steps=20, nan_at=15), depth=24),
    ]
    figures, report = [str(tmp_path / "verdict.png")], str(tmp_path / "report.html")
    return make_manifest(runs, cells, verdict=VERDICT, figures=figures, report=report)


@pytest.fixture(scope="module")
def synced(tmp_path_factory, empty_database):
    """A claim that was synced once: (runs, uri, report, what links said before). Tests may only sync it again."""
    folder = tmp_path_factory.mktemp("a claim")
    runs, uri = folder / "runs", f"sqlite:///{folder / 'mlflow.db'}"
    runs.mkdir()
    shutil.copy(empty_database, folder / "mlflow.db")
    make_claim(runs, folder)
    before = links(runs, uri, "depth-postnorm-dies")
    return runs, uri, sync(runs, uri), before


def forget(runs):
    for path in [*runs.glob("*/sink.json"), runs / ".sink.json"]:
        path.unlink()


def test_a_claim_is_one_parent_with_a_child_per_run(synced):
    _, uri, report, _ = synced
    assert report.failures == []
    assert (report.runs, report.claims) == (4, 1)
    found = everything(uri)
    assert sorted(found) == [
        "L0012 deepnorm s0",
        "L0012 deepnorm s1",
        "L0012 post s0",
        "L0024 post s0",
        "depth-postnorm-dies cpu",
    ]
    parent, post, bad = found["depth-postnorm-dies cpu"], found["L0012 post s0"], found["L0024 post s0"]
    client = client_of(uri)
    experiment = client.get_experiment(parent.info.experiment_id)
    assert experiment.name == "normscale-depth"
    assert {run.info.experiment_id for run in found.values()} == {experiment.experiment_id}
    children = [run for name, run in found.items() if run is not parent]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}

    assert parent.info.status == "FINISHED"
    assert parent.data.tags["verdict"] == "supported"
    assert parent.data.tags["mlflow.note.content"].startswith("**SUPPORTED** - Post-Norm stays")
    metrics = parent.data.metrics
    assert metrics == {"0-end/cells": 4, "0-end/failed": 1}
    wanted = [
        "config.yaml",
        "data/cells.csv",
        "figures/verdict.png",
        "report.html",
        "tables/cells.json",
        "verdict.json",
    ]
    assert files(parent) == wanted

    tags = post.data.tags
    assert (tags["outcome"], tags["arm"], tags["cell"], tags["role"]) == ("plateau", "post", "L0012 post", "main")
    assert tags["mlflow.runColor"] == "#d62728"
    assert (tags["normscale.kind"], tags["normscale.claim"], tags["normscale.profile"]) == (
        "arm",
        "depth-postnorm-dies",
        "cpu",
    )
    assert post.info.status == "FINISHED"
    assert post.data.params["layers"] == "12"
    (data,) = post.inputs.dataset_inputs
    assert data.dataset.name == "embedded"
    assert data.dataset.digest == "d" * 36
    assert {"config.yaml", "record.txt", "profiles/profiles.npz"} <= set(files(post))

    assert bad.info.status == "FAILED"
    assert bad.data.tags["outcome"] == "nan"
    assert bad.data.metrics["2-health/nonfinite"] == 1
    assert {f"events/step-000015-nonfinite/{name}" for name in ("report.md", "event.json", "profile.png")} <= set(
        files(bad)
    )
    for run in children:
        for key, points in history(uri, run).items():
            assert all(math.isfinite(value) and abs(value) < 1e300 for _, value, _ in points), key

    state = unpack(json.loads(experiment.tags[TAG + "depth-postnorm-dies-cpu"])["state"])
    assert len(client.search_runs([experiment.experiment_id], state["searchFilter"])) == 4
    assert TAG + "depth-postnorm-dies-cpu-cells" in experiment.tags
    assert experiment.tags["mlflow.note.content"].startswith("1 claim: 1 supported")


def test_pictures_are_for_one_seed_start_at_step_0_and_come_once(synced):
    runs, uri, *_ = synced
    found = everything(uri)
    heat = [name for name in files(found["L0012 post s0"]) if name.endswith(".png")]
    keys = sorted(name.split("+timestamp")[0] for name in heat)
    assert keys == [
        "images/3-grad~heat+step+0",
        "images/3-grad~profile+step+0",
        "images/3-grad~profile+step+20",
        "images/4-resid~heat+step+0",
    ]
    assert any("2-health~event+step+0" in name for name in files(found["L0024 post s0"]))
    assert not [name for name in files(found["L0012 deepnorm s1"]) if name.startswith("images")]
    before = {name: files(run) for name, run in found.items()}
    forget(runs)
    assert sync(runs, uri).pictures == 0
    assert {name: files(run) for name, run in everything(uri).items()} == before


def test_syncing_again_changes_nothing_with_and_without_memory(synced):
    runs, uri, *_ = synced
    first = {name: (run.info.run_id, history(uri, run), run.data.tags) for name, run in everything(uri).items()}
    again = sync(runs, uri)
    assert (again.ok, again.points, again.pictures) == (True, 0, 0)
    forget(runs)
    forgetful = sync(runs, uri)
    assert forgetful.ok
    assert forgetful.points > 0, "it had to send them again"
    last = {name: (run.info.run_id, history(uri, run), run.data.tags) for name, run in everything(uri).items()}
    assert last == first


def test_a_memory_of_another_database_is_not_believed(runs, new_store, tmp_path):
    run, uri, fresh = make_run(runs, steps=9), new_store(), new_store()
    sync(runs, uri)
    spool = (runs / run / "spool.jsonl").read_bytes()
    half = tmp_path / "half" / run
    half.mkdir(parents=True)
    (half / "spool.jsonl").write_bytes(b"".join(spool.splitlines(keepends=True)[:5]))
    sync(half.parent, fresh)  # the same run, half of it, under another id
    known = json.loads((runs / run / "sink.json").read_text())
    (runs / run / "sink.json").write_text(json.dumps({fresh: known[uri]}))
    assert sync(runs, fresh).points > 50
    (there,) = everything(fresh).values()
    assert len(history(fresh, there)["1-loss/train"]) == 10


def test_a_store_that_looked_too_early_does_not_make_a_run_twice(new_store):
    uri = new_store()
    client = client_of(uri)
    tags = {"normscale.kind": "run", "normscale.run": "r"}
    first, second = Store(client, uri, SyncReport(uri)), Store(client, uri, SyncReport(uri))
    place = first.experiment(None)
    assert first.find(place, "", "r") is None
    made = second.create(place, "name", 1, tags)
    assert first.create(place, "name", 1, tags).info.run_id == made.info.run_id
    client.create_run(place, start_time=2, tags=tags)  # a request that timed out, but was carried out
    assert Store(client, uri, SyncReport(uri)).find(place, "", "r").info.run_id == made.info.run_id
    assert len(client.search_runs([place])) == 1


def test_a_growing_run_is_completed_and_its_status_follows(runs, new_store):
    uri = new_store()
    with SpoolWriter(runs / "r", 1) as spool:
        spool.start(run_id="r", config={"model": {"scheme": "post", "M": 2}})
        spool.metrics(1, 1, {"loss_train": 3.0})
        assert sync(runs, uri, live=True).points == 2
        (run,) = everything(uri).values()
        assert (run.info.status, run.data.tags["outcome"]) == ("RUNNING", "running")
        spool.metrics(2, 2, {"loss_train": 2.0})
        assert sync(runs, uri, live=True).points == 2
    sync(runs, uri)
    (run,) = everything(uri).values()
    assert (run.info.status, run.data.tags["outcome"]) == ("KILLED", "interrupted")
    with SpoolWriter(runs / "r", 2) as spool:  # resumed from step 1: step 2 is made again, step 3 is new
        spool.start(run_id="r", from_step=1, config={"model": {"scheme": "post", "M": 2}})
        spool.metrics(2, 2, {"loss_train": 2.0})
        spool.metrics(3, 3, {"loss_train": 1.0})
        sync(runs, uri)
        (runs / "r" / "sink.json").unlink()
        spool.metrics(4, 4, {"loss_train": 0.5})
        spool.end("finished", 0, {"gap": 1.0})
    sync(runs, uri)
    (run,) = everything(uri).values()
    assert (run.info.status, run.data.tags["outcome"]) == ("FINISHED", "trained")
    assert [(step, value) for step, value, _ in history(uri, run)["1-loss/train"]] == [
        (1, 3.0),
        (2, 2.0),
        (3, 1.0),
        (4, 0.5),
    ]


def test_a_run_begun_anew_replaces_the_old_one(runs, new_store):
    uri = new_store()
    make_run(runs, run_id="r", steps=8, every=2)
    sync(runs, uri)
    make_run(runs, run_id="r", steps=4, every=2, attempt=2)
    sync(runs, uri)
    (run,) = everything(uri).values()
    assert max(step for step, *_ in history(uri, run)["1-loss/train"]) == 4


def test_eight_thousand_values_at_one_step_all_arrive(runs, new_store, monkeypatch):
    uri = new_store()
    names = [f"layer_{layer:04d}_{part}" for layer in range(1000) for part in "abcdefgh"]
    for name in names:
        quantity = records.Quantity(name, "1", "first", f"x/{name}", "")
        monkeypatch.setitem(records.QUANTITIES, name, quantity)
    with SpoolWriter(runs / "wide", 1) as spool:
        spool.start(run_id="wide")
        spool.metrics(7, 7, {name: float(index) for index, name in enumerate(names)})
    report = sync(runs, uri)
    assert report.ok
    (run,) = everything(uri).values()
    stored = {key: value for key, value in run.data.metrics.items() if key.startswith("x/")}
    assert stored == {f"x/{name}": float(index) for index, name in enumerate(names)}


def test_one_bad_piece_does_not_lose_the_others(runs, new_store, monkeypatch):
    uri = new_store()
    monkeypatch.setattr("mlflow.utils.validation.MAX_METRICS_PER_BATCH", 20)  # the limit is read, not known

    def register(name, key):
        monkeypatch.setitem(records.QUANTITIES, name, records.Quantity(name, "1", "first", key, ""))

    names = [f"k{index:02d}" for index in range(60)]
    for name in names:
        register(name, "not allowed: @=" if name == "k30" else f"x/{name}")
    with SpoolWriter(runs / "r", 1) as spool:
        spool.start(run_id="r")
        spool.metrics(1, 1, dict.fromkeys(names, 1.0))
    make_run(runs, "pre", steps=2)

    def stored():
        run = next(run for run in everything(uri).values() if run.data.tags["normscale.run"] == "r")
        return len(run.data.metrics)

    report = sync(runs, uri)
    assert len(report.failures) == 1
    assert "run r, values 21 to 40" in report.failures[0]
    assert "\n" not in str(report)
    assert stored() == 61 - 20
    assert len(everything(uri)) == 2, "the other run is there"
    register("k30", "x/k30")
    assert sync(runs, uri).ok, "the piece is sent again at the next sync"
    assert stored() == 61


def test_spoilt_files_are_reported_and_the_rest_is_stored(runs, new_store):
    uri = new_store()
    good = make_run(runs, "pre", steps=2)
    (runs / "claims").mkdir()
    (runs / "claims" / "x-cpu.json").write_text("{")
    (runs / "odd").mkdir()
    (runs / "odd" / "spool.jsonl").write_text('{"kind":"metrics","t":1,"attempt":1,"step":1}\n')
    (runs / "empty").mkdir()
    (runs / "empty" / "spool.jsonl").write_text("")
    (runs / "pipe").mkdir()
    os.mkfifo(runs / "pipe" / "spool.jsonl")
    claimed = make_run(runs, "deepnorm", steps=2)
    make_manifest(runs, [cell("odd"), cell(claimed, "deepnorm")])
    report = sync(runs, uri)
    assert len(report.failures) == 2
    assert "x-cpu.json: is not a claim manifest" in report.failures[0]
    assert "pipe/spool.jsonl" in report.failures[1]
    assert "not a regular file" in report.failures[1]
    assert {good, claimed, "odd", "empty"} <= {run.data.tags.get("normscale.run") for run in everything(uri).values()}


def test_two_sinks_at_once_make_one_run(runs, tmp_path, new_store):
    uri = new_store()
    make_claim(runs, tmp_path)
    with ThreadPoolExecutor(2) as pool:
        reports = list(pool.map(lambda _: sync(runs, uri), range(2)))
    assert all(report.ok for report in reports)
    assert len(everything(uri)) == 5
    assert len(client_of(uri).search_runs(["1"], max_results=100)) == 5


def test_a_run_in_two_claims_is_a_child_of_each_and_in_none_stands_alone(runs, new_store):
    uri = new_store()
    shared, alone = make_run(runs, "post", steps=2, every=1), make_run(runs, "pre", steps=2, every=1)
    make_manifest(runs, [cell(shared)])
    make_manifest(runs, [cell(shared)], profile="smoke")
    make_manifest(runs, [cell(shared)], id="update-bounded", family="signals")
    sync(runs, uri)
    client = client_of(uri)
    count = {
        experiment.name: len(client.search_runs([experiment.experiment_id]))
        for experiment in client.search_experiments()
    }
    assert {key: value for key, value in count.items() if value} == {
        "normscale-depth": 4,
        "normscale-signals": 2,
        "normscale-train": 1,
    }
    lone = everything(uri)[alone]
    assert "mlflow.parentRunId" not in lone.data.tags
    assert any(name.startswith("images/3-grad~heat") for name in files(lone))


def test_an_outer_run_becomes_the_parent_where_it_lives_in_this_store(runs, new_store, tmp_path):
    uri = new_store()
    client = client_of(uri)
    outer = client.create_run(client.create_experiment("mine", artifact_location=(tmp_path / "mine").as_uri()))
    inside = make_run(runs, "post", steps=2, outer_run=outer.info.run_id)
    elsewhere = make_run(runs, "pre", steps=2, outer_run="f" * 32)
    assert sync(runs, uri).ok
    found = everything(uri)
    assert found[inside].data.tags["mlflow.parentRunId"] == outer.info.run_id
    assert found[inside].info.experiment_id == outer.info.experiment_id
    assert "mlflow.parentRunId" not in found[elsewhere].data.tags


def test_a_later_verdict_reaches_parent_and_children(runs, new_store):
    uri = new_store()
    claim = make_manifest(runs, [cell(make_run(runs, steps=4))], verdict=VERDICT)
    judged = json.loads(claim.read_text())
    claim.write_text(json.dumps(judged | {"verdict": None}))
    sync(runs, uri, live=True)
    parent = everything(uri)["depth-postnorm-dies cpu"]
    assert (parent.info.status, parent.data.tags["verdict"]) == ("RUNNING", "pending")
    judged["cells"][0]["outcome"] = "diverged"
    claim.write_text(json.dumps(judged))
    sync(runs, uri)
    found = everything(uri)
    parent = found["depth-postnorm-dies cpu"]
    assert (parent.info.status, parent.data.tags["verdict"]) == ("FINISHED", "supported")
    assert found["L0012 post s0"].data.tags["outcome"] == "diverged"
    assert "verdict.json" in files(parent)


def test_only_the_named_runs_are_replayed(runs, new_store):
    uri = new_store()
    first, _ = make_run(runs, "post", steps=2), make_run(runs, "pre", steps=2)
    report = sync(runs, uri, only=[first, "nowhere"])
    assert list(everything(uri)) == [first]
    assert "nowhere" in report.failures[0]


def test_links_carry_the_mode_and_name_the_event(synced):
    runs, uri, _, before = synced
    assert before == []
    found = everything(uri)
    parent, bad = found["depth-postnorm-dies cpu"].info, found["L0024 post s0"].info
    base = f"http://h:1/#/experiments/{parent.experiment_id}/runs"
    assert links(runs, uri, "depth-postnorm-dies", "cpu", "h:1") == [
        "depth-postnorm-dies, profile cpu",
        f"claim    {base}/{parent.run_id}?workflowType=machine_learning",
        f"charts   {base}?workflowType=machine_learning&compareRunsMode=CHART&"
        "viewStateShareKey=depth-postnorm-dies-cpu",
        f"event    {base}/{bad.run_id}/artifacts/events/step-000015-nonfinite/report.md?workflowType=machine_learning",
    ]
    assert links(runs, uri, "depth-postnorm-dies", "gpu") == []


def test_nothing_listens_is_one_quick_line_and_a_later_sync_completes(runs, new_store):
    make_run(runs, steps=2)
    report = sync(runs, "http://127.0.0.1:9")
    assert len(report.failures) == 1
    assert report.seconds < 3
    assert "http://127.0.0.1:9 does not answer" in str(report)
    assert "normscale sync" in str(report)
    assert "\n" not in str(report)
    assert sync(runs, new_store()).ok


def test_places_that_are_no_store_are_one_line(runs, tmp_path, capsys):
    make_run(runs)
    (tmp_path / "text.db").write_text("not a database, but long enough to have a header")
    (tmp_path / "file").write_text("")
    for uri, words in {
        f"sqlite:///{tmp_path}/text.db": "is not an SQLite database",
        f"sqlite:///{tmp_path}/file/mlflow.db": "cannot write",
        f"sqlite:///{tmp_path}": "is not a file",
        "sqlite://": "tracking.uri",
        "mlruns": "tracking.uri",
        "http://": "tracking.uri",
    }.items():
        report = sync(runs, uri)
        assert len(report.failures) == 1, uri
        assert words in report.failures[0]
        assert "\n" not in report.failures[0]
    assert "not a folder of runs" in sync(tmp_path / "nowhere", f"sqlite:///{tmp_path}/m.db").failures[0]
    assert not (tmp_path / "m.db").exists(), "nothing is made for nothing"
    assert main(["--runs", str(runs), "--uri", "mlruns"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_following_ends_with_a_last_sync(runs, new_store):
    uri, asked = new_store(), []

    def stop():
        asked.append(len(asked))
        if len(asked) == 3:
            make_run(runs, steps=2)  # what comes after the last regular sync
        return len(asked) >= 3

    assert follow(runs, uri, 0.01, stop).runs == 1
    assert len(everything(uri)) == 1


def test_a_sync_that_takes_long_is_followed_by_a_long_pause(tmp_path, monkeypatch):
    clock, syncs = [0.0], []

    def slow(runs, uri, only=None, *, live=False):
        syncs.append(clock[0])
        clock[0] += 2.0
        return mlflow_sink.SyncReport(uri)

    monkeypatch.setattr(mlflow_sink, "sync", slow)
    monkeypatch.setattr(mlflow_sink.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(mlflow_sink.time, "sleep", lambda seconds: clock.__setitem__(0, clock[0] + seconds))
    follow(tmp_path, "u", 10.0, lambda: clock[0] > 100.0)
    assert syncs[1] - syncs[0] == pytest.approx(42.0, abs=0.2)  # 2 s of work, then 20 times as much rest
    assert len(syncs) == 4


def test_importing_the_sink_is_cheap():
    heavy = ("mlflow", "matplotlib", "torch")
    code = f"import sys, normscale.tracking.mlflow_sink; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_memory_that_cannot_be_read_is_no_memory(tmp_path):
    (tmp_path / "s").write_text("{")
    assert sink_state.load(tmp_path / "s", "u") == {}
    sink_state.save(tmp_path / "s", "u", {"a": 1})
    sink_state.save(tmp_path / "s", "v", {"b": 2})
    assert sink_state.load(tmp_path / "s", "u") == {"a": 1}
    sink_state.save(tmp_path / "no" / "s", "u", {"a": 1})
