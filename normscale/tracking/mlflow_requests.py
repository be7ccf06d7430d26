"""Requests to a tracking store that may be repeated: each first asks what is there, is tried twice, and never raises.

Values keep the time at which they were recorded, so that sending them again changes nothing.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from normscale.errors import StoreError
from normscale.tracking import mlflow_layout as layout
from normscale.tracking.address import SERVERS, sync_words
from normscale.tracking.mlflow_store import (
    Bounds,
    bounds,
    experiment,
    one_line,
    refused,
    too_slow,
    unreachable,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_TRIALS = 2
_AROUND = 80  # bytes of a request's JSON around one value's own: names of fields, number, time, step


class Gone(Exception):
    """The tracking server does not answer, or takes too long to; the message says so in one line."""


@dataclass
class SyncReport:
    """What a sync did. `failures` holds one line for each thing that is not in the store yet."""

    uri: str
    runs: int = 0
    claims: int = 0
    points: int = 0
    pictures: int = 0
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Returns whether everything is in the store."""
        return not self.failures

    def __str__(self) -> str:
        """Returns the report as one line."""
        done = f"{self.runs} runs, {self.claims} claims, {self.points} new values, {self.pictures} new pictures"
        text = f"mlflow {self.uri}: {done} in {self.seconds:.1f} s"
        return text if self.ok else f"{text}; {len(self.failures)} failed: {self.failures[0]}"


def pieces(items: Sequence[Any], count: int, size: int, texts: Callable[[Any], Sequence[str]]) -> Iterator[list[Any]]:
    """Gives the items in pieces of at most `count`, whose requests stay below `size` bytes as far as they can."""
    piece: list[Any] = []
    used = 0
    for item in items:
        own = _AROUND + sum(len(json.dumps(text)) for text in texts(item))
        if piece and (len(piece) == count or used + own > 0.9 * size):
            yield piece
            piece, used = [], 0
        piece.append(item)
        used += own
    if piece:
        yield piece


