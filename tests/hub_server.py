"""A model hub on 127.0.0.1 with one small repository, for tests that fetch.

It speaks the part of the hub's HTTP interface that a snapshot needs: repository info of a revision,
its file tree, and the files. Every request is recorded.
"""

import hashlib
import json
import threading
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

REPO = "owner/tiny"


class Hub:
    """Revisions of `owner/tiny`: name → {path: content}; `owner/gated` needs a login."""

    def __init__(self, revisions: Mapping[str, Mapping[str, bytes]]):
        self.files = {_commit(name): dict(files) for name, files in revisions.items()}
        self.commits = {name: _commit(name) for name in revisions}
        self.requests: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    def __enter__(self) -> "Hub":
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        path = request.path.split("?")[0]
        self.requests.append(f"{request.command} {path}")
        if path.startswith("/api/models/owner/gated"):
            return _send(request, 403, b"{}", {"X-Error-Code": "GatedRepo"})
        if path.startswith(f"/api/models/{REPO}/"):
            return self._api(request, path.removeprefix(f"/api/models/{REPO}/"))
        if path.startswith(f"/{REPO}/resolve/"):
            return self._file(request, path.removeprefix(f"/{REPO}/resolve/"))
        return _send(request, 404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _api(self, request: BaseHTTPRequestHandler, path: str) -> None:
        what, _, revision = path.partition("/")
        commit = self.commits.get(revision, revision)
        if commit not in self.files:
            return _send(request, 404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        files = self.files[commit]
        if what == "tree":
            tree = [
                {
                    "type": "file",
                    "path": name,
                    "size": len(data),
                    "oid": hashlib.sha1(data).hexdigest(),
                }
                for name, data in files.items()
            ]
            return _send(request, 200, json.dumps(tree).encode(), {})
        info = {"id": REPO, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
        return _send(request, 200, json.dumps(info).encode(), {})

    def _file(self, request: BaseHTTPRequestHandler, path: str) -> None:
        revision, _, name = path.partition("/")
        commit = self.commits.get(revision, revision)
        data = self.files.get(commit, {}).get(name)
        if data is None:
            return _send(request, 404, b"", {"X-Error-Code": "EntryNotFound"})
        etag = hashlib.sha1(data).hexdigest()
        return _send(request, 200, data, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})


def _commit(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


def _send(
    request: BaseHTTPRequestHandler, status: int, body: bytes, headers: Mapping[str, str]
) -> None:
    request.send_response(status)
    for key, value in {**headers, "Content-Length": str(len(body))}.items():
        request.send_header(key, value)
    request.end_headers()
    if request.command == "GET":
        request.wfile.write(body)
