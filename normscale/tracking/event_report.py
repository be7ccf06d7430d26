"""What an event says, as a person reads it: a sentence, its facts, its tables. From the spool's record alone.

The events: `nonfinite` (with `culprit`, `run_up`, `policy` and `in_a_row` where they are known), `nan` (a stop that
left no such event), `loss_nonfinite` (losses that were not finite in steps that were applied), `stalled`, `ledger`,
`probe_off`, what became of an attempt (`record.ABOUT_AN_ATTEMPT`), and whatever else a loop notes. Fields that nobody
here knows are shown as they are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from normscale.tracking.reader import RunRecord
from normscale.tracking.text import event_line, nonfinite_points, number

PASSES = {
    "data": "in the batch, before any module",
    "parameter": "in a parameter, before the pass",
    "forward": "forward",
    "loss": "in the loss",
    "backward": "backward",
    "reduction": "when the ranks' gradients were summed",
    "norm": "in the norm of the gradient",
}
POLICIES = {
    "skip": "the step was not applied and training went on",
    "stop": "the step was not applied and the run stopped; weights and optimizer are as before it",
}
_SHOWN = ("loss", "grad_norm", "loss_scale", "fault", "layer", "parameter", "policy", "in_a_row")
_TOLD = frozenset(
    ("kind", "t", "attempt", "event", "step", "culprit", "run_up", "run_up_of", "parameters", "parameters_bad", *_SHOWN)
)
RUN_UP = "Run-up"  # the title of the table of the steps before
MINOR = ("class", "shown by", "kind", "order", "found by", "fault", "note", "micro-batch")
"""Facts that the headline says already, or that say how it was found: they come last."""
_OTHERS = 20  # other events that a report lists


@dataclass(frozen=True)
class Table:
    """A table with its title; without a head, a list."""

    title: str
    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


@dataclass(frozen=True)
class EventReport:
    """One event: `says` in a sentence, `facts` by label, then tables."""

    says: str
    facts: list[tuple[str, str]] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)

    @property
    def parts(self) -> list[Table]:
        """Returns everything as tables in the order in which people read it: what led there, where it was, the rest."""
        first = [table for table in self.tables if table.title.startswith(RUN_UP)]
        rest = [table for table in self.tables if table not in first]
        main = [fact for fact in self.facts if fact[0] not in MINOR]
        minor = [fact for fact in self.facts if fact[0] in MINOR]
        head = ("what", "value")
        return [
            *first,
            Table("What is known of it", main, head),
            *rest,
            *([Table("How it was found", minor, head)] if minor else []),
        ]


def is_bad(event: Mapping[str, Any]) -> bool:
    """Returns whether an event is of a step that was not finite, or of a run that stopped on one.

    A loss that was not finite beside finite gradients (`loss_nonfinite`) spoilt no step.
    """
    return event.get("event") in ("nonfinite", "nan")


def sentence(event: Mapping[str, Any], rows: Sequence[str] = ()) -> str:
    """Returns an event in one line, without its step; `rows` are the names of the run's sublayers or blocks."""
    kind = str(event.get("event"))
    if is_bad(event):
        culprit = _culprit(event)
        return culprit_sentence(culprit) if culprit else _older(event, rows)
    if kind == "stalled":
        reasons = _joined(event.get("reasons"))
        times = f"no step was applied {_said(event.get('in_a_row'))} times in a row"
        return f"{times}: {reasons}" if reasons else times
    if kind == "loss_nonfinite" and {"says", "count", "first_step"} <= event.keys():
        return f"{event['says']} ({_said(event['count'])} such losses, first at step {_said(event['first_step'])})"
    if isinstance(event.get("says"), str):
        return f"{kind}: {event['says']}"
    if kind == "spike":
        far = f", {_said(event['sigmas'])} deviations off" if "sigmas" in event else ""
        of = str(event.get("of")).replace("grad_norm", "the gradient norm")
        return f"spike of {of}: {_said(event.get('value'))}{far}"
    if kind == "loss_scale" and "before" in event:
        where = {"forward": ", in the forward pass", "gradient": ", in the gradient"}.get(
            str(event.get("found_in")), ""
        )
        return f"loss scale {_said(event['before'])} to {_said(event.get('after'))} ({event.get('reason')}{where})"
    if kind == "probe_off":
        return f"the probe {event.get('probe')} was switched off ({event.get('reason')}); training went on without it"
    if kind == "records_lost":
        return f"{_said(event.get('lost'))} records could not be written ({event.get('reason', 'full disk')})"
    return event_line(event)


