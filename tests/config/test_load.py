"""Files, `extends`, overrides and the messages about them."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from normscale.config import keys
from normscale.config.load import MAX_BYTES, dump, load, read, revise
from normscale.config.schema import RunConfig
from normscale.errors import ConfigError

ROOT = Path(__file__).parents[2]
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a file into the working folder and returns its relative name, which messages show."""
    monkeypatch.chdir(tmp_path)

    def write(text: str | bytes, name: str = "deep.yaml") -> Path:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return Path(name)

    return write


def mistake(path: Path | None, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_without_a_file_and_with_an_empty_one_everything_is_default(write: Write) -> None:
    assert load(None) == RunConfig()
    for text in ("", "# nothing\n", "---\n", "\ufeff"):
        assert load(write(text)) == RunConfig()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: x\nmodel.M: 3\n", "model.M: write model: with M: below it (deep.yaml:2)"),
        ("train:\n  optim.lr: 1\n", "train.optim.lr: write optim: with lr: below it (deep.yaml:2)"),
        ("train.optim.lr: 1\n", "train.optim.lr: write train: with optim: with lr: below it (deep.yaml:1)"),
    ],
)
def test_a_key_with_dots_is_for_the_command_line(write: Write, text: str, says: str) -> None:
    assert mistake(write(text)) == says


def test_an_unknown_key_with_dots_is_named_whole(write: Write) -> None:
    assert mistake(write("model.X: 3\n")).startswith("model.X: no such key; ")


