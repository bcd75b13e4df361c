"""Where an answer ends inside a committed run: end ids and the token limit, one rule for all modes.

Pure functions on ids; stop strings are looked for in the text (`output.py`). A round commits up to
K + 1 tokens; what lies behind the first end is cut.
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


def find_end(
    new: Sequence[int], already: int, limit: int, ends: Collection[int], min_tokens: int = 0
) -> Ending:
    """The end of an answer of `already` tokens that `new` ones follow.

    A stop inside the limit wins over the limit; the end id itself is kept. Among the first
    `min_tokens` ids of the answer an end id ends nothing (the device forbids them there).

    Worked example: new [10, 11, 2, 20], ends {2}: with room for 3 -> 3 kept, "stop"; with room
    for 2 -> 2 kept, "length"; with room for 8 and min_tokens 3 -> 4 kept, None.
    """
    room = limit - already
    for count, token in enumerate(new[:room], 1):
        if token in ends and already + count > min_tokens:
            return Ending(count, "stop")
    return Ending(room, "length") if len(new) >= room else Ending(len(new), None)
