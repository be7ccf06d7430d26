import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from normscale.cli import main
from normscale.tracking.draw import Look
from normscale.tracking.event_report import sentence
from normscale.tracking.reader import read_run
from normscale.tracking.show import amount, as_json, show
from normscale.tracking.spool import SPOOL, SpoolWriter
from normscale.tracking.text import render
from tests.tracking.made import make_foreign, make_run


def shown(runs: Path, run: str, alive: bool = False, look: Look | None = None) -> str:
    lines = show(read_run(runs / run), alive, look or Look())
    assert max(len(line) for line in lines) <= (look or Look()).width
    assert all(line == line.rstrip() or "\x1b" in line for line in lines)
    return "\n".join(lines)


def test_a_finished_run_on_one_screen(tmp_path: Path) -> None:
    run = make_run(tmp_path, "pre", 12, seed=3)
    text = shown(tmp_path, run)
    head = text.splitlines()[0]
    assert head.startswith(run)
    assert head.endswith("finished: trained")
    for part in (
        "pre, decoder-only: M=12, d 64, context 64",
        "600 k parameters, 24 sublayers, layernorm, eps 1e-05",
        "embedded, 3.6 M training tokens, digest dddddddddddd",
        "30 steps of 8 sequences, adamw lr 0.001",
        "seed 3",
        "fp32 asked; seen: compute, stream float32",
        "below the unigram entropy 3.15",
        "30 of 30 attempted, 30 applied, 0 skipped; spike score 0",
        "5 k tokens/s",
        "over depth, step 30",
    ):
        assert part in text, part
    assert "bad " not in text
    assert "events" not in text


def test_of_another_loop_its_own_numbers_are_shown_and_no_unit_of_its_loss(tmp_path: Path) -> None:
    """Its loss may be a mean square, and its rows are blocks."""
    run = make_foreign(tmp_path, "mine", bad_at=4, **{"val/acc@1": 0.5, "ünïcode\n": 3.0})
    with SpoolWriter(tmp_path / run, 1) as spool:
        spool.metrics(9, 9, {"lr": 3e-4, "grad_norm": 0.25, "logz_mean": 9.5, "user/val/acc@1": float("nan")})
    text = shown(tmp_path, run)
    assert "loss: the line is the training loss" in text
    assert "newest     lr 0.0003, gradient norm 0.25, log Z 9.5" in text
    assert "its own    val/acc@1 NaN, ünïcode\\n 3" in text
    record = read_run(tmp_path / run)
    (told,) = [line for line in render(record).splitlines() if line.startswith("loss_train ") and "8" in line]
    for event in record.events:
        event.pop("culprit")
    text = "\n".join([text, told, *show(record, False, Look()), sentence(record.events[0], record.start["rows"])])
    assert "in h.3 (4 of 6 over depth)" in text
    assert "nats" not in text
    assert "sublayer" not in text
    ours = read_run(tmp_path / make_run(tmp_path, steps=4, every=1))
    assert "loss in nats: the line is the training loss" in "\n".join(show(ours, False, Look()))
    assert any(line.startswith("loss_train ") and line.endswith("nats") for line in render(ours).splitlines())


def test_the_cost_of_a_run_is_shown_with_where_its_peak_is_from(tmp_path: Path) -> None:
    run = make_run(tmp_path, end=False)
    with SpoolWriter(tmp_path / run, 1) as spool:
        cost = {"tokens_s": 12345.6, "mfu": 0.234, "peak_flops": 7.1e10, "peak_source": "measured GEMM"}
        cost |= {"flops_per_step": 8.4e9, "peak_memory_bytes": 412_300_000, "peak_memory_source": "resident"}
        spool.end("finished", 0, cost | {"train_seconds": 38.04})
    text = shown(tmp_path, run)
    assert "12.3 k tokens/s; MFU 23.4 % of 71 GFLOP/s (measured GEMM), 8.4 GFLOP a step" in text
    assert "412 MB at the most (resident)" in text
    assert "38 s of it in training steps" in text


def test_what_probes_took_for_passes_of_their_own_is_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path, end=False)
    assert "passes of their own" not in shown(tmp_path, run)
    with SpoolWriter(tmp_path / run, 1) as spool:
        taken = {"epsilon_probe_s": 1.25, "update_probe_s": 3.0, "adam_probe_s": 0.0, "layers_probe_s": "?"}
        spool.end("finished", 0, taken | {"seconds": 100.0})
    assert "probes     passes of their own: update 3 s, epsilon 1.25 s, 4.2 % of the run" in shown(tmp_path, run)


