"""Pulls from a hub that the test serves on loopback: the real protocol, without the network."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshd.errors import LocalError, ModelNotFound, ModelRefused
from meshd.models.pull import pull
from meshd.models.store import ModelStore
from tests.models.checkpoints import CONFIG, llama_plans, plan, write_model

pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
BIG = 3 << 20


class Hub(http.server.ThreadingHTTPServer):
    """``org/name`` from a folder; ``cut`` ends each answer's body after that many bytes."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.cut: int | None = None
        self.damage = False
        self.ranges = True
        self.reasons = True
        self.storage = False
        self.tokens: list[tuple[str, str | None]] = []
        self.asked: list[tuple[str, str, str | None]] = []

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def fetched(self, name: str) -> list[str | None]:
        """The Range headers with which ``name`` was asked for."""
        return [ranges for method, path, ranges in self.asked if method == "GET" and path.endswith("/" + name)]


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        ranges = self.headers.get("Range")
        self.server.asked.append((self.command, self.path, ranges))
        if not self.server.ranges:
            ranges = None
        parts = self.path.split("?")[0].split("/")
        known = parts[1] == "storage" or (parts[1:4] == ["org", "name", "resolve"] and parts[4] in ("main", COMMIT))
        path = self.server.folder / parts[-1]
        if not known or not path.is_file():
            self.send_response(404)
            if not known or self.server.reasons:
                self.send_header("X-Error-Code", "EntryNotFound" if known else "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        data = path.read_bytes()
        self.server.tokens.append((parts[1], self.headers.get("Authorization")))
        if self.server.storage and parts[1] == "org" and path.suffix == ".safetensors":
            self._redirect(data, path.name)
            return
        start = int(ranges.removeprefix("bytes=").partition("-")[0]) if ranges else 0
        self.send_response(206 if ranges else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        if ranges:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if not body:
            return
        rest = data[start:]
        if self.server.damage and path.suffix == ".safetensors":
            rest = rest[:-1] + bytes([rest[-1] ^ 1])
        if self.server.cut is not None and len(rest) > self.server.cut:
            self.wfile.write(rest[: self.server.cut])
            self.close_connection = True
        else:
            self.wfile.write(rest)

    def _redirect(self, data: bytes, name: str) -> None:
        """As the hub does for large files: facts in headers, the bytes on another host."""
        self.send_response(302)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("X-Linked-ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Linked-Size", str(len(data)))
        self.send_header("Location", f"http://localhost:{self.server.server_address[1]}/storage/{name}")
        self.send_header("Content-Length", "0")
        self.end_headers()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    plans = [*llama_plans(), plan("model.layers.0.big.weight", (BIG // 2,))]
    server = Hub(write_model(tmp_path / "repository", plans))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore.under(tmp_path / "state")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull gives up at the first break, so that the next one has something to go on from."""
    monkeypatch.setattr("meshd.models.hub.ATTEMPTS", 1)
    monkeypatch.setattr("meshd.models.hub.PAUSE_S", 0.0)


def test_a_model_comes_from_the_hub(hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub.folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    (hub.folder / "modeling.py").write_text("raise SystemExit")
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint + "/")
    seen: list[tuple[str, int, int]] = []
    model = pull("org/name", store, lambda *report: seen.append(report))
    assert model.name == "org/name"
    assert (model.path / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert not hub.fetched("pytorch_model.bin") + hub.fetched("modeling.py")
    size = (hub.folder / "model.safetensors").stat().st_size
    assert [report for report in seen if report[0] == "download"][-1] == ("download", size, size)
    assert not any((store.root / "partial").iterdir())
    asked = len(hub.asked)
    assert pull("org/name", store) == model  # it is there and intact: the hub is not asked again
    assert len(hub.asked) == asked


def test_a_broken_download_goes_on_where_it_broke(hub: Hub, store: ModelStore) -> None:
    hub.cut = 1 << 20
    for _ in range(2):
        with pytest.raises(LocalError, match="pull again to go on"):
            pull("org/name", store, endpoint=hub.endpoint)
    assert store.models() == []
    hub.cut = None
    model = pull("org/name", ModelStore(store.root), endpoint=hub.endpoint)
    whole = (hub.folder / "model.safetensors").read_bytes()
    assert (model.path / "model.safetensors").read_bytes() == whole
    assert hub.fetched("model.safetensors") == [None, f"bytes={1 << 20}-", f"bytes={2 << 20}-"]
    assert len(hub.fetched("tokenizer.json")) == 1  # what was whole is not fetched twice


def test_a_pull_survives_breaks_as_long_as_bytes_come(
    hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshd.models.hub.ATTEMPTS", 2)
    hub.cut = 1 << 20
    model = pull("org/name", store, endpoint=hub.endpoint)
    assert (model.path / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert len(hub.fetched("model.safetensors")) == 4


def test_a_server_without_ranges_begins_again(hub: Hub, store: ModelStore) -> None:
    hub.cut = 1 << 20
    with pytest.raises(LocalError):
        pull("org/name", store, endpoint=hub.endpoint)
    hub.cut, hub.ranges = None, False
    model = pull("org/name", store, endpoint=hub.endpoint)
    assert (model.path / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()


def test_large_files_come_from_a_storage_host_that_is_not_told_the_token(
    hub: Hub, store: ModelStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_word")
    hub.storage, hub.cut = True, 2 << 20
    monkeypatch.setattr("meshd.models.hub.ATTEMPTS", 2)
    model = pull("org/name", store, endpoint=hub.endpoint)
    assert (model.path / "model.safetensors").read_bytes() == (hub.folder / "model.safetensors").read_bytes()
    assert {token for place, token in hub.tokens if place == "org"} == {"Bearer hf_word"}
    assert [token for place, token in hub.tokens if place == "storage"] == [None, None]
    assert f"bytes={2 << 20}-" in hub.fetched("model.safetensors")


def test_a_mirror_that_gives_no_reasons_will_do(hub: Hub, store: ModelStore) -> None:
    hub.reasons = False
    assert pull("org/name", store, endpoint=hub.endpoint).name == "org/name"


def test_bytes_of_another_version_are_not_continued(hub: Hub, store: ModelStore) -> None:
    hub.cut = 1 << 20
    with pytest.raises(LocalError):
        pull("org/name", store, endpoint=hub.endpoint)
    hub.cut = None
    plans = [*llama_plans(), plan("model.layers.0.big.weight", (BIG // 2,), data=b"\1\2" * (BIG // 2))]
    write_again = hub.folder / "model.safetensors"
    write_again.unlink()
    write_model(hub.folder, plans)
    model = pull("org/name", store, endpoint=hub.endpoint)
    assert (model.path / "model.safetensors").read_bytes() == write_again.read_bytes()
    assert hub.fetched("model.safetensors")[-1] is None


def test_damaged_bytes_are_thrown_away(hub: Hub, store: ModelStore) -> None:
    hub.damage = True
    with pytest.raises(LocalError, match="damaged"):
        pull("org/name", store, endpoint=hub.endpoint)
    hub.damage = False
    assert pull("org/name", store, endpoint=hub.endpoint).name == "org/name"


def test_several_files_come_by_the_index(hub: Hub, store: ModelStore) -> None:
    (hub.folder / "model.safetensors").unlink()
    write_model(hub.folder, files=3)
    model = pull("org/name", store, endpoint=hub.endpoint)
    assert len(list(model.path.glob("model-*.safetensors"))) == 3
    store.remove("org/name")
    (hub.folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelRefused, match="names model-00002-of-00003"):
        pull("org/name", store, endpoint=hub.endpoint)


def test_an_index_cannot_name_files_elsewhere(hub: Hub, store: ModelStore) -> None:
    (hub.folder / "model.safetensors").unlink()
    places = {"weight_map": {"a": "../../../etc/x.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(places))
    with pytest.raises(ModelRefused, match="not a safetensors file of this folder"):
        pull("org/name", store, endpoint=hub.endpoint)


def test_a_model_with_code_is_refused_before_its_weights_come(hub: Hub, store: ModelStore) -> None:
    (hub.folder / "config.json").write_text(json.dumps({**CONFIG, "auto_map": {"AutoConfig": "x.X"}}))
    with pytest.raises(ModelRefused, match="auto_map"):
        pull("org/name", store, endpoint=hub.endpoint)
    assert not hub.fetched("model.safetensors")


def test_errors_name_the_model_and_the_hub(hub: Hub, store: ModelStore) -> None:
    with pytest.raises(ModelNotFound, match="org/other"):
        pull("org/other", store, endpoint=hub.endpoint)
    (hub.folder / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="only safetensors"):
        pull("org/name", store, endpoint=hub.endpoint)
