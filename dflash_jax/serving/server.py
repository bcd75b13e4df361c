"""The HTTP server's application: OpenAI-compatible endpoints, health, metrics and the chat page.

Binds the parts: `openai_api.py` reads requests, `service.py` runs them, `openai_answers.py` builds
answers, `transport.py` is HTTP. Needs the extra `serve`; only `dflash-jax serve` imports it.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from dflash_jax.errors import RequestError
from dflash_jax.serving import openai_answers as answers
from dflash_jax.serving import openai_api as api
from dflash_jax.serving.metrics import Metrics, Timer
from dflash_jax.serving.openai_api import ApiError, ApiRequest
from dflash_jax.serving.openapi import openapi_document
from dflash_jax.serving.page import chat_page, content_security_policy
from dflash_jax.serving.request import Completion
from dflash_jax.serving.service import Job, QueueFull, Service, ServiceStopped, Update
from dflash_jax.serving.token_texts import TokenTexts
from dflash_jax.serving.transport import (
    EventStream,
    JSONAnswer,
    RequestIds,
    answering,
    fault,
    read_body,
    require_key,
    unrouted,
    while_connected,
)

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 20
Updates = asyncio.Queue[tuple[int, Update]]


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
        tokenizer = self._llm.tokenizer
        self._texts = None if tokenizer is None else TokenTexts(tokenizer)
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
        return await self._counted(request, api.read_completion)

    async def chat(self, request: Request) -> Any:
        return await self._counted(request, api.read_chat)

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

    async def _counted(self, request: Request, read: Callable[[dict[str, Any]], ApiRequest]) -> Any:
        """Answers a request for text; those that the engine never saw are counted here."""
        try:
            require_key(request, self._key)
            asked = read(api.read_json(await read_body(request, self._max_body_bytes)))
            self._check_model(asked.model)
            updates: Updates = asyncio.Queue()
            jobs = await self._submit(asked, updates)
        except (ApiError, RequestError, QueueFull, ServiceStopped) as error:
            refusal = _as_api_error(error)
            outcome = {429: "overloaded", 503: "unavailable"}.get(refusal.status, "refused")
            self._metrics.count(outcome)
            raise refusal from None
        return await self._answered(request, asked, jobs, updates)

    async def _answered(
        self, request: Request, asked: ApiRequest, jobs: Sequence[Job], updates: Updates
    ) -> Any:
        answer = answers.Answer(
            asked.kind,
            request.state.request_id,
            self._model,
            int(time.time()),
            choices=sum(len(job.rows) for job in jobs),
            token_texts=self._texts,
        )
        if asked.stream:
            return EventStream(self._events(request, asked, jobs, updates, answer))
        async with while_connected(request.receive, _cancelling(jobs)):
            completions = await _completions(jobs)
        if problem := self._problem(request, jobs):
            raise problem
        return JSONAnswer(answer.whole(completions, self._figures(request, jobs, completions)))

    async def _submit(self, asked: ApiRequest, updates: Updates) -> list[Job]:
        """Queues the prompts of a request, all or none."""
        jobs: list[Job] = []
        try:
            prompts = await asyncio.to_thread(self._ids, asked)
            served = self._llm.config.max_seq_len
            every = [asked.params(len(ids), served) for ids in prompts]
            for place, (ids, params) in enumerate(zip(prompts, every, strict=True)):
                asking = self._service.ask(ids, params, self._listener(updates, place * params.n))
                jobs.append(job := await asyncio.wrap_future(asking))
                job.finished.add_done_callback(lambda _, job=job: self._metrics.finish(job))
        except BaseException:
            _cancelling(jobs)()
            raise
        return jobs

    def _ids(self, asked: ApiRequest) -> list[list[int]]:
        """Token ids of the prompts; run beside the event loop, since long ones take a while."""
        tokenizer = self._llm.tokenizer
        if asked.kind == "chat":
            return [self._llm.chat_ids(messages) for messages in asked.prompts]
        if tokenizer is None and any(isinstance(prompt, str) for prompt in asked.prompts):
            raise ApiError(400, "this model has no tokenizer: give token ids", param="prompt")
        return [
            tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in asked.prompts
        ]

    def _listener(self, updates: Updates, first_choice: int) -> Callable[[Update], None]:
        """Called in the service's thread: times are noted at once, the rest is for the loop."""
        loop, timer = asyncio.get_running_loop(), Timer(self._metrics, time.monotonic())

        def listen(update: Update) -> None:
            timer.observe(update)
            loop.call_soon_threadsafe(updates.put_nowait, (first_choice + update.choice, update))

        return listen

    async def _events(
        self,
        request: Request,
        asked: ApiRequest,
        jobs: Sequence[Job],
        updates: Updates,
        answer: answers.Answer,
    ) -> AsyncGenerator[bytes, None]:
        """Chunk by chunk as the engine steps; what DFlash did in all comes with the last one."""
        open_choices = sum(len(job.rows) for job in jobs)
        async with while_connected(request.receive, _cancelling(jobs)):
            while open_choices:
                index, update = await updates.get()
                dflash: dict[str, Any] = {"accepted": update.accepted}
                open_choices -= update.piece.finish_reason is not None
                if not open_choices:
                    completions = await _completions(jobs)
                    dflash |= self._figures(request, jobs, completions)
                    yield answers.event(answer.chunk(index, update.piece, dflash))
                    if asked.include_usage:
                        yield answers.event(answer.last(completions))
                else:
                    yield answers.event(answer.chunk(index, update.piece, dflash))
        if problem := self._problem(request, jobs):
            yield answers.event(problem.document)
        yield answers.event("[DONE]")

    def _figures(
        self, request: Request, jobs: Sequence[Job], completions: Sequence[Completion]
    ) -> dict[str, Any]:
        return answers.figures(
            request.state.request_id,
            completions,
            max_draft_len=self._llm.config.max_draft_len,
            seed=jobs[0].rows[0].seed,
        )

    def _problem(self, request: Request, jobs: Sequence[Job]) -> ApiError | None:
        """Why a request did not come to its end; None where it did."""
        request_id = request.state.request_id
        outcomes = {job.outcome for job in jobs}
        for row in (row for job in jobs for row in job.rows if row.error):
            logger.warning("request %s: %s", request_id, row.error)
        if "failed" in outcomes:
            return fault(request_id)
        if "timeout" in outcomes:
            seconds = self._service.default_timeout
            return ApiError(
                504,
                f"the request took longer than {seconds:g} s: ask for fewer tokens, or start the "
                "server with a longer --request-timeout",
                kind="server_error",
                code="timeout",
            )
        return _unavailable("the server is shutting down") if "cancelled" in outcomes else None


def _cancelling(jobs: Sequence[Job]) -> Callable[[], None]:
    def cancel() -> None:
        for job in jobs:
            job.cancel()

    return cancel


async def _completions(jobs: Sequence[Job]) -> list[Completion]:
    return [await asyncio.wrap_future(job.finished) for job in jobs]


def _unavailable(message: str) -> ApiError:
    return ApiError(
        503, message, kind="server_error", code="unavailable", headers={"Retry-After": "5"}
    )


def _as_api_error(error: Exception) -> ApiError:
    """What a client is told of a request that was not taken."""
    match error:
        case ApiError():
            return error
        case QueueFull():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(error.retry_after)},
            )
        case RequestError():
            return api.refused(error)
    return _unavailable(str(error))
