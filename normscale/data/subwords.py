"""A byte-pair vocabulary, made from the training lines of both languages of a translation.

Every byte is a token of its own, so that no line is without tokens and joining the tokens of a line gives its bytes
back. Merges that were seen once only are not made: a small text gives fewer tokens than were asked for.

Reference: Sennrich et al. 2016, arXiv:1508.07909, section 3.2 (one vocabulary for both languages); Radford et al. 2019
(GPT-2), section 2.2 (over bytes).
"""

from collections.abc import Iterator, Sequence
from hashlib import sha256

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from normscale.config.sources import plain
from normscale.data.parallel import Pair
from normscale.errors import DataError

LEARNED_FROM = 500_000  # pairs at most, evenly spread: of more the merges hardly change, and every rank makes them
AT_ONCE = 10_000  # lines: their tokens are objects until they are numbers of four bytes


class Subwords:
    """A vocabulary of `size` tokens, whose numbers begin at 0."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size: int = tokenizer.get_vocab_size()

    def encode(self, lines: Sequence[str]) -> Iterator[NDArray[np.int32]]:
        """Yields the tokens of each line."""
        for start in range(0, len(lines), AT_ONCE):
            some = list(lines[start : start + AT_ONCE])
            for encoding in self.tokenizer.encode_batch_fast(some, add_special_tokens=False):
                yield np.asarray(encoding.ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; bytes that are no UTF-8 together come as U+FFFD."""
        text: str = self.tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def digest(self) -> bytes:
        """Returns a hash of the vocabulary and its merges."""
        return sha256(self.tokenizer.to_str().encode()).digest()


def learn(pairs: Sequence[tuple[str, str]], size: int) -> Subwords:
    """Returns a vocabulary of at most `size` tokens, at least 256, from pairs of lines."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    every = -(-len(pairs) // LEARNED_FROM) or 1
    tokenizer.train_from_iterator((line for pair in pairs[::every] for line in pair), trainer)
    return Subwords(tokenizer)


def text_of(pair: Pair, key: str, languages: tuple[str, str]) -> tuple[str, str]:
    """Returns both lines of a pair as text.

    Raises:
        DataError: one is not UTF-8. `key` is where the configuration names the files, `languages` are their endings.
    """
    found = []
    for line, language in zip((pair.source, pair.target), languages, strict=True):
        try:
            found.append(line.decode())
        except UnicodeDecodeError as e:
            word = plain(repr(bytes(e.object[max(0, e.start - 10) : e.start + 10])), 80)
            raise DataError(
                f"{key}: line {pair.line} of {plain(language)} is not UTF-8 ({word}), which subwords are made of;"
                " convert the file to UTF-8, or set data.subwords=null to read bytes"
            ) from None
    return found[0], found[1]
