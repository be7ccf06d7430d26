"""What is said of an event: the sentence, the facts, the tables, on a terminal, in Markdown and in HTML."""

from html.parser import HTMLParser
from pathlib import Path

import pytest

from normscale.tracking.draw import Look
from normscale.tracking.event_page import html, markdown
from normscale.tracking.event_report import culprit_sentence, is_bad, report_of, row_of, sentence
from normscale.tracking.mlflow_artifacts import bad_events, event_folders, event_picture_says
from normscale.tracking.mlflow_pages import run_page
from normscale.tracking.reader import read_run
from normscale.tracking.show import show
from tests.tracking.made import CULPRIT, make_foreign, make_run


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {},
            "NaN in the gradient of output of h.3.mlp.act (GELU), backward, micro-batch 2, rank 1: 6 of 4096 values",
        ),
        (
            {"phase": "forward", "tensor": "output[1]", "rank": 0, "kind": "+Inf"},
            "+Inf in output[1] of h.3.mlp.act (GELU), forward, micro-batch 2: 6 of 4096 values",
        ),
        (
            {"phase": "data", "module": "", "type": "GPT", "tensor": "input[0]", "rank": 0},
            "NaN in input[0] of the model (GPT), in the batch, before any module, micro-batch 2: 6 of 4096 values",
        ),
        (
            {"phase": "parameter", "tensor": "weight", "rank": 0, "micro_batch": 0},
            "NaN in the weight of h.3.mlp.act (GELU), in a parameter, before the pass, micro-batch 0: 6 of 4096 values",
        ),
        (
            {"phase": "loss", "module": "(loss)", "tensor": "output", "rank": 0, "of": 0},
            "NaN in the loss, micro-batch 2",
        ),
        (
            {"phase": "norm", "module": "", "tensor": "gradient norm", "kind": "+Inf", "micro_batch": -1, "rank": 0},
            "+Inf in the norm of the gradient, whose every entry is finite",
        ),
        (
            {"phase": "reduction", "tensor": "gradient of weight", "micro_batch": -1, "rank": 0, "of": 0},
            "NaN in the gradient of weight of h.3.mlp.act (GELU), when the ranks' gradients were summed",
        ),
    ],
)
def test_a_culprit_is_one_sentence(changes: dict, says: str) -> None:
    assert culprit_sentence(CULPRIT | changes) == says


def test_a_module_whose_own_code_is_to_blame_is_told_from_its_tensors() -> None:
    own = {"phase": "forward", "tensor": "input[0] of 'proj'", "beside": "h.3.mlp.proj", "rank": 0, "of": 0}
    assert culprit_sentence(CULPRIT | own) == (
        "NaN from h.3.mlp.act (GELU)'s own operations, seen in input[0] of 'proj', forward, micro-batch 2"
    )


@pytest.mark.parametrize(
    ("event", "says"),
    [
        (
            {"event": "stalled", "in_a_row": 5, "reasons": "3 overflow, 2 gradient"},
            "no step was applied 5 times in a row: 3 overflow, 2 gradient",
        ),
        (
            {"event": "stalled", "in_a_row": 5, "reasons": {"overflow": 3}},
            "no step was applied 5 times in a row: overflow 3",
        ),
        ({"event": "ledger", "says": "the rate moved"}, "ledger: the rate moved"),
        (
            {"event": "probe_off", "probe": "eps", "reason": "begin: ValueError"},
            "the probe eps was switched off (begin: ValueError); training went on without it",
        ),
        ({"event": "records_lost", "lost": 7, "reason": "No space"}, "7 records could not be written (No space)"),
        (
            {"event": "spike", "of": "grad_norm", "value": 8.5, "sigmas": 7.25},
            "spike of the gradient norm: 8.5, 7.25 deviations off",
        ),
        (
            {"event": "loss_scale", "before": 65536.0, "after": 32768.0, "reason": "overflow", "found_in": "gradient"},
            "loss scale 65536 to 32768 (overflow, in the gradient)",
        ),
        (
            {"event": "loss_nonfinite", "count": 3, "first_step": 42, "says": "a loss was not finite"},
            "a loss was not finite (3 such losses, first at step 42)",
        ),
        ({"event": "of a later version", "x": 1}, "of a later version x=1"),
        ({"event": "nonfinite", "layer": 1, "fault": "+Inf"}, "+Inf in b (2 of 2 over depth)"),
        ({"event": "nonfinite", "layer": -1, "fault": "loss"}, "the loss was not finite"),
        ({"event": "nan"}, "loss or gradient not finite"),
    ],
)
def test_every_event_is_one_sentence(event: dict, says: str) -> None:
    assert sentence(event, ["a", "b"]) == says


def test_the_row_of_an_event_is_its_layer_or_the_row_that_holds_its_module() -> None:
    rows = ["h.1", "h.10", "h.1.deep"]
    assert row_of({"layer": 1}, rows) == 1
    assert row_of({"layer": 9}, rows) is None
    for module, row in (("h.10.mlp", 1), ("h.1", 0), ("h.1.deep.x", 2), ("h.100", None), ("", None)):
        assert row_of({"layer": -1, "culprit": {"module": module}}, rows) == row
    assert row_of({}, rows) is None


