"""What DeepSpeed is told, and what a user's own JSON may say: one value in one place, or an error that names both."""

import json
from pathlib import Path
from typing import Any

import pytest

from normscale.config.agreement import settled
from normscale.config.deepspeed import SIZES, STAGES, check_precision, filled, native_bf16, rendered
from normscale.config.deepspeed_file import OURS
from normscale.config.load import Loaded, read
from normscale.errors import ConfigError

ROOT = Path(__file__).parents[2]
ZERO = ("engine.name=deepspeed", "train.batch=16")


def loaded(*words: str, yaml: Path | None = None) -> Loaded:
    return read(yaml, [*ZERO, *words])


def user(folder: Path, content: str | dict[str, Any]) -> str:
    """Writes a user's JSON; returns the word that names it."""
    path = folder / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return f"engine.json={path}"


def refused(*words: str, world: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        rendered(filled(loaded(*words)).config, world)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_files_are_what_is_rendered() -> None:
    """A file that went its own way would hold a second truth. `DeepSpeedConfig.text` writes them."""
    files = {path.stem: path.read_text() for path in (ROOT / "configs/deepspeed").iterdir()}
    assert files == {name: config.text() for name, config in STAGES.items()}


@pytest.mark.parametrize("name", STAGES)
def test_each_file_as_a_users_own_json_gives_what_is_rendered_without_it(name: str) -> None:
    stage, offload = STAGES[name].stage, STAGES[name].offload
    words = ["train.accumulate=2", "train.optim.clip=0.5", "precision.compute=bf16"]
    without = rendered(loaded(f"engine.zero={stage}", f"engine.offload={offload}", *words).config, 2)
    own = settled(loaded(f"engine.json={ROOT / 'configs/deepspeed'}/{name}.json", *words), {})
    assert rendered(own.config, 2) == without
    assert (own.config.engine.zero, own.config.engine.offload) == (stage, offload)
    assert "auto" not in json.dumps(without)


def test_every_number_comes_from_the_configuration() -> None:
    found = rendered(loaded("train.accumulate=2", "train.optim.clip=0.25", "engine.zero=3").config, 4)
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert [found[name] for name in sizes] == [16, 2, 2, 0.25]
    assert found["zero_optimization"] == {"stage": 3} | SIZES[3]


def test_no_clipping_is_said_aloud() -> None:
    """What DeepSpeed isn't told it clips at 1.0."""
    assert rendered(loaded().config, 1)["gradient_clipping"] == 0.0


@pytest.mark.parametrize(
    ("words", "native", "wire"),
    [
        ([], False, "fp32"),
        (["precision.compute=bf16"], False, "fp32"),  # bf16 products over an fp32 stream: not DeepSpeed's bf16
        (["precision.compute=bf16", "precision.stream=bf16"], True, "fp32"),
        (["precision.compute=bf16", "precision.stream=bf16", "precision.reduce=bf16"], True, "bf16"),
        (["precision.reduce=bf16"], False, "bf16"),
    ],
)
def test_bf16_is_deepspeeds_own_only_where_the_stream_is_bf16_too(words: list[str], native: bool, wire: str) -> None:
    config = loaded(*words).config
    found = rendered(config, 2)
    assert (found["bf16"]["enabled"], found["communication_data_type"]) == (native, wire)
    assert native_bf16(config) is native
    assert found["fp16"] == {"enabled": False}


@pytest.mark.parametrize("compute", ["fp16", "fp8_e4m3"])
def test_fp16_on_a_cpu_is_refused_with_what_to_do(compute: str) -> None:
    with pytest.raises(ConfigError, match=rf"precision.compute: DeepSpeed does not train in {compute} .*bf16.*ddp"):
        check_precision(loaded(f"precision.compute={compute}").config, "cpu")
    check_precision(loaded("precision.compute=bf16").config, "cpu")
    check_precision(loaded("precision.compute=fp16").config, "cuda")


def test_a_loss_scale_and_offload_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"engine.offload: cpu takes gradients before the loss scale"):
        check_precision(loaded("precision.compute=fp16", "engine.offload=cpu").config, "cuda")


def test_parameters_in_bf16_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"precision.params: DeepSpeed's optimizer holds fp32"):
        check_precision(loaded("precision.params=bf16").config, "cuda")


def test_what_only_the_json_names_is_taken(tmp_path: Path) -> None:
    word = user(
        tmp_path,
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "gradient_clipping": 1,
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 1000},
        },
    )
    config = settled(loaded(word), {}).config
    assert (config.train.accumulate, config.train.optim.clip, config.engine.zero) == (2, 1.0, 2)
    assert (config.precision.compute, config.precision.stream, config.engine.offload) == ("bf16", "bf16", "cpu")
    found = rendered(config, 2)
    assert found["zero_optimization"]["reduce_bucket_size"] == 1000
    assert (found["train_batch_size"], found["train_micro_batch_size_per_gpu"]) == (16, 4)


