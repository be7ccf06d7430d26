"""One process: parameters and gradients in one flat buffer each, and an optimizer over them."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from normscale.config.precision import PrecisionConfig
from normscale.config.schema import OptimConfig
from normscale.models.stack import Transformer
from normscale.probes.probe import Parameters
from normscale.train.engines.engine import Engine
from normscale.train.flat import Fault, FlatParameters
from normscale.train.optim import build_optimizer


class PlainEngine(Engine):
    """One process, and the base of all engines that leave the step to us: they keep it in flat buffers."""

    name = "plain"

    def __init__(self, model: Transformer, precision: PrecisionConfig, device: torch.device) -> None:
        super().__init__(model, precision, device)
        self.flat = self._laid_out()

    def _laid_out(self) -> FlatParameters:
        return FlatParameters(self.inner)

    # A step.

    def train_with(self, optim: OptimConfig) -> torch.optim.Optimizer:
        self.optimizer = build_optimizer(self.flat, optim)
        return self.optimizer

    def zero_grad(self) -> None:
        self.flat.zero_grad()

    def check(self) -> None:
        self.flat.check()  # an engine that took the gradients elsewhere would train nothing

    def unscale(self, factor: float) -> None:
        self.flat.grads.mul_(factor)

    def loss_and_norm(self, total: Tensor, count: int) -> tuple[float, float]:
        loss, norm = torch.stack([(self.sum(total) / count).double(), self.flat.grad_norm()]).tolist()
        return loss, norm

    def finite(self) -> bool:
        return self.flat.finite()

    def faults(self) -> list[Fault]:
        return self.flat.faults()

    def apply(self, lr: float, factor: float) -> None:
        if factor < 1.0:
            self.flat.grads.mul_(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def discard(self) -> None:
        """Does nothing: the next window begins with gradients of zero."""

    # What may be seen.

    @contextmanager
    def whole(self, keep: bool = False) -> Iterator[Mapping[str, Tensor]]:
        yield {name: p.detach() for name, p in self.inner.named_parameters() if name in self.shapes}

    def parameters(self) -> Parameters:
        flat, sites = self.flat, self.inner.site_parameters()
        return Parameters(
            values=lambda: flat.values,
            device=flat.values.device,
            sites=[flat.places(names) for names in sites],
            split=flat.split,
            held=[sum(stop - start for start, stop in (flat.spans[name] for name in names)) for names in sites],
            spans=list(flat.spans.values()),
        )

    def gradients(self) -> Tensor:
        return self.flat.grads

    def squares(self, groups: Sequence[Sequence[str]]) -> Tensor:
        return self.flat.squares(groups)

    # What a run goes on from.

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.inner.state_dict() | self.flat.named(), "optimizer": self._moments()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, values in self.inner.state_dict().items():
            values.copy_(state["model"][name])
        self._take_moments(state["optimizer"])

    def late_state(self) -> dict[str, Tensor]:
        scalar = torch.empty((), device="meta")
        late: dict[str, Tensor] = {}
        for i, leaf in enumerate(self.leaves()):
            like = torch.empty_like(leaf, device="meta")
            tensors = {"step": scalar, "exp_avg": like, "exp_avg_sq": like, "momentum_buffer": like}
            late |= {f"optimizer/{i}/{name}": tensor for name, tensor in tensors.items()}
        return late

    def leaves(self) -> list[Tensor]:
        """Returns the tensors that the optimizer has for parameters."""
        return [leaf for group in self.optimizer.param_groups for leaf in group["params"]]

    def _moments(self) -> dict[str, Any]:
        return {str(i): self.optimizer.state.get(leaf, {}) for i, leaf in enumerate(self.leaves())}

    def _take_moments(self, kept: Mapping[str, Any]) -> None:
        for i, leaf in enumerate(self.leaves()):
            self.optimizer.state[leaf] = {key: value.to(leaf.device) for key, value in kept[str(i)].items()}
