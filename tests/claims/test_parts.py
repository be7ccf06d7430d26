"""A claim in parts: each run is in one of them, nobody works on the same one twice, and the judge finds all done."""

import json
import os
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from normscale.claims import parts, runner
from normscale.claims.claim import work_config
from normscale.claims.manifest import manifest_path
from normscale.claims.parts import Part, agree, leased, part, refuse_while_leased
from normscale.claims.plans import cut_of
from normscale.claims.runner import planned, run_claims
from normscale.config.schema import RunConfig
from normscale.errors import BadInput, StoreError
from normscale.tracking.manifest import read_manifest
from normscale.tracking.reader import read_run
from tests.claims.test_runner import checkout

__all__ = ["checkout"]  # a fixture


@pytest.mark.parametrize(("word", "number", "of"), [("1/1", 1, 1), ("2/3", 2, 3), ("003/3", 3, 3)])
def test_a_part_is_a_number_of_so_many(word: str, number: int, of: int) -> None:
    assert part(word) == Part(number, of)


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("0/2", "parts count from 1 to 2; give one of 1/2 ... 2/2"),
        ("3/2", "parts count from 1"),
        ("1", "a part is I/N"),
        ("1/2/3", "a part is I/N"),
        ("-1/2", "a part is I/N"),
    ],
)
def test_what_is_no_part_is_refused(word: str, says: str) -> None:
    with pytest.raises(BadInput, match=f"^--part {word}: {says}"):
        part(word)


def configs(blocks: list[int]) -> list[tuple[str, RunConfig]]:
    return [(f"run{i}", RunConfig.model_validate({"model": {"M": M}})) for i, M in enumerate(blocks)]


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_every_run_is_in_one_part_and_the_dear_ones_are_spread(of: int) -> None:
    runs = configs([1, 48, 2, 48, 48, 1])
    shares = [Part(number, of).share(runs) for number in range(1, of + 1)]
    assert sorted(run for share in shares for run in share) == [run for run, _ in runs]
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    dear = [sum(run in ("run1", "run3", "run4") for run in share) for share in shares]
    assert max(dear) - min(dear) <= 1


def test_a_part_is_held_by_one_process_alone(tmp_path: Path) -> None:
    with leased(tmp_path, ["a"], "cpu", Part(1, 2)):
        who = f"process {os.getpid()} on {socket.gethostname()}"
        with (
            pytest.raises(BadInput, match=f"^--part 1/2: {who} works on it"),
            leased(tmp_path, ["b", "a"], "cpu", Part(1, 2)),
        ):
            pass
        with leased(tmp_path, ["a"], "cpu", Part(2, 2)), leased(tmp_path, ["a"], "smoke", Part(1, 2)):
            pass
        with leased(tmp_path, ["b"], "cpu", Part(1, 2)):  # what was refused holds nothing
            pass
        with (
            pytest.raises(BadInput, match=f"^claim a: {who} works on part 1/2 of its runs; .* --part I/2"),
            leased(tmp_path, ["a"], "cpu", Part(1, 3)),
        ):
            pass
        with pytest.raises(BadInput, match=f"^claim a: {who} works on part 1/2 of its runs; wait for it$"):
            refuse_while_leased(tmp_path, ["b", "a"], "cpu")
    refuse_while_leased(tmp_path, ["a"], "cpu")
    assert list((tmp_path / parts.FOLDER).iterdir()) == []


def test_parts_that_are_cut_from_other_runs_are_refused_and_it_is_said_in_what_they_differ(tmp_path: Path) -> None:
    cut = {"torch": "2.9", "device": "a CPU with AVX512", "runs": "123"}
    there = cut | {"device": "a CPU with AVX2", "runs": "456"}
    with leased(tmp_path, ["a"], "cpu", Part(1, 2)), leased(tmp_path, ["b", "a"], "cpu", Part(2, 2)):
        agree(tmp_path, ["b", "a"], "cpu", Part(2, 2), there)  # the other has not said yet
        with pytest.raises(
            BadInput,
            match=r"^claim a: process \d+ on .* has cut part 2/2 from other runs than these: device a CPU with AVX512"
            r" here and a CPU with AVX2 there, runs 123 here and 456 there; start all parts with the same words",
        ):
            agree(tmp_path, ["a"], "cpu", Part(1, 2), cut)
        agree(tmp_path, ["b", "a"], "cpu", Part(2, 2), cut | {"torch": "2.8"})  # of which the runs make nothing
        agree(tmp_path, ["a"], "cpu", Part(1, 2), cut)
        with (
            pytest.raises(BadInput, match=r"^--part 2/2: process \d+ on .* works on it"),
            leased(  # it holds it still
                tmp_path, ["a"], "cpu", Part(2, 2)
            ),
        ):
            pass
    assert list((tmp_path / parts.FOLDER).iterdir()) == []


def lease(runs: Path, host: str, pid: int, age_s: float = 0.0) -> Path:
    path = runs / parts.FOLDER / "a-cpu-1-of-2.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([host, str(pid)]))
    then = time.time() - age_s
    os.utime(path, (then, then))
    return path


