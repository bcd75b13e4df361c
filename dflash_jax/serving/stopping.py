"""Where an answer ends inside a committed run: end ids and the token limit, one rule for all modes.

Pure functions on ids. A round commits up to K + 1 tokens; what lies behind the first end is cut.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from dflash_jax.serving.request import FinishReason, SamplingParams


class Ending(NamedTuple):
    """How many of the new tokens are kept, and why the answer ends there (None: it goes on)."""

    kept: int
    reason: FinishReason | None


def end_ids(params: SamplingParams, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Ids that end this request: its own, and the model's unless it ignores them."""
    own = frozenset(params.stop_token_ids)
    return own if params.ignore_eos else own | frozenset(eos_token_ids)


def find_end(new: Sequence[int], already: int, limit: int, ends: Collection[int]) -> Ending:
    """The end of an answer of `already` tokens that `new` ones follow.

    A stop inside the limit wins over the limit; the end id itself is kept.

    Worked example: new [10, 11, 2, 20], ends {2}: with room for 3 -> 3 kept, "stop"; with room
    for 2 -> 2 kept, "length".
    """
    room = limit - already
    for index, token in enumerate(new[:room]):
        if token in ends:
            return Ending(index + 1, "stop")
    return Ending(room, "length") if len(new) >= room else Ending(len(new), None)
