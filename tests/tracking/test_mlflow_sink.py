import http.server
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from normscale.arguments import typed
from normscale.tracking import mlflow_artifacts as artifacts
from normscale.tracking import mlflow_sink, sink_state
from normscale.tracking import record as records
from normscale.tracking.mlflow_requests import Store, SyncReport
from normscale.tracking.mlflow_requests import pieces as split
from normscale.tracking.mlflow_sink import follow, links, main, sync
from normscale.tracking.mlflow_view import TAG, unpack
from normscale.tracking.reader import read_run
from normscale.tracking.spool import SpoolWriter
from tests.tracking.made import RUN_UP, VERDICT, cell, make_foreign, make_manifest, make_run
from tests.tracking.stored import client_of, everything, files, folder_of, history


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
    assert {"config.yaml", "record.txt", "data/metrics.parquet", "data/profiles.parquet"} <= set(files(post))

    assert bad.info.status == "FAILED"
    assert bad.data.tags["outcome"] == "nan"
    assert bad.data.metrics["2-health/nonfinite"] == 1
    wanted = {"report.md", "report.html", "event.json", "profile.png"}
    assert {f"events/step-000015-nonfinite/{name}" for name in wanted} <= set(files(bad))
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
    heat = [name for name in files(found["L0012 post s0"]) if name.startswith("images") and name.endswith(".png")]
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
        assert sync(runs, uri, live=True).points == 1
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


def test_no_point_of_a_step_that_was_made_again_is_sent_twice(runs, new_store):
    uri = new_store()
    with SpoolWriter(runs / "r", 1) as spool:
        spool.start(run_id="r")
        for step in (2, 3, 4):  # 3 stands out, as a spike does
            spool.metrics(step, step, {"loss_train": float(step)})
        spool.metrics(4, 4, {"loss_val": 1.0})
        spool.metrics(5, 5, {"loss_train": 5.0})
    assert sync(runs, uri).ok
    with SpoolWriter(runs / "r", 2) as spool:
        spool.start(run_id="r", from_step=2)
        for step, values in ((4, {"loss_train": 4.0}), (4, {"loss_val": 1.0}), (6, {"loss_train": 6.0})):
            spool.metrics(step, step, values)
            assert sync(runs, uri).ok
    with SpoolWriter(runs / "r", 3) as spool:
        spool.start(run_id="r", from_step=2)
        for step in (3, 4, 5, 7):
            spool.metrics(step, step, {"loss_train": float(step)})
            assert sync(runs, uri).ok
    (run,) = everything(uri).values()
    assert [step for step, *_ in history(uri, run)["1-loss/train"]] == [2, 3, 4, 5, 6, 7]
    assert [step for step, *_ in history(uri, run)["1-loss/val"]] == [4]


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
        register(name, "x/not allowed: @=" if name == "k30" else f"x/{name}")
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


def test_an_outer_run_that_could_not_be_asked_for_once_is_still_the_parent(runs, new_store, tmp_path, monkeypatch):
    uri = new_store()
    client = client_of(uri)
    outer = client.create_run(client.create_experiment("mine", artifact_location=(tmp_path / "mine").as_uri()))
    inside = make_run(runs, "post", steps=2, outer_run=outer.info.run_id)
    odd = make_run(runs, "pre", steps=2, outer_run="no id/of mlflow")
    get_run = MlflowClient.get_run

    def locked(self, run_id):
        if run_id == outer.info.run_id:
            raise MlflowException("(sqlite3.OperationalError) database is locked")
        return get_run(self, run_id)

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "get_run", locked)
        (failure,) = sync(runs, uri).failures
    assert failure.startswith(f"run {inside}: ")
    assert "is locked" in failure
    assert sync(runs, uri).ok
    found = [run for run in everything(uri).values() if run.data.tags.get("normscale.run") == inside]
    assert [run.info.experiment_id for run in found] == [outer.info.experiment_id]
    assert "mlflow.parentRunId" not in everything(uri)[odd].data.tags


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


