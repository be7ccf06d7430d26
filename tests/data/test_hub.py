"""Hub names: from the cache without network, or one clear line within seconds. Loopback addresses only."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import datasets
import pytest
from datasets.naming import camelcase_to_snakecase
from datasets.packaged_modules.json.json import Json

from normscale.config.schema import DataConfig
from normscale.data import hub
from normscale.data.corpus import load_corpus
from normscale.errors import DataError

NOBODY = "http://127.0.0.1:9"  # nothing listens


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and a hub that nobody answers for."""
    for name in (
        *hub.OFFLINE_FLAGS,
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", NOBODY)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf" / "datasets")
    return tmp_path / "hf" / "datasets"


def fill(cache, repo: str, config: str = "default", lines: int = 200, version: str = "abc"):
    """Puts a data set into the cache, as loading it from the hub does."""
    file = cache.parent / "source.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join(json.dumps({"id": i, "text": f"row {i} of {config} {version}"}) + "\n" for i in range(lines))
    )
    owner, name = repo.split("/")
    folder = cache / f"{owner}___{camelcase_to_snakecase(name)}" / config / "0.0.0" / version
    builder = Json(
        cache_dir=str(cache.parent / f"built-{config}-{version}"),
        dataset_name=name,
        config_name=config,
        data_files={"train": [str(file)]},
    )
    builder.download_and_prepare(output_dir=str(folder))
    return str(folder)


def complaint(source: str, **options) -> str:
    start = time.monotonic()
    with pytest.raises(DataError) as e:
        load_corpus(DataConfig(source=source, **options))
    assert time.monotonic() - start < 10
    assert "\n" not in str(e.value)
    return str(e.value)


def test_cached_data_needs_no_network(cache, monkeypatch):
    fill(cache, "someone/CamelName")
    monkeypatch.setattr(hub, "unreachable", lambda endpoint: pytest.fail("the network was asked"))
    corpus = load_corpus(DataConfig(source="hub:someone/CamelName"))
    lines = (corpus.train.tobytes() + corpus.held_out.tobytes()).splitlines()
    assert sorted(lines) == sorted(f"row {i} of default abc".encode() for i in range(200))
    assert len(corpus.held_out.tobytes().splitlines()) == 20
    assert corpus.facts()["hub_config"] == "default"


