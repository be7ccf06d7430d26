import dataclasses
import math

import pytest

from normscale.claims.state import state_of
from normscale.tracking import mlflow_layout as layout
from normscale.tracking import mlflow_pages as pages
from normscale.tracking import mlflow_view as views
from normscale.tracking.draw import Look
from normscale.tracking.manifest import read_manifest
from normscale.tracking.mlflow_artifacts import event_folders
from normscale.tracking.reader import is_foreign, read_run
from normscale.tracking.show import show
from normscale.tracking.spool import SpoolWriter
from tests.claims import synthetic
from tests.tracking.made import VERDICT, cell, make_foreign, make_manifest, make_run


def test_arms_have_fixed_colours():
    found = layout.colours(["post", "keel", "pre", "other", "deepnorm"])
    assert (found["post"], found["pre"], found["deepnorm"]) == ("#d62728", "#2ca02c", "#1f77b4")
    assert len(set(found.values())) == 5
    assert layout.colour_alone("keel") == layout.colour_alone("keel")
    assert layout.colour_alone("post") == "#d62728"


def test_arms_of_one_scheme_have_shades_of_its_colour():
    arms = ["post-nowarmup", "post", "weights-sgd", "weights-adam", "post-sgd", "deepnorm-sgd"]
    found = layout.colours(arms)
    assert set(found) == set(arms)
    assert (found["post"], found["post-nowarmup"]) == ("#d62728", "#e46f70")
    assert found["deepnorm-sgd"] == "#1f77b4"
    assert len(set(found.values())) == len(arms)
    assert all(len(colour) == 7 for colour in found.values())
    assert layout.colour_alone("post-x") == "#d62728"


def test_learning_rates_are_said_shortly():
    assert [layout.short_lr(lr) for lr in (1e-3, 3e-4, 3.3e-4, 0.5, 10.0)] == ["1e-3", "3e-4", "3.3e-4", "5e-1", "1e1"]


def test_names_are_cell_and_seed_and_unique(runs):
    cells = [
        cell("a"),
        cell("b", seed=1),
        cell("c", role="low-lr", lr=3e-4),
        cell("d", role="long"),
        cell("e", lr=2e-3),
        cell("f", lr=2e-3),
    ]
    names = layout.child_names(read_manifest(make_manifest(runs, cells)))
    assert names["a"] == "L0012 post s0"
    assert names["b"] == "L0012 post s1"
    assert names["c"] == "L0012 post s0 lr3e-4"
    assert names["d"] == "L0012 post s0 long"
    assert names["e"] == "L0012 post s0 lr2e-3"
    assert names["f"] == "L0012 post s0 lr2e-3 (2)"


def test_seeds_are_grouped_within_one_role():
    from dataclasses import replace

    assert layout.cell_tag(_cell()) == "L0012 pre"
    assert layout.cell_tag(replace(_cell(), role="low-lr", lr=3e-4)) == "L0012 pre lr3e-4"
    assert layout.cell_tag(replace(_cell(), cell="L0012 pre long", role="long")) == "L0012 pre long"


def test_parameters_come_in_the_order_people_sort_by(runs):
    record = read_run(runs / make_run(runs, "pre", 6))
    found = layout.params(record, 6)
    wanted = ["scheme", "layers", "seed", "norm", "dtype", "lr", "warmup", "d_model", "eps", "batch_tokens"]
    assert list(found)[:10] == wanted
    assert found["layers"] == "6"
    assert found["batch_tokens"] == "512"
    assert found["lr"] == "0.001"
    assert layout.params(record, None)["layers"] == "6"


def test_points_leave_out_what_is_not_finite_and_flag_its_step(runs):
    record = read_run(runs / make_run(runs, steps=6, every=1, nan_at=3, trains=False))
    points = layout.points(record)
    assert all(math.isfinite(point.value) for point in points)
    flags = {point.step: point.value for point in points if point.key == "2-health/nonfinite"}
    assert flags == {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0}
    losses = [point.step for point in points if point.key == "1-loss/train"]
    assert losses == [0, 1, 2]
    keys = list(dict.fromkeys(point.key for point in points))
    assert keys[0] == "0-end/gslope", "what the tables show is logged first; the gap was NaN and is left out"
    assert keys == sorted(keys, key=lambda key: key.split("/")[0])
    ends = {point.key: (point.value, point.step) for point in points if point.key.startswith("0-end/")}
    assert ends["0-end/gslope"] == (2.346, 0)
    assert ends["0-end/badstep"] == (3.0, 0)
    assert "0-end/gap" not in ends


