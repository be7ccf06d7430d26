"""Translating with a run: what it says, how it is scored, and what is said where it cannot."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest
from sacrebleu.metrics.bleu import BLEU

from normscale.cli import main
from normscale.config.probes import TranslationConfig
from normscale.config.schema import RunConfig
from normscale.errors import BadInput, ConfigError
from normscale.tracking.reader import read_run
from normscale.train.run import run
from normscale.train.translate import Sentence, score, translate

WORDS = {"one": "eins", "two": "zwei", "red": "rot", "cat": "Katze"}


def config(runs: Path, **parts: object) -> RunConfig:
    base = {
        "model": {"N": 1, "M": 1, "d": 32, "heads": 2, "context": 12, "scheme": "pre"},
        "data": {"task": "translation", "source": str(runs / "x"), "languages": ["en", "de"], "subwords": 280},
        "train": {"steps": 80, "batch": 8, "eval_batches": 1, "optim": {"lr": 1e-2}},
        "checkpoint": {"every": 80},
        "probes": {"translation": {"sentences": 6, "beam": 2}},
        "tracking": {"runs": str(runs), "uri": None},
    }
    return RunConfig.model_validate(base | parts)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("runs")
    for ending, says in (("en", WORDS.keys()), ("de", WORDS.values())):
        (runs / f"x.{ending}").write_text("".join(" ".join(line) + "\n" for line in itertools.product(says, repeat=4)))
    return run(config(runs)).run_dir


def test_a_run_says_at_its_end_what_its_checkpoint_says_afterwards(trained: Path) -> None:
    found, path = translate(trained, TranslationConfig(sentences=6, beam=2))
    assert read_run(trained).summary["bleu"] == pytest.approx(found.score.bleu)
    assert len(found.sentences) == 6
    assert all(set(x.source.split()) <= set(WORDS) for x in found.sentences)
    assert all(x.reference.split() == [WORDS[word] for word in x.source.split()] for x in found.sentences)
    assert found.score.bleu > 20  # it has learnt the words; untrained it is 0
    written = json.loads(path.read_text())
    assert written["sentences"] == [asdict(sentence) for sentence in found.sentences]
    assert written["bleu"] == found.score.bleu


def test_what_is_being_done_is_said_token_by_token(trained: Path) -> None:
    said: list[str] = []
    translate(trained, TranslationConfig(sentences=10, beam=1), say=said.append)
    assert said[:2] == ["reading the checkpoint and the text", "translating lines 1-5 of 10: token 1 of at most 12"]
    assert "translating lines 6-10 of 10: token 4 of at most 12" in said


def test_the_score_is_sacrebleus() -> None:
    lines = [Sentence("", "the cat sat on the mat", "the cat sat on a mat"), Sentence("", "hello there", "hello")]
    assert score(lines).bleu == BLEU().corpus_score([x.said for x in lines], [[x.reference for x in lines]]).score
    assert score([Sentence("", "the cat sat on the mat", "the cat sat on the mat")]).bleu == pytest.approx(100)
    assert score(lines).signature.startswith("nrefs:1|case:mixed|eff:no|tok:13a")


def test_the_command_prints_scores_and_lines(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["translate", trained.name, "--runs", str(trained.parent), "--sentences", "3", "--beam", "1"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "BLEU" in out
    assert "on 3 held-out lines, beam 1, penalty 1" in out
    assert out.count("wanted ") == 3
    assert main([*words, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["sentences"]) == 3
    assert main([*words, "--penalty", "-1"]) == 2
    assert "--penalty: -1.0 is too small; give 0 or more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--penalty", "nan", "--penalty: nan: it should be a finite number"),
        ("--penalty", "1e300", "--penalty: 1e+300: it should be less than or equal to 10"),
        ("--beam", "1000000", "--beam: 1000000: it should be less than or equal to 1000"),
        ("--sentences", "9" * 20, f"--sentences: {'9' * 20}: it should be less than or equal to 1000000000000"),
    ],
)
def test_what_no_search_can_do_is_bad_input(
    trained: Path, capsys: pytest.CaptureFixture[str], option: str, value: str, says: str
) -> None:
    assert main(["translate", trained.name, "--runs", str(trained.parent), option, value]) == 2
    assert capsys.readouterr().err == f"normscale: {says}\n"


def test_a_run_of_another_task_is_refused(tmp_path: Path) -> None:
    other = run(
        RunConfig.model_validate(
            {
                "model": {"M": 1, "d": 16, "heads": 2, "context": 16},
                "train": {"steps": 1, "batch": 2, "eval_batches": 1},
                "data": {"max_bytes": 20_000},
                "checkpoint": {"every": 1},
                "tracking": {"runs": str(tmp_path), "uri": None},
            }
        )
    )
    with pytest.raises(BadInput, match="trained on lm; only runs of"):
        translate(other.run_dir, TranslationConfig(sentences=1))


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ({"data": {}, "model": {"N": 0, "M": 1}}, "6 would do nothing with data.task=lm"),
        ({"engine": {"name": "fsdp2"}}, "weights in shards"),
        ({"probes": {"translation": {"beam": 3}}}, "3 would do nothing"),
    ],
)
def test_where_it_would_do_nothing_it_is_refused(tmp_path: Path, parts: dict[str, object], says: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=says):
        config(tmp_path, **parts)
