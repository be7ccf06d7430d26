"""Beam search against trying every sequence there is."""

import itertools
import math
from collections.abc import Callable
from typing import cast

import pytest
import torch

from normscale.config.probes import TranslationConfig
from normscale.config.schema import ModelConfig
from normscale.models.beam import Search, best
from normscale.models.builder import build
from normscale.models.stack import Transformer

BEGIN, END, PAD, VOCAB, CONTEXT = 2, 3, 4, 5, 4


def made(seed: int, **options: object) -> Transformer:
    sizes = {"N": 1, "M": 2, "d": 16, "heads": 2, "context": CONTEXT, "tied": False}
    model = build(ModelConfig.model_validate(sizes | options), VOCAB, seed).eval()
    with torch.no_grad():
        model.logits.mul_(8)  # type: ignore[union-attr]  # sure enough of itself that one sequence stands out
    return model


def log_probability(model: Transformer, source: torch.Tensor, keep: torch.Tensor, said: tuple[int, ...]) -> float:
    tokens = torch.tensor([[BEGIN, *said]])
    with torch.no_grad():
        logits = model(tokens, source_BS=source, source_keep_BS=keep)[0].clone()
    logits[:, [BEGIN, PAD]] = -math.inf
    return sum(float(row.log_softmax(-1)[token]) for row, token in zip(logits, [*said, END], strict=True))


def best_of_all(model: Transformer, source: torch.Tensor, keep: torch.Tensor, penalty: float) -> list[int]:
    every = (said for n in range(CONTEXT) for said in itertools.product((0, 1), repeat=n))
    return list(max(every, key=lambda said: log_probability(model, source, keep, said) / (len(said) + 1) ** penalty))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("scheme", ["post", "pre"])
def test_a_beam_as_wide_as_all_finds_the_best_of_all(penalty: float, scheme: str) -> None:
    sources = torch.tensor([[0, 1, END, PAD], [1, END, PAD, PAD], [0, 0, 1, END]])
    keep = sources != PAD
    lengths = set()
    for seed in range(6):
        model = made(seed, scheme=scheme)
        wanted = [best_of_all(model, sources[i : i + 1], keep[i : i + 1], penalty) for i in range(3)]
        assert best(model, sources, keep, Search(16, penalty, BEGIN, END, (BEGIN, PAD))) == wanted
        lengths |= {len(said) for said in wanted}
    assert len(lengths) > 1


def test_greedy_takes_the_likeliest_token_each_time() -> None:
    model, source = made(1), torch.tensor([[0, 1, 1, END]])
    said: list[int] = []
    while len(said) < CONTEXT - 1:
        with torch.no_grad():
            logits = model(torch.tensor([[BEGIN, *said]]), source_BS=source)[0, -1]
        token = max((0, 1, END), key=lambda token: float(logits[token]))
        if token == END:
            break
        said.append(token)
    found = best(model, source, None, Search(1, 0.0, BEGIN, END, (BEGIN, PAD)))[0]
    assert found == said[: len(found)]  # an end is also weighed against going on


class Told:
    """A model whose next token has the probabilities that a function gives to what is said so far."""

    context = 12

    def __init__(self, after: Callable[[list[int]], dict[int, float]]) -> None:
        self.after = after

    def encode(self, source_BS: torch.Tensor, keep_BS: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros(len(source_BS), 1, 1)

    def features(self, said_BT: torch.Tensor, **_: object) -> torch.Tensor:
        logits = torch.full((len(said_BT), 1, VOCAB), -20.0)
        for row, said in zip(logits, said_BT.tolist(), strict=True):
            for token, probability in self.after(said[1:]).items():
                row[0, token] = math.log(probability)
        return logits

    def head(self, logits: torch.Tensor) -> torch.Tensor:
        return logits


def test_a_single_sequence_goes_on_past_a_likely_end_which_greedy_search_does_not() -> None:
    def after(said: list[int]) -> dict[int, float]:
        return {END: 0.6, 0: 0.4} if not said else {1: 1.0} if len(said) < 9 else {END: 1.0}

    model, source = cast(Transformer, Told(after)), torch.tensor([[0]])
    assert best(model, source, None, Search(1, 1.0, BEGIN, END)) == [[0] + [1] * 8]  # log(0.4) / 10 > log(0.6)
    assert best(model, source, None, Search(1, 0.0, BEGIN, END)) == [[]]
    assert "goes on past a likely end" in str(TranslationConfig.model_fields["beam"])


def test_sources_do_not_see_each_other_and_padding_is_not_read() -> None:
    model, how = made(3), Search(3, 1.0, BEGIN, END, (BEGIN, PAD))
    sources = torch.tensor([[0, END, PAD, PAD], [1, 1, 0, END]])
    together = best(model, sources, sources != PAD, how)
    assert together[0] == best(model, sources[:1, :2], None, how)[0]
    assert together[1] == best(model, sources[1:], None, how)[0]


def test_a_model_that_is_not_finite_says_nothing() -> None:
    model = made(0)
    with torch.no_grad():
        model.logits[0] = math.nan  # type: ignore[index]
    assert best(model, torch.tensor([[0, END]]), None, Search(2, 1.0, BEGIN, END)) == [[]]
