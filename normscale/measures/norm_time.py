"""What norms cost: LayerNorm against RMSNorm alone, and in a training step, in interleaved pairs."""

import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.measures._modules import without
from normscale.measures._rows import rows
from normscale.models.builder import build
from normscale.norms import Norm, set_backend
from normscale.norms.norm import find_norm
from normscale.train.engines.ranks import own_device

Mode = Literal["eager", "compiled", "triton"]
VOCAB = 256
AGAIN = " again"


def measure(
    seed: int, what: Literal["kernel", "step"], mode: Mode, width: int, tokens: int, times: int = 1, pairs: int = 25
) -> dict[str, float]:
    """Returns medians over pairs of the time of RMSNorm over that of LayerNorm, one after the other, forward and back.

    `kernel`: of the norm alone, with its gain (and LayerNorm's bias) and all gradients: `rms_over_ln`. `step`: of a
    Pre-Norm model of 4 blocks, forward and backward: `rms_over_ln`, and `norm_share`, the share of the step with
    LayerNorm that the same model without any norm saves. `ln_over_ln` is that of the same LayerNorm in another
    turn: what the machine scatters, 1 where it is quiet. (Of a second one, compiled, calls would be found sooner.)

    On a GPU where there is one, in fp32, with `times` as many tokens; `triton` is this project's kernel, and cannot run
    without one. Eager mode is PyTorch's own two functions.
    """
    tokens *= times
    # By turns: what else the machine does hits all sides alike.
    sides = _kernels(seed, mode, width, tokens) if what == "kernel" else _steps(seed, mode, width, tokens)
    for side in sides.values():
        side()
        side()
    _wait()
    sides["layernorm" + AGAIN] = sides["layernorm"]
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in sides if pair % 2 else reversed(sides):
            began = time.perf_counter()
            sides[name]()
            _wait()
            seconds[name].append(time.perf_counter() - began)
    first = seconds["layernorm"]
    found = {
        "rms_over_ln": median(rms / ln for rms, ln in zip(seconds["rmsnorm"], first, strict=True)),
        "ln_over_ln": median(again / ln for again, ln in zip(seconds["layernorm again"], first, strict=True)),
    }
    if "none" in seconds:
        shares = [1 - none / ln for none, ln in zip(seconds["none"], first, strict=True)]
        found["norm_share"] = median(shares)
    return found


def _kernels(seed: int, mode: Mode, width: int, tokens: int) -> dict[str, Callable[[], None]]:
    device = own_device()
    x = rows(seed, tokens, width, torch.float32).to(device).requires_grad_()
    back = rows(seed + 1, tokens, width, torch.float32).to(device)

    def side(name: str) -> Callable[[], None]:
        kind = find_norm(name)
        norm = kind(width, 1e-5, kind.Options()).to(device)
        set_backend(norm, "triton" if mode == "triton" else "eager")
        called: Callable[[Tensor], Tensor] = torch.compile(norm) if mode == "compiled" else norm

        def once() -> None:
            torch.autograd.grad(called(x), [x, *norm.parameters()], back)

        return once

    return {name: side(name) for name in ("layernorm", "rmsnorm")}


def _steps(seed: int, mode: Mode, width: int, tokens: int) -> dict[str, Callable[[], None]]:
    context = 64
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (tokens // context, context), generator=generator).to(own_device())

    def side(name: str) -> Callable[[], None]:
        settings = {"model.scheme": "pre", "model.M": 4, "model.d": width, "model.heads": max(1, width // 64)}
        settings |= {"model.norm": "layernorm" if name == "none" else name, "model.compile": mode == "compiled"}
        settings |= {"model.context": context, "model.backend": "triton" if mode == "triton" else "eager"}
        model = build(revise(RunConfig(), settings).model, VOCAB, seed).to(own_device())
        if name == "none":
            without(model, Norm)

        def once() -> None:
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()  # type: ignore[no-untyped-call]

        return once

    return {name: side(name) for name in ("layernorm", "rmsnorm", "none")}


def _wait() -> None:
    """Waits for the GPU, if that is what measures."""
    if own_device().type == "cuda":
        torch.cuda.synchronize()