def test_a_run_that_stopped_says_where_by_the_name_of_its_site(tmp_path: Path) -> None:
    text = shown(tmp_path, make_run(tmp_path, "post", 12, nan_at=17))
    assert text.splitlines()[0].endswith("stopped: not finite (exit code 3)")
    assert "first at step 17 in decoder.0004.self (9 of 24 over depth)" in text
    assert "step 17  nonfinite" in text
    assert "× not finite" in text
    assert "held-out NaN, training" in text


@pytest.mark.parametrize(("alive", "says"), [(True, "running"), (False, "no end: killed, or its machine was lost")])
def test_a_run_without_an_end_shows_what_there_is(alive: bool, says: str, tmp_path: Path) -> None:
    text = shown(tmp_path, make_run(tmp_path, end=False), alive)
    assert text.splitlines()[0].endswith(says)
    assert "30 of 30 attempted, 30 applied" in text
    assert ("running for" in text) == alive


def test_attempts_and_interruptions_are_said(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=10, end=False)
    make_run(tmp_path, steps=30, run_id=run, attempt=2, from_step=10, end=False)
    with SpoolWriter(tmp_path / run, 2) as spool:
        spool.end("interrupted", 143, {})
    text = shown(tmp_path, run)
    assert text.splitlines()[0].endswith("interrupted (exit code 143)")
    assert "attempt 2, went on after step 10" in text


def test_torn_and_foreign_lines_are_counted(tmp_path: Path) -> None:
    run = make_run(tmp_path, end=False)
    with (tmp_path / run / SPOOL).open("ab") as file:
        file.write(b'{"kind":"metr\n\xff\xfe\0\n{"kind":"end"}\n')
    assert "3 unreadable lines of its records are left out" in shown(tmp_path, run)


@pytest.mark.parametrize("text", [b"", b"\n\n", b"\xff" * 99, b"{}\n[]\nnull\n"])
def test_an_empty_or_broken_spool_is_shown_as_such(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / SPOOL).write_bytes(text)
    assert "its start record is missing or unreadable" in shown(tmp_path, "x")


def test_fields_of_any_type_break_neither_a_line_nor_the_page(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(
            run_id="x\x1b[31m\n" + "y" * 200,
            config={"name": ["\n"], "seed": {"a": 1}, "model": {"N": "two", "M": -1, "d": None, "scheme": "\r\n" * 90}},
            identity={"hash": 7, "device": "\x07"},
            data={"name": "z" * 900, "unigram_nats": "NaN", "digest": None},
            model={"params": "many", "sites": math.nan},
            precision_seen={"compute": ["a"], "\n": 1},
            rows=["nodots", "a.b.c.d.e"],
        )
        spool.metrics(1, 1, {"loss_train": math.nan, "loss_val": math.inf})
        spool.profile(1, "stream_rms", np.array([math.nan, math.inf]))
        spool.profile(2, "grad_norm", np.array([]))
        spool.event(1, "odd\n", field="\x1b]0;title\x07", many=list(range(99)))
    for look in (Look(), Look(width=40), Look(unicode=False), Look(colour=True)):
        lines = show(read_run(tmp_path / "x"), False, look)
        text = "".join(lines)
        assert look.colour or all(letter.isprintable() for letter in text)
        assert look.unicode or text.isascii()
        assert look.colour or max(map(len, lines)) <= look.width
    json.dumps(as_json(read_run(tmp_path / "x"), False), allow_nan=False)


def test_sites_are_grouped_by_kind_and_side(tmp_path: Path) -> None:
    rows = ["encoder.0000.self", "encoder.0000.ffn", "decoder.0000.self", "decoder.0000.cross", "decoder.0000.ffn"]
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x", config={"model": {"N": 1, "M": 1}}, rows=rows)
        spool.profile(4, "grad_norm", np.array([1.0, 2, 3, 4, 5]))
        spool.profile(4, "stream_rms", np.array([1.0, 2, 3, 4, 100]))
        spool.profile(4, "branch_absmax", np.array([1.0] * 5))
    text = shown(tmp_path, "x")
    assert "encoder-decoder: N=1, M=1" in text
    depth = text[text.index("over depth") :].splitlines()
    cells = [line.split()[:4] for line in depth[1:]]
    assert cells[0] == ["stream", "RMS", "encoder", "1"]
    assert cells[1] == ["decoder", "3", "4", "100"]  # first, median, last
    assert " log " in depth[2]
    assert cells[2][1:3] == ["encoder.self", "1"]
    assert [line[0] for line in cells[3:]] == ["encoder.ffn", "decoder.self", "decoder.cross", "decoder.ffn"]
    assert len(depth) == 8


def bars_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(label))[-20:]