class Store:
    """One tracking store during one sync: what is there, and requests that are tried twice and never raise."""

    def __init__(self, client: "MlflowClient", uri: str, report: SyncReport):
        self.client = client
        self.uri = uri
        self.report = report
        self.bounds: Bounds = bounds()
        self._experiments: dict[str, str] = {}
        self._runs: dict[str, dict[tuple[str, str, str], Run]] = {}

    def attempt(self, what: str, action: Callable[[], object]) -> bool:
        """Runs an action, twice if need be; returns whether it went well and reports it if not.

        Raises:
            Gone: it failed because the server does not answer, or not in time.
        """
        for trial in range(_TRIALS):
            try:
                action()
                return True
            except Gone:
                raise
            except Exception as error:  # mlflow raises many kinds, and no kind may stop the other runs
                if (problem := self._closed(error)) is not None:
                    raise Gone(problem) from None
                failure, slow = f"{what}: {one_line(error)}", error if self._is_too_slow(error) else None
                time.sleep(0.2 * (trial + 1 < _TRIALS))
        if slow is not None:
            raise self._slow(slow)
        self.report.failures.append(failure)
        return False

    def guard(self, what: str, action: Callable[[], object]) -> None:
        """Runs one part of a sync once; whatever is wrong with it is reported and stops no other part.

        Raises:
            Gone: it failed because the server does not answer.
        """
        try:
            action()
        except Gone:
            raise
        except StoreError as error:
            self.report.failures.append(str(error))
        except Exception as error:  # a record that nobody foresaw must not hide the others
            if (problem := self._closed(error)) is not None:
                raise Gone(problem) from None
            if self._is_too_slow(error):
                raise self._slow(error) from None
            self.report.failures.append(f"{what}: {one_line(error)}")

    def _closed(self, error: BaseException) -> str | None:
        """Returns why no further request to the server can succeed, None where one may."""
        if not self.uri.startswith(SERVERS):
            return None
        return refused(self.uri, error) or unreachable(self.uri)

    def _is_too_slow(self, error: BaseException) -> bool:
        return self.uri.startswith(SERVERS) and too_slow(error)

    def _slow(self, error: BaseException) -> Gone:
        """Returns what ends a sync whose server is too slow: every further request would be waited for as long."""
        return Gone(
            f"tracking server {self.uri} is too slow ({one_line(error)}); `{sync_words(self.uri)}` goes on from there"
        )

    def experiment(self, family: str | None) -> str:
        """Returns the id of the experiment of a claim's family or of runs without a claim."""
        name = layout.experiment_name(family)
        if name not in self._experiments:
            self._experiments[name] = experiment(self.client, self.uri, name)
        return self._experiments[name]

    def experiment_of(self, run: str | None) -> str | None:
        """Returns the id of the experiment of an MLflow run, None where the store has no such run to show."""
        from mlflow.exceptions import MlflowException

        try:
            return str(self.client.get_run(run).info.experiment_id) if run else None
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "PERMISSION_DENIED"):
                return None
            raise  # any other is of the moment: at the next sync the run may be there

    def find(self, experiment_id: str, claim: str, run: str, began: str = "") -> "Run | None":
        """Returns the MLflow run of (claim key, run id, time of its first start), "" standing for none.

        Of two by accident the older stays.
        """
        if experiment_id not in self._runs:
            self._runs[experiment_id] = self._index(experiment_id)
        return self._runs[experiment_id].get((claim, run, began))

    def forget(self, experiment_id: str) -> None:
        """Makes the next `find` ask the store again."""
        self._runs.pop(experiment_id, None)

    def claims(self, experiment_id: str) -> list["Run"]:
        """Returns the parents of an experiment's claims."""
        self.forget(experiment_id)
        self.find(experiment_id, "", "")
        found = self._runs[experiment_id]
        return [run for (claim, of, _), run in sorted(found.items()) if claim and not of]

    def _index(self, experiment_id: str) -> "dict[tuple[str, str, str], Run]":
        found: dict[tuple[str, str, str], Run] = {}
        token: str | None = None
        while True:
            page = self.client.search_runs([experiment_id], max_results=1000, page_token=token)
            for run in page:
                tags = run.data.tags
                if "normscale.kind" not in tags:
                    continue
                key = _key(tags)
                if key in found:  # a request that timed out was carried out after all
                    older, newer = sorted((found[key], run), key=lambda one: (one.info.start_time, one.info.run_id))
                    found[key] = older
                    self.client.delete_run(newer.info.run_id)
                else:
                    found[key] = run
            token = page.token
            if not token:
                return found

    def create(self, experiment_id: str, name: str, start: int | None, tags: Mapping[str, str]) -> "Run":
        """Returns a new run, or the one that has its claim and run tags already."""
        self.forget(experiment_id)
        if (there := self.find(experiment_id, *_key(tags))) is None:
            there = self.client.create_run(experiment_id, start_time=start, tags=dict(tags), run_name=name)
            self._runs[experiment_id][_key(tags)] = there
        return there

    def send_points(self, what: str, run: str, points: Sequence[layout.Point]) -> bool:
        """Stores values in pieces as large as the installed mlflow takes; a bad piece does not lose the others."""
        from mlflow.entities import Metric

        first, well = 0, True
        for part in pieces(points, self.bounds.metrics, self.bounds.request_bytes, lambda point: (point.key,)):
            piece = [Metric(point.key, point.value, point.t, point.step) for point in part]
            name = f"{what}, values {first + 1} to {first + len(piece)}"
            first += len(piece)
            sent = self.attempt(name, partial(self.client.log_batch, run, metrics=piece, synchronous=True))
            self.report.points += len(piece) * sent
            well = well and sent
        return well

    def send_texts(self, what: str, run: "Run", tags: Mapping[str, str], params: Mapping[str, str]) -> bool:
        """Stores the tags that differ and the parameters that are missing."""
        from mlflow.entities import Param, RunTag

        cut = {key: value[: self.bounds.tag_chars] for key, value in tags.items()}
        new_tags = [RunTag(key, value) for key, value in cut.items() if run.data.tags.get(key) != value]
        new_params = [
            Param(key, value[: self.bounds.param_chars]) for key, value in params.items() if key not in run.data.params
        ]
        size, well = self.bounds.params_tags, True
        both: dict[str, list[Any]] = {"params": new_params, "tags": new_tags}
        for kind, new in both.items():
            for part in pieces(new, size, self.bounds.request_bytes, lambda one: (one.key, one.value)):
                send = partial(self.client.log_batch, run.info.run_id, synchronous=True, **{kind: part})
                well &= self.attempt(f"{what}, {kind}", send)
        return well

    def set_status(self, what: str, run: "Run", status: str, end: int | None) -> bool:
        """Sets a run's status and end time where they differ."""
        name = run.info.run_id
        if status == "RUNNING":
            if run.info.status == status:
                return True
            return self.attempt(what, lambda: self.client.update_run(name, status=status))
        if run.info.status == status and (end is None or run.info.end_time == end):
            return True
        return self.attempt(what, lambda: self.client.set_terminated(name, status, end))

    def set_experiment_tag(self, experiment_id: str, key: str, value: str) -> bool:
        """Sets a tag of an experiment, if it is not too long for one."""
        if len(value) > self.bounds.experiment_tag_chars:
            self.report.failures.append(
                f"{key}: {len(value)} characters, mlflow takes {self.bounds.experiment_tag_chars}"
            )
            return False
        return self.attempt(key, lambda: self.client.set_experiment_tag(experiment_id, key, value))


def _key(tags: Mapping[str, str]) -> tuple[str, str, str]:
    """Returns what no two runs of an experiment share: the claim, the run's id, and when it began."""
    return tags.get("normscale.key", ""), tags.get("normscale.run", ""), tags.get("normscale.began", "")
