"""How fast one engine decodes one prompt, for `demo`: the same measure with and without a drafter.

A rate is tokens after the first over the time of a whole answer less the time of a one-token
answer to the same prompt: decoding alone, without loading, compiling or prompt processing.
"""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dflash_jax import LLM, Completion

MEASURED = (
    "tokens per second of decoding, warm: tokens after the first, over the time of the answer less "
    "that of its first token (loading, compiling and the prompt are left out)"
)


class Measured(NamedTuple):
    """One answer. `tokens_per_second` is None for an answer of one token."""

    completion: "Completion"
    tokens_per_second: float | None


def measure(llm: "LLM", ids: list[int], max_tokens: int) -> Measured:
    """Decodes greedily and times it; the engine should have answered something before."""
    _, first = _timed(llm, ids, 1)
    completion, whole = _timed(llm, ids, max_tokens)
    decoded = len(completion.token_ids) - 1
    # A first token that took longer than a short answer is the clock's noise.
    return Measured(completion, decoded / max(whole - first, 1e-6) if decoded else None)


def median_rate(measured: Sequence[Measured]) -> float | None:
    """The median over the answers that have a rate."""
    rates = [one.tokens_per_second for one in measured if one.tokens_per_second is not None]
    return statistics.median(rates) if rates else None


def pooled_acceptance_length(measured: Sequence[Measured]) -> float | None:
    """Tokens delivered by rounds over rounds, of all answers together; None without a round."""
    lengths = [length for one in measured for length in one.completion.stats.acceptance_lengths]
    return sum(lengths) / len(lengths) if lengths else None


def _timed(llm: "LLM", ids: list[int], max_tokens: int) -> "tuple[Completion, float]":
    from dflash_jax import SamplingParams

    begun = time.perf_counter()
    (completion,) = llm.generate([ids], SamplingParams(max_tokens=max_tokens))
    return completion, time.perf_counter() - begun


def verdict(speedup: float | None) -> str:
    """What a ratio of DFlash to plain decoding means, in a sentence."""
    if speedup is None:
        return "the answers are too short to compare speeds"
    if speedup < 1:
        return f"DFlash is slower than plain decoding here: {speedup:.2f} × its speed"
    return f"DFlash decodes {speedup:.2f} × as fast as plain decoding here"
