"""What became of the norms of a run that was folded, as lines that a person reads."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from normscale.tracking.draw import Look
from normscale.tracking.spool import restored
from normscale.tracking.text import number


def table(found: Mapping[str, Any], look: Look) -> list[str]:
    """Returns the lines of `Fold.as_json`: norms alike in all blocks on one line, then differences by precision."""
    norms = found["norms"]
    whole = sum(norm["affine_stays"] is None and norm["mean_stays"] is None for norm in norms)
    lines = [look.fit(f"{found['run']}, step {found['step']}: {whole} of {len(norms)} norms folded whole")]
    for (name, said), count in _alike(norms).items():
        lines.append(look.fit(f"{name}{f' ({count})' if count > 1 else ''}"))
        lines += [look.paint(look.fit(f"    {line}"), "faint") for line in said]
    if found["untied"]:
        lines.append(look.fit("the head, which was the embedding transposed, has weights of its own now"))
    if found["positions_learned"]:
        lines.append(look.fit("sinusoidal positions are a table now: a mean was taken out of them"))
    lines += ["", look.fit(f"folded against unfolded, on {found['sequences']} held-out sequences:")]
    heads = ("logits: largest", "mean", "its rounding", "size", "loss", "loss moves by")
    lines.append(look.paint(look.fit(_row("", heads)), "faint"))
    for each in found["differences"]:
        loss, folded = restored(each["loss"]), restored(each["loss_folded"])
        values = [restored(each[key]) for key in ("largest", "mean", "rounding", "size")]
        cells = [number(value, 2) for value in values] + [number(loss), number(folded - loss, 2)]
        lines.append(look.fit(_row(each["precision"], cells)))
    if found["int8"]:
        lines += ["", *_int8(found["int8"], look)]
    return lines


def _row(name: str, cells: Iterable[str]) -> str:
    return f"{name:<5}" + "".join(f"{cell:>15}" for cell in cells)


def _alike(norms: Iterable[Mapping[str, Any]]) -> dict[tuple[str, tuple[str, ...]], int]:
    """Returns how many norms there are of each name and fate, numbers of blocks aside."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for norm in norms:
        key = (_anywhere(norm["norm"]), tuple(_anywhere(line) for line in _said(norm)))
        found[key] = found.get(key, 0) + 1
    return found


def _said(norm: Mapping[str, Any]) -> list[str]:
    lines = []
    if norm["into"]:
        what = "statistics, gain and bias, all of it" if norm["gone"] else "gain and bias"
        lines.append(f"{what}: into {', '.join(dict.fromkeys(_anywhere(name) for name in norm['into']))}")
    if norm["affine_stays"]:
        lines.append(f"gain and bias stay: {norm['affine_stays']}")
    if norm["centred"]:
        lines.append("mean: taken out of all that writes into the stream; an RMSNorm now")
    if norm["mean_stays"]:
        lines.append(f"mean stays: {norm['mean_stays']}")
    return lines or ["nothing to fold"]


def _anywhere(text: str) -> str:
    return re.sub(r"blocks\.\d+\.sublayers\.", "blocks.*.", text).replace(".branch.", ".").replace(".own.", ".")


def _int8(found: Mapping[str, Any], look: Look) -> list[str]:
    """Returns the error of norms in int8, as a mean over those alike, and what the loss does when all of them are."""
    errors: dict[str, dict[str, list[float]]] = {}
    for model, one in found.items():
        for name, error in one["errors"].items():
            errors.setdefault(_anywhere(name), {}).setdefault(model, []).append(restored(error))
    width = max(len(name) for name in errors)
    lines = ["norms in int8 (outputs by token, gains by norm), in fp32 otherwise:"]
    lines.append(look.paint(f"{'error of':<{width}}{'unfolded':>12}{'folded':>12}", "faint"))
    rows = {name: {model: sum(x) / len(x) for model, x in each.items()} for name, each in errors.items()}
    rows["loss moves by"] = {model: restored(one["loss_int8"]) - restored(one["loss"]) for model, one in found.items()}
    for name, row in rows.items():
        lines.append(look.fit(f"{name:<{width}}" + "".join(f"{number(row[model], 2):>12}" for model in found)))
    return lines
