"""Chat templates: a list of messages becomes one string, as the model's template says.

Templates come with checkpoints, so they run in a jinja sandbox that can change nothing. Names and
whitespace rules are those that templates are written for (`raise_exception`, `strftime_now`,
`tojson`, `trim_blocks`). Nothing here knows about tokens; `text.py` encodes the string.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_jax.errors import RequestError


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        """`special_tokens` maps names such as `bos_token` to their text.

        Raises `RequestError` if `source` is not a jinja template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise RequestError(f"the model's chat template is not valid jinja: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, **variables: Any
    ) -> str:
        """The whole conversation as text; `RequestError` where the template refuses it."""
        context = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **context
            )
        except (TemplateError, TypeError) as error:
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}; each message "
                'needs the form {"role": ..., "content": "text"}, with roles that the model knows'
            ) from error


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(value: Any, **options: Any) -> str:
    """jinja's own filter escapes <, > and & for web pages, which a model has never seen."""
    return json.dumps(value, **{"ensure_ascii": False, **options})
