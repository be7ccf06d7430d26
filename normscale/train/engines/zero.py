"""DeepSpeed, ZeRO 0 to 3: its backward, its reduction and its step, and between them our judgement.

DeepSpeed clips and steps in one call; what it would make of a gradient that is not finite depends on stage and dtype.
So the norm is taken from its averaged gradients before, all ranks alike, and the step is made or the window let go of.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from normscale.arguments import to_stderr
from normscale.config.deepspeed import check_precision, native_bf16, rendered
from normscale.config.schema import OptimConfig, RunConfig
from normscale.errors import LaunchError, RunFailed
from normscale.models.stack import Transformer
from normscale.probes.probe import Parameters, Span
from normscale.probes.sending import sent
from normscale.train.engines import zero_start
from normscale.train.engines.engine import Engine
from normscale.train.engines.ranks import join, own_device
from normscale.train.engines.zero_model import Called, computing_within, uncompiled
from normscale.train.engines.zero_parts import Seen, parts_of
from normscale.train.flat import Fault
from normscale.train.optim import optimizer_over

LARGEST_SQUARE = float(torch.finfo(torch.float32).max)  # of a norm that DeepSpeed, which squares it in fp32, can have


def check_zero(config: RunConfig, device: str, world: int) -> None:
    """Refuses what DeepSpeed would not do, or was told otherwise.

    Raises:
        ConfigError: it is not installed, would not compute as asked, or its own JSON disagrees.
    """
    zero_start.check_installed()
    check_precision(config, device)
    rendered(config, world)


class ZeroEngine(Engine):
    """DeepSpeed's engine: stage 0 shards nothing, 1 the optimizer's state, 2 gradients too, 3 parameters too."""

    name = "deepspeed"

    def __init__(self, model: Transformer, config: RunConfig) -> None:
        self.rank, self.world = join(config.engine.timeout_s)
        self.stage, self.clip = config.engine.zero, config.train.optim.clip or 0.0
        self.sharded, self.gathers = self.stage > 0, self.stage == 3
        super().__init__(model, config.precision, own_device())
        self.native = native_bf16(config)
        self.uncompiled = self.stage == 3 and uncompiled(model)
        if self.uncompiled and self.rank == 0:
            to_stderr("model.compile is off: ZeRO-3's hooks would break every graph (engine.zero=2 compiles)")
        if self.precision.compute != "fp32":
            computing_within(model, self.autocast)
        exact = {name: p.detach().clone() for name, p in model.named_parameters()} if self.native else {}
        trained = [p for p in model.parameters() if p.requires_grad]
        self._optimizer = optimizer_over(
            [p for p in trained if p.dim() >= 2], [p for p in trained if p.dim() < 2], config.train.optim
        )
        self._offload = config.engine.offload
        settings = rendered(config, self.world)
        self.model = zero_start.start(model, self._optimizer, settings, self.device, config.engine.timeout_s)
        self.parts = parts_of(self.model, model)
        self._check_set_up()
        self.optimizer = cast(torch.optim.Optimizer, Seen(self.parts, self._optimizer, self.device))
        if self.native:
            self._begin_exactly(exact)
        self._norm: float | None = None  # of the window at hand
        self._compared = False

    def _check_set_up(self) -> None:
        """Holds DeepSpeed to what was asked for.

        Raises:
            LaunchError: it has set up something else.
        """
        engine = self.model
        found = {
            "class": type(engine).__name__,
            "ZeRO stage": int(engine.zero_optimization_stage()),
            "clipping": float(engine.gradient_clipping()),
            "ranks": int(engine.dp_world_size),
            "bf16": bool(engine.bfloat16_enabled()),
            "fp16": bool(engine.fp16_enabled()),
            "entries not held": self.parts.missing(self.shapes),
        }
        asked = ("DeepSpeedEngine", self.stage, self.clip, self.world, self.native, False, 0)
        for (name, value), wanted in zip(found.items(), asked, strict=True):
            if value != wanted:
                raise LaunchError(
                    f"engine.name: DeepSpeed {metadata.version('deepspeed')} set up {name} {value} where {wanted} was "
                    "asked for; use another version of it, or engine.name=fsdp2"
                )

    @torch.no_grad()
    def _begin_exactly(self, exact: Mapping[str, Tensor]) -> None:
        """Begins with the values of the model: DeepSpeed has rounded them, and stage 0 has made a step with nothing."""
        self._optimizer.state.clear()
        for piece, values in zip(self.parts.pieces, self.parts.values(), strict=True):
            values.copy_(exact[piece.name].view(-1)[piece.start : piece.start + piece.length])
        self.parts.refresh()

    # Passes.

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        self.model.set_gradient_accumulation_boundary(last)
        yield

    def backward(self, loss: Tensor) -> None:
        self.model.backward(loss, scale_wrt_gas=False)  # the loss is of the whole window's mean already

    @contextmanager
    def aside(self) -> Iterator[Transformer]:
        with super().aside() as inner:
            yield cast(Transformer, Called(inner)) if self.gathers else inner

    # A step.

    def train_with(self, optim: OptimConfig) -> torch.optim.Optimizer:
        return self.optimizer

    def zero_grad(self) -> None:
        """Does nothing: a step and `discard` both leave none."""

    def check(self) -> None:
        self.parts.grads()  # it asserts that each lies where it should

    def unscale(self, factor: float) -> None:
        for grad in self.parts.grads():
            grad.mul_(factor)

    def loss_and_norm(self, total: Tensor, count: int) -> tuple[float, float]:
        squares = self._squares(self.parts.grads()).sum() / (self.world if self.parts.whole else 1)
        both = self.sum(torch.stack([total.double(), squares.to(total.device)]))
        loss, square = both.tolist()
        self._norm = square**0.5 if not square > LARGEST_SQUARE else float("inf")
        return loss / count, self._norm

    def finite(self) -> bool:
        return not self.faults()

    def faults(self) -> list[Fault]:
        index = {name: i for i, name in enumerate(self.shapes)}
        counts = torch.zeros(len(index), 3, dtype=torch.int64, device=self.device)
        for piece, grad in zip(self.parts.pieces, self.parts.grads(), strict=True):
            kinds = (torch.isnan(grad), torch.isposinf(grad), torch.isneginf(grad))
            counts[index[piece.name]] += torch.stack([kind.sum() for kind in kinds]).to(self.device)
        found = (counts if self.parts.whole else self.sum(counts)).tolist()
        return [Fault(name, *found[i]) for name, i in index.items() if any(found[i])]

    def apply(self, lr: float, factor: float) -> None:
        """Makes the step; `factor` is not used: DeepSpeed clips by itself, at the same value and by the same norm."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self.model.step()
        if not self.model.was_step_applied():
            raise RunFailed(f"DeepSpeed did not make a step whose gradient norm is {self._norm}; use engine.name=fsdp2")
        if not self._compared:
            self._compare()

    def _compare(self) -> None:
        """Holds DeepSpeed's norm of the first step, by which it clips, to ours."""
        theirs = self.model.get_global_grad_norm()
        if theirs is not None and self._norm is not None and abs(float(theirs) - self._norm) > 1e-3 * self._norm:
            raise RunFailed(
                f"DeepSpeed clips by a gradient norm of {float(theirs):g}, and its gradients have {self._norm:g}; use "
                "another version of it, or engine.name=fsdp2"
            )
        self._compared = True

    def discard(self) -> None:
        self.parts.discard()

    # What may be seen.

    @contextmanager
    def whole(self, keep: bool = False) -> Iterator[Mapping[str, Tensor]]:
        pieces, values = self.parts.pieces, self.parts.values()
        sizes = [shape.numel() for shape in self.shapes.values()]
        flat = torch.zeros(sum(sizes), device=self.device)
        views = zip(torch.split(flat, sizes), self.shapes.items(), strict=True)
        tensors = {name: view.view(shape) for view, (name, shape) in views}
        parts = [tensors[p.name].view(-1).narrow(0, p.start, p.length) for p in pieces]
        for part, held in zip(parts, values, strict=True):
            part.copy_(held)
        if not self.parts.whole and self.world > 1:
            dist.all_reduce(flat.view(torch.int32))  # bit for bit: as numbers, -0 and 0 are 0
        yield tensors
        if keep:
            with torch.no_grad():
                for part, held in zip(parts, values, strict=True):
                    held.copy_(part)
                self.parts.refresh()

    def parameters(self) -> Parameters:
        places: dict[str, Span] = {}
        at = split = 0
        for piece in self.parts.pieces:
            if piece.length:
                places[piece.name] = (at, at + piece.length)
            at += piece.length
            split = at if len(self.shapes[piece.name]) >= 2 else split
        sites = [sorted(places[name] for name in names if name in places) for names in self.inner.site_parameters()]
        return Parameters(
            values=lambda: torch.cat(self.parts.values()).to(self.device),  # from where they are, with offload
            device=self.device,
            sites=[([s for s in site if s[0] < split], [s for s in site if s[0] >= split]) for site in sites],
            split=split,
            held=[sum(stop - start for start, stop in site) for site in sites],
            spans=list(places.values()),
        )

    def gradients(self) -> Tensor:
        return torch.cat(self.parts.grads()).to(self.device)

    def squares(self, groups: Sequence[Sequence[str]]) -> Tensor:
        owner = {name: i for i, group in enumerate(groups) for name in group}
        pairs = zip(self.parts.pieces, self.parts.grads(), strict=True)
        taken = [(owner[piece.name], grad) for piece, grad in pairs if piece.name in owner]
        sums = torch.zeros(len(groups), dtype=torch.float64, device=self.device)
        if not taken:
            return sums
        index = sent([i for i, _ in taken], self.device, torch.int64)
        return sums.index_add_(0, index, self._squares([grad for _, grad in taken]).to(self.device))

    @staticmethod
    def _squares(grads: list[Tensor]) -> Tensor:
        """Returns the sum of squares of each, of norms taken in fp32 as DeepSpeed takes them.

        Shape: result [len(grads)] fp64.
        """
        held = [grad for grad in grads if grad.numel()]
        if not held:
            return torch.zeros(0, dtype=torch.float64)
        norms = iter(torch._foreach_norm(held, 2, dtype=torch.float32))
        none = torch.zeros((), device=held[0].device)
        return torch.stack([next(norms) if grad.numel() else none for grad in grads]).double().square()

    def dtypes(self) -> dict[str, str]:
        def said(dtype: torch.dtype) -> str:
            return str(dtype).removeprefix("torch.")

        return {
            "params": "bfloat16, masters in float32" if self.native else said(self.parts.masters[0].dtype),
            "grads": "bfloat16" if self.native else "float32",
            "reduce": "none" if self.world == 1 else said(self.model.communication_data_type),
        }

    def facts(self) -> dict[str, Any]:
        """Returns what a record should say of the engine besides its name."""
        return {
            "zero": self.stage,
            "offload": self._offload,
            "clip": self.clip,
            "deepspeed": metadata.version("deepspeed"),
            **({"compile": "off under ZeRO-3"} if self.uncompiled else {}),
        }

    # What a run goes on from.

    def state_dict(self) -> dict[str, Any]:
        moments = {str(i): self._optimizer.state.get(master, {}) for i, master in enumerate(self.parts.masters)}
        pairs = list(zip(self.parts.pieces, self.parts.values(), strict=True))
        if not self.sharded:
            held = {piece.name: values.view(self.shapes[piece.name]) for piece, values in pairs}
            return {"model": self.inner.state_dict() | held, "optimizer": moments}
        model = {name: torch.empty(0) for name in self.shapes} | {piece.name: values for piece, values in pairs}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"model": {}, "optimizer": {}, "shapes": shapes, "own": {"model": model, "optimizer": moments}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = state["own"] if self.sharded else state
        for piece, values in zip(self.parts.pieces, self.parts.values(), strict=True):
            values.copy_(own["model"][piece.name].view(-1))
        for i, master in enumerate(self.parts.masters):
            kept = own["optimizer"].get(str(i), {})
            self._optimizer.state[master] = {key: value.to(master.device) for key, value in kept.items()}
        self.parts.refresh()

    def late_state(self) -> dict[str, Tensor]:
        scalar = torch.empty((), device="meta")
        late: dict[str, Tensor] = {}
        for i, master in enumerate(self.parts.masters):
            like = torch.empty_like(master, device="meta")
            tensors = {"step": scalar, "exp_avg": like, "exp_avg_sq": like, "momentum_buffer": like}
            late |= {f"{'own/' * self.sharded}optimizer/{i}/{name}": tensor for name, tensor in tensors.items()}
        return late

    def close(self) -> None:
        zero_start.stop(self.model)
        super().close()
