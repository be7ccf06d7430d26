"""Beam search: the most likely sequences that a model with an encoder beside its decoder says to a source."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from normscale.models.stack import Transformer


@dataclass(frozen=True)
class Search:
    """How it is searched.

    Attributes:
        beam: sequences that are followed of each source; even 1 goes on past a likely END.
        penalty: a finished sequence is judged by its log-probability over its length to this power (END counts): 0
            prefers short ones, 1 is the mean of a token.
        begin, end: the tokens that open and close a sequence.
        never: tokens that are never said.
    """

    beam: int
    penalty: float
    begin: int
    end: int
    never: tuple[int, ...] = ()


@torch.no_grad()
def best(
    model: Transformer,
    source_BS: Tensor,
    keep_BS: Tensor | None,
    how: Search,
    on_token: Callable[[int, int], None] = lambda token, most: None,
) -> list[list[int]]:
    """Returns the best sequence found to each source, without the tokens that open and close it.

    A source is done when no sequence that is still followed could come to be better than the best finished one, and at
    the latest at `model.context` tokens, END included. To a source whose logits are not finite nothing is said. The
    encoder reads each source once; the decoder reads the sequences anew for every token. `on_token` is called before
    each of them, with its number and how many there are at the most.

    Shape: source [B, S] int64; keep [B, S] bool.

    Reference: Ott et al. 2019, arXiv:1904.01038 (fairseq), whose length penalty it is.
    """
    memory, device = model.encode(source_BS, keep_BS), source_BS.device
    finished: list[tuple[float, list[int]]] = [(-torch.inf, [])] * len(source_BS)
    left = torch.arange(len(source_BS), device=device)  # sources that are not done
    said = torch.full((len(source_BS), 1, 1), how.begin, device=device)  # [sources, beams, tokens]
    scores = torch.zeros(len(source_BS), 1, device=device)
    for length in range(1, model.context + 1):
        on_token(length, model.context)
        logits = _next(model, said, memory[left], None if keep_BS is None else keep_BS[left])
        logits[..., list(how.never)] = -torch.inf
        total = scores[..., None] + logits.log_softmax(-1)
        worths, rows = (total[..., how.end] / length**how.penalty).max(-1)
        for i, (source, worth, row) in enumerate(zip(left.tolist(), worths.tolist(), rows.tolist(), strict=True)):
            if worth > finished[source][0]:
                finished[source] = (worth, said[i, row, 1:].tolist())
        if length == model.context:
            break
        total[..., how.end] = -torch.inf
        scores, chosen = total.flatten(1).topk(min(how.beam, total[0].numel()))
        rows, tokens = chosen // total.shape[-1], chosen % total.shape[-1]
        said = torch.cat([said.gather(1, rows[..., None].expand(-1, -1, length)), tokens[..., None]], -1)
        # Sequences only get less likely, and the longest would be judged most leniently.
        hope = scores[:, 0] / (model.context if how.penalty > 0 else length + 1) ** how.penalty
        going = torch.tensor([finished[source][0] for source in left.tolist()], device=device) < hope
        left, said, scores = left[going], said[going], scores[going]
        if not len(left):
            break
    return [tokens for _, tokens in finished]


def _next(model: Transformer, said: Tensor, memory: Tensor, keep: Tensor | None) -> Tensor:
    """Returns the logits of the next token of every sequence, in fp32.

    Shape: said [B, K, t]; memory [B, S, D]; result [B, K, V].
    """
    sources, beams, _ = said.shape
    memory = memory.repeat_interleave(beams, 0)
    keep = None if keep is None else keep.repeat_interleave(beams, 0)
    x = model.features(said.flatten(0, 1), memory_BSD=memory, source_keep_BS=keep)
    return model.head(x[:, -1:]).float().view(sources, beams, -1)
