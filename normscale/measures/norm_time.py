"""What norms cost: LayerNorm against RMSNorm alone, and in a training step, in interleaved pairs."""

import time
from collections.abc import Callable
from statistics import median
from typing import Literal

import torch
from torch import Tensor

from normscale.config.load import revise
from normscale.config.schema import RunConfig
from normscale.measures._rows import rows
from normscale.models.builder import build
from normscale.norms import Norm
from normscale.norms.norm import find_norm

Mode = Literal["eager", "compiled"]
VOCAB = 256


def measure(
    seed: int, what: Literal["kernel", "step"], mode: Mode, width: int, tokens: int, pairs: int = 25
) -> dict[str, float]:
    """Returns medians over pairs of the time of RMSNorm over that of LayerNorm, one after the other, forward and back.

    `kernel`: of the norm alone, with its gain (and LayerNorm's bias) and all gradients: `rms_over_ln`. `step`: of a
    Pre-Norm model of 4 blocks, forward and backward: `rms_over_ln`, and `norm_share`, the share of the step with
    LayerNorm that the same model without any norm saves.
    """
    # By turns: what else the machine does hits all sides alike.
    sides = _kernels(seed, mode, width, tokens) if what == "kernel" else _steps(seed, mode, width, tokens)
    for side in sides.values():
        side()
        side()
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for pair in range(pairs):
        for name in sides if pair % 2 else reversed(sides):
            began = time.perf_counter()
            sides[name]()
            seconds[name].append(time.perf_counter() - began)
    found = {"rms_over_ln": median(r / ln for r, ln in zip(seconds["rmsnorm"], seconds["layernorm"], strict=True))}
    if "none" in seconds:
        shares = [1 - none / ln for none, ln in zip(seconds["none"], seconds["layernorm"], strict=True)]
        found["norm_share"] = median(shares)
    return found


def _kernels(seed: int, mode: Mode, width: int, tokens: int) -> dict[str, Callable[[], None]]:
    x = rows(seed, tokens, width, torch.float32).requires_grad_()
    back = rows(seed + 1, tokens, width, torch.float32)

    def side(name: str) -> Callable[[], None]:
        kind = find_norm(name)
        norm: torch.nn.Module = kind(width, 1e-5, kind.Options())
        called: Callable[[Tensor], Tensor] = torch.compile(norm) if mode == "compiled" else norm

        def once() -> None:
            torch.autograd.grad(called(x), [x, *norm.parameters()], back)

        return once

    return {name: side(name) for name in ("layernorm", "rmsnorm")}


def _steps(seed: int, mode: Mode, width: int, tokens: int) -> dict[str, Callable[[], None]]:
    context = 64
    generator = torch.Generator().manual_seed(seed)
    text = torch.randint(VOCAB, (tokens // context, context), generator=generator)

    def side(name: str) -> Callable[[], None]:
        settings = {"model.scheme": "pre", "model.M": 4, "model.d": width, "model.heads": max(1, width // 64)}
        settings |= {"model.norm": "layernorm" if name == "none" else name, "model.compile": mode == "compiled"}
        model = build(revise(RunConfig(), {**settings, "model.context": context}).model, VOCAB, seed)
        if name == "none":
            for module in list(model.modules()):
                for child_name, child in module.named_children():
                    if isinstance(child, Norm):
                        module._modules[child_name] = torch.nn.Identity()

        def once() -> None:
            model.zero_grad()
            torch.nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten()).backward()  # type: ignore[no-untyped-call]

        return once

    return {name: side(name) for name in ("layernorm", "rmsnorm", "none")}
