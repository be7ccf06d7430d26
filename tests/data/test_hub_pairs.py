"""Translation sets of the hub, from the cache: which columns, splits and names are read. Loopback addresses only."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.json.json import Json

from normscale.config.schema import RunConfig
from normscale.data import hub
from normscale.data.task import Task, load_task
from normscale.errors import DataError


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and no hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    return tmp_path / "datasets"


def fill(cache: Path, repo: str, config: str, **splits: list[dict[str, object]]) -> None:
    """Puts a data set with these rows into the cache, as loading it from the hub does."""
    files = {}
    for split, rows in splits.items():
        files[split] = [str(cache.parent / f"{split}.jsonl")]
        Path(files[split][0]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    owner, name = repo.split("/")
    folder = cache / f"{owner}___{camelcase_to_snakecase(name)}" / config / "0.0.0" / "abc"
    builder = Json(cache_dir=str(cache.parent / "built"), dataset_name=name, config_name=config, data_files=files)
    builder.download_and_prepare(output_dir=str(folder))


def rows(n: int, word: str = "row") -> list[dict[str, object]]:
    return [{"translation": {"en": f"{word} {i}", "de": f"Zeile {i}\nzwei"}} for i in range(n)]


def task_of(source: str, **data: object) -> Task:
    settings = {"task": "translation", "source": source, "languages": ["en", "de"]} | data
    model = {"N": 1, "M": 1, "d": 16, "heads": 2, "context": 24}
    return load_task(RunConfig.model_validate({"model": model, "data": settings, "train": {"batch": 2}}))


def said(samples: object) -> list[tuple[str, str]]:
    return [
        (samples.text(samples.source[i].tolist()), samples.text(samples.target[i].tolist()))  # type: ignore[attr-defined]
        for i in range(len(samples))  # type: ignore[arg-type]
    ]


def test_rows_are_pairs_and_a_share_is_held_out(cache: Path) -> None:
    fill(cache, "wmt/wmt17", "de-en", train=rows(40))
    task = task_of("hub:wmt17")
    assert (len(task.train), len(task.held_out)) == (36, 4)
    assert sorted(said(task.train) + said(task.held_out)) == sorted((f"row {i}", f"Zeile {i} zwei") for i in range(40))
    assert task_of("hub:wmt/wmt17:de-en").digest == task.digest
    assert said(task_of("hub:wmt17", languages=["de", "en"]).train)[0][1].startswith("row")
    assert task.train.batch(np.array([0])).source_BS is not None


def test_a_split_can_be_held_out(cache: Path) -> None:
    fill(cache, "Helsinki-NLP/opus-100", "de-en", train=rows(8), validation=rows(3, "other"))
    task = task_of("hub:opus100", held_out_source="validation")
    assert [len(task.train), len(task.held_out)] == [8, 3]
    assert said(task.held_out)[0] == ("other 0", "Zeile 0 zwei")
    with pytest.raises(DataError, match=r"^data\.held_out_source: .* has no nonesuch split"):
        task_of("hub:opus100", held_out_source="nonesuch")


@pytest.mark.parametrize(
    ("short", "languages", "full"),
    [
        ("hub:wmt17", ("en", "de"), "hub:wmt/wmt17:de-en"),
        ("hub:wmt17", ("zh", "en"), "hub:wmt/wmt17:zh-en"),
        ("hub:iwslt2017", ("en", "de"), "hub:IWSLT/iwslt2017:iwslt2017-en-de"),
        ("hub:opus100", ("en", "af"), "hub:Helsinki-NLP/opus-100:af-en"),
        ("hub:mine/own:x", ("en", "de"), "hub:mine/own:x"),
    ],
)
def test_short_names(short: str, languages: tuple[str, str], full: str) -> None:
    assert hub.resolved(short, languages) == full


@pytest.mark.parametrize(
    ("short", "languages", "says"),
    [
        (
            "hub:wmt17",
            ("fr", "de"),
            "data.languages: 'hub:wmt17' pairs English with others, and has nothing of fr and de",
        ),
        ("hub:iwslt2018", ("en", "de"), "known by a short name; did you mean 'iwslt2017'"),
        ("hub:wmt17:de-en", ("en", "de"), "known by a short name; did you mean 'wmt17'"),
        ("hub:", ("en", "de"), "these are: hub:iwslt2017, hub:wmt17, hub:opus100"),
    ],
)
def test_short_names_that_lead_nowhere_are_refused_before_anything_is_fetched(
    short: str, languages: tuple[str, str], says: str
) -> None:
    with pytest.raises(DataError, match=re.escape(says)):
        hub.resolved(short, languages)


def test_what_is_no_translation_set_or_has_other_languages_is_refused(cache: Path) -> None:
    fill(cache, "mine/text", "default", train=[{"text": "a"}] * 4)
    with pytest.raises(DataError, match=r"no column 'translation' \(it has: text\)"):
        task_of("hub:mine/text")
    fill(cache, "wmt/wmt17", "de-en", train=rows(4))
    with pytest.raises(DataError, match=r"^data\.languages: 'fr' is not in row 1 of .* \(it has: de, en\)"):
        task_of("hub:wmt/wmt17:de-en", languages=["en", "fr"])
