"""The ranks meet: whatever is not as planned ends all of them with one line, in time, before anything is trained."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from normscale.cli import main
from normscale.errors import ConfigError, DataError, LaunchError
from normscale.planned import VARIABLE, Planned, code_hash, config_hash
from normscale.train import rendezvous
from normscale.train.engines.ranks import device_kind
from normscale.train.facts import Facts, difference, missing, other_hosts
from normscale.train.lost import Roll
from normscale.train.rendezvous import Agreed, Disagreement, Meeting, NoStore

ROOT = Path(__file__).parents[2]
PARTS = {"hash": "abc", "data_digest": "d0", "precision": "fp32", "threads": 1, "device_name": "AVX2"}
SETTINGS = {"seed": 0, "train": {"steps": 4, "optim": {"lr": 1e-3}}}


def facts(rank: int = 0, **other: Any) -> Facts:
    own: dict[str, Any] = {"host": f"node{rank // 2}", "world": 4, "code": "c0", "torch": "2.13", "words": "w0"}
    return Facts(rank=rank, **{**own, "settings": SETTINGS, "parts": PARTS, "run": "r", **other})


PLAN = Planned(4, ("node0", "node1"), "w0", "c0")


@pytest.mark.parametrize(
    ("other", "planned", "says"),
    [
        ({"world": 2}, PLAN, "rank 3 on node1 was started as one of 2, and 4 were planned"),
        ({"world": 2}, None, "rank 3 on node1 was started as one of 2, and rank 0 on node0 as one of 4"),
        ({"world": 1}, PLAN, "4 ranks were planned (NORMSCALE_PLAN), but on node1 a process was started by itself"),
        (
            {"code": "c1"},
            PLAN,
            "rank 3 on node1 has other code than was launched (its sources hash to c1, those to c0)",
        ),
        ({"code": "c1"}, None, "rank 3 on node1 has other code than rank 0 on node0 (sources c1 and c0)"),
        ({"words": "w1"}, PLAN, "rank 3 on node1 reads another configuration than was launched"),
        ({"torch": "2.12"}, PLAN, "rank 3 on node1 has PyTorch 2.12, and rank 0 on node0 has 2.13"),
        (
            {"settings": {**SETTINGS, "train": {"steps": 4, "optim": {"lr": 0.5}}}},
            None,
            "train.optim.lr: 0.5 on rank 3 on node1 and 0.001 on rank 0 on node0",
        ),
        ({"parts": {**PARTS, "data_digest": "d1"}}, PLAN, "data.source: the data on rank 3 on node1 are not those on"),
        ({"parts": {**PARTS, "precision": "bf16"}}, PLAN, "precision is bf16 on rank 3 on node1 and fp32 on rank 0"),
        ({"parts": {**PARTS, "threads": 8, "device_name": "AVX512"}}, PLAN, None),
        ({"error": "data.source: gone", "parts": {}, "settings": {}}, PLAN, None),
    ],
)
def test_a_difference_is_named_with_rank_host_and_values(
    other: dict[str, Any], planned: Planned | None, says: str | None
) -> None:
    line = difference([facts(0), facts(1), facts(3, **other)], planned)
    assert (line or "").startswith(says or "")
    assert (line is None) == (says is None)


def test_all_alike_differ_in_nothing() -> None:
    everyone = [facts(rank) for rank in range(4)]
    assert difference(everyone, PLAN) is None
    assert difference(everyone, Planned(None, None, "w0", "c0")) is None  # both are open
    assert difference(everyone, None) is None
    assert other_hosts(everyone, PLAN) is None


def test_another_host_set_and_missing_ranks_are_named() -> None:
    line = other_hosts([facts(rank) for rank in range(4)], Planned(4, ("node0", "node2"), "w0", "c0"))
    assert (line or "").startswith("the ranks were planned for node0, node2 and came from node0, node1")
    assert missing([facts(0), facts(1)], 4, 2.0, PLAN).startswith(
        "ranks 2, 3 of 4 had not come after 2 s (engine.timeout_s); there came ranks 0, 1 from node0; nobody came from"
        " node1;"
    )


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.Store:
    """Returns the store that the ranks of a test meet in, threads of this process."""
    for name in ("WORLD_SIZE", "RANK", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    shared = dist.HashStore()
    monkeypatch.setattr(Meeting, "_reach", lambda self: shared)
    monkeypatch.setattr(Meeting, "_make_group", lambda self: None)
    monkeypatch.setattr(rendezvous, "LATE_S", 0.5)
    monkeypatch.setattr(rendezvous, "LINGER_S", 1.0)
    monkeypatch.setattr(rendezvous, "SLACK_S", 0.5)
    return shared


def meeting(rank: int, world: int, limit_s: float = 20.0, planned: Planned | None = None, **own: Any) -> Meeting:
    one = Meeting(own.get("settings", SETTINGS), own.get("words"), limit_s)
    one.rank, one.world, one.planned = rank, world, planned
    return one


def all_at_once(ranks: list[Callable[[], Agreed]]) -> list[Agreed | BaseException]:
    """Returns what became of each rank."""
    came: list[Agreed | BaseException] = [RuntimeError("it never ended")] * len(ranks)

    def one(place: int) -> None:
        try:
            came[place] = ranks[place]()
        except BaseException as error:
            came[place] = error

    threads = [threading.Thread(target=one, args=(place,), daemon=True) for place in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return came


def meets(one: Meeting, done: int | None = None, **parts: Any) -> Callable[[], Agreed]:
    return lambda: one.meet(f"run-{one.rank}", {**PARTS, **parts}, done)


def test_ranks_that_agree_hold_to_rank_0(store: dist.Store) -> None:
    found = all_at_once([meets(meeting(0, 2), None), meets(meeting(1, 2), 0, hash="other", threads=3)])
    assert found[0] == found[1]
    assert isinstance(found[0], Agreed)
    assert (found[0].run, found[0].hash, found[0].done, len(found[0].hosts)) == ("run-0", "abc", None, 2)


@pytest.mark.parametrize("fresh", [True, False])
def test_rank_0_knows_whether_a_run_begins_anew(store: dist.Store, fresh: bool) -> None:
    ranks = [meeting(rank, 2) for rank in range(2)]
    found = all_at_once(
        [
            lambda: ranks[0].meet("r", PARTS, None, fresh),
            lambda: ranks[1].meet("r", PARTS, None, not fresh),
        ]
    )
    assert [one.fresh for one in found if isinstance(one, Agreed)] == [fresh, fresh]


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_one_that_differs_ends_all_with_the_same_line_at_once(odd: int, store: dist.Store) -> None:
    ranks = [meeting(rank, 3, settings={"seed": 7 if rank == odd else 0}) for rank in range(3)]
    begun = time.monotonic()
    errors = all_at_once([meets(one) for one in ranks])
    assert time.monotonic() - begun < 5
    assert all(isinstance(error, Disagreement) and error.exit_code == 2 for error in errors)
    (line,) = {str(error) for error in errors}
    assert line.startswith("seed: ")
    assert f"{7 if odd else 0} on rank {odd or 1}" in line
    assert {error.speaker for error in errors if isinstance(error, Disagreement)} == {0}


def test_a_rank_that_does_not_come_is_named_by_all_who_did(store: dist.Store) -> None:
    errors = all_at_once([meets(meeting(rank, 4, 1.0)) for rank in (0, 2)])
    (line,) = {str(error) for error in errors}
    assert line.startswith("ranks 1, 3 of 4 had not come after 1 s")
    assert all(isinstance(error, LaunchError) for error in errors)


def test_without_rank_0_the_first_that_came_speaks(store: dist.Store) -> None:
    errors = all_at_once([meets(meeting(rank, 3, 1.0)) for rank in (1, 2)])
    assert [error.speaker for error in errors if isinstance(error, Disagreement)] == [1, 1]
    assert "rank 0 of 3 had not come after 1 s" in str(errors[0])


def test_a_rank_that_is_started_twice_is_told(store: dist.Store) -> None:
    errors = all_at_once([meets(meeting(rank, 3)) for rank in (0, 1, 1)])
    assert {type(error) for error in errors} == {Disagreement}
    assert "rank 1 was started twice" in str(errors[0])


def fails(one: Meeting, error: Exception) -> Callable[[], Agreed]:
    return lambda: one.fail(error)


def test_a_mistake_of_one_host_is_told_by_all_and_one_of_all_by_each(store: dist.Store) -> None:
    gone = DataError("data.source: 'a.txt' does not exist")
    errors = all_at_once([meets(meeting(0, 2)), fails(meeting(1, 2), gone)])
    assert {type(error) for error in errors} == {Disagreement}
    assert str(errors[0]).startswith("rank 1 on ")
    assert str(errors[0]).endswith(": data.source: 'a.txt' does not exist")
    assert str(errors[0]) == str(errors[1])


def test_a_mistake_of_all_keeps_its_place_in_the_configuration(store: dist.Store) -> None:
    own = [ConfigError("train.batch: 3 is odd", key="train.batch") for _ in range(2)]
    assert all_at_once([fails(meeting(rank, 2), own[rank]) for rank in range(2)]) == own


def test_a_mistake_is_its_own_where_there_is_nowhere_to_meet(
    store: dist.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(self: Meeting) -> dist.Store:
        raise NoStore("nobody answered there", self.rank)

    monkeypatch.setattr(Meeting, "_reach", nowhere)
    with pytest.raises(ConfigError, match=r"^mine$"):
        meeting(1, 2).fail(ConfigError("mine"))
    with pytest.raises(LaunchError, match="nobody answered there"):
        meeting(1, 2).meet("r", PARTS, None)


def test_other_code_explains_a_mistake(store: dist.Store) -> None:
    planned = Planned(2, None, "w0", "c0")
    errors = all_at_once([fails(meeting(rank, 2, planned=planned), ConfigError("x")) for rank in range(2)])
    assert f"has other code than was launched (its sources hash to {code_hash()}" in str(errors[0])


def test_a_process_alone_where_ranks_were_planned_trains_nothing(
    monkeypatch: pytest.MonkeyPatch, store: dist.Store
) -> None:
    monkeypatch.setenv(VARIABLE, Planned(4, None, "w0", code_hash()).text())
    with pytest.raises(LaunchError, match=r"^4 ranks were planned \(NORMSCALE_PLAN\), but on .* train alone"):
        Meeting(SETTINGS)
    monkeypatch.setenv(VARIABLE, Planned(1, ("elsewhere",), "w0", code_hash()).text())
    with pytest.raises(LaunchError, match=r"^the ranks were planned for elsewhere and came from"):
        Meeting(SETTINGS)
    monkeypatch.setenv(VARIABLE, Planned(1, None, "w0", code_hash()).text())
    assert Meeting(SETTINGS, "w0").meet("r", PARTS, None).run == "r"
    with pytest.raises(LaunchError, match="another configuration than was launched"):
        Meeting(SETTINGS, "w1")


def test_the_command_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(ROOT / "configs/train/quick.yaml"), f"tracking.runs={tmp_path / 'runs'}", "tracking.uri=null"]
    monkeypatch.setenv(VARIABLE, Planned(2, None, config_hash(words), code_hash()).text())
    assert main(["train", *words]) == 2
    assert capsys.readouterr().err.startswith("normscale: 2 ranks were planned (NORMSCALE_PLAN)")
    assert not (tmp_path / "runs").exists()


def test_ranks_that_were_started_for_gpus_train_on_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_driver() -> None:
        raise RuntimeError("Found no NVIDIA driver\n on your system.")

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.cuda.init", no_driver)
    monkeypatch.setenv("NORMSCALE_DEVICE", "cuda")
    words = [str(ROOT / "configs/train/quick.yaml"), f"tracking.runs={tmp_path / 'runs'}", "tracking.uri=null"]
    assert main(["train", *words]) == 2
    said = capsys.readouterr().err
    assert said.startswith("normscale: what was started is for GPUs, and PyTorch ")
    assert "(Found no NVIDIA driver on your system.); mend that, or give --device cpu" in said
    assert not list((tmp_path / "runs").glob("*"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as a claim's run on the CPU has it
    assert device_kind() == "cpu"


def test_the_roll_names_who_does_not_answer(store: dist.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normscale.train.lost.LISTEN_S", 0.05)
    monkeypatch.setattr("normscale.train.lost.ANSWER_S", 0.5)
    hosts = ("node0", "node0", "node1", "node1")
    monkeypatch.setattr(dist.HashStore, "clone", lambda self: self, raising=False)
    rolls = [Roll(store, rank, hosts) for rank in (0, 1)]
    lost = rolls[0].call()
    assert lost == [2, 3]
    assert rolls[0].said(lost) == "ranks 2, 3 (node1)"
    assert Roll(None, 0, hosts).call() is None
    rolls[1].close()
