"""What the corpus asks of the model that answers: a tokenizer that chats, and an engine at a batch.

Serving and training do not know each other, so these are contracts; the command line lends an `LLM`
that fulfils them. Nothing here runs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from dflash_jax.errors import ConfigError


@runtime_checkable
class ChatTokenizer(Protocol):
    """The target's tokenizer with its chat template: the one that serving uses."""

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_ids` can work at all."""
        ...

    @property
    def eos_token_ids(self) -> Sequence[int]:
        """Ids that end an answer."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text."""
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of ids."""
        ...

    def chat_ids(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Ids of a conversation up to where the answer begins."""
        ...


@runtime_checkable
class AnswerEngine(Protocol):
    """What answers prompts: a thin wrapper of an `LLM` without a drafter, at a high batch."""

    @property
    def tokenizer(self) -> Any:
        """A `ChatTokenizer`, or None where the target's folder has no tokenizer."""
        ...

    def answers(
        self,
        prompts: Sequence[list[int]],
        *,
        max_tokens: int,
        temperatures: Sequence[float],
        seeds: Sequence[int],
    ) -> Sequence[tuple[list[int], str]]:
        """Token ids (end id included) and finish reason of each prompt, in order.

        Each prompt has its own temperature (0 = greedy) and seed; its answer may depend on these
        and on its ids, not on what was answered before.
        """
        ...

    def close(self) -> None:
        """All prompts are answered: frees the memory for what comes next."""
        ...


def chat_tokenizer(engine: AnswerEngine) -> ChatTokenizer:
    """The engine's tokenizer, checked: a drafter is trained on chats, so a template must be there.

    Raises:
        ConfigError: no tokenizer, or no chat template.
    """
    if engine.tokenizer is None:
        raise ConfigError("the target's folder has no tokenizer.json: add it, prompts are text")
    if not engine.tokenizer.has_chat_template:
        raise ConfigError(
            "the target has no chat template, so its prompts would not be what a server feeds it: "
            "add chat_template.jinja (or chat_template in tokenizer_config.json) to its folder"
        )
    return engine.tokenizer
