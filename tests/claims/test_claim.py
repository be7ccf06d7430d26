import pytest

from normscale.claims.claim import Claim, Profile, run_config
from normscale.claims.expect import Dies, Larger, Slope, Steeper, Thirds, Trains
from normscale.errors import BadInput


def claim(**changes: object) -> Claim:
    fields = {
        "id": "a-claim",
        "says": "A trains.",
        "source": "a paper",
        "family": "depth",
        "base": {"train.optim.lr": 3e-3, "train.steps": 20, "train.eval_every": 5, "model.N": 0},
        "arms": {"a": {"model.scheme": "post"}, "b": {"model.scheme": "pre", "train.optim.lr": 6e-3}},
        "labels": {"a": "A", "b": "B"},
        "profiles": {"cpu": Profile({"a": {2: 2, 12: 1}, "b": {12: 1}}, {"b": {12: 1}}, {"a": {12: 1}})},
        "control": (Trains("a", at=(2,)),),
        "expect": (Trains("a", at_least=12),),
        "figure": "gap",
        "how": "",
        "differs": (),
    }
    return Claim(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_claim_expands_into_one_cell_per_arm_depth_role_and_seed() -> None:
    assert [cell.name for cell in claim().cells("cpu")] == [
        "L0002 a s0",
        "L0002 a s1",
        "L0012 a s0",
        "L0012 b s0",
        "L0012 b s0 lr/3",
        "L0012 a s0 x5 steps",
    ]
    assert [cell.role for cell in claim().cells("cpu")] == ["control", "control", "main", "main", "low-lr", "long"]


def test_the_settings_of_arm_role_and_profile_reach_the_configuration() -> None:
    made = claim(profiles={"cpu": Profile({"b": {12: 1}}, {"b": {12: 1}}, {"b": {12: 1}}, set={"train.batch": 4})})
    main, low, long = (run_config(made, cell, "somewhere", None) for cell in made.cells("cpu"))
    assert (main.model.M, main.model.scheme, main.train.batch, main.tracking.runs) == (12, "pre", 4, "somewhere")
    assert (main.train.optim.lr, low.train.optim.lr, long.train.optim.lr) == (6e-3, pytest.approx(2e-3), 6e-3)
    assert (low.train.steps, low.train.eval_every) == (60, 15)
    assert (long.train.steps, long.train.eval_every) == (100, 25)


def test_the_name_of_a_run_is_no_part_of_its_numbers() -> None:
    first, second = (run_config(claim(id=name), claim().cells("cpu")[0], "r", None) for name in ("one", "two"))
    assert first.name != second.name
    assert first.numerical() == second.numerical()


def test_the_size_of_a_profile_does_not_undo_what_an_arm_is() -> None:
    arms = {"a": {"train.schedule.warmup_steps": 0}, "b": {}}
    small = Profile({"a": {2: 1}, "b": {2: 1}}, set={"train.schedule.warmup_steps": 2})
    warmups = [
        cell.settings["train.schedule.warmup_steps"] for cell in claim(arms=arms, profiles={"cpu": small}).cells("cpu")
    ]
    assert warmups == [0, 2]


def test_a_wrong_setting_is_one_line_that_names_claim_cell_and_key() -> None:
    made = claim(base={**claim().base, "train.optim.lrr": 1})
    with pytest.raises(BadInput, match=r"claim a-claim, L0002 a s0: .*lrr") as caught:
        run_config(made, made.cells("cpu")[0], "r", None)
    assert "\n" not in str(caught.value)


def test_an_unknown_profile_or_arm_is_refused() -> None:
    with pytest.raises(BadInput, match="no profile 'gpu'; it has cpu"):
        claim().cells("gpu")
    with pytest.raises(BadInput, match="an arm 'c'; the arms are a, b"):
        claim(profiles={"cpu": Profile({"c": {2: 1}})}).cells("cpu")


def test_an_arm_says_which_settings_its_depth_goes_to() -> None:
    made = claim(
        depth_keys={"b": ("model.N", "model.M")},
        arms={"a": {}, "b": {"data.task": "copy"}},
        profiles={"cpu": Profile({"a": {12: 1}, "b": {12: 1}})},
    )
    one, two = (run_config(made, cell, "r", None).model for cell in made.cells("cpu"))
    assert (one.N, one.M, two.N, two.M) == (0, 12, 12, 12)


@pytest.mark.parametrize(
    ("control", "expect", "asked"),
    [
        ((Trains("a", at=(2,)),), (Trains("a", at_least=12),), "ab"),  # b stands beside what trains
        ((), (Dies("a", at_least=12, beside=("b",)),), "ab"),
        ((), (Slope("a", "update", 10, "above", 0.25),), ""),
        ((), (Steeper("a", "b", "update", 10, 0.25),), ""),
        ((Trains("b", at=(2,)),), (Larger("a", "a", "update", 10, 1.0),), "b"),
        ((), (Slope("a", "update", 10, "above", 0.25), Trains("b", at_least=12)), "b"),
        ((), (Thirds("a", "angle", 12, "ratio", "below", 1.0),), "ab"),
    ],
)
def test_who_is_asked_whether_it_trains(control: object, expect: object, asked: str) -> None:
    made = claim(control=control, expect=expect)
    assert "".join(arm for arm in "ab" if made.asks_training(arm)) == asked


def test_a_profile_with_another_task_has_its_own_depth_control_and_expectations() -> None:
    own = Profile(
        {"a": {3: 1, 6: 1}},
        set={"data.task": "span"},
        depth_keys=("model.N", "model.M"),
        control=(Trains("a", at=(3,)),),
        expect=(Trains("a", at=(6,)),),
    )
    made = claim(profiles={"cpu": claim().profiles["cpu"], "paper": own})
    assert made.at("cpu") is made
    assert (made.at("paper").control, made.at("paper").expect) == (own.control, own.expect)
    cells = made.cells("paper")
    assert [cell.role for cell in cells] == ["control", "main"]
    configs = [run_config(made, cell, "r", None) for cell in cells]
    assert [(config.model.N, config.model.M) for config in configs] == [(3, 3), (6, 6)]
    assert all(cell.settings["model.N"] == 0 for cell in made.cells("cpu"))
