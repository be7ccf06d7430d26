"""`python launch/make_names.py GIVEN KNOWN`: says which variable on make's command line is a slip. Imports no package.

make takes any NAME=value and hands it on as environment, so that OMP_NUM_THREADS=1 works there, and NPROCS=2 is passed
over without a word. A name like one of ours is a slip, and so is a single word that no program is known to read.
"""

import difflib
import sys

READ = (
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "CI",
    "HOME",
    "LANG",
    "PATH",
    "PY",
    "PYTHONPATH",
    "SHELL",
    "TMPDIR",
)
NEAR = 0.8


def slip(given: list[str], known: list[str]) -> str:
    """Returns a line about the first name that is a slip, "" where none is."""
    for name in given:
        near = difflib.get_close_matches(name.upper(), known, 1, NEAR)
        if name not in READ and (near or "_" not in name):
            mend = f"did you mean {near[0]}?" if near else 'what a run is to be goes into ARGS="key=value ..."'
            return f"{name}: no such variable is known ({mend})"
    return ""


if __name__ == "__main__":
    print(slip(sys.argv[1].split(), sys.argv[2].split()))