def test_places_that_are_not_there_have_no_chart_and_memory_is_in_megabytes(runs):
    record = read_run(runs / make_run(runs, steps=4, every=1))
    record.end["summary"] |= {"peak_memory_bytes": 412_345_678}
    ends = {point.key: point.value for point in layout.points(record) if point.key.startswith("0-end/")}
    assert record.summary["bad_step"] == record.summary["bad_layer"] == -1
    assert not {"0-end/badstep", "0-end/badlayer"} & ends.keys()
    assert ends["0-end/mem_MB"] == 412.3


def test_a_flag_of_the_loop_counts_without_any_odd_value(runs, tmp_path):
    record = read_run(runs / make_run(runs, steps=4, every=1))
    series = record.series["nonfinite"]
    record.series["nonfinite"] = dataclasses.replace(series, values=[0.0, 0.0, 1.0, 0.0, 0.0])
    flags = [point.value for point in layout.points(record) if point.key == "2-health/nonfinite"]
    assert flags == [0.0, 0.0, 1.0, 0.0, 0.0]


def test_a_loops_own_number_that_is_not_finite_raises_no_flag(runs):
    record = read_run(runs / make_foreign(runs, steps=3, bad_at=2, **{"val/loss": math.nan}))
    points = layout.points(record)
    assert [point.value for point in points if point.key == "2-health/nonfinite"] == [0.0, 1.0, 0.0]
    assert "user/val/loss" not in {point.key for point in points}
    record.end["outcome"] = "nan"
    record.end["summary"]["bad_step"] = 1
    record.events.clear()
    del record.series["loss_train"]
    assert pages.run_page(record, "nan", "7", "R", {}).startswith("**Non-finite at step 1**")


def test_outcomes_and_status(runs):
    trained = read_run(runs / make_run(runs, "pre"))
    plateau = read_run(runs / make_run(runs, "post", trains=False, steps=300))
    bad = read_run(runs / make_run(runs, "post", 24, nan_at=5))
    open_run = read_run(runs / make_run(runs, "post", 48, end=False))
    assert [layout.outcome(run, None, False) for run in (trained, plateau, bad)] == ["trained", "plateau", "nan"]
    assert layout.outcome(open_run, None, True) == "running"
    assert layout.outcome(open_run, None, False) == "interrupted"
    assert [layout.status(run, False) for run in (trained, plateau, bad, open_run)] == [
        "FINISHED",
        "FINISHED",
        "FAILED",
        "KILLED",
    ]
    assert layout.status(open_run, True) == "RUNNING"
    judged = dataclasses.replace(_cell(), outcome="plateau")
    assert layout.outcome(trained, judged, False) == "plateau", "the judge's word wins"
    for gap, word in (
        (0.2, "trained"),
        (1.0 - 0.8, "trained"),  # 0.2 but for rounding
        (0.19999, "plateau"),
        (-0.19999, "plateau"),
        (-0.2, "plateau"),  # it ended below its start: it has only not got far
        (float("nan"), "diverged"),
    ):
        trained.end["summary"]["gap"] = gap
        assert layout.outcome(trained, None, False) == word, gap
    series = trained.series["loss_val"]
    trained.series["loss_val"] = dataclasses.replace(series, values=[3.0] * (len(series.values) - 1) + [3.5])
    trained.end["summary"]["gap"] = -0.5
    assert layout.outcome(trained, None, False) == "diverged"


def test_the_judge_and_the_window_say_trained_from_the_same_gap_on():
    for gap in (0.2, 1.0 - 0.8, 0.2 - 1e-12, 0.2 - 1e-6):
        made = synthetic.record(gap)
        made.end["summary"]["gap"] = gap
        judged = state_of(made).label
        assert (layout.outcome(made, None, False) == "trained") == (judged == "trained"), gap


def _cell():
    from normscale.tracking.manifest import Cell

    return Cell("r", "pre", "L0012 pre", 12, 0, 1e-3)


def test_pictures_go_to_main_runs_of_one_seed_and_at_most_ten(runs):
    few = [cell("a"), cell("b", seed=1), cell("c", role="low-lr"), cell("d", "pre")]
    assert layout.pictured(read_manifest(make_manifest(runs, few))) == ["a", "d"]
    many = [
        cell(f"{arm}{depth}", arm, depth) for depth in (2, 6, 12, 24, 48, 100) for arm in ("post", "pre", "deepnorm")
    ]
    chosen = layout.pictured(read_manifest(make_manifest(runs, many)))
    assert len(chosen) == 9
    assert {"post2", "pre2", "deepnorm2", "post100", "pre100", "deepnorm100"} <= set(chosen)
    wide = [cell(f"arm{number}", f"arm{number}") for number in range(14)]
    assert len(layout.pictured(read_manifest(make_manifest(runs, wide)))) == 10