def test_a_flat_array_looks_flat_and_its_numbers_are_there(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x", config={"model": {"M": 4}})
        spool.profile(4, "stream_rms", 1 + 0.02 * rng.random(20))
        spool.profile(4, "branch_ratio", np.linspace(0, 1, 20))
        spool.profile(4, "update_rel", np.zeros(20))
        spool.profile(4, "grad_norm", np.logspace(-4, 0, 20))
    text = shown(tmp_path, "x")
    assert set(bars_of(text, "stream RMS")) == {"█"}
    assert set(bars_of(text, "step / weights")) == {"▁"}
    rising = bars_of(text, "branch / stream")
    assert (rising[0], rising[-1]) == ("▁", "█")
    gradient = next(line for line in text.splitlines() if line.startswith("gradient "))
    assert gradient.split()[1:7] == ["0.0001", "0.0103", "1", "0.0001", "1", "log"]
    assert "first   median     last    least     most bars from 0, or log" in text


def test_a_run_that_did_not_learn_is_told_in_plain_words(tmp_path: Path) -> None:
    text = shown(tmp_path, make_run(tmp_path, "post", trains=False, steps=300))
    assert text.splitlines()[0].endswith("finished: no better than token frequencies")
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x", config={"model": {"M": 1}})
        spool.end("finished", 0, {"gap": -2.0, "loss_val": 5.0, "unigram_nats": 3.0})
    text = shown(tmp_path, "x")
    assert text.splitlines()[0].endswith("finished: worse than token frequencies")
    assert "2 above the unigram entropy 3, which is what token" in text


def test_the_first_bad_value_is_told_in_full_from_the_spool_alone(tmp_path: Path) -> None:
    text = shown(tmp_path, make_foreign(tmp_path, bad_at=4))
    told = " ".join(text[text.index("the first value that was not finite") :].split())
    for part in (
        "Step 4: NaN in the gradient of output of h.3.mlp.act (GELU), backward, micro-batch 2, rank 1: 6 of 4096",
        "counts 5 NaN, 1 +Inf of 4096 values",
        "host node7",
        "policy skip: the step was not applied and training went on (2 in a row)",
        "run-up step 1 2 3 stream_rms 1.5 3 4.5 stream_absmax 10 100 1000",
        "handed on h.3.mlp.fc, h.3.ln_2, h.2",
    ):
        assert part in told, part
    bad = " ".join(next(line for line in text.splitlines() if line.startswith("bad ")).split())
    assert bad.startswith("bad first at step 4: NaN in the gradient of output of h.3.mlp.act")
    for look in (Look(width=60), Look(unicode=False), Look(colour=True)):
        show(read_run(tmp_path / "gpt-20261130"), False, look)


def test_a_run_of_another_loop_shows_what_is_known_and_no_dashes(tmp_path: Path) -> None:
    text = shown(tmp_path, make_foreign(tmp_path, **{"val/acc@1": 0.5}))
    assert text.splitlines()[0].endswith("finished")
    assert "GPT2LMHeadModel, 124 k parameters, 6 rows over depth, h.0 to h.5" in text
    assert "lr=0.0003" in text
    assert "8 attempted" in text
    assert "stream RMS                           1      1.5        2        1        2" in text
    assert " - " not in text
    assert "tokens/s" not in text


def test_a_scale_that_falls_hides_no_other_event(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x")
        for step in range(30):
            spool.event(step, "loss_scale", before=2.0 ** (30 - step), after=2.0 ** (29 - step), reason="overflow")
        for step in range(30, 60):
            spool.event(step, "stalled", in_a_row=step, reasons="overflow")
        spool.event(60, "nonfinite", fault="NaN")
        spool.event(61, "probe_off", probe="eps", reason="begin: ValueError")
    events = shown(tmp_path, "x").partition("\nevents\n")[2].splitlines()
    assert events[0].split() == ["step", "0-29", "loss", "scale", "1073741824", "to", "1", "(30", "times", "overflow)"]
    assert events[-2].split()[:3] == ["step", "60", "nonfinite:"], "the bad one is there whatever else there is"
    assert events[-1] == "and 21 more"


def test_the_ledger_says_why_steps_were_not_applied(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x")
        reasons = [None, "overflow", "overflow", "gradient"]
        spool.ledger([{"step": step, "reason": reason, "lr": 0.1} for step, reason in enumerate(reasons, start=1)])
    assert "not applied: 2 overflow, 1 gradient" in shown(tmp_path, "x")
    assert len(as_json(read_run(tmp_path / "x"), False)["ledger"]) == 4


def test_what_is_not_finite_at_the_end_does_not_hide_what_was_before(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x")
        spool.profile(1, "stream_rms", [1.0, 2.0])
        spool.profile(9, "stream_rms", [1.0, math.nan])
    text = shown(tmp_path, "x")
    assert "over depth, step 1 " in text
    assert "(what was recorded later, to step 9, is not finite throughout)" in text


def test_an_exploding_loss_does_not_flatten_the_rest(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x", data={"unigram_nats": 3.0})
        for step, loss in enumerate([5.0, 4.0, 3.5, 1e9]):
            spool.metrics(step, step, {"loss_train": loss})
    assert "      10 ┤" in shown(tmp_path, "x")


@pytest.mark.parametrize("first", [-2.0, 0.0])
def test_a_loss_that_begins_below_zero_or_at_it_is_drawn_whole(first: float, tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x")
        for step, loss in enumerate([first, -4.0, -3.0, 1.5]):
            spool.metrics(step, step, {"loss_train": loss})
    text = shown(tmp_path, "x")
    assert "     1.5 ┤" in text
    assert "      -4 ┤" in text


def test_everything_is_in_the_json(tmp_path: Path) -> None:
    run = make_run(tmp_path, nan_at=17)
    record = read_run(tmp_path / run)
    found = json.loads(json.dumps(as_json(record, False), allow_nan=False))
    assert (found["run_id"], found["outcome"], found["end"]["exit_code"]) == (run, "nan", 3)
    assert found["series"]["loss_train"]["steps"] == record.series["loss_train"].steps
    assert found["series"]["loss_train"]["values"][-1] == "NaN"
    assert len(found["profiles"]["grad_norm"]["data"][0]) == 24
    assert found["start"]["config"]["model"]["scheme"] == "post"


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "0"), (999, "999"), (1500, "1.5 k"), (6.16e8, "616 M"), (2.5e12, "2.5 T"), (None, "-"), (math.nan, "-")],
)
def test_amounts_have_three_digits_and_a_prefix(value: float | None, said: str) -> None:
    assert amount(value) == said


def command(*words: str, **environment: str) -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "normscale", *words], capture_output=True, env=os.environ | environment, timeout=60
    )


def test_the_command_on_a_terminal_that_is_not_utf8(tmp_path: Path) -> None:
    run = make_run(tmp_path, nan_at=17)
    done = command("show", f"{tmp_path / run}/", PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.isascii()
    assert b"x not finite" in done.stdout
    assert b"\x1b" not in done.stdout


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    words = f"'{sys.executable}' -m normscale show {run} --runs '{tmp_path}' | head -n 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(run.encode())


def test_show_and_diff_import_neither_torch_nor_mlflow(tmp_path: Path) -> None:
    one, two = make_run(tmp_path), make_run(tmp_path, "pre")
    code = (
        "import sys; from normscale.cli import main\n"
        f"runs = ['--runs', {str(tmp_path)!r}]\n"
        f"assert main(['show', {one!r}, *runs]) == 0 and main(['diff', {one!r}, {two!r}, *runs, '--json']) == 0\n"
        "heavy = {'torch', 'mlflow', 'datasets', 'pydantic', 'scipy', 'matplotlib'}\n"
        "slow = heavy & set(sys.modules)\n"
        "assert not slow, slow"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_command_finds_runs_and_says_what_it_cannot_find(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = ["--runs", str(tmp_path)]
    assert main(["show", "latest", *runs]) == 2
    assert "there are no runs in" in capsys.readouterr().err
    run = make_run(tmp_path, "deepnorm", 100)
    assert main(["show", "deepnorm-L0100", *runs]) == 0
    assert capsys.readouterr().out.startswith(run)
    assert main(["show", "latest", *runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run_id"] == run
    make_run(tmp_path, "deepnorm", 100, seed=1)
    assert main(["show", "deepnorm", *runs]) == 2
    assert capsys.readouterr().err.count("\n") == 3
