"""Every claim of the checkout: its configurations are valid, its expectations can be judged, its smoke run runs."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from normscale.claims.claim import Claim, ProfileName, run_config, work_config
from normscale.claims.discover import list_claims
from normscale.claims.expect import Dies, Expectation, SlopeWithin, Thirds, Value
from normscale.claims.judges.values import judge_value
from normscale.claims.protocol import DEPTH, SMALL
from normscale.claims.runner import planned, run_claims
from normscale.claims.verdict import describe, judge
from normscale.config.schema import RunConfig
from normscale.measures.config import MeasureConfig
from normscale.measures.run import bound
from tests.claims.synthetic import SLOPES, by_depth, by_slope, by_theory, measurement, record, results
from tests.experiments.as_claimed import NUMBERS, as_claimed

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = {claim.id: claim for claim in list_claims(ROOT / "experiments")}
every_claim = pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)


@every_claim
def test_every_cell_of_every_profile_is_a_valid_configuration_and_named_once(claim: Claim) -> None:
    assert set(claim.profiles) >= {"smoke", "cpu", "gpu"}
    for profile in claim.profiles:
        cells = claim.cells(profile)
        assert len({cell.name for cell in cells}) == len(cells)
        for cell in cells:
            config = work_config(claim, cell, "runs", None)
            if isinstance(config, MeasureConfig):
                bound(config)
                assert cell.depth == 0
            else:
                assert {config.model.N, config.model.M} <= {0, cell.depth}


@every_claim
@pytest.mark.parametrize("profile", ["cpu", "gpu", "paper"])
def test_the_floor_is_part_of_the_claim_and_enough_to_judge_it(claim: Claim, profile: ProfileName) -> None:
    if profile == "paper" and profile not in claim.profiles:
        pytest.skip("few claims have the published protocol")
    scale = claim.profiles[profile]
    assert scale.floor is not None, "say what cannot be left out"
    for arm, depths in scale.floor.items():
        own = {**scale.main.get(arm, {}), **scale.sweep.get(arm, {})}
        assert all(seeds <= own[depth] for depth, seeds in depths.items()), arm
    everything = results(claim, profile, by_theory(claim.at(profile)))
    floor = [result for result in everything if claim.in_floor(profile, result.cell)]
    judgement = judge(claim, profile, floor)
    assert judgement.verdict == judge(claim, profile, everything).verdict, judgement.headline
    assert all(part.verdict != "not run" for part in judgement.parts), judgement.headline


@every_claim
def test_a_reader_finds_names_reasons_and_only_numbers_that_exist(claim: Claim) -> None:
    assert set(claim.labels) == set(claim.arms)
    assert claim.says
    assert claim.how
    assert claim.differs
    for expectation in (*claim.expect, *claim.control):
        assert claim.labels[expectation.arm] in describe(claim, expectation)
        assert not isinstance(expectation, Value) or expectation.number in claim.numbers
    measured = {item.name for item in judge(claim, "cpu", results(claim, "cpu", by_theory(claim))).measured}
    assert set(claim.paper) <= measured


@every_claim
def test_a_published_record_judges_what_the_claim_says_now(claim: Claim) -> None:
    record = ROOT / "experiments" / "results" / f"{claim.id}.json"
    if not record.exists():
        pytest.skip("no record is published")
    told = json.loads(record.read_text())
    now = claim.at(told["profile"])
    assert (told["says"], told["source"]) == (claim.says, claim.source)
    for key, expected in (("parts", now.expect), ("control", now.control)):
        assert sorted(part["expect"] for part in told[key]) == sorted(describe(now, each) for each in expected)


def test_streams_of_layernorm_scaling_may_grow_up_to_the_papers_bound() -> None:
    own = [e for e in CLAIMS["growth-families"].expect if isinstance(e, Value) and e.arm == "lns" and e.than is None]
    assert {e.below for e in own} == {(2 - 0.5) / 2}  # of the RMS; the variance is at most L^(2 - e), 1/2 <= e < 1


@every_claim
def test_every_cell_of_the_gpu_profile_has_three_seeds_and_more(claim: Claim) -> None:
    scale = claim.profiles["gpu"]
    grids = (scale.main, scale.sweep, scale.low_lr, scale.long, scale.floor or {})
    few = {(arm, depth) for grid in grids for arm, at in grid.items() for depth in at if at[depth] < 3}
    assert not few


def deaths_of(expectations: tuple[Expectation, ...]) -> list[Dies]:
    return [expectation for expectation in expectations if isinstance(expectation, Dies)]


@every_claim
def test_every_death_is_tried_at_a_lower_rate_and_one_of_the_claim_for_longer(claim: Claim) -> None:
    """A death that the source says, and nobody expects, is tried so where it can be paid for."""
    deaths = deaths_of(claim.expect)
    for profile in (
        ("gpu",) if claim.id == "depth-prenorm-limit" else [name for name in claim.profiles if name != "smoke"]
    ):
        deaths = deaths_of(claim.at(profile).expect)  # type: ignore[arg-type]
        roles = {(cell.arm, cell.depth, cell.role) for cell in claim.cells(profile)}  # type: ignore[arg-type]
        for arm, depth, role in roles:
            if role == "main" and any(death.arm == arm and depth >= death.at_least for death in deaths):
                assert (arm, depth, "low-lr") in roles
    assert not deaths or any(cell.role == "long" for cell in claim.cells("gpu"))


def runs_of(*ids: str) -> dict[str, set[str]]:
    """Returns the runs of claims by what they are."""
    cells = {name: CLAIMS[name].cells("cpu") for name in ids}
    return {
        name: {json.dumps(work_config(CLAIMS[name], cell, "r", None).numerical(), sort_keys=True) for cell in own}
        for name, own in cells.items()
    }


def test_claims_share_the_runs_that_are_equal() -> None:
    runs = runs_of(*CLAIMS)
    trains, limit, dies = (runs[f"depth-{name}"] for name in ("deepnorm-trains", "prenorm-limit", "postnorm-dies"))
    assert len(limit & trains) == 3 * 3 + 2  # 12, 48, 100; 200
    assert len(runs["depth-ablation"] & dies) == 3 + 3 + 3 + 1  # Post-Norm at 6 and 24 blocks, DeepNorm, a lower rate
    assert len(runs["depth-ablation"] & runs["update-bounded"]) == 12  # weights alone, SGD
    assert len(runs["misinit-baselines"] & runs["update-bounded"]) == 3 * 3 + 2  # as many as both have at 48 blocks
    assert len(runs["misinit-baselines"] & runs["depth-ablation"]) >= 3  # the paper's constants


def test_the_thousand_blocks_have_controls_under_their_own_protocol() -> None:
    claim = CLAIMS["depth-deepnorm-trains"]
    cells = [cell for cell in claim.cells("cpu") if cell.arm == "deepnorm-128"]
    configs = [run_config(claim, cell, "r", None) for cell in cells]
    assert {(config.train.batch * config.model.context, config.train.steps) for config in configs} == {
        (128, SMALL["train.steps"])
    }
    assert {cell.depth for cell in cells if cell.role == "control"} == {6, 12}
    assert max(cell.depth for cell in cells) == 1000


def test_seeds_are_as_many_as_the_depth_allows() -> None:
    for name in ("depth-deepnorm-trains", "depth-prenorm-limit", "grad-init-theorem"):
        for arm, depths in CLAIMS[name].profiles["cpu"].main.items():
            for depth, seeds in depths.items():
                least = 1 if arm == "encoder" or depth > 200 else 3 if depth <= 100 else 2  # the page says so
                assert seeds >= least, (name, arm, depth)


THEORY = {
    "depth-deepnorm-trains": "supported",
    "depth-prenorm-limit": "refuted",  # by Pre-Norm models of 200 blocks and more that train
    "grad-init-theorem": "supported",
    "grad-postnorm-vanish": "supported",
    "growth-prenorm": "supported",
    "depth-ablation": "supported",
    "misinit-baselines": "supported",
    "misinit-gradient": "supported",
    "depth-postnorm-dies": "supported",
    "update-bounded": "refuted",
}


@pytest.mark.parametrize(("claim", "verdict"), THEORY.items())
def test_what_follows_from_runs_as_theory_has_them(claim: str, verdict: str) -> None:
    own = CLAIMS[claim]
    judgement = judge(own, "cpu", results(own, "cpu", by_theory(own)))
    assert judgement.verdict == verdict, judgement.headline
    assert all(part.verdict == "supported" for part in judgement.control)


EPS_NAN = {
    arm: {"bad_rows": float(arm.endswith("-0")), "amplification": 1e6 if "1e-12" in arm else 316.0}
    for arm in CLAIMS["eps-nan"].arms
}
SHARP = {arm: {"largest": 0.7, "entropy": 0.2} for arm in ("none-16", "none-64", "none-256")}
FLAT = {arm: {"largest": 0.1, "entropy": 0.9} for arm in ("root-16", "root-64", "root-256")}
ALIKE = {"range_first": 0.4, "range_last": 0.5}


@pytest.mark.parametrize(
    ("name", "numbers", "verdict"),
    [
        ("eps-nan", EPS_NAN, "supported"),  # 1e-12 gives no NaN, and none was claimed
        ("eps-nan", EPS_NAN | {"ln-0": EPS_NAN["normal"]}, "refuted"),
        ("attn-scale", SHARP | FLAT, "supported"),
        ("attn-scale", dict.fromkeys(SHARP, FLAT["root-16"]) | FLAT, "refuted"),
        ("attn-scale", SHARP | dict.fromkeys(FLAT, SHARP["none-16"]), "inconclusive"),  # sharp whatever the factor
        ("vit-gradients", {"with": ALIKE, "without": {**ALIKE, "range_first": 2.0}}, "supported"),
        ("vit-gradients", {"with": ALIKE, "without": {**ALIKE, "range_first": 0.0}}, "inconclusive"),
        ("vit-gradients", {"with": {**ALIKE, "range_first": 1.5}, "without": {**ALIKE, "range_first": 2.0}}, "refuted"),
    ],
)
def test_what_follows_from_measurements(name: str, numbers: dict[str, dict[str, float]], verdict: str) -> None:
    claim = CLAIMS[name]
    judgement = judge(claim, "cpu", results(claim, "cpu", lambda cell: measurement(numbers[cell.arm])))
    assert judgement.verdict == verdict, judgement.headline


JUDGED = ("cpu", "gpu", "paper")


@pytest.mark.parametrize("name", NUMBERS)
def test_what_follows_from_runs_as_the_source_has_them(name: str) -> None:
    """And of every bar that a number has to lie beyond, that the other side of it is not met by the same runs."""
    claim = CLAIMS[name]
    for profile in [profile for profile in JUDGED if profile in claim.profiles]:
        own = claim.at(profile)  # type: ignore[arg-type]
        runs = results(claim, profile, as_claimed(claim))  # type: ignore[arg-type]
        judgement = judge(claim, profile, runs)  # type: ignore[arg-type]
        assert judgement.verdict == "supported", (profile, judgement.headline)
        for bar in [e for e in (*own.control, *own.expect) if isinstance(e, Value)]:
            turned = replace(bar, above=bar.below, below=bar.above)
            assert judge_value(own, turned, runs).verdict == "refuted", (profile, bar)


def test_every_claim_is_judged_on_runs_as_its_source_or_theory_has_them() -> None:
    """A new claim goes into `as_claimed.NUMBERS`, with what its source says of each arm."""
    assert NUMBERS.keys() | THEORY.keys() == CLAIMS.keys()


def test_a_failure_at_a_thousand_blocks_is_the_depths_only_if_the_small_steps_train_elsewhere() -> None:
    claim = CLAIMS["depth-deepnorm-trains"]

    def make(stuck: set[int]):  # type: ignore[no-untyped-def]
        small = by_theory(claim)
        return lambda cell: record(0.01) if cell.arm == "deepnorm-128" and cell.depth in stuck else small(cell)

    cases = (
        ("gpu", {1000}, "refuted"),
        ("gpu", {12, 1000}, "inconclusive"),
        ("cpu", {1000}, "inconclusive"),  # which has no run at a lower learning rate there
        ("cpu", set(), "supported"),
    )
    for profile, stuck, verdict in cases:
        assert judge(claim, profile, results(claim, profile, make(stuck))).verdict == verdict


def test_a_prenorm_model_that_dies_unchecked_leaves_the_limit_open() -> None:
    claim = CLAIMS["depth-prenorm-limit"]

    def make(cell):  # type: ignore[no-untyped-def]
        return record(0.01) if cell.arm.startswith("pre") and cell.depth >= 200 else by_theory(claim)(cell)

    judgement = judge(claim, "cpu", results(claim, "cpu", make))
    assert judgement.verdict == "inconclusive"
    assert "not tried at a 3x lower learning rate" in judgement.headline
    assert judge(claim, "gpu", results(claim, "gpu", make)).verdict == "supported"


def test_the_bars_are_those_of_the_theory() -> None:
    post, pre = (e for e in CLAIMS["grad-init-theorem"].expect if isinstance(e, SlopeWithin))
    assert ((post.lo, post.hi), (pre.lo, pre.hi)) == ((-0.25, 0.25), (-0.75, -0.25))
    bars = {e.profile: (e.compare, e.side, e.bar) for e in CLAIMS["growth-prenorm"].expect if isinstance(e, Thirds)}
    assert bars == {
        "stream_rms": ("ratio", "above", 1.5),
        "angle": ("ratio", "below", 0.7),
        "removal": ("difference", "below", 0.0),
    }
    assert DEPTH["train.steps"] % 3 == 0 or DEPTH["train.eval_every"] * 3 <= DEPTH["train.steps"]


def test_the_depth_claim_follows_from_runs_as_theory_has_them() -> None:
    claim = CLAIMS["depth-postnorm-dies"]
    assert judge(claim, "cpu", results(claim, "cpu", by_depth)).verdict == "supported"


def test_the_update_claim_is_refuted_by_its_own_theory_under_adam() -> None:
    claim = CLAIMS["update-bounded"]
    judgement = judge(claim, "cpu", results(claim, "cpu", by_slope(SLOPES)))
    assert judgement.verdict == "refuted"
    assert [part.verdict for part in judgement.parts] == [
        "supported",
        "supported",
        "supported",
        "refuted",
        "supported",
        "refuted",
    ]
    assert len(judgement.headline) < 250
    assert judgement.headline.index("DeepNorm (Adam)") < judgement.headline.index("supported: Post-Norm (SGD)")


def test_a_run_on_a_ramp_is_not_asked_whether_it_trains() -> None:
    """It is driven to where it fails: its end would count against its scheme at that depth."""
    assert not any(map(CLAIMS["depth-max-lr"].asks_training, CLAIMS["depth-max-lr"].arms))
    assert all(map(CLAIMS["growth-families"].asks_training, CLAIMS["growth-families"].arms))


IWSLT = ("depth-postnorm-dies", "depth-deepnorm-trains")


def test_the_paper_profile_is_the_published_protocol_and_can_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text of its own stands for IWSLT-14, which is not part of the project; of the others only settings are seen."""
    assert {claim.id for claim in CLAIMS.values() if "paper" in claim.profiles} == {
        "depth-encdec",
        "depth-lr-sensitivity",
        "depth-max-lr",
        "depth-small-batch",
        "grad-init-theorem",
        "grad-postnorm-vanish",
        "growth-families",
        "growth-prenorm",
        "quality-post-over-pre",
        "update-bounded",
        *IWSLT,
    }
    (tmp_path / "data" / "iwslt14").mkdir(parents=True)
    for language in ("en", "de"):
        text = "".join(f"{language} sentence number {n}\n" for n in range(9000))
        (tmp_path / "data" / "iwslt14" / f"train.{language}").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    lines = planned((*IWSLT, "grad-init-theorem", "update-bounded"), "paper", runs=tmp_path / "runs", verbose=True)
    assert "depth-postnorm-dies: L0010 post s0: scheme=post N=10 M=10 adamw lr=0.0005 steps=8000 seed=0" in lines
    assert "grad-init-theorem: L0014 pre s2: scheme=pre N=14 M=14 adamw lr=0.001 steps=1 seed=2" in lines
    assert "update-bounded: L0100 post-adam s0: scheme=post N=100 M=100 adamw lr=1e-07 steps=10 seed=0" in lines
    claim = CLAIMS["depth-encdec"]
    config = run_config(claim, claim.cells("paper")[0], "r", None)
    assert (config.train.batch, config.train.label_smoothing, config.data.subwords) == (128 * 140, 0.1, 40_000)
    assert (config.model.d, config.model.dropout, config.train.schedule.warmup_steps) == (512, 0.4, 4000)
    claim = CLAIMS["depth-small-batch"]
    configs = {cell.arm: run_config(claim, cell, "r", None) for cell in claim.cells("paper")}
    lines = {arm: config.train.batch for arm, config in configs.items()}  # of which 140 are 4096 tokens
    assert lines == {"deepnorm": 128 * 140, "deepnorm-8x4096": 8 * 140}
    assert (configs["deepnorm-8x4096"].model.N, configs["deepnorm-8x4096"].model.M) == (100, 100)
    assert not (tmp_path / "runs").exists()