def claim_page(runs, verdict):
    made = {
        "p0": make_run(runs, "post", 12, 0, trains=False, steps=300),
        "p1": make_run(runs, "post", 12, 1, nan_at=5),
        "d0": make_run(runs, "deepnorm", 12, 0, steps=300),
    }
    cells = [cell(made["p0"]), cell(made["p1"], seed=1), cell(made["d0"], "deepnorm"), cell("missing", "deepnorm", 48)]
    manifest = read_manifest(
        make_manifest(runs, cells, verdict=verdict, figures=["/x/fig one.png"], report="/x/r.html")
    )
    records = {run: read_run(runs / run) for run in made.values()}
    words = {run: layout.outcome(record, None, False) for run, record in records.items()}
    children = {run: (f"name of {run}", f"id-{run}") for run in records}
    return made, pages.claim_page(manifest, "7", "PARENT", records, words, children)


def test_the_front_page_gives_verdict_and_links_in_its_first_two_lines(runs):
    made, page = claim_page(runs, VERDICT)
    first, second, *_ = page.split("\n")
    assert first == f"**SUPPORTED** - {VERDICT['headline'].removeprefix('SUPPORTED - ')}"
    assert first.count("SUPPORTED") == 1
    view = "#/experiments/7/runs?workflowType=machine_learning&compareRunsMode=CHART"
    view += "&viewStateShareKey=depth-postnorm-dies-cpu"
    assert f"[Charts of all 4 runs]({view})" in second
    assert "(#/experiments/7/runs/PARENT/artifacts/report.html?workflowType=machine_learning)" in second
    assert "| gap, nats&emsp; | L0012&emsp; | L0048&emsp; |" in page
    post = next(line for line in page.split("\n") if line.startswith("| post |"))
    assert "**" in post
    assert "(1 nan)" in post
    assert "e+308" not in page
    deep = next(line for line in page.split("\n") if line.startswith("| deepnorm |"))
    assert "**" not in deep
    assert deep.endswith("| - |")
    assert "![](get-artifact?path=figures/fig%20one.png&run_uuid=PARENT)" in page
    assert f"id-{made['p1']}?workflowType=machine_learning) (nan)" in page
    assert "| gap of post at 48 layers | 0.0213 | 0.0101 .. 0.0302 | nats |" in page
    assert page.count("workflowType=machine_learning") == page.count("#/experiments")


@pytest.mark.parametrize(
    ("word", "shown"), [("stuck", "**"), ("undecided", "(1 undecided)"), ("measured", "(1 measured)")]
)
def test_every_word_of_the_judge_shows_in_the_table(runs, word, shown):
    run = make_run(runs, "post", 12, 0, steps=30)
    manifest = read_manifest(make_manifest(runs, [cell(run)]))
    page = pages.claim_page(manifest, "7", "P", {run: read_run(runs / run)}, {run: word}, {run: ("n", "i")})
    assert shown in next(line for line in page.split("\n") if line.startswith("| post |"))


def test_a_claim_without_verdict_says_how_far_it_is(runs):
    assert claim_page(runs, None)[1].startswith("**PENDING** - Post-Norm stops training")
    assert "(3 of 4 runs ended)" in claim_page(runs, None)[1].split("\n")[0]


def test_the_page_of_a_failed_run_names_step_layer_and_kind(runs):
    record = read_run(runs / make_run(runs, "post", 12, nan_at=5))
    page = pages.run_page(record, "nan", "7", "R", {0: "events/step-000005-nonfinite"})
    first, second, *_ = page.split("\n")
    assert first.startswith("**+Inf/NaN at step 5** in decoder.0004.self (9 of 24 over depth), 5 steps applied")
    assert second.startswith(
        "[report of step 5](#/experiments/7/runs/R/artifacts/events/step-000005-nonfinite/report.html?"
    )
    assert page.count("workflowType=machine_learning") == page.count("#/experiments")
    assert "![](get-artifact?path=events/step-000005-nonfinite/profile.png&run_uuid=R)" in page


