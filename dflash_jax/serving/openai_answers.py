"""From completions and pieces to the JSON of OpenAI-compatible answers; pure.

`Answer` knows what all documents of one response share. Both endpoints send whole answers and
chunks of a stream; what DFlash did stands in the extension field `dflash` of each. Requests are
read in `openai_api.py`.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from dflash_jax.serving.openai_api import Kind
from dflash_jax.serving.output import Piece, TokenLogprob
from dflash_jax.serving.request import Completion, DecodeStats
from dflash_jax.serving.text import TextStream
from dflash_jax.serving.token_texts import TokenTexts

_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have."""


class Answer:
    """The documents of one response, whole or as chunks.

    Args:
        choices: how many answers it holds, over all prompts.
        token_texts: None where the model has no tokenizer: a token's text is its id then.
    """

    def __init__(
        self,
        kind: Kind,
        request_id: str,
        model: str,
        created: int,
        *,
        choices: int,
        token_texts: TokenTexts | None,
    ):
        self._chat = kind == "chat"
        self._head = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{request_id}",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        shape = ChatLogprobs if self._chat else CompletionLogprobs
        self._logprobs = [shape(token_texts) for _ in range(choices)]
        self._greeted: set[int] = set()

    def whole(self, completions: Sequence[Completion], dflash: dict[str, Any]) -> dict[str, Any]:
        """The response of a request that does not stream; a completion for each prompt."""
        choices = []
        for one in (choice for completion in completions for choice in completion.choices):
            choices.append(
                self._choice(len(choices), one.text, one.token_ids, one.logprobs, one.finish_reason)
            )
        return {
            **self._head,
            "object": "chat.completion" if self._chat else "text_completion",
            "choices": choices,
            "usage": usage(completions),
            "dflash": dflash,
        }

    def chunk(self, index: int, piece: Piece, dflash: dict[str, Any]) -> dict[str, Any]:
        """What one step added to choice `index`."""
        logprobs = self._logprobs[index].read(piece.token_ids, piece.logprobs)
        content: dict[str, Any] = {"text": piece.text}
        if self._chat:
            delta: dict[str, Any] = {"content": piece.text}
            if index not in self._greeted:
                self._greeted.add(index)
                delta = {"role": "assistant", **delta}
            content = {"delta": delta}
        choice = {"index": index, **content, "logprobs": logprobs}
        choice["finish_reason"] = piece.finish_reason
        return {**self._chunk_head(), "choices": [choice], "dflash": dflash}

    def last(self, completions: Sequence[Completion]) -> dict[str, Any]:
        """The chunk that `stream_options.include_usage` asks for."""
        return {**self._chunk_head(), "choices": [], "usage": usage(completions)}

    def _chunk_head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind}

    def _choice(
        self,
        index: int,
        text: str,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprob] | None,
        finish_reason: str,
    ) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {
            "index": index,
            **content,
            "logprobs": self._logprobs[index].read(token_ids, logprobs),
            "finish_reason": finish_reason,
        }


def usage(completions: Sequence[Completion]) -> dict[str, Any]:
    """Tokens that came and were delivered; `cached_tokens` were not computed again."""
    prompt = sum(len(one.prompt_token_ids) for one in completions)
    # The other choices of one request share its prompt, and so what was taken over for it.
    cached = sum(one.stats.reused_prompt_tokens for one in completions)
    delivered = sum(len(choice.token_ids) for one in completions for choice in one.choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": delivered,
        "total_tokens": prompt + delivered,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def figures(
    request_id: str, completions: Sequence[Completion], *, max_draft_len: int, seed: int | None
) -> dict[str, Any]:
    """How a request was decoded, over all its choices: the extension field `dflash`.

    Args:
        max_draft_len: K of the engine; what is said is the request's own, 0 when it did not draft.
        seed: the request's, of its first choice; None: it gave none.
    """
    all_stats = [choice.stats for one in completions for choice in one.choices]
    first, pooled = all_stats[0], _pooled(all_stats)
    stops = [s.stopped_drafting_at for s in all_stats if s.stopped_drafting_at is not None]
    return {
        "request_id": request_id,
        "speculation": first.speculation,
        "max_draft_len": 0 if first.speculation == "none" else max_draft_len,
        "acceptance_length": pooled.acceptance_length if pooled.num_rounds else None,
        "num_rounds": pooled.num_rounds,
        "num_drafts": pooled.num_drafts,
        "num_accepted_drafts": pooled.num_accepted_drafts,
        "reused_prompt_tokens": first.reused_prompt_tokens,
        "context_reused_tokens": first.context_reused_tokens,
        "stopped_drafting_at": min(stops, default=None),
        "recoveries": max(stats.recoveries for stats in all_stats),
        "unqualified": first.unqualified,
        "notes": list(dict.fromkeys(note for stats in all_stats for note in stats.notes)),
        "seed": seed,
    }


def event(document: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    text = document if isinstance(document, str) else json.dumps(document)
    return f"data: {text}\n\n".encode()


def _pooled(all_stats: Sequence[DecodeStats]) -> DecodeStats:
    rounds = ("acceptance_lengths", "drafts_per_round", "accepted_drafts_per_round")
    joined = {name: [n for stats in all_stats for n in getattr(stats, name)] for name in rounds}
    return dataclasses.replace(DecodeStats(), **joined)


class ChatLogprobs:
    """Log-probabilities of one choice as /v1/chat/completions shows them."""

    def __init__(self, texts: TokenTexts | None):
        self._texts = texts

    def read(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        """Of the next tokens; None where they were not asked for."""
        if logprobs is None:
            return None
        entries = [
            self._entry(one.token_id, one.logprob)
            | {"top_logprobs": [self._entry(*top) for top in known(one)]}
            for one in logprobs
        ]
        return {"content": entries, "refusal": None}

    def _entry(self, index: int, logprob: float) -> dict[str, Any]:
        return {
            "token": token_text(self._texts, index),
            "logprob": finite(logprob),
            "bytes": None if self._texts is None else self._texts.bytes(index),
        }


class CompletionLogprobs:
    """Log-probabilities of one choice as /v1/completions shows them.

    `text_offset` is where in the choice's text a token begins, in characters; a piece of a
    character begins where the character does.
    """

    def __init__(self, texts: TokenTexts | None):
        self._texts = texts
        self._stream = None if texts is None else TextStream(texts.tokenizer)
        self._offset = 0

    def read(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprob] | None
    ) -> dict[str, Any] | None:
        """Of the next tokens; None where they were not asked for."""
        if logprobs is None:
            return None
        return {
            "tokens": [token_text(self._texts, one.token_id) for one in logprobs],
            "token_logprobs": [finite(one.logprob) for one in logprobs],
            "top_logprobs": [self._top(one) for one in logprobs],
            "text_offset": [self._next_offset(index) for index in token_ids],
        }

    def _top(self, one: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens and the chosen one, which need not be among them."""
        tops = [*known(one), (one.token_id, one.logprob)]
        return {token_text(self._texts, index): finite(logprob) for index, logprob in tops}

    def _next_offset(self, index: int) -> int:
        begins = self._offset
        if self._stream is not None:
            self._offset += len(self._stream.push([index]))
        return begins


def known(one: TokenLogprob) -> list[tuple[int, float]]:
    """The likeliest tokens; a vocabulary smaller than the list ends in ids below 0."""
    return [(index, logprob) for index, logprob in one.top if index >= 0]


def token_text(texts: TokenTexts | None, index: int) -> str:
    """A token as text; its number where there is no tokenizer."""
    return str(index) if texts is None else texts.text(index)


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, _LEAST_LOGPROB)
