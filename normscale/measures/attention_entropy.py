"""How sharp attention is at initialisation, with and without the 1/sqrt(d_k)."""

from typing import Literal

import torch

KEYS, QUERIES = 64, 512


def measure(seed: int, d_k: int, scale: Literal["root", "none"]) -> dict[str, float]:
    """Returns, for queries and keys that are normal of unit variance, as behind a norm and Xavier weights:

    - `entropy`: mean over queries of the entropy of the attention over 64 keys, over log 64, so that 1 is uniform;
    - `largest`: mean of its largest weight; `gradient`: mean over queries of the L2 norm of the softmax's Jacobian,
      which is 0 where it is saturated.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(n, d_k, generator=generator, dtype=torch.float64) for n in (QUERIES, KEYS))
    logits = q @ k.T / (d_k**0.5 if scale == "root" else 1.0)
    p = logits.softmax(-1)
    entropy = -(p * p.clamp_min(1e-300).log()).sum(-1) / torch.tensor(float(KEYS)).log()
    squares = p.square().sum(-1)
    # |diag(p) - p p^T|^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2
    jacobian = (squares - 2 * p.pow(3).sum(-1) + squares.square()).clamp_min(0).sqrt()
    return {
        "entropy": float(entropy.mean()),
        "largest": float(p.amax(-1).mean()),
        "gradient": float(jacobian.mean()),
    }