def culprit_sentence(culprit: Mapping[str, Any]) -> str:
    """Returns e.g. `NaN in the output of blocks.3 (FeedForward), forward, micro-batch 0, rank 1: 5 of 64 values`."""
    kind, phase = str(culprit.get("kind", "not finite")), str(culprit.get("phase", "unknown"))
    module, tensor, name = (str(culprit.get(key) or "") for key in ("module", "tensor", "type"))
    if phase == "norm":
        said = f"{kind} in the norm of the gradient, whose every entry is finite"
    elif module == "(loss)":
        said = f"{kind} in the loss" + (f" ({tensor})" if tensor not in ("", "output", "loss") else "")
    else:
        owner = (module or "the model") + (f" ({name})" if name else "")
        said = f"{kind} in {_the(tensor)} of {owner}" if tensor else f"{kind} in {owner}"
        if culprit.get("beside"):  # no tensor of its own modules: its code between them made it
            said = f"{kind} from {owner}'s own operations, seen in {_the(tensor)}"
    if phase in PASSES and phase not in ("norm", "loss"):
        said += f", {PASSES[phase]}"
    if _counted(culprit.get("micro_batch")):
        said += f", micro-batch {_said(culprit['micro_batch'])}"
    if _counted(culprit.get("rank")) and culprit["rank"] != 0:
        said += f", rank {_said(culprit['rank'])}"
    bad = sum(culprit[key] for key in ("nan", "pos_inf", "neg_inf") if _counted(culprit.get(key)))
    of = culprit.get("of")
    if bad and _counted(of) and of and phase != "norm":
        said += f": {_said(bad)} of {_said(of)} values"
    return said


def row_of(event: Mapping[str, Any], rows: Sequence[str]) -> int | None:
    """Returns the row of the profiles over depth that an event is about, None where that is not known."""
    layer = event.get("layer")
    if _counted(layer):
        return int(layer) if layer < max(len(rows), 1) or not rows else None
    module = str(_culprit(event).get("module") or "")
    holders = [row for row in rows if row and (module == row or module.startswith(f"{row}."))]
    return rows.index(max(holders, key=len)) if holders else None


def report_of(record: RunRecord, event: Mapping[str, Any]) -> EventReport:
    """Returns what is known of an event."""
    rows, step = record.start.get("rows") or [], event.get("step", 0)
    said = sentence(event, rows)
    says = f"Step {_said(step)}: {event.get('event') if said == event_line(event) else said}"
    facts = _facts(event, rows) + [(key, _said(value)) for key, value in event.items() if key not in _TOLD]
    known = [(key, text) for key, text in facts if text not in ("", "-")]
    known.sort(key=lambda fact: fact[0] != "place")  # where it is over depth comes first
    report = EventReport(says, [("step", _said(step)), *known])
    culprit = _culprit(event)
    if run_up := _run_up(event):
        report.tables.append(run_up)
    if handed := culprit.get("propagators"):
        report.tables.append(Table("Handed on by, in this order", [(str(name),) for name in _list(handed)]))
    if parameters := _parameters(event):
        report.tables.append(parameters)
    bad = [(key, value) for at, key, value in nonfinite_points(record) if at == step]
    if bad:
        report.tables.append(Table("Recorded values of this step that are not finite", bad, ("quantity", "value")))
    others = [other for other in record.events if other is not event and other != event]
    if others:
        told = [(line.step, line.says) for line in lines_of(others, rows)[:_OTHERS]]
        report.tables.append(Table("Other events", told, ("step", "event")))
    return report


@dataclass(frozen=True)
class Line:
    """An event, or several in a row that are one to people: their steps, a sentence, the place of the first."""

    step: str
    says: str
    place: int
    bad: bool


def lines_of(events: Sequence[Mapping[str, Any]], rows: Sequence[str] = ()) -> list[Line]:
    """Returns a line for each event, in order; a loss scale that falls step after step is told once."""
    lines: list[Line] = []
    index = 0
    while index < len(events):
        event, end = events[index], index + 1
        while end < len(events) and _goes_on(events[end - 1], events[end]):
            end += 1
        says, name, step = sentence(event, rows), str(event.get("event")), _said(event.get("step"))
        if end - index > 2:
            last = events[end - 1]
            says = f"loss scale {_said(event.get('before'))} to {_said(last.get('after'))}"
            says += f" ({end - index} times {event.get('reason')})"
            step = f"{step}-{_said(last.get('step'))}"
        else:
            end = index + 1
        said = says if says.startswith((name, name.replace("_", " "))) else f"{name}: {says}"
        lines.append(Line(step, said, index, is_bad(event)))
        index = end
    return lines