def test_a_monitored_run_of_another_loop_is_shown_like_any(runs, new_store):
    uri = new_store()
    run = make_foreign(runs, bad_at=4, **{"val/acc@1": 0.5, "val/acc_1": 0.25, "nan": math.nan})
    report = sync(runs, uri)
    assert report.failures == []
    (found,) = everything(uri).values()
    assert (found.info.run_name, found.info.status) == (f"gpt {run}", "FINISHED")
    assert found.data.tags["arm"] == "GPT2LMHeadModel"
    assert found.data.tags["outcome"] == "finished"
    assert found.data.params["lr"] == "0.0003"
    theirs = {key: value for key, value in found.data.metrics.items() if key.startswith("user/")}
    assert sorted(theirs.values()) == [0.25, 0.5], "two names, two keys, and NaN is no value"
    flags = client_of(uri).get_metric_history(found.info.run_id, "2-health/nonfinite")
    assert [flag.step for flag in flags if flag.value] == [4], "the loop's own NaN is none of the loss or gradient"
    there = files(found)
    assert "figures/depth.png" in there
    assert "events/step-000004-nonfinite/report.html" in there
    assert any(name.startswith("images/3-grad~heat+step+0") for name in there)
    assert any(name.startswith("images/4-resid~heat+step+0") for name in there)
    experiment = client_of(uri).get_experiment(found.info.experiment_id)
    state = unpack(json.loads(experiment.tags[TAG + "runs"])["state"])
    assert len(client_of(uri).search_runs([experiment.experiment_id], state["searchFilter"])) == 1
    assert sync(runs, uri).points == 0


def test_everything_is_in_the_parquet_files(runs, new_store):
    from pyarrow import parquet

    uri = new_store()
    name = make_foreign(runs, bad_at=4, **{"acc@1": 0.5})
    with SpoolWriter(runs / "ours", 1) as spool:
        spool.start(run_id="ours", rows=["decoder.0000.self", "decoder.0000.ffn"])
        spool.ledger([{"step": 1, "reason": None, "lr": 0.5}, {"step": 2, "reason": "overflow", "lr": None}])
        spool.profile(2, "grad_norm", [1.0, math.inf])
        spool.profile(2, "angle", [0.25])
        spool.end("finished", 0, {"gap": 0.3})
    assert sync(runs, uri).ok
    tables = {}
    for run in everything(uri).values():
        folder = folder_of(run) / "data"
        own = {path.stem: parquet.read_table(path).to_pandas() for path in folder.glob("*.parquet")}
        tables[run.data.tags["normscale.run"]] = own
    metrics = tables[name]["metrics"].set_index(["name", "step"])["value"]
    assert metrics["user/acc@1", 3] == 0.5
    assert math.isnan(metrics["loss_train", 4])
    profiles = tables[name]["profiles"]
    assert len(profiles) == 2 * 8 * 6
    bad = profiles[(profiles.profile == "stream_rms") & (profiles.step == 4) & profiles.value.isna()]
    assert list(bad.name) == ["h.3", "h.4", "h.5"]
    ours = tables["ours"]["profiles"]
    assert [*map(tuple, ours[["profile", "row", "name", "value"]].to_numpy())] == [
        ("grad_norm", 0, "decoder.0000.self", 1.0),
        ("grad_norm", 1, "decoder.0000.ffn", math.inf),
        ("angle", 0, "decoder.0000", 0.25),
    ]
    ledger = tables["ours"]["ledger"]
    assert list(ledger.applied) == [True, False]
    assert list(ledger.reason.fillna("")) == ["", "overflow"]
    assert "ledger" not in tables[name]
    assert "events" not in tables["ours"]
    (event,) = tables[name]["events"].to_dict("records")
    assert (event["step"], event["event"], event["attempt"]) == (4, "nonfinite", 1)
    assert event["says"].startswith("NaN in the gradient of output of h.3.mlp.act (GELU)")
    assert event["time"].timestamp() * 1000 == read_run(runs / name).events[0]["t"]
    fields = json.loads(event["fields"])
    assert (fields["culprit"]["module"], fields["loss"], fields["run_up"]) == ("h.3.mlp.act", "NaN", RUN_UP)
    summary = tables[name]["summary"].set_index("name")
    assert summary.text["outcome"] == "finished"
    assert summary.value[["exit_code", "attempt", "steps", "bad_step"]].tolist() == [0, 1, 8, 4]
    assert math.isnan(summary.value["outcome"])


def long_run(folder, steps, until, bad_at=None, end=False, attempt=1, begins=0):
    """Writes an attempt at a run of `steps` that has come to step `until`, a record every 100 steps.

    Of another loop (None) nobody knows how many it will be.
    """
    config = {"model": {"M": 1}, "train": {"steps": steps}} if steps else {"monitor": {"every": 100}}
    with SpoolWriter(folder, attempt) as spool:
        spool.start(run_id=folder.name, from_step=begins, config=config, rows=["a", "b"])
        for step in range(begins, until + 1, 100):
            spool.metrics(step, step, {"loss_train": 3.0})
            spool.profile(step, "grad_norm", [1.0, 2.0])
        if bad_at is not None:
            spool.event(bad_at, "nonfinite", layer=1)
        if end:
            spool.end("finished", 0, {"gap": 0.5})


