"""The HTTP server's application: which endpoints there are, and those that are not for text.

Requests for text go through `text_requests.py`; `transport.py` is what all endpoints need of HTTP.
Needs the extra `serve`; only `dflash-jax serve` imports it.
"""

import time
from collections.abc import Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dflash_jax.serving.metrics import Metrics
from dflash_jax.serving.openai_api import (
    ApiError,
    ApiRequest,
    read_chat,
    read_completion,
    read_json,
)
from dflash_jax.serving.openapi import openapi_document
from dflash_jax.serving.page import chat_page, content_security_policy
from dflash_jax.serving.service import Service
from dflash_jax.serving.text_requests import TextRequests
from dflash_jax.serving.transport import (
    JSONAnswer,
    RequestIds,
    answering,
    read_body,
    require_key,
    unrouted,
)

MAX_BODY_BYTES = 1 << 20


def make_app(
    service: Service,
    *,
    model: str,
    api_key: str | None = None,
    max_body_bytes: int = MAX_BODY_BYTES,
) -> ASGIApp:
    """The application.

    Args:
        model: the name that the target is served under.
        api_key: what clients must send; None: nothing. `/`, `/health`, `/ready` and
            `/openapi.json` are open all the same.
    """
    endpoints = Endpoints(service, model, api_key, max_body_bytes)
    routes = [
        ("/", endpoints.page, "GET"),
        ("/health", endpoints.health, "GET"),
        ("/ready", endpoints.ready, "GET"),
        ("/openapi.json", endpoints.openapi, "GET"),
        ("/metrics", endpoints.metrics, "GET"),
        ("/v1/models", endpoints.models, "GET"),
        ("/v1/models/{model:path}", endpoints.model, "GET"),
        ("/v1/completions", endpoints.completions, "POST"),
        ("/v1/chat/completions", endpoints.chat, "POST"),
    ]
    app = Starlette(
        routes=[Route(path, answering(end), methods=[method]) for path, end, method in routes],
        exception_handlers={HTTPException: unrouted},
    )
    return RequestIds(app)


class Endpoints:
    """The endpoints of one service; each takes a request and returns an answer, or raises."""

    def __init__(self, service: Service, model: str, api_key: str | None, max_body_bytes: int):
        self._service, self._llm, self._model = service, service.llm, model
        self._key = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._metrics = Metrics(service, model)
        self._texts = TextRequests(service, model, self._metrics)
        self._page = chat_page()
        self._page_headers = {
            "Content-Security-Policy": content_security_policy(self._page),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }

    async def page(self, request: Request) -> Response:
        return HTMLResponse(self._page, headers=self._page_headers)

    async def openapi(self, request: Request) -> Response:
        return JSONAnswer(openapi_document(self._max_body_bytes))

    async def health(self, request: Request) -> Response:
        """Whether the engine runs, a draining one included."""
        fine = self._service.alive and self._service.error is None
        return JSONAnswer(self._status(), status_code=200 if fine else 503)

    async def ready(self, request: Request) -> Response:
        """Whether new requests are taken."""
        return JSONAnswer(self._status(), status_code=200 if self._service.ready else 503)

    async def metrics(self, request: Request) -> Response:
        require_key(request, self._key)
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        require_key(request, self._key)
        return JSONAnswer({"object": "list", "data": [self._model_document()]})

    async def model(self, request: Request) -> Response:
        require_key(request, self._key)
        self._check_model(request.path_params["model"])
        return JSONAnswer(self._model_document())

    async def completions(self, request: Request) -> Any:
        return await self._text(request, read_completion)

    async def chat(self, request: Request) -> Any:
        return await self._text(request, read_chat)

    def _status(self) -> dict[str, Any]:
        service = self._service
        word = "ready" if service.ready else "draining" if service.alive else "stopped"
        return {
            "status": "failed" if service.error is not None else word,
            "model": self._model,
            **self._mode(),
            "compiles_in_service": self._llm.compiles_in_service,
        }

    def _mode(self) -> dict[str, Any]:
        """How this server decodes, so that nobody takes plain decoding for DFlash."""
        config = self._llm.config
        return {
            "speculation": config.speculation,
            "max_draft_len": config.max_draft_len,
            "max_seq_len": config.max_seq_len,
            "max_batch_size": config.max_batch_size,
            "unqualified": config.unqualified,
        }

    def _model_document(self) -> dict[str, Any]:
        return {
            "id": self._model,
            "object": "model",
            "created": self._created,
            "owned_by": "dflash_jax",
            "dflash": self._mode(),
        }

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            raise ApiError(
                404,
                f"there is no model {name!r} here: {self._model!r} is served",
                param="model",
                code="model_not_found",
            )

    async def _text(self, request: Request, read: Callable[[dict[str, Any]], ApiRequest]) -> Any:
        """Answers a request for text; those that the engine never took are counted here."""
        try:
            require_key(request, self._key)
            asked = read(read_json(await read_body(request, self._max_body_bytes)))
            self._check_model(asked.model)
            taken = await self._texts.take(request, asked)
        except ApiError as error:
            outcome = {429: "overloaded", 503: "unavailable"}.get(error.status, "refused")
            self._metrics.count(outcome)
            raise
        return await self._texts.answer(request, taken)
