"""One answer on its way: what `batch.py` keeps of a request between its arrival and its end."""

import dataclasses

from dflash_jax.decoding.suffix import SuffixAutomaton
from dflash_jax.serving.opening import Answer, is_greedy
from dflash_jax.serving.output import Output
from dflash_jax.serving.request import Completion, DecodeStats, FinishReason, SamplingParams
from dflash_jax.serving.scheduler import Entry


@dataclasses.dataclass(eq=False)
class Row(Entry):
    """A waiting, running or finished answer; `length` and `computed` are the scheduler's.

    Attributes:
        prompt: ids that came with the request.
        seed: what its draws are made from, whether the user gave it or not.
        ends: ids that end it.
        output: text, ids and log-probabilities as they become final.
        choice: which of the request's n answers it is.
        deadline: monotonic time after which it is cancelled; None = never.
        generated: every committed id, those behind the end included: what the arenas hold.
        error: why it was aborted.
        suffixes: of its text, while it decodes with speculation "suffix".
    """

    prompt: list[int] = dataclasses.field(kw_only=True)
    params: SamplingParams = dataclasses.field(kw_only=True)
    seed: int = dataclasses.field(kw_only=True)
    ends: frozenset[int] = dataclasses.field(kw_only=True)
    output: Output = dataclasses.field(kw_only=True)
    choice: int = 0
    deadline: float | None = None
    generated: list[int] = dataclasses.field(default_factory=list)
    error: str | None = None
    suffixes: SuffixAutomaton | None = None
    stats: DecodeStats = dataclasses.field(default_factory=DecodeStats)

    @property
    def token_ids(self) -> list[int]:
        """Ids of the answer so far."""
        return self.output.token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.output.finish_reason

    @property
    def greedy(self) -> bool:
        """Whether the greedy programs will do."""
        return is_greedy(self.params)

    @property
    def held(self) -> list[int]:
        """Tokens whose K/V its slot holds while it decodes: all but the anchor.

        Before the first token that is the prompt; when it starts again, its answer so far too.
        """
        return [*self.prompt, *self.generated[:-1]]

    @property
    def anchor(self) -> int | None:
        """The token after `held` where it is known."""
        return self.generated[-1] if self.generated else None

    @property
    def answer(self) -> Answer:
        return Answer(self.params, self.seed, self.ends, self.prompt, self.generated)

    def completion(self) -> Completion:
        """The answer as it is, the only choice of its request."""
        answer = Completion(
            text=self.output.text,
            token_ids=self.output.token_ids,
            finish_reason=self.finish_reason or "abort",
            prompt_token_ids=self.prompt,
            logprobs=self.output.logprobs,
            stats=self.stats,
            error=self.error,
        )
        answer.choices.append(answer)
        return answer
