"""What a model translates, and how good it is by BLEU: of a run's checkpoint, or at the end of training."""

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from normscale.config.probes import TranslationConfig
from normscale.data.batches import HELD_OUT_ORDER, batches
from normscale.data.tasks.translation import Pairs
from normscale.errors import BadInput, StoreError
from normscale.models.beam import Search, best
from normscale.progress import Say, quiet
from normscale.tracking.files import write_whole
from normscale.train.engines.engine import Engine
from normscale.train.trained import trained


@dataclass(frozen=True)
class Sentence:
    """A line, its translation in the data, and the model's."""

    source: str
    reference: str
    said: str


@dataclass(frozen=True)
class Score:
    """BLEU and chrF of translations, from 0 to 100, and sacrebleu's own word for how they were taken.

    Reference: Post 2018, arXiv:1804.08771 (sacrebleu); Popović 2015 (chrF2).
    """

    bleu: float
    chrf: float
    signature: str


@dataclass(frozen=True)
class Translation:
    """Held-out lines as the checkpoint of a step translates them."""

    run: str
    step: int
    how: TranslationConfig
    score: Score
    sentences: list[Sentence]

    def as_json(self) -> dict[str, Any]:
        """Returns it as JSON can hold it."""
        said = {"run": self.run, "step": self.step, **asdict(self.score), **self.how.model_dump(exclude={"sentences"})}
        return said | {"sentences": [asdict(sentence) for sentence in self.sentences]}


def translate(
    run_dir: Path, how: TranslationConfig, step: int | None = None, say: Say = quiet
) -> tuple[Translation, Path]:
    """Translates held-out lines with a run's checkpoint; returns what came of it, and the file it was written to.

    `step` is the checkpoint's, None the newest; `say` is told what is being done.

    Raises:
        BadInput: the run is of another task, or as `trained`.
    """
    say("reading the checkpoint and the text")
    found = trained(run_dir, step)
    pairs = found.task.held_out
    if not isinstance(pairs, Pairs):
        raise BadInput(f"{run_dir}: it was trained on {found.task.name}; only runs of data.task=translation translate")
    sentences = translated(found.engine, pairs, how, found.config.train.batch, say)
    translation = Translation(found.record.run_id, found.step, how, score(sentences), sentences)
    path = run_dir / f"translation-{found.step:08d}.json"
    try:
        write_whole(path, json.dumps(translation.as_json(), ensure_ascii=False, indent=1) + "\n")
    except OSError as error:
        raise StoreError(f"{path}: cannot be written ({error.strerror})") from None
    return translation, path


def translated(engine: Engine, pairs: Pairs, how: TranslationConfig, batch: int, say: Say = quiet) -> list[Sentence]:
    """Returns the first `how.sentences` held-out lines, in their fixed mixed order, with what the model says to them.

    Fewer where there are fewer. The model runs as it does in evaluation, over `batch` lines at a time.
    """
    begin, end, pad = pairs.marks
    search = Search(how.beam, how.penalty, begin, end, never=(begin, pad))
    numbers = batches(len(pairs), 1, HELD_OUT_ORDER, 0)[: how.sentences, 0]
    found: list[Sentence] = []
    with engine.aside() as model:
        for some in np.array_split(numbers, -(-len(numbers) // batch)):
            lines = pairs.batch(some).to(engine.device)
            assert lines.source_BS is not None
            said = partial(_say_token, say, len(found), len(some), len(numbers))
            for i, tokens in zip(some, best(model, lines.source_BS, lines.source_keep_BS, search, said), strict=True):
                source, reference = (pairs.text(side[i].tolist()) for side in (pairs.source, pairs.target))
                found.append(Sentence(source, reference, pairs.text(tokens)))
    return found


def _say_token(say: Say, done: int, lines: int, of: int, token: int, most: int) -> None:
    say(f"translating lines {done + 1}-{done + lines} of {of}: token {token} of at most {most}")


def score(sentences: list[Sentence]) -> Score:
    """Returns the score of all sentences together."""
    said, references = [one.said for one in sentences], [[one.reference for one in sentences]]
    bleu, chrf = BLEU(), CHRF()
    scores = [float(metric.corpus_score(said, references).score) for metric in (bleu, chrf)]
    return Score(scores[0], scores[1], str(bleu.get_signature()))
