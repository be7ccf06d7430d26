"""Where a monitored step went wrong: by a replay of its micro-batches, by the rows of the blocks, or by gradients."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from normscale.errors import ReplayRefused
from normscale.monitor.engines import Engine, Result
from normscale.monitor.gradients import Gradients
from normscale.monitor.hooks import inert_hook
from normscale.monitor.leftover import Leftover
from normscale.monitor.pieces import is_dtensor, share_of
from normscale.monitor.rows import BlockRows
from normscale.monitor.window import shallow
from normscale.probes.agreement import agree
from normscale.probes.buffers import WindowBuffers
from normscale.probes.chance import Sources
from normscale.probes.culprit import LOSS, Culprit
from normscale.probes.names import kind_of, plain_name
from normscale.probes.nonfinite import NORM_OVERFLOW, RUN_UP, event_fields, fault_of, of_the_whole, tried
from normscale.probes.probe import Array
from normscale.probes.replay import Kept, replay
from normscale.probes.walk import Counts

_FINITE = "the replay was finite"

LossFn = Callable[[Any, Any], Tensor]
"""(model, micro-batch) -> the loss that the loop calls backward on, up to a factor."""


class Provenance:
    """Keeps what a window began with, and seeks the culprit of a bad step.

    That is its micro-batches, by reference, their random states, and the buffers that forward passes write.

    Attributes:
        late: buffers that the window at hand wrote to and that could not be put back.
        unzeroed: number of a step before it that was not applied and whose gradients were not zeroed; 0: none.
    """

    def __init__(self, inner: nn.Module, loss_fn: LossFn | None, blocks: Sequence[str]) -> None:
        self.inner, self.loss_fn, self.blocks = inner, loss_fn, list(blocks)
        self.kept: list[Kept] = []
        self._device: torch.device | None = None  # of the last micro-batch
        self._sources = Sources()
        self.buffers, self.late = WindowBuffers(inner), list[str]()
        self.unzeroed = self._undone = 0
        self._left: Leftover | None = None  # a bad gradient that there is at the beginning
        self._profiles: deque[tuple[int, Mapping[str, Array]]] = deque(maxlen=RUN_UP)
        self._whole: deque[dict[str, float]] = deque(maxlen=RUN_UP)
        self._around = Surroundings()
        self._handle = inner.register_forward_pre_hook(self._around) if loss_fn is not None else None

    def begin(self) -> None:
        """Begins a window, before its first forward."""
        self.buffers.begin()
        self._look_no_longer()
        if self._undone:
            trained = [p for p in self.inner.parameters() if p.requires_grad]
            fault = Gradients(trained).first_fault()
            self._left = None if fault is None else Leftover(*fault)

    def end(self, step: int, applied: bool) -> None:
        """Ends a window: buffers stay as a step that is applied has left them, and are put back otherwise."""
        self.unzeroed = self._undone if self._left is not None and self._left.remains() else 0
        self._undone = 0 if applied else self.unzeroed or step
        self.late, self._left = [], None
        if applied:
            self.buffers.applied()
        else:
            self.late = self.buffers.put_back()

    def keep(self, batch: Any, device: torch.device) -> None:
        """Keeps a micro-batch that is about to run; the host does not wait."""
        if self.loss_fn is not None:
            self._around.now = None
            if device != self._device:  # the model was moved; to look at all of it each time would cost too much
                self._device, self._sources = device, Sources.of(self.inner)
            self.kept.append(Kept.of(shallow(batch), self._sources))

    def ran(self) -> None:
        """Says that the micro-batch has run, so that the autocast it ran under is known."""
        self._around.noted = self._around.now

    def drop(self) -> None:
        """Forgets the last micro-batch, which did not run to its end."""
        del self.kept[-1:]

    def forget(self) -> None:
        """Forgets the window."""
        self.kept.clear()

    def remember(self, step: int, profiles: Mapping[str, Array], values: Mapping[str, float | None]) -> None:
        """Keeps the numbers of a measured step, for the run-up to a bad one."""
        self._profiles.append((step, profiles))
        self._whole.append(of_the_whole(step, values))

    def detach(self) -> None:
        """Takes every hook off."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        self._look_no_longer()
        self.kept.clear()

    def _look_no_longer(self) -> None:
        if self._left is not None:
            self._left.remove()
            self._left = None

    def seek(
        self, engine: Engine, result: Result, rows: BlockRows | None, device: torch.device, spared: str = ""
    ) -> dict[str, Any]:
        """Returns the fields of the event of a bad step, the culprit among them; every rank calls it, in the same step.

        `rows` are those of the step, if it was measured. `spared` says why there is to be no replay, if so.
        """
        faults, entries = self._faults(engine, result)
        refused = ""
        if result.reason == "norm overflow":
            culprit = agree(Culprit.norm_overflow(entries, device, kind_of(self.inner)))
        else:
            found, refused = (None, spared) if spared else self._replayed(engine, result)
            several = engine.world > 1 or len(self.kept) > 1
            why = refused or (_FINITE if several else f"{_FINITE}, and nothing was summed")
            if self.unzeroed:
                why = f"the gradients of step {self.unzeroed} were not zeroed; {why}"
            culprit = agree(found or self._by_less(rows, result, faults, device, why))
        layer = -1 if culprit is None else self._layer(culprit)
        run_up = [
            {"step": step, **{name: float(row[layer]) for name, row in profiles.items()}}
            for step, profiles in self._profiles
            if layer >= 0
        ]
        return event_fields(
            fault=_fault(result, faults),
            layer=layer,
            parameter=_parameter(culprit) or self._faulty(result, layer, faults),
            faults=faults,
            culprit=culprit,
            run_up=run_up,
            refused=refused,
            buffers=self.late,
            whole=self._whole,
        )

    def _replayed(self, engine: Engine, result: Result) -> tuple[Culprit | None, str]:
        """Returns this rank's culprit, and why there was no replay; a replay must never end a run that would go on."""
        if self.loss_fn is None:
            return None, "no loss_fn was given, so nothing was replayed"
        if not result.intact:
            return None, "the step was applied, so that it cannot be replayed"
        loss_fn, scale = self.loss_fn, 1.0 if result.scale is None else result.scale

        def loss_of(batch: Any) -> Tensor:
            with self._around.again():
                return loss_fn(self.inner, shallow(batch)) * scale

        try:
            # Ranks may meet in the model or in its loss, as where batch norms sum over them: none may leave them there.
            return replay(self.inner, self.kept, loss_of, all_of_them=engine.gathers or engine.world > 1), ""
        except ReplayRefused as error:
            return None, str(error)
        except Exception as error:
            return None, f"the replay failed ({type(error).__name__}: {error})"

    def _by_less(
        self,
        rows: BlockRows | None,
        result: Result,
        faults: Sequence[Mapping[str, Any]],
        device: torch.device,
        why: str,
    ) -> Culprit | None:
        """Returns what there is without a replay."""
        return tried(lambda: self._by_rows(rows, device, why) or self._by_rest(result, faults, device, why))

    def _by_rows(self, rows: BlockRows | None, device: torch.device, why: str) -> Culprit | None:
        found = rows.found() if rows is not None else None
        if found is None:
            return None
        kinds = [found.nonfinite if found.kind == kind else 0 for kind in ("NaN", "+Inf", "-Inf")]
        return Culprit.found(
            "backward" if found.backward else "forward",
            Counts(kinds[0], kinds[1], kinds[2], found.numel),
            module=found.block,
            type=self._type(found.block),
            tensor="gradient of output" if found.backward else "output",
            device=device,
            micro_batch=found.micro_batch,
            order=found.order,
            reproduced=False,
            note=f"by rows of the blocks: in this one, or between it and the one {_side(found.backward)}; {why}",
        )

    def _by_rest(
        self, result: Result, faults: Sequence[Mapping[str, Any]], device: torch.device, why: str
    ) -> Culprit | None:
        """Returns what the loss or the reduced gradients alone tell."""
        if not math.isfinite(result.loss):
            counts = Counts(
                int(math.isnan(result.loss)), int(result.loss == math.inf), int(result.loss == -math.inf), 1
            )
            return Culprit.found(
                "loss",
                counts,
                module=LOSS,
                type="",
                tensor="loss",
                device=device,
                reproduced=False,
                note=f"the loss alone tells; {why}",
            )
        if not faults:
            return None
        last = faults[-1]  # backward begins at the end of the model
        module, _, tensor = last["name"].rpartition(".")
        replayed = why == _FINITE
        return Culprit.found(
            "reduction" if replayed else "backward",
            Counts(last["nan"], last["pos_inf"], last["neg_inf"], last["of"]),
            module=module,
            type=self._type(module),
            tensor=f"gradient of {tensor}",
            device=device,
            order=len(self.blocks),
            reproduced=False,
            note=f"by the gradients, of all ranks and micro-batches together; {why}",
        )

    def _faults(self, engine: Engine, result: Result) -> tuple[list[dict[str, Any]], int]:
        """Returns the parameters whose gradients are not finite, on any rank, and the entries of all gradients."""
        if result.gradients is None:
            return [], 0
        names = {id(p): plain_name(name) for name, p in self.inner.named_parameters()}
        faults = tried(lambda: result.gradients.faults(names) if result.gradients is not None else []) or []
        parameters = result.gradients.parameters
        if not engine.alike(result.gradients):
            gathered: list[list[dict[str, Any]]] = [[] for _ in range(engine.world)]
            dist.all_gather_object(gathered, faults)
            pieces = {names.get(id(p), ""): p for p in parameters if is_dtensor(p)}
            faults = _joined(gathered, {name: round(1 / share_of(p)) for name, p in pieces.items()})
        order = {name: i for i, name in enumerate(names.values())}  # that of an optimizer may be by weight decay
        return sorted(faults, key=lambda fault: order.get(fault["name"], -1)), sum(p.numel() for p in parameters)

    def _layer(self, culprit: Culprit) -> int:
        """Returns the row of the block that a culprit lies in, -1 where it is outside of them."""
        name = culprit.module if culprit.beside is None else culprit.beside
        return next((i for i, block in enumerate(self.blocks) if f"{name}.".startswith(f"{block}.") or not block), -1)

    def _faulty(self, result: Result, layer: int, faults: Sequence[Mapping[str, Any]]) -> str:
        """Returns the first parameter on the way back whose gradient is bad, of the culprit's block if it can be."""
        if result.reason == "non-finite loss" or not faults:
            return ""
        names = [str(fault["name"]) for fault in faults]
        here = [name for name in names if layer >= 0 and name.startswith(f"{self.blocks[layer]}.")]
        return (here or names)[-1]

    def _type(self, name: str) -> str:
        modules = {plain_name(own): module for own, module in self.inner.named_modules()}
        return kind_of(modules[name]) if name in modules else ""


