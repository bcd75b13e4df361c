"""The fields that the OpenAI-compatible endpoints take, as JSON schemas: the one list of them.

`openai_api.py` checks requests with it and `openapi.py` publishes it. What is not in it is refused
by name; `REFUSED` says why where a user of other servers would expect the field to work.
"""

from typing import Any

from dflash_jax.arena.sizes import MAX_BIAS, MAX_ENDS
from dflash_jax.serving.option_rules import MAX_CHOICES, MAX_LOGPROBS, MAX_SEED, MAX_STOPS

_MAX_INT = 2**31 - 1  # of the device's integers
_MAX_ID = _MAX_INT - 1  # the one above stands for no id there
MAX_PROMPTS = 128
DEFAULT_COMPLETION_TOKENS = 16

EXTENSION = "An extension of this server. "


def _field(kind: str, description: str, default: Any = None, **bounds: Any) -> dict[str, Any]:
    said = {} if default is None else {"default": default}
    return {"type": kind, **bounds, "description": description, **said}


_TEXT = {"type": "string"}
_STOP = {"type": "string", "minLength": 1}
_TOKEN_IDS = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": _MAX_ID},
    "minItems": 1,
}

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": _field(
        "number",
        "0 is greedy. OpenAI's default, not that of `SamplingParams`.",
        1.0,
        minimum=0,
        exclusiveMaximum=1e4,
    ),
    "top_p": _field(
        "number",
        "Only the likeliest tokens that together reach this.",
        1.0,
        exclusiveMinimum=0,
        maximum=1,
    ),
    "n": _field("integer", "How many answers.", 1, minimum=1, maximum=MAX_CHOICES),
    "stop": {
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOPS}],
        "description": "Texts that end an answer; they are not part of it.",
    },
    "seed": _field(
        "integer",
        "Fixes the draws, whoever is served beside it. Without it one is drawn.",
        minimum=0,
        maximum=MAX_SEED,
    ),
    "presence_penalty": _field(
        "number", "Taken off tokens that are in the answer.", 0.0, minimum=-2, maximum=2
    ),
    "frequency_penalty": _field(
        "number", "The same, times how often they are.", 0.0, minimum=-2, maximum=2
    ),
    "logit_bias": {
        "type": "object",
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        "maxProperties": MAX_BIAS,
        "description": "Added to the logits of these token ids.",
    },
    "top_k": _field(
        "integer",
        EXTENSION + "Only the k likeliest tokens; 0 or -1 is all.",
        0,
        minimum=-1,
        maximum=_MAX_INT,
    ),
    "min_p": _field(
        "number",
        EXTENSION + "Only tokens at least this share as likely as the best.",
        0.0,
        minimum=0,
        maximum=1,
    ),
    "min_tokens": _field(
        "integer", EXTENSION + "No end before so many tokens.", 0, minimum=0, maximum=_MAX_INT
    ),
    "repetition_penalty": _field(
        "number",
        EXTENSION + "Divides positive logits of tokens seen so far, multiplies negative ones.",
        1.0,
        minimum=1e-4,
        maximum=1e4,
    ),
    "ignore_eos": _field("boolean", EXTENSION + "Goes on past the model's end tokens.", False),
    "stop_token_ids": {
        **_TOKEN_IDS,
        "minItems": 0,
        "maxItems": MAX_ENDS,
        "description": EXTENSION + "More ids that end an answer, the model's included at most "
        f"{MAX_ENDS}.",
    },
    "speculate": _field(
        "boolean",
        EXTENSION + "false decodes this request without drafts; the text is the same.",
        True,
    ),
}

_COMMON: dict[str, dict[str, Any]] = {
    "model": _field("string", "As /v1/models lists it; without it, that one."),
    "stream": _field("boolean", "Server-sent events, one chunk a round, then `[DONE]`.", False),
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}},
        "description": "Only with stream: a last chunk with the usage.",
    },
}

_PART = {
    "type": "object",
    "properties": {"type": {"type": "string", "enum": ["text"]}, "text": _TEXT},
    "required": ["type", "text"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "enum": ["system", "developer", "user", "assistant"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}]},
    },
    "required": ["role", "content"],
}

CHAT = {
    "type": "object",
    "properties": {
        "messages": {
            "type": "array",
            "items": _MESSAGE,
            "minItems": 1,
            "description": "The conversation, laid out by the model's chat template; developer is "
            "system, text parts are joined by line ends.",
        },
        **_COMMON,
        **SAMPLING,
        "max_completion_tokens": _field(
            "integer",
            "The longest answer. Without it: what the served length leaves.",
            minimum=1,
            maximum=_MAX_INT,
        ),
        "max_tokens": _field("integer", "The older name of it.", minimum=1, maximum=_MAX_INT),
        "logprobs": _field("boolean", "Log-probabilities of the tokens.", False),
        "top_logprobs": _field(
            "integer",
            "And of so many of the likeliest at each place; needs logprobs.",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    },
    "required": ["messages"],
}

COMPLETION = {
    "type": "object",
    "properties": {
        "prompt": {
            "anyOf": [
                _TEXT,
                {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
            ],
            "description": "Text or token ids to go on from, one or many.",
        },
        **_COMMON,
        **SAMPLING,
        "max_tokens": _field(
            "integer",
            "The longest answer.",
            DEFAULT_COMPLETION_TOKENS,
            minimum=1,
            maximum=_MAX_INT,
        ),
        "logprobs": _field(
            "integer",
            "Log-probabilities of the tokens and of so many of the likeliest at each place.",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    },
    "required": ["prompt"],
}

_CONSTRAINED = (
    "output that has to follow a grammar or a schema is not supported: every draft would have to "
    "be checked against it. Leave it out, and ask for the form in the prompt"
)
_TOOLS = "calling tools is not supported: leave it out"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "response_format": (({"type": "text"},), _CONSTRAINED),
    "grammar": ((), _CONSTRAINED),
    "structured_outputs": ((), _CONSTRAINED),
    "tools": (([],), _TOOLS),
    "tool_choice": (("none",), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none",), _TOOLS),
    "echo": ((False,), "the prompt is not sent back: leave it out"),
    "best_of": ((1,), "answers are not ranked: ask for n answers and choose"),
    "suffix": (("",), "text is only continued at its end: leave it out"),
}
"""Fields that other servers take: values that ask for nothing, which are allowed, and the reason
why others are refused."""


def refusal(name: str, value: Any) -> str | None:
    """Why a field is refused, None where it is a known one or asks for nothing."""
    if name.startswith("guided_"):
        return _CONSTRAINED
    harmless, reason = REFUSED.get(name, ((), None))
    return None if reason is None or value in harmless else reason