def test_another_host_s_lease_counts_as_long_as_it_is_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lease(tmp_path, "elsewhere", 1, parts.STALE_S - 20)
    with pytest.raises(BadInput, match="process 1 on elsewhere works"), leased(tmp_path, ["a"], "cpu", Part(1, 2)):
        pass
    path = lease(tmp_path, "elsewhere", 1, parts.STALE_S + 1)
    monkeypatch.setattr(parts, "BEAT_S", 0.02)
    with leased(tmp_path, ["a"], "cpu", Part(1, 2)):
        assert json.loads(path.read_text()) == [socket.gethostname(), str(os.getpid())]
        os.utime(path, (1, 1))
        deadline = time.monotonic() + 10
        while path.stat().st_mtime < 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert path.stat().st_mtime > time.time() - 60
        lease(tmp_path, "elsewhere", 2)  # it was taken over while this process was frozen
    assert path.exists()


def test_a_lease_that_another_has_just_taken_over_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, holder, looks = lease(tmp_path, "other", 7), parts._holder, iter([None])
    monkeypatch.setattr(parts, "_holder", lambda path: next(looks, holder(path)))  # it was stale when we looked
    with pytest.raises(BadInput, match="process 7 on other works on it"), leased(tmp_path, ["a"], "cpu", Part(1, 2)):
        pytest.fail("two hold it")
    assert json.loads(path.read_text()) == ["other", "7"]
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_a_process_of_this_host_that_is_gone_holds_nothing(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    lease(tmp_path, socket.gethostname(), gone.pid)
    refuse_while_leased(tmp_path, ["a"], "cpu")
    with leased(tmp_path, ["a"], "cpu", Part(1, 2)):
        pass


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "claims").write_text("a file")
    with pytest.raises(StoreError, match="cannot be written"), leased(tmp_path, ["a"], "cpu", Part(1, 2)):
        pass


def run(*ids: str, part: Part | None = None) -> int:
    return run_claims(ids, "cpu", runs=Path("runs"), uri=None, workers=1, part=part)


@pytest.mark.slow
def test_parts_train_and_a_start_without_one_judges(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_trial", lambda *_: runner.Cost())  # it takes as long as the runs themselves
    shown = [planned(["core"], "cpu", Path("runs"), 1, Part(number, 2), verbose=True) for number in (1, 2)]
    assert [lines[-1].partition(" runs ")[2] for lines in shown] == [
        f"in profile cpu, part {number}/2; nothing was started" for number in (1, 2)
    ]
    cells = [[line for line in lines if " s" in line and "scheme=" in line] for lines in shown]
    assert sorted(cells[0] + cells[1]) == sorted(planned(["core"], "cpu", Path("runs"), 1, verbose=True)[:4])
    assert run("core", part=Part(1, 2)) == 0
    said = capsys.readouterr().out
    assert "one, two: profile cpu, part 1/2" in said
    assert "2 runs to do, 0 done already" in said
    assert "part 1/2 is done; when all parts are, this judges: normscale claim run one two --profile cpu" in said
    assert "REFUTED" not in said
    assert not (checkout / "reports").exists()
    manifest = read_manifest(manifest_path(checkout / "runs", "two", "cpu"))
    assert (len(manifest.cells), manifest.verdict) == (2, None)

    # The same part again finds its runs; the other one has those that are missing.
    monkeypatch.setattr(runner.Pool, "run", lambda *_: pytest.fail("everything of this part is done"))
    assert run("core", part=Part(1, 2)) == 0
    assert "all 2 runs are done already" in capsys.readouterr().out
    monkeypatch.undo()
    monkeypatch.chdir(checkout)
    monkeypatch.setattr(runner, "_trial", lambda *_: runner.Cost())
    assert run("core", part=Part(2, 2)) == 0
    assert "1 runs to do, 0 done already" in capsys.readouterr().out

    monkeypatch.setattr(runner.Pool, "run", lambda *_: pytest.fail("everything is done"))
    assert run("core") == 0
    said = capsys.readouterr().out
    assert "all 3 runs are done already" in said
    verdict = read_manifest(manifest_path(checkout / "runs", "two", "cpu")).verdict
    assert verdict is not None
    assert all(read_run(folder).finished for folder in (checkout / "runs").glob("pre-*"))
    assert run("core", part=Part(2, 2)) == 0  # it leaves the verdict alone
    assert read_manifest(manifest_path(checkout / "runs", "two", "cpu")).verdict == verdict


def test_a_part_beside_one_of_another_machine_trains_nothing(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner.Pool, "run", lambda *_: pytest.fail("a run was begun"))
    plans = runner.plans_of(
        [(claim, [(cell, work_config(claim, cell, "runs", None)) for cell in claim.cells("cpu")])
         for claim in runner.list_claims()]
    )  # fmt: skip
    cut = cut_of(plans)
    assert sorted(cut) == ["claims", "device", "runs", "sources", "torch"]
    with leased(checkout / "runs", ["one", "two"], "cpu", Part(1, 2)):
        agree(checkout / "runs", ["one", "two"], "cpu", Part(1, 2), cut | {"runs": "others"})
        with pytest.raises(BadInput, match=f"from other runs than these: runs {cut['runs']} here and others there"):
            run("core", part=Part(2, 2))


def test_a_whole_start_is_refused_while_parts_are_at_work(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        pytest.fail("a worker was started")

    monkeypatch.setattr(runner, "Pool", refuse)
    with leased(checkout / "runs", ["two"], "cpu", Part(1, 2)):
        with pytest.raises(BadInput, match=r"^claim two: .* works on part 1/2"):
            run("core")
        with pytest.raises(BadInput, match=r"^--part 1/2: .* works on it"):
            run("two", part=Part(1, 2))
    assert not (checkout / "reports").exists()