@pytest.mark.parametrize(
    ("content", "word", "said"),
    [
        ({"gradient_clipping": 1.0}, "train.optim.clip=0.5", "train.optim.clip: 0.5 but gradient_clipping=1.0 in "),
        ({"gradient_clipping": 0}, "train.optim.clip=0.5", "train.optim.clip: 0.5 but gradient_clipping=0 in "),
        (
            {"gradient_accumulation_steps": 4},
            "train.accumulate=2",
            "train.accumulate: 2 but gradient_accumulation_steps=4 in ",
        ),
        ({"train_batch_size": 32}, "train.steps=1", "train.batch: 16 but train_batch_size=32 in "),
        ({"zero_optimization": {"stage": 3}}, "engine.zero=2", "engine.zero: 2 but zero_optimization.stage=3 in "),
        (
            {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
            "engine.offload=none",
            'engine.offload: none but zero_optimization.offload_optimizer.device="cpu" in ',
        ),
        ({"bf16": {"enabled": True}}, "precision.compute=fp32", "precision.compute: fp32 but bf16.enabled=true in "),
        ({"bf16": {"enabled": True}}, "precision.stream=fp32", "precision.stream: fp32 but bf16.enabled=true in "),
        (
            {"communication_data_type": "bf16"},
            "precision.reduce=fp32",
            'precision.reduce: fp32 but communication_data_type="bf16" in ',
        ),
    ],
)
def test_what_both_name_must_agree(tmp_path: Path, content: dict[str, Any], word: str, said: str) -> None:
    error = refused(user(tmp_path, content), word)
    assert error.startswith(said), error
    assert f"{tmp_path}/ds.json; give one value, in one place" in error
    assert f"(override {word if 'batch' not in said else 'train.batch=16'})" in error


@pytest.mark.parametrize(
    ("named", "offloaded"),
    [
        ({}, {"offload_optimizer", "offload_param"}),
        ({"offload_optimizer": {"device": "cpu", "pin_memory": False}}, {"offload_optimizer"}),
        ({"offload_param": {"device": "cpu"}}, {"offload_param"}),
    ],
)
def test_of_optimizer_and_parameters_what_the_json_names_is_offloaded(
    tmp_path: Path, named: dict[str, Any], offloaded: set[str]
) -> None:
    word = user(tmp_path, {"zero_optimization": {"stage": 3} | named})
    zero = rendered(filled(loaded(word, "engine.offload=cpu")).config, 1)["zero_optimization"]
    assert {name for name in ("offload_optimizer", "offload_param") if name in zero} == offloaded
    assert all(zero[name]["device"] == "cpu" for name in offloaded)
    assert zero.get("offload_optimizer", {}).get("pin_memory", False) is False


def test_parameters_are_offloaded_at_stage_3_alone(tmp_path: Path) -> None:
    word = user(tmp_path, {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}})
    assert 'offload_param.device="cpu" in ' in refused(word)


def test_a_micro_batch_is_compared_when_the_ranks_are_known(tmp_path: Path) -> None:
    config = filled(loaded(user(tmp_path, {"train_micro_batch_size_per_gpu": 4}), "train.accumulate=2")).config
    assert rendered(config, 2)["train_micro_batch_size_per_gpu"] == 4
    with pytest.raises(
        ConfigError, match=r"train.batch: 16 over 1 rank.* 8 at a time but train_micro.*=4 in .*ds.json"
    ):
        rendered(config, 1)


def test_a_line_of_the_file_is_named(tmp_path: Path) -> None:
    yaml = tmp_path / "run.yaml"
    yaml.write_text("train:\n  optim:\n    clip: 0.5\n")
    with pytest.raises(ConfigError, match=r"gradient_clipping=1.0 in .*ds.json; .*run.yaml:3\)"):
        filled(loaded(user(tmp_path, {"gradient_clipping": 1.0}), yaml=yaml))


