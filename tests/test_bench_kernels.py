"""The kernel benchmark where there is no GPU: what it refuses, what it counts, and that its calls mean one thing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import bench_kernels as bench
from tests.bench_kernels import OPS, OURS, OURS_STATISTICS, PASSES, Row, lines_of, measure, plot, summary_of, target_of
from tests.bench_rivals import ours, rivals

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


@without_gpu
def test_without_a_gpu_it_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert bench.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert said.err.strip() == (
        "bench-kernels: PyTorch finds no GPU here, and kernels are measured on one; run it where there is one"
    )
    assert said.out == ""
    assert not (tmp_path / "out").exists()


@without_gpu
def test_make_test_gpu_without_a_gpu_is_one_line(tmp_path: Path) -> None:
    # The recipe's own words, with this Python in the place of the environment's.
    lines = Path("Makefile").read_text().split("\ntest-gpu:")[1].split("\n.PHONY")[0].replace("$(PY)", sys.executable)
    recipe = lines.partition("\n")[2].replace("\t@", "").replace("$(value ARGS)", "").replace("\n", "\n")
    done = subprocess.run(["sh", "-c", recipe], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2
    assert done.stderr.startswith("test-gpu: PyTorch finds no GPU here; run it where there is one")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("words", [["--ops", "layernrom"], ["--widths", "0"], ["--dtypes", "fp8"]])
def test_a_wrong_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        bench.main(words)
    assert stopped.value.code == 2
    assert "is none of" in capsys.readouterr().err


def test_targets_are_those_of_the_widths() -> None:
    assert [target_of("layernorm", "forward", d) for d in (64, 128, 512, 1024, 8192, 12288, 16384)] == [
        *(0.80, 0.80, 0.80, 0.90, 0.90, 0.80, 0.80)
    ]
    assert [target_of("deepnorm", "backward", d) for d in (64, 128, 512, 1024, 8192, 12288, 16384)] == [
        *(0.70, 0.70, 0.65, 0.80, 0.80, 0.65, 0.65)
    ]
    assert target_of("stack", "both", 1024) is None


@pytest.mark.parametrize("op", OPS)
def test_everyone_computes_the_same(op: str) -> None:
    torch.manual_seed(0)
    alpha, gamma, bias = torch.tensor(2.8), torch.rand(16).requires_grad_(), torch.rand(16).requires_grad_()
    x = [torch.randn(6, 16).requires_grad_() for _ in range(3)]
    inputs: Any = (x[0], x[1:]) if op == "stack" else x[: 2 if op.startswith("add_") or op == "deepnorm" else 1]
    trained = [gamma] if op.endswith("rmsnorm") else [gamma, bias]
    leaves = [*(x if op == "stack" else inputs), *trained]
    calls = {"eager": rivals(op)["eager"], OURS: ours(op, backend="eager")}
    got: dict[str, Any] = {}
    for who, call in calls.items():
        results = call(*inputs, alpha, gamma, bias)
        results = list(results) if isinstance(results, tuple | list) else [results]
        got[who] = [*results, *torch.autograd.grad(results, leaves, [torch.ones_like(y) / 3 for y in results])]
    for a, b in zip(got["eager"], got[OURS], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", ["layernorm", "add_rmsnorm", "deepnorm", "stack"])
def test_a_measurement_counts_the_passes_of_its_operation(op: str) -> None:
    found = measure(op, 64, "fp32", torch.device("cpu"), 1024, 3, 10.0, without=[OURS, "torch.compile", "statistics"])
    found = [row for row in found if row.who == "eager"]
    assert {row.way for row in found} == {way for name, way in PASSES if name == op}
    for row in found:
        assert row.rows == 16
        assert row.gb_s == pytest.approx(PASSES[op, row.way] * 1024 * 4 / row.ms / 1e6)
        assert row.share == pytest.approx(row.gb_s / 10.0)


def test_what_is_compiled_is_measured_both_ways(capsys: pytest.CaptureFixture[str]) -> None:
    found = measure("rmsnorm", 64, "fp32", torch.device("cpu"), 1024, 3, 10.0, without=[OURS, "eager", "statistics"])
    assert "torch.compile: failed" not in capsys.readouterr().out
    assert [row.way for row in found if row.who == "torch.compile"] == ["forward", "backward"]


def test_a_backward_pass_that_fails_leaves_the_forward_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.bench_rivals.rivals", lambda op, without: {"theirs": lambda x, *of: x.detach()})
    found = measure("layernorm", 64, "fp32", torch.device("cpu"), 1024, 3, 10.0)
    assert [row.way for row in found] == ["forward"]
    assert "theirs: failed: " in capsys.readouterr().out


def test_a_kernel_that_fails_is_told_and_passed_over(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*of: Any) -> None:
        raise RuntimeError("no such width\nand more")

    monkeypatch.setattr("tests.bench_rivals.rivals", lambda op, without: {"theirs": broken})
    assert measure("layernorm", 64, "fp32", torch.device("cpu"), 1024, 3, 10.0) == []
    assert capsys.readouterr().out == "layernorm fp32 d=64 theirs: failed: no such width\n"


def test_the_table_the_summary_and_the_plot(tmp_path: Path) -> None:
    def row(who: str, ms: float, share: float, op: str = "layernorm", way: str = "forward") -> Row:
        target = target_of(op, way, 1024) if who == OURS else None
        return Row(op, way, "bf16", 1024, 2**18, who, ms, 4000 * share, share, target)

    rows = [row(OURS, 1.0, 0.95), row(OURS_STATISTICS, 1.015, 0.93), row("eager", 1.9, 0.5)]
    rows += [row(OURS, 2.0, 0.7, way="backward")]
    rows += [row(OURS, 3.0, 0.8, "stack", "both"), row("eager", 6.0, 0.4, "stack", "both")]
    assert lines_of(rows[:4]) == [
        "layernorm      forward  bf16 d=1024   GB/s: normscale 3800 (95 % ok), normscale + statistics 3720 (93 %),"
        " eager 2000 (50 %)",
        "layernorm      backward bf16 d=1024   GB/s: normscale 2800 (70 % < 80 %)",
    ]
    assert summary_of(rows) == [
        "targets met: 1 of 2",
        "a DeepNorm site, forward and backward, bf16 d=1024: 3.000 ms; times: eager 2.00",
        "statistics, layernorm forward bf16 d=1024: +1.5 %",
    ]
    plot(rows, tmp_path / "new" / "bench.png")
    assert (tmp_path / "new" / "bench.png").stat().st_size > 10_000
    bench._write(tmp_path, {"device": "one"}, rows)
    assert len(json.loads((tmp_path / "bench.json").read_text())["rows"]) == len(rows)
