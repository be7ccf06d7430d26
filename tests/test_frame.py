"""The frame of the house: what loads, what is imported when, what make offers, what the wheel holds."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from normscale.config.load import load

ROOT = Path(__file__).parents[1]
YAMLS = sorted((ROOT / "configs").rglob("*.yaml"))
HEAVY = ["torch", "numpy", "mlflow", "matplotlib", "datasets", "accelerate", "pydantic", "omegaconf", "yaml"]
MAKE_ENV = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}


@pytest.mark.parametrize("path", YAMLS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_yaml_loads(path: Path):
    if path.parent.name in ("model", "train"):
        load(path)
    else:
        assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize(
    "code",
    [
        "import normscale",
        "import normscale.cli; normscale.cli.main(['--help'])",
        "import normscale.cli; normscale.cli.main(['trian'])",
        "import launch.__main__ as m; m.main(['local', '--dry-run', '--', 'c.yaml'])",
    ],
)
def test_what_should_be_quick_imports_nothing_heavy(code: str):
    probe = f"{code}\nimport sys\nprint('loaded:', [name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded: []"


def test_launching_checks_the_configuration_without_torch():
    code = (
        "import sys, launch.__main__ as m; m.check_config(['configs/train/quick.yaml']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def make(*words: str) -> str:
    done = subprocess.run(["make", *words], cwd=ROOT, env=MAKE_ENV, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_lists_every_target():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    listed = re.findall(r"^  make ([a-z-]+) +\S", make(), re.MULTILINE)
    assert sorted(listed) == sorted(targets)
    assert {"reproduce", "test", "check", "format", "train", "claim", "report", "ui", "sync", "clean"} <= set(listed)


@pytest.mark.parametrize("target", ["reproduce", "test", "check", "train", "launch", "claim", "report", "ui", "sync"])
def test_make_can_say_what_it_would_do(target: str):
    assert ".venv/bin/python -m " in make("-n", target)


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        (["train", "model.M=7", "train.steps=20"], 'make train ARGS="model.M=7 train.steps=20"'),
        (["train", "seed=1", "NPROC=2", "ARGS=--fresh"], 'make train NPROC=2 ARGS="--fresh seed=1"'),
        (["claim", "CLAIM=core", "train.steps=3"], 'make claim CLAIM=core ARGS="train.steps=3"'),
        (["train", "name=two ranks", "data.languages=[en, de]"], "ARGS=\"'data.languages=[en, de]' 'name=two ranks'\""),
    ],
)
def test_settings_that_make_would_swallow_are_refused_with_the_right_command(words: list[str], mend: str):
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, env=MAKE_ENV, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"settings go into ARGS: make {words[0]} " in done.stderr
    assert mend in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_old_python_is_refused_with_the_mend(tmp_path: Path):
    (tmp_path / "python").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.2\nexit 1\n')
    (tmp_path / "python").chmod(0o755)
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    words = ["make", "check", f"PYTHON={tmp_path}/python"]
    done = subprocess.run(words, cwd=tmp_path, env=MAKE_ENV, capture_output=True, text=True)
    assert done.returncode == 2
    assert "is Python 3.9.2" in done.stderr
    assert "apt-get install python3" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_constraints_pin_what_must_be_a_pair():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")
    assert pins["mlflow"] == pins["mlflow-skinny"] == pins["mlflow-tracing"] == "3.17.2"


def test_the_wheel_holds_normscale_only(tmp_path: Path):
    pytest.importorskip("setuptools")
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "normscale", "launch", "experiments", "configs", "tests"):
        (source / name).symlink_to(ROOT / name)
    build = [sys.executable, "-c", f"import setuptools.build_meta as b; b.build_wheel({str(tmp_path)!r})"]
    done = subprocess.run(build, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert tops == {"normscale", "normscale-0.1.0.dist-info"}
    assert "normscale/py.typed" in names
    assert "normscale/config/schema.py" in names
