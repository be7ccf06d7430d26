"""What has to do with MLflow: sync, ui, server."""

import argparse

from normscale.commands.common import check_folder, uri_option


def sync(options: argparse.Namespace) -> int:
    """Replays stored records into MLflow."""
    from normscale.tracking.address import resolve
    from normscale.tracking.find import folders_of
    from normscale.tracking.mlflow_sink import sync

    if not options.words:
        check_folder(options.runs, "--runs", made=False)
    asked = folders_of(options.words, options.runs)
    with uri_option():
        uri = resolve(options.uri)
    reports = [sync(runs, uri, only) for runs, only in asked.items()]
    print("\n".join(map(str, reports)))
    return 0 if all(report.ok for report in reports) else 1


def ui(options: argparse.Namespace) -> int:
    """Serves the MLflow UI on this machine."""
    from normscale.tracking.server import ui

    with uri_option():
        return ui(options.uri, options.port, options.runs)


def server(options: argparse.Namespace) -> int:
    """Serves an MLflow store for several machines."""
    from normscale.tracking.server import server

    with uri_option("--store"):
        return server(options.store, options.host, options.port, options.name, options.artifacts)
