"""A server of the test process on a free local port, and a plain client for it.

Real sockets, since what matters is what happens on them: bodies in pieces, clients that vanish.
"""

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvicorn

from dflash_jax.serving.server import make_app
from dflash_jax.serving.service import Service

SOON = 20.0  # seconds; what is waited for comes at once unless something is broken


class Answer(NamedTuple):
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The error of a document that is nothing else."""
        assert self.headers["content-type"] == "application/json"
        (error,) = self.document.values()
        assert set(error) == {"message", "type", "param", "code"}
        assert "Traceback" not in error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The documents of a stream, which has to end as one."""
        assert self.headers["content-type"] == "text/event-stream; charset=utf-8"
        *data, done, rest = self.body.decode().split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(one.removeprefix("data: ")) for one in data]


class Site:
    """A running server; each request has a connection of its own."""

    def __init__(self, port: int):
        self.port = port

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, headers)

    def post(self, path: str, **body: Any) -> Answer:
        return self.ask("POST", path, json.dumps(body))

    def chat(self, text: str = "hi", **body: Any) -> Answer:
        messages = [{"role": "user", "content": text}]
        return self.post("/v1/chat/completions", messages=messages, **body)

    def complete(self, prompt: Any = "hi", **body: Any) -> Answer:
        return self.post("/v1/completions", prompt=prompt, **body)

    def ask(
        self, method: str, path: str, body: Any, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SOON)
        with contextlib.closing(connection):
            kind = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, body, kind | (headers or {}))
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def open(self, path: str, **body: Any) -> socket.socket:
        """Sends a request and leaves it at that: the caller reads, or vanishes."""
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=SOON)
        connection.sendall(head.encode() + content)
        return connection


@contextlib.contextmanager
def running(service: Service, **options: Any) -> Iterator[Site]:
    """Serves the service's model as `m`; `options` are those of `make_app`."""
    config = uvicorn.Config(
        make_app(service, **{"model": "m", **options}),
        log_config=None,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Site(listener.getsockname()[1])
        finally:
            server.should_exit = True
            thread.join(SOON)
            assert not thread.is_alive()