class Surroundings:
    """A hook on the model that sees the autocast it runs under, so that a replay can have the same.

    It is made part of a model that is compiled whole, of which it does not end the graph: what it reads is constant in
    one, and all that it does is to write `now`.

    Attributes:
        now: device type, dtype and whether casts are cached, of the last forward; None without autocast.
        noted: the same of the loop's own last forward: evaluations and passes of probes come between.
    """

    def __init__(self) -> None:
        self.now: tuple[str, torch.dtype, bool] | None = None
        self.noted: tuple[str, torch.dtype, bool] | None = None
        self._kinds = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)

    def __call__(self, module: nn.Module, args: Any) -> None:
        now = None
        for kind in self._kinds:
            if now is None and torch.is_autocast_enabled(kind):
                now = kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
        self.now = now

    def again(self) -> AbstractContextManager[Any]:
        """Returns the context that the loop's own last forward had."""
        if self.noted is None:
            return nullcontext()
        kind, dtype, cache = self.noted
        return torch.autocast(kind, dtype=dtype, cache_enabled=cache)

    def __deepcopy__(self, memo: Any) -> Any:
        return inert_hook()

    def __reduce__(self) -> Any:
        return inert_hook, ()


def _joined(gathered: Sequence[Sequence[dict[str, Any]]], copies: Mapping[str, int]) -> list[dict[str, Any]]:
    """Returns the faults of all ranks as those of whole gradients: `copies` tells how many ranks hold each piece.

    A gradient that is in no pieces is whole on every rank: the first that found a fault in it tells.
    """
    keys, joined = ("nan", "pos_inf", "neg_inf"), dict[str, dict[str, Any]]()
    for fault in (fault for own in gathered for fault in own):
        known = joined.setdefault(fault["name"], fault)
        if known is not fault and fault["name"] in copies:
            known.update({key: known[key] + fault[key] for key in keys})
    for name, known in joined.items():
        known.update({key: known[key] // copies.get(name, 1) for key in keys})
        known["kind"] = Counts(known["nan"], known["pos_inf"], known["neg_inf"], known["of"]).kind
    return list(joined.values())


def _side(backward: bool) -> str:
    return "after" if backward else "before"


def _parameter(culprit: Culprit | None) -> str:
    """Returns the name of the parameter that is the culprit, or whose gradient is; else ""."""
    if culprit is None or not (culprit.phase == "parameter" or culprit.tensor.startswith("gradient of ")):
        return ""
    name = culprit.tensor.removeprefix("gradient of ")
    if name.startswith(("output", "input")):
        return ""
    return f"{culprit.module}.{name}" if culprit.module else name


def _fault(result: Result, faults: Sequence[Mapping[str, Any]]) -> str:
    if result.reason == "norm overflow":
        return NORM_OVERFLOW
    kinds = [str(fault["kind"]) for fault in faults]
    return fault_of(kinds, otherwise="loss" if result.reason == "non-finite loss" else "gradient")
