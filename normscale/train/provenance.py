"""Where a step that was not finite went wrong: what is kept of every step for it, and how it is sought."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from normscale.data.task import MicroBatch
from normscale.models.block import Block
from normscale.ops.statistics import Buffers
from normscale.probes.agreement import agree
from normscale.probes.buffers import WindowBuffers
from normscale.probes.chance import Sources
from normscale.probes.culprit import Culprit
from normscale.probes.names import kind_of
from normscale.probes.nonfinite import NORM_OVERFLOW, RUN_UP, event_fields, fault_of, of_the_whole, tried
from normscale.probes.probe import Array
from normscale.probes.replay import Kept, replay
from normscale.probes.walk import Counts
from normscale.train.engines.engine import Engine
from normscale.train.flat import Fault


@dataclass(frozen=True)
class Found:
    """What was found of one step that was not finite.

    Attributes:
        site: index of the site it went wrong at; -1 where that is an end of the model, or unknown.
        parameter: the parameter at fault, or the first on the way back whose gradient is; None where that is unknown.
        faults: the parameters whose reduced gradients are not finite.
        culprit: the first value that was not finite, the same on every rank.
        run_up: the profiles' values at the site on the last measured steps before.
        refused: why there was no replay, empty where there was one.
        buffers: those that the step wrote to and that could not be put back.
        whole: what those steps have of the whole model.
    """

    site: int
    parameter: str | None
    faults: Sequence[Fault]
    culprit: Culprit | None
    run_up: list[dict[str, float]]
    refused: str = ""
    buffers: Sequence[str] = ()
    whole: Sequence[Mapping[str, float]] = ()

    def fields(self, loss: float) -> dict[str, Any]:
        """Returns the fields of the event."""
        return event_fields(
            fault=fault_of([f.kind for f in self.faults], otherwise=NORM_OVERFLOW if math.isfinite(loss) else "loss"),
            layer=self.site,
            parameter=self.parameter or "",
            faults=[
                {"name": f.parameter, "kind": f.kind, "nan": f.nan, "pos_inf": f.pos_inf, "neg_inf": f.neg_inf}
                for f in self.faults
            ],
            culprit=self.culprit,
            run_up=self.run_up,
            refused=self.refused,
            buffers=self.buffers,
            whole=self.whole,
        )


class Provenance:
    """Keeps what a window began with, and seeks the culprit of a bad step.

    That is its micro-batches, their random states, and the buffers that forward passes write. (Those of the models here
    are constants, of which nothing is kept.)
    """

    def __init__(self, engine: Engine, summed_loss: Callable[[MicroBatch], Tensor]) -> None:
        """Takes the engine, and what gives the summed loss of a micro-batch by the model itself."""
        self.engine, self._summed_loss = engine, summed_loss
        self._kept: list[Kept] = []
        self._buffers, self._late = WindowBuffers(engine.inner), list[str]()
        self._profiles: deque[tuple[int, dict[str, Array]]] = deque(maxlen=RUN_UP)
        self._whole: deque[dict[str, float]] = deque(maxlen=RUN_UP)
        model = engine.inner
        self._sites = {name: i for i, names in enumerate(model.site_parameters()) for name in names}
        self._sublayers = [name for name, _ in model.named_sublayers()]
        self._blocks = [i for i, block in enumerate(model.blocks) for _ in cast(Block, block)]

    def begin(self) -> None:
        """Forgets the window before."""
        self._kept.clear()
        self._buffers.begin()

    def end(self, applied: bool) -> None:
        """Ends the window: buffers stay as a step that is applied has left them, and are put back otherwise."""
        self._late = []
        if applied:
            self._buffers.applied()
        else:
            self._late = self._buffers.put_back()

    def keep(self, batch: MicroBatch) -> None:
        """Keeps a micro-batch that is about to run; the host does not wait."""
        self._kept.append(Kept.of(batch, Sources.at(self.engine.device)))

    def remember(self, step: int, profiles: Mapping[str, Array], values: Mapping[str, float]) -> None:
        """Keeps the profiles of a measured step, and its values, for the run-up to a bad one."""
        if profiles:
            self._profiles.append((step, dict(profiles)))
            self._whole.append(of_the_whole(step, values))

    def seek(self, loss: float, factor: float) -> Found:
        """Returns where the window at hand, which has ended, went wrong; every rank calls it, in the same step.

        `factor` is what the summed loss was multiplied by before its backward. The replay of this rank's micro-batches
        tells; where that is finite on every rank, the rows of a pass in evaluation mode, or the gradients, tell less.
        """
        faults, refused = tried(self.engine.faults), ""
        if math.isfinite(loss) and faults is not None and not faults:
            entries = sum(shape.numel() for shape in self.engine.shapes.values())
            culprit = agree(Culprit.norm_overflow(entries, self.engine.device, kind_of(self.engine.inner)))
        else:
            own, refused = self._replayed(factor)
            culprit, faults = agree(own), faults or []
            if culprit is None and math.isfinite(loss):
                culprit = agree(tried(lambda: self._by_gradients(faults, not refused)))
            elif culprit is None:
                culprit = agree(tried(self._by_rows))
        site = self._site_by_gradients(faults) if culprit is None else self._site_of(culprit)
        parameter = self._parameter(culprit, site, () if not math.isfinite(loss) else faults)
        if site < 0 and parameter is not None:
            site = self._sites.get(parameter, -1)
        return Found(site, parameter, faults, culprit, self._run_up(site), refused, self._late, [*self._whole])

    def site_by_rows(self) -> int:
        """Returns the site where the window at hand first shows a value that is not finite, by one cheap pass; or -1.

        Every rank calls it, and gets the same.
        """
        culprit = agree(tried(self._by_rows))
        return -1 if culprit is None else self._site_of(culprit)

    def state_dict(self) -> dict[str, Any]:
        """Returns what has to survive a restart."""
        profiles = [[step, {name: row.tolist() for name, row in rows.items()}] for step, rows in self._profiles]
        return {"profiles": profiles, "whole": [*self._whole]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes back what `state_dict` gave."""
        whole = {int(values["step"]): values for values in state.get("whole", ())}  # older checkpoints have none
        for step, rows in state["profiles"]:
            profiles = {name: torch.tensor(row, dtype=torch.float64).numpy() for name, row in rows.items()}
            self.remember(step, profiles, whole.get(step, {}))

    # How it is sought.

    def _replayed(self, factor: float) -> tuple[Culprit | None, str]:
        """Returns this rank's culprit, and why there was no replay; a replay must never end a run that would go on."""
        device = self.engine.device

        def loss_of(batch: MicroBatch) -> Tensor:
            return self._summed_loss(batch.to(device)) * factor

        try:
            return replay(self.engine.inner, self._kept, loss_of, all_of_them=self.engine.gathers), ""
        except Exception as error:
            return None, f"{type(error).__name__}: {error}"

    def _by_rows(self) -> Culprit | None:
        """Returns the first site with a non-finite branch or stream on this rank, by a pass without dropout."""
        model, device = self.engine.inner, self.engine.device
        sites, per_site = len(self._sublayers), model.rows_per_site
        found: Culprit | None = None
        with self.engine.aside() as quiet:
            for index, kept in enumerate(self._kept):
                if found is not None and not self.engine.gathers:
                    break
                batch: MicroBatch = kept.batch.to(device)
                to = Buffers(torch.zeros(sites * per_site, 3, device=device))
                quiet(batch.tokens_BT, to, **batch.beside)
                bad = to.rows[:, 2].nonzero()
                if found is None and bad.numel():
                    row = int(bad[0])
                    found = self._at_row(row // per_site, row % per_site, to.rows[row], index)
        return found

    def _at_row(self, site: int, part: int, row: Tensor, micro_batch: int) -> Culprit:
        name = self._sublayers[site] + ("" if part else ".branch")
        count, nan = int(row[2]), bool(torch.isnan(row[1]))
        return Culprit.found(
            "forward",
            Counts(count if nan else 0, 0 if nan else count, 0, 0),
            module=name,
            type=kind_of(self.engine.inner.get_submodule(name)),
            tensor="output",
            device=self.engine.device,
            micro_batch=micro_batch,
            order=site,
            reproduced=False,
            note="by the statistics of a pass without dropout, which know no sign of Inf",
        )

    def _by_gradients(self, faults: Sequence[Fault], replayed: bool) -> Culprit | None:
        """Returns the culprit where no micro-batch of any rank is known to be at fault: their sum, if all were run."""
        site = self._site_by_gradients(faults)
        parameter = self._parameter(None, site, faults)
        fault = next((fault for fault in faults if fault.parameter == parameter), None)
        if fault is None:
            return None
        summed = replayed and (self.engine.world > 1 or len(self._kept) > 1)
        compiled = any("forward" in vars(block) for block in self.engine.inner.blocks)
        module, _, local = fault.parameter.rpartition(".")
        return Culprit.found(
            "reduction" if summed and not compiled else "unknown",
            Counts(fault.nan, fault.pos_inf, fault.neg_inf, self.engine.shapes[fault.parameter].numel()),
            module=module,
            type=kind_of(self.engine.inner.get_submodule(module)),
            tensor=f"gradient of {local}",
            device=self.engine.device,
            reproduced=False,
            note="a replay of every micro-batch was finite" if replayed else "",
        )

    # What it comes to, in sites.

    def _site_of(self, culprit: Culprit) -> int:
        """Returns the site a culprit lies in; a value between two blocks lies in the one that showed it."""
        name = culprit.module if culprit.beside is None else culprit.beside
        for i, sublayer in enumerate(self._sublayers):
            if name == sublayer or name.startswith(f"{sublayer}."):
                return i
        inside = [i for i, sublayer in enumerate(self._sublayers) if name and sublayer.startswith(f"{name}.")]
        # The gradient that a block is handed is that of its last sublayer's output.
        return inside[-1] if inside and culprit.phase == "backward" and culprit.beside is not None else -1

    def _site_by_gradients(self, faults: Sequence[Fault]) -> int:
        """Returns the last site with a fault: backward starts there."""
        return max((self._sites.get(fault.parameter, -1) for fault in faults), default=-1)

    def _parameter(self, culprit: Culprit | None, site: int, faults: Sequence[Fault]) -> str | None:
        """Returns the culprit, if it is a parameter or its gradient; else the last faulty one of the site, or any."""
        if culprit is not None:
            local = culprit.tensor.removeprefix("gradient of ")
            name = f"{culprit.module}.{local}" if culprit.module else local
            if name in self.engine.shapes and (culprit.phase == "parameter" or local != culprit.tensor):
                return name
        here = [fault.parameter for fault in faults if self._sites.get(fault.parameter, -1) == site >= 0]
        inside = [fault.parameter for fault in faults if fault.parameter in self._sites]
        candidates = here or inside
        return candidates[-1] if candidates else faults[0].parameter if faults else None

    def _run_up(self, site: int) -> list[dict[str, float]]:
        if site < 0:
            return []
        places = {len(self._sublayers): site, len(set(self._blocks)): self._blocks[site]}
        return [
            {"step": step, **{name: float(row[places[len(row)]]) for name, row in rows.items() if len(row) in places}}
            for step, rows in self._profiles
        ]
