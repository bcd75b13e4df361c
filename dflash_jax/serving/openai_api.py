"""From the JSON of an OpenAI-compatible request to prompts and `SamplingParams`; pure.

Nothing is ignored: a field acts, or the request is refused by the field's name. The fields stand in
`openai_fields.py`, answers are built in `openai_answers.py`, HTTP is `server.py`'s.
"""

import json
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, NoReturn

from dflash_jax.errors import RequestError
from dflash_jax.serving import openai_fields as fields
from dflash_jax.serving.json_schema import Mismatch, Schema, check
from dflash_jax.serving.request import SamplingParams

Kind = Literal["chat", "completion"]


class ApiError(Exception):
    """What is sent to the client in place of an answer.

    Attributes:
        status: of HTTP.
        kind: OpenAI's `type`.
        param: the field that is at fault.
        code: a word for programs.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.headers = dict(headers or {})

    @property
    def document(self) -> dict[str, Any]:
        """OpenAI's shape of an error."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


class ApiRequest(NamedTuple):
    """A checked request.

    Attributes:
        prompts: texts and lists of ids (completion), or one conversation (chat).
        options: arguments of `SamplingParams`, without max_tokens.
        max_tokens: None = what the served length leaves.
        model: as the client named it; None = it did not.
    """

    kind: Kind
    prompts: list[Any]
    options: dict[str, Any]
    max_tokens: int | None
    model: str | None
    stream: bool
    include_usage: bool

    def params(self, prompt_tokens: int, served_length: int) -> SamplingParams:
        """What one prompt is decoded with.

        Raises:
            ApiError: the prompt leaves no room for an answer, or the options contradict.
        """
        room = served_length - prompt_tokens
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {prompt_tokens} tokens, which leaves no room for an answer in the "
                f"served length of {served_length}: shorten it, or start the server with a larger "
                "max_seq_len",
                param="messages" if self.kind == "chat" else "prompt",
                code="context_length_exceeded",
            )
        most = room if self.max_tokens is None else self.max_tokens
        params = SamplingParams(max_tokens=most, **self.options)
        try:
            params.check()
        except RequestError as error:
            raise refused(error) from error
        return params


def refused(error: RequestError) -> ApiError:
    """The error as the client's; a message that begins with a field's name names it."""
    name = str(error).partition("=")[0]
    param = name if name in SamplingParams.__dataclass_fields__ else None
    return ApiError(400, str(error), param=param)


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body holds.

    Raises:
        ApiError: it is not JSON, or not an object.
    """
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from error
    if not isinstance(value, dict):
        raise ApiError(
            400, f"the body must be a JSON object, not {type(value).__name__}", code="invalid_json"
        )
    return value


def read_chat(body: Mapping[str, Any]) -> ApiRequest:
    """A request to /v1/chat/completions.

    Raises:
        ApiError: naming the field.
    """
    given = _checked(body, fields.CHAT)
    limits = [given.get("max_completion_tokens"), given.get("max_tokens")]
    if None not in limits and limits[0] != limits[1]:
        raise ApiError(
            400,
            f"max_completion_tokens={limits[0]} and max_tokens={limits[1]} are the same limit: "
            "give one of them",
            param="max_tokens",
        )
    logprobs = _chat_logprobs(given)
    limit = limits[1] if limits[0] is None else limits[0]
    messages = [_message(one) for one in given["messages"]]
    return _request("chat", [messages], given, limit, logprobs)


def read_completion(body: Mapping[str, Any]) -> ApiRequest:
    """A request to /v1/completions.

    Raises:
        ApiError: naming the field.
    """
    given = _checked(body, fields.COMPLETION)
    prompt = given["prompt"]
    many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    limit = given.get("max_tokens", fields.DEFAULT_COMPLETION_TOKENS)
    return _request("completion", prompt if many else [prompt], given, limit, given.get("logprobs"))


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def _checked(body: Mapping[str, Any], schema: Schema) -> dict[str, Any]:
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in list(given.items()):
        if name in schema["properties"]:
            continue
        if reason := fields.refusal(name, value):
            raise ApiError(400, f"{name}: {reason}", param=name, code="unsupported_parameter")
        if name in fields.REFUSED:
            del given[name]
    try:
        return check(given, schema)
    except Mismatch as error:
        raise ApiError(400, str(error), param=error.path or None) from error


def _request(
    kind: Kind, prompts: list[Any], given: dict[str, Any], limit: int | None, logprobs: int | None
) -> ApiRequest:
    stream = given.get("stream", False)
    if "stream_options" in given and not stream:
        raise ApiError(
            400, "stream_options only goes with stream=true: set it", param="stream_options"
        )
    options = {name: given[name] for name in fields.SAMPLING if name in given}
    options.setdefault("temperature", fields.SAMPLING["temperature"]["default"])
    options["logprobs"] = logprobs
    if "logit_bias" in options:  # JSON has no numbers for names
        options["logit_bias"] = {int(name): bias for name, bias in options["logit_bias"].items()}
    return ApiRequest(
        kind,
        prompts,
        options,
        limit,
        given.get("model"),
        stream,
        given.get("stream_options", {}).get("include_usage", False),
    )


def _chat_logprobs(given: Mapping[str, Any]) -> int | None:
    if given.get("logprobs"):
        return given.get("top_logprobs", 0)
    if given.get("top_logprobs"):
        raise ApiError(400, "top_logprobs needs logprobs=true: set it", param="top_logprobs")
    return None


def _message(message: Mapping[str, Any]) -> dict[str, str]:
    content = message["content"]
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    role = "system" if message["role"] == "developer" else message["role"]
    return {"role": role, "content": content}