def test_a_run_that_stopped_at_no_step_that_is_known_names_none(runs):
    """As earlier versions ended a run whose loss scale was still falling."""
    with SpoolWriter(runs / "old", 1) as spool:
        spool.start(run_id="old")
        spool.end("nan", 3, {"bad_step": -1, "bad_layer": -1, "steps": 4, "applied": 0})
    record = read_run(runs / "old")
    assert event_folders(record) == {}
    first = pages.run_page(record, "nan", "7", "R", {}).split("\n")[0]
    assert first == "**Non-finite, at no step that is known**, 0 steps applied before it."


def test_the_first_line_of_a_run_names_the_culprit_and_its_events_follow(runs):
    record = read_run(runs / make_foreign(runs, bad_at=4))
    record.end["outcome"] = "nan"
    with SpoolWriter(runs / "other", 1) as spool:
        for step in range(20):
            spool.event(step, "stalled", in_a_row=step, reasons="overflow | scale")
    record.events.extend(read_run(runs / "other").events)
    page = pages.run_page(record, "nan", "7", "R", {0: "events/a", 3: "events/b"}, "claim-cpu")
    first, second, *rest = page.split("\n")
    assert first.startswith(
        "**NaN at step 4** in the gradient of output of h.3.mlp.act (GELU), backward, micro-batch 2"
    )
    assert "viewStateShareKey=claim-cpu" in second
    assert "| model | GPT2LMHeadModel |" in rest
    assert "| blocks | 6 |" in rest
    told = [line for line in rest if "no step was applied" in line]
    assert len(told) == 11
    assert "artifacts/events/b/report.html" in told[2]
    assert all(line.replace("\\|", "").count("|") == 4 for line in told)
    assert rest[-3:] == ["and 9 more events", "", "![](get-artifact?path=events/a/profile.png&run_uuid=R)"]


def test_a_run_of_another_loop_has_an_outcome_parameters_and_a_page(runs):
    record = read_run(runs / make_foreign(runs))
    assert is_foreign(record)
    assert (layout.outcome(record, None, False), layout.status(record, False)) == ("finished", "FINISHED")
    found = layout.params(record, None)
    assert list(found)[:5] == ["model", "layers", "params", "lr", "data"]
    assert (found["model"], found["layers"], found["lr"]) == ("GPT2LMHeadModel", "6", "0.0003")
    assert found["monitor.every"] == "1"
    record.start["config"]["loop"] |= {"betas": [0.9, 0.95], "adam": {"names": ["a", "b"], "none": None, "no": []}}
    found = layout.params(record, None)
    assert (found["betas"], found["adam.names"], found["adam.no"]) == ("[0.9, 0.95]", "[a, b]", "[]")
    assert "adam.none" not in found
    shown = " ".join(" ".join(show(record, False, Look(200, False, False))).split())
    assert "lr=0.0003, data=mine, betas=[0.9, 0.95], adam.names=[a, b]" in shown
    page = pages.run_page(record, "finished", "7", "R", {})
    assert page.startswith("**finished** - training loss 4.2 after 8 steps.\n")
    skipped = read_run(runs / make_foreign(runs, "skipped", bad_at=4))
    page = pages.run_page(skipped, "finished", "7", "R", {})
    assert page.startswith("**finished** - training loss 4.2 after 8 steps. Step 4 was not finite: NaN in the gradient")
    with SpoolWriter(runs / "bare", 1) as spool:
        spool.start(run_id="bare")
        spool.end("finished", 0, {})
    bare = read_run(runs / "bare")
    assert layout.params(bare, None) == {}
    assert layout.outcome(bare, None, False) == "finished"
    assert pages.run_page(bare, "finished", "7", "R", {}).startswith("**finished**")


NASTY = [
    *(
        "a[0]",
        "a(0)",
        "a 0 ",
        "val/acc@1",
        "val/acc@5",
        "val/acc_1",
        "..",
        "../x",
        "a//b",
        "a/_/b",
        "/a",
        "a/",
        "",
        " ",
    ),
    *("ä", "é\u0301", "\u202e", "\n", "\0", "a:b", "a_b", "x" * 250, "x" * 251, "x" * 500, "\ud800", "a-0123abcd", "."),
]


def test_names_of_others_become_keys_that_mlflow_takes_and_never_the_same():
    from mlflow.utils.validation import MAX_ENTITY_KEY_LENGTH, _validate_metric_name

    names = [f"user/{name}" for name in NASTY] + NASTY
    keys = [layout.key_of(name, MAX_ENTITY_KEY_LENGTH) for name in names]
    for key in keys:
        _validate_metric_name(key)
        assert len(key) <= MAX_ENTITY_KEY_LENGTH
    assert len(set(keys)) == len(names)
    assert layout.key_of("user/val/loss") == "user/val/loss"