def paper_configs(name: str) -> dict[str, RunConfig]:
    """Returns what the paper profile of a claim runs, by arm and depth."""
    claim = CLAIMS[name]
    return {f"{cell.arm} {cell.depth}": run_config(claim, cell, "r", None) for cell in claim.cells("paper")}


def test_the_paper_profiles_have_what_their_papers_say() -> None:
    keel = paper_configs("depth-max-lr")["keel 256"]
    assert (keel.model.d, keel.train.steps, keel.train.schedule.warmup_steps, keel.train.optim.lr) == (
        1024,
        5000,
        5000,
        5e-2,
    )
    assert (keel.train.optim.betas, keel.train.optim.weight_decay, keel.train.optim.clip) == ((0.9, 0.95), 0.01, 1.0)
    assert keel.model.norm_options == {"bias": False}

    wortsman = paper_configs("depth-lr-sensitivity")
    assert {name: (config.model.d, config.model.qk_norm) for name, config in wortsman.items()} == {
        "qk 6": (512, "head"),
        "qk 24": (512, "head"),
        "plain 24": (512, "none"),
        "qk-wide 6": (1024, "head"),
    }
    one = wortsman["qk 6"].train
    assert (one.batch, one.steps, one.schedule.warmup_steps, one.z_loss) == (256, 100_000, 5000, 1e-4)
    assert all(config.model.ffn == 4 * config.model.d for config in wortsman.values())

    early, full = (paper_configs("grad-postnorm-vanish")[f"post-{arm} 18"] for arm in ("early", "nowarmup"))
    assert (early.model.N, early.model.M, early.model.d, early.train.batch) == (18, 18, 512, 128 * 140)
    rate = early.train.optim.lr / early.train.schedule.warmup_steps  # what a step adds to the rate
    assert rate == pytest.approx(1.5e-3 / 4000)
    assert (full.train.optim.lr, full.train.schedule.warmup_steps) == (1.5e-3, 0)

    tiny = paper_configs("update-bounded")
    assert {(c.model.d, c.model.ffn, c.model.heads) for c in tiny.values()} == {(64, 128, 2)}
    assert {c.model.N for c in tiny.values()} == {c.model.M for c in tiny.values()} == {6, 12, 24, 48, 100}
    xiong = paper_configs("grad-init-theorem")
    assert {(c.model.N, c.model.M) for c in xiong.values()} == {(n, n) for n in (6, 8, 10, 12, 14)}

    for curse in (paper_configs("growth-prenorm"), paper_configs("growth-families")):
        assert {(c.model.M, c.train.batch, c.train.optim.lr, c.train.steps) for c in curse.values()} == {
            (12, 512, 1e-3, 20_000)
        }
        assert {c.train.schedule.warmup_steps for c in curse.values()} == {2000}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smoke_runs_of_all_claims_end_and_judge_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    able = [claim for claim in CLAIMS if claim != "vit-gradients" or find_spec("transformers")]
    code = run_claims(able, "smoke", runs=tmp_path / "runs", uri=None, workers=1, reports=tmp_path / "reports")
    said = capsys.readouterr()
    assert code == 0, said.err
    for claim in able:
        assert f"{claim}" in said.out
    assert said.out.count("runs ended; smoke gives no") == len(able)  # the line may break after it
    assert "NOT RUN" not in said.out
    assert (tmp_path / "reports" / "smoke" / "latest" / "report.html").exists()
    assert not (tmp_path / "reports" / "latest").exists()  # a smoke run must not take the place of verdicts
