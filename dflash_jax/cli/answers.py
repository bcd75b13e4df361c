"""The engine that `dflash-jax train` lends to the trainer: an `LLM` that answers many prompts.

It starts when the first prompt is answered, so a run whose answers are all there compiles no engine
and a bad prompt file costs no wait; and it is let go before the training needs the memory. What
is asked, and what is kept, is the trainer's business.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dflash_jax import LLM
    from dflash_jax.serving.text import Tokenizer


class Answers:
    """An `LLM` as the trainer's `AnswerEngine`.

    Args:
        tokenizer: the target's; None: its folder has none.
        start: starts the engine, without a drafter. With `prefix_reuse`, rounding would depend on
            what slots held before, and a resumed run might answer otherwise: leave it off.
    """

    def __init__(self, tokenizer: "Tokenizer | None", start: "Callable[[], LLM]"):
        self._tokenizer, self._start = tokenizer, start
        self._llm: LLM | None = None

    @property
    def tokenizer(self) -> "Tokenizer | None":
        """The target's."""
        return self._tokenizer

    def answers(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> list[tuple[list[int], str]]:
        """Token ids and finish reason of each prompt, in order."""
        from dflash_jax import SamplingParams

        if self._llm is None:
            self._llm = self._start()
        params = [
            SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
            for temperature, seed in zip(temperatures, seeds, strict=True)
        ]
        given = self._llm.generate([list(ids) for ids in prompts], params)
        return [(one.token_ids, one.finish_reason) for one in given]

    def close(self) -> None:
        """Frees weights and arenas; a later call would start the engine again."""
        self._llm = None