def test_what_is_no_file_is_refused_and_not_waited_for(write: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    assert mistake(Path("pipe.yaml")) == "pipe.yaml: not a regular file; name a YAML file"
    assert "not a regular file" in mistake(write("extends: pipe.yaml\n"))
    assert "not a regular file" in mistake(Path("/dev/zero"))


def test_a_link_to_nothing_is_not_its_own_suggestion(write: Write, tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to("gone.yaml")
    assert mistake(Path("link.yaml")) == "link.yaml: a link to gone.yaml, which is not there"


def test_file_then_overrides(write: Write) -> None:
    file = write("name: a\nmodel: {M: 3, scheme: pre}\ntrain:\n  optim: {lr: 1e-4, betas: [0.8, 0.9]}\n")
    config = load(file, ["model.M=5", "train.optim.betas[0]=0.5", "model.scheme_options.foo.bar=1"])
    assert (config.name, config.model.scheme, config.model.M, config.train.optim.lr) == ("a", "pre", 5, 1e-4)
    assert config.train.optim.betas == (0.5, 0.9)
    assert config.model.scheme_options == {"foo": {"bar": 1}}


@pytest.mark.parametrize("text", ["1e-3", "'1e-3'", "0.001", ".001", "1E-3", "00.001"])
def test_every_spelling_of_a_float_is_a_float(text: str) -> None:
    assert load(None, [f"model.eps={text}"]).model.eps == 0.001


def test_interpolation_reaches_defaults_other_keys_and_the_environment(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORMSCALE_TEST_SEED", "7")
    config = load(write("seed: ${oc.env:NORMSCALE_TEST_SEED}\nmodel: {ffn: '${model.d}'}\n"), ["model.d=96"])
    assert (config.seed, config.model.ffn) == (7, 96)


def test_extends_merges_in_order_and_relative_to_the_file(write: Write, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write("model: {d: 32, heads: 2, M: 2}\n", "model/small.yaml")
    write("model: {M: 9}\ntrain: {optim: {betas: [0.1, 0.2]}}\n", "model/deep.yaml")
    file = write("extends: [model/small.yaml, model/deep.yaml]\nmodel: {scheme: pre}\n")
    config = load(file)
    assert (config.model.d, config.model.M, config.model.scheme) == (32, 9, "pre")
    loaded = read(file, ["model.heads=4"])
    assert loaded.sources.where("model.d") == " (model/small.yaml:1 by extends in deep.yaml:1)"
    assert loaded.sources.where("model.M") == " (model/deep.yaml:1 by extends in deep.yaml:1)"
    assert loaded.sources.where("model.scheme") == " (deep.yaml:2)"
    assert loaded.sources.where("model.heads") == " (override model.heads=4)"
    assert loaded.sources.where("seed") == ""


def test_a_mistake_in_an_extended_file_says_through_which_it_was_reached(write: Write) -> None:
    write("model:\n  d: none\n", "base.yaml")
    write("name: x\nextends: base.yaml\n", "middle.yaml")
    said = mistake(write("extends: middle.yaml\n"))
    assert said.endswith("(base.yaml:2 by extends in middle.yaml:2 by extends in deep.yaml:1)")
    assert mistake(write("model:\n  d: none\n")).endswith(" (deep.yaml:2)")  # its own are as they were


def test_extends_mistakes(write: Write) -> None:
    write("extends: b.yaml\n", "a.yaml")
    write("seed: 1\nextends: [./a.yaml]\n", "b.yaml")
    assert (
        mistake(Path("a.yaml"))
        == "extends: ./a.yaml extends this file in turn; break the circle (b.yaml:2 by extends in a.yaml:1)"
    )
    assert mistake(write("extends: deep.yaml\n")).startswith("extends: deep.yaml extends this file in turn")
    assert mistake(write("seed: 1\nextends: aa.yaml\n")) == (
        "aa.yaml: no such file; did you mean 'a.yaml'? (deep.yaml:2)"
    )
    for wrong in ("3", "[1]", "''", "{a: b}", "null"):
        assert "extends" in mistake(write(f"extends: {wrong}\n")), wrong


def test_required_values_are_reported_until_given(write: Write) -> None:
    write("model: {d: 32}\n", "base.yaml")
    file = write("extends: base.yaml\nmodel:\n  d: ???\n  M: ???\n")
    assert mistake(file).splitlines() == [
        "model.M: no value is given (???); set model.M=... (deep.yaml:4)",
        "model.d: no value is given (???); set model.d=... (deep.yaml:3)",
    ]
    assert "model.d" not in mistake(file, "model.d=64")
    assert load(file, ["model.d=64", "model.M=2"]).model.d == 64
    assert "model.scheme_options.x[0]" in mistake(write("model: {scheme_options: {x: ['???']}}\n"))


MESSAGES = [
    # (file, what the message has to say)
    (
        "model:\n  sheme: x\n",
        ["model.sheme: no such key", "did you mean 'scheme'?", "model has N, M, d", "deep.yaml:2"],
    ),
    ("model:\n  D: 3\n", ["model.D: no such key", "did you mean 'd'?"]),
    ("model:\n  lr: 3\n", ["model.lr: no such key", "write train.optim.lr", "deep.yaml:2"]),
    ("train:\n  eps: 3\n", ["write model.eps or train.optim.eps"]),
    ("optim:\n  lr: 3\n", ["optim: no such key", "write train.optim"]),
    ("scheem: 3\n", ["did you mean 'model.scheme'?", "a configuration has name, seed, model"]),
    ("train:\n  optim:\n    lrr: 3\n", ["train.optim.lrr: no such key", "did you mean 'lr'?", "deep.yaml:3"]),
    ("model:\n  d: 12abc\n", ["model.d: '12abc' is not a whole number >= 1; give e.g. 64 (deep.yaml:2)"]),
    ("model:\n  d: true\n", ["model.d: true is not a whole number"]),
    ("model:\n  eps: true\n", ["model.eps: true is not a number >= 0"]),
    ("train:\n  optim: {betas: [true, 0.9]}\n", ["train.optim.betas[0]: true is not a number >= 0 and < 1"]),
    ("model:\n  tied: 1\n", ["model.tied: 1 is not true or false"]),
    ("model:\n  d: null\n", ["model.d: null is not a whole number"]),
    ("model:\n  d: 1.5\n", ["model.d: 1.5 is not a whole number"]),
    ("model:\n  ffn: x\n", ["model.ffn: 'x' is not a whole number >= 1 or null"]),
    ("model:\n  eps: .nan\n", ["model.eps: nan is not a finite number"]),
    ("model:\n  d: 10000000000000\n", ["<= 1e+12"]),
    ("seed: -1\n", ["seed: -1 is not a whole number >= 0"]),
    ("seed: 2147483648\n", ["< 2147483648"]),
    ("model:\n  scheme: on\n", ["model.scheme: true is not a line of text; put it in quotes"]),
    ("name: ''\n", ["name: '' is not a line of text"]),
    ('name: "a\\nb"\n', ["name: 'a\\nb' is not a line of text"]),
    ("model:\n  positions: RoPE\n", ["'RoPE' is not one of rope, learned, sinusoidal; did you mean 'rope'?"]),
    ("model: 3\n", ["model: 3 is not a section"]),
    ("model:\n", ["model: null is not a section"]),
    ("model: [1]\n", ["model: [1] is not a section", "deep.yaml:1"]),
    ("train: {optim: {betas: {a: 1}}}\n", ["train.optim.betas: {'a': 1} is not a list of 2"]),
    ("train: {optim: {betas: [0.9]}}\n", ["train.optim.betas: [0.9] is not a list of 2"]),
    ("model: {scheme_options: [1]}\n", ["model.scheme_options: [1] is not a mapping of options"]),
    ("model: {scheme_options: {x: .inf}}\n", ["model.scheme_options: holds inf"]),
    ("model: {scheme_options: {x: !!binary gA==}}\n", ["model.scheme_options: holds a bytes"]),
    ("model: {scheme_options: {1: 2}}\n", ["model.scheme_options: the key 1 is not text"]),
    ("a: 1\nmodel:\n  d: 30\n  d: 3\n", ["model.d: given twice; remove one (deep.yaml:3, deep.yaml:4)"]),
    ("on: 1\n", ["the key on is not text", "deep.yaml:1"]),
    ("seed: 010\n", ["seed: YAML reads 010 as octal", "deep.yaml:1"]),
    ("train: {steps: 1:30}\n", ["train.steps: YAML reads 1:30 as a number in base 60"]),
    ("model:\n\td: 3\n", ["indent with spaces, not tabs (deep.yaml:2)"]),
    ("seed: 1\nmodel:\n  d: 3\n heads: 2\n", ["deep.yaml:4"]),
    ("model: {d: 3\n", ["deep.yaml: ", "deep.yaml:2"]),
    ("a: 1\n---\nb: 2\n", ["deep.yaml:2"]),
    ("seed: !!python/object:os.system x\n", ["deep.yaml:1"]),
    ("a: &a [*a]\n", ["recursive", "deep.yaml:1"]),
    ("- 1\n", ["deep.yaml: not a mapping"]),
    ("hello\n", ["deep.yaml: not a mapping"]),
    ("model: {ffn: '${model.dd}'}\n", ["model.ffn: ", "'model.dd' not found (deep.yaml:1)"]),
    ("seed: ${oc.env:NORMSCALE_UNSET}\n", ["seed: ", "NORMSCALE_UNSET", "deep.yaml:1"]),
    ("seed: ${seed}\n", ["seed: ", "deep.yaml:1"]),
    ("seed: ${nothing:1}\n", ["seed: ", "nothing", "deep.yaml:1"]),
    ("seed: ${\n", ["seed: ", "deep.yaml:1"]),
    ("model: {scheme_options: {x: " + "[" * 400 + "]" * 400 + "}}\n", ["deep.yaml: nested too deeply"]),
    ("model: {scheme_options: {x: " + "[" * 30 + "]" * 30 + "}}\n", ["model.scheme_options: nested more than 16"]),
    ("abc\0", ["deep.yaml: ", "(deep.yaml)"]),
    (b"seed: 1\nname: \xff\n", ["deep.yaml: not UTF-8 text", "deep.yaml:2"]),
    (b"#" * (MAX_BYTES + 1), ["deep.yaml: larger than"]),
]


@pytest.mark.parametrize(("text", "says"), MESSAGES, ids=[repr(text[:30]) for text, _ in MESSAGES])
def test_a_mistake_in_a_file_is_one_line_with_key_value_place_and_mend(
    write: Write, text: str | bytes, says: list[str]
) -> None:
    message = mistake(write(text))
    for part in says:
        assert part in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model.d", "override 'model.d': not key=value"),
        ("=3", "override '=3': not key=value"),
        ("a\nb=1", "override 'a\\nb=1': not key=value"),
        ("model.=3", "not key=value"),
        ("train.optim.betas[-1]=3", "not key=value"),
        ("extends=deep.yaml", "extends: no such key"),
        ("model.scheme=[1", "model.scheme: "),
        ("model.d=x", "model.d: 'x' is not a whole number >= 1; give e.g. 64 (override model.d=x)"),
        ("model.M=twelve", "model.M: 'twelve' is not a whole number >= 0; give e.g. 12 (override model.M=twelve)"),
        ("model.ffn=wide", "is not a whole number >= 1 or null; give e.g. 8 (override"),
        ("train.optim.betas=0.9", "0.9 is not a list of 2, each a number >= 0 and < 1; give e.g. [0.9, "),
        ("train.optim.betas=[x, 0.9]", "train.optim.betas[0]: 'x' is not a number >= 0 and < 1; give e.g. 0.5 ("),
        ("probes.update.steps=ten", "; give e.g. [8] (override"),
        ("model.tied=yess", "model.tied: 'yess' is not true or false (override"),
        ("model.d.x=1", "model.d: {'x': 1} is not a whole number >= 1; give e.g. 64 (override model.d.x=1)"),
        ("model={d: x}", "model.d: 'x' is not a whole number >= 1; give e.g. 64 (override model={d: x})"),
        ("model.d={a: 1, a: 2}", "model.d.a: given twice"),
        ("model.d=", "model.d: null is not a whole number"),
        ("train.optim.betas[5]=0.5", "train.optim.betas[5]: "),
        ("train.optim.betas.x=0.5", "train.optim.betas.x: "),
        ("train.optim.betas={x: 1}", "betas: not a list of 2, each a number >= 0 and < 1; give e.g. [0.9, "),
        ("lr=1e-3", "write train.optim.lr"),
        ("model.ffn=${model.dd}", "(override model.ffn=${model.dd})"),
        ("model.d=???", "model.d: no value is given"),
    ],
)
def test_a_mistake_in_an_override_is_one_line_and_quotes_it(override: str, says: str) -> None:
    message = mistake(None, override)
    assert says in message
    assert "override" in message
    assert len(message.splitlines()) == 1


def test_files_that_cannot_be_read(write: Write, tmp_path: Path) -> None:
    write("", "quick.yaml")
    (tmp_path / "folder").mkdir()
    assert mistake(Path("quik.yaml")) == "quik.yaml: no such file; did you mean 'quick.yaml'?"
    assert mistake(Path("zzz.yaml")) == "zzz.yaml: no such file"
    assert mistake(Path("no/quick.yaml")) == "no/quick.yaml: no such file, and no folder no"
    assert mistake(Path("folder")) == "folder: a folder; name a YAML file in it"
    assert mistake(Path("quick.yaml/x.yaml")).startswith("quick.yaml/x.yaml: cannot be read: ")
    assert mistake(Path("a\0b")).startswith("a\\x00b: cannot be read: ")
    assert mistake(Path("a" * 300)).startswith("aaa")


def test_several_mistakes_are_a_line_each_unknown_keys_first(write: Write) -> None:
    lines = mistake(write("model:\n  d: x\n  sheme: y\n  M: z\n")).splitlines()
    assert [line.partition(":")[0] for line in lines] == ["model.sheme", "model.M", "model.d"]
    lines = mistake(write("".join(f"k{i}: 1\n" for i in range(20)))).splitlines()
    assert len(lines) == 9
    assert lines[-1] == "... and 12 more mistakes"


def test_a_combination_names_every_place_that_takes_part(write: Write) -> None:
    file = write("model:\n  d: 30\n")
    assert mistake(file).endswith("(deep.yaml:2)")
    assert mistake(file, "model.heads=4").endswith("(override model.heads=4, deep.yaml:2)")


def test_places_of_aliases_lists_and_sections(write: Write) -> None:
    file = write("model: &m\n  scheme_options: {x: {y: 1}}\n  norm_options: {z: &z [1, 2]}\nprobes:\n  every: 3\n")
    where = read(file).sources.where
    assert where("model.scheme_options.x.y") == " (deep.yaml:2)"
    assert where("model.norm_options.z[1]") == " (deep.yaml:3)"
    assert where("model.norm_options.unwritten") == " (deep.yaml:3)"
    assert where("probes.update.steps") == " (deep.yaml:4)"
    assert where("train.steps", "probes.every") == " (deep.yaml:5)"
    assert where() == ""


def test_the_second_stage_gets_its_places(write: Write) -> None:
    placed = read(write("model:\n  scheme: deepnrom\n")).sources.placed
    error = ConfigError("model.scheme: 'deepnrom' is not a scheme", "model.scheme")
    with pytest.raises(ConfigError, match=r"^model.scheme: 'deepnrom' is not a scheme \(deep.yaml:2\)$"), placed():
        raise error
    with pytest.raises(ConfigError, match=r"^no key$"), placed():
        raise ConfigError("no key")


def test_revise_checks_the_whole_again() -> None:
    config = revise(RunConfig(), {"model.M": 3, "model.scheme_options.x": 1, "train.optim.betas": [0.1, 0.2]})
    assert (config.model.M, config.model.scheme_options, config.train.optim.betas) == (3, {"x": 1}, (0.1, 0.2))
    assert RunConfig().model.M == 12
    for values, says in (
        ({"model.d": 30}, "model.heads: 4 does not divide model.d=30"),
        ({"model.sheme": "pre"}, "did you mean 'scheme'?"),
        ({"model.d.x": 1}, "model.d.x: d is not a section"),
    ):
        with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
            revise(RunConfig(), values)


def test_keys_are_described() -> None:
    described = {key.key: key for key in keys.describe()}
    assert described["train.optim.betas"].type == "a list of 2, each a number >= 0 and < 1"
    assert described["model.ffn"].type == "a whole number >= 1 or null"
    assert described["probes.update.steps"][1:3] == ("a list, each a whole number >= 1", ())
    assert all(key.help for key in described.values())
    for key in described.values():  # what is described can be set to its default
        assert revise(RunConfig(), {key.key: key.default}) == RunConfig()


OURS = sorted(ROOT.glob("configs/model/*.yaml")) + sorted(ROOT.glob("configs/train/*.yaml"))


@pytest.mark.parametrize("path", OURS, ids=[path.name for path in OURS])
def test_every_configuration_of_ours_loads_and_survives_a_dump(path: Path, write: Write) -> None:
    config = load(path)
    assert config != RunConfig()
    assert load(write(dump(config))) == config


def test_the_configurations_say_what_their_names_say() -> None:
    assert {path.stem for path in OURS} >= {"tiny", "quick", "depth"}
    for path in OURS:
        name, *depths = path.stem.split("-")
        model = load(path).model
        if depths:
            assert [blocks for blocks in (model.N, model.M) if blocks] == [int(depth) for depth in depths]
            others = dict.fromkeys(
                ("encdec", "encoder", "deepnet", "wmt17", "iwslt14", "opus100", "multi30k"), "deepnorm"
            )
            assert model.scheme.removesuffix("norm") == others.get(name, name).removesuffix("norm")
    quick = load(ROOT / "configs/train/quick.yaml")
    assert (quick.model.M, quick.model.d, quick.train.steps) == (2, 32, 100)


TEXT = st.text(max_size=12) | st.sampled_from(
    ["???", "\\???", "${model.d}", "\\${x}", "\\\\${", "1e-3", "010", "on", "~"]
)
LEAF = st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | TEXT
VALUE = st.recursive(LEAF, lambda v: st.lists(v, max_size=3) | st.dictionaries(TEXT, v, max_size=3), max_leaves=6)
FUZZ = settings(
    max_examples=40,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate],  # a smaller example is not worth minutes of shrinking
    suppress_health_check=list(HealthCheck),
)


def finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(finite, value.values()))
    if isinstance(value, list):
        return all(map(finite, value))
    return not isinstance(value, float) or abs(value) < float("inf")


