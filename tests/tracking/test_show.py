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
from normscale.tracking.reader import read_run
from normscale.tracking.show import amount, as_json, show
from normscale.tracking.spool import SPOOL, SpoolWriter
from tests.tracking.made import make_run


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


def test_a_run_that_stopped_says_where_by_the_name_of_its_site(tmp_path: Path) -> None:
    text = shown(tmp_path, make_run(tmp_path, "post", 12, nan_at=17))
    assert text.splitlines()[0].endswith("stopped: not finite (exit code 3)")
    assert "first at step 17 in decoder.0004.self (sublayer 9 of 24)" in text
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


def test_an_exploding_loss_does_not_flatten_the_rest(tmp_path: Path) -> None:
    with SpoolWriter(tmp_path / "x", 1) as spool:
        spool.start(run_id="x", data={"unigram_nats": 3.0})
        for step, loss in enumerate([5.0, 4.0, 3.5, 1e9]):
            spool.metrics(step, step, {"loss_train": loss})
    assert "      10 ┤" in shown(tmp_path, "x")


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
