"""From what is asked to rows that may queue: prompts become ids, parameters are held to the model.

Every request is checked by itself, so that a bad one harms no other. What parameters mean on their
own is `option_rules.py`'s; when rows are queued and run is `llm.py`'s business.
"""

import logging
import operator
import secrets
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from dflash_jax.arena.sizes import MAX_ENDS
from dflash_jax.config import ResolvedConfig
from dflash_jax.errors import RequestError
from dflash_jax.serving.output import Output
from dflash_jax.serving.request import MAX_SEED, Completion, SamplingParams, sample_seed
from dflash_jax.serving.row import Row
from dflash_jax.serving.stopping import end_ids
from dflash_jax.serving.text import Tokenizer

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class Intake(NamedTuple):
    """What requests are held to.

    Attributes:
        tokenizer: None where the target's folder has none: prompts are ids then.
        eos_token_ids: the model's own ends.
    """

    config: ResolvedConfig
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]

    def check(self, prompt: Prompt, params: SamplingParams) -> list[int] | RequestError:
        """The prompt's ids, or why the request cannot be served."""
        try:
            return self.ids(prompt, params)
        except RequestError as error:
            return error

    def ids(self, prompt: Prompt, params: SamplingParams) -> list[int]:
        """The prompt's ids.

        Raises:
            RequestError: the request cannot be served.
        """
        params.check()
        self._check_params(params)
        ids = self._encode(prompt)
        _check_length(ids, params, self.config.max_seq_len)
        return ids

    def rows(self, ids: list[int], params: SamplingParams, timeout: float | None) -> list[Row]:
        """The n answers of a checked request, ready to queue.

        Args:
            timeout: seconds from now after which it is aborted; None = never.
        """
        seed = secrets.randbelow(MAX_SEED + 1) if params.seed is None else params.seed
        ends = end_ids(params, self.eos_token_ids)
        deadline = None if timeout is None else time.monotonic() + timeout
        rows = [
            Row(
                0,
                prompt=ids,
                params=params,
                seed=sample_seed(seed, choice),
                ends=ends,
                output=Output(self.tokenizer, params, ends),
                choice=choice,
                deadline=deadline,
            )
            for choice in range(params.n)
        ]
        for row in rows:
            row.stats.speculation = self.config.speculation if params.speculate else "none"
            row.stats.unqualified = self.config.unqualified
        return rows

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError(
                    "this target's folder has no tokenizer.json: give token ids instead of text"
                )
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, Iterable):
            raise RequestError(f"prompt {prompt!r} is neither text nor a sequence of token ids")
        return [_token_id(token, self.config.target.vocab_size) for token in prompt]

    def _check_params(self, params: SamplingParams) -> None:
        """What the parameters ask of this model.

        Raises:
            RequestError: it has no text, no such id, or too many ends.
        """
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need the target's tokenizer.json: use stop_token_ids")
        ends = end_ids(params, self.eos_token_ids)
        if len(ends) > MAX_ENDS:
            raise RequestError(
                f"{len(ends)} end ids (the model's and stop_token_ids): at most {MAX_ENDS} are "
                "possible; name fewer stop_token_ids"
            )
        for token in params.logit_bias or ():
            _token_id(token, self.config.target.vocab_size)


def listed(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list."""
    if isinstance(prompts, str):
        return [prompts]
    first = prompts[0] if len(prompts) else ()
    single = not isinstance(first, (str, Sequence)) and not hasattr(first, "__len__")
    return [prompts] if single else list(prompts)  # type: ignore[list-item]


def refused(error: RequestError) -> Completion:
    """The answer of a request that never queued."""
    logger.warning("a request was refused: %s", error)
    answer = Completion("", [], "abort", [], error=str(error))
    answer.choices.append(answer)
    return answer


def _token_id(token: object, vocab_size: int) -> int:
    try:
        # Takes NumPy's whole numbers and no float, which int() would cut.
        index = -1 if isinstance(token, bool) else operator.index(token)  # type: ignore[arg-type]
    except TypeError:
        index = -1
    if not 0 <= index < vocab_size:
        raise RequestError(
            f"token id {token!r} is outside the vocabulary: whole numbers from 0 to "
            f"{vocab_size - 1} are needed"
        )
    return index


def _check_length(ids: Sequence[int], params: SamplingParams, served: int) -> None:
    if not ids:
        raise RequestError("the prompt is empty: at least one token is needed")
    total = len(ids) + params.max_tokens
    if total > served:
        room = served - len(ids)
        remedy = f"max_tokens <= {room}" if room > 0 else "a shorter prompt"
        raise RequestError(
            f"{len(ids)} prompt tokens + max_tokens={params.max_tokens} = {total} is beyond the "
            f"served length of {served}: set {remedy}, or start with max_seq_len >= {total}"
        )
