"""The gradients of what an optimizer steps: whether they are finite, and how large they are."""

import operator
from collections.abc import Container, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor

from normscale.monitor.pieces import grouped, is_dtensor, lengths_of, local, norms_of, shared_squares


class Shown(Protocol):
    """Gradients that a measured step can look at."""

    device: torch.device
    parameters: list[Tensor]

    def present(self) -> list[Tensor]: ...

    def squares(self) -> Tensor: ...


class Gradients:
    """The gradients of some parameters, as far as this rank holds them.

    Attributes:
        parameters: those of an optimizer.
        sharded: whether some are pieces of a DTensor, so that only sums over ranks say something of the whole.
        own: those whose gradients may be others on each rank.
    """

    def __init__(self, parameters: Sequence[Tensor], averaged: Container[int] = ()) -> None:
        """Takes the parameters, and the ids of those that have the same gradient on every rank."""
        self.parameters = list(parameters)
        self.own = [p for p in self.parameters if id(p) not in averaged]
        self.sharded = any(is_dtensor(p) for p in self.parameters)
        self.device = self.parameters[0].device if self.parameters else torch.device("cpu")
        # Of one device and dtype, and whole, as their gradients are then: no need to sort 16 000 of them each step.
        kinds = {(p.device, p.dtype, p.numel() > 0) for p in self.parameters}
        self._one_kind = len(kinds) == 1 and not self.sharded and self.parameters[0].is_floating_point()
        self._scratch: dict[torch.device, tuple[Tensor, Tensor]] = {}
        self._norms: Tensor | None = None
        self._squares: Tensor | None = None

    def are(self, lists: Sequence[Sequence[Tensor]]) -> bool:
        """Returns whether these are the parameters in an optimizer's lists."""
        if sum(map(len, lists)) != len(self.parameters):
            return False
        return all(map(operator.is_, chain.from_iterable(lists), self.parameters))

    def fresh(self) -> bool:
        """Forgets what is known of them, since backward has run again; returns whether there are any."""
        self._norms = self._squares = None
        return any(p.grad is not None for p in self.parameters)

    def present(self) -> list[Tensor]:
        """Returns those parameters that have a gradient."""
        return [p for p in self.parameters if p.grad is not None]

    @torch.no_grad()
    def nonfinite(self) -> Tensor:
        """Returns 1 if some gradient of this rank is not finite, else 0: a 0-d fp32 tensor on `device`.

        The values stay what they are, to the bit: this is the check of torch's GradScaler with a scale of 1, one pass
        over all tensors in place of one over each.

        Tensors of a few entries cost what they cost by number, about a microsecond each to read `.grad` and check it:
        for 16 000 of them over 2 % of a step that spends less than 50 us on each. Nothing tried is faster: one flat
        tensor to copy them into, and norms by foreach, which are new tensors at each step, take longer.
        """
        grads = [grad for p in self.parameters if (grad := p.grad) is not None]
        try:
            flags = [self._check(self.device, grads)] if self._one_kind else []
        except NotImplementedError:  # of sparse ones
            self._one_kind, flags = False, []
        flags = flags or [self._check(device, pieces) for device, pieces in grouped(grads)]
        return torch.cat(flags).amax() if flags else torch.zeros((), dtype=torch.float32, device=self.device)

    @torch.no_grad()
    def norms(self) -> Tensor:
        """Returns the L2 norm of each gradient that is present, in fp32 at least; worked out once a step.

        Shape: result [number of parameters with a gradient].
        """
        if self._norms is None:
            self._norms = norms_of([grad for p in self.parameters if (grad := p.grad) is not None])
        return self._norms

    def squares(self) -> Tensor:
        """Returns this rank's share of the square of each gradient that is present; a sum over ranks gives the whole.

        Worked out once a step.

        Shape: result [number of parameters with a gradient] fp64.
        """
        if self._squares is None:
            grads = [grad for p in self.parameters if (grad := p.grad) is not None]
            if self.device.type == "cpu":
                norms = lengths_of(self.norms(), grads)
            else:
                norms = norms_of(grads, torch.float64)
            self._squares = shared_squares(norms, grads)
        return self._squares

    def norm(self) -> Tensor:
        """Returns the norm of gradients that are whole on this rank, a 0-d tensor: clip_grad_norm_'s, to the bit."""
        grads = [grad for p in self.parameters if (grad := p.grad) is not None]
        if self._one_kind and grads[0].dtype is torch.float32:
            total: Tensor = torch.linalg.vector_norm(self.norms(), 2)
        else:
            # Torch has no norm of a sparse one.
            dense = [local(grad) if grad.layout is torch.sparse_coo else grad for grad in grads]
            total = torch.nn.utils.get_total_norm(dense)
        return total

    @torch.no_grad()
    def scale_(self, factor: Tensor) -> None:
        """Multiplies the gradients by a 0-d tensor, in place."""
        grads = [grad for p in self.parameters if (grad := p.grad) is not None]
        # The values of a sparse one as they stand, and of one that is conjugated only in name those that are stored:
        # a copy that is coalesced, or conjugated indeed, would leave the gradient as it is.
        held = [grad._values() if grad.layout is torch.sparse_coo else grad for grad in grads]
        if not self._one_kind:  # which is real
            held = [grad.conj() if grad.is_conj() else grad for grad in held]
        for device, pieces in grouped(held):
            torch._foreach_mul_(pieces, factor.to(device))

    def faults(self, names: Mapping[int, str]) -> list[dict[str, Any]]:
        """Returns the parameters whose gradients are not finite, in their order, with counts; for an event."""
        found = []
        for p in self.present():
            assert p.grad is not None
            grad = local(p.grad)
            if bool(torch.isfinite(grad).all()):
                continue
            nan, plus, minus = (int(c.sum()) for c in (torch.isnan(grad), torch.isposinf(grad), torch.isneginf(grad)))
            entries = p.grad.numel() * (2 if p.grad.is_complex() else 1)  # of its parts, as they are counted
            counts = {"nan": nan, "pos_inf": plus, "neg_inf": minus, "of": entries}
            kind = "NaN" if nan else "+Inf" if plus else "-Inf"
            found.append({"name": names.get(id(p), "(not in the model)"), "kind": kind, **counts})
        return found

    def first_fault(self) -> tuple[Tensor, Tensor] | None:
        """Returns a parameter whose gradient is not finite on this rank, with that gradient; the host reads."""
        if not self.fresh() or not float(self.nonfinite()):
            return None
        found = ((p, p.grad) for p in self.parameters if p.grad is not None)
        return next((pair for pair in found if not bool(torch.isfinite(local(pair[1])).all())), None)

    def _check(self, device: torch.device, pieces: list[Tensor]) -> Tensor:
        """Returns whether some tensor of one device is not finite.

        Shape: result [1].
        """
        if device not in self._scratch:
            found = torch.zeros(1, dtype=torch.float32, device=device)  # whatever the loop has made the default
            self._scratch[device] = (found, torch.ones_like(found))
        found, one = self._scratch[device]
        found.zero_()
        torch._amp_foreach_non_finite_check_and_unscale_(pieces, found, one)
        return found.to(self.device, copy=True)
