"""From a request's parameters to what the device is told when it takes a slot.

NumPy on the host; `decoding/opening.py` packs it, the device's side is `decoding/state.py`.
"""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np

from dflash_jax.arena.sizes import MAX_BIAS, MAX_ENDS
from dflash_jax.decoding.opening import opening_of, padded_ids
from dflash_jax.decoding.options import SlotOptions, TokenCounts
from dflash_jax.decoding.state import Opening
from dflash_jax.serving.request import SamplingParams


class Answer(NamedTuple):
    """One answer as the device must know it.

    Attributes:
        seed: of its draws.
        ends: ids that end it.
        prompt: tokens that came with the request.
        generated: tokens of the answer that are committed already (it is prefilled again).
    """

    params: SamplingParams
    seed: int
    ends: Collection[int]
    prompt: Sequence[int]
    generated: Sequence[int] = ()


def make_opening(
    slot: int,
    answer: Answer,
    vocab_size: int,
    *,
    kv_kept: int = 0,
    context_kept: int = 0,
    pages: Sequence[int] | None = None,
) -> Opening:
    """The argument of the `open` program; `pages` is the slot's whole row of the page table."""
    params = answer.params
    left = params.max_tokens - len(answer.generated)
    return opening_of(
        slot,
        left,
        _options(answer),
        _counts(answer, vocab_size),
        drafting=params.speculate,
        kv_kept=kv_kept,
        context_kept=context_kept,
        pages=pages,
    )


def is_greedy(params: SamplingParams) -> bool:
    """Whether the best token is all that it asks for: the greedy program will do."""
    return params.temperature == 0 and not (
        params.logit_bias
        or params.min_tokens
        or params.logprobs is not None
        or _counts_tokens(params)
    )


def _counts_tokens(params: SamplingParams) -> bool:
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    )


def _options(answer: Answer) -> SlotOptions:
    params = answer.params
    bias = dict(params.logit_bias or {})

    def real(value: float) -> np.ndarray:
        return np.array([value], np.float32)

    strengths = np.zeros((1, MAX_BIAS), np.float32)
    strengths[0, : len(bias)] = list(bias.values())
    fields: dict[str, Any] = dict(
        temperatures=real(params.temperature),
        seeds=np.array([answer.seed], np.uint32),
        seeded=np.array([params.seed is not None]),
        top_k=np.array([params.top_k], np.int32),
        top_p=real(params.top_p),
        min_p=real(params.min_p),
        presence=real(params.presence_penalty),
        frequency=real(params.frequency_penalty),
        repetition=real(params.repetition_penalty),
        bias_ids=padded_ids(bias, MAX_BIAS),
        bias_values=strengths,
        ban_ids=padded_ids(sorted(answer.ends), MAX_ENDS),
        min_positions=np.array([len(answer.prompt) + params.min_tokens], np.int32),
        logprobs=np.array([params.logprobs is not None]),
    )
    return SlotOptions(**fields)


def _counts(answer: Answer, vocab_size: int) -> TokenCounts:
    seen = np.zeros((1, vocab_size), np.bool_)
    counts = np.zeros((1, vocab_size), np.int32)
    if _counts_tokens(answer.params):
        seen[0, list(answer.prompt)] = True
        np.add.at(counts[0], np.asarray(answer.generated, np.int64), 1)
    return TokenCounts(seen, counts)  # type: ignore[arg-type]
