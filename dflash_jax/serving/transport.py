"""HTTP matters that no endpoint should repeat: request ids, body limits, keys, errors, events.

Starlette's pieces around `server.py`'s endpoints; what a body means is `openai_api.py`'s. Errors
leave in OpenAI's shape and never with a traceback, which goes to the log under the request's id.
"""

import asyncio
import hmac
import json
import logging
import re
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dflash_jax.serving.openai_api import ApiError

logger = logging.getLogger(__name__)

_SANE_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
Endpoint = Callable[[Request], Awaitable[Any]]


class JSONAnswer(Response):
    """A JSON document in plain ASCII: any Unicode string can be sent, a lone surrogate too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode()


class RequestIds:
    """Outermost: gives each request an id, the client's where that is a sane one, and sends it back
    as `X-Request-Id` whatever becomes of the request."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"")
        sane = _SANE_ID.fullmatch(given) is not None
        request_id = given.decode() if sane else secrets.token_hex(12)
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        await self._app(scope, receive, send_with_id)


class EventStream:
    """An answer of server-sent events."""

    def __init__(self, events: AsyncGenerator[bytes, None]):
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),  # nginx would hold the events back
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async with aclosing(self._events) as events:
            async for piece in events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def answering(endpoint: Endpoint) -> Endpoint:
    """The endpoint, with what it raises turned into an answer."""

    async def answer(request: Request) -> Any:
        try:
            return await endpoint(request)
        except ApiError as error:
            return refusal(error)
        except Exception:
            request_id = request.state.request_id
            logger.exception("request %s: a fault of the server", request_id)
            return refusal(fault(request_id))

    return answer


def fault(request_id: str) -> ApiError:
    """What a client hears of a fault that is not its own."""
    return ApiError(
        500,
        f"the server could not finish this request; its log says why under the id {request_id}",
        kind="server_error",
        code="internal_error",
    )


def refusal(error: ApiError) -> Response:
    """An error as an answer."""
    return JSONAnswer(error.document, status_code=error.status, headers=error.headers)


async def unrouted(request: Request, error: Exception) -> Response:
    """Starlette's own errors, 404 and 405, in the shape of all others."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    code = "unknown_url" if error.status_code == 404 else "method_not_allowed"
    return refusal(ApiError(error.status_code, message, code=code, headers=error.headers))


def require_key(request: Request, key: bytes | None) -> None:
    """Compares the bearer token in a time that does not depend on where it differs.

    Raises:
        ApiError: it is missing or another one.
    """
    if key is None:
        return
    given = dict(request.scope["headers"]).get(b"authorization", b"")
    scheme, _, token = given.partition(b" ")
    if scheme.lower() != b"bearer" or not hmac.compare_digest(token.strip(), key):
        raise ApiError(
            401,
            "a valid API key is needed: send the header Authorization: Bearer KEY",
            kind="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body, which must say that it is JSON: a form of a foreign web page cannot.

    Raises:
        ApiError: another content type, or more than `limit` bytes, announced or sent.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(400, f"content type {kind!r}: application/json is needed")
    too_long = ApiError(
        413, f"the body has more than {limit} bytes: send less", code="body_too_large"
    )
    announced = request.headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > limit:
        raise too_long
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_long
    return bytes(body)


@asynccontextmanager
async def while_connected(receive: Receive, cancel: Callable[[], None]) -> AsyncIterator[None]:
    """Calls `cancel` as soon as the client has gone, and when the block ends, however it does."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        cancel()
