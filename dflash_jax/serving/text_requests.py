"""The way of one request for text through the server, whole or as a stream.

Read and checked (`openai_api.py`), queued (`service.py`), watched while the client is there, and
answered (`openai_answers.py`). The other endpoints are in `server.py`.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

from starlette.requests import Request

from dflash_jax.errors import RequestError
from dflash_jax.serving.job import Job, Update
from dflash_jax.serving.metrics import Metrics, Timer
from dflash_jax.serving.openai_answers import Answer, event, figures
from dflash_jax.serving.openai_api import ApiError, ApiRequest, refused
from dflash_jax.serving.request import Completion
from dflash_jax.serving.service import QueueFull, Service, ServiceStopped
from dflash_jax.serving.token_texts import TokenTexts
from dflash_jax.serving.transport import EventStream, JSONAnswer, fault, while_connected

logger = logging.getLogger(__name__)

Updates = asyncio.Queue[tuple[int, Update]]


class Taken(NamedTuple):
    """A request that the engine has taken: one job for each prompt, and what they report."""

    asked: ApiRequest
    jobs: list[Job]
    updates: Updates
    request_id: str

    @property
    def num_choices(self) -> int:
        return sum(len(job.rows) for job in self.jobs)

    def cancel(self) -> None:
        for job in self.jobs:
            job.cancel()

    async def completions(self) -> list[Completion]:
        """One for each prompt, when all have ended."""
        return [await asyncio.wrap_future(job.finished) for job in self.jobs]


class TextRequests:
    """Serves requests for text with one service.

    Args:
        model: the name that it is served under.
    """

    def __init__(self, service: Service, model: str, metrics: Metrics):
        self._service, self._llm, self._model = service, service.llm, model
        self._metrics = metrics
        tokenizer = self._llm.tokenizer
        self._token_texts = None if tokenizer is None else TokenTexts(tokenizer)

    async def take(self, request: Request, asked: ApiRequest) -> Taken:
        """Queues the prompts of a request, all or none.

        Raises:
            ApiError: it cannot be served, or not now.
        """
        taken = Taken(asked, [], asyncio.Queue(), request.state.request_id)
        served = self._llm.config.max_seq_len
        try:
            # Beside the event loop: a long prompt takes a while.
            prompts = await asyncio.to_thread(lambda: [*map(self._ids, asked.prompts)])
            params = [asked.params(len(ids), served) for ids in prompts]
            for place, (ids, one) in enumerate(zip(prompts, params, strict=True)):
                listener = self._listener(taken.updates, first_choice=place * one.n)
                job = await asyncio.wrap_future(self._service.ask(ids, one, listener))
                job.finished.add_done_callback(lambda _, job=job: self._note(taken, job))
                taken.jobs.append(job)
        except BaseException as error:
            taken.cancel()
            if isinstance(error, (RequestError, QueueFull, ServiceStopped)):
                raise _as_api_error(error) from error
            raise
        return taken

    async def answer(self, request: Request, taken: Taken) -> Any:
        """The response, or the response to be for a stream.

        Raises:
            ApiError: the request did not come to its end.
        """
        answer = Answer(
            taken.asked.kind,
            taken.request_id,
            self._model,
            int(time.time()),
            choices=taken.num_choices,
            token_texts=self._token_texts,
        )
        if taken.asked.stream:
            return EventStream(self._events(request, taken, answer))
        async with while_connected(request.receive, taken.cancel):
            completions = await taken.completions()
        if problem := self._problem(taken):
            raise problem
        return JSONAnswer(answer.whole(completions, self._figures(taken, completions)))

    async def _events(
        self, request: Request, taken: Taken, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        """Chunk by chunk as the engine steps; what DFlash did in all comes with the last one."""
        left = taken.num_choices
        async with while_connected(request.receive, taken.cancel):
            while left:
                index, update = await taken.updates.get()
                dflash: dict[str, Any] = {"accepted": update.accepted}
                left -= update.piece.finish_reason is not None
                if not left:
                    dflash |= self._figures(taken, await taken.completions())
                yield event(answer.chunk(index, update.piece, dflash))
            if taken.asked.include_usage:
                yield event(answer.last(await taken.completions()))
        if problem := self._problem(taken):
            yield event(problem.document)
        yield event("[DONE]")

    def _ids(self, prompt: str | list[int] | list[dict[str, str]]) -> list[int]:
        if isinstance(prompt, str):
            if self._llm.tokenizer is None:
                raise ApiError(400, "this model has no tokenizer: give token ids", param="prompt")
            return self._llm.tokenizer.encode(prompt)
        if isinstance(prompt[0], dict):
            return self._llm.chat_ids(prompt)
        return [token for token in prompt if isinstance(token, int)]

    def _listener(self, updates: Updates, *, first_choice: int) -> Callable[[Update], None]:
        """Called in the service's thread: times are noted at once, the rest is for the loop."""
        loop, timer = asyncio.get_running_loop(), Timer(self._metrics, time.monotonic())

        def listen(update: Update) -> None:
            timer.observe(update)
            loop.call_soon_threadsafe(updates.put_nowait, (first_choice + update.choice, update))

        return listen

    def _note(self, taken: Taken, job: Job) -> None:
        self._metrics.finish(job)
        logger.info("request %s: %s after %.3f s", taken.request_id, job.outcome, job.seconds)

    def _figures(self, taken: Taken, completions: Sequence[Completion]) -> dict[str, Any]:
        return figures(
            taken.request_id,
            completions,
            max_draft_len=self._llm.config.max_draft_len,
            seed=taken.jobs[0].rows[0].params.seed,
        )

    def _problem(self, taken: Taken) -> ApiError | None:
        """Why a request did not come to its end; None where it did."""
        outcomes = {job.outcome for job in taken.jobs}
        if outcomes == {"done"}:
            return None
        for row in (row for job in taken.jobs for row in job.rows if row.error):
            logger.warning("request %s: %s", taken.request_id, row.error)
        if "failed" in outcomes:
            return fault(taken.request_id)
        if "timeout" in outcomes:
            return ApiError(
                504,
                f"the request took longer than {self._service.default_timeout:g} s: ask for fewer "
                "tokens, or start the server with a longer --request-timeout",
                kind="server_error",
                code="timeout",
            )
        return _unavailable("the request was cancelled: the server is shutting down")


def _unavailable(message: str) -> ApiError:
    return ApiError(
        503, message, kind="server_error", code="unavailable", headers={"Retry-After": "5"}
    )


def _as_api_error(error: RequestError | QueueFull | ServiceStopped) -> ApiError:
    """What a client is told of a request that was not taken."""
    match error:
        case RequestError():
            return refused(error)
        case QueueFull():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(error.retry_after)},
            )
    return _unavailable(str(error))
