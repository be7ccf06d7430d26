"""Prepared views of a claim in the MLflow UI: which runs, columns and charts a link opens.

The format is the front end's own, read and written by version 3.17.2 and documented nowhere: keep mlflow pinned. A
front end that no longer knows it opens the plain list of runs, so that only the arrangement is lost.
"""

import base64
import json
import zlib
from typing import Any

from normscale.tracking.manifest import Manifest
from normscale.tracking.record import QUANTITIES

TAG = "mlflow.sharedViewState."
APART = "long"  # the role whose runs are left out: their five times longer step axis would squeeze all others
ALONE = "runs"  # the key of the view of all runs that belong to no claim


def view(manifest: Manifest | None, *, by_cell: bool = False) -> dict[str, Any]:
    """Returns the state of a claim's view, or of that of all runs of no claim.

    `by_cell` groups seeds of one arm and depth to a line with a band; a group has no images.
    """
    same = {"isGenerated": False, "deleted": False}
    # A claim about signals takes steps too few and too small to learn by: its chart is what it measures, not the loss.
    signals = manifest is not None and manifest.family == "signals"
    verdict = ["0-end/update", "3-grad/lastout"] if signals else ["0-end/gap", "0-end/gslope"]
    groups = {"End": [_bar(f"0-end/{name}") for name in ("gap", "update", "gslope", "badstep")]}
    if manifest is not None:
        groups = {"Verdict": [_scatter("layers", metric) for metric in verdict]}
    charted = groups | _sections()
    names: list[str] = []
    charts: list[dict[str, Any]] = []
    for name, own in charted.items():
        kept = [chart for chart in own if not (by_cell and chart["type"] == "IMAGE")]
        charts += [{**chart, "metricSectionId": f"s{len(names)}"} for chart in kept]
        names += [f"{len(names) + 1} {name}"] * bool(kept)
    runs = "tags.normscale.kind = 'run'"
    if manifest is not None:
        runs = f"tags.normscale.claim = '{manifest.id}' and tags.normscale.profile = '{manifest.profile}'"
        runs += f" and tags.normscale.kind = 'arm' and tags.role != '{APART}'"
    return {
        "searchFilter": runs,
        "orderByKey": "tags.`mlflow.runName`",  # this order flattens the tree of parent and children
        "orderByAsc": True,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": [
            "tags.`outcome`",
            *(f"metrics.`{metric}`" for metric in verdict),
            "params.`layers`",
            "params.`scheme`" if manifest else "tags.`arm`",
            "params.`lr`",
        ],
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": "SHOWALL",
        "compareRunSections": [
            {"uuid": f"s{number}", "name": name, "display": True, "isReordered": False, **same}
            for number, name in enumerate(names)
        ],
        "compareRunCharts": [{"uuid": f"c{number}", **chart, **same} for number, chart in enumerate(charts)],
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "tag", "groupByData": "cell"}]}
        if by_cell
        else None,
        "groupsExpanded": {},
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,  # else the sections are sorted by name, among the automatic ones
        "globalLineChartConfig": {"xAxisKey": "step", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }


def _sections() -> dict[str, list[dict[str, Any]]]:
    """Returns the charts of each section, in the order of the keys' own sections; keys of no quantity are left out."""
    sections = {
        "Loss": [_line("1-loss/val"), _line("1-loss/train"), _line("1-loss/logz")],
        "Health": [
            _line("2-health/nonfinite"),
            _line("2-health/headroom"),
            _line("2-health/overflow_in", "log"),
            _line("2-health/skipped"),
            _line("2-health/spike"),
            _line("2-health/spike_grad"),
        ],
        "Gradients over depth": [
            _images("3-grad/heat"),
            _line("3-grad/first", "log"),
            _line("3-grad/norm", "log"),
            _line("3-grad/slope"),
        ],
        "Residual stream": [_images("4-resid/heat"), _line("4-resid/last", "log"), _line("4-resid/growth")],
        "Update": [_line("5-update/drift", "log"), _line("5-update/rel_p50", "log"), _line("5-update/rel_max", "log")],
        "Attention": [_line("6-attn/logit_max", "log"), _line("6-attn/entropy_min")],
        "Adam and epsilon": [
            _line("7-adam/eps_share"),
            _line("7-eps/share_max"),
            _line("7-eps/change_max", "log"),
        ],
    }
    known = {quantity.mlflow for quantity in QUANTITIES.values()}
    return {
        name: [chart for chart in charts if chart["type"] == "IMAGE" or chart["metricKey"] in known]
        for name, charts in sections.items()
    }


def pack(state: dict[str, Any]) -> str:
    """Returns a view's state as the front end stores it."""
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def unpack(packed: str) -> dict[str, Any]:
    """Returns the state that `pack` packed."""
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
    return state


def _scatter(param: str, metric: str) -> dict[str, Any]:
    axes = {
        "xaxis": {"key": param, "type": "PARAM", "index": 0},
        "yaxis": {"key": metric, "type": "METRIC", "index": 0},
    }
    return {"type": "SCATTER", "runsCountToCompare": 100, **axes}


def _bar(metric: str) -> dict[str, Any]:
    return {"type": "BAR", "metricKey": metric, "runsCountToCompare": 20}


def _images(key: str) -> dict[str, Any]:
    shown = {"imageKeys": [key], "step": 0, "showRunParams": False}
    return {"type": "IMAGE", "runsCountToCompare": 10, **shown}


def _line(metric: str, scale: str = "linear") -> dict[str, Any]:
    return {
        "type": "LINE",
        "metricKey": metric,
        "selectedMetricKeys": [metric],
        "scaleType": scale,
        "xAxisScaleType": "linear",
        "xAxisKey": "step",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "range": {},
        "lineSmoothness": 0,
        "selectedXAxisMetricKey": "",
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
        "runsCountToCompare": 100,
    }
