"""What `make bench-step` lets run against each other: ours, a hand-written loop, and two published packages.

All are decoders of the same shape: learned positions, tied head, exact GELU, LayerNorm after alpha * x + F(x), no
dropout, AdamW with PyTorch's fused kernel. The packages keep what is theirs (x-transformers has no biases in attention
and norms, torchscale multiplies out its attention scores), each as its own documentation builds it.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscale.config.schema import RunConfig
from normscale.data.task import MicroBatch
from normscale.models.builder import build
from normscale.train.engines.plain import PlainEngine
from normscale.train.loop import Trainer

VOCAB = 256
LR, BETAS = 1e-4, (0.9, 0.98)


@dataclass(frozen=True)
class Case:
    """One shape to step: blocks of width d (feed-forward 4 d), and what a batch of tokens is made of."""

    name: str
    blocks: int
    d: int
    heads: int
    batch: int
    context: int
    compute: Literal["fp32", "bf16"] = "fp32"

    @property
    def alpha(self) -> float:
        return float((2 * self.blocks) ** 0.25)

    def config(self, compile: bool) -> RunConfig:
        """Returns our configuration of it."""
        return RunConfig(
            model={
                "M": self.blocks,
                "d": self.d,
                "heads": self.heads,
                "context": self.context,
                "positions": "learned",
                "compile": compile,
            },
            train={"steps": 10**6, "batch": self.batch, "optim": {"lr": LR, "betas": BETAS}},
            probes={"every": 10**5},
            precision={"compute": self.compute},
        )

    def autocast(self) -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, enabled=self.compute == "bf16")


Step = Callable[[Tensor, Tensor], float]
"""One training step on tokens and targets [B, T]; returns the loss in nats a target, on the host."""


def ours(case: Case, compile: bool) -> Step:
    """Returns the step of the package's own trainer, as a run takes it between two measured steps."""
    config = case.config(compile)
    trainer = Trainer(PlainEngine(build(config.model, VOCAB, 0), config.precision, torch.device("cpu")), config, [])

    class Silent:
        def metrics(self, *_: Any) -> None: ...

        def profile(self, *_: Any) -> None: ...

        def event(self, *_: Any, **__: Any) -> None: ...

        def ledger(self, *_: Any) -> None: ...

    recorder = Silent()
    return lambda tokens, targets: trainer.step([MicroBatch(tokens, targets)], recorder).loss


