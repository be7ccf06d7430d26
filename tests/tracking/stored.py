"""What a test's store holds: its runs, their values and their files."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

import mlflow


def client_of(uri):
    return mlflow.MlflowClient(uri)


def everything(uri):
    """Returns all runs of a store, by name."""
    client = client_of(uri)
    experiments = [experiment.experiment_id for experiment in client.search_experiments()]
    return {run.info.run_name: run for run in client.search_runs(experiments, max_results=1000)}


def history(uri, run):
    client = client_of(uri)
    return {
        key: [
            (metric.step, metric.value, metric.timestamp) for metric in client.get_metric_history(run.info.run_id, key)
        ]
        for key in run.data.metrics
    }


def folder_of(run):
    """Returns where the files of a run lie."""
    return Path(unquote(urlsplit(run.info.artifact_uri).path))


def files(run):
    folder = folder_of(run)
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
