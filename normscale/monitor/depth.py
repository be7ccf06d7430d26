"""What a monitor measures over depth: its probes together, and what of it a model does not give."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normscale.monitor.blocks import is_deepspeed
from normscale.monitor.hooks import HookedProbe
from normscale.monitor.logits import Logits
from normscale.monitor.losses import StepProbe
from normscale.monitor.moments import AdamMoments
from normscale.monitor.norms import NormShadows
from normscale.monitor.parameters import BlockParameters
from normscale.monitor.rows import BlockRows
from normscale.monitor.turns import BlockTurns
from normscale.probes.epsilon import COLUMNS
from normscale.probes.probe import Probe

NOT_MEASURED = {
    "attn_logit_max, attn_entropy": "where a model keeps queries and keys is known of normscale's own alone",
    "removal": "of normscale's own models alone",
}
"""What the Trainer records of depth and a monitor does not, and why; it is said in the start record."""

LEFT_OUT = (
    "compiled with fullgraph=True, so that hooks are left out; they work where the forward of each block is compiled: "
    "block.forward = torch.compile(block.forward, fullgraph=True)"
)


class Depth:
    """The probes of blocks, norms, logits and Adam; without blocks there are those alone that were asked for by name.

    Attributes:
        rows, parameters: those that others ask, too.
        hooked: those that see forward passes.
        probes: all of them.
    """

    def __init__(
        self,
        inner: nn.Module,
        blocks: Mapping[str, nn.Module],
        logits: nn.Module | None,
        updates: bool,
        device: torch.device,
    ) -> None:
        """Puts hooks on; `logits` is the module that was named, None where none was."""
        self.rows = self.parameters = self.norms = self.output = self.moments = None
        self.hooked: list[HookedProbe] = []
        self.probes: list[StepProbe] = []
        if blocks:
            self.rows, turns = BlockRows(blocks, device), BlockTurns(blocks, device)
            self.norms, self.parameters = NormShadows(inner, device), BlockParameters(inner, blocks, device, updates)
            self.moments = AdamMoments(self.parameters.trained, len(blocks), device)
            self.hooked = [self.rows, turns, self.norms]
            self.probes = [self.parameters, self.moments]
        if blocks or logits is not None:
            head = inner if logits is None else logits
            self.output = Logits(head, logits is not None, head is not inner, device)
            self.hooked.append(self.output)
        self.probes = [*self.hooked, *self.probes]

    def facts(self) -> dict[str, Any]:
        """Returns what the start record says of the profiles."""
        names = list(self.norms.norms) if self.norms is not None else []
        norms = {"norms": names, "profile_rows": dict.fromkeys(COLUMNS, "norms")} if names else {}
        return {**norms, "not_measured": NOT_MEASURED}

    def place(self, device: torch.device) -> None:
        """Learns where the model is."""
        for probe in self.probes:
            probe.device = device

    def meet(self, optimizer: Any) -> None:
        """Learns of the optimizer of the step to come, or of the engine that has one."""
        if self.moments is not None and self.parameters is not None:
            self.moments.optimizer = self.parameters.optimizer = getattr(optimizer, "optimizer", optimizer)
            self.moments.hidden = is_deepspeed(optimizer)

    def detach(self) -> None:
        """Takes every hook off."""
        for probe in self.hooked:
            probe.detach()

    def lacks(self, active: Sequence[Probe]) -> Iterator[tuple[str, str]]:
        """Gives what the measured step did not show of the probes that are not switched off, and why."""
        if self.rows in active and self.rows is not None and self.rows.left_out:
            yield "stream_rms", f"blocks are {LEFT_OUT}"
        if self.norms in active and self.norms is not None and self.norms.silent:
            why = "no norm was seen: in compiled code hooks are left out" if self.norms.norms else "no norm was found"
            yield "eps_up", why
        if self.output in active and self.output is not None and self.output.silent:
            named = "the module of Monitor(logits=...) puts out no logits"
            why = named if self.output.named else "the model returns no `logits`: see Monitor(logits=...)"
            yield "logz_mean", f"the model is {LEFT_OUT}" if self.output.left_out else why
        if self.moments in active and self.moments is not None and self.moments.unseen:
            yield "adam_eps_share", self.moments.unseen