def hand_block(x: Tensor, weights: tuple[Tensor, ...], heads: int, alpha: Tensor) -> Tensor:
    """Returns one DeepNorm block of `x` [B, T, D], as one writes it who needs no other scheme, norm or precision."""
    qkv, qkv_bias, o, o_bias, gain1, bias1, up, up_bias, out, out_bias, gain2, bias2 = weights
    B, T, D = x.shape
    q, k, v = F.linear(x, qkv, qkv_bias).view(B, T, 3, heads, D // heads).permute(2, 0, 3, 1, 4).unbind(0)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, D)
    x = F.layer_norm(alpha * x + F.linear(y, o, o_bias), (D,), gain1, bias1)
    y = F.linear(F.gelu(F.linear(x, up, up_bias)), out, out_bias)
    return F.layer_norm(alpha * x + y, (D,), gain2, bias2)


def hand_written(case: Case, compile: bool) -> Step:
    """Returns the step of a loop without modules: one compiled function, flat storage, one fused optimizer.

    It starts from our initial values, so that its first loss must be ours.
    """
    model = build(case.config(compile=False).model, VOCAB, 0)
    ends = [model.token, model.position]
    blocks = [list(block.parameters()) for block in model.blocks]
    alpha = torch.tensor(case.alpha)
    own: list[Tensor] = [p for block in ([p for p in ends if p is not None], *blocks) for p in block]
    sizes = [-(-p.numel() // 16) * 16 for p in own]
    flat = torch.zeros(sum(sizes))
    flat.grad = torch.zeros_like(flat)
    leaves = []
    for p, values, grads in zip(own, flat.split(sizes), flat.grad.split(sizes), strict=True):
        leaf = values[: p.numel()].view_as(p).copy_(p.detach()).requires_grad_()
        leaf.grad = grads[: p.numel()].view_as(p)
        leaves.append(leaf)
    token, position = leaves[:2]
    weights = [_in_order(block, leaves[2 + i * 12 : 14 + i * 12]) for i, block in enumerate(_names(model))]
    run = torch.compile(hand_block) if compile else hand_block
    optimizer = torch.optim.AdamW([flat], lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> float:
        flat.grad.zero_()
        with case.autocast():
            x = token[tokens] * case.d**0.5 + position[: tokens.shape[1]]
            for block in weights:
                x = run(x, block, case.heads, alpha)
            logits = F.linear(x, token)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


ORDER = ("qkv.weight", "qkv.bias", "o.weight", "o.bias", "self.own.norm.gamma", "self.own.norm.bias", "up.weight")
ORDER += ("up.bias", "out.weight", "out.bias", "ffn.own.norm.gamma", "ffn.own.norm.bias")


def _names(model: nn.Module) -> list[list[str]]:
    return [[name for name, _ in block.named_parameters()] for block in model.blocks]  # type: ignore[union-attr]


def _in_order(names: list[str], leaves: list[Tensor]) -> tuple[Tensor, ...]:
    """Returns a block's twelve tensors as `hand_block` takes them."""
    return tuple(next(leaf for name, leaf in zip(names, leaves, strict=True) if name.endswith(end)) for end in ORDER)


def x_transformers(case: Case, compile: bool) -> Step:
    """Returns the step of x-transformers: norm after the sum, the residual scaled, PyTorch's fused attention."""
    from x_transformers import Decoder, TransformerWrapper

    model = TransformerWrapper(
        num_tokens=VOCAB,
        max_seq_len=case.context,
        tie_embedding=True,
        attn_layers=Decoder(
            dim=case.d,
            depth=case.blocks,
            heads=case.heads,
            attn_dim_head=case.d // case.heads,
            pre_norm=False,
            scale_residual_constant=case.alpha,
            attn_flash=True,
            verbose=False,
        ),
    )
    if compile:  # attention and feed-forward are the pieces that it calls one by one
        for layer in model.attn_layers.layers:
            layer[1].compile()
    return _stepping(model, case, model)


def torchscale(case: Case, compile: bool) -> Step:
    """Returns the step of torchscale: its decoder with deepnorm=True."""
    with _without_extras():
        from torchscale.architecture.config import DecoderConfig
        from torchscale.architecture.decoder import Decoder

    class Positions(nn.Embedding):
        def forward(self, tokens: Tensor, incremental_state: None = None) -> Tensor:
            return self.weight[: tokens.shape[1]]

    config = DecoderConfig(
        decoder_embed_dim=case.d,
        decoder_attention_heads=case.heads,
        decoder_ffn_embed_dim=4 * case.d,
        decoder_layers=case.blocks,
        deepnorm=True,
        vocab_size=VOCAB,
        share_decoder_input_output_embed=True,
        no_scale_embedding=False,
    )
    token = nn.Embedding(VOCAB, case.d)
    nn.init.normal_(token.weight, std=case.d**-0.5)
    model = Decoder(config, token, Positions(case.context, case.d))
    if compile:
        for layer in model.layers:
            layer.compile()
    return _stepping(model, case, lambda tokens: model(tokens)[0])


def _stepping(model: nn.Module, case: Case, logits: Callable[[Tensor], Tensor]) -> Step:
    """Returns the plain loop around a package's model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    def step(tokens: Tensor, targets: Tensor) -> float:
        optimizer.zero_grad()
        with case.autocast():
            out = logits(tokens)
        loss = F.cross_entropy(out.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@contextmanager
def _without_extras() -> Iterator[None]:
    """Lets torchscale be imported without fairscale and timm, which pin old versions of much else.

    It imports three functions from them that a decoder without activation checkpoints, sharding and drop path never
    calls; where a package is missing, an empty stand-in takes its place while torchscale is imported.
    """
    wanted = {"fairscale.nn": ("checkpoint_wrapper", "wrap"), "timm.models.layers": ("drop_path",)}
    stand_ins: list[str] = []
    for path, names in wanted.items():
        try:
            __import__(path)
        except (ImportError, RuntimeError):  # the latter from a torchvision that was built for another PyTorch
            parts = path.split(".")
            for i in range(1, len(parts) + 1):
                name = ".".join(parts[:i])
                if name not in sys.modules:
                    sys.modules[name] = ModuleType(name)
                    stand_ins.append(name)
            for name in names:
                setattr(sys.modules[path], name, None)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
