"""What makes two runs one: each thing that numbers depend on changes the hash, and nothing else does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import normscale
from normscale.config.schema import RunConfig
from normscale.train import identity as module
from normscale.train.identity import identity

BASE: dict[str, Any] = {"model": {"M": 1, "d": 8, "heads": 1, "context": 8}, "data": {"max_bytes": 20_000}}
CONFIG = RunConfig.model_validate(BASE)

Patch = Callable[[pytest.MonkeyPatch], Any]


def on_a_gpu(patch: pytest.MonkeyPatch) -> None:
    """Another kind of device, of the same name."""
    patch.setattr(module, "device_kind", lambda: "cuda")
    patch.setattr(torch.cuda, "get_device_name", torch.backends.cpu.get_cpu_capability)


def on_another_gpu(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module, "device_kind", lambda: "cuda")
    patch.setattr(torch.cuda, "get_device_name", lambda: "another")


CHANGES: dict[str, Patch] = {
    "device": on_a_gpu,
    "device_name": on_another_gpu,
    "instructions": lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 97),
    "world": lambda patch: patch.setattr(module, "world_size", lambda: 2),
    "sources": lambda patch: patch.setattr(module, "sources_hash", lambda: "another"),
    "torch": lambda patch: patch.setattr(torch, "__version__", "0.0.1"),
}


def test_an_engine_counts_as_what_it_comes_to_and_its_own_configuration_by_its_content(tmp_path: Path) -> None:
    def hash_of(world: int, **engine: Any) -> str:
        found: str = identity(RunConfig.model_validate(BASE | {"engine": engine}), world)["hash"]
        return found

    assert hash_of(1) == hash_of(1, name="plain") == hash_of(1, timeout_s=7.0)
    assert hash_of(2) == hash_of(2, name="ddp")
    assert (
        len({hash_of(1), hash_of(2), hash_of(1, name="ddp"), hash_of(1, name="fsdp2"), hash_of(2, name="fsdp2")}) == 5
    )
    files = [tmp_path / name for name in ("one.json", "same.json", "other.json")]
    for file, text in zip(
        files, ('{"gradient_clipping": 1}', '{ "gradient_clipping": 1 }', '{"gradient_clipping": 2}'), strict=True
    ):
        file.write_text(text)
    one, same, other = (hash_of(1, name="deepspeed", json=str(file)) for file in files)
    assert one == same != other


def test_each_thing_that_numbers_depend_on_changes_the_hash() -> None:
    hashes = [identity(CONFIG)["hash"], identity(CONFIG)["hash"]]
    assert len(set(hashes)) == 1
    for change in CHANGES.values():
        with pytest.MonkeyPatch.context() as patch:
            change(patch)
            hashes.append(identity(CONFIG)["hash"])
    assert len(set(hashes)) == 1 + len(CHANGES)


def test_deepspeeds_version_counts_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    zero = RunConfig.model_validate(BASE | {"engine": {"name": "deepspeed"}})
    before = [identity(config)["hash"] for config in (CONFIG, zero)]
    monkeypatch.setattr(module, "version", lambda package: f"another {package}")
    assert [identity(config)["hash"] == old for config, old in zip((CONFIG, zero), before, strict=True)] == [
        True,
        False,
    ]


def test_each_part_of_the_configuration_changes_the_hash_but_names_and_places() -> None:
    changes: list[dict[str, Any]] = [
        {"seed": 1},
        {"model": BASE["model"] | {"eps": 1e-6}},
        {"train": {"steps": 3}},
        {"probes": {"every": 7}},
        {"precision": {"compute": "bf16"}},
        {"data": {"max_bytes": 30_000}},
    ]
    hashes = {identity(RunConfig.model_validate(BASE | parts))["hash"] for parts in ({}, *changes)}
    assert len(hashes) == 1 + len(changes)
    label = {"name": "other", "tracking": {"runs": "elsewhere", "uri": None}}
    assert identity(RunConfig.model_validate(BASE | label))["hash"] == identity(CONFIG)["hash"]


def sources(monkeypatch: pytest.MonkeyPatch, package: Path) -> str:
    monkeypatch.setattr(normscale, "__file__", str(package / "__init__.py"))
    return str(module.sources_hash.__wrapped__())


@pytest.mark.parametrize(
    ("folder", "counts"),
    [
        *[(name, True) for name in ("ops", "norms", "schemes", "models", "data", "probes", "train", "ops/kernels")],
        *[(name, False) for name in ("tracking", "claims", ".")],
    ],
)
def test_source_files_count_where_numbers_are_made(
    folder: str, counts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    file = tmp_path / folder / "a.py"
    file.write_text("x = 1\n")
    seen = [sources(monkeypatch, tmp_path)]
    file.write_text("x = 2\n")  # another text
    seen.append(sources(monkeypatch, tmp_path))
    file.rename(file.with_name("b.py"))  # another name
    seen.append(sources(monkeypatch, tmp_path))
    (tmp_path / folder / "note.txt").write_text("no source")
    assert len(set(seen)) == (3 if counts else 1)
    assert sources(monkeypatch, tmp_path) == seen[-1]