def test_flag_set_after_import_is_heeded(tmp_path, cache):
    fill(cache, "someone/name")
    code = """
import os, socket, sys, time
import datasets, huggingface_hub
assert not datasets.config.HF_HUB_OFFLINE
from normscale.config.schema import DataConfig
from normscale.data.corpus import load_corpus
from normscale.errors import DataError
def refuse(*args, **kwargs): sys.exit("the network was asked")
socket.socket.connect = socket.getaddrinfo = refuse
os.environ["HF_HUB_OFFLINE"] = "1"
print(load_corpus(DataConfig(source="hub:someone/name")).train.size > 0)
start = time.monotonic()
try:
    load_corpus(DataConfig(source="hub:someone/other"))
except DataError as e:
    print(e)
print(time.monotonic() - start < 1)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=dict(os.environ), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found, error, quick = done.stdout.splitlines()
    assert (found, quick) == ("True", "True")
    assert "'hub:someone/other'" in error
    assert "unset HF_HUB_OFFLINE" in error


@pytest.mark.parametrize("flag", hub.OFFLINE_FLAGS)
def test_offline_and_missing_names_the_flag(flag, cache, monkeypatch):
    monkeypatch.setenv(flag, "1")
    monkeypatch.setattr(hub, "unreachable", lambda endpoint: pytest.fail("the network was asked"))
    said = complaint("hub:someone/name")
    assert f"{flag} is set; unset {flag}" in said
    assert str(cache) in said
    monkeypatch.setenv(flag, "0")
    assert hub.offline_flag() is None


def test_no_network_and_missing_names_the_endpoint():
    said = complaint("hub:someone/name")
    assert "'hub:someone/name'" in said
    assert NOBODY in said
    assert "Connection refused" in said
    assert "HF_ENDPOINT" in said


def test_endpoint_that_accepts_and_says_nothing(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{mute.getsockname()[1]}")
        monkeypatch.setattr(hub, "PROBE_S", 0.3)
        assert "timed out" in complaint("hub:someone/name")


def test_name_server_that_does_not_answer(monkeypatch):
    done = threading.Event()
    monkeypatch.setattr(hub, "PROBE_TOTAL_S", 0.3)

    def look_up(*args, **kwargs):
        done.wait(20)
        raise OSError("too late")

    monkeypatch.setattr("urllib.request.urlopen", look_up)
    try:
        assert "no answer within 0.3 s" in complaint("hub:someone/name")
    finally:
        done.set()


def test_name_the_hub_does_not_have(tmp_path):
    class Empty(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_POST = do_GET

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Empty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        code = (
            "from normscale.config.schema import DataConfig; from normscale.data.corpus import load_corpus\n"
            "try: load_corpus(DataConfig(source='hub:someone/name'))\n"
            "except Exception as e: print(type(e).__name__, e)"
        )
        env = {**os.environ, "HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}"}
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        assert time.monotonic() - start < 10
        server.shutdown()
    assert done.stdout.startswith("DataError data.source: 'hub:someone/name' cannot be had from http://127.0.0.1")
    assert len(done.stdout.splitlines()) == 1


def test_newest_copy_of_the_asked_configuration(cache):
    for age, (config, version) in enumerate([("fr", "a"), ("en", "new"), ("en", "old")]):
        folder = fill(cache, "someone/name", config, version=version)
        os.utime(folder, (10**9 - age, 10**9 - age))
    train = load_corpus(DataConfig(source="hub:someone/name:en")).train.tobytes()
    assert train.startswith(b"row 0 of en new\n")
    assert "cached in several configurations (en, fr); name one" in complaint("hub:someone/name")
    assert "is not in the cache" in complaint("hub:someone/name:de")


def test_broken_off_download_is_no_copy(cache):
    folder = fill(cache, "someone/name")
    os.rename(folder, folder + ".incomplete")
    assert "is not in the cache" in complaint("hub:someone/name")


def test_damaged_copy_names_the_folder(cache):
    folder = fill(cache, "someone/name")
    for name in os.listdir(folder):
        if name.endswith(".arrow"):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(b"nonsense")
    said = complaint("hub:someone/name")
    assert folder in said
    assert "remove that folder" in said


def test_field_that_is_not_there_or_not_text(cache):
    fill(cache, "someone/name")
    assert "did you mean 'text'? (it has: id, text)" in complaint("hub:someone/name", field="txt")
    assert "type int at hub:someone/name row 0" in complaint("hub:someone/name", field="id")


@pytest.mark.parametrize(
    "source", ["hub:", "hub:name", "hub:a/b/c", "hub:a/b:", "hub:../x/y", "hub:a/b:c/d", "hub:a b/c"]
)
def test_malformed_names(source):
    assert "write hub:owner/name[:config]" in complaint(source)


def test_reports_nothing_to_the_hub():
    assert not datasets.config.HF_UPDATE_DOWNLOAD_COUNTS


def test_of_a_data_set_that_is_a_script_the_copy_that_the_hub_made_is_taken(monkeypatch):
    asked = []

    def load(repo, config, split, revision=None):
        asked.append((repo, config, split, revision))
        if repo == "someone/other":
            raise RuntimeError("no such builder")
        if revision is None:
            raise RuntimeError("Dataset scripts are no longer supported, but found name.py")
        return "the copy"

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(hub, "unreachable", lambda endpoint: None)
    assert hub._table("hub:someone/name:en", "train") == "the copy"
    assert asked == [("someone/name", "en", "train", None), ("someone/name", "en", "train", "refs/convert/parquet")]
    with pytest.raises(DataError, match="no such builder"):
        hub._table("hub:someone/other", "train")
    assert len(asked) == 3
