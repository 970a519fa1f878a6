"""Whether the hub has a repository is known within seconds, also without a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from stoker.errors import RunFailed, UserError
from stoker.node_cache.hub import require_repository


class Hub(BaseHTTPRequestHandler):
    """Knows the model ``org/small``, and has too many requests for ``org/busy``."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/api/models/org/small":
            status, code, body = 200, "", b'{"id": "org/small", "siblings": []}'
        elif path == "/api/models/org/small/revision/old":
            status, code, body = 404, "RevisionNotFound", b"{}"
        elif path == "/api/models/org/busy":
            status, code, body = 429, "", b"{}"
        else:
            status, code, body = 404, "RepoNotFound", b"{}"
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", place)
    yield place
    server.shutdown()
    server.server_close()


@pytest.fixture
def no_hub(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")


def test_the_hubs_answer_decides(hub: str) -> None:
    require_repository("org/small", "model")
    require_repository("org/busy", "model")  # its client waits
    with pytest.raises(
        UserError, match=r"org/smal is neither here nor on http://127\.0\.0\.1.*; if it is private"
    ) as error:
        require_repository("org/smal", "model")
    assert error.value.exit_code == 2
    with pytest.raises(UserError, match="org/small is neither here nor on http"):
        require_repository("org/small", "dataset")
    with pytest.raises(UserError, match="the hub has no revision old of org/small"):
        require_repository("org/small", "model", revision="old")
    with pytest.raises(UserError, match="a--b/c is neither a path here nor an id of the hub"):
        require_repository("a--b/c", "model")


@pytest.mark.usefixtures("no_hub")
def test_a_hub_that_does_not_answer_is_an_error_within_seconds() -> None:
    began = time.monotonic()
    with pytest.raises(
        RunFailed, match=r"org/small is neither here nor in the hub.s cache, and http.* does not answer"
    ):
        require_repository("org/small", "model")
    assert time.monotonic() - began < 15  # the hub's client takes 35


@pytest.mark.usefixtures("no_hub")
def test_what_the_cache_has_is_not_requested(tmp_path: Path) -> None:
    for name in ("refs/main", "snapshots/0123abcd/config.json"):
        file = tmp_path / "hub/models--org--small" / name
        file.parent.mkdir(parents=True)
        file.write_text("0123abcd")
    require_repository("org/small", "model")
    require_repository("org/small", "model", revision="0123abcd")
    with pytest.raises(RunFailed):
        require_repository("org/small", "dataset")


@pytest.mark.usefixtures("no_hub")
def test_a_model_whose_weights_the_cache_lacks_is_requested(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub/models--org--small/snapshots/0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs/main").write_text("0123abcd")
    require_repository("org/small", "model")
    with pytest.raises(RunFailed, match=r"the hub's cache has no weights of org/small, and http.* does not answer"):
        require_repository("org/small", "model", weights=True)
    (snapshot / "model.safetensors").touch()
    require_repository("org/small", "model", weights=True)


def test_a_client_that_is_offline_requests_nothing(hub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set") as error:
        require_repository("org/small", "model")
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "here", "near"),
    [
        ("org/small-2b", "small-2b", "small-2b"),
        ("modles/small-2b", "models/small-2b", "models/small-2b"),
        ("org/small-2b", "small-7b", None),  # another model
    ],
)
def test_the_nearest_local_name_is_suggested(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, here: str, near: str | None
) -> None:
    (tmp_path / "work" / here).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(UserError) as error:
        require_repository(name, "model")
    (problem,) = error.value.problems
    assert problem.suggestion == (f"did you mean {near}?" if near else "if it is private, log in with `hf auth login`")
