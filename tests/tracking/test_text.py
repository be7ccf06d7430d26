import math

from normscale.tracking.reader import read_run
from normscale.tracking.spool import SpoolWriter
from normscale.tracking.text import number, render


def test_numbers_have_names_and_few_digits():
    assert [number(value) for value in (math.nan, math.inf, -math.inf)] == ["NaN", "+Inf", "-Inf"]
    assert number(-0.230102999) == "-0.2301"
    assert number(500.0) == "500"
    assert number(None) == "-"
    assert number(1.7976931348623157e308) == "1.798e+308"


def test_the_report_says_nan_and_inf_at_their_steps(tmp_path):
    with SpoolWriter(tmp_path / "r", 1) as spool:
        spool.start(run_id="r")
        spool.metrics(1, 1, {"loss_train": 2.0, "grad_norm": 1.0, "grad_first": 1.0})
        spool.metrics(2, 2, {"loss_train": math.nan, "grad_norm": math.inf, "grad_first": -math.inf})
        spool.event(2, "nonfinite", layer=3)
        spool.end("nan", 3, {"gap": math.nan, "bad_step": 2})
    text = render(read_run(tmp_path / "r"))
    assert "step 2: loss_train = NaN" in text
    assert "step 2: grad_norm = +Inf" in text
    assert "step 2: grad_first = -Inf" in text
    assert "step 1:" not in text
    assert "e+308" not in text
    assert "not finite: 3 values" in text
    assert "outcome  nan" in text
    assert "nonfinite layer=3" in text


def test_a_run_without_end_says_so(tmp_path):
    with SpoolWriter(tmp_path / "r", 1) as spool:
        spool.start()
    text = render(read_run(tmp_path / "r"))
    assert "not ended" in text
    assert "not finite: none" in text
