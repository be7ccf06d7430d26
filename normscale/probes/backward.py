"""The way back of one pass: the gradients of what modules take and give, and of parameters, as they are made."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normscale.probes.events import OUTSIDE, Call, Events, Who
from normscale.probes.names import kind_of, plain_name
from normscale.probes.walk import counted

REFUSED = (
    "replay: the model recomputes activations with use_reentrant=True, under which PyTorch gives a replay no gradients;"
    " set use_reentrant=False"
)


@dataclass
class _Edge:
    """A place of the graph whose gradient is watched: the input of one call, or the output of nested ones, or both."""

    input: tuple[Call, str] | None = None
    outputs: list[tuple[Call, str]] = field(default_factory=list)  # from the inside out


class Backward:
    """Watches gradients; what is not finite in one goes to `events`.

    A parameter that several modules have is handed to each call of theirs as a view, so that the gradient that each
    gives is seen apart from their sum.

    Attributes:
        refused: why there was no way back, empty where there was one.
    """

    def __init__(self, model: nn.Module, events: Events, guarded: Callable[[Any], Any]) -> None:
        self.model, self.events, self._guarded = model, events, guarded
        self.refused = ""
        self._owners = _owners(model)
        self._edges: dict[tuple[int, int], _Edge] = {}
        self._nodes: list[Any] = []  # keeps their ids from being given twice
        self._seen: dict[int, nn.Parameter] = {}
        self._handles: list[Any] = []
        self._lent: list[tuple[nn.Module, str, nn.Parameter]] = []

    # Parameters.

    def wanted(self) -> list[nn.Parameter]:
        """Returns the parameters to differentiate by: those that modules had when they were called, and the others."""
        kinds = {plain_name(name): kind_of(module) for name, module in self.model.named_modules()}
        for name, p in self.model.named_parameters():
            owner, _, local = plain_name(name).rpartition(".")
            self.watch_parameter(p, (owner, kinds.get(owner, "")), local)
        return list(self._seen.values())

    def watch_parameter(self, p: nn.Parameter, owner: Who, local: str) -> None:
        """Watches the gradient of a parameter, the sum of all uses."""
        if not _plain(p) or p.grad_fn is not None or id(p) in self._seen:
            return
        self._seen[id(p)] = p
        owners = self._owners.get(id(p), [])
        note = f"the sum over {', '.join(repr(name) for name in owners)}, which share it" if len(owners) > 1 else ""
        self._look(p, owner, local, note)

    def lend(self, call: Call) -> None:
        """Hands a call its own views of the parameters that its module shares with others."""
        for local, p in call.module._parameters.items():
            shared = p is not None and len(self._owners.get(id(p), [])) > 1
            if p is not None and shared and _plain(p) and not hasattr(p, "ds_id"):  # DeepSpeed looks its own up again
                view = p.view_as(p)
                self._look(view, call.who, local)
                self._lent.append((call.module, local, p))
                call.module._parameters[local] = view  # type: ignore[assignment]

    def give_back(self, module: nn.Module | None = None) -> None:
        """Gives a module its shared parameters back, None all modules theirs."""
        for owner, local, p in reversed(self._lent):
            if module in (None, owner):
                owner._parameters[local] = p
        self._lent = [lent for lent in self._lent if module not in (None, lent[0])]

    def _look(self, x: Tensor, owner: Who, local: str, note: str = "") -> None:
        def look(gradient: Tensor) -> None:
            self.events.tick += 1
            counts = counted(gradient)
            if counts is not None:
                self.events.add("backward", counts, owner, f"gradient of {local}", gradient.device, note)

        self._handles.append(x.register_hook(self._guarded(look)))  # type: ignore[no-untyped-call]

    # What passes between modules.

    def watch_input(self, x: Tensor, call: Call, path: str) -> None:
        """Watches the gradient of what a call takes."""
        self._edge(x).input = (call, path)

    def watch_output(self, x: Tensor, call: Call, path: str) -> None:
        """Watches the gradient of what a call gives."""
        if x.requires_grad and x.grad_fn is not None:
            self._edge(x).outputs.append((call, path))

    def _edge(self, x: Tensor) -> _Edge:
        """Returns the watched place of a tensor in the graph; its gradient is looked at once."""
        node = x.grad_fn
        key = (id(node), x.output_nr)
        if key not in self._edges:
            edge = self._edges[key] = _Edge()
            self._nodes.append(node)
            look = self._guarded(lambda gradient: self._see(edge, gradient))
            x.register_hook(look)  # type: ignore[no-untyped-call]
        return self._edges[key]

    def _see(self, edge: _Edge, gradient: Tensor) -> None:
        events = self.events
        events.tick += 1
        counts = counted(gradient)
        if counts is None:
            return
        call, path = edge.outputs[-1] if edge.outputs else edge.input or (None, "")
        assert call is not None
        events.trail.append((events.tick, call.name))
        if not edge.outputs:
            note = "in the backward of its own operations" if call.last is not None else ""
            events.add("backward", counts, call.who, f"gradient of {path}", gradient.device, note)
        elif call.outer is None:
            events.add("backward", counts, OUTSIDE, f"gradient of {path} of the model", gradient.device)
        else:
            outer, child = call.outer, call.outer.child(call.name)
            note = f"in the backward of its own operations, after {child}"
            tensor = f"gradient of {path} of {child}"
            events.add("backward", counts, outer.who, tensor, gradient.device, note, beside=call.name)

    # The pass.

    def run(self, loss: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
        """Runs the way back; returns whether the gradient of a parameter was not finite.

        Re-entrant checkpointing is found before anything runs: ranks that gather together must all leave it alone.
        """
        if any("CheckpointFunction" in type(node).__name__ for node in _graph(loss)):
            self.refused = REFUSED
            return False
        try:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True) if parameters else ()
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            self.refused = REFUSED
            return False
        names = {id(p): plain_name(name) for name, p in self.model.named_parameters()}
        kinds = {plain_name(name): kind_of(module) for name, module in self.model.named_modules()}
        for p, gradient in zip(reversed(parameters), reversed(gradients), strict=True):
            counts = None if gradient is None else counted(gradient)
            if counts is not None:
                owner, _, local = names.get(id(p), "").rpartition(".")
                who = (owner, kinds.get(owner, ""))
                self.events.add("backward", counts, who, f"gradient of {local}", p.device)
                return True
        return False

    def clear(self) -> None:
        """Takes every hook off."""
        for handle in self._handles:
            handle.remove()
        self.give_back()
        for kept in (self._handles, self._edges, self._nodes, self._seen):
            kept.clear()  # these and the graph hold each other


def _plain(p: Tensor) -> bool:
    return p.requires_grad and p.numel() > 0 and not hasattr(p, "to_local")


def _owners(model: nn.Module) -> dict[int, list[str]]:
    """Returns the names of the modules that have each parameter."""
    owners: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        for p in module._parameters.values():
            if p is not None:
                owners.setdefault(id(p), []).append(plain_name(name))
    return owners


def _graph(loss: Tensor) -> Iterator[Any]:
    """Gives every node that a backward of the loss would run."""
    waiting, met = [loss.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in met:
            met.add(node)
            yield node
            waiting += [following for following, _ in node.next_functions]
