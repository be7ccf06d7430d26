"""What a budget pays for, on made-up costs."""

from collections.abc import Mapping

from normscale.claims.budget import Share, divide, said
from normscale.claims.claim import Claim, Grid, Profile
from normscale.claims.expect import Trains

FLOOR: Grid = {"pre": {2: 1, 12: 2}}
MAIN: Grid = {"pre": {2: 2, 6: 3, 12: 3}}


def claim(name: str, expectations: int = 1, floor: Grid | None = FLOOR) -> Claim:
    return Claim(
        id=name,
        says="It trains.",
        source="nowhere",
        family="depth",
        base={"train.steps": 9, "train.optim.lr": 1e-3},
        arms={"pre": {}},
        labels={"pre": "Pre-Norm"},
        profiles={"cpu": Profile(MAIN, low_lr={"pre": {12: 2}}, long={"pre": {12: 1}}, floor=floor)},
        control=(),
        expect=(Trains("pre", at_least=2),) * expectations,
        figure="gap",
        how="",
        differs=(),
    )


def shares(*claims: Claim, budget_s: float, costs: Mapping[str, float] | None = None, workers: int = 1) -> list[Share]:
    """Every run costs its depth in seconds, unless `costs` says otherwise; claims share no run."""
    asked = [(one, [(cell, f"{one.id} {cell.name}") for cell in one.cells("cpu")]) for one in claims]
    full = {run: float(cell.depth) for _, cells in asked for cell, run in cells}
    return divide(asked, "cpu", full if costs is None else costs, budget_s, workers)


def names(share: Share) -> set[str]:
    return {cell.name for cell, _ in share.kept}


ALL = 2 * 2 + 3 * 6 + 3 * 12 + 2 * 12 + 12  # seconds of all runs of a claim
LEAST = 2 + 2 * 12 + 12  # of its floor


def test_enough_for_all_leaves_nothing_out() -> None:
    (share,) = shares(claim("a"), budget_s=ALL)
    assert len(share.kept) == 11
    assert share.left_out == []
    assert said(share, "a budget") == []


def test_seeds_go_before_cells_the_highest_and_dearest_first() -> None:
    (share,) = shares(claim("a"), budget_s=ALL - 1)
    assert [cell.name for cell, *_ in share.left_out] == ["L0012 pre s2"]
    (share,) = shares(claim("a"), budget_s=ALL - 13)
    assert [cell.name for cell, *_ in share.left_out] == ["L0012 pre s2", "L0006 pre s2"]
    assert said(share, "an hour") == ["an hour had no room for further seeds: L0012 pre s2, L0006 pre s2"]


def test_cells_go_when_no_seed_is_left_to_go_and_the_floor_never_does() -> None:
    (share,) = shares(claim("a"), budget_s=LEAST)
    assert names(share) == {"L0002 pre s0", "L0012 pre s0", "L0012 pre s1", "L0012 pre s0 lr/3"}
    assert {step for _, _, step in share.left_out} == {"seed", "cell"}
    assert "for cells: L0012 pre s0 x5 steps, L0006 pre s0" in said(share, "an hour")[1]


def test_below_its_floor_a_claim_is_not_run_and_says_what_it_would_take() -> None:
    (share,) = shares(claim("a"), budget_s=LEAST - 1)
    assert share.kept == []
    assert said(share, "a budget of 1 hours") == [
        "its floor takes about 1 core-minutes, for which a budget of 1 hours had no room (11 runs in all)"
    ]
    share.profile = "gpu"
    assert said(share, "a budget")[0].startswith("its floor takes about 1 GPU-minutes")
    assert shares(claim("a", floor=None), budget_s=ALL - 1)[0].kept == []  # without a floor all of it is needed


def test_what_tells_most_a_minute_is_first_and_is_cut_last() -> None:
    both = claim("dull"), claim("rich", 3)
    kept = {share.claim.id: len(share.kept) for share in shares(*both, budget_s=2 * ALL - 13)}
    assert list(kept) == ["rich", "dull"]
    assert kept == {"rich": 11, "dull": 9}
    # All further seeds go before the first cell does.
    assert {share.claim.id: len(share.kept) for share in shares(*both, budget_s=ALL + LEAST)} == {"rich": 9, "dull": 6}
    assert {s.claim.id for s in shares(claim("dull"), claim("rich", 3), budget_s=LEAST) if s.kept} == {"rich"}


def test_room_that_a_dropped_claim_leaves_is_used() -> None:
    first, second = shares(claim("rich", 2), claim("dull"), budget_s=2 * LEAST - 1)
    assert second.kept == []
    assert len(first.kept) > 4
    assert sum(cell.depth for cell, _ in first.kept) <= 2 * LEAST - 1


def test_runs_that_are_done_cost_nothing_and_stay() -> None:
    own = claim("a")
    left = {"a L0002 pre s0": 2.0, "a L0012 pre s0": 12.0}
    (share,) = shares(own, budget_s=14, costs=left)
    assert len(share.kept) == 11
    (share,) = shares(own, budget_s=13, costs=left)
    assert share.kept == []  # its floor is not paid for: neither of the two may go
    (share,) = shares(own, budget_s=5, costs={"a L0006 pre s1": 6.0})
    assert len(share.kept) == 10


def test_a_run_that_two_claims_share_is_paid_for_once() -> None:
    one, two = claim("a"), claim("b")
    asked = [(each, [(cell, cell.name) for cell in each.cells("cpu")]) for each in (one, two)]
    costs = {cell.name: float(cell.depth) for cell in one.cells("cpu")}
    assert all(share.left_out == [] for share in divide(asked, "cpu", costs, ALL, 1))


def test_workers_share_the_time_but_not_a_run() -> None:
    assert shares(claim("a"), budget_s=ALL / 2 + 1, workers=2)[0].left_out == []  # 48 s of one, 46 s of the other
    assert shares(claim("a"), budget_s=11, workers=100)[0].kept == []  # one run alone takes 12


def test_a_long_run_whose_claim_comes_last_is_not_taken_to_begin_first() -> None:
    rich, dull = claim("rich", 9), claim("dull")
    asked = [(one, [(one.cells("cpu")[i], f"{one.id} {i}") for i in range(n)]) for one, n in ((rich, 2), (dull, 1))]
    costs = {"rich 0": 1.0, "rich 1": 1.0, "dull 0": 2.0}  # 4 s of work for two, of whom one is idle in the last
    assert [len(share.kept) for share in divide(asked, "cpu", costs, 3, 2)] == [2, 1]
    assert [len(share.kept) for share in divide(asked, "cpu", costs, 2.9, 2)] == [1, 1]
