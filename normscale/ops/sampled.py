"""Statistics of a few sampled positions: those that would cost too much of every position.

The places are the same in every block and step, a grid over sequences and positions, and drawn from no generator: what
is measured changes with the model alone. They are strided views, which no device has to wait for.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from normscale.ops.statistics import on_host

Floats = NDArray[np.float32]

SAMPLES = 16  # positions at most, of one micro-batch
SEQUENCES = 4  # of which they are taken: attention reads all keys of each


class Places(NamedTuple):
    """Sampled positions: the same ones of some sequences, and what a causal query must not look at from them.

    Shape: hidden [m, T] bool.
    """

    sequences: slice
    positions: slice
    hidden: Tensor


def places(batch: int, length: int, device: torch.device) -> Places:
    """Returns at most `SAMPLES` places of a [B, T] batch, evenly spread over its sequences and over the positions."""
    n = min(batch, SEQUENCES)
    positions = _spread(length, min(length, SAMPLES // n))
    every = torch.arange(length, device=device)
    return Places(_spread(batch, n), positions, every > every[positions].unsqueeze(1))


def spread(x: Tensor, most: int = SAMPLES, sequences: int = SEQUENCES) -> Tensor:
    """Returns at most `most` rows of `x`, evenly spread over all dimensions but the last, as a view.

    Of the first of several dimensions at most `sequences` are taken. Of a [B, T, D] batch the rows are those at its
    `places`. It waits for no device and makes no tensor of places.

    Shape: x [..., D], of two dimensions at least; result as many dimensions, at most `most` rows of D.
    """
    *lead, last = range(x.dim() - 1)
    taken, left = [], most
    for dim in lead:
        n = min(x.shape[dim], sequences if dim == 0 else left, left)
        taken.append(_spread(x.shape[dim], n))
        left //= n
    return x[(*taken, _spread(x.shape[last], min(x.shape[last], left)))]


def _spread(of: int, n: int) -> slice:
    """Returns n of the numbers below `of`, evenly spread, as near to the middle of n equal parts as one step allows."""
    step = of // n
    first = (of - 1 - (n - 1) * step + 1) // 2
    return slice(first, first + (n - 1) * step + 1, step)


def take(x_BTD: Tensor, at: Places) -> Tensor:
    """Returns `x` at the places, a view.

    Shape: x [B, T, ...]; result [n, m, ...].
    """
    return x_BTD[at.sequences, at.positions]


def keep(samples: Tensor, row: Tensor, x_BTD: Tensor, at: Places) -> None:
    """Writes `x` at the places into a row of `samples`, in place.

    Shape: samples [R, SAMPLES, D] fp32; row [1] int64. Where there are fewer places the rest of the row is zeros.
    """
    taken = take(x_BTD.detach(), at).to(samples.dtype)
    n = taken.shape[0] * taken.shape[1]
    if on_host(samples):
        place = samples.numpy()[int(row)]  # a few operations less; they add up over 1000 blocks
        place[:n].reshape(taken.shape)[...] = taken.numpy()
        place[n:] = 0.0
        return
    with torch.no_grad():
        samples[:, :n].index_copy_(0, row, taken.flatten(0, 1).unsqueeze(0))
        if n < SAMPLES:
            samples[:, n:].index_fill_(0, row, 0.0)


def turns(samples: Tensor) -> Tensor:
    """Returns the angle between each row and the next over pi, averaged over the places.

    Places that hold zeros are left out.

    Shape: samples [R, SAMPLES, D]; result [R - 1] fp64.
    """
    x = samples.double()
    return torch.nanmean(angles(x[:-1], x[1:]), dim=-1)


def angles(x: Tensor, y: Tensor) -> Tensor:
    """Returns the angle between vectors over pi: arccos of the cosine; NaN where one of them is 0.

    It takes fp64: in fp32 the cosine of an angle below 3e-4 would be 1.

    Shape: x, y [..., D] fp64; result [...] fp64.
    """
    lengths = torch.linalg.vector_norm(x, dim=-1) * torch.linalg.vector_norm(y, dim=-1)
    return torch.arccos(((x * y).sum(-1) / lengths).clamp(-1, 1)) / torch.pi


def attention_row(q: Tensor, k: Tensor, at: Places, *, keep_B11S: Tensor | None = None, causal: bool = False) -> Tensor:
    """Returns the largest attention logit and the mean entropy of the attention weights (nats), of sampled queries.

    All heads count. Logits are q k^T / sqrt(K) in fp32, whatever attention is computed in, where the query may look;
    what a query must not look at has no weight. A query that is padding itself counts like the others, one that may
    look at nothing does not.

    Shape: q [B, H, T, K]; k [B, H, S, K]; keep broadcasts to [B, H, T, S]; result [2] fp32.
    """
    q_nHmK, k_nHSK = q.detach()[at.sequences, :, at.positions], k.detach()[at.sequences]
    hidden = at.hidden if causal else None
    if keep_B11S is not None:
        padding = ~keep_B11S[at.sequences]
        hidden = padding if hidden is None else hidden | padding
    q_nHmK, k_nHSK = q_nHmK.float() * q.shape[-1] ** -0.5, k_nHSK.float()
    if on_host(q_nHmK):
        return torch.from_numpy(_read(q_nHmK.numpy(), k_nHSK.numpy(), None if hidden is None else hidden.numpy()))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):  # which would go to half precision here
        scores = q_nHmK @ k_nHSK.contiguous().mT  # a product of strided batches takes twice the time
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        logs = torch.log_softmax(scores, dim=-1)
        each = (logs.exp() * logs.clamp(min=-1e4)).sum(-1)  # exp(-Inf) * -Inf is 0
        sees = scores.amax(-1) != -torch.inf
        entropy = torch.where(sees, each, 0.0).sum() / -sees.sum()
        return torch.stack([scores.amax(), entropy])


def _read(q: Floats, k: Floats, hidden: NDArray[np.bool_] | None) -> Floats:
    """Returns what `attention_row` does, on the host.

    Arrays so small gain nothing from threads, which operations of torch would wake up and wait for: numpy is quicker.

    Shape: q [n, H, m, K], with the factor; k [n, H, S, K]; hidden broadcasts to [n, H, m, S]; result [2].
    """
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):  # what is not finite comes out as it is
        scores = q @ k.swapaxes(-1, -2)
        if hidden is not None:
            np.copyto(scores, -np.inf, where=hidden)
        largest = scores.max(-1, keepdims=True)
        sees = largest != -np.inf
        scores -= np.where(sees, largest, np.float32(0))
        np.maximum(scores, np.float32(-1e4), out=scores)  # whose exp is 0
        weights = np.exp(scores)
        total = weights.sum(-1)
        entropy = np.log(total) - np.vecdot(weights, scores) / total
        return np.array([largest.max(), entropy[sees[..., 0]].sum() / sees.sum()], np.float32)
