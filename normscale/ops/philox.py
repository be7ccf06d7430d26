"""Counter-based random bits: Philox4x32-10, the same in PyTorch as in a Triton kernel.

A dropped element is a function of a seed and of its position, so that a backward pass or a recomputed forward pass
replays it without a stored mask, and every backend drops the same elements.

Reference: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
"""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_ROUND_A, _ROUND_B = 0xD2511F53, 0xCD9E8D57
_KEY_A, _KEY_B = 0x9E3779B9, 0xBB67AE85


def random_words(seed: Tensor, counter: Tensor) -> Tensor:
    """Returns the four 32-bit words that belong to each counter; `tl.randint4x` of Triton gives the same.

    Integer arithmetic in int64: PyTorch has little of uint32.

    Shape: seed 0-d int64; counter any, int64, not negative; result [..., 4] int64 with values below 2^32.
    """
    c0, c1 = counter & _WORD, (counter >> 32) & _WORD
    c2 = c3 = torch.zeros_like(counter)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        c0, c1, c2, c3 = (
            _high(_ROUND_B, c2) ^ c1 ^ k0,
            (c2 * _ROUND_B) & _WORD,
            _high(_ROUND_A, c0) ^ c3 ^ k1,
            (c0 * _ROUND_A) & _WORD,
        )
        k0, k1 = (k0 + _KEY_A) & _WORD, (k1 + _KEY_B) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def _high(constant: int, word: Tensor) -> Tensor:
    """Returns the upper 32 bits of a 64-bit product, by halves, since the product itself leaves int64."""
    upper, lower = constant >> 16, constant & 0xFFFF
    return (word * upper + ((word * lower) >> 16)) >> 16


def threshold(dropout: float) -> int:
    """Returns the number below which a random word drops its element: dropout in units of 2^-32."""
    return min(round(dropout * 2**32), _WORD)


def keep_scale(dropout: float) -> float:
    """Returns 1 / (1 - dropout), which keeps the expectation; 0 where everything is dropped."""
    return 1.0 / (1.0 - dropout) if dropout < 1.0 else 0.0


def keep_mask(seed: Tensor, shape: torch.Size, dropout: float) -> Tensor:
    """Returns True where an element is kept.

    Counter row * ceil(D / 4) + column // 4 gives the words of four neighbours: one word an element would make dropout
    dearer than the memory traffic it is fused into.

    Shape: seed 0-d int64; result `shape` [..., D], rows counted over all leading dimensions.
    """
    *leading, width = shape
    groups = -(-width // 4)
    rows = 1
    for size in leading:
        rows *= size
    counter = torch.arange(rows * groups, device=seed.device, dtype=torch.int64)
    words = random_words(seed, counter).view(rows, 4 * groups)[:, :width]
    return (words >= threshold(dropout)).view(shape)


def drop(x: Tensor, dropout: float, seed: Tensor | None) -> Tensor:
    """Returns `x` with elements dropped with probability `dropout` and the others scaled to keep the expectation.

    Shape: x [..., D]; seed 0-d int64 on the device of x; result as x.
    """
    if dropout == 0:
        return x
    assert seed is not None, "the operations check this"
    return torch.where(keep_mask(seed, x.shape, dropout), x * keep_scale(dropout), 0.0)