@FUZZ
@given(
    options=st.dictionaries(TEXT, VALUE, max_size=3).filter(finite),
    name=st.text(min_size=1, max_size=8),
    lr=st.floats(1e-9, 1e9),
)
def test_a_dump_loads_back_equal(write: Write, options: dict[str, object], name: str, lr: float) -> None:
    try:
        config = revise(RunConfig(), {"model.scheme_options": options, "name": name, "train.optim.lr": lr})
    except ConfigError:
        return  # a name with control characters
    again = load(write(dump(config)))
    assert again == config
    assert again.numerical() == config.numerical()


KEYS = st.sampled_from([key.key for key in keys.describe()] + ["model", "train.optim", "", "x", "model.x"])
YAML = st.text("[]{}:,-?&*!|>'\"%@`#$\\~ \t\n.0123abmodelNMd_=<é\x00", max_size=40)


def only_config_errors(path: Path | None, overrides: list[str]) -> None:
    message = ""
    try:
        assert isinstance(load(path, overrides), RunConfig)
    except ConfigError as error:
        message = str(error)
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message) < 20_000


@FUZZ
@given(
    overrides=st.lists(st.builds("{}{}{}".format, KEYS, st.sampled_from(["=", "", ".a=", "[0]="]), YAML), max_size=3)
)
def test_random_overrides_give_a_configuration_or_a_config_error(overrides: list[str]) -> None:
    only_config_errors(None, overrides)


@FUZZ
@given(
    text=YAML
    | st.builds("model:\n  {}: {}\n".format, st.sampled_from(["d", "scheme_options", "eps"]), YAML)
    | st.binary(max_size=20)
)
def test_random_files_give_a_configuration_or_a_config_error(write: Write, text: str | bytes) -> None:
    only_config_errors(write(text), [])


@FUZZ
@given(tree=st.dictionaries(st.sampled_from(["model", "train", "name", "probes", "extends", "x"]), VALUE, max_size=4))
def test_random_values_give_a_configuration_or_a_config_error(write: Write, tree: dict[str, object]) -> None:
    import yaml

    only_config_errors(write(yaml.safe_dump(tree)), [])


def test_importing_brings_neither_torch_nor_omegaconf() -> None:
    heavy = ("torch", "omegaconf", "mlflow")
    code = f"import sys, normscale.config.load; print([name for name in {heavy} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