def test_the_report_of_a_bad_value_tells_all_that_is_known(tmp_path: Path) -> None:
    record = read_run(tmp_path / make_foreign(tmp_path, bad_at=4))
    report = report_of(record, record.events[0])
    assert report.says == f"Step 4: {culprit_sentence(CULPRIT)}"
    facts = dict(report.facts)
    for key, says in {
        "micro-batch": "2 (the first is 0)",
        "pass": "backward",
        "module": "h.3.mlp.act",
        "class": "GELU",
        "tensor": "gradient of output",
        "counts": "5 NaN, 1 +Inf of 4096 values",
        "rank": "1",
        "host": "node7",
        "device": "cuda:1",
        "note": "in its own operations, between 'ln' and 'proj'",
        "place": "h.3 (4 of 6 over depth)",
        "loss": "NaN",
        "policy": "skip: the step was not applied and training went on (2 in a row)",
        "reason": "non-finite loss",
    }.items():
        assert facts[key] == says, key
    assert "it came again" in facts["found by"]
    run_up, handed, values = report.tables
    assert list(run_up.head) == ["step", "1", "2", "3"]
    assert run_up.rows == [["stream_rms", "1.5", "3", "4.5"], ["stream_absmax", "10", "100", "1000"]]
    assert [row[0] for row in handed.rows] == CULPRIT["propagators"]
    assert values.rows == [("loss_train", "NaN")]
    titles = [part.title for part in report.parts]
    assert titles[0].startswith("Run-up")
    assert titles[1] == "What is known of it"
    assert titles[-1] == "How it was found"
    assert [key for key, _ in report.parts[1].rows][:3] == ["step", "place", "pass"]
    assert {fact for part in (report.parts[1], report.parts[-1]) for fact in part.rows} == set(report.facts)
    clean = dict(report_of(record, record.events[0] | {"culprit": CULPRIT | {"reproduced": False}}).facts)
    assert "no replay showed it again" in clean["found by"]


def test_parameters_are_listed_with_how_many_there_are(tmp_path: Path) -> None:
    record = read_run(tmp_path / make_run(tmp_path, nan_at=5))
    entries = [{"name": f"p{i}", "kind": "NaN", "nan": i, "pos_inf": 0, "neg_inf": 2} for i in range(20)]
    event = record.events[0] | {"parameters": entries, "parameters_bad": 31, "policy": "stop"}
    table = next(table for table in report_of(record, event).tables if "(20 of 31 shown)" in table.title)
    assert table.rows[3] == ["p3", "NaN", "3", "0", "2"]
    assert "weights and optimizer are as before it" in dict(report_of(record, event).facts)["policy"]


def test_an_event_of_an_earlier_version_still_has_a_report(tmp_path: Path) -> None:
    record = read_run(tmp_path / make_run(tmp_path, "post", 12, nan_at=5))
    report = report_of(record, record.events[0])
    assert report.says == "Step 5: NaN in decoder.0004.self (9 of 24 over depth)"
    assert dict(report.facts)["module"] == "decoder.0004.self"  # a field that nobody knows now is shown as it is
    text = markdown(report, record.run_id)
    assert "| grad_norm | +Inf |" in text
    assert "e+308" not in text


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.images: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        assert tag != "script"
        if tag == "img":
            self.images.append(dict(attrs)["src"])
        elif tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_whole_in_itself_and_hostile_names_break_nothing(tmp_path: Path) -> None:
    record = read_run(tmp_path / make_foreign(tmp_path, bad_at=4))
    evil = "<script>alert(1)</script>|\n"
    event = record.events[0] | {"culprit": CULPRIT | {"module": evil, "propagators": [evil]}, "more": {evil: [evil]}}
    page = Page(html(report_of(record, event), evil, b"\x89PNG", "where it was"))
    assert page.open == []
    assert page.images == ["data:image/png;base64,iVBORw=="]
    assert "<script>alert(1)</script>" in page.text
    assert "where it was" in page.text
    text = markdown(report_of(record, event), record.run_id)
    head = text.index("| what | value |")
    table = text[head : text.index("\n\n", head)].splitlines()
    assert all(line.replace("\\|", "").count("|") == 3 for line in table)


@pytest.mark.parametrize("odd", [None, 7, "x", [], {}, [{"a": []}], {"b": {}}, float("nan"), True])
def test_fields_of_any_type_make_a_report(odd: object, tmp_path: Path) -> None:
    record = read_run(tmp_path / make_foreign(tmp_path, bad_at=4))
    keys = ("culprit", "run_up", "parameters", "parameters_bad", "layer", "policy", "in_a_row", "loss", "x")
    for event in (
        {"event": "nonfinite", "step": 1, **dict.fromkeys(keys, odd)},
        *({**record.events[0], k: odd} for k in keys),
    ):
        markdown(report_of(record, event), "r")
    for key in CULPRIT:
        html(report_of(record, record.events[0] | {"culprit": CULPRIT | {key: odd}}), "r")
    keys = ("says", "reasons", "in_a_row", "before", "of", "value", "count", "first_step")
    for kind in ("stalled", "ledger", "probe_off", "spike", "loss_scale", "records_lost", "loss_nonfinite"):
        sentence({"event": kind, **dict.fromkeys(keys, odd)})


def test_a_loss_that_spoilt_no_step_does_not_hide_the_first_bad_value(tmp_path: Path) -> None:
    """Under DDP a rank's own loss may be NaN beside finite gradients, as with a mean over no targets."""
    record = read_run(tmp_path / make_foreign(tmp_path, bad_at=4))
    harmless = {
        "kind": "event",
        "event": "loss_nonfinite",
        "step": 2,
        "count": 1,
        "first_step": 2,
        "says": "a loss was",
    }
    record.events.insert(0, harmless)
    assert [is_bad(event) for event in record.events] == [False, True]
    shown = "\n".join(show(record, False, Look(100, False, False)))
    assert "the first value that was not finite" in shown
    assert "h.3.mlp.act" in shown
    for word in ("finished", "nan"):
        first, *_ = run_page(record, word, "7", "R", event_folders(record)).split("\n")
        assert "tep 4" in first
        assert "tep 2" not in first
    assert [event["step"] for event in bad_events(record)] == [4]
    assert event_picture_says(record, bad_events(record)[0]).startswith("stream's gradient over depth of this step")
