"""What the tests of single schemes share: the network written out in plain tensor operations, and tables of a model.

Nothing here calls a norm, a branch or a scheme of ours: parameters are read, the rest is PyTorch's arithmetic.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normscale.config.schema import ModelConfig
from normscale.models.builder import build
from normscale.schemes import Depth, Role, Scheme
from tests.schemes.gains import ENDS

TOKENS = torch.randint(0, 32, (2, 8), generator=torch.Generator().manual_seed(0))
SOURCE = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))
FORMS = {"encoder": (3, 0), "decoder": (0, 5), "encoder-decoder": (2, 3)}
DEPTHS = [*((n, 0) for n in (1, 6, 18, 100, 1000)), *((0, n) for n in (1, 6, 18, 100, 1000))]
BOTH = [(6, 6), (12, 3), (3, 12), (1000, 1000)]
PARTS: dict[Any, tuple[Any, ...]] = dict.fromkeys(("self", "cross"), ("q", "k", "v", "o", "latent"))
PARTS["ffn"] = ("in", "gate", "out")

Gains = dict[tuple[str, str, str], set[float]]
Stack = Callable[[list[Any], Any, Tensor, Tensor | None], Tensor]


def made(
    scheme: str, N: int, M: int, *, seed: int = 0, perturbed: bool = True, model: Any = None, **options: Any
) -> Any:
    """Returns a small model in double precision; perturbed, no gain is 1 and no bias 0, so that a missing one shows."""
    size = {"d": 16, "heads": 2, "context": 8, "positions": "sinusoidal"} | (model or {})
    found = build(ModelConfig(**size, N=N, M=M, scheme=scheme, scheme_options=options), 32, seed).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in found.parameters() if perturbed else ():
            p.add_(0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return found


def ln(x: Tensor, norm: Any, eps: float = 1e-5) -> Tensor:
    """LayerNorm with the parameters of `norm`."""
    centred = x - x.mean(-1, keepdim=True)
    return norm.gamma * centred / (centred.square().mean(-1, keepdim=True) + eps).sqrt() + norm.bias


def attention(
    layer: Any,
    x: Tensor,
    memory: Tensor | None = None,
    *,
    qkv: Callable[[str, Tensor], Tensor] = lambda _, t: t,
    inner: Callable[[Tensor], Tensor] = lambda y: y,
) -> Tensor:
    """W_o inner(heads), heads of softmax(q k^T / sqrt(K)) v, with q, k, v [B, H, T, K] through `qkv`."""
    branch, site = layer.branch, layer.site
    if site.kind == "cross":
        assert memory is not None
        q, (k, v) = x @ branch.q.weight.T + branch.q.bias, (memory @ branch.kv.weight.T + branch.kv.bias).chunk(2, -1)
    else:
        q, k, v = (x @ branch.qkv.weight.T + branch.qkv.bias).chunk(3, -1)
    heads = [t.unflatten(-1, (branch.heads, -1)).transpose(1, 2) for t in (q, k, v)]
    q, k, v = (qkv(name, t) for name, t in zip("qkv", heads, strict=True))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if site.kind == "self" and site.side == "decoder":
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:]).tril().bool(), -math.inf)
    y = inner((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
    return y @ branch.o.weight.T + branch.o.bias


def feedforward(layer: Any, x: Tensor, *, inner: Callable[[Tensor], Tensor] = lambda h: h) -> Tensor:
    """W_2 inner(GELU(W_1 x))."""
    up, out = layer.branch.up, layer.branch.out
    return inner(F.gelu(x @ up.weight.T + up.bias)) @ out.weight.T + out.bias


def branch(layer: Any, x: Tensor, memory: Tensor | None = None) -> Tensor:
    """The plain branch of a sublayer."""
    return feedforward(layer, x) if layer.site.kind == "ffn" else attention(layer, x, memory)


def beside(form: str) -> dict[str, Tensor]:
    """What a model of this form takes besides its tokens."""
    return {"source_BS": SOURCE} if form == "encoder-decoder" else {}


def compare(model: Any, stack: Stack, tolerance: float = 1e-6) -> None:
    """Holds a model's features against `stack`, which gives the output of one side from its sublayers and ends."""
    embedded = {n: model.token[t] * 4.0 + model.sinusoids[: t.shape[1]] for n, t in (("x", TOKENS), ("s", SOURCE))}
    layers, memory, given = model.sublayers(), None, {}
    if model.source_ends is not None:
        sources = [layer for layer in layers if layer.site.side == "encoder"]
        layers = layers[len(sources) :]
        memory, given = stack(sources, model.source_ends, embedded["s"], None), {"source_BS": SOURCE}
    want = stack(layers, model.ends, embedded["x"], memory)
    # Constants are kept in fp32, and LayerNorm-Scaling's are no binary fractions.
    torch.testing.assert_close(model.features(TOKENS, **given), want, rtol=tolerance, atol=tolerance)


def gains(scheme: Scheme, N: int, M: int, *, bias: bool = False) -> Gains:
    """Returns the gains of all weights, or biases, at a depth by side, kind and part; asserts that ends have gain 1."""
    depth, found = Depth(N, M), Gains()
    for site in depth.sites():
        for part in PARTS[site.kind]:
            gain = scheme.gain(depth, site, Role(site.kind, part, bias))
            found.setdefault((site.side, site.kind, part), set()).add(gain)
    for part, kind in ENDS.items():
        assert scheme.gain(depth, None, Role(kind, part)) == 1.0  # type: ignore[arg-type]
    return found


def assert_unit_gains(scheme: Scheme) -> None:
    """Asserts that a scheme leaves the standard init as it is, biases included, at all depths."""
    for N, M in [*DEPTHS, *(BOTH if "encoder-decoder" in scheme.topologies else [])]:
        for bias in (False, True):
            assert all(gain == {1.0} for gain in gains(scheme, N, M, bias=bias).values())


def owned(model: Any) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns the parameters at every site and end that are no weight of the network, by name, with their shapes."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for layer in model.sublayers():
        named = layer.named_parameters()
        found[layer.site.name] = {n: tuple(p.shape) for n, p in named if n.startswith(("own.", "branch.slots."))}
    found["ends"] = {name: tuple(p.shape) for name, p in model.ends.named_parameters()}
    if model.source_ends is not None:
        found["source ends"] = {name: tuple(p.shape) for name, p in model.source_ends.named_parameters()}
    return found


def norm(name: str, width: int = 16) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of a LayerNorm, as `owned` lists them."""
    return {f"{name}.gamma": (width,), f"{name}.bias": (width,)}


def constants(model: Any, name: str) -> list[float | None]:
    """Returns a constant of every site, None where a site has none."""
    return [float(layer.own.tensor(name)) if layer.own.has(name) else None for layer in model.sublayers()]