def _goes_on(event: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Returns whether one change of the loss scale is followed by another for the same reason."""
    scales = event.get("event") == after.get("event") == "loss_scale"
    return scales and event.get("reason") == after.get("reason") and event.get("after") == after.get("before")


def _facts(event: Mapping[str, Any], rows: Sequence[str]) -> list[tuple[str, str]]:
    culprit = _culprit(event)
    found: list[tuple[str, str]] = []
    if culprit:
        counts = ", ".join(
            f"{_said(culprit.get(key))} {kind}"
            for key, kind in (("nan", "NaN"), ("pos_inf", "+Inf"), ("neg_inf", "-Inf"))
            if culprit.get(key)
        )
        phase = str(culprit.get("phase", ""))
        of = f" of {_said(culprit['of'])} values" if culprit.get("of") else ""
        number_of = culprit.get("micro_batch")
        found = [
            ("micro-batch", f"{_said(number_of)} (the first is 0)" if _counted(number_of) else ""),
            ("pass", PASSES.get(phase, phase)),
            ("module", str(culprit.get("module") or "the model itself")),
            ("class", str(culprit.get("type") or "")),
            ("tensor", str(culprit.get("tensor") or "")),
            ("shown by", str(culprit.get("beside") or "")),
            ("kind", str(culprit.get("kind") or "")),
            ("counts", f"{counts}{of}" if phase != "norm" else ""),
            ("order", f"event {_said(culprit.get('order'))} of the micro-batch" if culprit.get("order") else ""),
            ("rank", _said(culprit.get("rank"))),
            ("host", str(culprit.get("host") or "")),
            ("device", str(culprit.get("device") or "")),
            (
                "found by",
                "replaying the micro-batch: it came again"
                if culprit.get("reproduced")
                else "the recorded rows or gradients; no replay showed it again",
            ),
            ("note", str(culprit.get("note") or "")),
        ]
    if (row := row_of(event, rows)) is not None and rows:
        found.append(("place", f"{rows[row]} ({row + 1} of {len(rows)} over depth)"))
    found += [
        ("loss", _said(event.get("loss"))),
        ("gradient norm", _said(event.get("grad_norm"))),
        ("loss scale", _said(event.get("loss_scale"))),
        ("fault", str(event.get("fault") or "")),
        ("parameter", str(event.get("parameter") or "")),
        ("policy", _policy(event)),
    ]
    return found


def _policy(event: Mapping[str, Any]) -> str:
    policy = event.get("policy")
    if not policy:
        return ""
    said = f"{policy}: {POLICIES.get(str(policy), 'the step was not applied')}"
    in_a_row = event.get("in_a_row")
    return said + (f" ({_said(in_a_row)} in a row)" if _counted(in_a_row) and in_a_row > 1 else "")


def _older(event: Mapping[str, Any], rows: Sequence[str]) -> str:
    """Returns the sentence of an event without a culprit, as earlier versions wrote them."""
    fault = str(event.get("fault") or event.get("kind_of") or "")
    said = {"": "loss or gradient not finite", "loss": "the loss was not finite"}.get(fault, fault)
    row = row_of(event, rows)
    if row is not None and row < len(rows):
        said += f" in {rows[row]} ({row + 1} of {len(rows)} over depth)"
    if parameter := event.get("parameter"):
        said += f", first in the gradient of {parameter}"
    return said


def _run_up(event: Mapping[str, Any]) -> Table | None:
    """Returns the last measured steps before the event, the newest last."""
    steps = [entry for entry in _list(event.get("run_up")) if isinstance(entry, Mapping)]
    names = list(dict.fromkeys(name for entry in steps for name in entry if name != "step"))
    if not steps or not names:
        return None
    table = [[name, *(_said(entry.get(name)) for entry in steps)] for name in names]
    head = ("step", *(_said(entry.get("step")) for entry in steps))
    where = f"of {event['run_up_of']}" if event.get("run_up_of") else "there"
    return Table(f"{RUN_UP}: the last measured steps {where}, newest last", table, head)


def _parameters(event: Mapping[str, Any]) -> Table | None:
    """Returns the parameters whose gradients were not finite."""
    found = [entry for entry in _list(event.get("parameters")) if isinstance(entry, Mapping)]
    if not found:
        return None
    keys = ("name", "kind", "nan", "pos_inf", "neg_inf")
    count = event.get("parameters_bad")
    more = f" ({len(found)} of {_said(count)} shown)" if _counted(count) and count > len(found) else ""
    table = [[_said(entry.get(key)) for key in keys] for entry in found]
    head = ("parameter", "kind", "NaN", "+Inf", "-Inf")
    return Table(f"Parameters whose gradients are not finite{more}", table, head)


def _culprit(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("culprit")
    return found if isinstance(found, Mapping) else {}


def _the(tensor: str) -> str:
    """Returns a tensor as a sentence names it: the output, input[0], the gradient of weight."""
    return tensor if tensor.startswith(("input[", "output[", "output.")) else f"the {tensor}"


def _list(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else []


def _joined(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_said(item)}" for key, item in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value or "")


def _said(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number(value)
    return _joined(value) if isinstance(value, Mapping | list | tuple) else "-" if value is None else str(value)


def _counted(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0
