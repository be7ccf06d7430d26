"""Breaks each kernel on purpose, in a temporary copy, and sees the suites fail.

`python -m tests.ops.mutants [NAME ...]` says of each mutant whether it was noticed. That says something only where the
sound kernels pass, so those are tried first with --sound.

A mutant is one replacement in one source file and the cases that must notice it. The list is `MUTANTS`; a replacement
that no longer fits the source is an error, so that the list follows the kernels.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPS = Path("normscale/ops")
CASES = "tests/ops/interpreter/"


@dataclass(frozen=True)
class Mutant:
    """What is broken, where, how, and by which tests it is found."""

    says: str
    file: str
    old: str
    new: str
    tests: str
    match: str = ""

    def applied(self, source: str) -> str:
        """Returns the broken source.

        Raises:
            ValueError: the source does not have the text any more.
        """
        if self.old not in source:
            raise ValueError(f"{self.file} has no {self.old!r} any more: the mutant must follow")
        return source.replace(self.old, self.new)


FORWARD, BACKWARD, ROWS = "kernels/forward.py", "kernels/backward.py", "kernels/rows.py"
WEIGHTS, STATISTICS = "kernels/weights.py", "kernels/statistics.py"

MUTANTS = {
    "mask": Mutant(
        "padding is counted into the variance", FORWARD,
        "deviation = tl.where(mask, deviation, 0.0)", "deviation = deviation * 1.0",
        "case_reports.py", "padding",
    ),
    "alpha": Mutant(
        "alpha multiplies the branch", ROWS,
        "ALPHA_VECTOR) * residual + z", "ALPHA_VECTOR) * z + residual",
        "case_reports.py", "alpha",
    ),
    "eps": Mutant(
        "eps is left out", ROWS,
        "tl.rsqrt(variance + eps)", "tl.rsqrt(variance)",
        "case_reports.py", "variance_give_the_bias",
    ),
    "eps-outside": Mutant(
        "eps stands outside the root", ROWS,
        "tl.rsqrt(variance + eps)", "1.0 / (tl.sqrt(variance) + eps)",
        "case_reports.py", "inside_the_root",
    ),
    "overflow": Mutant(
        "a row whose squares overflow is a row of zeros", ROWS,
        'variance < float("inf")', "variance == variance",
        "case_rows.py", "huge_rows",
    ),
    "last-rows": Mutant(
        "the last, incomplete tile of rows is left out", FORWARD,
        "tl.cdiv(n_rows, ROWS)", "n_rows // ROWS",
        "case_values.py", "tiles_of_rows",
    ),
    "last-rows-backward": Mutant(
        "the last, incomplete tile of rows is left out of the gradients", BACKWARD,
        "tl.cdiv(n_rows, ROWS)", "n_rows // ROWS",
        "case_values.py", "tiles_of_rows",
    ),
    "shift": Mutant(
        "the rounding error of the mean stays in the result", FORWARD,
        "(deviation - shift[:, None])", "deviation",
        "case_rows.py", "large_mean",
    ),
    "shift-backward": Mutant(
        "the rounding error of the mean stays in the gradients", ROWS,
        "(z - mean[:, None]) - shift[:, None]", "z - mean[:, None]",
        "case_rows.py", "large_mean",
    ),
    "mean-of-gradient": Mutant(
        "LayerNorm's gradient misses the mean of g", BACKWARD,
        "dz -= mean[:, None]", "dz -= 0.0 * mean[:, None]",
        "case_reports.py", "padding",
    ),
    "stride": Mutant(
        "rows are taken to follow each other in memory", FORWARD,
        "x_stride = N if DENSE else x_row_stride", "x_stride = N",
        "case_layouts.py", "contiguous_copy",
    ),
    "zero-centred": Mutant(
        "the 1 of a zero-centred gain is forgotten", ROWS,
        "gain += 1.0", "gain += 0.0",
        "case_values.py", "zero_centred",
    ),
    "sum-of-rows": Mutant(
        "the gain's gradient is that of the last tile", BACKWARD,
        "dgamma += dy * normalised", "dgamma = dy * normalised",
        "case_values.py", "program_walks",
    ),
    "wide-gain": Mutant(
        "the kernel for wide rows sums dy for the gain", WEIGHTS,
        "dgamma += dy * normalised", "dgamma += dy",
        "case_values.py", "every_width and 16384",
    ),
    "alpha-gradient": Mutant(
        "alpha's gradient misses the residual", BACKWARD,
        "dalpha += dz * residual", "dalpha += dz",
        "case_values.py", "any_dtype",
    ),
    "stream-gradient": Mutant(
        "what the stream brings back is lost", BACKWARD,
        "dz += load_tile(dz_ptr", "dz += 0.0 * load_tile(dz_ptr",
        "case_values.py", "either_output",
    ),
    "next-alpha": Mutant(
        "a handle's gradient is not multiplied", ROWS,
        "NEXT_ALPHA_VECTOR) * dhandle + dy", "NEXT_ALPHA_VECTOR) * 0.0 + dhandle + dy",
        "case_handle.py",
    ),
    "dropout-backward": Mutant(
        "dropout is forgotten in the branch's gradient", BACKWARD,
        "dz = tl.where(keep, dz * KEEP_SCALE, 0.0)", "dz = dz * KEEP_SCALE",
        "case_dropout.py",
    ),
    "nan-count": Mutant(
        "a NaN does not show in the statistics", STATISTICS,
        'float("nan"), 0.0', "0.0, 0.0",
        "case_statistics.py", "non_finite",
    ),
    "row-numbers": Mutant(
        "row numbers are 32 bits wide", FORWARD,
        ".to(tl.int64)", "",
        "../test_addressing.py",
    ),
    "half-statistics": Mutant(
        "the definition of RMSNorm computes in the dtype of x", "norm.py",
        "F.rms_norm(x.float(), x.shape[-1:], _float(gamma), eps)",
        "F.rms_norm(x, x.shape[-1:], _like(x, gamma), eps)",
        "../test_norm.py", "rounded_once",
    ),
    "half-statistics-compiled": Mutant(
        "the definitions for the compiler compute in the dtype of x", "norm.py",
        "wide = x.to(torch.promote_types(x.dtype, torch.float32))", "wide = x",
        "../test_norm.py", "rounded_once",
    ),
}  # fmt: skip
"""By name. The four that `make test` applies stand first in `USUAL`; `make test-kernels-full` applies all."""

USUAL = ("mask", "alpha", "eps", "last-rows")


def survives(mutant: Mutant) -> str:
    """Applies a mutant to a copy of the package; returns "" if its tests fail as they must, else what they said."""
    failed, said = tried(mutant, mutant.applied)
    return "" if failed else said


def tried(mutant: Mutant, change: Callable[[str], str]) -> tuple[bool, str]:
    """Runs a mutant's tests on a copy of the package with its file changed; returns whether one failed, and the end."""
    with tempfile.TemporaryDirectory(prefix="normscale-mutant-") as folder:
        root = Path(folder)
        for part in ("normscale", "tests/ops"):
            shutil.copytree(ROOT / part, root / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", root)
        path = root / OPS / mutant.file
        path.write_text(change(path.read_text()))
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        env |= {"PYTHONPATH": str(root), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:xdist", "-p", "no:cacheprovider", "--tb=line"]
        command += ["-k", mutant.match] if mutant.match else []
        done = subprocess.run(
            [*command, str((root / CASES / mutant.tests).resolve())], cwd=root, env=env, capture_output=True, text=True
        )
    # 1 is a failed test; anything else (no test selected, a broken import) proves nothing.
    failed = done.returncode == 1 and " failed" in done.stdout and "error" not in done.stdout.splitlines()[-1]
    return failed, (done.stdout + done.stderr)[-2000:]


def main(names: list[str]) -> int:
    alive = 0
    if "--sound" in names:
        names.remove("--sound")
        for tests, match in sorted({(m.tests, m.match) for n, m in MUTANTS.items() if not names or n in names}):
            failed, said = tried(next(m for m in MUTANTS.values() if (m.tests, m.match) == (tests, match)), str)
            alive += failed
            print(f"sound kernels, {tests} {match}: {'FAILED' if failed else 'passed'}", flush=True)
            if failed:
                print(said)
    for name in names or MUTANTS:
        said = survives(MUTANTS[name])
        print(f"{name}: {MUTANTS[name].says}: {'NOT NOTICED' if said else 'noticed'}", flush=True)
        if said:
            alive += 1
            print(said)
    return 1 if alive else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
