"""One precision from several places: which one, or an error that names both."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from normscale.cli import main
from normscale.config.agreement import Said, agreed_compute, settled
from normscale.config.load import read
from normscale.errors import ConfigError
from normscale.tracking.reader import read_run

CLI = Said("bf16", "override precision.compute=bf16")
YAML = Said("bf16", "run.yaml:12")
AUTO: dict[str, Any] = {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}}


def env(word: str) -> dict[str, str]:
    return {"ACCELERATE_MIXED_PRECISION": word}


@pytest.mark.parametrize(
    ("written", "environ", "deepspeed", "result"),
    [
        (None, {}, AUTO, "fp32"),  # "auto" and nothing set
        (None, {}, None, "fp32"),
        (None, env("no"), None, "fp32"),  # accelerate's default: nothing was asked for
        (CLI, env("no"), AUTO, "bf16"),
        (CLI, env("bf16"), {"bf16": {"enabled": True}}, "bf16"),
        (CLI, {}, {"fp16": {"enabled": False}, "zero_optimization": {"stage": 1}}, "bf16"),
        (None, env("fp16"), None, "fp16"),
        (None, env("fp8"), None, "fp8_e4m3"),
        (None, {}, {"bf16": {"enabled": True}, "fp16": {"enabled": "auto"}}, "bf16"),
        (None, {}, {"bfloat16": {"enabled": True}}, "bf16"),
        (None, {}, {"fp16": {"enabled": False}, "bf16": {"enabled": False}}, "fp32"),
        (Said("fp32", "run.yaml:12"), {}, {"fp16": {"enabled": False}}, "fp32"),
    ],
)
def test_places_that_agree(
    written: Said | None, environ: dict[str, str], deepspeed: Mapping[str, Any] | None, result: str
) -> None:
    assert agreed_compute(written, environ, deepspeed, "ds.json").compute == result


@pytest.mark.parametrize(
    ("written", "environ", "deepspeed", "said"),
    [
        (CLI, {}, {"fp16": {"enabled": True}}, (CLI.place, "fp16.enabled=true in ds.json")),
        (YAML, env("fp16"), None, ("run.yaml:12", "ACCELERATE_MIXED_PRECISION=fp16 in the environment")),
        (
            None,
            {},
            {"fp16": {"enabled": True}, "bf16": {"enabled": True}},
            ("ds.json", "fp16.enabled and bf16.enabled"),
        ),
        (None, env("bf16"), {"fp16": {"enabled": True}}, ("ACCELERATE_MIXED_PRECISION=bf16", "ds.json")),
        (YAML, {}, {"bf16": {"enabled": False}}, ("run.yaml:12", "bf16.enabled=false in ds.json")),
        (Said("fp32", "run.yaml:1"), env("bf16"), None, ("fp32 (run.yaml:1)", "ACCELERATE_MIXED_PRECISION=bf16")),
        (Said("fp8_e5m2", "run.yaml:1"), env("fp8"), None, ("fp8_e5m2 (run.yaml:1)", "fp8_e4m3")),
        (None, env("fp61"), None, ("ACCELERATE_MIXED_PRECISION='fp61'", "did you mean 'fp16'")),
        (None, {}, {"fp16": {"enabled": "True"}}, ("fp16.enabled: 'True'", "ds.json")),
        (None, {}, {"bf16": 1}, ("bf16.enabled: 1", "ds.json")),
    ],
)
def test_places_that_do_not(
    written: Said | None, environ: dict[str, str], deepspeed: Mapping[str, Any] | None, said: tuple[str, str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        agreed_compute(written, environ, deepspeed, "ds.json")
    assert all(words in str(caught.value) for words in said)


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_an_override_wins_over_the_file_as_for_every_key(tmp_path: Path) -> None:
    loaded = read(written(tmp_path, "precision:\n  compute: bf16\n"), ["precision.compute=fp16"])
    assert settled(loaded, env("fp16")).config.precision.compute == "fp16"
    with pytest.raises(ConfigError, match=r"fp16 \(override precision.compute=fp16\) but bf16 \(ACCELERATE_MIXED"):
        settled(loaded, env("bf16"))


def test_the_environment_fills_in_what_the_configuration_leaves_open(tmp_path: Path) -> None:
    loaded = read(written(tmp_path, "precision:\n  stream: bf16\n"))  # the section is written, the key is not
    assert settled(loaded, env("bf16")).config.precision.compute == "bf16"
    assert settled(loaded, {}) is loaded


def test_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    loaded = read(written(tmp_path, "name: x\nprecision:\n  compute: fp32\n"))
    with pytest.raises(ConfigError, match=r"run.yaml:3\) but bf16"):
        settled(loaded, env("bf16"))


def test_an_environment_that_does_not_go_with_the_rest_is_named(tmp_path: Path) -> None:
    loaded = read(written(tmp_path, "precision:\n  tf32: true\n"))
    with pytest.raises(ConfigError, match=r"ACCELERATE_MIXED_PRECISION=bf16 in the environment: precision.tf32"):
        settled(loaded, env("bf16"))


def test_the_deepspeed_file_of_accelerate_is_read(tmp_path: Path) -> None:
    loaded = read(written(tmp_path, "name: x\n"))
    path = tmp_path / "ds.json"
    environ = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path)}
    path.write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 1}}')
    assert settled(loaded, environ).config.precision.compute == "bf16"
    path.write_text('{"bf16": {"enabled": "auto"}}')
    assert settled(loaded, environ) is loaded
    for nothing in ("", "none"):
        assert settled(loaded, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": nothing}) is loaded


def test_a_deepspeed_file_that_does_not_go_with_the_rest_is_named(tmp_path: Path) -> None:
    loaded = read(written(tmp_path, "precision:\n  tf32: true\n"))
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}}')
    with pytest.raises(ConfigError, match=r"bf16.enabled=true in .*ds.json: precision.tf32"):
        settled(loaded, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"fp16": {"enabled": true}}', ("bf16 (", "run.yaml:2) but fp16 (fp16.enabled=true in ", "ds.json)")),
        (b'{"bf16": {"enabled": false}}', ("bf16 (", "run.yaml:2) but bf16.enabled=false in ", "ds.json;")),
        (None, ("ACCELERATE_DEEPSPEED_CONFIG_FILE=", "ds.json in the environment: no such file; give")),
        (b"{fp16", ("ACCELERATE_DEEPSPEED_CONFIG_FILE=", "ds.json in the environment: is not JSON (")),
        (b"\xff", ("ACCELERATE_DEEPSPEED_CONFIG_FILE=", "ds.json in the environment: is not JSON (")),
        (b"[" * 100_000, ("ACCELERATE_DEEPSPEED_CONFIG_FILE=", "ds.json in the environment: is not JSON (")),
        (b'{"a": 1, "a": 2}', ("ACCELERATE_DEEPSPEED_CONFIG_FILE=", "ds.json in the environment: a is given twice;")),
        (b'{"a": NaN}', ("ACCELERATE_DEEPSPEED_CONFIG_FILE=", "ds.json in the environment: NaN is not a number")),
        (b"[]", ("ACCELERATE_DEEPSPEED_CONFIG_FILE=", "ds.json in the environment: is a list")),
    ],
)
def test_train_refuses_a_deepspeed_file_that_disagrees_or_is_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    content: bytes | None,
    said: tuple[str, ...],
) -> None:
    if content is not None:
        (tmp_path / "ds.json").write_bytes(content)
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    path = written(tmp_path, f"precision:\n  compute: bf16\ntracking:\n  runs: {tmp_path / 'runs'}\n  uri: null\n")
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert all(words in error for words in said), error
    assert error.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_train_takes_the_precision_of_a_deepspeed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ds.json").write_text('{"bf16": {"enabled": true}, "fp16": {"enabled": "auto"}}')
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(tmp_path / "ds.json"))
    path = written(tmp_path, f"tracking:\n  runs: {tmp_path / 'runs'}\n  uri: null\n")
    words = ["model.M=1", "model.d=8", "model.heads=2", "model.context=8", "train.steps=1", "train.batch=2"]
    assert main(["train", str(path), *words, "data.max_bytes=5000"]) == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert read_run(run).start["config"]["precision"]["compute"] == "bf16"


def test_a_conflict_ends_train_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    path = written(tmp_path, f"precision:\n  compute: bf16\ntracking:\n  runs: {tmp_path / 'runs'}\n  uri: null\n")
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert "run.yaml:2" in error
    assert "ACCELERATE_MIXED_PRECISION=fp16" in error
    assert not (tmp_path / "runs").exists()
