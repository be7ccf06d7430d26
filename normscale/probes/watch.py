"""One micro-batch, forward and backward, under hooks on every module: the first event that is not finite, and why.

An event is a tensor with an entry that is not finite. On the way forward the inputs and outputs of every module are
looked at as they pass; the first event names the module that made the tensor: the module itself for an output, the
enclosing module's own code for an input. On the way back every input is passed on as a view, so that the gradient each
consumer returns is seen apart from their sum, and the same rule holds in reverse (see `backward`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normscale.probes.backward import Backward
from normscale.probes.culprit import LOSS, MOST_PROPAGATORS, Culprit
from normscale.probes.events import OUTSIDE, Call, Events
from normscale.probes.mend import Mends, mended, own_mended, own_tensors
from normscale.probes.names import kind_of, names_of
from normscale.probes.walk import Counts, counted, leaves, mapped

LossOf = Callable[[Any], Tensor]


class Unsound(NamedTuple):
    """A parameter or buffer that is not finite, of a module or of one below it, by its name there and in the model.

    `called` says that its module was called; `mendable` that a pass without its bad values can be made.
    """

    local: str
    name: str
    counts: Counts
    called: bool
    mendable: bool


class Watch:
    """What one pass over one micro-batch showed.

    Attributes:
        failed: whether the loss or a gradient of a parameter was not finite.
        events: what was seen.
        trouble: why a hook could not do its work, empty where all could.
    """

    def __init__(self, model: nn.Module, micro_batch: int, mends: Mends | None = None) -> None:
        self.model, self.mends = model, Mends() if mends is None else mends
        self.names = names_of(model)
        self._kinds = {name: kind_of(module) for module, name in self.names.items()}  # a wrapper comes first
        self.failed, self.trouble = False, ""
        self.events = Events(micro_batch)
        self.backward = Backward(model, self.events, self._guarded)
        self._stack: list[Call] = []
        self._called: set[nn.Module] = set()
        self._unsound: dict[nn.Module, list[tuple[str, Counts]]] = {}

    @property
    def refused(self) -> str:
        """Why the model's activation checkpointing allows no such pass, empty where it does."""
        return self.backward.refused

    def run(self, batch: Any, loss_of: LossOf, parameters: Sequence[nn.Parameter] | None, to_the_end: bool) -> None:
        """Runs the pass; its backward is left out where the loss tells enough, unless it is to go `to_the_end`."""
        handles = []
        before, after = self._guarded(self._before), self._guarded(self._after)
        try:
            with own_mended(self.model, self.mends.own):
                for module in self.names:
                    handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                    handles.append(module.register_forward_hook(after, always_call=True))  # where it raised, too
                batch = mapped(batch, "batch", self._mend(LOSS), copies=True)
                loss = loss_of(batch)
                self._stack.clear()
                self._see_loss(loss, batch)
                if loss.requires_grad and (to_the_end or not self.failed):
                    wanted = self.backward.wanted() if parameters is None else list(parameters)
                    self.failed |= self.backward.run(loss, wanted)
        finally:
            for handle in handles:
                handle.remove()
            self.backward.clear()
            self._stack.clear()

    def propagated(self, culprit: Culprit) -> Culprit:
        """Returns an event with the modules that handed it on."""
        later = [name for order, name in self.events.trail if order > culprit.order and name != culprit.module]
        return replace(culprit, propagators=tuple(dict.fromkeys(later))[:MOST_PROPAGATORS])

    def unsound_of(self, culprit: Culprit) -> list[Unsound]:
        """Returns the parameters and buffers that may explain an event: all that its module's own code may have read.

        They are the module's own, and the parameters of modules in it that were not called, which it must have used
        itself if anybody did.
        """
        owner = next((module for module, name in self.names.items() if name == culprit.module), None)
        if owner is None or culprit.phase not in ("forward", "backward"):
            return []
        mendable, prefix = own_tensors(self.model), f"{culprit.module}." if culprit.module else ""
        found = [(local, counts, True) for local, counts in self._unsound.get(owner, [])]
        for module, name in self.names.items():
            if module is not owner and name.startswith(prefix) and module not in self._called:
                for local, p in module.named_parameters(recurse=False):
                    if (counts := counted(p)) is not None:
                        found.append((f"{name}.{local}".removeprefix(prefix), counts, False))
        return [
            Unsound(local, prefix + local, counts, called, prefix + local in mendable)
            for local, counts, called in found
        ]

    # Forward.

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        name = self.names[module]
        args, kwargs, changed = self._each_input(args, kwargs, self._mend(name), copies=True)
        if _recomputing():
            return (args, kwargs) if changed else None
        self.events.tick += 1
        call = Call(module, (name, self._kinds.get(name, "")), self._stack[-1] if self._stack else None)
        self._stack.append(call)
        self._called.add(module)
        self._look_at_own(call)
        for path, x in [*leaves(args, "input"), *leaves(kwargs, "input")]:
            counts = counted(x)
            if counts is not None:
                self._bad_input(call, path, x, counts)
        if torch.is_grad_enabled():
            self.backward.lend(call)
            views: dict[int, Tensor] = {}

            def view(path: str, x: Tensor) -> Tensor:
                if not x.requires_grad or x.grad_fn is None:
                    return x
                if id(x) not in views:  # modules may ask whether two arguments are one
                    views[id(x)] = x.view_as(x)
                    self.backward.watch_input(views[id(x)], call, path)
                return views[id(x)]

            args, kwargs, viewed = self._each_input(args, kwargs, view, copies=False)
            changed = changed or viewed
        return (args, kwargs) if changed else None

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        name = self.names[module]
        finite = mapped(output, "output", self._mend(name), copies=True)
        changed = finite if finite is not output else None
        if _recomputing() or not any(call.module is module for call in self._stack):
            return changed
        self.events.tick += 1
        while (call := self._stack.pop()).module is not module:
            pass  # its own hook was not reached
        self.backward.give_back(module)
        if call.outer is not None and call.outer.name != name:  # a wrapper is not told from what it wraps
            call.outer.last = name
        for path, x in leaves(finite, "output"):
            counts = counted(x)
            if counts is not None:
                note = f"in its own operations, after {call.child(call.last)}" if call.last is not None else ""
                self.events.add("forward", counts, call.who, path, x.device, note, (name, path))
                self.events.trail.append((self.events.tick, name))
            self.backward.watch_output(x, call, path)
        return changed

    def _bad_input(self, call: Call, path: str, x: Tensor, counts: Counts) -> None:
        place, outer, add = (call.name, path), call.outer, self.events.add
        if outer is not None:
            before, child = outer.last, outer.child(call.name)
            between = f"between {outer.child(before)} and {child}" if before is not None else f"before {child}"
            note = f"in its own operations, {between}"
            add("forward", counts, outer.who, f"{path} of {child}", x.device, note, place, call.name)
        elif x.grad_fn is None:
            add("data", counts, call.who, path, x.device, "", place)
        else:
            add("loss", counts, OUTSIDE, f"{path} of '{call.name}'", x.device, "", place, call.name)

    def _look_at_own(self, call: Call) -> None:
        """Looks at what a module owns while it has it: engines that shard give it for its calls alone."""
        module = call.module
        for local, p in module._parameters.items():
            if p is not None:
                self.backward.watch_parameter(p, call.who, local)
        if module in self._unsound:
            return
        found = self._unsound[module] = []
        for local, own in [*module._parameters.items(), *module._buffers.items()]:
            counts = counted(own) if own is not None else None
            if counts is not None and not (local in module._buffers and counts.like_a_mask):
                found.append((local, counts))

    def _see_loss(self, loss: Tensor, batch: Any) -> None:
        self.events.tick += 1
        counts = counted(loss)
        self.failed = counts is not None
        for path, x in leaves(batch, "batch"):
            found = counted(x)
            if found is not None and not (self.failed and found.like_a_mask):
                self.events.add("data", found, OUTSIDE, path, x.device, place=(LOSS, path))
        if counts is not None:
            self.events.add("loss", counts, OUTSIDE, "loss", loss.device)
        elif self.events.places:
            self.events.doubt_all()

    # Help for the hooks.

    def _mend(self, name: str) -> Callable[[str, Tensor], Tensor]:
        """Returns what puts finite numbers into the tensors of a module that are to be mended."""
        return lambda path, x: mended(x) if (name, path) in self.mends.places else x

    def _each_input(
        self, args: Any, kwargs: Any, change: Callable[[str, Tensor], Tensor], copies: bool
    ) -> tuple[Any, Any, bool]:
        """Returns the arguments with every tensor changed, and whether one was."""
        new_args = mapped(args, "input", change, copies)
        new = {key: mapped(value, f"input.{key}", change, copies) for key, value in kwargs.items()}
        changed = new_args is not args or any(new[key] is not value for key, value in kwargs.items())
        return new_args, new if changed else kwargs, changed

    def _guarded(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a hook that never raises: an exception inside a backward pass leaves some engines in pieces."""

        def guarded(*args: Any) -> Any:
            try:
                return hook(*args)
            except Exception as error:
                self.trouble = self.trouble or f"{type(error).__name__}: {error}"
                return None

        return guarded


def _recomputing() -> bool:
    """Tells whether a forward runs inside a backward: then checkpointing runs it again, and it was seen before."""
    return torch._C._current_graph_task_id() != -1