@pytest.mark.parametrize("name", OURS)
def test_sections_that_another_key_answers_for_are_refused_with_the_mend(tmp_path: Path, name: str) -> None:
    """An optimizer or a scheduler in the JSON would train with numbers that no record shows."""
    error = refused(user(tmp_path, {name: {"type": "AdamW"}}))
    assert error.startswith(f"engine.json: {name} in ")
    assert "remove" in error or "write bf16" in error


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ('{"gradient_cliping": 1}', "did you mean 'gradient_clipping'?"),
        ('{"optimiser": {}}', "did you mean 'optimizer'?"),
        ('{"zero_optimization": {"stagee": 1}}', "did you mean 'zero_optimization.stage'?"),
        ('{"zero_optimization": {"zenflow": {}}}', "zero_optimization.zenflow in "),
        ('{"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}', 'give "cpu" or "none"'),
        ('{"zero_optimization": {"offload_optimizer": {"nvme_path": "x"}}}', "offload_optimizer.nvme_path"),
        ('{"zero_optimization": {"stage": 1, "stage": 2}}', "stage is given twice; remove one"),
        ('{"zero_optimization": {"stage": "2"}}', 'zero_optimization.stage="2"'),
        ('{"zero_optimization": {"stage": 4}}', "engine.zero: 4"),
        ('{"zero_optimization": 2}', "zero_optimization is 2, not a section"),
        ('{"gradient_clipping": "1.0"}', 'give a number or "auto"'),
        ('{"gradient_clipping": true}', 'give a number or "auto"'),
        ('{"gradient_clipping": -1}', "train.optim.clip: -1"),
        ('{"gradient_clipping": Infinity}', "Infinity is not a number of JSON"),
        ('{"gradient_accumulation_steps": 2.0}', "give a whole number"),
        ('{"communication_data_type": "fp16"}', 'give "fp32", "bf16" or "auto"'),
        ('{"bf16": {"enabled": 1}}', "bf16.enabled=1 in "),
        ('{"bf16": {"check_grad_overflow": false}}', "bf16.check_grad_overflow"),
        ('{"fp16": {"enabled": true}}', "a loss scale of its own"),
        ('{"fp16": {"enabld": true}}', "did you mean 'fp16.enabled'?"),
        ('{"steps_per_print": "10"}', 'steps_per_print is "10"'),
        ('{"steps_per_print": 0}', "give a whole number >= 1, or null"),
        ('{"prescale_gradients": 1}', "give true or false"),
        ('{"gradient_predivide_factor": 0}', "gradient_predivide_factor is 0"),
        ('{"gradient_predivide_factor": 1e999}', "gradient_predivide_factor is Infinity"),
        ('{"fp16": {"enabled": true}, "bf16": {"enabled": true}}', "are both true"),
        ('{"zero_allow_untested_optimizer": false}', "set it to true"),
        ("[]", "is a list, not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_json_that_says_something_else_is_refused_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    error = refused(user(tmp_path, content))
    assert said in error, error
    assert "ds.json" in error


def test_what_a_json_leaves_to_the_program_is_left_out(tmp_path: Path) -> None:
    """DeepSpeed would take the word for a number, at its first step."""
    left = {
        "steps_per_print": "auto",
        "wall_clock_breakdown": "auto",
        "zero_optimization": {"reduce_bucket_size": "auto"},
    }
    assert rendered(loaded(user(tmp_path, left)).config, 2) == rendered(loaded().config, 2)


def test_a_json_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert "no such file" in refused(f"engine.json={tmp_path}/absent.json")
    assert "not a file" in refused(f"engine.json={tmp_path}")


def test_a_runs_identity_holds_what_the_json_says_and_not_where_it_lies(tmp_path: Path) -> None:
    numbers = []
    for folder, size in (("a", 1000), ("b", 1000), ("c", 2000)):
        (tmp_path / folder).mkdir()
        word = user(tmp_path / folder, {"zero_optimization": {"stage": 1, "reduce_bucket_size": size}})
        numbers.append(loaded(word).config.numerical())
    assert numbers[0] == numbers[1] != numbers[2]


class TestThreePlaces:
    """PR-018: huggingface/accelerate#3203, PR#941: command line, YAML and DeepSpeed's JSON each say a precision."""

    def test_command_line_against_json(self, tmp_path: Path) -> None:
        word = user(tmp_path, {"fp16": {"enabled": True}})
        with pytest.raises(ConfigError, match=r"bf16 \(override precision.compute=bf16\) but fp16 \(fp16.enabled=true"):
            settled(loaded(word, "precision.compute=bf16"), {})

    def test_the_environment_against_json(self, tmp_path: Path) -> None:
        word = user(tmp_path, {"bf16": {"enabled": True}})
        with pytest.raises(ConfigError, match=r"fp16 \(ACCELERATE_MIXED_PRECISION=fp16.*but bf16 \(bf16.enabled=true"):
            settled(loaded(word), {"ACCELERATE_MIXED_PRECISION": "fp16"})

    def test_auto_and_nothing_set_is_the_default(self, tmp_path: Path) -> None:
        word = user(tmp_path, {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}})
        config = settled(loaded(word), {}).config
        assert config.precision.compute == "fp32"
        assert rendered(config, 1)["bf16"] == {"enabled": False}

    def test_both_true_is_one_line(self, tmp_path: Path) -> None:
        word = user(tmp_path, {"fp16": {"enabled": True}, "bf16": {"enabled": True}})
        with pytest.raises(ConfigError, match=r"ds.json: fp16.enabled and bf16.enabled are both true"):
            settled(loaded(word), {})

    def test_two_deepspeed_files_are_one_too_many(self, tmp_path: Path) -> None:
        word = user(tmp_path, {})
        environ = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "other.json"}
        with pytest.raises(ConfigError, match=r"engine.json: .*ds.json but ACCELERATE_DEEPSPEED.*=other.json"):
            settled(loaded(word), environ)
        same = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(tmp_path / "ds.json")}
        assert settled(loaded(word), same).config.engine.json == str(tmp_path / "ds.json")