@pytest.mark.parametrize(
    ("steps", "until", "bad_at", "end", "heats"),
    [
        (1900, 1900, None, True, [0]),
        (2000, 900, None, False, [500]),
        (2000, 1500, 700, False, [500, 700, 1000, 1500]),
        (2000, 2000, 700, True, [0, 500, 700, 1000, 1500]),
        (8000, 100, None, False, []),
        (None, 1900, None, True, [0]),
        (None, 1900, None, False, []),
        (None, 2000, None, False, [1000, 2000]),
        (None, 9000, 5500, True, [0, 1000, 2000, 4000, 5500, 8000]),
    ],
)
def test_a_long_run_has_heat_maps_on_its_way(steps, until, bad_at, end, heats, runs):
    long_run(runs / "r", steps, until, bad_at, end)
    wanted = artifacts.wanted_pictures(read_run(runs / "r"), alive=not end)
    assert sorted(step for key, step in wanted if key == "3-grad/heat") == heats


def test_heat_maps_of_a_run_that_goes_on_are_drawn_once_and_those_of_its_end_later(runs, new_store):
    uri = new_store()
    long_run(runs / "r", 2000, 1100)
    with SpoolWriter(runs / "r", 1):  # it goes on
        assert sync(runs, uri, live=True).pictures == 2
        assert sync(runs, uri, live=True).pictures == 0
    long_run(runs / "r", 2000, 2000, end=True, attempt=2, begins=1100)
    assert sync(runs, uri).pictures == 4, "at three quarters, at the end, and the first and the last profile"
    (run,) = everything(uri).values()
    drawn = sorted(name.split("+timestamp")[0] for name in files(run) if name.endswith(".png") and "images" in name)
    assert drawn == [
        *(f"images/3-grad~heat+step+{step}" for step in (0, 1000, 1500, 500)),
        *(f"images/3-grad~profile+step+{step}" for step in (0, 2000)),
    ]


class Slow(http.server.BaseHTTPRequestHandler):
    """Answers that it is healthy, and no other question in time."""

    asked = 0

    def do_GET(self):
        if self.path == "/health":
            self.send_response(200)
            self.end_headers()
        else:
            Slow.asked += 1
            time.sleep(3)

    do_POST = do_GET

    def log_message(self, *_):
        pass


def test_a_server_that_is_too_slow_is_not_asked_for_every_run(runs, new_store, monkeypatch):
    for number in range(20):
        with SpoolWriter(runs / f"r{number}", 1) as spool:
            spool.start(run_id=f"r{number}")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow) as server:
        server.daemon_threads, server.block_on_close = True, False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        report = sync(runs, f"http://127.0.0.1:{server.server_port}")
        server.shutdown()
    assert len(report.failures) == 1
    assert "is too slow" in report.failures[0]
    assert "\n" not in report.failures[0]
    assert Slow.asked <= 2
    assert sync(runs, new_store()).ok


@pytest.mark.parametrize(
    ("count", "size", "pieces"), [(1000, 10**6, 5), (1000, 10**7, 3), (2, 10**6, 1250), (5, 1, 2500)]
)
def test_requests_are_split_by_number_and_by_size(count, size, pieces):
    items = [("ä" * 240,) for _ in range(2500)]  # six bytes a letter in JSON
    found = list(split(items, count, size, lambda item: item))
    assert [item for piece in found for item in piece] == items
    assert len(found) == pieces
    assert all(len(piece) <= count for piece in found)
    assert all(len(json.dumps(piece)) < size for piece in found if len(piece) > 1)


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
        f"event    {base}/{bad.run_id}/artifacts/events/step-000015-nonfinite/report.html"
        "?workflowType=machine_learning",
    ]
    assert links(runs, uri, "depth-postnorm-dies", "gpu") == []


def test_nothing_listens_is_one_quick_line_and_a_later_sync_completes(runs, new_store):
    make_run(runs, steps=2)
    report = sync(runs, "http://127.0.0.1:9")
    assert len(report.failures) == 1
    assert report.seconds < 3
    assert "http://127.0.0.1:9 does not answer" in str(report)
    assert typed("sync") in str(report)
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
