"""Prepared views of a claim in the MLflow UI: which runs, columns and charts a link opens.

The format is the front end's own, read and written by version 3.17.2 and documented nowhere: keep mlflow pinned. A
front end that no longer knows it opens the plain list of runs, so that only the arrangement is lost.
"""

import base64
import json
import zlib
from typing import Any

from normscale.tracking.manifest import Manifest

TAG = "mlflow.sharedViewState."
APART = "long"  # the role whose runs are left out: their five times longer step axis would squeeze all others


def view(manifest: Manifest, *, by_cell: bool = False) -> dict[str, Any]:
    """Returns the state of a claim's view; `by_cell` groups seeds of one arm and depth to a line with a band."""
    same = {"isGenerated": False, "deleted": False}
    sections = ["1 Verdict", "2 Loss", "3 Gradients over depth", "4 Residual stream", "5 Health"]
    # A claim about signals takes steps too few and too small to learn by: its chart is what it measures, not the loss.
    verdict = ["0-end/update", "3-grad/lastout"] if manifest.family == "signals" else ["0-end/gap", "0-end/gslope"]
    charts = [
        *(_scatter("layers", metric, 0) for metric in verdict),
        _line("1-loss/val", 1, "linear"),
        _line("1-loss/train", 1, "linear"),
        _images("3-grad/heat", 2),
        _line("3-grad/first", 2, "log"),
        _line("3-grad/norm", 2, "log"),
        _images("4-resid/heat", 3),
        _line("4-resid/last", 3, "log"),
        _line("5-update/drift", 3, "log"),
        _line("2-health/nonfinite", 4, "linear"),
        _line("2-health/spike", 4, "linear"),
    ]
    return {
        "searchFilter": f"tags.normscale.claim = '{manifest.id}' and tags.normscale.profile = '{manifest.profile}'"
        f" and tags.normscale.kind = 'arm' and tags.role != '{APART}'",
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
            "params.`scheme`",
            "params.`lr`",
        ],
        "columnOrder": [],
        "columnWidths": {},
        "runsHiddenMode": "SHOWALL",
        "compareRunSections": [
            {"uuid": f"s{number}", "name": name, "display": True, "isReordered": False, **same}
            for number, name in enumerate(sections)
        ],
        "compareRunCharts": [
            {"uuid": f"c{number}", **chart, **same}
            for number, chart in enumerate(charts)
            if not (by_cell and chart["type"] == "IMAGE")  # a group has no images
        ],
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


def pack(state: dict[str, Any]) -> str:
    """Returns a view's state as the front end stores it."""
    return "deflate;" + base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()


def unpack(packed: str) -> dict[str, Any]:
    """Returns the state that `pack` packed."""
    state: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(packed.removeprefix("deflate;"))))
    return state


def _scatter(param: str, metric: str, section: int) -> dict[str, Any]:
    axes = {
        "xaxis": {"key": param, "type": "PARAM", "index": 0},
        "yaxis": {"key": metric, "type": "METRIC", "index": 0},
    }
    return {"type": "SCATTER", "metricSectionId": f"s{section}", "runsCountToCompare": 100, **axes}


def _images(key: str, section: int) -> dict[str, Any]:
    shown = {"imageKeys": [key], "step": 0, "showRunParams": False}
    return {"type": "IMAGE", "metricSectionId": f"s{section}", "runsCountToCompare": 10, **shown}


def _line(metric: str, section: int, scale: str) -> dict[str, Any]:
    return {
        "type": "LINE",
        "metricSectionId": f"s{section}",
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