def test_sections_come_in_order_whatever_the_order_of_registration(runs):
    record = read_run(runs / make_run(runs, steps=2, every=1))
    for name in ("adam_eps_share", "eps_share_max", "attn_logit_max", "headroom", "update_rel_p50", "stream_growth"):
        record.series[name] = record.series["lr"]
    sections = list(dict.fromkeys(point.key.partition("/")[0] for point in layout.points(record)))
    assert sections == sorted(sections)
    assert sections[-3:] == ["7-adam", "7-eps", "8-opt"]


def test_the_list_of_claims_starts_with_the_count():
    page = pages.family_page([("a (cpu)", "supported", "x | y", "7", "A"), ("b (cpu)", "refuted", "z", "7", "B")])
    assert page.split("\n")[0] == "2 claims: 1 supported, 1 refuted"
    assert "x \\| y" in page
    assert "(#/experiments/7/runs/A?workflowType=machine_learning)" in page


def test_the_view_holds_this_claim_and_profile_only_and_unpacks(runs):
    manifest = read_manifest(make_manifest(runs, [cell("a")]))
    state = views.view(manifest)
    for part in ("claim = 'depth-postnorm-dies'", "profile = 'cpu'", "kind = 'arm'"):
        assert f"tags.normscale.{part}" in state["searchFilter"]
    assert state["orderByKey"] == "tags.`mlflow.runName`"
    assert state["runsHiddenMode"] == "SHOWALL"
    sections = {section["uuid"] for section in state["compareRunSections"]}
    assert {chart["metricSectionId"] for chart in state["compareRunCharts"]} == sections
    assert len({chart["uuid"] for chart in state["compareRunCharts"]}) == len(state["compareRunCharts"])
    assert views.unpack(views.pack(state)) == state
    assert len(views.pack(state)) < 5000
    names = [section["name"] for section in state["compareRunSections"]]
    assert names[:5] == ["1 Verdict", "2 Loss", "3 Health", "4 Gradients over depth", "5 Residual stream"]
    assert names[5:] == ["6 Update", "7 Attention", "8 Adam and epsilon"]
    alone = views.view(None)
    assert alone["searchFilter"] == "tags.normscale.kind = 'run'"
    assert [section["name"] for section in alone["compareRunSections"]][:2] == ["1 End", "2 Loss"]
    assert alone["compareRunCharts"][0] | {"uuid": 0} == {
        "type": "BAR",
        "metricKey": "0-end/gap",
        "runsCountToCompare": 20,
        "metricSectionId": "s0",
        "uuid": 0,
        "isGenerated": False,
        "deleted": False,
    }
    grouped = views.view(manifest, by_cell=True)
    assert grouped["groupBy"]["groupByKeys"] == [{"mode": "tag", "groupByData": "cell"}]
    assert "IMAGE" not in {chart["type"] for chart in grouped["compareRunCharts"]}


def test_every_chart_shows_a_key_that_is_recorded(runs):
    from normscale.tracking.record import QUANTITIES

    recorded = {quantity.mlflow for quantity in QUANTITIES.values()}
    charts = views.view(read_manifest(make_manifest(runs, [cell("a")])))["compareRunCharts"]
    for chart in charts:
        key = chart.get("metricKey") or chart.get("yaxis", {}).get("key")
        assert key in recorded or chart["imageKeys"][0] in ("3-grad/heat", "4-resid/heat")
    shown = {chart.get("metricKey") for chart in charts}
    assert {"2-health/headroom", "4-resid/growth", "5-update/rel_p50", "6-attn/logit_max", "7-adam/eps_share"} <= shown


def test_a_name_that_tells_its_role_is_not_told_it_again():
    from dataclasses import replace

    for role, name in (("low-lr", "L0024 post lr/3"), ("long", "L0024 post x5 steps")):
        assert layout.cell_tag(replace(_cell(), cell=name, role=role, lr=3e-4)) == name


def test_the_update_at_the_end_is_counted_in_learning_rates(tmp_path):
    with SpoolWriter(tmp_path, 1) as spool:
        spool.start(run_id="r", config={"train": {"optim": {"lr": 1e-3}}})
        spool.metrics(1, 1, {"update": 5.0})
        spool.metrics(10, 10, {"update": 0.1})
        spool.end("finished", 0, {"gap": 0.5})
    found = {point.key: point.value for point in layout.points(read_run(tmp_path))}
    assert found["0-end/update"] == 2.0
